# SPDX-License-Identifier: Apache-2.0
"""The faces of the host path: what they copy, what they leave alone, what they refuse."""

import gc
import mmap

import numpy as np
import pytest

from kvxfer.blocks import (
    ITEM_DTYPE,
    BlockLayout,
    Region,
    gather,
    gather_items,
    scatter,
    scatter_items,
)
from kvxfer.errors import LayoutError

PATTERN = 0xA5
GIB = 1 << 30


def numbered(*shape, dtype=np.uint8):
    """Return an array of which no two blocks are alike."""
    num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    data = np.random.default_rng(3).integers(0, 256, num_bytes, dtype=np.uint8)
    return data.view(dtype).reshape(shape)


def rows_for(layout, num_rows):
    return np.full((num_rows, layout.value_bytes), PATTERN, dtype=np.uint8)


def items_for(values, block_ids, class_ids):
    """Return items whose values are the rows of ``values``."""
    items = np.zeros(len(block_ids), dtype=ITEM_DTYPE)
    items["value_ptr"] = values.ctypes.data + np.arange(len(block_ids)) * values.shape[1]
    items["block_id"] = block_ids
    items["class_id"] = class_ids
    return items


def test_gather_writes_tensors_one_after_the_other_with_zeros_between():
    a, b = numbered(4, 5), numbered(4, 2, 3, dtype=np.int16)
    layout = BlockLayout.from_tensors([a, b])
    out = rows_for(layout, 2)
    gather(layout, [3, 1], out)
    for row, block in zip(out, (3, 1), strict=True):
        assert row.tobytes() == a[block].tobytes() + b"\0" * 11 + b[block].tobytes()


def test_scatter_is_the_reverse_of_gather():
    a, b = numbered(4, 5), numbered(4, 2, 3, dtype=np.int16)
    out = rows_for(layout := BlockLayout.from_tensors([a, b]), 2)
    gather(layout, [3, 1], out)
    targets = [np.full_like(a, PATTERN), np.full_like(b, 0x5A5A)]
    expected = [target.copy() for target in targets]
    for target, source in zip(expected, (a, b), strict=True):
        target[[3, 1]] = source[[3, 1]]
    source = out.copy()
    scatter(BlockLayout.from_tensors(targets), [3, 1], out)
    assert all(np.array_equal(*pair) for pair in zip(targets, expected, strict=True))
    assert np.array_equal(out, source)


@pytest.mark.parametrize("mask", [[True, False, True], np.array([1, 0, 7], dtype=np.uint8)])
def test_gather_leaves_masked_rows_untouched(mask):
    cache = numbered(4, 64)
    out = rows_for(layout := BlockLayout.from_tensors([cache]), 3)
    gather(layout, [2, 999, 0], out, mask)  # the id of a masked row is not looked at
    assert np.array_equal(out[[0, 2]], cache[[2, 0]])
    assert (out[1] == PATTERN).all()


def test_scatter_leaves_masked_blocks_untouched():
    cache, source = numbered(4, 64), np.full((3, 64), PATTERN, dtype=np.uint8)
    expected = cache.copy()
    expected[[2, 0]] = PATTERN
    scatter(BlockLayout.from_tensors([cache]), [2, 2, 0], source, [False, True, True])
    assert np.array_equal(cache, expected)


@pytest.mark.parametrize("mask", [None, [0, 0, 0]], ids=["no_blocks", "empty_mask"])
def test_copies_of_nothing_touch_nothing(mask):
    cache = numbered(4, 64)
    before = cache.copy()
    layout = BlockLayout.from_tensors([cache])
    ids = [] if mask is None else [0, 1, 2]
    rows = rows_for(layout, len(ids))
    gather(layout, ids, rows, mask)
    scatter(layout, ids, rows, mask)
    assert (rows == PATTERN).all()
    assert np.array_equal(cache, before)


def test_copies_of_blocks_without_bytes_are_fine():
    layout = BlockLayout.from_tensors([numbered(4, 0)])
    gather(layout, [0, 3], np.empty((2, 0), dtype=np.uint8))
    scatter(layout, [0, 3], np.empty((2, 0), dtype=np.uint8))


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.int32, np.int64, np.uint64])
def test_gather_takes_block_ids_of_any_integer_type(dtype):
    cache = numbered(4, 64)
    out = rows_for(layout := BlockLayout.from_tensors([cache]), 2)
    gather(layout, np.array([3, 0], dtype=dtype), out)
    assert np.array_equal(out, cache[[3, 0]])


def test_gather_takes_a_block_twice():
    cache = numbered(4, 64)
    out = rows_for(layout := BlockLayout.from_tensors([cache]), 3)
    gather(layout, [1, 1, 2], out)
    assert np.array_equal(out, cache[[1, 1, 2]])


def test_scatter_refuses_a_block_twice():
    layout = BlockLayout.from_tensors([numbered(4, 64)])
    with pytest.raises(LayoutError, match="block_ids names block 1 more than once"):
        scatter(layout, [1, 3, 1], rows_for(layout, 3))


@pytest.mark.parametrize("block_id", [-1, 4, 2**31, 2**40, -(2**40)])
def test_copies_name_the_first_block_outside_the_pool(block_id):
    cache = numbered(4, 64)
    before, layout = cache.copy(), BlockLayout.from_tensors([cache])
    rows = rows_for(layout, 3)
    for copy in (gather, scatter):
        with pytest.raises(IndexError, match=rf"block_ids\[1\] is {block_id}, the layout has 4 b"):
            copy(layout, [3, block_id, -9], rows)
    assert (rows == PATTERN).all()
    assert np.array_equal(cache, before)


@pytest.mark.parametrize("rows", [np.zeros((2, 63), np.uint8), np.zeros((3, 64), np.uint8)])
def test_copies_refuse_rows_of_another_shape(rows):
    layout = BlockLayout.from_tensors([numbered(4, 64)])
    with pytest.raises(LayoutError, match=r"out is uint8 of shape .* uint8 of shape \(2, 64\)"):
        gather(layout, [0, 1], rows)
    with pytest.raises(LayoutError, match=r"source is uint8 of shape"):
        scatter(layout, [0, 1], rows)


def test_copies_refuse_rows_of_another_type():
    layout = BlockLayout.from_tensors([numbered(4, 64)])
    with pytest.raises(LayoutError, match="out is int8 of shape"):
        gather(layout, [0], np.zeros((1, 64), dtype=np.int8))


def test_copies_refuse_rows_that_are_not_contiguous():
    layout = BlockLayout.from_tensors([numbered(4, 64)])
    for rows in (np.zeros((2, 128), np.uint8)[:, ::2], np.zeros((4, 64), np.uint8)[::2]):
        with pytest.raises(LayoutError, match="out is not C-contiguous"):
            gather(layout, [0, 1], rows)


def test_copies_refuse_block_ids_that_are_no_list_of_integers():
    layout = BlockLayout.from_tensors([numbered(4, 64)])
    for ids in ([0.0, 1.0], [[0, 1]], [True, False]):
        with pytest.raises(
            LayoutError, match=r"block_ids is .*pass a list or 1-D array of integers"
        ):
            gather(layout, ids, rows_for(layout, 2))


@pytest.mark.parametrize("mask", [[True], [0.5, 0.5], [[1, 0]]])
def test_copies_refuse_a_mask_that_does_not_fit(mask):
    layout = BlockLayout.from_tensors([numbered(4, 64)])
    with pytest.raises(LayoutError, match=r"mask is .*pass \(2,\) of bool or 0/1"):
        gather(layout, [0, 1], rows_for(layout, 2), mask)


def test_gather_refuses_a_read_only_target():
    rows = rows_for(layout := BlockLayout.from_tensors([numbered(4, 64)]), 1)
    rows.flags.writeable = False
    with pytest.raises(LayoutError, match="out is read-only"):
        gather(layout, [0], rows)


def test_scatter_refuses_read_only_tensors():
    cache = numbered(4, 64)
    cache.flags.writeable = False
    layout = BlockLayout.from_tensors([numbered(4, 64), cache])
    with pytest.raises(LayoutError, match="a tensor of the layout is read-only"):
        scatter(layout, [0], rows_for(layout, 1))


def test_faces_refuse_a_layout_of_several_classes():
    layout = BlockLayout.from_regions(
        [Region(numbered(4, 2, 8, 8), 0, "a", heads=(0, 2))], head_shard=1
    )
    with pytest.raises(LayoutError, match="2 classes of values; use items"):
        gather(layout, [0], np.zeros((1, 64), dtype=np.uint8))


def test_items_move_every_class_of_a_job_in_one_call():
    a, b = numbered(4, 2, 8, 8), numbered(4, 1, 8, 16)
    regions = [Region(a, 0, "a", heads=(0, 2)), Region(b, 1, "b")]
    layout = BlockLayout.from_regions(regions, head_shard=1)
    values = np.full((3, 128), PATTERN, dtype=np.uint8)
    items = items_for(
        values, [3, 2, 3], [layout.class_id(0, (1, 2)), 2, layout.class_id(0, (0, 1))]
    )
    gather_items(layout, items)
    assert values[0, :64].tobytes() == a[3, 1].tobytes()
    assert values[1].tobytes() == b[2].tobytes()
    assert values[2, :64].tobytes() == a[3, 0].tobytes()
    assert (values[[0, 2], 64:] == PATTERN).all()
    blocks, expected = (a, b), (a.copy(), b.copy())
    for block in blocks:
        block[...] = 0
    scatter_items(layout, items)
    for block, whole, touched in zip(blocks, expected, ([3], [2]), strict=True):
        assert np.array_equal(block[touched], whole[touched])
        assert not block[[idx for idx in range(4) if idx not in touched]].any()


@pytest.mark.parametrize(
    ("field", "value", "error", "message"),
    [
        ("block_id", 4, IndexError, r"items\[1\].block_id is 4, the layout has 4 blocks"),
        ("block_id", -1, IndexError, r"items\[1\].block_id is -1"),
        ("class_id", 1, IndexError, r"items\[1\].class_id is 1, the layout has 1 classes"),
        ("class_id", -1, IndexError, r"items\[1\].class_id is -1"),
        ("value_ptr", 0, ValueError, r"items\[1\].value_ptr is 0"),
    ],
)
@pytest.mark.parametrize("copy", [gather_items, scatter_items])
def test_items_name_the_first_that_cannot_be_copied(copy, field, value, error, message):
    cache = numbered(4, 64)
    before, layout = cache.copy(), BlockLayout.from_tensors([cache])
    values = rows_for(layout, 2)
    items = items_for(values, [0, 1], 0)
    items[field][1] = value
    with pytest.raises(error, match=message):
        copy(layout, items)
    assert (values == PATTERN).all()
    assert np.array_equal(cache, before)


def test_items_refuse_another_type():
    layout = BlockLayout.from_tensors([numbered(4, 64)])
    items = np.zeros(4, dtype=ITEM_DTYPE)
    for wrong in (np.zeros(4, dtype=np.int64), items[::2], items.reshape(2, 2)):
        with pytest.raises(LayoutError, match="pass a contiguous 1-D array of ITEM_DTYPE"):
            gather_items(layout, wrong)


def test_copies_work_when_the_tensors_have_no_other_owner():
    cache = numbered(64, 4096)
    expected = cache[[5, 63]].copy()
    layout = BlockLayout.from_tensors([cache])
    del cache
    gc.collect()
    out = rows_for(layout, 2)
    gather(layout, [5, 63], out)
    assert np.array_equal(out, expected)


def sparse(num_bytes):
    """Return zeroed bytes of which only the touched pages take memory."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    return np.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), dtype=np.uint8)


def test_copies_reach_blocks_past_2_to_the_31_bytes():
    block_bytes = 1 << 20
    cache = sparse(5 * GIB).reshape(-1, block_bytes)
    layout = BlockLayout.from_tensors([cache[:, :100], cache[:, 4096:4196]])
    ids = [len(cache) - 1, 2049, 0]
    source = numbered(3, layout.value_bytes)
    source[:, 100:112] = 0
    scatter(layout, ids, source)
    assert np.array_equal(cache[ids, :100], source[:, :100])
    assert np.array_equal(cache[ids, 4096:4196], source[:, 112:])
    out = rows_for(layout, 3)
    gather(layout, ids, out)
    assert np.array_equal(out, source)


def test_copies_reach_rows_past_2_to_the_31_bytes():
    row_bytes = 1 << 20
    cache = numbered(2, row_bytes)
    rows = sparse(3 * GIB).reshape(-1, row_bytes)
    layout = BlockLayout.from_tensors([cache])
    mask = np.zeros(len(rows), dtype=np.uint8)
    mask[[0, 2500, len(rows) - 1]] = 1
    gather(layout, np.arange(len(rows)) % 2, rows, mask)
    for row in np.flatnonzero(mask):
        assert np.array_equal(rows[row], cache[row % 2])
    assert not rows[1, :: mmap.PAGESIZE].any()


def test_copies_reach_heads_past_2_to_the_31_bytes():
    memory = sparse(5 * GIB).reshape(4, 5 * 256, 1 << 20)  # [head][block][token and content]
    cache = memory[:, :, : 16 * 64].reshape(4, 5 * 256, 16, 64)
    region = Region(cache, 0, "a", axes=("head", "block", "token", "content"), heads=(0, 4))
    source = numbered(1, 4 * 16 * 64)
    layout = BlockLayout.from_regions([region])
    scatter(layout, [1279], source)
    assert np.array_equal(cache[:, 1279].reshape(1, -1), source)
