# SPDX-License-Identifier: Apache-2.0
"""PackedHashes behaves like the list that it was packed from."""

import gc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.lookup import PackedHashes

HASHES = [bytes([number]) * 4 for number in range(6)]

widths_and_counts = st.tuples(st.integers(1, 40), st.integers(0, 30))


@st.composite
def hash_lists(draw):
    width, count = draw(widths_and_counts)
    return [draw(st.binary(min_size=width, max_size=width)) for _ in range(count)]


@given(hash_lists(), st.slices(30))
def test_packed_hashes_equal_the_list_they_came_from(hashes, piece):
    packed = PackedHashes.pack(hashes)
    assert list(packed) == hashes
    assert [packed[index] for index in range(len(packed))] == hashes
    assert [packed[index - len(packed)] for index in range(len(packed))] == hashes
    assert list(packed[piece]) == hashes[piece]
    assert bytes(packed.buffer) == b"".join(hashes)


def test_packed_hashes_keep_the_width_of_the_first():
    assert PackedHashes.pack(HASHES).width == 4
    assert PackedHashes.pack([]).width == 0


def test_packed_hashes_are_not_packed_again():
    packed = PackedHashes.pack(HASHES)
    assert PackedHashes.pack(packed) is packed


def test_packed_hashes_slice_shares_the_buffer():
    owner = bytearray(b"".join(HASHES))
    piece = PackedHashes(owner, 4)[2:4]
    owner[8] = 99
    assert piece[0][0] == 99


def test_packed_hashes_buffer_is_read_only():
    buffer = PackedHashes(bytearray(8), 4).buffer
    with pytest.raises(TypeError):
        buffer[0] = 1


def test_packed_hashes_outlive_the_owner_of_the_buffer():
    owner = bytearray(b"".join(HASHES))
    packed = PackedHashes(owner, 4)
    del owner
    gc.collect()
    assert list(packed) == HASHES


@pytest.mark.parametrize("index", [6, -7])
def test_packed_hashes_refuse_an_index_outside(index):
    with pytest.raises(IndexError, match=rf"hash {index} of 6"):
        PackedHashes.pack(HASHES)[index]


@pytest.mark.parametrize(("size", "width"), [(10, 4), (4, 0), (4, -1), (0, -1)])
def test_packed_hashes_refuse_a_broken_number_of_hashes(size, width):
    with pytest.raises(ValueError, match="no whole number"):
        PackedHashes(bytes(size), width)


def test_pack_refuses_hashes_of_several_widths():
    with pytest.raises(ValueError, match="differ in width"):
        PackedHashes.pack([b"four", b"fives"])


def test_packed_hashes_compare_by_content():
    assert PackedHashes(b"aabb", 2) == PackedHashes(bytearray(b"aabb"), 2)
    assert PackedHashes(b"aabb", 2) != PackedHashes(b"aabb", 4)
    assert PackedHashes(b"aabb", 2) != [b"aa", b"bb"]
