# SPDX-License-Identifier: Apache-2.0
"""Cold against warm under speculative decoding: drafts change neither tokens nor what is stored."""

import pytest
from engine_checks import assert_loads_matter, compute_again
from engine_models import BLOCK_TOKENS, loadable, write_tiny_drafter

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

NGRAM = (
    ("method", "ngram"),
    ("num_speculative_tokens", 3),
    ("prompt_lookup_max", 3),
    ("prompt_lookup_min", 1),
)


@pytest.fixture(scope="module")
def draft_model(tiny_llama, tmp_path_factory):
    return write_tiny_drafter(tmp_path_factory.mktemp("eagle"), tiny_llama)


@pytest.fixture(scope="module")
def speculative_store(new_store):
    return new_store()


def speculative(settings, store, config):
    return settings.but(store=store.uri, besides=(("speculative_config", config),))


def test_ngram_drafts_are_neither_saved_nor_counted(
    engine_pool, settings, engine, speculative_store, prompts
):
    drafting = engine_pool.get(speculative(settings, speculative_store, NGRAM))
    half = prompts.draw(80)
    batch = [half + half + prompts.draw(1)]
    cold = drafting.generate(batch, max_tokens=24)
    speculative_store.settle()
    assert speculative_store.num_values() == len(batch[0]) // BLOCK_TOKENS
    warm = compute_again(drafting, batch, max_tokens=24)
    assert warm.external_hits == loadable(len(batch[0]))
    assert [o.tokens for o in warm.outputs] == [o.tokens for o in cold.outputs]
    plain = engine.generate(batch, max_tokens=24)
    assert [o.tokens for o in plain.outputs] == [o.tokens for o in cold.outputs]
    assert_loads_matter(drafting, batch, cold, max_tokens=24)


@pytest.fixture(scope="module")
def eagle_store(new_store):
    return new_store()


@pytest.fixture(scope="module")
def eagle_settings(settings, eagle_store, draft_model):
    config = (("method", "eagle"), ("model", str(draft_model)), ("num_speculative_tokens", 2))
    return speculative(settings, eagle_store, config)


def test_eagle_shares_the_target_with_engines_without_a_drafter(
    engine_pool, settings, eagle_settings, eagle_store, prompts
):
    """The last block of a hit is given back once; a drafter's layers are values of their own."""
    drafting = engine_pool.get(eagle_settings)
    before = eagle_store.num_values()
    prompt = prompts.draw(5 * BLOCK_TOKENS + 1)
    cold = drafting.generate([prompt], max_tokens=16)
    eagle_store.settle()
    assert eagle_store.num_values() == before + 2 * 5
    warm = compute_again(drafting, [prompt], max_tokens=16)
    assert warm.external_hits == 4 * BLOCK_TOKENS
    assert [o.tokens for o in warm.outputs] == [o.tokens for o in cold.outputs]
    assert_loads_matter(drafting, [prompt], cold, max_tokens=16)
    plain = engine_pool.get(settings.but(store=eagle_store.uri)).generate([prompt], max_tokens=16)
    assert plain.external_hits == 5 * BLOCK_TOKENS
    assert [o.tokens for o in plain.outputs] == [o.tokens for o in cold.outputs]


def test_eagle_gives_one_block_back_wherever_a_prompt_ends(
    engine_pool, eagle_settings, eagle_store, prompts
):
    drafting = engine_pool.get(eagle_settings)
    for num_tokens in (5 * BLOCK_TOKENS, 5 * BLOCK_TOKENS - 1, 2 * BLOCK_TOKENS):
        prompt = prompts.draw(num_tokens)
        cold = drafting.generate([prompt], max_tokens=16)
        eagle_store.settle()
        warm = compute_again(drafting, [prompt], max_tokens=16)
        assert warm.external_hits == (num_tokens // BLOCK_TOKENS - 1) * BLOCK_TOKENS
        assert [o.tokens for o in warm.outputs] == [o.tokens for o in cold.outputs]
        assert_loads_matter(drafting, [prompt], cold, max_tokens=16)


def test_eagle_on_a_second_turn_and_in_chunks(engine_pool, eagle_settings, eagle_store, prompts):
    drafting = engine_pool.get(eagle_settings.but(max_batched_tokens=80))
    first = prompts.draw(200)
    answer = drafting.generate([first], max_tokens=16).outputs[0].tokens
    second = first + answer + prompts.draw(70)
    cold = drafting.generate([second], max_tokens=16)
    eagle_store.settle()
    warm = compute_again(drafting, [second], max_tokens=16)
    assert warm.external_hits == (len(second) // BLOCK_TOKENS - 1) * BLOCK_TOKENS
    assert [o.tokens for o in warm.outputs] == [o.tokens for o in cold.outputs]
    assert_loads_matter(drafting, [second], cold, max_tokens=16)
