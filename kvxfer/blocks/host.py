# SPDX-License-Identifier: Apache-2.0
"""Block copies on the CPU: gather blocks into values, scatter values into blocks.

Two faces over one native call. `gather` and `scatter` take an array with one row per block, for
layouts with a single class. `gather_items` and `scatter_items` take items, which name class and
address of each value, and serve any layout: one call moves all groups, layers and shards of a job.
Both check everything first, release the GIL while bytes move, and are complete on return. A copy
runs on the calling thread; to use more cores, share out the items.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvxfer._native import block_copy
from kvxfer.blocks import plan
from kvxfer.blocks.layout import BlockLayout
from kvxfer.blocks.tensors import TensorView, view_of
from kvxfer.errors import LayoutError

AUTO_LEVEL = -1


def gather(layout: BlockLayout, block_ids: Any, out: Any, mask: Any = None) -> None:
    """Copy blocks into rows: ``out[i]`` becomes the value of block ``block_ids[i]``.

    ``block_ids`` (n,) integers in [0, num_blocks), repeats allowed; ``out`` (n, value_bytes)
    uint8, C-contiguous, NumPy or torch on the CPU; ``mask`` (n,) bool or 0/1, where rows that it
    leaves out stay as they are and their ids are not looked at. Raises ``LayoutError`` for what
    does not fit, ``IndexError`` for an id outside the pool, before any byte moves.
    """
    ids = _as_block_ids(block_ids)
    view = _rows_view(layout, ids, out, "out")
    if not view.writable:
        raise LayoutError("out is read-only")
    gather_items(layout, _make_items(layout, ids, view, mask))


def scatter(layout: BlockLayout, block_ids: Any, source: Any, mask: Any = None) -> None:
    """Copy rows into blocks: block ``block_ids[i]`` gets the value ``source[i]``.

    The reverse of `gather`, with the same arguments. Nothing but the blocks' own bytes is
    written: not the padding of a page, not what else lies between blocks. Two kept rows for one
    block are a ``LayoutError``, since their order would decide.
    """
    ids = _as_block_ids(block_ids)
    view = _rows_view(layout, ids, source, "source")
    items = _make_items(layout, ids, view, mask)
    _check_distinct(items, layout.num_blocks)
    scatter_items(layout, items)


def gather_items(layout: BlockLayout, items: plan.Table, *, level: int = AUTO_LEVEL) -> None:
    """Copy every item's block into its value: one native call for a whole job.

    ``items`` (n,) ITEM_DTYPE, contiguous. The caller guarantees that ``value_bytes`` of the item's
    class are writable at ``value_ptr``, that values do not overlap, and keeps them alive.
    ``level`` caps the kind of stores (``block_copy.copy_level``), for tests and benchmarks. Raises
    ``IndexError`` for a block or class out of range, before any byte moves.
    """
    _copy(layout, items, True, level)


def scatter_items(layout: BlockLayout, items: plan.Table, *, level: int = AUTO_LEVEL) -> None:
    """Copy every item's value into its block; as `gather_items`, in reverse.

    No two items may name the same bytes: the same block and class, or blocks of groups that
    overlay each other.
    """
    if not layout.writable:
        raise LayoutError("a tensor of the layout is read-only; blocks cannot be written")
    _copy(layout, items, False, level)


def _copy(layout: BlockLayout, items: plan.Table, to_value: bool, level: int) -> None:
    if layout.device != "cpu":
        raise LayoutError(f"the layout's tensors are on {layout.device}, the host path needs cpu")
    if items.dtype != plan.ITEM_DTYPE or items.ndim != 1 or not items.flags.c_contiguous:
        raise LayoutError(
            f"items are {items.dtype} of shape {items.shape}; pass a contiguous 1-D array of "
            f"ITEM_DTYPE"
        )
    block_copy.copy_items(layout.runs, layout.class_rows, items, layout.num_blocks, to_value, level)


def _as_block_ids(block_ids: Any) -> npt.NDArray[np.int64]:
    ids = np.asarray(block_ids)
    if ids.ndim != 1 or (ids.size > 0 and ids.dtype.kind not in "iu"):
        raise LayoutError(
            f"block_ids is {ids.dtype} of shape {ids.shape}; pass a list or 1-D array of integers"
        )
    return np.ascontiguousarray(ids, dtype=np.int64)


def _rows_view(layout: BlockLayout, ids: npt.NDArray[np.int64], rows: Any, name: str) -> TensorView:
    """Describe ``rows`` after checking that it has one value for every id."""
    view = view_of(rows, name)
    expected = (len(ids), layout.value_bytes)
    if view.shape != expected or view.dtype_name != "uint8":
        raise LayoutError(
            f"{name} is {view.dtype_name} of shape {view.shape}; one value of {expected[1]} bytes "
            f"per block id is uint8 of shape {expected}"
        )
    if not view.is_contiguous:
        raise LayoutError(f"{name} is not C-contiguous: its strides are {view.strides_bytes}")
    if view.device != "cpu":
        raise LayoutError(f"{name} is on {view.device}, the host path needs cpu")
    return view


def _make_items(
    layout: BlockLayout, ids: npt.NDArray[np.int64], view: TensorView, mask: Any
) -> plan.Table:
    return plan.make_items(
        ids,
        None if mask is None else _as_mask(mask, len(ids)),
        num_blocks=layout.num_blocks,
        class_id=0,
        value_ptr=view.ptr,
        value_step=layout.value_bytes,
    )


def _as_mask(mask: Any, num_rows: int) -> npt.NDArray[np.uint8]:
    array = np.asarray(mask)
    if array.shape != (num_rows,) or (array.size > 0 and array.dtype.kind not in "biu"):
        raise LayoutError(
            f"mask is {array.dtype} of shape {array.shape}; pass ({num_rows},) of bool or 0/1"
        )
    return np.ascontiguousarray(array != 0).view(np.uint8)


def _check_distinct(items: plan.Table, num_blocks: int) -> None:
    repeat = block_copy.find_repeat(items, np.zeros(num_blocks, dtype=np.uint8))
    if repeat >= 0:
        raise LayoutError(
            f"block_ids names block {items['block_id'][repeat]} more than once; which row it gets "
            "would be chance"
        )
