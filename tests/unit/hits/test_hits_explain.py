# SPDX-License-Identifier: Apache-2.0
"""What an explanation says of a hit, for each thing that can cut one."""

from __future__ import annotations

import pytest
from stub_store import StubStore, all_of

from kvxfer.hits import CacheGroup, Coordinator, Cut

FA16 = CacheGroup("full", 16)
SWA16 = CacheGroup("sliding_window", 16, window_tokens=32)
MAMBA64 = CacheGroup("mamba", 64)


def explain(groups, common_block, num_tokens, stored, **options):
    coordinator = Coordinator(groups, 16, common_block, **options)
    hashes = [b""] * (num_tokens // 16)
    explanation = coordinator.explain(num_tokens, hashes, StubStore(stored, 16))
    lookup = coordinator.lookup(num_tokens, hashes, StubStore(stored, 16))
    assert explanation.hit_length == lookup.hit_length
    return explanation


@pytest.mark.parametrize(
    ("num_tokens", "stored", "options", "cut"),
    [
        (15, (), {}, Cut.TOO_SHORT),
        (64, (16, 32), {}, Cut.MISSING),
        (64, (16, 32, 48, 64), {}, Cut.LAST_TOKEN),
        (16, (16,), {}, Cut.LAST_TOKEN),
        (70, (16, 32, 48, 64), {}, Cut.ALIGNMENT),
        (70, (16, 32, 48, 64), {"use_eagle": True}, Cut.EAGLE),
        (70, (16, 32, 48), {"use_eagle": True}, Cut.MISSING),
    ],
    ids=["too_short", "hole", "full_hit", "one_block", "aligned", "eagle", "eagle_and_hole"],
)
def test_explanation_names_what_cut_the_hit(num_tokens, stored, options, cut):
    explanation = explain([FA16], 16, num_tokens, [stored], **options)
    assert explanation.cut is cut
    assert cut.value in explanation.line or cut is Cut.MISSING


def test_explanation_names_the_first_missing_chunk():
    explanation = explain([FA16], 16, 96, [(16, 32, 64, 80)])
    (report,) = explanation.groups
    assert (report.stored_tokens, report.offered_tokens, report.missing_tokens) == (32, 32, 48)
    assert explanation.cut_by == (0,)
    assert explanation.line == (
        "hit 32 of 96 tokens: group 0 lacks the chunk that ends at token 48; "
        "group 0 (full) stored to 32, offered 32"
    )


def test_explanation_says_which_group_cut_the_others():
    explanation = explain([FA16, MAMBA64], 64, 200, [all_of(FA16, 200), (64, 128)])
    assert (explanation.cut, explanation.cut_by) == (Cut.MISSING, (1,))
    full, states = explanation.groups
    assert (full.stored_tokens, full.offered_tokens, full.missing_tokens) == (192, 192, None)
    assert (states.stored_tokens, states.offered_tokens, states.missing_tokens) == (128, 128, 192)


def test_explanation_names_the_hole_in_a_window():
    explanation = explain([FA16, SWA16], 16, 97, [all_of(FA16, 97), (32, 48, 64, 96)])
    assert explanation.hit_length == 64
    assert explanation.groups[1].missing_tokens == 80
    assert "group 1 lacks the chunk that ends at token 80" in explanation.line


def test_explanation_names_all_groups_of_one_spec():
    groups = [CacheGroup("full", 16, spec_id="same")] * 2
    explanation = explain(groups, 16, 70, [all_of(FA16, 70), (16, 32)])
    assert explanation.cut_by == (0, 1)
    assert "groups 0, 1 lack" in explanation.line


def test_explanation_says_when_blocks_do_not_end_on_the_common_boundary():
    """Full attention's blocks end at 80, but no hit ends between 64 and 128."""
    explanation = explain([FA16, MAMBA64], 64, 100, [(16, 32, 48, 64, 80), (64,)])
    assert explanation.hit_length == 64
    assert explanation.cut is Cut.ALIGNMENT
    assert "a hit ends on a multiple of 64" in explanation.line


def test_explanation_asks_for_no_more_than_the_lookup():
    coordinator = Coordinator([FA16, SWA16], 16, 16)
    questions = []
    for ask in (coordinator.lookup, coordinator.explain):
        store = StubStore([range(16, 1600, 16)] * 2, 16)
        ask(16_000, [b""] * 1000, store)
        questions.append(store.questions)
    assert questions[0] == questions[1]
