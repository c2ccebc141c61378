# SPDX-License-Identifier: Apache-2.0
"""Some rounds of the kill loop, and the control that it can fail; ``kill_rounds`` has the rest."""

import random

import pytest
from kill_child import load_all, make_rank
from kill_rounds import LightRounds

from kvxfer.stores import open_store

pytestmark = [pytest.mark.timeout(120)]
NUM_ROUNDS = 3


def test_killed_saves_and_loads_leave_whole_values_and_the_next_hits_them(tmp_path):
    rounds = LightRounds(tmp_path, random.Random(5))
    for _ in range(NUM_ROUNDS):
        rounds.run()
    assert rounds.counts["jobs in flight when killed"] > 0
    assert rounds.counts["chunks hit by the next"] > 0


def test_value_that_is_not_whole_would_be_noticed(tmp_path):
    store = open_store(f"lmdb://{tmp_path}/store?capacity=8MiB")
    rank = make_rank(store)
    rank.save(0, {0: ([1], [7])})
    rank.result(0)
    assert load_all(rank) == 1
    keys = rank.keys(0, 7)
    store.remove(keys[:1])
    zeros = memoryview(bytes(rank.spaces[0][0].value_bytes))
    store.put_from(keys[:1], [zeros])
    next_rank = make_rank(store)
    with pytest.raises(AssertionError, match="chunk 7 has wrong bytes"):
        load_all(next_rank)
    next_rank.close()
    rank.close()
    store.close()
