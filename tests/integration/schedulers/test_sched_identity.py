# SPDX-License-Identifier: Apache-2.0
"""Equal tokens are not equal KV: adapters, images and salts; and requests that must not read."""

import pytest
from vllm import PoolingParams, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager


def lora(name):
    return {"lora_request": LoRARequest(name, ord(name), f"/adapters/{name}")}


def image(name):
    position = PlaceholderRange(offset=4, length=8)
    return {"mm_features": [MultiModalFeatureSpec(None, "image", f"image-{name}", position)]}


def salt(name):
    return {"cache_salt": name}


@pytest.fixture
def make_any(make):
    """Return engines whose scheduler takes images."""

    def make_any():
        engine = make()
        engine.vllm.max_num_encoder_input_tokens = 64
        engine.vllm.encoder_cache_manager = EncoderCacheManager(cache_size=64)
        return engine

    return make_any


@pytest.mark.parametrize("kind", [lora, image, salt], ids=lambda kind: kind.__name__)
def test_never_a_hit_across_adapters_images_and_salts(make_any, prompt, store_uri, kind):
    tokens = prompt(70)
    saver = make_any()
    saver.serve("plain", tokens)
    saver.serve("a", tokens, salt=b"a", **kind("a"))
    loader = make_any()
    loader.serve("b", tokens, salt=b"b", **kind("b"))
    assert loader.loaded("b") == []
    loader.serve("a", tokens, salt=b"a", **kind("a"))
    assert loader.loaded("a") == [(0, 64)]
    loader.serve("plain", tokens)
    assert loader.loaded("plain") == [(0, 64)]
    for name in ("a", "b", "plain"):
        loader.assert_generated(name)
    loader.assert_empty()
    assert loader.assert_store_is_true(store_uri) == 12


UNREAD = {
    "prompt_logprobs": {"params": SamplingParams(max_tokens=2, prompt_logprobs=1)},
    "skip": {"params": SamplingParams(max_tokens=2, skip_reading_prefix_cache=True)},
    "pooling": {"pooling_params": PoolingParams(task="embed", skip_reading_prefix_cache=True)},
}


@pytest.mark.parametrize("kind", UNREAD)
def test_request_that_must_not_read_the_cache_is_neither_looked_up_nor_loaded(make, prompt, kind):
    tokens = prompt(70)
    make().serve("a", tokens)
    engine = make()
    asked = engine.ranks[0].switches.calls
    engine.add("a", tokens, **UNREAD[kind])
    for _ in range(3):
        engine.step()
    assert engine.requests["a"].skip_reading_prefix_cache
    assert engine.ours._lookups.counters.sent == 1, "the key spaces, at start-up"
    assert asked["get"] == 0
    assert engine.loads == []
    engine.abort("a")
    engine.settle()
    engine.assert_empty()


def test_engines_of_one_id_and_two_data_parallel_ranks_have_channels_of_their_own(make, prompt):
    tokens = prompt(70)
    engines = [make(engine_id="one", dp_rank=rank) for rank in range(2)]
    assert engines[0].ours._endpoints != engines[1].ours._endpoints
    engines[0].serve("a", tokens)
    engines[1].serve("a", tokens)
    assert engines[1].loaded("a") == [(0, 64)], "they share the store"
    engines[1].assert_generated("a")
