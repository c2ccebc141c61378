# SPDX-License-Identifier: Apache-2.0
"""The tables that native code reads: runs, classes and tiles of a layout, items and spans of a job.

The dtypes mirror the structs of ``csrc/block_copy.h`` (and ``copy_class`` of the Cython module);
a test compares the sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvxfer._native import block_copy
from kvxfer.blocks.runs import Axis, Strided
from kvxfer.errors import LayoutError

RUN_DTYPE = np.dtype(
    [
        ("base", "<u8"),
        ("block_step", "<i8"),
        ("value_offset", "<i8"),
        ("outer_page_step", "<i8"),
        ("outer_value_step", "<i8"),
        ("inner_page_step", "<i8"),
        ("inner_value_step", "<i8"),
        ("fragment_bytes", "<u8"),
        ("outer_count", "<u4"),
        ("inner_count", "<u4"),
        ("fragment_units", "<u4"),
        ("width_log2", "<u4"),
        ("units_multiplier", "<u4"),
        ("units_shift", "<u4"),
        ("inner_multiplier", "<u4"),
        ("inner_shift", "<u4"),
    ]
)
TILE_DTYPE = np.dtype(
    [("run", "<u4"), ("first_unit", "<u4"), ("num_units", "<u4"), ("reserved", "<u4")]
)
CLASS_DTYPE = np.dtype(
    [
        ("first_run", "<u4"),
        ("num_copy_runs", "<u4"),
        ("num_runs", "<u4"),
        ("reserved", "<u4"),
        ("value_bytes", "<u8"),
    ]
)
SPAN_DTYPE = np.dtype(
    [
        ("first_work", "<u4"),
        ("num_work", "<u4"),
        ("first_item", "<u4"),
        ("first_tile", "<u4"),
        ("num_tiles", "<u4"),
        ("tiles_multiplier", "<u4"),
        ("tiles_shift", "<u4"),
        ("reserved", "<u4"),
    ]
)
ITEM_DTYPE = np.dtype([("value_ptr", "<u8"), ("block_id", "<i4"), ("class_id", "<i4")])
"""One block to copy: the address of its value, its block id, its class in the layout."""

MAX_WIDTH_BYTES = 16
TILE_BYTES = 4096
INDEX_LIMIT = 2**31
"""Units of one run and work ids of one job stay below it: the native division is exact there."""

Table = npt.NDArray[np.void]


@dataclass(frozen=True, slots=True)
class ClassRuns:
    """The runs of one class: those that move bytes both ways, and the zeros between segments."""

    copies: Sequence[Strided]
    zeros: Sequence[Strided]
    value_bytes: int


def divisor(number: int) -> tuple[int, int]:
    """Return multiplier and shift with which native code divides by ``number`` in [1, 2**31)."""
    shift = 31 + (number - 1).bit_length()
    return -(-(1 << shift) // number), shift


def run_table(classes: Iterable[ClassRuns]) -> Table:
    """Return all runs, (num_runs,) RUN_DTYPE: per class its copies, then its zeros."""
    runs = [_run_row(run) for group in classes for run in (*group.copies, *group.zeros)]
    return _read_only(np.array(runs, dtype=RUN_DTYPE))


def class_table(classes: Iterable[ClassRuns]) -> Table:
    """Return where each class's runs stand in the run table, (num_classes,) CLASS_DTYPE."""
    rows = []
    first_run = 0
    for group in classes:
        num_runs = len(group.copies) + len(group.zeros)
        rows.append((first_run, len(group.copies), num_runs, 0, group.value_bytes))
        first_run += num_runs
    return _read_only(np.array(rows, dtype=CLASS_DTYPE))


def tile_table(runs: Table) -> tuple[Table, npt.NDArray[np.int64]]:
    """Return the tiles of all runs in order, and where each run's tiles begin (num_runs + 1,)."""
    pieces = [_run_tiles(idx, run) for idx, run in enumerate(runs)]
    first_tile = np.cumsum([0, *(len(piece) for piece in pieces)], dtype=np.int64)
    tiles = np.concatenate([np.empty(0, dtype=TILE_DTYPE), *pieces])
    return _read_only(tiles), first_tile


def span_table(
    items: Table, classes: Table, first_tile: npt.NDArray[np.int64], *, to_value: bool
) -> Table:
    """Return one span per class of ``items``, which are sorted by class: the kernel's parameters.

    A gather's spans include the tiles that write zeros, a scatter's do not. ``LayoutError`` if
    items are not sorted or the job has 2**31 tiles or more.
    """
    class_ids, first_items, counts = np.unique(
        items["class_id"], return_index=True, return_counts=True
    )
    if np.any(np.diff(items["class_id"]) < 0):
        raise LayoutError("items are not sorted by class_id")
    rows: list[tuple[int, ...]] = []
    work = 0
    for class_id, first_item, count in zip(class_ids, first_items, counts, strict=True):
        group = classes[class_id]
        first_run = int(group["first_run"])
        end_run = first_run + int(group["num_runs" if to_value else "num_copy_runs"])
        num_tiles = int(first_tile[end_run] - first_tile[first_run])
        if num_tiles == 0:
            continue
        num_work = int(count) * num_tiles
        rows.append(
            (work, num_work, first_item, first_tile[first_run], num_tiles, *divisor(num_tiles), 0)
        )
        work += num_work
    if work >= INDEX_LIMIT:
        raise LayoutError(f"{len(items)} items make {work} tiles; copy fewer than 2**31 at once")
    return np.array(rows, dtype=SPAN_DTYPE)


def make_items(
    block_ids: npt.NDArray[np.int64],
    mask: npt.NDArray[np.uint8] | None,
    *,
    num_blocks: int,
    class_id: int,
    value_ptr: int,
    value_step: int,
) -> Table:
    """Return one item per block that ``mask`` keeps, (num_kept,) ITEM_DTYPE.

    The value of ``block_ids[i]`` is at ``value_ptr + i * value_step``, masked or not. Raises
    ``IndexError`` for the first kept id outside [0, num_blocks).
    """
    items = np.empty(len(block_ids), dtype=ITEM_DTYPE)
    num_items = block_copy.fill_items(
        block_ids, mask, num_blocks, class_id, value_ptr, value_step, items
    )
    return items[:num_items]


def _run_row(run: Strided) -> tuple[int, ...]:
    outer, inner = ([Axis(1, 0, 0)] * 2 + list(run.axes))[-2:]
    width = _width_bytes(run)
    fragment_units = run.fragment_bytes // width
    if run.num_bytes // width >= INDEX_LIMIT:
        raise LayoutError(f"one block of {run.num_bytes} bytes in words of {width} is too large")
    return (
        run.ptr,
        run.block_step,
        run.value_offset,
        outer.page_step,
        outer.value_step,
        inner.page_step,
        inner.value_step,
        run.fragment_bytes,
        outer.size,
        inner.size,
        fragment_units,
        width.bit_length() - 1,
        *divisor(fragment_units),
        *divisor(inner.size),
    )


def _width_bytes(run: Strided) -> int:
    """Return the widest unit to which every address and offset of the run is a multiple."""
    bits = run.ptr | run.block_step | run.value_offset | run.fragment_bytes | MAX_WIDTH_BYTES
    for axis in run.axes:
        bits |= axis.page_step | axis.value_step
    return bits & -bits


def _run_tiles(run_idx: int, run: np.void) -> Table:
    """Return the tiles of one run: all its units in pieces of TILE_BYTES."""
    num_units = int(run["outer_count"]) * int(run["inner_count"]) * int(run["fragment_units"])
    tile_units = TILE_BYTES >> int(run["width_log2"])
    first_units = np.arange(0, num_units, tile_units, dtype=np.int64)
    tiles = np.zeros(len(first_units), dtype=TILE_DTYPE)
    tiles["run"] = run_idx
    tiles["first_unit"] = first_units
    tiles["num_units"] = np.minimum(tile_units, num_units - first_units)
    return tiles


def _read_only(table: Table) -> Table:
    table.flags.writeable = False
    return table
