# SPDX-License-Identifier: Apache-2.0
"""Which layers of a cache group are stored together, and which part of them a rank holds.

A rank holds a range of KV heads of every token, or where decode context parallelism shards the
group, of its share of each block's tokens. Several ranks may hold the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.distributed.utils import get_pp_indices
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)

from kvxfer.config import KVXferConfig
from kvxfer.errors import ConfigError, UnsupportedError
from kvxfer.vllm_specs.ranks import RankPlace, StageRanks

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec, KVCacheSpec

_LAYER_IDX = re.compile(r"\.layers\.(\d+)\.")
_KV_HEADS_NAME = re.compile(r"kv_heads|key_value_heads|head_kv|query_groups?|attention_groups")
_LAYER_SETTINGS = ("block_configs", "per_layer_config", "is_heterogeneous")
"""Where configurations say what is different in single layers."""
_DRAFT_NAME = re.compile(r"(^|\.)(draft_model|mtp|eagle)(\.|$)")


class Shard(NamedTuple):
    """The part of a chunk that one key holds."""

    heads: tuple[int, int] | None
    """Global KV heads [start, end), None where ranks do not differ by heads."""
    context_rank: int | None
    """Whose share of the block's tokens, None where each rank holds all of them."""


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
    """Global range of this rank's KV heads, None where ranks do not differ by heads."""
    heads_per_shard: int
    is_draft: bool
    spec_facts: Mapping[str, object]
    context_rank: int | None = None
    """This rank's share of a block's tokens, None where it holds all of them."""
    num_context_ranks: int = 1
    replica: int = 0
    """This rank's number among those that hold the same bytes: they save in turn."""
    num_replicas: int = 1

    def shards(self) -> list[Shard]:
        """Return every shard of a chunk, over all ranks of a pipeline stage."""
        step = self.heads_per_shard
        heads: list[tuple[int, int] | None] = [None]
        if self.local_heads is not None:
            heads = [(first, first + step) for first in range(0, self.num_heads, step)]
        shares = [None] if self.context_rank is None else range(self.num_context_ranks)
        return [Shard(one, share) for one in heads for share in shares]


def layer_sets(
    vllm_config: VllmConfig,
    config: KVXferConfig,
    group_idx: int,
    group: KVCacheGroupSpec,
    ranks: StageRanks,
    place: RankPlace,
) -> list[LayerSet]:
    """Split a group's layers by model, heads and format, in the group's order.

    ConfigError for a ``store_tp`` that cannot cut the heads, UnsupportedError for a cache that is
    neither attention nor a recurrent state.
    """
    target_layers = _target_layers(vllm_config, place)
    drafts = vllm_config.speculative_config is not None
    found: dict[str, tuple[bool, Any, list[str]]] = {}
    for layer in group.layer_names:
        spec = _layer_spec(group.kv_cache_spec, layer)
        is_draft = drafts and _is_draft_layer(layer, target_layers)
        _, _, layers = found.setdefault(f"{is_draft} {spec}", (is_draft, spec, []))
        layers.append(layer)
    return [
        _layer_set(
            config,
            group_idx,
            tuple(layers),
            spec,
            is_draft,
            ranks,
            place,
            _num_distinct(vllm_config, spec, is_draft, ranks.tp_size),
        )
        for is_draft, spec, layers in found.values()
    ]


def _layer_set(
    config: KVXferConfig,
    group_idx: int,
    layers: tuple[str, ...],
    spec: Any,
    is_draft: bool,
    ranks: StageRanks,
    place: RankPlace,
    num_distinct: int,
) -> LayerSet:
    def bytes_of(rank: RankPlace) -> tuple[int, int | None]:
        """Return what tells apart the bytes that ranks hold: heads and tokens."""
        head_idx = rank.tp_rank * num_distinct // ranks.tp_size
        return head_idx, ranks.context_rank(rank) if ranks.shards(spec) else None

    head_idx, context_rank = bytes_of(place)
    replica, num_replicas = ranks.replica(place, bytes_of)
    replicated = num_distinct == 1 and _every_rank_alike(spec)
    total = spec.num_heads * num_distinct
    first = head_idx * spec.num_heads
    if replicated or isinstance(spec, MambaSpec):
        heads_per_shard = spec.num_heads
    else:
        heads_per_shard = _heads_per_shard(config, total, num_distinct, ranks.tp_size)
    return LayerSet(
        group=group_idx,
        layers=layers,
        num_heads=total,
        local_heads=None if replicated else (first, first + spec.num_heads),
        heads_per_shard=heads_per_shard,
        context_rank=context_rank,
        num_context_ranks=ranks.dcp_size,
        replica=replica,
        num_replicas=num_replicas,
        is_draft=is_draft,
        spec_facts=_spec_facts(spec, total),
    )


def _num_distinct(vllm_config: VllmConfig, spec: Any, is_draft: bool, tp_size: int) -> int:
    """Return how many ranks hold different bytes; vLLM repeats KV heads beyond their number.

    It does so where a rank has one head only. Copies are taken for copies where the model has one
    number of KV heads in all layers: else which ranks hold the same head of this layer is not
    known, each counts as different, and nothing worse than a value stored twice comes of it. A
    recurrent state is cut by rank, in a way of its own: each rank's part counts as one head.
    """
    if _every_rank_alike(spec):
        return 1
    if isinstance(spec, MambaSpec) or spec.num_heads > 1:
        return tp_size
    model: Any = vllm_config.model_config
    if is_draft:
        assert vllm_config.speculative_config is not None
        model = vllm_config.speculative_config.draft_model_config
    total = int(model.get_total_num_kv_heads())
    return min(tp_size, total) if _has_one_head_count(model, total) else tp_size


def _has_one_head_count(model: Any, total: int) -> bool:
    """Whether the configuration names no number of KV heads but ``total``, for any layer."""
    values = model.hf_text_config.to_dict()
    counts = {str(value) for name, value in values.items() if _KV_HEADS_NAME.search(name)}
    by_layer = any(values.get(name) for name in _LAYER_SETTINGS)
    return counts <= {str(total), str(None)} and not by_layer


def _every_rank_alike(spec: Any) -> bool:
    """Whether all ranks hold the same bytes: latent caches and replicated states."""
    if isinstance(spec, MambaSpec):
        return bool(getattr(spec, "tp_replicated", False))
    return isinstance(spec, MLAAttentionSpec) or getattr(spec, "max_tp_shards", None) == 1


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
    """Return what the bytes of a layer mean; padding, strides and ranks are no part of it."""
    facts: dict[str, object] = {
        "kind": type(spec).__name__,
        "block_tokens": spec.block_size,
        "heads": total_heads,
        "head_bytes": spec.state_content_size_bytes,
    }
    if isinstance(spec, MambaSpec):
        facts["shapes"] = [list(shape) for shape in spec.shapes]
        facts["dtypes"] = [str(dtype) for dtype in spec.dtypes]
        facts["type"] = str(spec.mamba_type)
        return facts
    if not isinstance(spec, AttentionSpec):
        raise UnsupportedError(
            f"a cache of {type(spec).__name__} is neither attention nor a recurrent state; "
            "turn the connector off for this model"
        )
    facts["head_sizes"] = [spec.head_size, spec.head_size_v]
    facts["dtype"] = str(spec.dtype)
    facts["quantization"] = str(getattr(spec, "kv_quant_mode", None))
    facts["tokens_per_state"] = str(getattr(spec, "tokens_per_state", 1))
    facts["cache_dtype"] = str(getattr(spec, "cache_dtype_str", None))
    for name in ("sliding_window", "attention_chunk_size"):
        facts[name] = getattr(spec, name, None)
    return facts


def _layer_spec(spec: KVCacheSpec, layer: str) -> Any:
    return spec.kv_cache_specs[layer] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _num_layers(model: ModelConfig) -> int:
    return int(model.hf_text_config.num_hidden_layers)


def _target_layers(vllm_config: VllmConfig, place: RankPlace) -> range:
    """Return the numbers of the target's layers from the first of this rank's stage on.

    vLLM numbers a drafter's layers from the number of layers of the last stage, which may be that
    of a layer of a stage before.
    """
    num_layers = _num_layers(vllm_config.model_config)
    num_stages = vllm_config.parallel_config.pipeline_parallel_size
    first = get_pp_indices(num_layers, place.pp_rank, num_stages)[0] if num_stages > 1 else 0
    return range(first, num_layers)


def _is_draft_layer(name: str, target_layers: range) -> bool:
    """Whether a layer belongs to the drafter: by its name, or not numbered as a target's."""
    match = _LAYER_IDX.search(f".{name}")
    return bool(_DRAFT_NAME.search(name)) or (
        match is not None and int(match[1]) not in target_layers
    )
