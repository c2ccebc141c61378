# SPDX-License-Identifier: Apache-2.0
"""The copies that a copy engine gets move the bytes that a kernel would, and no others."""

import ctypes
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.blocks import ITEM_DTYPE, BlockLayout, Region
from kvxfer.blocks.cuda_fragments import Fragments
from kvxfer.blocks.host import gather_items, scatter_items
from kvxfer.errors import LayoutError

NUM_BLOCKS, NUM_LAYERS, NUM_TOKENS, NUM_HEADS, HEAD_BYTES = 9, 3, 4, 2, 16
PATTERN = 0xA5
LAYER_BYTES = NUM_TOKENS * NUM_HEADS * HEAD_BYTES
PADDING = 48


class Cache:
    """Pages [layer][block][...] or [block][layer][...], with padding behind each page."""

    def __init__(self, outermost, padding=PADDING, head_shard=None, order="token_major"):
        page = LAYER_BYTES + padding
        sizes = {"block": NUM_BLOCKS, "layer": NUM_LAYERS}
        inner = "layer" if outermost == "block" else "block"
        shape = (sizes[outermost], sizes[inner], page)
        rng = np.random.default_rng(5)
        self.memory = rng.integers(0, 256, shape, dtype=np.uint8)
        pages = self.memory if outermost == "layer" else self.memory.swapaxes(0, 1)
        axes = ("block", "token", "head", "content")
        strides = (pages.strides[1], NUM_HEADS * HEAD_BYTES, HEAD_BYTES, 1)
        views = [
            np.lib.stride_tricks.as_strided(
                pages[layer], (NUM_BLOCKS, NUM_TOKENS, NUM_HEADS, HEAD_BYTES), strides
            )
            for layer in range(NUM_LAYERS)
        ]
        self.layout = BlockLayout.from_regions(
            [Region(v, 0, f"l{i}", axes, heads=(0, NUM_HEADS)) for i, v in enumerate(views)],
            value_order=order,
            head_shard=head_shard,
        )
        self.fragments = Fragments(self.layout)


class Slot:
    """Host memory for values, with bytes before and behind."""

    def __init__(self, num_bytes, content=None):
        self.bytes = np.full(num_bytes + 128, PATTERN, dtype=np.uint8)
        if content is not None:
            self.bytes[64:-64] = content
        self.ptr = self.bytes.ctypes.data + 64
        self.memory = (self.ptr, self.ptr + num_bytes)


def items_of(layout, slot, block_ids, places, class_ids=0):
    step = layout.classes[0].value_bytes
    items = np.zeros(len(block_ids), dtype=ITEM_DTYPE)
    items["block_id"], items["class_id"] = block_ids, class_ids
    items["value_ptr"] = slot.ptr + np.array(places, dtype=np.uint64) * np.uint64(step)
    return items


def run(copies, order):
    """Do the copies in any order."""
    batch = list(zip(copies.targets, copies.sources, copies.sizes, strict=True))
    order.shuffle(batch)
    for target, source, size in batch:
        ctypes.memmove(int(target), int(source), int(size))


@st.composite
def jobs(draw):
    """Return blocks and a place in the slot for each, both in any order, some side by side."""
    block_ids = draw(st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True, max_size=NUM_BLOCKS))
    places = draw(st.permutations(range(len(block_ids))))
    return block_ids, places if draw(st.booleans()) else sorted(places)


LAYOUTS = pytest.mark.parametrize(
    "options",
    [
        {"outermost": "layer"},
        {"outermost": "block"},
        {"outermost": "block", "padding": 0},
        {"outermost": "layer", "head_shard": 1},
        {"outermost": "block", "padding": 0, "order": "head_major"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)


@LAYOUTS
@given(job=jobs(), order=st.randoms(use_true_random=False), seed=st.integers(0, 99))
def test_copies_move_what_the_host_path_moves(options, job, order, seed):
    cache = Cache(**options)
    num_classes = len(cache.layout.classes)
    size = len(job[0]) * cache.layout.classes[0].value_bytes
    ours, theirs = Slot(size), Slot(size)
    class_ids = np.random.default_rng(seed).integers(0, num_classes, len(job[0]))
    before = cache.memory.copy()
    run(
        cache.fragments.copies(
            items_of(cache.layout, ours, *job, class_ids), ours.memory, to_value=True
        ),
        order,
    )
    gather_items(cache.layout, items_of(cache.layout, theirs, *job, class_ids))
    assert np.array_equal(ours.bytes, theirs.bytes)
    assert np.array_equal(cache.memory, before)


@LAYOUTS
@given(job=jobs(), order=st.randoms(use_true_random=False))
def test_copies_bring_values_into_blocks_as_the_host_path_does(options, job, order):
    ours, theirs = Cache(**options), Cache(**options)
    size = len(job[0]) * ours.layout.classes[0].value_bytes
    slot = Slot(size, np.random.default_rng(6).integers(0, 256, size, dtype=np.uint8))
    before = slot.bytes.copy()
    items = items_of(ours.layout, slot, *job)
    run(ours.fragments.copies(items, slot.memory, to_value=False), order)
    scatter_items(theirs.layout, items)
    assert np.array_equal(ours.memory, theirs.memory)
    assert np.array_equal(slot.bytes, before)


def num_copies(cache, block_ids, places):
    slot = Slot(len(block_ids) * cache.layout.value_bytes)
    items = items_of(cache.layout, slot, block_ids, places)
    return len(cache.fragments.copies(items, slot.memory, to_value=True))


def test_blocks_side_by_side_are_one_copy_where_their_values_are_too():
    cache = Cache("block", padding=0)
    assert num_copies(cache, [2, 3, 4, 7], [0, 1, 2, 3]) == 2
    assert num_copies(cache, [4, 2, 3], [2, 0, 1]) == 1  # in whatever order items come
    assert num_copies(cache, [4, 3, 2], [0, 1, 2]) == 3  # values ascend, blocks descend
    assert num_copies(cache, [2, 4, 6], [0, 1, 2]) == 3


def test_padding_keeps_blocks_side_by_side_apart():
    assert num_copies(Cache("block", padding=PADDING), [2, 3], [0, 1]) == 2 * NUM_LAYERS


def test_copies_never_go_from_one_tensor_into_another():
    """The end of the last layer is where the first one begins: the driver refuses such a copy."""
    memory = np.zeros((2, NUM_BLOCKS, 64), dtype=np.uint8)
    layout = BlockLayout.from_tensors([memory[1], memory[0]])
    slot = Slot(2 * layout.value_bytes)
    items = items_of(layout, slot, [NUM_BLOCKS - 1, 0], [0, 1])
    copies = Fragments(layout).copies(items, slot.memory, to_value=True)
    assert copies.sizes.tolist() == [64] * 4


def test_copies_past_two_gibibytes_are_not_cut_short():
    layout = BlockLayout.from_tensors([np.empty((2, 3 << 30), dtype=np.uint8)])
    items = np.zeros(2, dtype=ITEM_DTYPE)
    items["block_id"], items["value_ptr"] = [0, 1], [1 << 40, (1 << 40) + (3 << 30)]
    copies = Fragments(layout).copies(items, (1 << 40, 1 << 41), to_value=True)
    assert copies.sizes.tolist() == [6 << 30]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"outermost": "block", "padding": 0}, NUM_LAYERS * LAYER_BYTES),
        ({"outermost": "layer"}, LAYER_BYTES),
        ({"outermost": "layer", "head_shard": 1}, HEAD_BYTES),
        ({"outermost": "layer", "order": "head_major"}, HEAD_BYTES),
    ],
    ids=["whole block", "page", "some heads", "other order"],
)
def test_smallest_fragment_is_what_is_contiguous_on_both_sides(options, expected):
    fragments = Cache(**options).fragments
    assert set(fragments.smallest_bytes.tolist()) == {expected}


def two_classes(first, second):
    """Return the fragments of two groups with a tensor each, ``first`` and ``second`` bytes."""
    regions = [
        Region(np.zeros((4, 1, size), np.uint8), group, f"l{group}", ("block", "token", "content"))
        for group, size in enumerate((first, second))
    ]
    return Fragments(BlockLayout.from_regions(regions))


def test_job_has_the_smallest_fragment_of_its_classes():
    fragments = two_classes(4096, 64)
    items = np.zeros(2, dtype=ITEM_DTYPE)
    assert fragments.smallest_of(items) == 4096
    items["class_id"] = [0, 1]
    assert fragments.smallest_of(items) == 64
    assert fragments.smallest_of(items[:0]) == 0


def test_values_with_zeros_between_segments_are_left_to_a_kernel():
    tensors = [np.zeros((4, 100), np.uint8), np.zeros((4, 100), np.uint8)]
    assert Fragments(BlockLayout.from_tensors(tensors)).smallest_bytes.tolist() == [0]


def test_segments_that_share_memory_are_left_to_a_kernel():
    tensor = np.zeros((4, 128), np.uint8)
    assert Fragments(BlockLayout.from_tensors([tensor, tensor])).smallest_bytes.tolist() == [0]


def job_of(cache, **fields):
    slot = Slot(2 * cache.layout.value_bytes)
    items = items_of(cache.layout, slot, [1, 2], [0, 1])
    for name, value in fields.items():
        items[name][1] = value
    return slot, items


@pytest.mark.parametrize("to_value", [True, False], ids=["pack", "unpack"])
def test_copies_of_bad_items_are_refused_as_by_a_kernel(to_value):
    cache = Cache("block", padding=0)
    for fields, error, told in [
        ({"block_id": NUM_BLOCKS}, IndexError, r"items\[1\].block_id is 9"),
        ({"block_id": -1}, IndexError, r"items\[1\].block_id is -1"),
        ({"class_id": 1}, IndexError, r"items\[1\].class_id is 1"),
    ]:
        slot, items = job_of(cache, **fields)
        cache.fragments.smallest_of(items)  # tells nothing, whatever items say
        with pytest.raises(error, match=told):
            cache.fragments.copies(items, slot.memory, to_value=to_value)
    slot, items = job_of(cache)
    with pytest.raises(ValueError, match="outside of the buffers"):
        cache.fragments.copies(items, (slot.memory[0], slot.memory[1] - 1), to_value=to_value)


def test_items_that_write_the_same_bytes_are_refused():
    cache = Cache("block", padding=0)
    slot, items = job_of(cache, block_id=1)
    with pytest.raises(LayoutError, match="two items write the bytes at 0x"):
        cache.fragments.copies(items, slot.memory, to_value=False)
    assert len(cache.fragments.copies(items, slot.memory, to_value=True)) == 2  # read twice
    slot, items = job_of(cache)
    items["value_ptr"][1] = items["value_ptr"][0] + np.uint64(16)
    with pytest.raises(LayoutError, match="two items write"):
        cache.fragments.copies(items, slot.memory, to_value=True)


def test_read_only_blocks_are_not_written():
    tensor = np.zeros((3, 64), np.uint8)
    tensor.flags.writeable = False
    layout = BlockLayout.from_tensors([tensor])
    slot = Slot(64)
    items = items_of(layout, slot, [0], [0])
    with pytest.raises(LayoutError, match="read-only"):
        Fragments(layout).copies(items, slot.memory, to_value=False)


def test_no_items_are_no_copies():
    cache = Cache("layer")
    copies = cache.fragments.copies(np.zeros(0, ITEM_DTYPE), (1, 2), to_value=True)
    assert len(copies) == 0
    run(copies, random.Random(0))
