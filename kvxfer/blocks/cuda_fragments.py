# SPDX-License-Identifier: Apache-2.0
"""The contiguous copies that a job is made of, for the copy engine to do in a kernel's place.

A copy engine takes addresses and sizes, half a microsecond of CPU each: worth it where fragments
are large, as the pages of a block are, and never where a shard takes some heads of each token.
Where a block is one fragment, blocks side by side whose values are too become one copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvxfer._native import block_copy
from kvxfer.blocks import plan, rows
from kvxfer.blocks.layout import BlockLayout
from kvxfer.errors import LayoutError

Addresses = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """Contiguous copies, (n,) each, back to back; no byte is the target of two of them."""

    targets: Addresses
    sources: Addresses
    sizes: Addresses
    """In bytes, each at least 1."""

    def __len__(self) -> int:
        return len(self.sizes)


class Fragments:
    """Which fragments a layout's blocks have; usable from any thread."""

    def __init__(self, layout: BlockLayout) -> None:
        self._layout = layout
        self._tables = [_Table(layout, row) for row in layout.class_rows]
        self.smallest_bytes = np.array([table.smallest_bytes() for table in self._tables])
        """(num_classes,): bytes of a class's smallest fragment; 0 where a kernel has to copy it,
        because its values have zeros between segments, which are in no block, or two segments of a
        block share memory."""

    def smallest_of(self, items: plan.Table) -> int:
        """Return the bytes of a job's smallest fragment; 0 if a kernel has to do it, or none."""
        if len(items) == 0:
            return 0
        # a class out of range is told of by whoever makes the copies
        return int(self.smallest_bytes.take(items["class_id"], mode="clip").min())

    def copies(self, items: plan.Table, memory: tuple[int, int], *, to_value: bool) -> Copies:
        """Return the copies between every item's block and its value.

        ``items`` (n,) ITEM_DTYPE of classes whose `smallest_bytes` is not 0, ``memory`` first and
        one-past-last address of where the values may lie. Raises ``IndexError`` for a block or
        class out of range, ``ValueError`` for a value outside of ``memory``, ``LayoutError`` for
        two items that write the same bytes and for the rest.
        """
        layout = self._layout
        rows.check_items_table(items)
        if not to_value:
            rows.check_writable(layout)
        ranges = np.array([memory], dtype=np.uint64)
        block_copy.check_items(items, layout.class_rows, layout.num_blocks, ranges)
        values, pages, sizes = self._pieces(items)
        copies = Copies(*((values, pages) if to_value else (pages, values)), sizes)
        _check_targets(copies)
        return copies

    def _pieces(self, items: plan.Table) -> Addresses:
        """Return (3, n) value addresses, page addresses and bytes of the copies."""
        parts = [np.empty((3, 0), dtype=np.uint64)]
        for class_id in np.unique(items["class_id"]):
            parts.append(self._tables[class_id].pieces(items[items["class_id"] == class_id]))
        return np.concatenate(parts, axis=1)


class _Table:
    """The fragments of one class: (4, n) address in block 0, block step, value offset, bytes."""

    def __init__(self, layout: BlockLayout, row: np.void) -> None:
        first, self._has_zeros = int(row["first_run"]), row["num_runs"] != row["num_copy_runs"]
        runs = layout.runs[first : first + int(row["num_copy_runs"])]
        parts = [np.empty((4, 0), dtype=np.int64), *map(_run_fragments, runs)]
        self._rows = np.concatenate(parts, axis=1)

    def smallest_bytes(self) -> int:
        """Return the bytes of the smallest fragment; see `Fragments.smallest_bytes`."""
        base, _, _, size = self._rows
        order = np.argsort(base)
        shares = np.any(base[order][1:] < (base + size)[order][:-1])
        return 0 if self._has_zeros or shares or len(size) == 0 else int(size.min())

    def pieces(self, items: plan.Table) -> Addresses:
        """Return the copies of items of this class; see `Fragments._pieces`."""
        base, step, offset, size = self._rows
        shape = len(items), len(size)
        pages = base + step * items["block_id"].astype(np.int64)[:, None]
        values = offset + items["value_ptr"].view(np.int64)[:, None]
        pieces = np.stack([values, pages, np.broadcast_to(size, shape)]).reshape(3, -1)
        # never from one tensor into another: a copy that crosses allocations is refused
        return _merged(pieces.view(np.uint64)) if len(size) == 1 else pieces.view(np.uint64)


def _run_fragments(run: np.void) -> npt.NDArray[np.int64]:
    """Return a run's fragments: see `_Table`."""
    outer, inner = (np.arange(int(run[f"{axis}_count"])) for axis in ("outer", "inner"))
    page, value = (
        (int(run[f"outer_{side}_step"]) * outer[:, None] + int(run[f"inner_{side}_step"]) * inner)
        for side in ("page", "value")
    )
    base = run["base"].astype(np.int64)
    fixed = [np.full(page.size, run[name], np.int64) for name in ("block_step", "fragment_bytes")]
    return np.stack(
        [base + page.ravel(), fixed[0], int(run["value_offset"]) + value.ravel(), fixed[1]]
    )


def _merged(pieces: Addresses) -> Addresses:
    """Return (3, n) copies, n > 0, in the order of their values, as one where both sides go on."""
    values, pages, sizes = pieces[:, np.argsort(pieces[0], kind="stable")]
    goes_on = (values[1:] == values[:-1] + sizes[:-1]) & (pages[1:] == pages[:-1] + sizes[:-1])
    starts = np.flatnonzero(np.append(True, ~goes_on))
    return np.stack([values[starts], pages[starts], np.add.reduceat(sizes, starts)])


def _check_targets(copies: Copies) -> None:
    """Raise ``LayoutError`` where two copies write the same bytes: the order of a batch is open."""
    order = np.argsort(copies.targets)
    targets, sizes = copies.targets[order], copies.sizes[order]
    overlap = np.flatnonzero(targets[1:] < targets[:-1] + sizes[:-1])
    if len(overlap) > 0:
        at = int(overlap[0])
        raise LayoutError(
            f"two items write the bytes at {int(targets[at + 1]):#x}; which of them stays would be "
            "chance"
        )
