# SPDX-License-Identifier: Apache-2.0
"""Lookups of a long prompt: hashes in, hit out, keys and store calls included.

``lookup_sides`` has the two sides and their stores. The channel to the scheduler is left out
(``bench_lookup_channel``).

``bench_search`` leaves keys out, too: what remains is the search over answers in memory.
``bench_hit_length`` shows the cost growing with the hit; its extra info has what was asked for.
"""

import numpy as np
import pytest
from config import SIZES
from lookup_sides import (
    BLOCK_TOKENS,
    CASES,
    IMPLS,
    STORES,
    expected_hit,
    lookup_of_share,
    lookup_on,
)

HIT_SHARES = (0.0, 0.01, 0.1, 0.5, 1.0)


@pytest.mark.benchmark(group="hits.lookup", min_rounds=SIZES.min_rounds)
@pytest.mark.parametrize("store", STORES, ids="store={}".format)
@pytest.mark.parametrize("case", CASES, ids="case={}".format)
@pytest.mark.parametrize("impl", IMPLS, ids="impl={}".format)
def bench_lookup(benchmark, impl, case, store):
    lookup = lookup_on(impl, SIZES.prompt_tokens, case, store)
    hit_length = benchmark(lookup.hit_length)
    assert hit_length == expected_hit(SIZES.prompt_tokens, case)


@pytest.mark.benchmark(group="hits.long_lookup", min_rounds=SIZES.min_rounds)
@pytest.mark.parametrize("case", CASES, ids="case={}".format)
@pytest.mark.parametrize("impl", IMPLS, ids="impl={}".format)
def bench_long_lookup(benchmark, impl, case):
    num_tokens = SIZES.long_prompt_tokens
    lookup = lookup_on(impl, num_tokens, case)
    hit_length = benchmark.pedantic(lookup.hit_length, rounds=SIZES.min_rounds)
    assert hit_length == expected_hit(num_tokens, case)


@pytest.mark.benchmark(group="hits.hit_length", min_rounds=SIZES.min_rounds)
@pytest.mark.parametrize("share", HIT_SHARES, ids="hit={:.0%}".format)
@pytest.mark.parametrize("impl", IMPLS, ids="impl={}".format)
def bench_hit_length(benchmark, impl, share):
    num_tokens = SIZES.prompt_tokens
    num_stored = int(num_tokens // BLOCK_TOKENS * share)
    lookup = lookup_of_share(impl, num_tokens, share)
    hit_length = benchmark(lookup.hit_length)
    assert hit_length == min(num_stored * BLOCK_TOKENS, num_tokens - BLOCK_TOKENS)
    num_keys, num_calls = lookup.asked()
    benchmark.extra_info.update(keys_asked=num_keys, calls=num_calls)


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
        lookup.side.coordinator.lookup(num_tokens, lookup.hashes, exists).hit_length
    )


def upstream_search(lookup):
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import coordinator

    coord, hashes = lookup.side.worker.coord, lookup.hashes
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
