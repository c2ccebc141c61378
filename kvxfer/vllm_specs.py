# SPDX-License-Identifier: Apache-2.0
"""vLLM's configuration, cache specs and tensors in kvxfer's words; the one place that knows them.

    check_version()                        the supported range
    read_engine(vllm_config, kv_config)    -> EngineFacts: sizes, ranks, groups, refusals
    name_values(...)                       -> ValueNames: model, digest and group names for keys
    regions(facts, kv_caches)              -> what ``blocks.BlockLayout`` is made of

Callers: scheduler, worker and connector, at start-up only.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from kvxfer.blocks import Region
from kvxfer.checkpoint_identity import checkpoint_fingerprint
from kvxfer.config import KVXferConfig
from kvxfer.errors import ConfigError, UnsupportedError
from kvxfer.hits import CacheGroup
from kvxfer.keys import FORMAT, engine_digest, group_digest

if TYPE_CHECKING:
    import torch
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

logger = logging.getLogger(__name__)

SUPPORTED = ((0, 31), (0, 34))
"""vLLM versions from the first, below the second."""

_LAYER_IDX = re.compile(r"\.layers\.(\d+)\.")
_DRAFT_NAME = re.compile(r"(^|\.)(draft_model|mtp|eagle)(\.|$)")
_VOLATILE_CONFIG = ("transformers_version", "_name_or_path", "dtype", "torch_dtype")
_SEEDED_HASHES = ("xxhash", "xxhash_cbor")
"""Hash algorithms whose seed is random per process unless PYTHONHASHSEED is set."""


@dataclass(frozen=True, slots=True)
class LayerSet:
    """Layers of one cache group that are stored together: same heads, same model.

    A drafter's layers are a set of their own, so that an engine without it shares the rest.
    """

    group: int
    layers: tuple[str, ...]
    num_heads: int
    """KV heads over all ranks; 1 where replicated."""
    local_heads: tuple[int, int] | None
    """Global range of this rank's KV heads, None where every rank holds the same bytes."""
    heads_per_shard: int
    is_first_replica: bool
    """Whether this rank is the one that saves its heads."""
    is_draft: bool
    spec_facts: Mapping[str, object]

    def shards(self) -> list[tuple[int, int] | None]:
        """Return the head range of every shard of the pool, in order."""
        if self.local_heads is None:
            return [None]
        step = self.heads_per_shard
        return [(first, first + step) for first in range(0, self.num_heads, step)]


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What both sides need to know about the engine; equal on every rank but for the rank."""

    engine_id: str
    role: str
    tp_rank: int
    tp_size: int
    dp_rank: int
    num_ranks: int
    num_blocks: int
    block_tokens: int
    """Common block size of all groups, tokens."""
    hash_tokens: int
    partial_hits: bool
    use_eagle: bool
    retention_tokens: int | None
    groups: tuple[CacheGroup, ...]
    layer_sets: tuple[LayerSet, ...]


@dataclass(frozen=True, slots=True)
class ValueNames:
    """The parts of a key that the engine decides."""

    model: str
    digest: str
    groups: tuple[str, ...]
    """One name per layer set."""


def check_version(version: str) -> None:
    """Raise UnsupportedError for a vLLM outside the supported range."""
    low, high = (".".join(map(str, bound)) for bound in SUPPORTED)
    match = re.match(r"(\d+)\.(\d+)", version)
    found = (int(match[1]), int(match[2])) if match else None
    if found is None or not SUPPORTED[0] <= found < SUPPORTED[1]:
        raise UnsupportedError(
            f"kvxfer supports vLLM >= {low}, < {high}; found {version}. Install one of these, "
            "or a kvxfer release made for yours."
        )


def read_config(vllm_config: VllmConfig) -> KVXferConfig:
    """Read the connector's settings; ConfigError names the setting and the way out."""
    assert vllm_config.kv_transfer_config is not None
    return KVXferConfig.from_extra(vllm_config.kv_transfer_config.kv_connector_extra_config)


def read_engine(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: KVXferConfig, tp_rank: int = 0
) -> EngineFacts:
    """Describe the engine; UnsupportedError or ConfigError for what cannot be served."""
    _refuse(vllm_config, kv_cache_config, config)
    block_tokens, hash_tokens = _block_sizes(vllm_config, kv_cache_config)
    alignment = getattr(kv_cache_config, "cache_hit_alignment_tokens", None)
    parallel, transfer = vllm_config.parallel_config, vllm_config.kv_transfer_config
    assert transfer is not None
    assert transfer.engine_id is not None
    speculative = vllm_config.speculative_config
    return EngineFacts(
        engine_id=transfer.engine_id,
        role=str(transfer.kv_role),
        tp_rank=tp_rank,
        tp_size=parallel.tensor_parallel_size,
        dp_rank=parallel.data_parallel_rank,
        num_ranks=parallel.world_size,
        num_blocks=kv_cache_config.num_blocks,
        block_tokens=block_tokens,
        hash_tokens=hash_tokens,
        partial_hits=alignment is not None and alignment < block_tokens,
        use_eagle=speculative is not None and _drops_eagle_block(speculative),
        retention_tokens=getattr(kv_cache_config, "prefix_cache_retention_interval", None),
        groups=tuple(cache_group(group) for group in kv_cache_config.kv_cache_groups),
        layer_sets=tuple(
            layer_set
            for idx, group in enumerate(kv_cache_config.kv_cache_groups)
            for layer_set in _layer_sets(vllm_config, config, idx, group, tp_rank)
        ),
    )


def cache_group(group: KVCacheGroupSpec) -> CacheGroup:
    """Describe one cache group to the hit computation; UnsupportedError names the kind."""
    spec = _first_spec(group.kv_cache_spec)
    return CacheGroup(
        kind=_kind(spec), block_tokens=spec.block_size, eagle=group.is_eagle_group, spec_id=spec
    )


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
            "context": _context_parallel(vllm_config),
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


def regions(facts: EngineFacts, kv_caches: Mapping[str, torch.Tensor]) -> list[Region]:
    """Return one region per layer, grouped by layer set (``Region.group`` is its index).

    A layer that shares another layer's tensor is stored with it, once.
    """
    found = []
    for set_idx, layer_set in enumerate(facts.layer_sets):
        seen: set[int] = set()
        for layer in layer_set.layers:
            tensor = _cache_tensor(kv_caches, layer)
            if tensor.data_ptr() in seen:
                continue
            seen.add(tensor.data_ptr())
            found.append(_region(set_idx, layer_set, layer, tensor, facts.num_blocks))
    return found


def _region(
    set_idx: int, layer_set: LayerSet, layer: str, tensor: torch.Tensor, num_blocks: int
) -> Region:
    if tensor.ndim != 4 or tensor.shape[0] % num_blocks:
        raise UnsupportedError(
            f"the cache of layer {layer} has shape {tuple(tensor.shape)}; expected "
            f"[blocks, heads, tokens, content] with a multiple of {num_blocks} blocks"
        )
    if tensor.device.type != "cpu":
        raise UnsupportedError(
            f"the cache of layer {layer} is on {tensor.device}; this version copies CPU caches only"
        )
    return Region(
        tensor=tensor,
        group=set_idx,
        layer=layer,
        axes=("block", "head", "token", "content"),
        kernel_blocks_per_block=tensor.shape[0] // num_blocks,
        heads=layer_set.local_heads,
    )


def _cache_tensor(kv_caches: Mapping[str, Any], layer: str) -> torch.Tensor:
    if layer not in kv_caches:
        raise UnsupportedError(
            f"vLLM registered no cache for layer {layer}; it registered {sorted(kv_caches)}"
        )
    tensor: torch.Tensor = kv_caches[layer]
    return tensor


def _refuse(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: KVXferConfig) -> None:
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        raise UnsupportedError("pipeline parallelism is not supported yet; set it to 1")
    if _context_parallel(vllm_config) != [1, 1]:
        raise UnsupportedError("context parallelism is not supported yet; set its sizes to 1")
    if getattr(vllm_config.model_config, "enable_sleep_mode", False):
        raise UnsupportedError("sleep mode frees registered memory; start without it")
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise UnsupportedError(
            "calculate_kv_scales makes the meaning of the cache differ by process; set it to false"
        )
    nodes = getattr(parallel, "nnodes", 1)
    if nodes > 1 and config.store.startswith("lmdb:"):
        raise UnsupportedError(
            f"the embedded store is shared by one host, the ranks are on {nodes}; "
            'set "store" to a mooncake:// address'
        )
    _refuse_groups(kv_cache_config.kv_cache_groups)


def _refuse_groups(groups: Sequence[KVCacheGroupSpec]) -> None:
    kinds = [_kind(_first_spec(group.kv_cache_spec)) for group in groups]
    if kinds != ["full"]:
        raise UnsupportedError(
            "kvxfer supports models whose layers form one full-attention group so far; this one "
            f"has groups of kind {', '.join(kinds) or 'none'}"
        )


def _kind(spec: KVCacheSpec) -> str:
    if type(spec) in (FullAttentionSpec, MLAAttentionSpec):
        return "full"
    return type(spec).__name__


def _first_spec(spec: KVCacheSpec) -> KVCacheSpec:
    """Unwrap a group whose layers have one spec each."""
    per_layer = getattr(spec, "kv_cache_specs", None)
    return next(iter(per_layer.values())) if per_layer else spec


def _layer_spec(spec: KVCacheSpec, layer: str) -> Any:
    per_layer = getattr(spec, "kv_cache_specs", None)
    return per_layer[layer] if per_layer else spec


def _block_sizes(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> tuple[int, int]:
    block_tokens, hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    return int(block_tokens), int(hash_tokens)


def _drops_eagle_block(speculative: Any) -> bool:
    drops = getattr(speculative, "use_eagle_block_drop", speculative.use_eagle)
    return bool(drops())


def _context_parallel(vllm_config: VllmConfig) -> list[int]:
    parallel = vllm_config.parallel_config
    return [
        int(parallel.decode_context_parallel_size),
        int(getattr(parallel, "prefill_context_parallel_size", 1)),
    ]


def _layer_sets(
    vllm_config: VllmConfig,
    config: KVXferConfig,
    group_idx: int,
    group: KVCacheGroupSpec,
    tp_rank: int,
) -> list[LayerSet]:
    """Split a group's layers by model, heads and format, in the group's order."""
    num_target_layers = _num_layers(vllm_config.model_config)
    drafts = vllm_config.speculative_config is not None
    found: dict[str, tuple[bool, Any, list[str]]] = {}
    for layer in group.layer_names:
        spec = _layer_spec(group.kv_cache_spec, layer)
        is_draft = drafts and _is_draft_layer(layer, num_target_layers)
        _, _, layers = found.setdefault(f"{is_draft} {spec}", (is_draft, spec, []))
        layers.append(layer)
    return [
        _layer_set(vllm_config, config, group_idx, tuple(layers), spec, is_draft, tp_rank)
        for is_draft, spec, layers in found.values()
    ]


def _layer_set(
    vllm_config: VllmConfig,
    config: KVXferConfig,
    group_idx: int,
    layers: tuple[str, ...],
    spec: Any,
    is_draft: bool,
    tp_rank: int,
) -> LayerSet:
    tp_size = vllm_config.parallel_config.tensor_parallel_size
    num_heads = spec.num_heads
    replicated = getattr(spec, "max_tp_shards", None) == 1 or _kv_is_latent(spec)
    num_distinct = 1 if replicated else _num_distinct(vllm_config, is_draft, tp_size)
    replicas = tp_size // num_distinct
    total = num_heads * num_distinct
    first = tp_rank // replicas * num_heads
    return LayerSet(
        group=group_idx,
        layers=layers,
        num_heads=total,
        local_heads=None if replicated else (first, first + num_heads),
        heads_per_shard=total
        if replicated
        else _heads_per_shard(config, total, num_distinct, tp_size),
        is_first_replica=tp_rank % replicas == 0,
        is_draft=is_draft,
        spec_facts=_spec_facts(spec, total),
    )


def _kv_is_latent(spec: Any) -> bool:
    return isinstance(spec, MLAAttentionSpec)


def _num_distinct(vllm_config: VllmConfig, is_draft: bool, tp_size: int) -> int:
    """Return how many ranks hold different KV heads; vLLM repeats heads beyond their number."""
    model: Any = vllm_config.model_config
    if is_draft:
        assert vllm_config.speculative_config is not None
        model = vllm_config.speculative_config.draft_model_config
    return min(tp_size, int(model.get_total_num_kv_heads()))


def _heads_per_shard(config: KVXferConfig, total: int, num_distinct: int, tp_size: int) -> int:
    wanted = config.store_tp if config.store_tp is not None else tp_size
    num_shards = min(wanted, total)
    if total % num_shards or num_shards % num_distinct:
        raise ConfigError(
            f"store_tp is {wanted}: {total} KV heads on {num_distinct} ranks cannot be cut into "
            f"{num_shards} equal shards of which each lies on one rank; choose a multiple of "
            f"{num_distinct} that divides {total}"
        )
    return total // num_shards


def _spec_facts(spec: Any, total_heads: int) -> dict[str, object]:
    return {
        "kind": _kind(spec),
        "block_tokens": spec.block_size,
        "heads": total_heads,
        "head_bytes": spec.state_content_size_bytes,
        "head_sizes": [spec.head_size, spec.head_size_v],
        "dtype": str(spec.dtype),
        "quantization": str(getattr(spec, "kv_quant_mode", None)),
        "tokens_per_state": str(getattr(spec, "tokens_per_state", 1)),
        "cache_dtype": str(getattr(spec, "cache_dtype_str", None)),
        "window": [
            getattr(spec, "sliding_window", None),
            getattr(spec, "attention_chunk_size", None),
        ],
    }


def _group_name(layer_set: LayerSet, draft_facts: Mapping[str, object]) -> str:
    return group_digest(
        {
            **layer_set.spec_facts,
            "layers": list(layer_set.layers),
            "draft": dict(draft_facts) if layer_set.is_draft else None,
        }
    )


def _num_layers(model: ModelConfig) -> int:
    return int(model.hf_text_config.num_hidden_layers)


def _is_draft_layer(name: str, num_target_layers: int) -> bool:
    """Whether a layer belongs to the drafter: by its name, or numbered past the target's."""
    match = _LAYER_IDX.search(f".{name}")
    return bool(_DRAFT_NAME.search(name)) or (
        match is not None and int(match[1]) >= num_target_layers
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
    values = model.hf_config.to_diff_dict()
    for name in _VOLATILE_CONFIG:
        values.pop(name, None)
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
