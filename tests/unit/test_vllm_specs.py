# SPDX-License-Identifier: Apache-2.0
"""Names of values: each ingredient changes the keys, nothing about an engine's size does."""

import copy
import json
import shutil

import numpy as np
import pytest

pytest.importorskip("vllm")
torch = pytest.importorskip("torch")

from safetensors.torch import save_file
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
)

from kvxfer.blocks import BlockLayout
from kvxfer.config import KVXferConfig
from kvxfer.errors import ConfigError, UnsupportedError
from kvxfer.spaces import RankSpaces
from kvxfer.vllm_specs import (
    RankPlace,
    check_version,
    name_values,
    read_engine,
    regions,
    warn_of_settings,
)

NUM_BLOCKS = 8
LAYERS = [f"model.layers.{i}.self_attn.attn" for i in range(2)]
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 64,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODEL))
    save_file({"w": torch.arange(4096, dtype=torch.float32)}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def base_config(checkpoint):
    args = EngineArgs(
        model=str(checkpoint), skip_tokenizer_init=True, dtype="float32", block_size=32
    )
    config = args.create_engine_config()
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="KVXferConnector",
        kv_connector_module_path="kvxfer.connector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
    )
    return config


@pytest.fixture
def vllm_config(base_config):
    config = copy.copy(base_config)
    for part in ("model_config", "cache_config", "parallel_config", "kv_transfer_config"):
        setattr(config, part, copy.copy(getattr(base_config, part)))
    config.model_config.hf_config = copy.deepcopy(config.model_config.hf_config)
    config.model_config.hf_text_config = config.model_config.hf_config
    return config


def full_spec(**changes):
    facts = {"block_size": 32, "num_kv_heads": 4, "head_size": 16, "dtype": torch.float32}
    return FullAttentionSpec(**{**facts, **changes})


def cache_config(spec=None, layers=LAYERS):
    return KVCacheConfig(
        num_blocks=NUM_BLOCKS,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(list(layers), spec or full_spec())],
    )


def caches(spec, layers=LAYERS, *, order=(0, 1, 2, 3), padding=0):
    """Return [B, H, N, C] views with the axes in memory as ``order`` says, pages padded."""
    shape = (NUM_BLOCKS, spec.num_heads, spec.block_size, spec.state_content_size_bytes)
    page = shape[1] * shape[2] * shape[3]
    strides, step = [0, 0, 0, 0], 1
    for axis in reversed(order):
        strides[axis] = step
        step *= shape[axis]
    strides[0] = page + padding
    return {
        layer: torch.zeros(NUM_BLOCKS * (page + padding), dtype=torch.int8).as_strided(
            shape, strides
        )
        for layer in layers
    }


def prefixes(vllm_config, kv_config=None, **changes):
    """Return the key prefixes of all shards."""
    spaces = spaces_of(vllm_config, kv_config, **changes)
    return {space.prefix for group in spaces.all_shards.values() for space in group}


def spaces_of(vllm_config, kv_config=None, *, settings=None, tensors=None, content="plain", rank=0):
    """Return the key spaces as the worker of tensor rank ``rank`` makes them."""
    kv_config = kv_config or cache_config()
    config = KVXferConfig.from_extra(settings or {}, {})
    facts = read_engine(vllm_config, kv_config, config, RankPlace(rank))
    group = kv_config.kv_cache_groups[0]
    layout = BlockLayout.from_regions(
        regions(facts, tensors or caches(group.kv_cache_spec, group.layer_names)),
        value_order=config.value_order,
        head_shard={i: s.heads_per_shard for i, s in enumerate(facts.layer_sets)},
        num_blocks=facts.num_blocks,
    )
    names = name_values(
        vllm_config, facts, config, value_order=layout.value_order, content_format=content
    )
    return RankSpaces(config.cache_prefix, facts, names, layout)


# What changes the keys


def set_model(name, value):
    return lambda config: setattr(config.model_config, name, value)


def set_cache(name, value):
    return lambda config: setattr(config.cache_config, name, value)


def set_hf(name, value):
    return lambda config: setattr(config.model_config.hf_config, name, value)


@pytest.mark.parametrize(
    "change",
    [
        set_model("revision", "abc"),
        set_model("dtype", torch.bfloat16),
        set_model("quantization", "fp8"),
        set_hf("rms_norm_eps", 1e-5),
        set_cache("cache_dtype", "fp8"),
        set_cache("prefix_caching_hash_algo", "sha256_cbor"),
    ],
    ids=["revision", "dtype", "quantization", "model_config", "cache_dtype", "hash_algorithm"],
)
def test_keys_change_with_each_setting_of_the_engine(vllm_config, change):
    before = prefixes(vllm_config)
    change(vllm_config)
    assert before.isdisjoint(prefixes(vllm_config))


def test_keys_change_with_the_hash_seed(vllm_config, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    default = prefixes(vllm_config)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert default.isdisjoint(prefixes(vllm_config))


def test_keys_change_with_the_content_format_of_the_kernels(vllm_config):
    assert prefixes(vllm_config, content="vec").isdisjoint(prefixes(vllm_config, content="amx"))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"cache_prefix": "a"}, {"cache_prefix": "b"}),
        ({"model_id": "a"}, {"model_id": "b"}),
        ({"value_order": "token_major"}, {"value_order": "head_major"}),
        ({"store_tp": 1}, {"store_tp": 2}),
    ],
    ids=["cache_prefix", "model_id", "value_order", "store_tp"],
)
def test_keys_change_with_each_setting_of_kvxfer(vllm_config, one, other):
    found = prefixes(vllm_config, settings=one)
    assert found.isdisjoint(prefixes(vllm_config, settings=other))


@pytest.mark.parametrize(
    "changes",
    [
        {"head_size": 8, "head_size_v": 24},
        {"num_kv_heads": 2},
        {"dtype": torch.float16},
        {"sliding_window": 64},
    ],
    ids=["head_sizes", "heads", "dtype", "window"],
)
def test_keys_change_with_each_fact_of_the_group(vllm_config, changes):
    assert prefixes(vllm_config).isdisjoint(
        prefixes(vllm_config, cache_config(full_spec(**changes)))
    )


def test_keys_change_with_the_block_size(vllm_config):
    before = prefixes(vllm_config)
    vllm_config.cache_config.block_size = 16
    assert before.isdisjoint(prefixes(vllm_config, cache_config(full_spec(block_size=16))))


def test_keys_change_with_the_layers(vllm_config):
    other = cache_config(layers=LAYERS[:1])
    assert prefixes(vllm_config).isdisjoint(prefixes(vllm_config, other))


def test_keys_change_with_the_kind_of_attention(vllm_config):
    spec = MLAAttentionSpec(block_size=32, num_kv_heads=1, head_size=16, dtype=torch.float32)
    assert prefixes(vllm_config).isdisjoint(prefixes(vllm_config, cache_config(spec)))


def test_keys_change_with_one_byte_of_the_weights_and_not_with_the_path(
    vllm_config, checkpoint, tmp_path
):
    before = prefixes(vllm_config)
    copied = shutil.copytree(checkpoint, tmp_path / "llama")
    vllm_config.model_config.model = str(copied)
    assert prefixes(vllm_config) == before
    weights = bytearray((copied / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copied / "model.safetensors").write_bytes(weights)
    assert prefixes(vllm_config).isdisjoint(before)


# What does not


@pytest.mark.parametrize("tp_size", [2, 4])
def test_keys_do_not_change_with_the_tensor_parallel_size(vllm_config, tp_size):
    settings = {"store_tp": 4, "value_order": "head_major"}
    before = prefixes(vllm_config, settings=settings)
    assert len(before) == 4
    vllm_config.parallel_config.tensor_parallel_size = tp_size
    split = cache_config(full_spec(num_kv_heads=4 // tp_size))
    for rank in range(tp_size):
        assert prefixes(vllm_config, split, settings=settings, rank=rank) == before


def test_keys_do_not_change_with_strides_and_padding(vllm_config):
    settings = {"value_order": "token_major"}
    spec = full_spec()
    found = [
        prefixes(vllm_config, settings=settings, tensors=caches(spec, order=order, padding=pad))
        for order in [(0, 1, 2, 3), (0, 2, 1, 3)]
        for pad in [0, 4096]
    ]
    assert all(one == found[0] for one in found)


def test_native_order_is_part_of_the_key(vllm_config):
    spec = full_spec()
    heads_first = prefixes(vllm_config, tensors=caches(spec, order=(0, 1, 2, 3)))
    tokens_first = prefixes(vllm_config, tensors=caches(spec, order=(0, 2, 1, 3)))
    assert heads_first.isdisjoint(tokens_first)
    settings = {"value_order": "token_major"}
    assert tokens_first == prefixes(vllm_config, settings=settings)


# Shards


def facts_of(vllm_config, kv_config, rank, *, pcp_rank=0, **settings):
    config = KVXferConfig.from_extra(settings, {})
    return read_engine(vllm_config, kv_config, config, RankPlace(rank, pcp_rank=pcp_rank))


def turns(layer_sets):
    """Return each rank's number among those that hold the same bytes, and theirs."""
    return [(one.replica, one.num_replicas) for one in layer_sets]


def test_each_rank_holds_its_own_heads(vllm_config):
    vllm_config.parallel_config.tensor_parallel_size = 2
    split = cache_config(full_spec(num_kv_heads=2))
    held = [facts_of(vllm_config, split, rank).layer_sets[0] for rank in (0, 1)]
    assert [one.local_heads for one in held] == [(0, 2), (2, 4)]
    assert held[0].shards() == [((0, 2), None), ((2, 4), None)]
    assert turns(held) == [(0, 1), (0, 1)]


def test_ranks_beyond_the_kv_heads_hold_replicas_that_they_save_in_turn(vllm_config):
    vllm_config.parallel_config.tensor_parallel_size = 8
    split = cache_config(full_spec(num_kv_heads=1))
    held = [facts_of(vllm_config, split, rank).layer_sets[0] for rank in range(8)]
    assert [one.local_heads for one in held] == [(i // 2, i // 2 + 1) for i in range(8)]
    assert turns(held) == [(0, 2), (1, 2)] * 4


@pytest.mark.parametrize("name", ["swa_num_key_value_heads", "num_attention_groups"])
def test_ranks_are_no_replicas_where_layers_differ_in_their_kv_heads(vllm_config, name):
    """Of 8 ranks with one head each, which hold the same one, if the layer has 4 or 8 of them?"""
    vllm_config.parallel_config.tensor_parallel_size = 8
    setattr(vllm_config.model_config.hf_text_config, name, 8)
    split = cache_config(full_spec(num_kv_heads=1))
    held = [facts_of(vllm_config, split, rank).layer_sets[0] for rank in range(8)]
    assert [one.local_heads for one in held] == [(i, i + 1) for i in range(8)]
    assert turns(held) == [(0, 1)] * 8


def test_ranks_with_several_heads_are_no_replicas(vllm_config):
    """A layer with more KV heads than the model's one number says."""
    vllm_config.parallel_config.tensor_parallel_size = 8
    split = cache_config(full_spec(num_kv_heads=2))
    held = [facts_of(vllm_config, split, rank).layer_sets[0] for rank in range(8)]
    assert [one.local_heads for one in held] == [(2 * i, 2 * i + 2) for i in range(8)]


def test_latent_cache_is_one_shard_that_ranks_save_in_turn(vllm_config):
    vllm_config.parallel_config.tensor_parallel_size = 2
    spec = MLAAttentionSpec(block_size=32, num_kv_heads=1, head_size=16, dtype=torch.float32)
    held = [facts_of(vllm_config, cache_config(spec), rank).layer_sets[0] for rank in (0, 1)]
    assert [one.shards() for one in held] == [[(None, None)]] * 2
    assert turns(held) == [(0, 2), (1, 2)]


# Context parallelism: the ranks of a context group share each block's tokens


def latent_spec(**changes):
    facts = {"block_size": 32, "num_kv_heads": 1, "head_size": 16, "dtype": torch.float32}
    return MLAAttentionSpec(**{**facts, **changes})


def set_parallel(vllm_config, **sizes):
    for name, value in sizes.items():
        setattr(vllm_config.parallel_config, name, value)


def test_blocks_span_the_ranks_of_a_context_group(vllm_config):
    set_parallel(vllm_config, tensor_parallel_size=4, decode_context_parallel_size=2)
    facts = facts_of(vllm_config, cache_config(latent_spec()), 0)
    assert (facts.block_tokens, facts.hash_tokens) == (64, 64)
    assert [group.block_tokens for group in facts.groups] == [64]
    hashes = [bytes([i]) * 32 for i in range(3)]
    everything = lambda asked: [np.ones(len(idx), np.uint8) for _, idx in asked]  # noqa: E731
    assert facts.coordinator().lookup(200, hashes, everything).hit_length == 192


def test_latent_cache_is_one_shard_for_each_context_rank(vllm_config):
    set_parallel(vllm_config, tensor_parallel_size=4, decode_context_parallel_size=2)
    held = [facts_of(vllm_config, cache_config(latent_spec()), r).layer_sets[0] for r in range(4)]
    assert all(one.shards() == [(None, 0), (None, 1)] for one in held)
    assert [one.context_rank for one in held] == [0, 1, 0, 1]
    assert turns(held) == [(0, 2), (0, 2), (1, 2), (1, 2)]


def test_replicas_of_a_head_share_its_tokens(vllm_config):
    set_parallel(vllm_config, tensor_parallel_size=16, decode_context_parallel_size=2)
    split = cache_config(full_spec(num_kv_heads=1))
    held = [facts_of(vllm_config, split, rank).layer_sets[0] for rank in range(16)]
    saved = [(one.local_heads, one.context_rank) for one in held if one.replica == 0]
    assert saved == [((head, head + 1), share) for head in range(4) for share in range(2)]
    assert held[0].shards() == saved


@pytest.mark.parametrize(
    ("dcp_size", "context_ranks", "savers"),
    [
        (1, [None] * 4, [(0, 4), (1, 4), (2, 4), (3, 4)]),
        (2, [0, 0, 1, 1], [(0, 2), (1, 2), (0, 2), (1, 2)]),
        (4, [0, 2, 1, 3], [(0, 1)] * 4),
    ],
    ids="dcp={}".format,
)
def test_prefill_context_ranks_hold_copies_or_shares(vllm_config, dcp_size, context_ranks, savers):
    set_parallel(
        vllm_config,
        tensor_parallel_size=2,
        prefill_context_parallel_size=2,
        decode_context_parallel_size=dcp_size,
    )
    places = [(tp, pcp) for pcp in range(2) for tp in range(2)]
    facts = [
        facts_of(vllm_config, cache_config(latent_spec()), tp, pcp_rank=pcp) for tp, pcp in places
    ]
    assert [one.rank for one in facts] == [0, 1, 2, 3]
    assert [one.layer_sets[0].context_rank for one in facts] == context_ranks
    assert turns(one.layer_sets[0] for one in facts) == savers


def test_recurrent_states_are_not_shared_by_context_ranks(vllm_config):
    set_parallel(vllm_config, tensor_parallel_size=4, decode_context_parallel_size=2)
    state = MambaSpec(
        block_size=64, shapes=((4, 4),), dtypes=(torch.float32,), mamba_cache_mode="align"
    )
    hybrid = KVCacheConfig(
        num_blocks=NUM_BLOCKS,
        kv_cache_tensors=[],
        kv_cache_groups=[
            KVCacheGroupSpec([LAYERS[0]], latent_spec()),
            KVCacheGroupSpec([LAYERS[1]], state),
        ],
    )
    facts = facts_of(vllm_config, hybrid, 1)
    assert [group.block_tokens for group in facts.groups] == [64, 64]
    assert [one.context_rank for one in facts.layer_sets] == [1, None]


def test_every_rank_names_the_shards_of_all_ranks_and_holds_its_own(vllm_config):
    set_parallel(vllm_config, tensor_parallel_size=4, decode_context_parallel_size=2)
    split = cache_config(latent_spec())
    everywhere = [spaces_of(vllm_config, split, rank=rank) for rank in range(4)]
    named = [{space.prefix for space in one.all_shards[0]} for one in everywhere]
    assert all(one == named[0] for one in named)
    held = [[space.prefix for space in one.held[0]] for one in everywhere]
    assert [len(one) for one in held] == [1] * 4
    assert held[0] == held[2]
    assert held[1] == held[3]
    assert {*held[0], *held[1]} == named[0]
    saved = sorted((space.prefix, space.turn) for one in everywhere for space in one.saved[0])
    assert saved == sorted((prefix, turn) for prefix in named[0] for turn in range(2))
    assert all(space.num_turns == 2 for one in everywhere for space in one.saved[0])


@pytest.mark.parametrize(
    "change",
    [
        {"decode_context_parallel_size": 4},
        {"cp_kv_cache_interleave_size": 32},
        {"prefill_context_parallel_size": 2},
    ],
    ids=["ranks", "tokens_in_a_row", "prefill_ranks"],
)
def test_keys_change_with_which_tokens_a_rank_holds(vllm_config, change):
    set_parallel(vllm_config, tensor_parallel_size=4, decode_context_parallel_size=2)
    split = cache_config(latent_spec())
    before = prefixes(vllm_config, split)
    set_parallel(vllm_config, **change)
    assert before.isdisjoint(prefixes(vllm_config, split))


@pytest.mark.parametrize("store_tp", [1, 3, 6])
def test_store_tp_that_no_rank_can_cut_is_refused(vllm_config, store_tp):
    vllm_config.parallel_config.tensor_parallel_size = 2
    kv_config = cache_config(full_spec(num_kv_heads=6))
    vllm_config.model_config.model_arch_config = copy.copy(
        vllm_config.model_config.model_arch_config
    )
    vllm_config.model_config.model_arch_config.total_num_kv_heads = 12
    if store_tp == 6:
        assert facts_of(vllm_config, kv_config, 0, store_tp=6).layer_sets[0].heads_per_shard == 2
    else:
        with pytest.raises(ConfigError, match=f"store_tp is {store_tp}: 12 KV heads on 2 ranks"):
            facts_of(vllm_config, kv_config, 0, store_tp=store_tp)


def test_drafter_layers_are_a_set_of_their_own(vllm_config):
    plain = prefixes(vllm_config)
    vllm_config.speculative_config = type(
        "Speculative", (), {"draft_model_config": vllm_config.model_config, "use_eagle": bool}
    )()
    both = cache_config(layers=[*LAYERS, "model.layers.2.self_attn.attn"])
    with_drafter = prefixes(vllm_config, both)
    assert plain < with_drafter
    assert len(with_drafter) == 2 * len(plain)


def test_drafter_layers_behind_stages_are_known_by_numbers_of_a_stage_before(
    vllm_config, monkeypatch
):
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "3,1")
    vllm_config.model_config.hf_config.num_hidden_layers = 4
    vllm_config.parallel_config.pipeline_parallel_size = 2
    vllm_config.speculative_config = type(
        "Speculative", (), {"draft_model_config": vllm_config.model_config, "use_eagle": bool}
    )()
    layers = ["model.layers.3.self_attn.attn", "model.layers.1.self_attn.attn"]
    config = KVXferConfig.from_extra({}, {})
    last_stage = RankPlace(0, pp_rank=1)
    facts = read_engine(vllm_config, cache_config(layers=layers), config, last_stage)
    assert {each.layers: each.is_draft for each in facts.layer_sets} == {
        (layers[0],): False,
        (layers[1],): True,
    }


# Refusals


@pytest.mark.parametrize("version", ["0.31.0", "0.32.0+cpu", "0.33.2"])
def test_supported_version_is_taken(version):
    check_version(version)


@pytest.mark.parametrize("version", ["0.30.9", "0.34.0", "1.0", "dev"])
def test_other_version_is_refused_with_the_range(version):
    with pytest.raises(UnsupportedError, match=r">= 0\.31, < 0\.34; found "):
        check_version(version)


def test_recurrent_states_that_are_not_aligned_are_refused_with_the_option(vllm_config):
    spec = MambaSpec(block_size=32, shapes=((4, 4),), dtypes=(torch.float32,))
    with pytest.raises(UnsupportedError, match="--mamba-cache-mode align"):
        prefixes(vllm_config, cache_config(spec))


@pytest.mark.parametrize(
    ("part", "name", "value", "message"),
    [
        ("parallel_config", "nnodes", 2, "embedded store is shared by one host"),
        ("model_config", "enable_sleep_mode", True, "sleep mode"),
    ],
)
def test_what_is_not_supported_is_refused_at_start_up(vllm_config, part, name, value, message):
    setattr(getattr(vllm_config, part), name, value)
    with pytest.raises(UnsupportedError, match=message):
        facts_of(vllm_config, cache_config(), 0, store="lmdb:///x")


def test_default_failure_policy_is_warned_of(vllm_config, caplog):
    vllm_config.kv_transfer_config.kv_load_failure_policy = "fail"
    warn_of_settings(vllm_config)
    assert '"kv_load_failure_policy": "recompute"' in caplog.text


def test_random_hash_seed_is_warned_of_with_the_variable_to_set(vllm_config, caplog, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    vllm_config.cache_config.prefix_caching_hash_algo = "xxhash"
    warn_of_settings(vllm_config)
    assert "PYTHONHASHSEED" in caplog.text


def test_good_settings_are_not_warned_of(vllm_config, caplog):
    warn_of_settings(vllm_config)
    assert caplog.text == ""
