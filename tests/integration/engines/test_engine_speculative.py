# SPDX-License-Identifier: Apache-2.0
"""Cold against warm under speculative decoding: drafts change neither tokens nor what is stored."""

import json

import pytest
from engine_checks import assert_loads_matter, compute_again
from engine_models import BLOCK_TOKENS, TINY, loadable

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

NGRAM = (
    ("method", "ngram"),
    ("num_speculative_tokens", 3),
    ("prompt_lookup_max", 3),
    ("prompt_lookup_min", 1),
)


@pytest.fixture(scope="module")
def draft_model(tiny_llama, tmp_path_factory):
    """Return an EAGLE drafter for the tiny model: its first layer, and a matrix before it."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("eagle")
    config = json.loads((tiny_llama / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    target = load_file(tiny_llama / "model.safetensors")
    weights = {
        name.removeprefix("model."): tensor.clone()
        for name, tensor in target.items()
        if name.startswith("model.layers.0.") and "input_layernorm" not in name
    }
    random = torch.Generator().manual_seed(3)
    hidden = TINY.hidden_size
    weights["fc.weight"] = torch.randn(hidden, 2 * hidden, generator=random) / hidden**0.5
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


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
