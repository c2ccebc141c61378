# SPDX-License-Identifier: Apache-2.0
"""The face of the hit computation: rounding, merging, EAGLE, what it refuses, what it asks."""

from __future__ import annotations

import numpy as np
import pytest
from stub_store import all_of, bits, look_up

from kvxfer.errors import ConfigError, UnsupportedError
from kvxfer.hits import CacheGroup, Coordinator

FA16 = CacheGroup("full", 16)
MAMBA64 = CacheGroup("mamba", 64)


def window(block_tokens=16, window_tokens=32, **fields):
    return CacheGroup("sliding_window", block_tokens, window_tokens=window_tokens, **fields)


@pytest.mark.parametrize(
    ("partial_hits", "expected"),
    [(False, [0, 0, 0, 64, 64, 128]), (True, [0, 16, 48, 64, 112, 128])],
    ids=["block", "hash_unit"],
)
def test_align_lookup_length_rounds_down_to_a_boundary(partial_hits, expected):
    coordinator = Coordinator([FA16, MAMBA64], 16, 64, partial_hits=partial_hits)
    lengths = [15, 16, 63, 64, 127, 128]
    assert [coordinator.align_lookup_length(n) for n in lengths] == expected


def test_lookup_reads_no_further_than_the_hashes():
    answer = Coordinator([FA16], 16, 16).lookup(
        1000, [b""] * 2, lambda question: [np.ones(len(idx), np.uint8) for _, idx in question]
    )
    assert (answer.hit_length, answer.num_keys_asked) == (32, 2)


def test_lookup_without_hashes_calls_no_store():
    def exists(question):
        raise AssertionError(question)

    assert Coordinator([FA16], 16, 16).lookup(1000, [], exists).hit_length == 0


def test_lookup_skips_groups_that_are_not_cacheable():
    groups = [CacheGroup("other", 7, cacheable=False), FA16]
    answer, store = look_up(Coordinator(groups, 16, 16), 49, [(), (16, 32, 48)])
    assert answer.hit_length == 48
    assert list(map(bits, answer.load_masks)) == ["", "111"]
    assert set(store.questions[0]) == {1}


def test_lookup_takes_any_nonzero_byte_but_one_as_absent():
    """A backend's error codes are no presence."""

    def exists(question):
        return [np.array([1, 255, 1], np.uint8) for _ in question]

    assert Coordinator([FA16], 16, 16).lookup(49, [b""] * 3, exists).hit_length == 16


@pytest.mark.parametrize(
    "make",
    [lambda flags: flags == 1, lambda flags: np.repeat(flags, 2)[::2], np.ndarray.tolist],
    ids=["bool", "strided", "list"],
)
def test_lookup_takes_answers_of_other_forms(make):
    def exists(question):
        return [make(np.array([1, 1, 0], np.uint8)) for _ in question]

    assert Coordinator([FA16], 16, 16).lookup(49, [b""] * 3, exists).hit_length == 32


def test_lookup_passes_on_what_exists_raises():
    def exists(question):
        raise OSError("no store")

    with pytest.raises(OSError, match="no store"):
        Coordinator([FA16], 16, 16).lookup(49, [b""] * 3, exists)


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([], "0 answers to 1 questions"),
        ([np.ones(2, np.uint8)], "2 answers for 3 chunks of group 0"),
    ],
    ids=["no_answer", "short_answer"],
)
def test_lookup_rejects_answers_that_do_not_fit_the_question(answers, message):
    with pytest.raises(ValueError, match=message):
        Coordinator([FA16], 16, 16).lookup(49, [b""] * 3, lambda _: answers)


@pytest.mark.parametrize(("spec_id", "hit"), [("same", 0), (None, 80)], ids=["merged", "apart"])
def test_groups_merge_by_spec_and_not_by_looks(spec_id, hit):
    """Merged, the EAGLE flag of one counts for both: the other lacks the block that is given back.

    The first group has no block past the hit, and alone it needs none.
    """
    groups = [window(spec_id=spec_id), window(spec_id=spec_id, eagle=True)]
    answer, store = look_up(Coordinator(groups, 16, 16), 97, [(64, 80), (64, 80, 96)])
    assert answer.hit_length == hit
    assert len(store.questions) == 1


def test_merged_groups_have_stored_what_all_members_have():
    groups = [CacheGroup("full", 16, spec_id="same")] * 2
    answer, _ = look_up(Coordinator(groups, 16, 16), 97, [(16, 32, 48), (16, 32, 64)])
    assert answer.hit_length == 32
    assert list(map(bits, answer.load_masks)) == ["11", "11"]


def test_groups_of_one_spec_may_not_differ():
    groups = [window(spec_id="s"), window(window_tokens=48, spec_id="s")]
    with pytest.raises(ConfigError, match=r"groups 0 and 1 share spec_id 's'"):
        Coordinator(groups, 16, 16)


@pytest.mark.parametrize("flagged", [(False, False), (True, False)], ids=["none", "one"])
def test_eagle_without_a_flagged_group_flags_all(flagged):
    """With the window's group flagged too, its run must reach one block past the hit."""
    groups = [CacheGroup("full", 16, eagle=flagged[0]), window(eagle=flagged[1])]
    coordinator = Coordinator(groups, 16, 16, use_eagle=True)
    answer, _ = look_up(coordinator, 97, [all_of(groups[0], 97), (64, 80)])
    assert answer.hit_length == (80 if any(flagged) else 0)


def test_eagle_gives_back_a_hash_unit_where_hits_fall_below_the_block():
    groups = [CacheGroup("full", 64, eagle=True)]
    coordinator = Coordinator(groups, 16, 64, partial_hits=True)
    answer, _ = look_up(coordinator, 130, [(64, 112)])
    assert answer.hit_length == 96
    assert answer.tail_boundaries == [(0, 112)]


def test_states_give_no_eagle_block_back():
    groups = [CacheGroup("mamba", 16, eagle=True)]
    answer, _ = look_up(Coordinator(groups, 16, 16), 49, [(48,)])
    assert answer.hit_length == 48


def test_chunked_local_needs_only_the_blocks_of_its_chunk():
    groups = [FA16, CacheGroup("chunked_local", 16, chunk_tokens=64)]
    answer, _ = look_up(Coordinator(groups, 16, 16), 97, [all_of(FA16, 97), (80, 96)])
    assert answer.hit_length == 96
    assert list(map(bits, answer.load_masks)) == ["111111", "000011"]


def test_chunked_local_hole_cuts_the_hit_to_the_hole():
    groups = [FA16, CacheGroup("chunked_local", 16, chunk_tokens=64)]
    answer, _ = look_up(Coordinator(groups, 16, 16), 113, [all_of(FA16, 113), (80, 112)])
    assert answer.hit_length == 80


def test_tail_boundaries_leave_out_groups_that_load_no_tail():
    groups = [FA16, CacheGroup("chunked_local", 16, chunk_tokens=32)]
    answer, _ = look_up(Coordinator(groups, 16, 16), 65, [all_of(FA16, 65), ()])
    assert answer.hit_length == 64
    assert answer.tail_boundaries == [(0, 64)]


@pytest.mark.parametrize(("retained", "hit"), [(0, 96), (16, 0)])
def test_hit_holds_what_is_retained_below_the_window_too(retained, hit):
    groups = [FA16, window(retained_tokens=retained)]
    answer, _ = look_up(Coordinator(groups, 16, 16), 97, [all_of(FA16, 97), (80, 96)])
    assert answer.hit_length == hit


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: CacheGroup("ring", 16), UnsupportedError, "'ring' is none of full"),
        (lambda: CacheGroup("full", 0), ConfigError, "block_tokens is 0"),
        (lambda: CacheGroup("full", 16, retained_tokens=-1), ConfigError, "retained_tokens is -1"),
        (lambda: CacheGroup("sliding_window", 16), ConfigError, "window_tokens is None"),
        (lambda: CacheGroup("chunked_local", 16, chunk_tokens=0), ConfigError, "chunk_tokens is 0"),
        (lambda: CacheGroup("other", 16), ConfigError, "needs the manager"),
        (lambda: Coordinator([FA16], 16, 24), ConfigError, "block_tokens is 24"),
        (lambda: Coordinator([FA16], 32, 32), ConfigError, "group 0 has blocks of 16"),
        (lambda: Coordinator([MAMBA64], 16, 32), ConfigError, "divides block_tokens 32"),
        (lambda: Coordinator([FA16], 16, 16, retention_tokens=8), ConfigError, "retention_tokens"),
        (lambda: Coordinator([], 16, 16), ConfigError, "no cache group is cacheable"),
    ],
)
def test_bad_sizes_are_refused_with_what_was_wanted(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_eagle": True}, "chunked local attention with EAGLE"),
        ({"common_block": 32}, "one block size for all groups"),
    ],
    ids=["eagle", "two_sizes"],
)
def test_chunked_local_is_refused_where_vllm_has_no_rule(options, message):
    options = {"common_block": 16, "use_eagle": False, **options}
    groups = [CacheGroup("chunked_local", 16, chunk_tokens=64)]
    with pytest.raises(UnsupportedError, match=message):
        Coordinator(groups, 16, options["common_block"], use_eagle=options["use_eagle"])
