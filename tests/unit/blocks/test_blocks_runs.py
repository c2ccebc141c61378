# SPDX-License-Identifier: Apache-2.0
"""Which runs a layout comes down to: as few as the strides of both sides allow."""

import numpy as np
import pytest

from kvxfer.blocks import BlockLayout, Region
from kvxfer.blocks.runs import Axis, Strided, merge_axes, merge_segments


def shape_of(layout):
    """Return (fragment bytes, outer count, inner count) of every run."""
    fields = ("fragment_bytes", "outer_count", "inner_count")
    return [tuple(int(run[field]) for field in fields) for run in layout.runs]


def layers_of(memory, num_layers, **kwargs):
    """Return one region per entry of the memory's first axis."""
    return [Region(memory[idx], 0, f"layer{idx}", **kwargs) for idx in range(num_layers)]


def test_runs_rows_become_one_fragment():
    indexer = np.zeros((5, 64, 132), dtype=np.uint8)
    assert shape_of(BlockLayout.from_tensors([indexer])) == [(8448, 1, 1)]


def test_runs_padded_rows_are_one_axis():
    rows = np.zeros((5, 64, 256), dtype=np.uint8)[:, :, :132]
    assert shape_of(BlockLayout.from_tensors([rows])) == [(132, 1, 64)]


def test_runs_token_major_page_sliced_by_heads_is_one_axis():
    page = np.zeros((3, 16, 8, 32), dtype=np.uint8)
    region = Region(page, 0, "a", axes=("block", "token", "head", "content"), heads=(0, 8))
    layout = BlockLayout.from_regions([region], head_shard=2)
    assert shape_of(layout) == [(64, 1, 16)] * 4


def test_runs_transposed_page_is_two_axes():
    page = np.zeros((3, 16, 8, 32), dtype=np.uint8)
    region = Region(page, 0, "a", axes=("block", "token", "head", "content"))
    layout = BlockLayout.from_regions([region], value_order="head_major")
    assert shape_of(layout) == [(32, 8, 16)]


def test_runs_layers_side_by_side_in_a_block_become_one_fragment():
    memory = np.zeros((6, 4, 2, 16, 32), dtype=np.uint8)  # [block][layer][head][token][content]
    layout = BlockLayout.from_regions(layers_of(memory.swapaxes(0, 1), 4))
    assert shape_of(layout) == [(4 * 2 * 16 * 32, 1, 1)]


def test_runs_layers_of_one_allocation_become_an_axis():
    memory = np.zeros((4, 6, 2, 16, 32), dtype=np.uint8)  # [layer][block][head][token][content]
    layout = BlockLayout.from_regions(layers_of(memory, 4))
    assert shape_of(layout) == [(2 * 16 * 32, 1, 4)]


def test_runs_layers_stay_apart_where_an_axis_more_would_be_three():
    memory = np.zeros((4, 6, 16, 8, 32), dtype=np.uint8)  # [layer][block][token][head][content]
    regions = layers_of(memory, 4, axes=("block", "token", "head", "content"))
    layout = BlockLayout.from_regions(regions, value_order="head_major")
    assert shape_of(layout) == [(32, 8, 16)] * 4


def test_runs_three_axes_are_split_along_the_shortest():
    page = np.zeros((3, 2, 16, 8, 32), dtype=np.uint8)
    region = Region(page, 0, "a", axes=("block", "part", "token", "head", "content"))
    layout = BlockLayout.from_regions([region], value_order="head_major")
    assert shape_of(layout) == [(32, 8, 16)] * 2


def test_runs_gaps_between_equal_segments_are_one_run():
    layers = [np.zeros((3, 12), dtype=np.uint8) for _ in range(5)]
    layout = BlockLayout.from_tensors(layers)
    row = layout.class_rows[0]
    assert row["num_runs"] - row["num_copy_runs"] == 1
    assert shape_of(layout)[-1] == (4, 1, 4)


@pytest.mark.parametrize(
    ("axes", "fragment", "merged"),
    [
        ([Axis(1, 99, 99)], 4, []),
        ([Axis(3, 4, 4)], 12, []),
        ([Axis(3, 8, 4)], 4, [Axis(3, 8, 4)]),
        ([Axis(2, 24, 12), Axis(3, 8, 4)], 4, [Axis(6, 8, 4)]),
        ([Axis(2, 25, 12), Axis(3, 8, 4)], 4, [Axis(2, 25, 12), Axis(3, 8, 4)]),
        ([Axis(2, 8, 24), Axis(3, 16, 8), Axis(2, 4, 4)], 8, [Axis(2, 8, 24), Axis(3, 16, 8)]),
        ([Axis(4, -4, 4)], 4, [Axis(4, -4, 4)]),
    ],
)
def test_runs_merge_of_axes(axes, fragment, merged):
    result = merge_axes(Strided(0, 0, 0, 4, tuple(axes)))
    assert (list(result.axes), result.fragment_bytes) == (merged, fragment)


def test_runs_of_no_bytes_vanish():
    assert merge_segments([Strided(0, 0, 0, 4, (Axis(0, 4, 4),))]) == []
