# SPDX-License-Identifier: Apache-2.0
"""The LMDB store beside one memcpy of the same bytes and beside plain py-lmdb.

``place``: a folder on disk, or in memory where there is /dev/shm. Puts run in the steady state of
a full store, in which every put evicts as much as it adds; the first pass over a new file is a
case of its own (``bench_first_put``), because the kernel then allocates every page.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import lmdb
import numpy as np
import pytest

from kvxfer.stores import Outcome, Store, open_store

SMOKE = os.environ.get("KVXFER_BENCH_SMOKE") == "1"

VALUE_BYTES = [64 << 10] if SMOKE else [64 << 10, 1 << 20]
BATCH_BYTES = (1 << 20) if SMOKE else (128 << 20)
NUM_KEYS = 256 if SMOKE else 8192
ROUNDS = 2 if SMOKE else 12

PLACES = ["disk", "memory"]
MEMORY = Path("/dev/shm")
PREFIX = b"kvx1/prefix/model/" + b"d" * 32 + b"/group/stage/h0-8/"


class Batch:
    """Values of one size, targets for them, and keys that are new in each round."""

    def __init__(self, value_bytes: int) -> None:
        self.num_values = BATCH_BYTES // value_bytes
        rng = np.random.default_rng(0)
        self.sources = [rng.integers(0, 255, value_bytes, np.uint8) for _ in range(self.num_values)]
        self.targets = [np.full(value_bytes, 1, np.uint8) for _ in range(self.num_values)]
        self.source_views = [memoryview(source) for source in self.sources]
        self.target_views = [memoryview(target) for target in self.targets]
        self._rounds = itertools.count()

    def new_keys(self) -> list[bytes]:
        number = next(self._rounds)
        return [PREFIX + b"%016x%016x" % (number, idx) for idx in range(self.num_values)]

    def assert_copied(self) -> None:
        for source, target in zip(self.sources, self.targets, strict=True):
            np.testing.assert_array_equal(target, source)


def copy_all(sources: list[np.ndarray], targets: list[np.ndarray]) -> None:
    for source, target in zip(sources, targets, strict=True):
        np.copyto(target, source)


class PlainLmdb:
    """What py-lmdb does without the store: default flags but no syncs, and no eviction."""

    def __init__(self, folder: Path) -> None:
        self.env = lmdb.open(
            os.fspath(folder), map_size=8 * BATCH_BYTES, sync=False, metasync=False
        )
        self._last: list[bytes] = []

    def put_from(self, keys: list[bytes], sources: list[memoryview]) -> None:
        with self.env.begin(write=True) as txn:
            for key in self._last:
                txn.delete(key)
        with self.env.begin(write=True) as txn:
            for key, source in zip(keys, sources, strict=True):
                txn.put(key, source)
        self._last = keys

    def get_into(self, keys: list[bytes], targets: list[memoryview]) -> None:
        with self.env.begin(buffers=True) as txn:
            for key, target in zip(keys, targets, strict=True):
                target[:] = txn.get(key)

    def exists(self, keys: list[bytes]) -> bytearray:
        with self.env.begin(buffers=True) as txn:
            return bytearray([txn.get(key) is not None for key in keys])

    def close(self) -> None:
        self.env.close()


@pytest.fixture(params=PLACES, ids="place={}".format)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "disk":
        yield tmp_path
        return
    if not MEMORY.is_dir() or os.statvfs(MEMORY).f_bavail * 4096 < 12 * BATCH_BYTES:
        pytest.skip(f"{MEMORY} does not have {12 * BATCH_BYTES} bytes free")
    path = MEMORY / f"bench-{os.getpid()}"
    path.mkdir()
    yield path
    for file in sorted(path.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    path.rmdir()


def open_at(folder: Path) -> Store:
    return open_store(f"lmdb://{folder}/store?capacity={4 * BATCH_BYTES}&lease_s=0")


def open_impl(impl: str, folder: Path) -> Store | PlainLmdb:
    if impl == "kvxfer":
        return open_at(folder)
    (folder / "plain").mkdir()
    return PlainLmdb(folder / "plain")


@pytest.mark.benchmark(group="stores.put")
@pytest.mark.parametrize("value_bytes", VALUE_BYTES, ids="value_bytes={}".format)
@pytest.mark.parametrize("impl", ["kvxfer", "pylmdb", "memcpy"], ids="impl={}".format)
def bench_put(benchmark, folder, impl, value_bytes):
    batch = Batch(value_bytes)
    benchmark.extra_info.update(bytes_moved=BATCH_BYTES)
    if impl == "memcpy":
        benchmark.pedantic(copy_all, (batch.sources, batch.targets), rounds=ROUNDS)
        batch.assert_copied()
        return
    store = open_impl(impl, folder)
    for _ in range(6):
        store.put_from(batch.new_keys(), batch.source_views)
    used: list[list[bytes]] = []

    def with_new_keys() -> tuple[tuple[list[bytes], list[memoryview]], dict[str, object]]:
        used.append(batch.new_keys())
        return (used[-1], batch.source_views), {}

    benchmark.pedantic(store.put_from, setup=with_new_keys, rounds=ROUNDS)
    store.get_into(used[-1], batch.target_views)
    batch.assert_copied()
    store.close()


@pytest.mark.benchmark(group="stores.first_put")
@pytest.mark.parametrize("value_bytes", VALUE_BYTES, ids="value_bytes={}".format)
def bench_first_put(benchmark, folder, value_bytes):
    batch = Batch(value_bytes)
    benchmark.extra_info.update(bytes_moved=BATCH_BYTES)
    store = open_at(folder)
    outcomes = benchmark.pedantic(
        store.put_from, (batch.new_keys(), batch.source_views), rounds=1, iterations=1
    )
    assert set(outcomes) == {Outcome.OK}
    store.close()


@pytest.mark.benchmark(group="stores.get")
@pytest.mark.parametrize("value_bytes", VALUE_BYTES, ids="value_bytes={}".format)
@pytest.mark.parametrize("impl", ["kvxfer", "pylmdb", "memcpy"], ids="impl={}".format)
def bench_get(benchmark, folder, impl, value_bytes):
    batch = Batch(value_bytes)
    benchmark.extra_info.update(bytes_moved=BATCH_BYTES)
    if impl == "memcpy":
        benchmark.pedantic(copy_all, (batch.sources, batch.targets), rounds=ROUNDS)
        batch.assert_copied()
        return
    store = open_impl(impl, folder)
    keys = batch.new_keys()
    store.put_from(keys, batch.source_views)
    benchmark.pedantic(store.get_into, (keys, batch.target_views), rounds=ROUNDS)
    batch.assert_copied()
    store.close()


@pytest.mark.benchmark(group="stores.exists")
@pytest.mark.parametrize("stored", [True, False], ids=["hit", "miss"])
@pytest.mark.parametrize("impl", ["kvxfer", "pylmdb"], ids="impl={}".format)
def bench_exists(benchmark, tmp_path, impl, stored):
    """``bytes_moved`` is the keys'; a store of 4 KiB values, as the keys are what is looked at."""
    keys = [PREFIX + os.urandom(16).hex().encode() for _ in range(NUM_KEYS)]
    benchmark.extra_info.update(bytes_moved=sum(map(len, keys)), num_keys=NUM_KEYS)
    store = open_impl(impl, tmp_path)
    if stored:
        store.put_from(keys, [memoryview(bytes(4096))] * NUM_KEYS)
    look: Callable[[list[bytes]], bytearray] = store.exists
    found = benchmark.pedantic(look, (keys,), rounds=ROUNDS, iterations=1 if SMOKE else 3)
    assert found == bytes([stored]) * NUM_KEYS
    store.close()
