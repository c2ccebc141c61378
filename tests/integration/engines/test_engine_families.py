# SPDX-License-Identifier: Apache-2.0
"""Cold against warm for models with sliding windows, recurrent states and latent caches."""

import pytest
from engine_checks import assert_loads_matter, compute_again
from engine_families import FAMILIES, write_family

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def family_store(new_store):
    return new_store()


@pytest.fixture(scope="module")
def family_settings(settings, family, family_store, tmp_path_factory):
    model = write_family(tmp_path_factory.mktemp("family"), family)
    return settings.but(model=model, store=family_store.uri, besides=family.arguments)


@pytest.fixture
def engine(engine_pool, family_settings):
    return engine_pool.get(family_settings)


def test_warm_outputs_equal_those_without_the_store(engine, family, family_store, prompts):
    """Prompts that end inside a block, on one and one token after, at blocks of 32 and 64."""
    batch = [prompts.draw(num_tokens) for num_tokens in (450, 320, 321, 129, 65)]
    cold = engine.generate(batch)
    assert cold.external_hits == 0
    expected = cold if family.exact_cold else engine.generate(batch)
    family_store.settle()
    warm = compute_again(engine, batch)
    assert warm.local_hits == 0
    assert warm.external_hits >= sum((len(prompt) - 1) // 64 * 64 for prompt in batch)
    assert warm.outputs == expected.outputs
    assert_loads_matter(engine, batch, expected)


def test_second_turn_hits_what_the_first_one_stored(engine, family, family_store, prompts):
    first = prompts.draw(200)
    answer = engine.generate([first], max_tokens=8).outputs[0].tokens
    second = first + answer + prompts.draw(70)
    family_store.settle()
    warm = compute_again(engine, [second])
    assert warm.external_hits >= 192
    local = engine.generate([second])
    assert local.local_hits >= 192
    if family.exact_cold:
        assert warm.outputs == local.outputs
    assert_loads_matter(engine, [second], warm)


def test_chunked_prefill_saves_what_later_prompts_load(
    engine_pool, family_settings, family, family_store, prompts
):
    engine = engine_pool.get(family_settings.but(max_batched_tokens=128))
    prompt = prompts.draw(450)
    cold = engine.generate([prompt])
    expected = cold if family.exact_cold else engine.generate([prompt])
    family_store.settle()
    warm = compute_again(engine, [prompt])
    assert warm.external_hits >= 448 // 64 * 64
    assert warm.outputs == expected.outputs
