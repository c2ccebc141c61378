# SPDX-License-Identifier: Apache-2.0
"""The Typer application: what the ``kvxfer`` command offers, and its exit codes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvxfer.cli.demo import DemoOptions, run_demo
from kvxfer.cli.demo_model import MIN_PROMPT_TOKENS, find_model
from kvxfer.cli.deployment import read_deployment
from kvxfer.cli.explain import read_token_ids, run_explain
from kvxfer.cli.failures import failures_end_the_command
from kvxfer.cli.store_commands import store_app
from kvxfer.errors import ConfigError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Keep and share vLLM's KV cache outside the accelerator.",
)


ENGINE_URL = "http://localhost:8000/metrics"

app.add_typer(store_app, name="store")


ConfigOption = Annotated[
    str | None,
    typer.Option(
        help="JSON, or a file with it: what --kv-transfer-config takes, or vLLM's engine arguments "
        "with a kv_transfer_config among them.",
    ),
]
ModelOption = Annotated[
    Path | None,
    typer.Option(
        help="Folder of the model, a Hugging Face checkpoint; only its configuration is read, and "
        "samples of its weights.",
        exists=True,
        file_okay=False,
        resolve_path=True,
    ),
]


@app.callback()
def kvxfer() -> None:
    """Keep and share vLLM's KV cache outside the accelerator."""


@app.command()
def demo(
    model: Annotated[
        str | None,
        typer.Option(
            help="Folder with a Hugging Face checkpoint, or the name of one in the Hub's cache. "
            "Default: a small Llama with real-sized random weights (about 205 MB), made on the "
            "spot; nothing is downloaded.",
            metavar="FOLDER_OR_NAME",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Type to compute in. Default: the model's own; float32 for the small Llama."
        ),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            help="Store that the engines share, e.g. lmdb:///path?capacity=8GiB; `mooncake` starts "
            "a Mooncake master and some memory for the length of the demo. Default: a new "
            "embedded store in a temporary folder."
        ),
    ] = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(
            min=MIN_PROMPT_TOKENS,
            help="Tokens in each prompt. Default: 1,500, or what the model takes.",
        ),
    ] = None,
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
    identical. Both run greedy and offline, on the CPU or what vLLM was built for.

    With `--model`, engine A computes each prompt twice: outputs of B have to be those of a hit in
    vLLM's own cache. Computed cold, a model may round otherwise.

    Exit code 1 if a token differs or nothing hit, with the reason and the path of vLLM's log, and
    where vLLM does not take the model or caches nothing of it; 2 for a model that is not there.
    """
    with _sentences():
        folder = None if model is None else find_model(model)
    options = DemoOptions(
        model=folder,
        dtype=dtype,
        store=store,
        prompt_tokens=prompt_tokens,
        num_prompts=prompts,
        keep=keep,
    )
    raise typer.Exit(run_demo(options, Console()))


@app.command()
def doctor(
    config: ConfigOption = None,
    model: ModelOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 1 for warnings, too.")
    ] = False,
) -> None:
    """Look for what makes a deployment silently useless, or fail late.

    Checks Python, torch, vLLM, GPU and CuPy; the configuration and every option; block hashes; the
    store, down to a value that is put, read back, compared and removed; with `--model` its cache
    groups and the sizes of what would be stored. Each finding has the way out. Run it as the user
    and in the environment of vLLM.

    Exit code 0 without a fault, 1 with one (`--strict`: or a warning), 2 for a wrong option.
    """
    from kvxfer.cli.doctor import Surroundings, run_doctor  # noqa: PLC0415  # loads every store

    error = None
    try:
        deployment = read_deployment(config, model)
    except ConfigError as unreadable:
        deployment, error = read_deployment(None, model), str(unreadable)
    around = Surroundings(deployment, config_error=error)
    raise typer.Exit(run_doctor(around, Console(), as_json=as_json, strict=strict))


@app.command()
def explain(
    config: ConfigOption = None,
    model: ModelOption = None,
    prompt: Annotated[
        str | None, typer.Option(help="Text of the prompt; the model's tokenizer cuts it.")
    ] = None,
    token_ids: Annotated[
        Path | None,
        typer.Option(
            help="File with the token ids of the prompt: a JSON list, or numbers with blanks "
            "between.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Say what a lookup of a prompt would answer now, and why.

    Shows for each cache group which blocks of the prompt are stored and which of them a hit
    loads. No engine has to run: the model's layers are made without weights, its key names and
    block hashes as its engine would make them, and the store is read without touching it. Give in
    `--config` every engine argument that differs from vLLM's defaults and changes the cache
    (`dtype`, `kv_cache_dtype`, `block_size`, `tensor_parallel_size`, `pipeline_parallel_size`,
    `quantization`, `speculative_config`): other values, other keys.

    Exit code 1 where the model, the configuration or the store cannot be read; a prompt that hits
    nothing is no failure.
    """
    if (prompt is None) == (token_ids is None):
        raise typer.BadParameter("give either --prompt or --token-ids")
    with _sentences():
        ids = None if token_ids is None else read_token_ids(token_ids)
        deployment = read_deployment(config, model)
    if deployment.model is None:
        raise typer.BadParameter("explain needs the model: --model FOLDER, or a model in --config")
    with failures_end_the_command():
        run_explain(deployment, Console(), token_ids=ids, text=prompt, as_json=as_json)


@app.command()
def stats(
    url: Annotated[
        str | None,
        typer.Option(help="Metrics page of a running vLLM server.", show_default=False),
    ] = None,
    store: Annotated[
        str | None, typer.Option(help="URI of a store: what it holds, without any engine.")
    ] = None,
    watch: Annotated[
        float | None, typer.Option(min=0.1, help="Show it anew every so many seconds, and growth.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Show what a running engine counts, or what a store holds.

    Of an engine: hits and why tokens were missed, lookups, bytes and GB/s, queues, failures by
    name. Default: `http://localhost:8000/metrics`. Ends with Ctrl-C under `--watch`.

    Exit code 1 where nobody answers, or the engine runs without kvxfer.
    """
    from kvxfer.cli import stats as live  # noqa: PLC0415  # with kvxfer.observe's definitions
    from kvxfer.cli.opened_store import open_existing  # noqa: PLC0415

    if url is not None and store is not None:
        raise typer.BadParameter("give either --url or --store")

    def look() -> list[live.Row]:
        if store is not None:
            return live.look_at_store(lambda: open_existing(store))
        return live.look_at_engine(url or ENGINE_URL)

    with failures_end_the_command():
        try:
            live.run_stats(look, Console(), watch_s=watch, as_json=as_json)
        except KeyboardInterrupt:
            raise typer.Exit(0) from None


@app.command()
def bench(
    plot: Annotated[
        list[Path] | None,
        typer.Option(help="Write a picture, too: FILE.html (one page) or FILE.png. Repeatable."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each measurement.")] = 7,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Measure what this machine does, beside what it has to be compared with.

    Gathers and scatters of blocks beside NumPy and one memcpy; puts and gets of the embedded
    store, in memory where `/dev/shm` has room; lookups of a prompt of 131,072 tokens. The whole
    suite, with the in-tree connector as a rival, is `make bench` in the repository.

    Exit code 1 where a picture cannot be drawn.
    """
    from kvxfer.cli.bench import run_bench  # noqa: PLC0415  # NumPy's arrays are made there
    from kvxfer.cli.bench_cases import BenchSizes  # noqa: PLC0415

    with failures_end_the_command():
        sizes = BenchSizes(rounds=rounds)
        run_bench(sizes, Console(), as_json=as_json, plots=plot or ())


@contextmanager
def _sentences() -> Iterator[None]:
    """Have what is wrong with an option end the command with its sentence, and exit code 2."""
    try:
        yield
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
