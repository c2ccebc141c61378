# SPDX-License-Identifier: Apache-2.0
"""Lookups of a long prompt: hashes in, hit out, keys and store calls included.

Both sides build their own keys, ours through the lookup server's ``StorePresence``, and ask the
same store in this process. ``store=stub`` knows its answer without looking, so what is left is each
side's own work; ``store=0.4us`` spends 0.4 us on every key besides, as an embedded store does;
``store=set`` looks each key up in a set. The channel to the scheduler is left out
(``bench_lookup_channel``).

``bench_search`` leaves keys out, too: what remains is the search over answers in memory.
``bench_hit_length`` shows the cost growing with the hit; its extra info has the chunks asked for.
"""

import hashlib
import time

import numpy as np
import pytest
from config import SIZES
from hits_rival import upstream_keys, upstream_worker

from kvxfer.hits import CacheGroup, Coordinator
from kvxfer.keys import KeySpace
from kvxfer.lookup import PackedHashes
from kvxfer.lookup.presence import StorePresence

BLOCK_TOKENS = SIZES.block_tokens
WINDOW_TOKENS = min(1024, SIZES.prompt_tokens // 8)
CASES = {  # sliding-window groups beside full attention, and whether all is stored
    "cold": (0, False),
    "full_hit": (0, True),
    "hybrid_cold": (5, False),
    "hybrid_full_hit": (5, True),
}
STORES = ("stub", "0.4us", "set")
KEY_COST_S = 0.4e-6
IMPLS = ("kvxfer", "upstream")
HIT_SHARES = (0.0, 0.01, 0.1, 0.5, 1.0)


class SetStore:
    """A set of keys behind both sides' interfaces."""

    def __init__(self, keys):
        self.keys = keys

    def exists(self, keys):
        stored = self.keys
        return bytearray([key in stored for key in keys])

    def batch_is_exist(self, keys):
        stored = self.keys
        return [1 if key in stored else 0 for key in keys]


class StubStore:
    """Says the same of every key, after ``key_cost_s`` for each."""

    def __init__(self, is_stored, key_cost_s):
        self.answer, self.key_cost_s = int(is_stored), key_cost_s

    def exists(self, keys):
        self._spend(len(keys))
        return bytearray([self.answer]) * len(keys)

    def batch_is_exist(self, keys):
        self._spend(len(keys))
        return [self.answer] * len(keys)

    def _spend(self, num_keys):
        end = time.perf_counter() + num_keys * self.key_cost_s
        while self.key_cost_s and time.perf_counter() < end:
            pass


class KvxferLookup:
    """Our lookup as the lookup server runs it."""

    def __init__(self, num_windows, hashes):
        window = {"window_tokens": WINDOW_TOKENS, "spec_id": "window"}
        groups = [CacheGroup("full", BLOCK_TOKENS, spec_id="full")]
        groups += [CacheGroup("sliding_window", BLOCK_TOKENS, **window)] * num_windows
        self.coordinator = Coordinator(groups, BLOCK_TOKENS, BLOCK_TOKENS)
        self.hashes = PackedHashes.pack(hashes)
        self.spaces = {
            group: [
                KeySpace(group, b"kvx1/default/model/%032d/%016d/p0/h%d/" % (0, group, shard))
                for shard in range(SIZES.num_shards)
            ]
            for group in range(len(groups))
        }
        self.store = SetStore(set())

    def use(self, store):
        self.store = store

    def keys(self, num_stored):
        idx = np.arange(num_stored, dtype=np.int32)
        spaces = [space for group in self.spaces.values() for space in group]
        return {
            key
            for space in spaces
            for key in space.keys(self.hashes.buffer, self.hashes.width, idx)
        }

    def look_up(self, num_tokens):
        presence = StorePresence(self.store, self.spaces, self.hashes)
        return self.coordinator.lookup(num_tokens, self.hashes, presence.exists)

    def hit_length(self, num_tokens):
        return self.look_up(num_tokens).hit_length


class UpstreamLookup:
    """The in-tree connector's lookup as its server runs it."""

    def __init__(self, num_windows, hashes):
        self.hashes = hashes
        self.worker = upstream_worker(
            [WINDOW_TOKENS] * num_windows, BLOCK_TOKENS, SIZES.num_shards, SetStore(set())
        )

    def use(self, store):
        self.worker.store = store

    def keys(self, num_stored):
        return upstream_keys(self.worker, self.hashes[:num_stored])

    def hit_length(self, num_tokens):
        return self.worker.lookup(num_tokens, self.hashes).hit_length


LOOKUPS = {"kvxfer": KvxferLookup, "upstream": UpstreamLookup}


def lookup_on(impl, num_tokens, case, store="stub"):
    """Return a side's lookup of a prompt, with its store filled as the case says."""
    num_windows, is_stored = CASES[case]
    lookup = LOOKUPS[impl](num_windows, hashes_of(num_tokens))
    if store == "set":
        num_stored = num_tokens // BLOCK_TOKENS if is_stored else 0
        lookup.use(SetStore(lookup.keys(num_stored)))
    else:
        lookup.use(StubStore(is_stored, KEY_COST_S if store == "0.4us" else 0.0))
    return lookup


def expected_hit(num_tokens, case):
    return num_tokens - BLOCK_TOKENS if CASES[case][1] else 0


def hashes_of(num_tokens):
    """Return the block hashes of a prompt, as vLLM keeps them: a list of bytes."""
    num_hashes = num_tokens // BLOCK_TOKENS
    return [hashlib.sha256(i.to_bytes(8, "little")).digest() for i in range(num_hashes)]


@pytest.mark.benchmark(group="hits.lookup", min_rounds=SIZES.min_rounds)
@pytest.mark.parametrize("store", STORES, ids="store={}".format)
@pytest.mark.parametrize("case", CASES, ids="case={}".format)
@pytest.mark.parametrize("impl", IMPLS, ids="impl={}".format)
def bench_lookup(benchmark, impl, case, store):
    lookup = lookup_on(impl, SIZES.prompt_tokens, case, store)
    hit_length = benchmark(lookup.hit_length, SIZES.prompt_tokens)
    assert hit_length == expected_hit(SIZES.prompt_tokens, case)


@pytest.mark.benchmark(group="hits.long_lookup", min_rounds=SIZES.min_rounds)
@pytest.mark.parametrize("case", CASES, ids="case={}".format)
@pytest.mark.parametrize("impl", IMPLS, ids="impl={}".format)
def bench_long_lookup(benchmark, impl, case):
    """A prompt of eight times the length: 1,048,576 tokens at full size."""
    num_tokens = 8 * SIZES.prompt_tokens
    lookup = lookup_on(impl, num_tokens, case)
    hit_length = benchmark.pedantic(lookup.hit_length, (num_tokens,), rounds=SIZES.min_rounds)
    assert hit_length == expected_hit(num_tokens, case)


@pytest.mark.benchmark(group="hits.hit_length", min_rounds=SIZES.min_rounds)
@pytest.mark.parametrize("share", HIT_SHARES, ids="hit={:.0%}".format)
@pytest.mark.parametrize("impl", IMPLS, ids="impl={}".format)
def bench_hit_length(benchmark, impl, share):
    num_tokens = SIZES.prompt_tokens
    num_stored = int(num_tokens // BLOCK_TOKENS * share)
    lookup = LOOKUPS[impl](0, hashes_of(num_tokens))
    lookup.use(SetStore(lookup.keys(num_stored)))
    hit_length = benchmark(lookup.hit_length, num_tokens)
    assert hit_length == min(num_stored * BLOCK_TOKENS, num_tokens - BLOCK_TOKENS)
    if impl == "kvxfer":
        answer = lookup.look_up(num_tokens)
        benchmark.extra_info.update(chunks_asked=answer.num_keys_asked, calls=answer.num_calls)


@pytest.mark.benchmark(group="hits.search", min_rounds=SIZES.min_rounds)
@pytest.mark.parametrize("case", ["full_hit", "hybrid_full_hit"], ids="case={}".format)
@pytest.mark.parametrize("impl", IMPLS, ids="impl={}".format)
def bench_search(benchmark, impl, case):
    """The search alone; our side asks for its answers, the rival has all of them at the start."""
    num_tokens = SIZES.prompt_tokens
    lookup = lookup_on(impl, num_tokens, case)
    search = {"kvxfer": kvxfer_search, "upstream": upstream_search}[impl](lookup)
    assert benchmark(search, num_tokens) == expected_hit(num_tokens, case)


def kvxfer_search(lookup):
    stored = np.ones(len(lookup.hashes), dtype=np.uint8)

    def exists(question):
        return [stored[hash_idx] for _, hash_idx in question]

    return lambda num_tokens: (
        lookup.coordinator.lookup(num_tokens, lookup.hashes, exists).hit_length
    )


def upstream_search(lookup):
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import coordinator

    coord, hashes = lookup.worker.coord, lookup.hashes
    groups = range(len(coord.kv_cache_groups))
    pool = coordinator.ExternalCachedBlockPool(
        BLOCK_TOKENS, {(group, block_hash) for group in groups for block_hash in hashes}
    )

    def search(num_tokens):
        _, hit = coord.find_longest_cache_hit(hashes, num_tokens, pool)
        if hit >= num_tokens:
            shorter = coord.align_lookup_length(num_tokens - 1)
            _, hit = coord.find_longest_cache_hit(hashes, shorter, pool)
        return hit

    return search
