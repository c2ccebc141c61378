# SPDX-License-Identifier: Apache-2.0
"""Groups of a kind that only its own manager knows: asked as a whole, searched in Python."""

from __future__ import annotations

import numpy as np
import pytest
from stub_store import all_of, bits, look_up

from kvxfer.hits import CacheGroup, Coordinator

FA16 = CacheGroup("full", 16)


class EveryThirdManager:
    """A made-up rule: a hit ends where a chunk is stored whose number three divides."""

    searched_first = False
    gives_back_eagle = True
    below_block = False

    def __init__(self) -> None:
        self.searched: list[int] = []

    def find_longest_cache_hit(self, stored, max_tokens, hash_tokens, align_tokens, drop_eagle):
        assert hash_tokens == align_tokens == 16
        self.searched.append(max_tokens)
        for block in range(max_tokens // 16, 0, -1):
            if block % 3 == 0 and stored[block - 1]:
                num_blocks = block - drop_eagle
                return num_blocks * 16, [False] * (num_blocks - 1) + [True]
        return 0, []

    def reachable_block_mask(
        self, start_block, end_block, align_tokens, use_eagle, retention_tokens, boundaries
    ):
        if retention_tokens is None:
            return None
        return [block % 3 == 2 for block in range(start_block, end_block)]


def other(**fields) -> CacheGroup:
    return CacheGroup("other", 16, manager=EveryThirdManager(), **fields)


def test_lookup_takes_the_managers_hit_and_mask():
    groups = [FA16, other()]
    answer, store = look_up(Coordinator(groups, 16, 16), 161, [all_of(FA16, 161), (48, 96, 128)])
    assert answer.hit_length == 96
    assert list(map(bits, answer.load_masks)) == ["111111", "000001"]
    assert len(store.questions) == 1


def test_lookup_gives_back_the_managers_eagle_block_once():
    groups = [other(eagle=True)]
    answer, _ = look_up(Coordinator(groups, 16, 16), 161, [(48, 96, 128)])
    assert answer.hit_length == 80


def test_long_lookup_asks_for_a_managers_chunks_below_the_hit_so_far():
    """The 100 blocks that full attention has stored, and the one more that its window met."""
    groups = [FA16, other()]
    answer, store = look_up(Coordinator(groups, 16, 16), 16_001, [range(16, 1601, 16)] * 2)
    assert answer.hit_length == 99 * 16
    managers = [positions for question in store.questions for positions in question.get(1, [])]
    assert managers == list(range(16, 1601, 16))


def test_load_mask_asks_the_manager_with_everything_stored():
    masks = Coordinator([other()], 16, 16).load_mask(96)
    assert list(map(bits, masks)) == ["000001"]


@pytest.mark.parametrize(
    ("retention_tokens", "mask"), [(None, "011111"), (16, "001001")], ids=["dense", "sparse"]
)
def test_save_mask_is_the_managers(retention_tokens, mask):
    coordinator = Coordinator([other()], 16, 16, retention_tokens=retention_tokens)
    assert list(map(bits, coordinator.save_mask(96, 16, 200))) == [mask]


def test_manager_of_full_attention_is_searched_first_and_once():
    manager = EveryThirdManager()
    manager.searched_first = True
    window = CacheGroup("sliding_window", 16, window_tokens=32)
    groups = [window, CacheGroup("other", 16, manager=manager), CacheGroup("mamba", 16)]
    coordinator = Coordinator(groups, 16, 16)
    stored = [np.ones(10, np.uint8), np.ones(10, np.uint8), np.array([1, 1] + [0] * 8, np.uint8)]
    hit, _ = coordinator.find_longest_cache_hit(160, stored)
    assert hit == 32
    assert manager.searched == [160]
