# SPDX-License-Identifier: Apache-2.0
"""The GPU kernel's loop on the CPU: the same plan, items and index arithmetic, for tests."""

from __future__ import annotations

import numpy as np

from kvxfer._native import block_copy
from kvxfer.blocks import plan
from kvxfer.blocks.layout import BlockLayout

NUM_WARPS = 7


def gather_items(layout: BlockLayout, items: plan.Table) -> int:
    """Copy every item's block into its value as the kernel would; return misaligned units."""
    return _simulate(layout, items, to_value=True)


def scatter_items(layout: BlockLayout, items: plan.Table) -> int:
    """Copy every item's value into its block as the kernel would; return misaligned units."""
    return _simulate(layout, items, to_value=False)


def _simulate(layout: BlockLayout, items: plan.Table, *, to_value: bool) -> int:
    ordered = items[np.argsort(items["class_id"], kind="stable")]
    tiles, first_tile = layout.tiles
    spans = plan.span_table(ordered, layout.class_rows, first_tile, to_value=to_value)
    return block_copy.simulate_copy(layout.runs, tiles, spans, ordered, to_value, NUM_WARPS)
