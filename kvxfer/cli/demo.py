# SPDX-License-Identifier: Apache-2.0
"""The main job on real engines: engine A saves what it computed and ends, engine B loads it.

The engines are separate processes that share nothing but the store. The model is the user's, or a
small Llama with real-sized random weights, made on the spot; prompts are random.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

import kvxfer.stores
from kvxfer.cli.comparison import Comparison
from kvxfer.cli.demo_model import (
    FIRST_TOKEN,
    OUTPUT_TOKENS,
    DemoModel,
    make_model,
    read_model,
)
from kvxfer.cli.engine_client import EngineReport, run_engine
from kvxfer.cli.engine_job import CORRUPT_VARIABLE, EngineJob
from kvxfer.cli.local_pool import local_pool
from kvxfer.errors import KvxferError
from kvxfer.keys import FORMAT

PROMPT_SEED = 1
STORE_CAPACITY_BYTES = 1 << 30
CHUNKS_IN_STORE = 64
"""At least: an embedded store takes no value of a larger share of it."""
LOCAL_POOL = "mooncake"
"""For ``store``: a Mooncake pool of this host, with a master of its own, ended with the demo."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What to run; ``model`` and ``store`` are made in a temporary folder where not given.

    ``dtype``, ``prompt_tokens``: None for what suits the model.
    """

    model: Path | None = None
    dtype: str | None = None
    store: str | None = None
    prompt_tokens: int | None = None
    num_prompts: int = 4
    keep: bool = False


def run_demo(options: DemoOptions, console: Console) -> int:
    """Run the demo and return the exit code: 0 where outputs are identical and something hit."""
    with _WorkFolder(options.keep) as folder:
        reasons = _run_in(folder.path, options, console)
        for reason in reasons:
            console.print(f"[red]FAILED[/red]: {escape(reason)}", soft_wrap=True, highlight=False)
        if reasons:
            folder.keep_logs = True
        if reasons or options.keep:
            for log in folder.logs:
                owner = "Mooncake" if log.name.startswith("mooncake") else "vLLM"
                console.print(f"log of {owner}: {log}", soft_wrap=True)
        return 1 if reasons else 0


def random_prompts(num_prompts: int, prompt_tokens: int, vocab_size: int) -> list[list[int]]:
    """Return token ids without any period: a block at a wrong place changes the outputs."""
    random = np.random.default_rng(PROMPT_SEED)
    ids = random.integers(FIRST_TOKEN, vocab_size, (num_prompts, prompt_tokens))
    return [[int(token) for token in row] for row in ids]


def _run_in(folder: Path, options: DemoOptions, console: Console) -> list[str]:
    """Run both engines, show the table and return why the demo failed."""
    try:
        comparison = _compare_engines(options, folder, console)
    except KvxferError as error:
        return [str(error)]
    console.print(comparison.table())
    return comparison.failures()


def _compare_engines(options: DemoOptions, folder: Path, console: Console) -> Comparison:
    if os.environ.get(CORRUPT_VARIABLE) == "1":
        console.print(f"{CORRUPT_VARIABLE}=1: values are damaged as they are saved")
    with _progress(console) as progress, ExitStack() as servers:
        model = _model(folder, options, progress)
        prompt_tokens = model.prompt_tokens(options.prompt_tokens)
        store_bytes = _store_bytes(model, options.num_prompts, prompt_tokens)
        cache_prefix = f"demo-{secrets.token_hex(8)}"  # unique: engine A is cold in any store
        store = options.store or f"lmdb://{folder / 'store'}?capacity={store_bytes}"
        if store == LOCAL_POOL:
            with _stage(progress, "starting a Mooncake master and its memory", 1) as step:
                store = servers.enter_context(local_pool(folder, store_bytes))
                step("started")
        job = EngineJob(
            model=str(model.folder),
            dtype=model.dtype,
            connector_settings={"store": store, "cache_prefix": cache_prefix},
            prompts=random_prompts(options.num_prompts, prompt_tokens, model.vocab_size),
            output_tokens=OUTPUT_TOKENS,
        )
        # A user's model may compute otherwise in other chunks: vLLM's own hit is its reference.
        first = dataclasses.replace(job, again=options.model is not None)
        try:
            cold = _run("engine A: computes and saves", first, folder / "engine-a.log", progress)
            warm = _run("engine B: loads", job, folder / "engine-b.log", progress)
        finally:
            if options.store not in (None, LOCAL_POOL) and not options.keep:
                _remove_values(store, cache_prefix)
    return Comparison(prompt_tokens, cold, warm, rounds=model.dtype != "float32")


def _model(folder: Path, options: DemoOptions, progress: Progress) -> DemoModel:
    """Return the user's model, as vLLM describes it, or make our own."""
    if options.model is None:
        with _stage(progress, "making a small Llama with random weights", 1) as step:
            model = make_model(folder / "model")
            step("made")
        return dataclasses.replace(model, dtype=options.dtype or model.dtype)
    with _stage(progress, f"asking vLLM how {options.model.name} is cached", 1) as step:
        model = read_model(options.model, options.dtype or "auto")
        step("answered")
    return model


def _run(title: str, job: EngineJob, log: Path, progress: Progress) -> EngineReport:
    # One step for the start, one for each time that a prompt is computed, one for the end.
    with _stage(progress, title, len(job.prompts) * (1 + job.again) + 2) as step:
        return run_engine(job, log, step)


def _store_bytes(model: DemoModel, num_prompts: int, prompt_tokens: int) -> int:
    """Return twice what the prompts need of a store."""
    needed = num_prompts * model.stored_bytes(prompt_tokens + OUTPUT_TOKENS)
    return max(STORE_CAPACITY_BYTES, 2 * needed, CHUNKS_IN_STORE * model.chunk_bytes)


def _remove_values(store: str, cache_prefix: str) -> None:
    handle = kvxfer.stores.open_store(store)
    try:
        handle.remove_prefix(f"{FORMAT}/{cache_prefix}/".encode())
    finally:
        handle.close()


class _WorkFolder:
    """A temporary folder for the model, the store and the logs of one run.

    Removed when the run ends, except for the logs of a failed one; all of it stays with ``keep``.
    """

    def __init__(self, keep: bool) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="kvxfer-demo-"))
        self.keep_logs = False
        self._keep = keep

    def __enter__(self) -> _WorkFolder:
        return self

    def __exit__(self, *error: object) -> None:
        if self._keep:
            return
        for name in ("model", "store") if self.keep_logs and self.logs else (".",):
            shutil.rmtree(self.path / name, ignore_errors=True)

    @property
    def logs(self) -> list[Path]:
        """The engines' logs so far, in the order of the engines."""
        return sorted(self.path.glob("*.log"))


def _progress(console: Console) -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console)


@contextmanager
def _stage(progress: Progress, title: str, num_steps: int) -> Iterator[Callable[[str], None]]:
    """Show one line of progress; the function that it yields takes an event and moves the bar."""
    task = progress.add_task(title, total=num_steps)
    yield lambda event: progress.advance(task)
    progress.stop_task(task)
