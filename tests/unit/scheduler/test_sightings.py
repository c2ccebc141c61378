# SPDX-License-Identifier: Apache-2.0
"""Which prefixes have been seen often enough to be saved."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.scheduler.sightings import Sightings


def hashes(text):
    """Return a hash for each prefix of a text, as a prompt's blocks have."""
    return [text[: end + 1].encode() for end in range(len(text))]


def test_first_request_is_worth_all_where_one_sighting_does():
    assert Sightings(1).note(hashes("abc")) == 3


def test_common_prefix_is_worth_saving_at_the_second_request():
    sightings = Sightings(2)
    assert sightings.note(hashes("system+first")) == 0
    assert sightings.note(hashes("system+second")) == len("system+")
    assert sightings.note(hashes("system+second")) == len("system+second")


@given(
    texts=st.lists(st.text("ab", min_size=0, max_size=6), max_size=12),
    min_sightings=st.integers(2, 4),
)
def test_counts_are_those_of_all_requests_while_memory_lasts(texts, min_sightings):
    sightings, counts = Sightings(min_sightings), Counter()
    for text in texts:
        counts.update(hashes(text))
        often = [counts[each] >= min_sightings for each in hashes(text)]
        assert sightings.note(hashes(text)) == (often.index(False) if False in often else len(text))


@given(numbers=st.lists(st.integers(0, 60), max_size=300))
def test_memory_is_bounded_and_what_comes_again_soon_is_remembered(numbers):
    sightings = Sightings(2, max_hashes=20)
    recent = []
    for number in numbers:
        seen = sightings.note([b"%d" % number]) == 1
        assert seen or number not in recent[-9:]
        assert sightings.num_hashes <= 20
        recent.append(number)


@pytest.mark.parametrize("wrong", [{"min_sightings": 0}, {"min_sightings": 2, "max_hashes": 1}])
def test_sizes_below_the_least_are_a_mistake(wrong):
    with pytest.raises(ValueError, match="too small"):
        Sightings(**wrong)
