# SPDX-License-Identifier: Apache-2.0
"""The copy loops: every kind of store, fragment size and address, few fragments and many."""

import itertools

import numpy as np
import pytest

from kvxfer._native import block_copy
from kvxfer.blocks import ITEM_DTYPE, BlockLayout, host

PATTERN = 0xA5
LEVELS = {"memcpy": 0, "avx2": 1, "avx512": 2}
SIZES = [1, 15, 63, 64, 65, 132, 255, 256, 656, 1023, 1024, 4095, 4096, 4097, 16384, 49380]


@pytest.fixture(params=LEVELS, ids="stores={}".format)
def level(request):
    wanted = LEVELS[request.param]
    if wanted > block_copy.copy_level():
        pytest.skip(f"this CPU has no {request.param}")
    return wanted


class Pool:
    """Blocks of one fragment each, ``gap`` bytes apart, and a row of pattern around each value."""

    def __init__(self, size, num_blocks, offset, gap):
        rng = np.random.default_rng(size)
        self.memory = rng.integers(0, 256, 64 + num_blocks * (size + gap), dtype=np.uint8)
        start = (-self.memory.ctypes.data + offset) % 64
        self.blocks = np.ndarray((num_blocks, size), np.uint8, self.memory, start, (size + gap, 1))
        self.layout = BlockLayout.from_tensors([self.blocks])
        self.values = np.full(64 + num_blocks * (size + gap), PATTERN, dtype=np.uint8)
        first = (-self.values.ctypes.data + offset) % 64
        self.rows = np.ndarray((num_blocks, size), np.uint8, self.values, first, (size + gap, 1))
        self.ids = rng.permutation(num_blocks)
        self.items = np.zeros(num_blocks, dtype=ITEM_DTYPE)
        self.items["block_id"] = self.ids
        self.items["value_ptr"] = self.rows.ctypes.data + np.arange(num_blocks) * (size + gap)


def written(memory, rows, content):
    """Return what ``memory`` is once its view ``rows`` holds ``content``."""
    expected = memory.copy()
    offset = rows.ctypes.data - memory.ctypes.data
    np.ndarray(rows.shape, np.uint8, expected, offset, rows.strides)[...] = content
    return expected


@pytest.mark.parametrize("size", SIZES, ids="size={}".format)
def test_gather_loops_write_their_bytes_and_no_other(level, size):
    for pool in pools(size):
        expected = written(pool.values, pool.rows, pool.blocks[pool.ids])
        source = pool.memory.copy()
        host.gather_items(pool.layout, pool.items, level=level)
        assert np.array_equal(pool.values, expected)
        assert np.array_equal(pool.memory, source)


@pytest.mark.parametrize("size", SIZES, ids="size={}".format)
def test_scatter_loops_write_their_bytes_and_no_other(level, size):
    for pool in pools(size):
        blocks = np.empty_like(pool.blocks)
        blocks[pool.ids] = pool.rows
        expected = written(pool.memory, pool.blocks, blocks)
        source = pool.values.copy()
        host.scatter_items(pool.layout, pool.items, level=level)
        assert np.array_equal(pool.memory, expected)
        assert np.array_equal(pool.values, source)


def pools(size):
    """Yield pools of fewer blocks than lanes, as many, and more, at aligned and odd addresses."""
    for offset, num_blocks in itertools.product([0, 1, 16, 48], [1, 7, 8, 9, 17, 33]):
        yield Pool(size, num_blocks, offset, gap=offset * 5)


@pytest.mark.parametrize("size", [8, 256, 4096], ids="size={}".format)
def test_loops_copy_more_fragments_than_the_queue_holds(level, size):
    pool = Pool(size, 1300, offset=0, gap=0)
    host.gather_items(pool.layout, pool.items, level=level)
    assert np.array_equal(pool.rows, pool.blocks[pool.ids])


def test_loops_copy_sizes_that_alternate_between_the_loops(level):
    tensors = [np.random.default_rng(s).integers(0, 256, (40, s), np.uint8) for s in (5000, 100)]
    layout = BlockLayout.from_tensors([*tensors, *reversed(tensors)])
    out = np.full((40, layout.value_bytes), PATTERN, dtype=np.uint8)
    items = np.zeros(40, dtype=ITEM_DTYPE)
    items["block_id"] = np.arange(40)
    items["value_ptr"] = out.ctypes.data + np.arange(40) * layout.value_bytes
    host.gather_items(layout, items, level=level)
    expected = np.zeros_like(out)
    for segment, tensor in zip(
        layout.classes[0].segments, [*tensors, *reversed(tensors)], strict=True
    ):
        expected[:, segment.value_offset : segment.value_offset + segment.num_bytes] = tensor
    assert np.array_equal(out, expected)


@pytest.mark.parametrize("total", [1 << 16, 1 << 19, 9 << 20], ids="bytes={}".format)
@pytest.mark.parametrize("size", [1024, 8192], ids="size={}".format)
def test_loops_chosen_by_the_size_of_the_job_copy_the_same(size, total):
    pool = Pool(size, total // size, offset=0, gap=0)
    host.gather_items(pool.layout, pool.items)
    assert np.array_equal(pool.rows, pool.blocks[pool.ids])
    pool.rows[...] = 255 - pool.rows
    host.scatter_items(pool.layout, pool.items)
    assert np.array_equal(pool.rows, pool.blocks[pool.ids])


def test_loops_refuse_a_level_that_the_cpu_does_not_run():
    pool = Pool(64, 1, offset=0, gap=0)
    with pytest.raises(
        ValueError, match=f"level is 3, this CPU runs up to {block_copy.copy_level()}"
    ):
        host.gather_items(pool.layout, pool.items, level=3)
