# SPDX-License-Identifier: Apache-2.0
"""Hits, masks and tail boundaries are vLLM's own, for real specs and any stored set.

``KVXFER_FUZZ_EXAMPLES`` sets the number of examples (default 2,000).
"""

from __future__ import annotations

import os

import numpy as np
import pytest
from hits_oracle import (
    Setup,
    StoreOracle,
    core_hit,
    local_save_mask,
    make_spec,
)
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

MAX_EXAMPLES = int(os.environ.get("KVXFER_FUZZ_EXAMPLES", "2000"))
fuzz = settings(
    max_examples=MAX_EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)

HASH_TOKENS = 4
KINDS = (
    "full",
    "mla",
    "rswa",
    "uniform",
    "sliding_window",
    "sliding_window_mla",
    "mamba",
    "plugin_window",
    "plugin_full",
)
UNCACHEABLE = ("ring", "bounded_replay")


@st.composite
def setups(draw) -> Setup:
    """Draw 1 to 6 groups from up to 4 distinct specs, so that groups of one spec are common."""
    one_size = draw(st.booleans())
    sizes = [draw(st.sampled_from([1, 2, 4])) * HASH_TOKENS] if one_size else [4, 8, 16]
    eagle = draw(st.sampled_from(["none", "flagged", "all"]))
    partial = draw(st.booleans())
    kinds = KINDS + (("chunked_local",) if one_size and eagle == "none" and not partial else ())
    spec = st.builds(
        make_spec,
        st.sampled_from(kinds),
        st.sampled_from(sizes),
        st.sampled_from([1, 2, 4, 5, 8, 16, 17, 32, 33]),
        st.sampled_from([8, 8, 16]),
    )
    pool = draw(st.lists(spec, min_size=1, max_size=4))
    specs = draw(st.lists(st.sampled_from(pool), min_size=1, max_size=6))
    if draw(st.integers(0, 4)) == 0:
        uncacheable = make_spec(draw(st.sampled_from(UNCACHEABLE)), sizes[0], 8, 8)
        specs.insert(draw(st.integers(0, len(specs))), uncacheable)
    flags = st.sets(st.integers(0, len(specs) - 1), min_size=1)
    block_tokens = int(np.lcm.reduce([spec.block_size for spec in specs]))
    return Setup(
        tuple(specs),
        frozenset(draw(flags)) if eagle == "flagged" else frozenset(),
        HASH_TOKENS,
        block_tokens,
        partial_hits=partial,
        use_eagle=eagle != "none",
        retention_tokens=draw(st.sampled_from([None, None, 0, block_tokens, 2 * block_tokens])),
    )


@st.composite
def lengths(draw, setup: Setup) -> int:
    """Draw a prompt length at, just below or just above a boundary of some kind."""
    unit = draw(
        st.sampled_from(
            [HASH_TOKENS, setup.block_tokens, *(spec.block_size for spec in setup.specs)]
        )
    )
    return max(1, draw(st.integers(0, 160 // unit)) * unit + draw(st.integers(-1, 1)))


@st.composite
def stored_sets(draw, setup: Setup, num_hashes: int) -> list[np.ndarray]:
    """Draw what each group has stored: all, a prefix, a few holes, or anything."""
    rows = []
    for _ in setup.specs:
        row = np.ones(num_hashes, dtype=np.uint8)
        match draw(st.sampled_from(["all", "prefix", "holes", "holes", "any"])):
            case "prefix":
                row[draw(st.integers(0, num_hashes)) :] = 0
            case "holes" if num_hashes:
                holes = draw(st.sets(st.integers(0, num_hashes - 1), max_size=4))
                row[list(holes)] = 0
            case "any":
                bits = draw(st.integers(0, 2**num_hashes - 1))
                row[:] = [bits >> idx & 1 for idx in range(num_hashes)]
        rows.append(row)
    return rows


class RecordingStore:
    """An ``exists`` over a stored set that counts its calls and refuses to be asked twice."""

    def __init__(self, stored: list[np.ndarray]) -> None:
        self._stored = stored
        self.asked: set[tuple[int, int]] = set()
        self.num_calls = 0

    def __call__(self, question):
        self.num_calls += 1
        for group, hash_idx in question:
            assert hash_idx.dtype == np.int32
            keys = {(group, int(idx)) for idx in hash_idx}
            assert len(keys) == len(hash_idx)
            assert not keys & self.asked
            self.asked |= keys
        return [self._stored[group][hash_idx] for group, hash_idx in question]


def as_lists(masks) -> list[list[bool]]:
    return [mask.tolist() for mask in masks]


@fuzz
@given(st.data())
def test_lookup_answers_as_vllm_does(data):
    setup = data.draw(setups())
    num_tokens = data.draw(lengths(setup))
    num_hashes = num_tokens // HASH_TOKENS
    stored = data.draw(stored_sets(setup, num_hashes))
    store = RecordingStore(stored)
    answer = setup.coordinator().lookup(num_tokens, [b""] * num_hashes, store)
    expected = StoreOracle(setup).lookup(num_tokens, stored)
    event(f"hit: {answer.hit_length > 0}")
    assert answer.hit_length == expected.hit_length
    assert as_lists(answer.load_masks) == expected.load_masks
    assert answer.tail_boundaries == expected.tail_boundaries
    assert answer.num_calls == store.num_calls
    assert answer.num_keys_asked == len(store.asked)


@fuzz
@given(st.data())
def test_load_and_save_masks_are_vllms(data):
    setup = data.draw(setups())
    num_tokens = data.draw(lengths(setup))
    coordinator = setup.coordinator()
    hit_length = coordinator.align_lookup_length(num_tokens)
    expected = StoreOracle(setup).load_mask(hit_length, num_tokens // HASH_TOKENS)
    assert as_lists(coordinator.load_mask(hit_length)) == expected
    start = data.draw(st.integers(0, num_tokens))
    prompt = data.draw(st.integers(1, num_tokens + 40))
    assert as_lists(coordinator.save_mask(num_tokens, start, prompt)) == local_save_mask(
        setup, num_tokens, start, prompt
    )
