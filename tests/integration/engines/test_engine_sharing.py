# SPDX-License-Identifier: Apache-2.0
"""One store, several engines: at the same time, and one after another."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from engine_checks import assert_loads_matter, compute_again, compute_cold
from engine_models import BLOCK_TOKENS

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def test_two_engines_load_what_the_other_saved_at_the_same_time(
    engine_pool, engine, settings, store, prompts
):
    other = engine_pool.get(settings.but(max_batched_tokens=80))
    ours, theirs = ([prompts.draw(4 * BLOCK_TOKENS + 1) for _ in range(4)] for _ in range(2))
    stored_before = store.num_values()
    our_cold, their_cold = _at_the_same_time((engine, ours), (other, theirs))
    store.wait_for(stored_before + 32)
    our_warm, their_warm = _at_the_same_time((engine, theirs), (other, ours))
    assert (our_warm.external_hits, their_warm.external_hits) == (512, 512)
    assert our_warm.outputs == their_cold.outputs
    assert their_warm.outputs == our_cold.outputs
    assert_loads_matter(engine, theirs, their_cold)
    assert_loads_matter(other, ours, our_cold)


def test_two_engines_save_the_same_prompts_at_the_same_time(
    engine_pool, engine, settings, store, prompts
):
    other = engine_pool.get(settings.but(max_batched_tokens=80))
    batch = [prompts.draw(4 * BLOCK_TOKENS + 1) for _ in range(4)]
    stored_before = store.num_values()
    cold, other_cold = _at_the_same_time((engine, batch), (other, batch))
    assert cold.outputs == other_cold.outputs
    store.wait_for(stored_before + 16)
    warm = compute_again(other, batch)
    assert store.num_values() == stored_before + 16
    assert warm.external_hits == 512
    assert warm.outputs == cold.outputs
    assert_loads_matter(other, batch, cold)


def test_restarted_engine_loads_what_the_first_saved_until_its_end(
    engine_pool, settings, new_store, prompts
):
    settings = settings.but(store=new_store().uri)
    batch = [prompts.draw(8 * BLOCK_TOKENS + 1) for _ in range(4)]
    cold = engine_pool.get(settings).generate(batch)
    engine_pool.retire(settings)  # at once: closing waits for the saves
    restarted = engine_pool.get(settings)
    warm = restarted.generate(batch)
    assert warm.external_hits == 32 * BLOCK_TOKENS
    assert warm.outputs == cold.outputs
    assert_loads_matter(restarted, batch, cold)


def test_engine_after_a_killed_one_loads_what_that_had_saved(
    engine_pool, settings, new_store, prompts
):
    killed_store = new_store()
    settings = settings.but(store=killed_store.uri)
    batch = [prompts.draw(4 * BLOCK_TOKENS + 1)]
    killed = engine_pool.get(settings)
    cold = compute_cold(killed, killed_store, batch)
    killed.kill()
    warm = engine_pool.get(settings).generate(batch)
    assert warm.external_hits == 4 * BLOCK_TOKENS
    assert warm.outputs == cold.outputs
    assert_loads_matter(engine_pool.get(settings), batch, cold)


def _at_the_same_time(*calls):
    """Compute each engine's prompts, all engines at once; generations in the order given."""
    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(lambda call: compute_again(*call), calls))
