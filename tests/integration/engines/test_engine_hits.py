# SPDX-License-Identifier: Apache-2.0
"""Cold against warm: what an engine loads gives the tokens and logprobs that it computed."""

import pytest
from engine_checks import assert_loads_matter, compute_again, compute_cold, whole_blocks
from engine_models import BLOCK_TOKENS, loadable

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
AROUND_BLOCKS = [blocks * BLOCK_TOKENS + offset for blocks in (2, 3, 8) for offset in (-1, 0, 1)]


@pytest.mark.parametrize("num_tokens", AROUND_BLOCKS, ids="tokens={}".format)
def test_warm_outputs_equal_cold_ones(engine, store, prompts, num_tokens):
    batch = [prompts.draw(num_tokens)]
    cold = compute_cold(engine, store, batch)
    warm = compute_again(engine, batch)
    assert warm.external_hits == loadable(num_tokens)
    assert warm.local_hits == 0
    assert warm.outputs == cold.outputs
    assert_loads_matter(engine, batch, cold)


@pytest.mark.parametrize("num_tokens", [BLOCK_TOKENS - 1, BLOCK_TOKENS], ids="tokens={}".format)
def test_prompts_without_a_loadable_block_never_hit(engine, store, prompts, num_tokens):
    batch = [prompts.draw(num_tokens)]
    cold = compute_cold(engine, store, batch)
    warm = compute_again(engine, batch)
    assert warm.external_hits == 0
    assert warm.outputs == cold.outputs


def test_saving_leaves_outputs_as_without_connector(engine_pool, engine, settings, store, prompts):
    batch = [prompts.draw(num_tokens) for num_tokens in AROUND_BLOCKS]
    cold = compute_cold(engine, store, batch)
    warm = compute_again(engine, batch)
    plain = engine_pool.get(settings.but(store=None)).generate(batch)
    assert cold.outputs == plain.outputs
    assert warm.outputs == plain.outputs
    assert_loads_matter(engine, batch, plain)


def test_local_prefix_is_extended_from_the_store(engine, store, prompts):
    prompt = prompts.draw(8 * BLOCK_TOKENS + 1)
    cold = compute_cold(engine, store, [prompt])
    compute_again(engine, [prompt[: 3 * BLOCK_TOKENS + 1]])
    warm = engine.generate([prompt])
    assert warm.local_hits == 3 * BLOCK_TOKENS
    assert warm.external_hits == 5 * BLOCK_TOKENS
    assert warm.outputs == cold.outputs
    assert_loads_matter(engine, [prompt], cold)


def test_full_local_hit_loads_nothing(engine, store, prompts):
    prompt = prompts.draw(4 * BLOCK_TOKENS + 1)
    cold = compute_cold(engine, store, [prompt])
    again = engine.generate([prompt])
    assert again.local_hits == 4 * BLOCK_TOKENS
    assert again.external_hits == 0
    assert again.outputs == cold.outputs


def test_common_prefix_is_stored_once_and_loaded_by_all(engine, store, prompts):
    prefix = prompts.draw(4 * BLOCK_TOKENS)
    batch = [prefix + prompts.draw(BLOCK_TOKENS + 1 + i) for i in range(4)]
    stored_before = store.num_values()
    compute_cold(engine, store, [prefix])
    engine.reset_local_cache()
    cold = engine.generate(batch)
    num_tails = sum(len(prompt) // BLOCK_TOKENS - 4 for prompt in batch)
    store.wait_for(stored_before + whole_blocks([prefix]) + num_tails)
    warm = compute_again(engine, batch)
    assert store.num_values() == stored_before + whole_blocks([prefix]) + num_tails
    assert warm.outputs == cold.outputs
    assert_loads_matter(engine, batch, cold)


def test_prompts_with_another_start_share_nothing(engine, store, prompts):
    prompt = prompts.draw(4 * BLOCK_TOKENS + 1)
    compute_cold(engine, store, [prompt])
    shifted = prompts.draw(1) + prompt
    assert compute_again(engine, [shifted]).external_hits == 0


def test_resetting_the_local_cache_keeps_the_store(engine, store, prompts):
    batch = [prompts.draw(2 * BLOCK_TOKENS + 1)]
    compute_cold(engine, store, batch)
    stored = store.num_values()
    engine.reset_local_cache()
    assert store.num_values() == stored
    assert engine.generate(batch).external_hits == 2 * BLOCK_TOKENS
