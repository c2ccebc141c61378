# SPDX-License-Identifier: Apache-2.0
"""Loads and saves under what the scheduler does: chunks, no prefix cache, preemption, abort."""

import pytest
import tamper_modes
from engine_checks import assert_loads_matter, compute_again, compute_cold
from engine_models import BLOCK_TOKENS, loadable

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def test_chunked_prefill_saves_and_loads_whole_blocks(engine_pool, settings, store, prompts):
    # Chunks of 80 tokens: every other one ends within a block.
    engine = engine_pool.get(settings.but(max_batched_tokens=80))
    batch = [prompts.draw(300), prompts.draw(129)]
    cold = compute_cold(engine, store, batch)
    warm = compute_again(engine, batch)
    assert warm.external_hits == loadable(300) + loadable(129)
    assert warm.outputs == cold.outputs
    assert_loads_matter(engine, batch, cold)


def test_chunked_and_whole_prefill_load_from_each_other(engine_pool, settings, store, prompts):
    chunked = engine_pool.get(settings.but(max_batched_tokens=80))
    batch = [prompts.draw(300)]
    cold = compute_cold(chunked, store, batch)
    whole = engine_pool.get(settings)
    warm = whole.generate(batch)
    assert warm.external_hits == loadable(300)
    assert warm.outputs == cold.outputs
    assert_loads_matter(whole, batch, cold)


def test_without_prefix_caching_every_repeat_loads(engine_pool, settings, store, prompts):
    engine = engine_pool.get(settings.but(prefix_caching=False))
    batch = [prompts.draw(4 * BLOCK_TOKENS + 1)]
    cold = compute_cold(engine, store, batch)
    for _ in range(2):
        warm = engine.generate(batch)
        assert warm.external_hits == 4 * BLOCK_TOKENS
        assert warm.local_hits == 0
        assert warm.outputs == cold.outputs
    assert_loads_matter(engine, batch, cold)


def test_preempted_requests_keep_their_outputs(engine_pool, engine, settings, new_store, prompts):
    # Four requests that fill 20 blocks as they start: some are preempted when the others grow.
    batch = [prompts.draw(4 * BLOCK_TOKENS + 1) for _ in range(4)]
    options = {"max_tokens": 2 * BLOCK_TOKENS}
    expected = engine.generate(batch, **options)
    small_store = new_store()
    small = engine_pool.get(settings.but(store=small_store.uri, num_blocks=21))
    cold = small.generate(batch, **options)
    assert cold.preemptions > 0
    assert cold.outputs == expected.outputs
    small_store.wait_for(4 * len(batch))
    warm = compute_again(small, batch, **options)
    assert warm.preemptions > 0
    assert warm.external_hits > 0
    assert warm.outputs == expected.outputs
    assert_loads_matter(small, batch, expected, **options)


def test_abort_while_loading_frees_every_block(engine, store, prompts):
    prompt, other = prompts.draw(8 * BLOCK_TOKENS + 1), prompts.draw(4 * BLOCK_TOKENS + 1)
    cold = compute_cold(engine, store, [prompt, other])
    engine.reset_local_cache()
    with engine.tamper(tamper_modes.HOLD):
        name = engine.submit(prompt)
        engine.step_until_load_is_held()
        engine.abort(name)
    warm = engine.generate([other])
    assert warm.external_hits == 4 * BLOCK_TOKENS
    again = compute_again(engine, [prompt, other])  # its reset needs every block back
    assert again.external_hits == 12 * BLOCK_TOKENS
    assert again.outputs == cold.outputs
    assert_loads_matter(engine, [prompt, other], cold)


def test_other_requests_go_on_while_a_load_is_held(engine, store, prompts):
    stored, fresh = prompts.draw(4 * BLOCK_TOKENS + 1), prompts.draw(4 * BLOCK_TOKENS + 1)
    cold = compute_cold(engine, store, [stored])
    engine.reset_local_cache()
    with engine.tamper(tamper_modes.HOLD):
        name = engine.submit(stored)
        engine.step_until_load_is_held()
        assert len(engine.generate([fresh]).outputs[0].tokens) > 0
        engine.abort(name)
    assert compute_again(engine, [stored]).outputs == cold.outputs
    assert_loads_matter(engine, [stored], cold)


def test_core_in_its_own_process_saves_and_loads(engine_pool, settings, store, prompts):
    engine = engine_pool.get(settings.but(core_process=True))
    batch = [prompts.draw(4 * BLOCK_TOKENS + offset) for offset in (-1, 0, 1)]
    cold = compute_cold(engine, store, batch)
    warm = compute_again(engine, batch)
    assert warm.external_hits == sum(loadable(len(prompt)) for prompt in batch)
    assert warm.outputs == cold.outputs
    assert_loads_matter(engine, batch, cold)
