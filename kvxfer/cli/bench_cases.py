# SPDX-License-Identifier: Apache-2.0
"""What ``kvxfer bench`` measures: each case beside what it has to be compared with."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvxfer.blocks import BlockLayout, gather, scatter
from kvxfer.cli.bench_rivals import in_tree_search, torch_copies
from kvxfer.hits import CacheGroup, Coordinator
from kvxfer.stores import open_store

OURS = "kvxfer"
HASH_BYTES = 32
BLOCK_TOKENS = 16
BATCHES = 4
"""Of values that the measured store holds."""
MEMORY_FOLDER = Path("/dev/shm")

Run = Callable[[], object]


@dataclass(frozen=True, slots=True)
class BenchSizes:
    """How much is moved; the defaults leave every CPU's caches and take half a minute."""

    rounds: int = 7
    num_layers: int = 80
    fragment_bytes: int = 16 << 10
    num_blocks: int = 96
    num_values: int = 96
    value_bytes: int = 1 << 20
    prompt_tokens: int = 131_072


@dataclass(frozen=True, slots=True)
class Measured:
    """One case: medians by who did it, and whether more is better."""

    title: str
    unit: str
    more_is_better: bool
    medians: dict[str, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, object]:
        """Return it for programs."""
        return {
            "title": self.title,
            "unit": self.unit,
            "more_is_better": self.more_is_better,
            "medians": self.medians,
        }


def measure_all(sizes: BenchSizes) -> Iterator[Measured]:
    """Yield the cases, each as soon as it is measured."""
    yield from _copies(sizes)
    yield from _store(sizes)
    yield from _lookups(sizes)


def _copies(sizes: BenchSizes) -> Iterator[Measured]:
    """Blocks of many layers to contiguous values and back, beside one memcpy and NumPy."""
    shape = (2 * sizes.num_blocks, sizes.fragment_bytes)
    caches = [np.ones(shape, np.uint8) for _ in range(sizes.num_layers)]
    layout = BlockLayout.from_tensors(caches)
    ids = np.random.default_rng(0).permutation(2 * sizes.num_blocks)[: sizes.num_blocks]
    block_ids = [int(block) for block in ids]
    values = np.empty((sizes.num_blocks, layout.value_bytes), np.uint8)
    source = np.ones_like(values)
    rows = values.reshape(sizes.num_blocks, sizes.num_layers, sizes.fragment_bytes)
    of_layers = [rows[:, layer] for layer in range(sizes.num_layers)]
    torch_gather, torch_scatter = torch_copies(caches, ids, of_layers)

    def numpy_gather() -> None:
        for cache, row in zip(caches, of_layers, strict=True):
            row[:] = cache[ids]

    def numpy_scatter() -> None:
        for cache, row in zip(caches, of_layers, strict=True):
            cache[ids] = row

    memcpy = {"one memcpy": lambda: np.copyto(values, source)}
    kib = f"{sizes.num_layers} layers x {sizes.fragment_bytes >> 10} KiB"
    runs = {OURS: lambda: gather(layout, block_ids, values), "NumPy": numpy_gather, **torch_gather}
    yield _rates(f"gather blocks of {kib}", {**runs, **memcpy}, values.nbytes, sizes.rounds)
    runs = {
        OURS: lambda: scatter(layout, block_ids, values),
        "NumPy": numpy_scatter,
        **torch_scatter,
    }
    yield _rates(f"scatter blocks of {kib}", {**runs, **memcpy}, values.nbytes, sizes.rounds)


def _store(sizes: BenchSizes) -> Iterator[Measured]:
    """Puts and gets of the embedded store beside one memcpy, and its existence checks."""
    data = np.ones((sizes.num_values, sizes.value_bytes), np.uint8)
    target = np.empty_like(data)
    sources, targets = [row.data for row in data], [row.data for row in target]
    num_bytes, batch = data.nbytes, iter(range(1 << 30))
    memcpy = {"one memcpy": lambda: np.copyto(target, data)}
    capacity = BATCHES * num_bytes + (64 << 20)
    parent, where = _place(capacity)
    with tempfile.TemporaryDirectory(prefix="kvxfer-bench-", dir=parent) as folder:
        uri = f"lmdb://{folder}/store?capacity={capacity}&lease_s=0"
        with closing(open_store(uri)) as store:

            def put() -> None:
                store.put_from(_keys(next(batch), sizes.num_values), sources)

            for _ in range(BATCHES + 1):  # full, as in use: pages are written again, not first met
                put()
            label = f"values of {sizes.value_bytes >> 20} MiB, embedded store {where}"
            yield _rates(f"put {label}", {OURS: put, **memcpy}, num_bytes, sizes.rounds)
            keys = _keys(next(batch), sizes.num_values)
            store.put_from(keys, sources)
            get = {OURS: lambda: store.get_into(keys, targets), **memcpy}
            yield _rates(f"get {label}", get, num_bytes, sizes.rounds)
            many = [key for idx in range(8) for key in _keys(idx, 1024)]
            seconds = _medians({OURS: lambda: store.exists(many)}, sizes.rounds)
            per_key = {who: 1e6 * each / len(many) for who, each in seconds.items()}
            yield Measured("existence check, a key", "us", False, per_key)


def _place(num_bytes: int) -> tuple[Path | None, str]:
    """Return where to make a store, and in words: in memory where there is room, else on disk."""
    if MEMORY_FOLDER.is_dir() and shutil.disk_usage(MEMORY_FOLDER).free > 2 * num_bytes:
        return MEMORY_FOLDER, "in memory"
    return None, "on disk"


def _lookups(sizes: BenchSizes) -> Iterator[Measured]:
    """Hit lengths of one long prompt, answers at hand: what the search itself costs."""
    coordinator = Coordinator([CacheGroup("full", BLOCK_TOKENS)], BLOCK_TOKENS, BLOCK_TOKENS)
    num_hashes = sizes.prompt_tokens // BLOCK_TOKENS
    hashes = [idx.to_bytes(HASH_BYTES, "big") for idx in range(num_hashes)]
    for title, flag in (("nothing stored", 0), ("all stored", 1)):
        answers = np.full(num_hashes, flag, np.uint8)

        def exists(
            questions: list[tuple[int, NDArray[np.int32]]], answers: NDArray[np.uint8] = answers
        ) -> list[NDArray[np.uint8]]:
            return [answers[: len(idx)] for _, idx in questions]

        def look(
            exists: Callable[..., list[NDArray[np.uint8]]] = exists,
        ) -> None:
            coordinator.lookup(sizes.prompt_tokens, hashes, exists)

        rival = in_tree_search(sizes.prompt_tokens, BLOCK_TOKENS, hashes, answers.tolist())
        seconds = _medians({OURS: look, **rival}, sizes.rounds)
        medians = {who: 1e3 * each for who, each in seconds.items()}
        yield Measured(f"lookup of {sizes.prompt_tokens:,} tokens, {title}", "ms", False, medians)


def _rates(title: str, runs: Mapping[str, Run], num_bytes: int, rounds: int) -> Measured:
    seconds = _medians(runs, rounds)
    rates = {who: num_bytes / each / 1e9 for who, each in seconds.items()}
    return Measured(title, "GB/s", True, rates)


def _medians(runs: Mapping[str, Run], rounds: int) -> dict[str, float]:
    """Return median seconds of each, taken in turns so that noise meets all alike."""
    times: dict[str, list[float]] = {who: [] for who in runs}
    for _ in range(rounds + 1):
        for who, run in runs.items():
            started = time.perf_counter()
            run()
            times[who].append(time.perf_counter() - started)
    return {who: statistics.median(each[1:]) for who, each in times.items()}  # without warm-up


def _keys(batch: int, count: int) -> Sequence[bytes]:
    return [b"kvx1/bench/%08x/%064x" % (batch, idx) for idx in range(count)]
