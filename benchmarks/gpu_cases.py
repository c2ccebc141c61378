# SPDX-License-Identifier: Apache-2.0
"""One workload of copies on a GPU and everybody who can run it.

A pool of pages [layer][block][token][head][content]; the value of a block's head is its layers one
after the other, so that `fragment` bytes are contiguous on both sides, many of them in a value.
Rivals get the same fragments in the same order as rows and their numbers.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from config import IS_SMOKE, MIB

from kvxfer.blocks import ITEM_DTYPE, BlockLayout, Region, cuda
from kvxfer.blocks.cuda import QuotaName

NUM_LAYERS, NUM_TOKENS, NUM_HEADS = 8, 16, 4
DEVICE = "cuda:0"
COPY_BYTES = 8 * MIB if IS_SMOKE else 512 * MIB
POOL_BYTES = 32 * MIB if IS_SMOKE else 2048 * MIB


def reason_to_skip() -> str | None:
    """Return why nothing of this can run here; None where it can."""
    for module in ("torch", "cupy"):
        if importlib.util.find_spec(module) is None:
            return f"{module} is not there"
    import torch

    return None if torch.cuda.is_available() else "torch finds no CUDA device"


@dataclass(frozen=True, eq=False)
class GpuCase:
    """Blocks of one fragment size, as many as make ``copy_bytes``; all memory made on first use."""

    fragment: int
    copy_bytes: int = COPY_BYTES
    pool_bytes: int = POOL_BYTES

    @cached_property
    def torch(self) -> Any:
        import torch

        return torch

    @cached_property
    def pool(self) -> Any:
        page_bytes = NUM_TOKENS * NUM_HEADS * self.fragment
        num_blocks = max(self.pool_bytes // (NUM_LAYERS * page_bytes), 1)
        shape = (NUM_LAYERS, num_blocks, NUM_TOKENS, NUM_HEADS, self.fragment)
        return self.torch.randint(0, 256, shape, dtype=self.torch.uint8, device=DEVICE)

    @cached_property
    def blocks(self) -> np.ndarray:
        value_bytes = NUM_LAYERS * NUM_TOKENS * NUM_HEADS * self.fragment
        count = max(min(self.copy_bytes // value_bytes, self.pool.shape[1]), 1)
        return np.random.default_rng(8).permutation(self.pool.shape[1])[:count]

    @cached_property
    def layout(self) -> BlockLayout:
        axes = ("block", "token", "head", "content")
        heads = (0, NUM_HEADS)
        regions = [
            Region(layer, 0, f"layer{idx}", axes, heads=heads)
            for idx, layer in enumerate(self.pool)
        ]
        return BlockLayout.from_regions(regions, value_order="token_major", head_shard=1)

    @cached_property
    def copies(self) -> cuda.CudaCopies:
        return cuda.CudaCopies(self.layout)

    @cached_property
    def rows(self) -> Any:
        """The pool as rows of one fragment."""
        return self.pool.view(-1, self.fragment)

    @cached_property
    def row_ids(self) -> Any:
        """Which rows the values are, in their order: [block][head][layer][token]."""
        num_blocks = self.pool.shape[1]
        block, head, layer, token = np.ix_(
            self.blocks, range(NUM_HEADS), range(NUM_LAYERS), range(NUM_TOKENS)
        )
        ids = ((layer * num_blocks + block) * NUM_TOKENS + token) * NUM_HEADS + head
        return self.torch.from_numpy(ids.ravel()).to(DEVICE)

    @cached_property
    def values(self) -> Any:
        """Room for all values in device memory, (fragments, bytes)."""
        shape = (len(self.row_ids), self.fragment)
        return self.torch.zeros(shape, dtype=self.torch.uint8, device=DEVICE)

    @cached_property
    def pinned(self) -> Any:
        return self.torch.empty(self.values.shape, dtype=self.torch.uint8, pin_memory=True)

    @cached_property
    def other(self) -> Any:
        """As many random bytes again: the source of plain copies, and of unpacking."""
        return self.torch.randint_like(self.values, 0, 256)

    @property
    def bytes_moved(self) -> int:
        return int(self.values.numel())

    def items(self, target: Any) -> np.ndarray:
        """Return one item per block and head, values back to back in ``target``."""
        count = len(self.blocks) * NUM_HEADS
        items = np.zeros(count, dtype=ITEM_DTYPE)
        items["block_id"] = np.repeat(self.blocks, NUM_HEADS)
        items["class_id"] = np.tile(np.arange(NUM_HEADS), len(self.blocks))
        value_bytes = NUM_LAYERS * NUM_TOKENS * self.fragment
        items["value_ptr"] = target.data_ptr() + np.arange(count) * value_bytes
        return items

    def check(self, found: Any) -> None:
        """Assert that ``found``, on any device, holds the values."""
        self.torch.cuda.synchronize()
        expected = self.torch.index_select(self.rows, 0, self.row_ids)
        assert self.torch.equal(found.to(DEVICE), expected), f"fragment {self.fragment}"


Run = Callable[[], object]


def packing(case: GpuCase, target: Any, quota: QuotaName = "full") -> Run:
    """Return our gather into ``target``, a tensor in device or pinned memory."""
    items = case.items(target)
    return lambda: case.copies.gather_items(items, target, quota=quota)


def unpacking(case: GpuCase, source: Any, quota: QuotaName = "full") -> Run:
    """Return our scatter of ``source``."""
    items = case.items(source)
    return lambda: case.copies.scatter_items(items, source, quota=quota)


def selecting(case: GpuCase, target: Any) -> Run:
    """Return torch.index_select over the widest words that fragments have."""
    torch = case.torch
    dtype = torch.int64 if case.fragment % 8 == 0 else torch.uint8
    rows, out = case.rows.view(dtype), target.view(dtype)
    return lambda: torch.index_select(rows, 0, case.row_ids, out=out)
