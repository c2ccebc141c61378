# SPDX-License-Identifier: Apache-2.0
"""What single settings change: roles, blocking lookup, saved decode blocks, cache prefix."""

import pytest
from engine_checks import assert_loads_matter, compute_again, compute_cold
from engine_models import BLOCK_TOKENS

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def test_consumer_loads_what_others_saved_and_saves_nothing(
    engine_pool, engine, settings, store, prompts
):
    batch = [prompts.draw(4 * BLOCK_TOKENS + 1)]
    fresh = [prompts.draw(4 * BLOCK_TOKENS + 1)]
    cold = compute_cold(engine, store, batch)
    stored = store.num_values()
    consumer_settings = settings.but(role="kv_consumer")
    consumer = engine_pool.get(consumer_settings)
    warm = consumer.generate(batch)
    assert warm.external_hits == 4 * BLOCK_TOKENS
    assert warm.outputs == cold.outputs
    assert_loads_matter(consumer, batch, cold)
    consumer.generate(fresh)
    engine_pool.retire(consumer_settings)  # what it saves, it has saved when it is closed
    assert store.num_values() == stored


def test_producer_saves_for_others_and_loads_too(engine_pool, engine, settings, store, prompts):
    producer = engine_pool.get(settings.but(role="kv_producer"))
    batch = [prompts.draw(4 * BLOCK_TOKENS + 1)]
    cold = compute_cold(producer, store, batch)
    for reader in (producer, engine):
        warm = compute_again(reader, batch)
        assert warm.external_hits == 4 * BLOCK_TOKENS
        assert warm.outputs == cold.outputs
        assert_loads_matter(reader, batch, cold)


@pytest.fixture
def decode_saver(engine_pool, settings):
    """Return an engine that waits for lookups and saves blocks of generated tokens."""
    extra = (("lookup_async", False), ("save_decode_cache", True))
    return engine_pool.get(settings.but(extra=extra))


def test_blocking_lookup_hits_like_the_asynchronous_one(decode_saver, store, prompts):
    batch = [prompts.draw(4 * BLOCK_TOKENS + 1)]
    cold = compute_cold(decode_saver, store, batch)
    warm = compute_again(decode_saver, batch)
    assert warm.external_hits == 4 * BLOCK_TOKENS
    assert warm.outputs == cold.outputs
    assert_loads_matter(decode_saver, batch, cold)


def test_next_turn_loads_the_blocks_of_generated_tokens(decode_saver, store, prompts):
    first_turn = prompts.draw(2 * BLOCK_TOKENS + 1)
    options = {"max_tokens": 3 * BLOCK_TOKENS}
    # 65 prompt tokens and 96 generated ones, of which the last is never computed: 5 blocks.
    answer = compute_cold(decode_saver, store, [first_turn], num_values=5, **options)
    next_turn = [first_turn + answer.outputs[0].tokens + prompts.draw(BLOCK_TOKENS)]
    warm = compute_again(decode_saver, next_turn)
    assert warm.external_hits == 5 * BLOCK_TOKENS
    with_local_hits = decode_saver.generate(next_turn)
    assert with_local_hits.local_hits > 0
    assert_loads_matter(decode_saver, next_turn, warm)


def test_decode_blocks_are_not_saved_by_default(engine, store, prompts):
    first_turn = prompts.draw(2 * BLOCK_TOKENS + 1)
    answer = compute_cold(engine, store, [first_turn], max_tokens=3 * BLOCK_TOKENS)
    next_turn = first_turn + answer.outputs[0].tokens
    assert compute_again(engine, [next_turn]).external_hits == 2 * BLOCK_TOKENS


def test_engines_of_other_cache_prefixes_share_nothing(
    engine_pool, engine, settings, store, prompts
):
    batch = [prompts.draw(4 * BLOCK_TOKENS + 1)]
    compute_cold(engine, store, batch)
    stranger = engine_pool.get(settings.but(extra=(("cache_prefix", "stranger"),)))
    assert stranger.generate(batch).external_hits == 0
