# SPDX-License-Identifier: Apache-2.0
"""Block copies on the CPU: one native call per job, for any layout.

`gather_items` and `scatter_items` take items, which name class and address of each value: one call
moves all groups, layers and shards of a job. Both check everything first, release the GIL while
bytes move, and are complete on return. A copy runs on the calling thread; to use more cores, share
out the items.
"""

from __future__ import annotations

from kvxfer._native import block_copy
from kvxfer.blocks import plan, rows
from kvxfer.blocks.layout import BlockLayout
from kvxfer.errors import LayoutError

AUTO_LEVEL = -1


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
    rows.check_writable(layout)
    _copy(layout, items, False, level)


def _copy(layout: BlockLayout, items: plan.Table, to_value: bool, level: int) -> None:
    if layout.device != "cpu":
        raise LayoutError(f"the layout's tensors are on {layout.device}, the host path needs cpu")
    rows.check_items_table(items)
    block_copy.copy_items(layout.runs, layout.class_rows, items, layout.num_blocks, to_value, level)
