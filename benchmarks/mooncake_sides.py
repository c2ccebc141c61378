# SPDX-License-Identifier: Apache-2.0
"""Blocks of many layers through a real Mooncake pool: packed by kvxfer, or as scatter lists.

A pool is a master and a segment owner, processes of their own, TCP on loopback. The blocks lie in
a KV cache of ``num_layers`` parts, as an engine's do; kvxfer's packed side copies them into its
staging and out of it. ``open_side`` gives each side its own pool, since what one overflows fails
the other; ``open_sides`` has them share a native client, since two clients that make the same calls
differ by up to 5 % all the time.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kvxfer.stores import Outcome, Store, open_store
from kvxfer.stores.mooncake import MooncakeStore
from kvxfer.stores.mooncake_client import Client
from kvxfer.stores.mooncake_memory import Buffer
from kvxfer.stores.mooncake_native import bound_client
from kvxfer.stores.mooncake_options import MooncakeOptions
from kvxfer.stores.parts import Parts
from kvxfer.stores.uri import parse_uri

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from mooncake_servers import MIB, require_client, servers

IMPLS = ["kvxfer", "scatter"]
TIMEOUT_S = 10


class Blocks:
    """A KV cache of ``num_layers`` regions of ``num_blocks`` segments, and staging for all of it.

    ``cache`` (layers, blocks, segment_bytes) uint8; a value is one block of every layer.
    """

    def __init__(self, num_layers: int, num_blocks: int, segment_bytes: int) -> None:
        self.shape = (num_layers, num_blocks, segment_bytes)
        self.value_bytes = num_layers * segment_bytes
        self.total_bytes = num_blocks * self.value_bytes
        self.cache_view = memoryview(mmap.mmap(-1, self.total_bytes))
        self.cache = np.frombuffer(self.cache_view, np.uint8).reshape(self.shape)
        self.content = np.random.default_rng(0).integers(0, 256, self.shape, np.uint8)

    def fill(self) -> None:
        self.cache[:] = self.content

    def is_whole(self) -> bool:
        return bool((self.cache == self.content).all())


class Packed:
    """kvxfer's store, one segment per value: ``pack`` before a put, ``unpack`` after a get.

    Calls take names from ``new_names`` and return how many values failed.
    """

    def __init__(self, store: Store, blocks: Blocks) -> None:
        self.store, self.blocks = store, blocks
        self._staging = memoryview(mmap.mmap(-1, blocks.total_bytes))
        num_layers, num_blocks, segment_bytes = blocks.shape
        staging = np.frombuffer(self._staging, np.uint8)
        staging = staging.reshape(num_blocks, num_layers, segment_bytes)
        self._packed = staging.transpose(1, 0, 2)
        store.register(self._staging)

    def new_names(self, number: int | None = None) -> list[Any]:
        """Return names for as many values as there are blocks, or for ``number``."""
        return [name.encode() for name in new_names(number or self.blocks.shape[1])]

    def pack(self) -> None:
        np.copyto(self._packed, self.blocks.cache)

    def unpack(self) -> None:
        np.copyto(self.blocks.cache, self._packed)

    def put(self, names: list[Any]) -> int:
        return len(names) - self.store.put_from(names, self._views()).count(Outcome.OK)

    def get(self, names: list[Any]) -> int:
        return len(names) - self.store.get_into(names, self._views()).count(Outcome.OK)

    def count_present(self, names: list[Any]) -> int:
        return sum(self.store.exists(names))

    def remove(self, names: list[Any]) -> None:
        self.store.remove(names)

    def close(self) -> None:
        self.store.close()

    def _views(self) -> list[memoryview]:
        """Return where the values lie, made for every call as for the blocks of a request."""
        size = self.blocks.value_bytes
        return [self._staging[at : at + size] for at in range(0, self.blocks.total_bytes, size)]


class Direct(Packed):
    """kvxfer's store with values of one layer: they are read and written where they lie."""

    def __init__(self, store: Store, blocks: Blocks) -> None:
        assert blocks.shape[0] == 1
        self.store, self.blocks = store, blocks
        self._cache_ptr = Buffer.of(blocks.cache_view).ptr

    def pack(self) -> None:
        """Nothing: a value is one run of the cache."""

    def unpack(self) -> None:
        """Nothing either."""

    def put(self, names: list[Any]) -> int:
        return len(names) - self.store.put_parts(names, self._parts()).count(Outcome.OK)

    def get(self, names: list[Any]) -> int:
        return len(names) - self.store.get_parts(names, self._parts()).count(Outcome.OK)

    def _parts(self) -> Parts:
        _, num_blocks, segment_bytes = self.blocks.shape
        ptrs = self._cache_ptr + segment_bytes * np.arange(num_blocks)
        return Parts(ptrs, np.full(num_blocks, segment_bytes), np.ones(num_blocks, np.int64))


class Scatter:
    """The in-tree connector's calls: a list of addresses per value, a segment per layer.

    The lists are made for every call, as for the blocks of a request. The cache is registered.
    """

    def __init__(self, native: Any, config: Any, blocks: Blocks) -> None:
        self._native, self._config, self.blocks = native, config, blocks
        start = Buffer.of(blocks.cache_view).ptr
        num_layers, num_blocks, segment_bytes = blocks.shape
        self._layers = [start + layer * num_blocks * segment_bytes for layer in range(num_layers)]

    def new_names(self, number: int | None = None) -> list[Any]:
        return new_names(number or self.blocks.shape[1])

    def pack(self) -> None:
        """Nothing: the transport gathers."""

    def unpack(self) -> None:
        """Nothing: the transport scatters."""

    def put(self, names: list[Any]) -> int:
        assert not any(self._native.batch_is_exist(names))  # which that connector asks as well
        codes = self._native.batch_put_from_multi_buffers(names, *self._places(), self._config)
        return sum(code != 0 for code in codes)

    def get(self, names: list[Any]) -> int:
        codes = self._native.batch_get_into_multi_buffers(names, *self._places())
        return sum(code != self.blocks.value_bytes for code in codes)

    def count_present(self, names: list[Any]) -> int:
        return sum(self._native.batch_is_exist(names))

    def remove(self, names: list[Any]) -> None:
        self._native.batch_remove(names, True)

    def close(self) -> None:
        self._native.close()

    def _places(self) -> tuple[list[list[int]], list[list[int]]]:
        """Return addresses and sizes of the segments of every value."""
        num_layers, num_blocks, segment_bytes = self.blocks.shape
        offsets = range(0, num_blocks * segment_bytes, segment_bytes)
        ptrs = [[layer + offset for layer in self._layers] for offset in offsets]
        return ptrs, [[segment_bytes] * num_layers for _ in offsets]


@contextlib.contextmanager
def open_side(impl: str, blocks: Blocks) -> Iterator[Packed | Scatter]:
    """Yield a side with a pool of its own."""
    with open_pool(blocks) as uri:
        side = _open(impl, uri, blocks)
        try:
            yield side
        finally:
            side.close()


@contextlib.contextmanager
def open_sides(blocks: Blocks) -> Iterator[dict[str, Packed | Scatter]]:
    """Yield all sides by name, on one pool and one native client."""
    with open_pool(blocks) as uri:
        store = MooncakeStore.open(parse_uri(uri))
        try:
            store.register(blocks.cache_view)
            with store._link.call() as client:
                assert client is not None
                sides: dict[str, Packed | Scatter] = {"packed": Packed(store, blocks)}
                if blocks.shape[0] == 1:
                    sides["direct"] = Direct(store, blocks)
                config = client._replication.config([])
                yield sides | {"scatter": Scatter(client._native, config, blocks)}
        finally:
            store.close()


@contextlib.contextmanager
def open_pool(blocks: Blocks) -> Iterator[str]:
    """Start a pool that holds the blocks eight times; yield the URI of a store on it."""
    bound_client(TIMEOUT_S)  # before a test's shorter bounds: the rival has the same
    require_client()
    with tempfile.TemporaryDirectory() as folder:
        size = 8 * blocks.total_bytes + 64 * MIB
        with servers(Path(folder), size, lease_ms=10_000) as pool:
            yield pool.master.uri(timeout_s=TIMEOUT_S)


def _open(impl: str, uri: str, blocks: Blocks) -> Packed | Scatter:
    if impl == "kvxfer":
        return Packed(open_store(uri), blocks)
    client = Client.connect(MooncakeOptions.from_uri(parse_uri(uri)))
    buffer = Buffer.of(blocks.cache_view)
    assert client.register(buffer.ptr, buffer.num_bytes) == 0
    return Scatter(client._native, client._replication.config([]), blocks)


_numbers = itertools.count()


def new_names(num_blocks: int) -> list[str]:
    """Return names that no call had before."""
    call = next(_numbers)
    return [f"kvx1/bench/{os.getpid()}/{call}/{block:06d}" for block in range(num_blocks)]
