# SPDX-License-Identifier: Apache-2.0
"""The values of a job as arrays, and their cut into batches."""

import hashlib
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.blocks import ITEM_DTYPE
from kvxfer.keys import KeySpace
from kvxfer.transfer import Chunks
from kvxfer.transfer.pieces import VALUE_ALIGN, Pieces

SPACES = {
    0: [KeySpace(0, b"a/", 0, 100), KeySpace(0, b"b/", 3, 260)],
    1: [KeySpace(1, b"c/", 1, 64)],
}


def chunks(group, block_ids, first=0):
    numbers = range(first, first + len(block_ids))
    packed = b"".join(hashlib.sha256(bytes([n])).digest() for n in numbers)
    return Chunks(group, np.array(block_ids, np.int32), packed, 32)


def key(prefix, number):
    return prefix + hashlib.sha256(bytes([number])).hexdigest().encode()


def pieces_of_sizes(sizes):
    counts = np.arange(len(sizes), dtype=np.int32)
    return Pieces([b"%d" % n for n in counts], np.array(sizes, np.int64), counts, counts, counts)


def test_values_of_a_chunk_stand_together_and_chunks_count_through_the_groups():
    pieces = Pieces.of([chunks(0, [7, 9]), chunks(1, [5], first=2)], SPACES)
    assert pieces.keys == [
        key(b"a/", 0),
        key(b"b/", 0),
        key(b"a/", 1),
        key(b"b/", 1),
        key(b"c/", 2),
    ]
    assert pieces.sizes.tolist() == [100, 260, 100, 260, 64]
    assert pieces.block_ids.tolist() == [7, 7, 9, 9, 5]
    assert pieces.class_ids.tolist() == [0, 3, 0, 3, 1]
    assert pieces.chunk_idx.tolist() == [0, 0, 1, 1, 2]


def test_a_group_without_spaces_has_no_values_but_its_chunks_count():
    pieces = Pieces.of([chunks(2, [4, 6]), chunks(1, [5])], SPACES)
    assert pieces.keys == [key(b"c/", 0)]
    assert pieces.chunk_idx.tolist() == [2]
    assert len(Pieces.of([chunks(2, [4])], SPACES)) == len(Pieces.of([], SPACES)) == 0


@given(num_turns=st.integers(2, 5), num_chunks=st.integers(1, 40))
def test_replicas_share_the_chunks_and_no_two_have_the_same(num_turns, num_chunks):
    own = KeySpace(0, b"own/", 1, 64)
    parts = []
    for turn in range(num_turns):
        shared = KeySpace(0, b"shared/", 0, 128, turn, num_turns)
        pieces = Pieces.of([chunks(0, range(1, num_chunks + 1))], {0: [shared, own]})
        assert [k for k in pieces.keys if k.startswith(b"own/")] == [
            key(b"own/", number) for number in range(num_chunks)
        ]
        parts.append([k for k in pieces.keys if k.startswith(b"shared/")])
        by_key = dict(zip(pieces.keys, pieces.block_ids.tolist(), strict=True))
        assert all(by_key[k] == by_key[b"own/" + k.removeprefix(b"shared/")] for k in parts[-1])
    assert sorted(itertools.chain(*parts)) == sorted(
        key(b"shared/", number) for number in range(num_chunks)
    )


def test_select_keeps_the_chosen_values():
    pieces = Pieces.of([chunks(0, [7, 9])], SPACES)
    assert pieces.select(np.ones(4, np.bool_)) is pieces
    kept = pieces.select(np.array([False, True, True, False]))
    assert kept.keys == [key(b"b/", 0), key(b"a/", 1)]
    assert kept.sizes.tolist() == [260, 100]
    assert kept.block_ids.tolist() == [7, 9]
    assert kept.class_ids.tolist() == [3, 0]
    assert kept.chunk_idx.tolist() == [0, 1]


@given(st.lists(st.integers(0, 700), max_size=40), st.sampled_from([704, 1000, 4096]))
def test_batches_are_the_longest_that_fit(sizes, slot_bytes):
    pieces = pieces_of_sizes(sizes)
    batches = list(pieces.batches(slot_bytes))
    assert [n for batch in batches for n in range(batch.start, batch.stop)] == [*range(len(sizes))]
    padded = [-(-size // VALUE_ALIGN) * VALUE_ALIGN for size in sizes]
    for batch in batches:
        starts = [*itertools.accumulate(padded[batch.rows], initial=0)]
        assert batch.offsets.tolist() == starts[:-1]
        assert starts[-1] <= slot_bytes
        assert batch.stop == len(sizes) or starts[-1] + padded[batch.stop] > slot_bytes


def test_values_of_a_page_and_more_begin_on_pages_where_all_are_so_large():
    (batch,) = pieces_of_sizes([4096, 5000, 9000]).batches(1 << 20)
    assert batch.offsets.tolist() == [0, 4096, 12288]
    assert batch.num_bytes == 24576
    (batch,) = pieces_of_sizes([4095, 5000]).batches(1 << 20)
    assert batch.offsets.tolist() == [0, 4096]
    assert batch.num_bytes == 4096 + 5056


def test_batches_refuse_a_value_that_never_fits():
    with pytest.raises(ValueError, match="a value has 576 bytes, a staging slot 512"):
        list(pieces_of_sizes([64, 513]).batches(512))


def test_items_and_views_say_where_each_value_of_a_batch_lies():
    pieces = Pieces.of([chunks(0, [7, 9])], SPACES)
    first, second = pieces.batches(512)
    items = pieces.items(second, 1 << 40)
    assert items.dtype == ITEM_DTYPE
    assert items["value_ptr"].tolist() == [1 << 40, (1 << 40) + 128]
    assert items["block_id"].tolist() == [9, 9]
    assert items["class_id"].tolist() == [0, 3]
    slot = memoryview(bytearray(range(256)) * 2)
    views = pieces.views(first, slot)
    assert [(len(view), view[0]) for view in views] == [(100, 0), (260, 128)]
