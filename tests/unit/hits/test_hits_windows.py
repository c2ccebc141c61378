# SPDX-License-Identifier: Apache-2.0
"""Long prompts: what is asked grows with the hit, and the answer is that of asking for all."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from kvxfer.hits import CacheGroup, Coordinator

FA16 = CacheGroup("full", 16)
SWA16 = CacheGroup("sliding_window", 16, window_tokens=1024)
MAMBA64 = CacheGroup("mamba", 64)
FIRST_WINDOW = 64
PROMPT = 131_072
MIB = 1 << 20


class BlockStore:
    """Says which chunks are stored from one array a group, by hash index of 16 tokens."""

    def __init__(self, *stored) -> None:
        self.stored = stored
        self.num_asked = [0] * len(stored)
        self.num_calls = 0

    def __call__(self, question):
        self.num_calls += 1
        for group, hash_idx in question:
            self.num_asked[group] += len(hash_idx)
        return [self.stored[group][hash_idx] for group, hash_idx in question]


def prefix(num_chunks: int, num_hashes: int = PROMPT // 16) -> np.ndarray:
    return (np.arange(num_hashes) < num_chunks).astype(np.uint8)


def look_up(groups, common_block, num_tokens, *stored, **options):
    """Look up, and check the answer against the search over the whole stored set."""
    coordinator = Coordinator(groups, 16, common_block, **options)
    store = BlockStore(*stored)
    answer = coordinator.lookup(num_tokens, [b""] * (num_tokens // 16), store)
    assert answer.num_keys_asked == sum(store.num_asked)
    assert answer.num_calls == store.num_calls
    rows = [row[: num_tokens // 16] for row in stored]
    hit, _ = coordinator.find_longest_cache_hit(coordinator.align_lookup_length(num_tokens), rows)
    if hit == num_tokens:
        max_tokens = coordinator.align_lookup_length(num_tokens - 1)
        hit, _ = coordinator.find_longest_cache_hit(max_tokens, rows)
    assert answer.hit_length == hit
    return answer, store


def test_cold_prompt_costs_one_window():
    answer, _ = look_up([FA16], 16, PROMPT, prefix(0))
    assert (answer.hit_length, answer.num_calls, answer.num_keys_asked) == (0, 1, FIRST_WINDOW)


def test_cold_hybrid_prompt_asks_full_attention_alone():
    groups = [SWA16, FA16, MAMBA64]
    answer, _ = look_up(groups, 64, PROMPT, *[prefix(0)] * 3)
    assert (answer.hit_length, answer.num_calls, answer.num_keys_asked) == (0, 1, FIRST_WINDOW)


@pytest.mark.parametrize(("num_chunks", "num_calls"), [(512, 1), (513, 4)], ids=["512", "513"])
def test_up_to_512_candidates_are_asked_in_one_call(num_chunks, num_calls):
    answer, _ = look_up([FA16], 16, num_chunks * 16 + 1, prefix(num_chunks))
    assert answer.hit_length == num_chunks * 16
    assert answer.num_calls == num_calls


@pytest.mark.parametrize("num_chunks", [0, 1, 63, 64, 65, 191, 192, 1000, 8000, 8191, 8192])
def test_full_attention_asks_for_twice_the_hit_and_one_window(num_chunks):
    answer, _ = look_up([FA16], 16, PROMPT + 1, prefix(num_chunks))
    assert answer.hit_length == num_chunks * 16
    assert answer.num_keys_asked <= 2 * num_chunks + FIRST_WINDOW
    assert answer.num_calls <= 1 + np.log2(num_chunks / FIRST_WINDOW + 1)


@pytest.mark.parametrize("num_chunks", [0, 10, 100, 1000, 8192])
def test_eagle_asks_for_twice_what_it_matches_and_one_window(num_chunks):
    answer, _ = look_up([FA16], 16, PROMPT + 1, prefix(num_chunks), use_eagle=True)
    assert answer.hit_length == max(0, num_chunks - 1) * 16
    assert answer.num_keys_asked <= 2 * num_chunks + FIRST_WINDOW


@pytest.mark.parametrize("num_chunks", [0, 3, 5, 4000, 4003])
def test_hits_below_the_block_add_the_boundaries_of_one_block(num_chunks):
    groups = [CacheGroup("full", 64)]
    answer, _ = look_up(groups, 64, PROMPT + 1, prefix(num_chunks), partial_hits=True)
    assert answer.hit_length == num_chunks * 16
    assert answer.num_keys_asked <= 2 * (num_chunks // 4) + FIRST_WINDOW + 3


def test_window_reads_one_window_below_a_hit_of_full_attention():
    run = 64  # blocks that a window of 1,024 tokens reaches back
    answer, _ = look_up([FA16, SWA16], 16, PROMPT + 1, prefix(8192), prefix(8192))
    assert answer.hit_length == PROMPT
    assert answer.num_keys_asked == 8192 + run
    assert np.flatnonzero(answer.load_masks[1]).tolist() == list(range(8192 - run, 8192))


def test_windows_read_back_from_the_hit_of_full_attention():
    """What is asked grows with the distance between the two hits, not with the prompt."""
    run = 64
    for distance in (1, 100, 1000):
        answer, _ = look_up([FA16, SWA16], 16, PROMPT + 1, prefix(8192), prefix(8192 - distance))
        assert answer.hit_length == PROMPT - 16 * distance
        assert answer.num_keys_asked <= 8192 + 2 * (distance + run) + run


def test_states_read_back_from_the_hit_of_full_attention():
    for distance in (1, 10, 100):
        states = prefix(8192 - 4 * distance)
        answer, _ = look_up([FA16, MAMBA64], 64, PROMPT + 1, prefix(8192), states)
        assert answer.hit_length == PROMPT - 64 * distance
        assert answer.num_keys_asked <= 8192 + 2 * (distance + 1) + 1


@pytest.mark.parametrize(
    "groups",
    [(FA16,), (FA16, SWA16), (FA16, MAMBA64), (FA16, SWA16, MAMBA64)],
    ids=["full", "window", "states", "all"],
)
def test_full_hit_is_derived_again_without_a_further_call(groups):
    """The calls are those of a prompt one token longer, whose full hit stands."""
    stored = [prefix(8192)] * len(groups)
    longer, _ = look_up(groups, 64, PROMPT + 1, *stored)
    answer, _ = look_up(groups, 64, PROMPT, *stored)
    assert longer.hit_length == PROMPT
    assert answer.hit_length == PROMPT - 64
    assert answer.num_calls == longer.num_calls


def test_scan_that_jumps_starts_with_a_first_window_again():
    """The state far below the window's hit makes the window start anew there, not grow on."""
    run = 64
    states = np.zeros(8192, dtype=np.uint8)
    states[1023] = 1
    window = prefix(8192)
    window[8000:] = 0
    answer, store = look_up([FA16, SWA16, MAMBA64], 64, PROMPT + 1, prefix(8192), window, states)
    assert answer.hit_length == 1024 * 16
    assert store.num_asked[1] <= 2 * (192 + run) + run + run
    assert store.num_asked[2] <= 2 * ((8000 - 1024) // 4 + 1) + 1


@pytest.mark.parametrize("num_chunks", [0, 65_536], ids=["cold", "full"])
def test_lookup_of_a_million_tokens_stays_under_64_mib(num_chunks):
    num_tokens = 1_048_576
    groups = [FA16, *[SWA16] * 4, MAMBA64]
    stored = [prefix(num_chunks, num_tokens // 16)] * len(groups)
    coordinator = Coordinator(groups, 16, 64)
    hashes = [b""] * (num_tokens // 16)
    tracemalloc.start()
    try:
        answer = coordinator.lookup(num_tokens, hashes, BlockStore(*stored))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert answer.hit_length == max(0, num_chunks * 16 - 64)
    assert peak_bytes < 64 * MIB
