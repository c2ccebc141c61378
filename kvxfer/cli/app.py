# SPDX-License-Identifier: Apache-2.0
"""The Typer application: what the ``kvxfer`` command offers, and its exit codes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvxfer.cli.demo import MIN_PROMPT_TOKENS, DemoOptions, run_demo

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Keep and share vLLM's KV cache outside the accelerator.",
)


@app.callback()
def kvxfer() -> None:
    """Keep and share vLLM's KV cache outside the accelerator."""


@app.command()
def demo(
    model: Annotated[
        Path | None,
        typer.Option(
            help="Folder with a Hugging Face checkpoint. Default: a small Llama with real-sized "
            "random weights (about 205 MB), made on the spot; nothing is downloaded.",
            exists=True,
            file_okay=False,
            resolve_path=True,
        ),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            help="Store that the engines share, e.g. lmdb:///path?capacity=8GiB. Default: a new "
            "embedded store in a temporary folder."
        ),
    ] = None,
    prompt_tokens: Annotated[
        int, typer.Option(min=MIN_PROMPT_TOKENS, help="Tokens in each prompt.")
    ] = 1500,
    prompts: Annotated[int, typer.Option(min=1, help="Number of prompts.")] = 4,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the model, the stored values and the logs.")
    ] = False,
) -> None:
    """Save KV cache in one vLLM engine and load it in another.

    Engine A, a process of its own, computes random prompts, saves their KV cache and ends.
    Engine B, a new process on the same store, meets the same prompts, loads the cache and
    computes only the rest. Then a table: prompt tokens, tokens that hit the store, time to the
    first token cold (A) and warm (B), bytes and GB/s moved, and whether the outputs of both are
    identical. Both run greedy and in float32, offline, on the CPU or what vLLM was built for.

    Exit code 1 if a token differs or nothing hit, with the reason and the path of vLLM's log.
    """
    options = DemoOptions(
        model=model, store=store, prompt_tokens=prompt_tokens, num_prompts=prompts, keep=keep
    )
    raise typer.Exit(run_demo(options, Console()))
