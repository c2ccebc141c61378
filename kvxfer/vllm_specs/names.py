# SPDX-License-Identifier: Apache-2.0
"""Everything that changes what stored bytes mean, as the names that keys are made of."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers import PretrainedConfig

from kvxfer.checkpoint_identity import checkpoint_fingerprint
from kvxfer.config import KVXferConfig
from kvxfer.keys import FORMAT, engine_digest, group_digest
from kvxfer.vllm_specs.engine import EngineFacts, context_parallel
from kvxfer.vllm_specs.layer_sets import LayerSet

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = logging.getLogger(__name__)

_VOLATILE_CONFIG = ("transformers_version", "_name_or_path", "dtype", "torch_dtype")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""Where an object lies: no two processes would agree on it."""
_SEEDED_HASHES = ("xxhash", "xxhash_cbor")
"""Hash algorithms whose seed is random per process unless PYTHONHASHSEED is set."""


@dataclass(frozen=True, slots=True)
class ValueNames:
    """The parts of a key that the engine decides."""

    model: str
    digest: str
    groups: tuple[str, ...]
    """One name per layer set."""


def name_values(
    vllm_config: VllmConfig,
    facts: EngineFacts,
    config: KVXferConfig,
    *,
    value_order: str,
    content_format: str,
) -> ValueNames:
    """Name the values of this engine: everything that changes what the bytes mean.

    ``value_order``: the resolved order; ``content_format``: how the attention kernels arrange a
    head's content (see :func:`content_format`).
    """
    model = vllm_config.model_config
    cache = vllm_config.cache_config
    digest = engine_digest(
        {
            "format": FORMAT,
            "model": _model_facts(model, config.model_id),
            "cache_dtype": str(cache.cache_dtype),
            "hash": [str(cache.prefix_caching_hash_algo), hash_seed(vllm_config)],
            "hash_tokens": facts.hash_tokens,
            "pipeline": vllm_config.parallel_config.pipeline_parallel_size,
            "context": context_parallel(vllm_config),
            "value_order": value_order,
            "content": content_format,
        }
    )
    draft = _draft_facts(vllm_config)
    return ValueNames(
        model=config.model_id or os.path.basename(os.path.normpath(model.model)),
        digest=digest,
        groups=tuple(_group_name(layer_set, draft) for layer_set in facts.layer_sets),
    )


def hash_seed(vllm_config: VllmConfig) -> str:
    """Return the state of the block hashes' seed: fixed, vLLM's default, or random."""
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is not None:
        return f"fixed {seed}"
    algo = str(vllm_config.cache_config.prefix_caching_hash_algo)
    return "random" if algo in _SEEDED_HASHES else "default"


def warn_of_settings(vllm_config: VllmConfig) -> None:
    """Log what makes a deployment silently useless or fragile, with the setting to change."""
    transfer = vllm_config.kv_transfer_config
    if transfer is not None and transfer.kv_load_failure_policy != "recompute":
        logger.warning(
            "kv_load_failure_policy is %r: a failed load ends its request. Set "
            '"kv_load_failure_policy": "recompute" in --kv-transfer-config.',
            transfer.kv_load_failure_policy,
        )
    if hash_seed(vllm_config) == "random":
        logger.warning(
            "prefix_caching_hash_algo %r has a random seed in every process: engines will not "
            "share blocks, nor find them after a restart. Set PYTHONHASHSEED to the same value "
            "everywhere, or use sha256.",
            str(vllm_config.cache_config.prefix_caching_hash_algo),
        )


def content_format(vllm_config: VllmConfig, layer_names: Iterable[str]) -> str:
    """Return how kernels arrange the content of a head.

    CUDA kernels keep [token][K, V]; vLLM's CPU kernels pack by instruction set, which therefore
    belongs to what the bytes mean.
    """
    layers = vllm_config.compilation_config.static_forward_context
    found = {str(getattr(layers.get(name), "isa", "plain")) for name in layer_names}
    return ",".join(sorted(found))


def _group_name(layer_set: LayerSet, draft_facts: Mapping[str, object]) -> str:
    return group_digest(
        {
            **layer_set.spec_facts,
            "layers": list(layer_set.layers),
            "draft": dict(draft_facts) if layer_set.is_draft else None,
        }
    )


def _draft_facts(vllm_config: VllmConfig) -> dict[str, object]:
    speculative = vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    return {} if draft is None else _model_facts(draft, None)


def _model_facts(model: ModelConfig, model_id: str | None) -> dict[str, object]:
    """Return what identifies the weights and how they compute, the same under every path."""
    return {
        "id": model_id or _model_identity(model),
        "revision": str(model.revision or getattr(model.hf_config, "_commit_hash", None)),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "config": _config_hash(model),
    }


def _model_identity(model: ModelConfig) -> str:
    if os.path.exists(model.model):
        return f"weights {checkpoint_fingerprint(model.model)}"
    return f"name {model.model}"


def _config_hash(model: ModelConfig) -> str:
    """Return a hash of the model's configuration, overrides included.

    Of all values, not of those that differ from the defaults: some configuration classes cannot
    be made without arguments, so their defaults are not to be had.
    """
    values = _lasting(model.hf_config.to_dict())
    text = json.dumps(values, sort_keys=True, default=lambda value: _ADDRESS.sub("", str(value)))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _lasting(value: Any) -> Any:
    """Return a configuration value without what depends on paths and library versions."""
    if isinstance(value, PretrainedConfig):
        value = value.to_dict()
    if isinstance(value, dict):
        return {str(k): _lasting(v) for k, v in value.items() if k not in _VOLATILE_CONFIG}
    return [_lasting(item) for item in value] if isinstance(value, (list, tuple)) else value
