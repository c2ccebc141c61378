# SPDX-License-Identifier: Apache-2.0
"""Cold against warm for models with sliding windows, recurrent states and latent caches."""

import pytest
import tamper_modes
from engine_checks import assert_loads_matter, compute_again
from engine_families import FAMILIES, LATENT, write_family

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
    return settings.but(
        model=model,
        store=family_store.uri,
        besides=family.arguments,
        extra=(("save_decode_cache", True),),
    )


@pytest.fixture
def engine(engine_pool, family_settings):
    return engine_pool.get(family_settings)


def test_warm_outputs_equal_cold_ones(engine, family, family_store, prompts):
    """Prompts that end inside a block, on one and one token after, at blocks of 32 and 64.

    One at a time: the recurrent kernels round by the shape of the whole batch.
    """
    batch = [prompts.draw(num_tokens) for num_tokens in (450, 320, 321, 129, 65)]
    cold = [engine.generate([prompt]) for prompt in batch]
    assert not any(generation.external_hits for generation in cold)
    family_store.settle()
    warm = [compute_again(engine, [prompt]) for prompt in batch]
    for prompt, before, after in zip(batch, cold, warm, strict=True):
        assert after.local_hits == 0
        assert after.external_hits >= (len(prompt) - 1) // 64 * 64
        assert after.outputs == before.outputs
        if not family.forgets or len(prompt) - after.external_hits <= 2:
            assert_loads_matter(engine, [prompt], before)


def test_second_turn_hits_what_the_first_one_stored(engine, family_store, prompts):
    first = prompts.draw(200)
    answer = engine.generate([first], max_tokens=8).outputs[0].tokens
    second = first + answer + prompts.draw(70)
    local = engine.generate([second])
    assert local.local_hits >= 192
    assert local.external_hits == 0
    family_store.settle()
    warm = compute_again(engine, [second])
    assert warm.external_hits >= 256
    assert [o.tokens for o in warm.outputs] == [o.tokens for o in local.outputs]
    assert_loads_matter(engine, [second], warm)


def test_second_turn_hits_what_the_first_one_generated(engine, family, family_store, prompts):
    """Blocks of generated tokens are saved too, and states as far as vLLM retains them."""
    first, more = prompts.draw(200), prompts.draw(70)
    answer = engine.generate([first], max_tokens=120).outputs[0].tokens
    second = first + answer + more
    local = engine.generate([second])
    engine.reset_store()
    assert engine.generate([first], max_tokens=120).outputs[0].tokens == answer
    family_store.settle()
    warm = compute_again(engine, [second])
    assert warm.external_hits >= local.local_hits
    assert (warm.external_hits > len(first)) == family.keeps_generated
    if family.exact_chunks:  # after a local hit vLLM cuts the rest where the prompts part, too
        assert [o.tokens for o in warm.outputs] == [o.tokens for o in local.outputs]
    assert_loads_matter(engine, [second], warm)


def test_preempted_requests_keep_their_outputs(
    engine_pool, engine, family_settings, family, new_store, prompts
):
    """Six requests that outgrow a small cache together, then again from the store.

    Its eighth part is two blocks, too few pins for the states of a step, which come only once.
    """
    if family.few_blocks is None:
        pytest.skip("nothing to preempt, or vLLM itself computes another result the second time")
    batch = [prompts.draw(129) for _ in range(6)]
    options = {"max_tokens": 160}
    expected = engine.generate(batch, **options)
    small_store = new_store()
    small = engine_pool.get(
        family_settings.but(
            store=small_store.uri,
            num_blocks=family.few_blocks,
            extra=(*family_settings.extra, ("max_pinned_blocks", 8)),
        )
    )
    cold = small.generate(batch, **options)
    assert cold.preemptions > 0
    small_store.settle()
    warm = compute_again(small, batch, **options)
    assert warm.external_hits > 0
    for again in (cold, warm):
        assert [o.tokens for o in again.outputs] == [o.tokens for o in expected.outputs]
    with small.tamper(tamper_modes.CORRUPT):
        damaged = compute_again(small, batch, **options)
    small.reset_local_cache()
    assert damaged.outputs != warm.outputs  # of some: not every prompt is loaded each time


def test_chunked_prefill_saves_what_later_prompts_load(
    engine_pool, family_settings, family, family_store, prompts
):
    engine = engine_pool.get(family_settings.but(max_batched_tokens=128))
    prompt = prompts.draw(450)
    cold = engine.generate([prompt])
    expected = cold if family.exact_chunks else engine.generate([prompt])
    family_store.settle()
    warm = compute_again(engine, [prompt])
    assert warm.external_hits >= 448
    assert warm.outputs == expected.outputs
    assert_loads_matter(engine, [prompt], expected)


@pytest.mark.parametrize("num_tokens", [64, 320], ids="tokens={}".format)
def test_latent_cache_is_loaded_as_decoding_left_it(
    engine_pool, latent_settings, latent_store, prompts, num_tokens
):
    """Go on from a loaded prompt exactly as the engine went on from its own cache.

    A cold prefill is no reference here: it goes through another kernel than one over cached
    tokens, in bfloat16. The first generated token, appended to the prompt, leaves one token to
    compute, which takes the kernel that decoding took.
    """
    engine = engine_pool.get(latent_settings)
    prompt = prompts.draw(num_tokens)
    decoded = engine.generate([prompt]).outputs[0]
    latent_store.settle()
    longer = [prompt + decoded.tokens[:1]]
    warm = compute_again(engine, longer, max_tokens=7)
    assert warm.external_hits == num_tokens
    assert warm.outputs[0].tokens == decoded.tokens[1:]
    assert warm.outputs[0].logprobs == decoded.logprobs[1:]
    assert_loads_matter(engine, longer, warm, max_tokens=7)


def test_latent_cache_of_a_first_turn_is_loaded_by_the_second(
    engine_pool, latent_settings, latent_store, prompts
):
    """The reference decodes over the loaded first turn and what it computes; then all is loaded.

    The first turn is stored before: the prefill of the second rounds other values for it.
    """
    engine = engine_pool.get(latent_settings)
    first = prompts.draw(192)
    answer = engine.generate([first], max_tokens=1).outputs[0].tokens
    latent_store.settle()
    second = first + answer + prompts.draw(127)
    reference = engine.generate([second])
    assert reference.external_hits == len(first)
    latent_store.settle()
    decoded = reference.outputs[0]
    longer = [second + decoded.tokens[:1]]
    warm = compute_again(engine, longer, max_tokens=7)
    assert warm.external_hits == len(second)
    assert warm.outputs[0].tokens == decoded.tokens[1:]
    assert warm.outputs[0].logprobs == decoded.logprobs[1:]
    assert_loads_matter(engine, longer, warm, max_tokens=7)


@pytest.fixture(scope="module")
def latent_store(new_store):
    return new_store()


@pytest.fixture(scope="module")
def latent_settings(settings, latent_store, tmp_path_factory):
    model = write_family(tmp_path_factory.mktemp("latent"), LATENT)
    return settings.but(model=model, store=latent_store.uri, besides=LATENT.arguments)
