# SPDX-License-Identifier: Apache-2.0
import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer import keys
from kvxfer._native.keys import build_keys, build_shard_keys, pack_hashes

HASHES = [hashlib.sha256(bytes([i])).digest() for i in range(8)]
PACKED = b"".join(HASHES)


def test_build_keys_joins_prefix_and_hexadecimal_hash():
    idx = np.array([7, 0, 3, 3], dtype=np.int32)
    assert build_keys(b"p/", PACKED, 32, idx) == [b"p/" + HASHES[i].hex().encode() for i in idx]


@given(
    width=st.integers(1, 64),
    data=st.binary(min_size=64, max_size=640),
    picks=st.lists(st.integers(0, 9)),
)
def test_build_keys_equals_the_obvious_loop(width, data, picks):
    num = len(data) // width
    packed = data[: num * width]
    idx = np.array([pick % num for pick in picks], dtype=np.int32)
    expected = [b"x" + packed[i * width : (i + 1) * width].hex().encode() for i in idx]
    assert build_keys(b"x", packed, width, idx) == expected


@pytest.mark.parametrize("bad", [-1, 8], ids=["negative", "past_the_end"])
def test_build_keys_names_the_first_index_outside(bad):
    idx = np.array([0, bad, 99], dtype=np.int32)
    with pytest.raises(IndexError, match=rf"hash_idx\[1\] is {bad}, there are 8 hashes"):
        build_keys(b"", PACKED, 32, idx)


@pytest.mark.parametrize("width", [0, -1, 33])
def test_build_keys_refuses_a_torn_buffer(width):
    with pytest.raises(ValueError, match=r"hash_bytes|no multiple"):
        build_keys(b"", PACKED, width, np.zeros(1, dtype=np.int32))


def test_build_keys_of_nothing_is_empty():
    assert build_keys(b"p", b"", 32, np.zeros(0, dtype=np.int32)) == []


@given(
    prefixes=st.lists(st.binary(max_size=9), max_size=4),
    width=st.integers(1, 40),
    picks=st.lists(st.integers(0, 7)),
)
def test_build_shard_keys_keeps_the_keys_of_a_hash_together(prefixes, width, picks):
    packed = b"".join(one[:width].ljust(width, b".") for one in HASHES)
    idx = np.array(picks, dtype=np.int32)
    built = build_shard_keys(tuple(prefixes), packed, width, idx)
    texts = [packed[i * width : (i + 1) * width].hex().encode() for i in picks]
    assert built == [prefix + text for text in texts for prefix in prefixes]


def test_shard_keys_are_those_of_each_space():
    spaces = [keys.KeySpace(0, b"one/"), keys.KeySpace(0, b"another/")]
    idx = np.array([5, 1], dtype=np.int32)
    by_space = [space.keys(PACKED, 32, idx) for space in spaces]
    expected = [key for of_hash in zip(*by_space, strict=True) for key in of_hash]
    assert keys.shard_keys(spaces, PACKED, 32, idx) == expected


@given(st.lists(st.integers(0, 7)))
def test_pack_hashes_joins_the_chosen_hashes(picks):
    packed = pack_hashes(HASHES, np.array(picks, dtype=np.int32))
    assert packed == b"".join(HASHES[i] for i in picks)


@pytest.mark.parametrize("bad", [-1, 8], ids=["negative", "past_the_end"])
def test_pack_hashes_names_the_first_index_outside(bad):
    with pytest.raises(IndexError, match=rf"hash_idx\[1\] is {bad}, there are 8 hashes"):
        pack_hashes(HASHES, np.array([0, bad], dtype=np.int32))


def test_pack_hashes_refuses_hashes_of_two_lengths():
    with pytest.raises(ValueError, match=r"block_hashes\[1\] has 2 bytes"):
        pack_hashes([b"abc", b"ab"], np.array([0, 1], dtype=np.int32))


def test_longest_possible_key_fits_the_511_bytes_of_lmdb():
    prefix = keys.key_prefix("p" * 500, "m" * 500, "d" * 32, "g" * 16, 999, (10**6, 10**6))
    assert len(prefix) + 2 * keys.MAX_HASH_BYTES <= 511


def test_key_prefix_has_one_component_per_fact():
    prefix = keys.key_prefix("pool", "Llama-3", "d1", "g1", 2, (0, 8))
    assert prefix == b"kvx1/pool/Llama-3/d1/g1/p2/h0-8/"
    assert keys.key_prefix("pool", "Llama-3", "d1", "g1", 2, None).endswith(b"/p2/all/")
    assert prefix.startswith(keys.reset_prefix("pool", "Llama-3"))


@given(st.text(max_size=80), st.text(max_size=80))
def test_path_name_is_one_safe_component_and_tells_names_apart(one, other):
    component = keys.path_name(one)
    assert component
    assert "/" not in component
    assert component.isascii()
    assert (component == keys.path_name(other)) == (one == other)


def test_engine_digest_ignores_order_and_sees_every_value():
    facts = {"a": 1, "b": [1, None], "c": "x"}
    assert keys.engine_digest(facts) == keys.engine_digest(dict(reversed(facts.items())))
    for name in facts:
        assert keys.engine_digest({**facts, name: "other"}) != keys.engine_digest(facts)


def test_engine_digest_refuses_what_is_no_json():
    with pytest.raises(ValueError, match="no JSON value"):
        keys.engine_digest({"a": object()})
