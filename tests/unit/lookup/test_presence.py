# SPDX-License-Identifier: Apache-2.0
"""Presence of chunks over several shards: right answers, in few and bounded calls."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import StoreError
from kvxfer.keys import KeySpace
from kvxfer.lookup import PackedHashes
from kvxfer.lookup import presence as presence_module
from kvxfer.lookup.presence import StorePresence

HASHES = [hashlib.sha256(i.to_bytes(4, "little")).digest() for i in range(4096)]


class SetStore:
    """The one call of a store that presence makes."""

    def __init__(self, keys=()):
        self.keys = set(keys)
        self.calls = []

    def exists(self, keys):
        self.calls.append(len(keys))
        return bytearray(key in self.keys for key in keys)


def spaces(num_shards, group=0):
    return [KeySpace(group, f"g{group}/s{shard}/".encode()) for shard in range(num_shards)]


def stored(spaces, rows):
    """Return the keys of (shard, hash index) pairs."""
    return [spaces[shard].prefix + HASHES[idx].hex().encode() for shard, idx in rows]


def presence(store, by_group, num_hashes=4096):
    return StorePresence(store, by_group, PackedHashes.pack(HASHES[:num_hashes]))


def indices(*values):
    return np.array(values, dtype=np.int32)


@given(
    num_shards=st.integers(1, 4),
    pairs=st.sets(st.tuples(st.integers(0, 3), st.integers(0, 9))),
    at_once=st.sampled_from([0, 512]),
    per_call=st.sampled_from([1, 3, 2048]),
)
def test_chunk_is_present_where_every_shard_is(num_shards, pairs, at_once, per_call):
    shards = spaces(num_shards)
    rows = [(shard, idx) for shard, idx in pairs if shard < num_shards]
    store = SetStore(stored(shards, rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(presence_module, "MAX_KEYS_AT_ONCE", at_once)
        patch.setattr(presence_module, "MAX_KEYS_PER_CALL", per_call)
        asked = presence(store, {0: shards}, num_hashes=10)
        (answer,) = asked.exists([(0, np.arange(10, dtype=np.int32))])
    expected = [all((shard, idx) in rows for shard in range(num_shards)) for idx in range(10)]
    assert answer.tolist() == expected


def test_few_keys_of_all_groups_and_shards_are_one_call():
    by_group = {0: spaces(4, 0), 1: spaces(2, 1)}
    store = SetStore(stored(by_group[1], [(0, 5), (1, 5)]))
    short = presence(store, by_group, num_hashes=512 // 6)
    found = short.exists([(0, indices(1, 2)), (1, indices(5, 6))])
    assert [answer.tolist() for answer in found] == [[0, 0], [1, 0]]
    assert store.calls == [12]


def test_window_of_a_long_cold_prompt_asks_one_shard():
    store = SetStore()
    presence(store, {0: spaces(8)}).exists([(0, np.arange(64, dtype=np.int32))])
    assert store.calls == [64]


def test_other_shards_are_asked_only_of_what_the_first_has():
    shards = spaces(8)
    store = SetStore(stored(shards, [(shard, 7) for shard in range(8)]))
    asked = presence(store, {0: shards})
    (answer,) = asked.exists([(0, np.arange(1000, dtype=np.int32))])
    assert np.flatnonzero(answer).tolist() == [7]
    assert store.calls == [1000, 7]
    assert asked.num_keys == 1007


def test_no_call_has_more_keys_than_the_bound():
    shards = spaces(8)
    store = SetStore(stored(shards, [(shard, idx) for shard in range(8) for idx in range(4096)]))
    (answer,) = presence(store, {0: shards}).exists([(0, np.arange(4096, dtype=np.int32))])
    assert answer.all()
    assert sum(store.calls) == 8 * 4096
    assert max(store.calls) <= 4096
    assert len(store.calls) > 8


@pytest.mark.parametrize("num_hashes", [10, 4096], ids=["short", "long"])
def test_a_flag_other_than_one_is_no_presence(num_hashes):
    store = SetStore()
    store.exists = lambda keys: bytearray([255]) * len(keys)
    (answer,) = presence(store, {0: spaces(2)}, num_hashes).exists([(0, indices(1, 2))])
    assert answer.tolist() == [0, 0]


def test_nothing_to_ask_is_no_call():
    store = SetStore()
    (answer,) = presence(store, {0: spaces(2)}).exists([(0, indices())])
    assert answer.tolist() == []
    assert store.calls == []


def test_answer_of_another_length_is_an_error():
    store = SetStore()
    store.exists = lambda keys: bytearray(1)
    with pytest.raises(StoreError, match="answered 1 of 2 keys"):
        presence(store, {0: spaces(1)}).exists([(0, indices(1, 2))])
