# SPDX-License-Identifier: Apache-2.0
"""What one engine process of the demo has to do, and the settings that it runs with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CORRUPT_VARIABLE = "KVXFER_DEMO_CORRUPT"
"""Set to 1: values are damaged as they are saved, so that outputs must differ. For tests."""
BLOCK_TOKENS = 32
"""vLLM's block in the demo: its attention kernels for CPUs and GPUs all take it."""

_FIXED = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    # The engine runs in the process itself, so that the tap sees its store.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Else the first sampled token waits for a C++ compiler: 20 s on two cores.
    "TORCHDYNAMO_DISABLE": "1",
    # Split over threads, attention of one query rounds otherwise than the same query in a batch.
    "VLLM_CPU_ATTN_SPLIT_KV": "0",
    "PYTHONUNBUFFERED": "1",
}
_DEFAULTS = {"VLLM_CPU_KVCACHE_SPACE": "1"}  # GiB: with weights and torch, 3 GiB in all


def engine_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` with what an engine process needs: offline, nothing reported.

    A value of the caller's for the size of the KV cache stands.
    """
    return {**_DEFAULTS, **environ, **_FIXED}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineJob:
    """What one engine process has to do. ``prompts`` are token ids, computed in this order.

    ``again``: each is computed once more, with what vLLM's own cache holds of it.
    """

    model: str
    connector_settings: dict[str, object]
    prompts: list[list[int]]
    output_tokens: int
    dtype: str = "float32"
    again: bool = False

    @property
    def engine_arguments(self) -> dict[str, Any]:
        """Arguments of ``vllm.LLM``."""
        longest = max(map(len, self.prompts)) + self.output_tokens
        max_model_len = -(-longest // BLOCK_TOKENS) * BLOCK_TOKENS
        return {
            "model": self.model,
            "skip_tokenizer_init": True,
            "dtype": self.dtype,
            "seed": 0,
            "enforce_eager": True,
            "block_size": BLOCK_TOKENS,
            "max_model_len": max_model_len,
            "max_num_batched_tokens": max_model_len,
            "max_num_seqs": 1,
            "enable_prefix_caching": True,
            "disable_log_stats": False,
            "kv_transfer_config": {
                "kv_connector": "KVXferConnector",
                "kv_connector_module_path": "kvxfer.connector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": self.connector_settings,
            },
        }
