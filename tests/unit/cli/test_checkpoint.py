# SPDX-License-Identifier: Apache-2.0
import json

import numpy as np
import pytest

from kvxfer.cli.checkpoint import DEMO_SHAPE, WEIGHT_GAIN, LlamaShape, write_llama

safetensors = pytest.importorskip("safetensors.numpy", exc_type=ImportError)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint") / "made" / "here"
    write_llama(folder, LlamaShape(num_layers=2), seed=7)
    return folder


@pytest.fixture(scope="module")
def weights(checkpoint):
    return safetensors.load_file(checkpoint / "model.safetensors")


def test_checkpoint_has_the_names_and_shapes_of_a_llama(weights):
    layer = "model.layers.1"
    shapes = {name: weight.shape for name, weight in weights.items() if name.startswith(layer)}
    assert shapes == {
        f"{layer}.self_attn.q_proj.weight": (128, 128),
        f"{layer}.self_attn.k_proj.weight": (64, 128),
        f"{layer}.self_attn.v_proj.weight": (64, 128),
        f"{layer}.self_attn.o_proj.weight": (128, 128),
        f"{layer}.mlp.gate_proj.weight": (256, 128),
        f"{layer}.mlp.up_proj.weight": (256, 128),
        f"{layer}.mlp.down_proj.weight": (128, 256),
        f"{layer}.input_layernorm.weight": (128,),
        f"{layer}.post_attention_layernorm.weight": (128,),
    }
    assert weights["model.embed_tokens.weight"].shape == (512, 128)
    assert weights["lm_head.weight"].shape == (512, 128)
    assert weights["model.norm.weight"].shape == (128,)
    assert len(weights) == 2 * 9 + 3


def test_checkpoint_weights_have_the_size_of_trained_ones(weights):
    for name, weight in weights.items():
        assert weight.dtype == np.float32
        if weight.ndim == 1:
            assert 0.5 <= weight.min() < 0.6, name
            assert 1.4 < weight.max() <= 1.5, name
        else:
            fan_in = 1 if "embed" in name else weight.shape[1]
            assert weight.std() == pytest.approx(WEIGHT_GAIN / fan_in**0.5, rel=0.05), name


def test_checkpoint_config_describes_the_weights(checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    sizes = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"]
    assert [config[name] for name in sizes] == [512, 128, 256, 2, 32]
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (4, 2)


@pytest.mark.parametrize(("seed", "equal"), [(7, True), (8, False)], ids=["same", "another"])
def test_checkpoint_depends_on_the_seed_alone(checkpoint, tmp_path, seed, equal):
    write_llama(tmp_path, LlamaShape(num_layers=2), seed=seed)
    first, second = (f / "model.safetensors" for f in (checkpoint, tmp_path))
    assert (first.read_bytes() == second.read_bytes()) is equal


def test_demo_model_stores_16_kib_for_each_token():
    assert DEMO_SHAPE.kv_token_bytes == 16 << 10
