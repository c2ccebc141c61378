# SPDX-License-Identifier: Apache-2.0
"""Hits, masks and tail boundaries are vLLM's own, for real specs and any stored set.

``KVXFER_FUZZ_EXAMPLES`` sets the number of examples (default 2,000).
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm")

from hits_oracle import (
    BEFORE_0_32,
    Setup,
    StoreOracle,
    across_ranks,
    core_hit,
    local_save_mask,
    make_spec,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from kvxfer.hits import answers, kinds

MAX_EXAMPLES = int(os.environ.get("KVXFER_FUZZ_EXAMPLES", "2000"))
fuzz = settings(
    max_examples=MAX_EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)

HASH_TOKENS = 4
KINDS = (
    "full",
    "full",
    "mla",
    "rswa",
    "uniform",
    "sliding_window",
    "sliding_window",
    "sliding_window_mla",
    "mamba",
    "mamba",
    "plugin_window",
    "plugin_full",
)
SHARDABLE = (FullAttentionSpec, MambaSpec)  # what context parallelism allows in one model
SPECS = st.builds(
    make_spec,
    st.sampled_from(KINDS),
    st.sampled_from([4, 8, 16]),
    st.sampled_from([1, 2, 4, 5, 8, 16, 17, 32, 33]),
    st.sampled_from([8, 8, 16]),
)
ONE_SIZE_SPECS = st.builds(
    make_spec,
    st.sampled_from(("full", "sliding_window", "chunked_local", "chunked_local", "mamba")),
    st.just(8),
    st.sampled_from([4, 8, 16, 24, 40]),
    st.just(8),
)


@st.composite
def setups(draw) -> Setup:
    """Draw 1 to 6 groups from up to 4 distinct specs, so that groups of one spec are common."""
    chunked = draw(st.integers(0, 7)) == 0  # vLLM wants one block size and no EAGLE then
    no_eagle = chunked or BEFORE_0_32
    pool = draw(st.lists(ONE_SIZE_SPECS if chunked else SPECS, min_size=1, max_size=4))
    specs = [*pool, *draw(st.lists(st.sampled_from(pool), max_size=2))]
    eagle, uncacheable = draw(
        st.tuples(
            st.sampled_from(["none"] if no_eagle else ["none", "flagged", "all"]),
            st.sampled_from([None] * 8 + ["ring", "bounded_replay"]),
        )
    )
    if uncacheable is not None:
        specs.insert(draw(st.integers(0, len(specs))), make_spec(uncacheable, 8, 8, 8))
    eagle_groups = frozenset[int]()
    if eagle == "flagged":
        eagle_groups = frozenset(draw(st.sets(st.integers(0, len(specs) - 1), min_size=1)))
    block_tokens = math.lcm(*(spec.block_size for spec in specs))
    return Setup(
        tuple(specs),
        eagle_groups,
        HASH_TOKENS,
        block_tokens,
        partial_hits=not chunked and draw(st.booleans()),
        use_eagle=eagle != "none",
        retention_tokens=draw(st.sampled_from([None, None, 0, block_tokens, 2 * block_tokens])),
    )


@st.composite
def lengths(draw, setup: Setup) -> int:
    """Draw a prompt length at, just below or just above a boundary of some kind."""
    units = [HASH_TOKENS, setup.block_tokens, *(spec.block_size for spec in setup.specs)]
    unit = draw(st.sampled_from(units))
    return max(1, draw(st.integers(0, 160 // unit)) * unit + draw(st.integers(-1, 1)))


@st.composite
def stored_sets(draw, num_groups: int, num_hashes: int) -> list[np.ndarray]:
    """Draw what each group has stored: all, all up to somewhere, a few holes, or anything."""
    stored = np.ones((num_groups, num_hashes), dtype=np.uint8)
    shapes = st.sampled_from(["all", "all", "prefix", "holes", "holes", "any"])
    for row in stored:
        match draw(shapes):
            case "prefix":
                row[draw(st.integers(0, num_hashes)) :] = 0
            case "holes" if num_hashes:
                row[draw(st.lists(st.integers(0, num_hashes - 1), max_size=3))] = 0
            case "any":
                anything = draw(st.binary(min_size=num_hashes, max_size=num_hashes))
                row[:] = np.frombuffer(anything, dtype=np.uint8) & 1
    return list(stored)


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
    stored = data.draw(stored_sets(len(setup.specs), num_hashes))
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


@settings(fuzz, max_examples=-(-MAX_EXAMPLES // 4))
@given(st.data())
def test_find_longest_cache_hit_is_the_engine_cores(data):
    """The core's own coordinator, managers and block pool, which hold the same chunks."""
    setup = data.draw(setups())
    assume(len([spec for spec in setup.specs if spec.prefix_cacheable]) > 1)
    shardable = all(isinstance(spec, SHARDABLE) for spec in setup.specs)
    dcp_size = data.draw(st.sampled_from([1, 2, 4])) if shardable else 1
    num_tokens = data.draw(lengths(setup))
    stored = data.draw(stored_sets(len(setup.specs), num_tokens // HASH_TOKENS))
    partial_hits, hit_length, masks = core_hit(setup, num_tokens - 1, stored, dcp_size)
    event(f"ranks: {dcp_size}, below the block: {partial_hits}")
    setup = replace(across_ranks(setup, dcp_size), partial_hits=partial_hits)
    coordinator = setup.coordinator()
    # Groups of one spec with EAGLE: the core reads a block past the length at hand, the store not.
    assume(not setup.use_eagle or setup.num_distinct > 1)
    # A flag on a group that is not cached: the core takes it for the only one, the store for none.
    assume(not setup.eagle_groups or setup.flags_cacheable)
    found, found_masks = coordinator.find_longest_cache_hit(num_tokens - 1, stored)
    assert found == hit_length
    assert as_lists(found_masks) == masks


@settings(fuzz)
@given(st.data())
def test_windowed_lookup_answers_as_one_call_for_everything(data):
    """The windows start at one chunk here, so that small prompts meet many."""
    setup = data.draw(setups())
    num_tokens = data.draw(lengths(setup))
    num_hashes = num_tokens // HASH_TOKENS
    stored = data.draw(stored_sets(len(setup.specs), num_hashes))
    hashes = [b""] * num_hashes
    everything = setup.coordinator().lookup(num_tokens, hashes, RecordingStore(stored))
    with (
        mock.patch.object(answers, "ONE_CALL_CHUNKS", 0),
        mock.patch.object(kinds, "FIRST_WINDOW_CHUNKS", data.draw(st.integers(1, 4))),
    ):
        windowed = setup.coordinator().lookup(num_tokens, hashes, RecordingStore(stored))
        explained = setup.coordinator().explain(num_tokens, hashes, RecordingStore(stored))
    event(f"calls: {min(windowed.num_calls, 5)}")
    assert windowed.hit_length == everything.hit_length == explained.hit_length
    assert as_lists(windowed.load_masks) == as_lists(everything.load_masks)
    assert windowed.tail_boundaries == everything.tail_boundaries
    assert windowed.num_keys_asked <= everything.num_keys_asked
    assert explained.line


@settings(fuzz, max_examples=-(-MAX_EXAMPLES // 4))
@given(st.data())
def test_load_asks_for_nothing_that_was_not_seen(data):
    """Every block of the load masks is stored: its tail under the boundary that is named."""
    setup = data.draw(setups())
    num_tokens = data.draw(lengths(setup))
    stored = data.draw(stored_sets(len(setup.specs), num_tokens // HASH_TOKENS))
    store = RecordingStore(stored)
    answer = setup.coordinator().lookup(num_tokens, [b""] * (num_tokens // HASH_TOKENS), store)
    tails = dict(answer.tail_boundaries)
    for group, mask in enumerate(answer.load_masks):
        block_tokens = setup.specs[group].block_size
        for block in np.flatnonzero(mask).tolist():
            end = tails[group] if block == len(mask) - 1 else (block + 1) * block_tokens
            chunk = (group, end // HASH_TOKENS - 1)
            assert chunk in store.asked
            assert stored[group][chunk[1]]
