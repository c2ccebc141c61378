# SPDX-License-Identifier: Apache-2.0
"""One workload of block copies and everybody who can run it: kvxfer, NumPy, torch, one memcpy.

All run on one thread. Blocks are drawn in random order from a pool that no cache holds, so that
every source is cold; `memcpy` moves the same number of bytes from front to back in one call, which
is what a copy at best was thought to reach.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from config import SIZES

from kvxfer.blocks import ITEM_DTYPE, BlockLayout, gather, gather_items, scatter, scatter_items

LINE_BYTES = 64


@dataclass(frozen=True, eq=False)
class CopyCase:
    """``num_layers`` tensors of (num_blocks, fragment) bytes, and one row per copied block."""

    fragment: int
    num_layers: int = 1
    copy_bytes: int = SIZES.copy_bytes
    pool_bytes: int = SIZES.pool_bytes

    @cached_property
    def cache(self) -> list[np.ndarray]:
        """The pool, written once so that its pages exist."""
        rng = np.random.default_rng(7)
        num_blocks = self.pool_bytes // (self.fragment * self.num_layers)
        layers = [_lines(num_blocks, self.fragment) for _ in range(self.num_layers)]
        for layer in layers:
            layer[...] = rng.integers(0, 256, layer.shape, dtype=np.uint8)
        return layers

    @cached_property
    def values(self) -> np.ndarray:
        value_bytes = self.num_layers * self.fragment
        values = _lines(self.copy_bytes // value_bytes, value_bytes)
        values[...] = 1
        return values

    @cached_property
    def block_ids(self) -> np.ndarray:
        ids = np.random.default_rng(8).permutation(len(self.cache[0]))
        return ids[: len(self.values)]

    @cached_property
    def layout(self) -> BlockLayout:
        return BlockLayout.from_tensors(self.cache)

    @cached_property
    def torch_cache(self) -> list[Any]:
        return [_torch().from_numpy(layer) for layer in self.cache]

    @cached_property
    def torch_rows(self) -> list[Any]:
        return [_torch().from_numpy(self.rows(idx)) for idx in range(self.num_layers)]

    @cached_property
    def torch_ids(self) -> Any:
        return _torch().from_numpy(self.block_ids)

    @cached_property
    def items(self) -> np.ndarray:
        """The job of `gather` and `scatter`, as the transfer threads have it."""
        items = np.zeros(len(self.values), dtype=ITEM_DTYPE)
        items["block_id"] = self.block_ids
        start, step = self.values.ctypes.data, self.values.shape[1]
        items["value_ptr"] = start + np.arange(len(items), dtype=np.uint64) * np.uint64(step)
        return items

    @cached_property
    def halves(self) -> tuple[np.ndarray, np.ndarray]:
        middle = len(self.items) // 2
        return self.items[:middle], self.items[middle:]

    @cached_property
    def threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(2)

    @property
    def bytes_moved(self) -> int:
        return self.values.nbytes

    def rows(self, layer: int) -> np.ndarray:
        """Return one layer's columns of the values, (num_rows, fragment)."""
        return self.values[:, layer * self.fragment : (layer + 1) * self.fragment]

    def prepare(self) -> None:
        """Make everything that a copy needs, so that no timed run does."""
        assert self.layout.value_bytes == self.values.shape[1]
        assert len(self.torch_cache) == len(self.torch_rows)
        assert len(self.torch_ids) == len(self.values)

    def check(self) -> None:
        """Assert that blocks and rows agree, whichever way they were copied."""
        for idx, layer in enumerate(self.cache):
            np.testing.assert_array_equal(self.rows(idx), layer[self.block_ids])


def _lines(num_rows: int, row_bytes: int) -> np.ndarray:
    """Return (num_rows, row_bytes) uint8 that begins on a line, as torch's and staging's memory."""
    num_bytes = num_rows * row_bytes
    memory = np.empty(num_bytes + LINE_BYTES, dtype=np.uint8)
    start = -memory.ctypes.data % LINE_BYTES
    return memory[start : start + num_bytes].reshape(num_rows, row_bytes)


def _torch() -> Any:
    """Return torch, on one thread as everybody here."""
    import torch

    torch.set_num_threads(1)
    return torch


def _gather_kvxfer(case: CopyCase) -> None:
    gather(case.layout, case.block_ids, case.values)


def _gather_numpy(case: CopyCase) -> None:
    for idx, layer in enumerate(case.cache):
        # mode="raise" would copy through a buffer
        np.take(layer, case.block_ids, axis=0, out=case.rows(idx), mode="clip")


def _gather_torch(case: CopyCase) -> None:
    for layer, rows in zip(case.torch_cache, case.torch_rows, strict=True):
        _torch().index_select(layer, 0, case.torch_ids, out=rows)


def _scatter_kvxfer(case: CopyCase) -> None:
    scatter(case.layout, case.block_ids, case.values)


def _scatter_numpy(case: CopyCase) -> None:
    for idx, layer in enumerate(case.cache):
        layer[case.block_ids] = case.rows(idx)


def _scatter_torch(case: CopyCase) -> None:
    for layer, rows in zip(case.torch_cache, case.torch_rows, strict=True):
        layer.index_copy_(0, case.torch_ids, rows)


def gather_with_plain_stores(case: CopyCase) -> None:
    """Gather with memcpy's stores: our own loop without streaming."""
    gather_items(case.layout, case.items, level=0)


def scatter_with_plain_stores(case: CopyCase) -> None:
    """Scatter as `gather_with_plain_stores`."""
    scatter_items(case.layout, case.items, level=0)


def gather_on_two_threads(case: CopyCase) -> None:
    """Gather half of the items on each of two threads."""
    list(case.threads.map(lambda items: gather_items(case.layout, items), case.halves))


def scatter_on_two_threads(case: CopyCase) -> None:
    """Scatter half of the items on each of two threads."""
    list(case.threads.map(lambda items: scatter_items(case.layout, items), case.halves))


def copy_in_one_call(case: CopyCase) -> None:
    """Move as many bytes as the case does, one memcpy per layer: the yardstick."""
    num_bytes = case.values.nbytes // case.num_layers
    for idx, layer in enumerate(case.cache):
        ctypes.memmove(case.values.ctypes.data + idx * num_bytes, layer.ctypes.data, num_bytes)


Copy = Callable[[CopyCase], None]
GATHER: dict[str, Copy] = {
    "kvxfer": _gather_kvxfer,
    "numpy": _gather_numpy,
    "torch": _gather_torch,
    "memcpy": copy_in_one_call,
}
WAYS: dict[str, tuple[Copy, Copy, Copy]] = {
    "gather": (gather_with_plain_stores, _gather_kvxfer, gather_on_two_threads),
    "scatter": (scatter_with_plain_stores, _scatter_kvxfer, scatter_on_two_threads),
}
"""Our own: plain stores, what it does by itself, two threads of that."""
SCATTER: dict[str, Copy] = {
    "kvxfer": _scatter_kvxfer,
    "numpy": _scatter_numpy,
    "torch": _scatter_torch,
    "memcpy": copy_in_one_call,
}
