# SPDX-License-Identifier: Apache-2.0
"""The native scans, which stop at what they do not know, and the answers that they read."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer._native.hits import (
    ABSENT,
    PRESENT,
    UNKNOWN,
    count_unknown,
    find_chunked_local,
    find_full,
    find_mamba,
    find_sliding_window,
    join_shards,
    note_answers,
)

STATES = {"?": UNKNOWN, "0": ABSENT, "1": PRESENT}


def states(text: str) -> np.ndarray:
    return np.array([STATES[char] for char in text], dtype=np.uint8)


@pytest.mark.parametrize(
    ("text", "unknown_idx"),
    [("????", 0), ("11??", 2), ("110?", -1), ("1111", -1), ("", -1)],
)
def test_find_full_stops_at_the_first_unknown_from_the_left(text, unknown_idx):
    assert find_full(states(text), 64, 16, 16, 16, False)[3] == unknown_idx


@pytest.mark.parametrize(
    ("text", "unknown_idx"),
    [("????", 3), ("???1", 2), ("??11", -1), ("?110", -1), ("?101", 0), ("??00", 1)],
)
def test_find_sliding_window_stops_at_the_first_unknown_from_the_right(text, unknown_idx):
    assert find_sliding_window(states(text), 64, 16, 16, 16, False, 32)[3] == unknown_idx


def test_find_sliding_window_reads_only_what_a_run_can_lie_on():
    """Boundaries are 4 blocks apart and a run has 2: the other two are never read."""
    assert find_sliding_window(states("??00??01"), 128, 16, 16, 64, False, 32) == (0, 0, 0, -1)
    assert find_sliding_window(states("??11??01"), 128, 16, 16, 64, False, 32) == (64, 2, 4, -1)


@pytest.mark.parametrize(
    ("text", "max_tokens", "hit"),
    [
        ("??????", 96, (96, 6, 6, -1)),
        ("??????", 95, (0, 0, 0, 4)),
        ("????1?", 95, (80, 4, 5, -1)),
        ("????0?", 95, (64, 4, 4, -1)),
    ],
    ids=["on_a_chunk", "unknown", "stored", "missing"],
)
def test_find_chunked_local_reads_the_last_chunk_alone(text, max_tokens, hit):
    assert find_chunked_local(states(text), max_tokens, 16, 16, 32) == hit


@pytest.mark.parametrize(
    ("text", "unknown_idx"), [("????", 3), ("???0", 1), ("?0?0", -1), ("?1?0", -1)]
)
def test_find_mamba_reads_boundaries_from_the_right(text, unknown_idx):
    assert find_mamba(states(text), 64, 16, 16, 32)[3] == unknown_idx


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((-1, 16, 16, 16), "max_tokens is -1"),
        ((64, 24, 16, 48), "block_tokens is 24"),
        ((64, 16, 0, 16), "block_tokens is 16"),
        ((64, 32, 16, 48), "align_tokens is 48"),
        ((64, 16, 16, 0), "align_tokens is 0"),
    ],
)
def test_scans_refuse_sizes_that_do_not_divide(sizes, message):
    with pytest.raises(ValueError, match=message):
        find_full(states("1111"), *sizes, False)


def test_scans_refuse_an_empty_reach():
    with pytest.raises(ValueError, match="window_tokens is 0"):
        find_sliding_window(states("1"), 16, 16, 16, 16, False, 0)
    with pytest.raises(ValueError, match="chunk_tokens is 0"):
        find_chunked_local(states("1"), 16, 16, 16, 0)


def test_scans_read_no_further_than_the_answers():
    for find in (find_full, find_mamba):
        arguments = (states("11"), 1 << 40, 16, 16, 16)
        tokens = find(*arguments, False)[0] if find is find_full else find(*arguments)[0]
        assert tokens == 32


def indices(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


@pytest.mark.parametrize(
    ("text", "idx", "count"), [("", (), 0), ("?01?", (0, 1, 2, 3), 2), ("?01?", (1, 3), 1)]
)
def test_count_unknown_reads_the_chosen_answers(text, idx, count):
    assert count_unknown(states(text), indices(*idx)) == count


def test_note_answers_takes_one_alone_for_present():
    row = states("????1")
    note_answers(row, indices(3, 0, 2), np.array([1, 0, 255], np.uint8))
    assert row.tolist() == states("0?011").tolist()


@pytest.mark.parametrize("bad", [-1, 4], ids=["negative", "past_the_end"])
def test_answers_name_the_first_index_outside_and_write_nothing(bad):
    row, idx = states("????"), indices(0, bad, 99)
    with pytest.raises(IndexError, match=rf"hash_idx\[1\] is {bad}, there are 4 answers"):
        count_unknown(row, idx)
    with pytest.raises(IndexError, match=rf"hash_idx\[1\] is {bad}, there are 4 answers"):
        note_answers(row, idx, np.ones(3, np.uint8))
    assert not row.any()


def test_note_answers_refuses_another_number_of_answers():
    row = states("????")
    with pytest.raises(ValueError, match="2 answers for 3 chunks"):
        note_answers(row, indices(0, 1, 2), np.ones(2, np.uint8))
    assert not row.any()


@given(st.integers(0, 5).flatmap(lambda n: st.lists(st.binary(min_size=n, max_size=n))))
def test_join_shards_wants_every_flag_of_a_chunk_to_be_one(chunks):
    flags = np.frombuffer(b"".join(chunks), np.uint8)
    whole = np.full(len(chunks), 7, np.uint8)
    expected = [int(all(flag == 1 for flag in chunk)) for chunk in chunks]
    assert join_shards(flags, whole) == sum(expected)
    assert whole.tolist() == expected


def test_join_shards_of_set_flags_is_whole():
    whole = np.zeros(3, np.uint8)
    assert join_shards(np.array([1, 1, 1, 0, 1, 1], np.uint8), whole) == 2
    assert whole.tolist() == [1, 0, 1]


@pytest.mark.parametrize(("num_flags", "num_chunks"), [(5, 2), (1, 0), (1, 2)])
def test_join_shards_refuses_flags_that_do_not_divide(num_flags, num_chunks):
    with pytest.raises(ValueError, match=f"{num_flags} flags are no whole number"):
        join_shards(np.ones(num_flags, np.uint8), np.zeros(num_chunks, np.uint8))
