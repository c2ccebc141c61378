# SPDX-License-Identifier: Apache-2.0
"""Which computed blocks are worth saving: those that a later hit can need."""

from __future__ import annotations

import pytest
from stub_store import bits

from kvxfer.hits import CacheGroup, Coordinator

FA16 = CacheGroup("full", 16)
FA64 = CacheGroup("full", 64)
SWA16 = CacheGroup("sliding_window", 16, window_tokens=32)


def save_masks(groups, common_block, lengths, **options):
    num_tokens, start_token, prompt_tokens = lengths
    coordinator = Coordinator(groups, 16, common_block, **options)
    return list(map(bits, coordinator.save_mask(num_tokens, start_token, prompt_tokens)))


def test_full_attention_saves_every_whole_block():
    assert save_masks([FA16], 16, (79, 0, 200)) == ["1111"]


@pytest.mark.parametrize(
    ("start_token", "mask"),
    [(0, "1111"), (16, "0111"), (31, "0111"), (64, "0000"), (500, "0000")],
)
def test_blocks_that_end_before_the_start_are_saved_already(start_token, mask):
    assert save_masks([FA16], 16, (64, start_token, 64)) == [mask]


def test_blocks_past_the_last_common_boundary_wait():
    assert save_masks([FA64, SWA16], 64, (127, 0, 200)) == ["1", "0011"]


def test_hash_boundaries_bound_the_blocks_where_hits_fall_below_the_block():
    masks = save_masks([FA64, CacheGroup("full", 16)], 64, (127, 0, 200), partial_hits=True)
    assert masks == ["1", "1111111"]


def test_window_saves_its_tail_at_every_boundary():
    assert save_masks([FA64, SWA16], 64, (192, 0, 200)) == ["111", "001100110011"]


def test_window_with_eagle_saves_one_block_past_every_boundary():
    masks = save_masks([FA64, SWA16], 64, (192, 0, 200), use_eagle=True)
    assert masks == ["111", "001110111011"]


@pytest.mark.parametrize(
    ("retention_tokens", "prompt_tokens", "mask"),
    [
        (0, 192, "000000110000"),
        (0, 193, "000000000011"),
        (128, 200, "000000110011"),
        (128, 500, "000000110000"),
    ],
    ids=["replay_on_a_boundary", "replay_past_it", "segments_and_replay", "segments"],
)
def test_retention_keeps_segment_tails_and_where_a_repeat_resumes(
    retention_tokens, prompt_tokens, mask
):
    lengths = (192, 0, prompt_tokens)
    masks = save_masks([FA64, SWA16], 64, lengths, retention_tokens=retention_tokens)
    assert masks == ["111", mask]


def test_states_are_never_saved_by_position():
    assert save_masks([FA16, CacheGroup("mamba", 64)], 64, (192, 0, 200)) == ["1" * 12, "000"]


def test_groups_that_are_not_cacheable_are_never_saved():
    groups = [CacheGroup("other", 7, cacheable=False), FA16]
    assert save_masks(groups, 16, (32, 0, 200)) == ["", "11"]


@pytest.mark.parametrize(
    ("num_tokens", "window", "states"),
    [(192, "000000000011", "001"), (191, "00000011", "01"), (63, "", "")],
)
def test_load_mask_of_any_length_is_that_of_the_boundary_below(num_tokens, window, states):
    groups = [FA64, SWA16, CacheGroup("mamba", 64)]
    masks = Coordinator(groups, 16, 64).load_mask(num_tokens)
    assert list(map(bits, masks)) == ["1" * (num_tokens // 64), window, states]
