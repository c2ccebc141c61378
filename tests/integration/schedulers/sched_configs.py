# SPDX-License-Identifier: Apache-2.0
"""vLLM configurations and cache groups for its real schedulers, without an engine."""

import copy
import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import torch
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)

BLOCK = 16
"""Tokens of a block, in every group."""
HEADS, HEAD_SIZE = 2, 4
MODEL_LENGTH = 512
WINDOW = 32
LAYERS = ("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn")
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HEADS * HEAD_SIZE,
    "intermediate_size": 16,
    "num_hidden_layers": len(LAYERS),
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": HEAD_SIZE,
    "vocab_size": 64,
    "max_position_embeddings": MODEL_LENGTH,
}
KINDS = {
    "sync": {},
    "async": {"asynchronous": True},
    "sync_drafts": {"num_spec_tokens": 3},
    "async_drafts": {"asynchronous": True, "num_spec_tokens": 3},
}
"""How an engine may run ahead of what is sampled."""
OWN_PARTS = (
    "model_config",
    "cache_config",
    "parallel_config",
    "scheduler_config",
    "attention_config",
)


@cache
def _base_config(num_spec_tokens):
    folder = Path(mkdtemp(prefix="kvxfer-schedulers-"))
    (folder / "config.json").write_text(json.dumps(MODEL))
    drafts = {"method": "ngram", "num_speculative_tokens": num_spec_tokens, "prompt_lookup_max": 2}
    args = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=MODEL_LENGTH,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        speculative_config=drafts if num_spec_tokens else None,
    )
    config = args.create_engine_config()
    (folder / "config.json").unlink()
    folder.rmdir()
    return config


def make_vllm_config(
    transfer,
    *,
    num_blocks,
    num_ranks=1,
    num_spec_tokens=0,
    asynchronous=False,
    max_batched_tokens=64,
    max_requests=8,
    dp_rank=0,
):
    """Return a configuration of its own for one scheduler and its workers."""
    base = _base_config(num_spec_tokens)
    config = copy.copy(base)
    for part in OWN_PARTS:
        setattr(config, part, copy.copy(getattr(base, part)))
    config.cache_config.block_size = BLOCK
    config.cache_config.num_gpu_blocks = num_blocks
    config.parallel_config.tensor_parallel_size = num_ranks
    config.parallel_config.world_size = num_ranks
    config.parallel_config.data_parallel_rank = dp_rank
    config.scheduler_config.async_scheduling = asynchronous
    config.scheduler_config.max_num_batched_tokens = max_batched_tokens
    config.scheduler_config.max_num_seqs = max_requests
    config.kv_transfer_config = KVTransferConfig(**transfer)
    return config


def kvxfer_transfer(store_uri, *, policy="recompute", role="kv_both", **settings):
    """Return the transfer configuration of one connector of ours."""
    extra = {"store": store_uri, "model_id": "made-up", "staging_bytes": "1MiB", **settings}
    return {
        "kv_connector": "KVXferConnector",
        "kv_connector_module_path": "kvxfer.connector",
        "kv_role": role,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": extra,
    }


def make_cache_config(num_blocks, num_ranks=1, *, windowed=False):
    """Return one group of full attention, or one more whose layer slides a window."""
    facts = {
        "block_size": BLOCK,
        "num_kv_heads": HEADS // num_ranks,
        "head_size": HEAD_SIZE,
        "dtype": torch.float32,
    }
    full = FullAttentionSpec(**facts)
    if not windowed:
        groups = [KVCacheGroupSpec(list(LAYERS), full)]
    else:
        window = SlidingWindowSpec(**facts, sliding_window=WINDOW)
        groups = [
            KVCacheGroupSpec([LAYERS[0]], full),
            KVCacheGroupSpec([LAYERS[1]], window),
        ]
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
