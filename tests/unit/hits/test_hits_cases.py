# SPDX-License-Identifier: Apache-2.0
"""Hit lengths, load masks and store calls of worked examples, computed with vLLM's managers."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from stub_store import all_of, bits, look_up

from kvxfer.hits import CacheGroup, Coordinator

FA16 = CacheGroup("full", 16)
FA32 = CacheGroup("full", 32)
FA64 = CacheGroup("full", 64)
FA16_EAGLE = CacheGroup("full", 16, eagle=True)
SWA16 = CacheGroup("sliding_window", 16, window_tokens=32)
MAMBA64 = CacheGroup("mamba", 64)
ALL = None


class Case(NamedTuple):
    name: str
    groups: tuple[CacheGroup, ...]
    common_block: int
    num_tokens: int
    stored: tuple[tuple[int, ...] | None, ...]
    hit: int
    masks: tuple[str, ...]
    partial_hits: bool = False


CASES = [
    Case("fully_stored_on_a_block", (FA16,), 16, 64, ((16, 32, 48, 64),), 48, ("111",)),
    Case("one_token_past_a_block", (FA16,), 16, 65, ((16, 32, 48, 64),), 64, ("1111",)),
    Case("three_blocks_stored", (FA16,), 16, 48, ((16, 32, 48),), 32, ("11",)),
    Case("one_block_stored", (FA16,), 16, 16, ((16,),), 0, ("",)),
    Case("one_block_and_a_token", (FA16,), 16, 17, ((16,),), 16, ("1",)),
    Case("half_stored", (FA16,), 16, 64, ((16, 32),), 32, ("11",)),
    Case("hole", (FA16,), 16, 64, ((16, 48, 64),), 16, ("1",)),
    Case("hash_below_block", (FA32,), 32, 64, ((32, 64),), 32, ("1",)),
    Case("hash_below_block_longer", (FA32,), 32, 80, ((32, 64),), 64, ("11",)),
    Case("eagle_on_a_block", (FA16_EAGLE,), 16, 64, ((16, 32, 48, 64),), 48, ("111",)),
    Case("eagle_past_a_block", (FA16_EAGLE,), 16, 65, ((16, 32, 48, 64),), 48, ("111",)),
    Case("eagle_one_block", (FA16_EAGLE,), 16, 16, ((16,),), 0, ("",)),
    Case("window", (FA16, SWA16), 16, 96, (ALL, ALL), 80, ("11111", "00011")),
    Case("window_at_end", (FA16, SWA16), 16, 97, (ALL, (80, 96)), 96, ("111111", "000011")),
    Case("window_only_at_the_end", (FA16, SWA16), 16, 96, (ALL, (80, 96)), 0, ("", "")),
    Case("window_at_two", (FA16, SWA16), 16, 96, (ALL, (64, 80, 96)), 80, ("11111", "00011")),
    Case("full_shorter", (FA16, SWA16), 16, 97, ((16, 32, 48, 64), ALL), 64, ("1111", "0011")),
    Case("window_alone", (SWA16,), 16, 96, ((80, 96),), 0, ("",)),
    Case("two_sizes", (FA64, SWA16), 64, 200, (ALL, ALL), 192, ("111", "0" * 10 + "11")),
    Case(
        "two_sizes_two_windows",
        (FA64, SWA16),
        64,
        192,
        (ALL, (112, 128, 176, 192)),
        128,
        ("11", "00000011"),
    ),
    Case("states", (FA16, MAMBA64), 64, 200, (ALL, (64, 128, 192)), 192, ("1" * 12, "001")),
    Case("one_state", (FA16, MAMBA64), 64, 200, (ALL, (128,)), 128, ("1" * 8, "01")),
    Case("states_on_end", (FA16, MAMBA64), 64, 192, (ALL, (64, 128, 192)), 128, ("1" * 8, "01")),
    Case("state_only_at_the_end", (FA16, MAMBA64), 64, 192, (ALL, (192,)), 0, ("", "")),
    Case(
        "states_with_eagle",
        (FA16_EAGLE, MAMBA64),
        64,
        200,
        (ALL, (64, 128, 192)),
        128,
        ("1" * 8, "01"),
    ),
    Case("window_with_eagle", (FA16_EAGLE, SWA16), 16, 96, (ALL, ALL), 80, ("11111", "00011")),
    Case("below_block", (FA64,), 64, 120, ((64, 112),), 112, ("11",), partial_hits=True),
    Case("below_block_on_end", (FA64,), 64, 112, ((64, 112),), 64, ("1",), partial_hits=True),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_lookup_finds_the_hit_in_one_call(case):
    coordinator = Coordinator(case.groups, 16, case.common_block, partial_hits=case.partial_hits)
    stored = [
        all_of(group, case.num_tokens) if positions is ALL else positions
        for group, positions in zip(case.groups, case.stored, strict=True)
    ]
    answer, store = look_up(coordinator, case.num_tokens, stored)
    assert answer.hit_length == case.hit
    assert tuple(map(bits, answer.load_masks)) == case.masks
    assert len(store.questions) == 1


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_load_mask_of_the_hit_is_the_lookups(case):
    coordinator = Coordinator(case.groups, 16, case.common_block, partial_hits=case.partial_hits)
    assert tuple(map(bits, coordinator.load_mask(case.hit))) == case.masks


@pytest.mark.parametrize("num_tokens", [0, 1, 15])
def test_lookup_below_one_boundary_calls_no_store(num_tokens):
    answer, store = look_up(Coordinator([FA16], 16, 16), num_tokens, [()])
    assert answer.hit_length == 0
    assert [len(mask) for mask in answer.load_masks] == [0]
    assert store.questions == []


def test_lookup_of_below_block_hit_names_the_boundaries_of_the_tails():
    """The full group's tail is stored at 112 and serves the hit at 96, where the state ends."""
    groups = [FA64, CacheGroup("mamba", 64)]
    coordinator = Coordinator(groups, 16, 64, partial_hits=True)
    answer, _ = look_up(coordinator, 120, [(64, 112), (96,)])
    assert answer.hit_length == 96
    assert answer.tail_boundaries == [(0, 112), (1, 96)]
    assert list(map(bits, answer.load_masks)) == ["11", "01"]


def test_lookup_of_hit_inside_a_whole_block_names_its_end():
    coordinator = Coordinator([FA64, MAMBA64], 16, 64, partial_hits=True)
    answer, _ = look_up(coordinator, 140, [(64, 128), (112,)])
    assert answer.hit_length == 112
    assert answer.tail_boundaries == [(0, 128), (1, 112)]


def test_lookup_on_block_boundaries_names_the_hit_itself():
    answer, _ = look_up(Coordinator([FA16, SWA16], 16, 16), 97, [range(16, 97, 16)] * 2)
    assert answer.tail_boundaries == [(0, 96), (1, 96)]
