# SPDX-License-Identifier: Apache-2.0
"""The arguments of `gather` and `scatter` (block ids, a mask, rows), checked, as items."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvxfer._native import block_copy
from kvxfer.blocks import plan
from kvxfer.blocks.layout import BlockLayout
from kvxfer.blocks.tensors import TensorView, view_of
from kvxfer.errors import LayoutError


def items_of_rows(
    layout: BlockLayout, block_ids: Any, rows: Any, mask: Any, name: str
) -> tuple[plan.Table, TensorView]:
    """Return an item per kept row of ``rows``, and the view of ``rows``.

    ``block_ids`` (n,) integers, ``mask`` (n,) bool or 0/1 or None, both in host memory; ``rows``
    (n, value_bytes) uint8, C-contiguous, on any device. Raises ``LayoutError`` for what does not
    fit and ``IndexError`` for a kept id outside the pool.
    """
    ids = _as_block_ids(block_ids)
    view = _rows_view(layout, len(ids), rows, name)
    items = plan.make_items(
        ids,
        None if mask is None else _as_mask(mask, len(ids)),
        num_blocks=layout.num_blocks,
        class_id=0,
        value_ptr=view.ptr,
        value_step=layout.value_bytes,
    )
    return items, view


def check_writable(layout: BlockLayout) -> None:
    """Raise ``LayoutError`` where a tensor of the layout is read-only."""
    if not layout.writable:
        raise LayoutError("a tensor of the layout is read-only; blocks cannot be written")


def check_items_table(items: plan.Table) -> None:
    """Raise ``LayoutError`` unless ``items`` is an array that native code can read."""
    if items.dtype != plan.ITEM_DTYPE or items.ndim != 1 or not items.flags.c_contiguous:
        raise LayoutError(
            f"items are {items.dtype} of shape {items.shape}; pass a contiguous 1-D array of "
            f"ITEM_DTYPE"
        )


def check_distinct(items: plan.Table, num_blocks: int) -> None:
    """Raise ``LayoutError`` where two items of one class name the same block."""
    repeat = block_copy.find_repeat(items, np.zeros(num_blocks, dtype=np.uint8))
    if repeat >= 0:
        raise LayoutError(
            f"block_ids names block {items['block_id'][repeat]} more than once; which row it gets "
            "would be chance"
        )


def _rows_view(layout: BlockLayout, num_rows: int, rows: Any, name: str) -> TensorView:
    """Describe ``rows`` after checking that it has one value for every id."""
    view = view_of(rows, name)
    expected = (num_rows, layout.value_bytes)
    if view.shape != expected or view.dtype_name != "uint8":
        raise LayoutError(
            f"{name} is {view.dtype_name} of shape {view.shape}; one value of {expected[1]} bytes "
            f"per block id is uint8 of shape {expected}"
        )
    if not view.is_contiguous:
        raise LayoutError(f"{name} is not C-contiguous: its strides are {view.strides_bytes}")
    return view


def _as_block_ids(block_ids: Any) -> npt.NDArray[np.int64]:
    ids = _as_host_array(block_ids, "block_ids")
    if ids.ndim != 1 or (ids.size > 0 and ids.dtype.kind not in "iu"):
        raise LayoutError(
            f"block_ids is {ids.dtype} of shape {ids.shape}; pass a list or 1-D array of integers"
        )
    return np.ascontiguousarray(ids, dtype=np.int64)


def _as_mask(mask: Any, num_rows: int) -> npt.NDArray[np.uint8]:
    array = _as_host_array(mask, "mask")
    if array.shape != (num_rows,) or (array.size > 0 and array.dtype.kind not in "biu"):
        raise LayoutError(
            f"mask is {array.dtype} of shape {array.shape}; pass ({num_rows},) of bool or 0/1"
        )
    return np.ascontiguousarray(array != 0).view(np.uint8)


def _as_host_array(array: Any, name: str) -> npt.NDArray[Any]:
    device = str(getattr(array, "device", "cpu"))
    if device != "cpu":
        raise LayoutError(f"{name} is on {device}; pass it in host memory, where it is checked")
    return np.asarray(array)
