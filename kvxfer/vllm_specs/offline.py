# SPDX-License-Identifier: Apache-2.0
"""An engine's groups, layout and key names from its arguments alone: no engine, no weights.

For tools. Each pipeline stage's layers are made as its first rank would make them (see
``offline_layers``); what they say of their cache then goes the way that vLLM's core takes it, over
a few blocks, and comes back to every rank of every stage.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import vllm
import vllm.v1.worker.utils as worker_utils
from vllm import SamplingParams
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.attention.backends.utils import (
    get_supported_kv_cache_layouts,
    resolve_kv_cache_layout,
)
from vllm.v1.core.kv_cache_utils import (
    get_kv_cache_configs,
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.kv_cache_interface import AttentionSpec, UniformTypeKVCacheSpecs
from vllm.v1.request import Request

from kvxfer.blocks import BlockLayout
from kvxfer.config import KVXferConfig
from kvxfer.errors import UnsupportedError
from kvxfer.vllm_specs.engine import EngineFacts, check_version, read_config, read_engine
from kvxfer.vllm_specs.names import ValueNames, content_format, name_values
from kvxfer.vllm_specs.offline_layers import refuse_what_takes_an_engine, stage_layers
from kvxfer.vllm_specs.ranks import RankPlace, StageRanks
from kvxfer.vllm_specs.tensors import regions

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

NUM_BLOCKS = 16
"""Of the cache that the layout is read from: enough for a state and a window of every group."""
MEMORY_BYTES = 1 << 50
"""What vLLM is told of the memory: the blocks are few whatever it says."""


@dataclass(frozen=True, slots=True)
class OfflineRank:
    """One rank as its worker would see it once its caches are registered."""

    facts: EngineFacts
    layout: BlockLayout
    names: ValueNames


@dataclass(frozen=True, slots=True)
class OfflineEngine:
    """An engine as its ranks would see it; ``facts``, ``layout`` and ``names`` are the first's."""

    vllm_config: VllmConfig
    config: KVXferConfig
    ranks: tuple[OfflineRank, ...]
    """Every rank, in the engine's order: by pipeline stage first."""

    @property
    def facts(self) -> EngineFacts:
        """The engine as its first rank, which answers lookups, sees it."""
        return self.ranks[0].facts

    @property
    def layout(self) -> BlockLayout:
        """How the first rank's blocks lie."""
        return self.ranks[0].layout

    @property
    def names(self) -> ValueNames:
        """What the first rank's keys are made of."""
        return self.ranks[0].names

    def block_hashes(self, token_ids: Sequence[int]) -> list[bytes]:
        """Return the hashes that vLLM gives a plain prompt: no adapter, image or salt."""
        name = self.vllm_config.cache_config.prefix_caching_hash_algo
        function = get_hash_fn_by_name(name)
        init_none_hash(function)
        hasher = get_request_block_hasher(self.facts.hash_tokens, function)
        params = SamplingParams(max_tokens=1)
        request = Request("explain", list(token_ids), params, None, block_hasher=hasher)
        return [bytes(block_hash) for block_hash in request.block_hashes]


def describe_engine(arguments: Mapping[str, Any]) -> OfflineEngine:
    """Describe the engine of vLLM's ``EngineArgs`` ``arguments``, ``kv_transfer_config`` included.

    ``NotDescribedError`` for what takes an engine (see ``offline_layers``). Else raises what
    start-up would: ``UnsupportedError`` or ``ConfigError`` of ours, and whatever vLLM raises for
    arguments and models that it does not take. For a process of its own: it replaces vLLM's
    process groups.
    """
    check_version(vllm.__version__)
    vllm_config = EngineArgs(**arguments).create_engine_config()
    refuse_what_takes_an_engine(vllm_config)
    config = read_config(vllm_config)
    num_stages = vllm_config.parallel_config.pipeline_parallel_size
    stages = [_Stage.make(vllm_config, stage) for stage in range(num_stages)]
    layout = _resolve_layout(stages)
    ranks = [
        rank
        for stage, kv_cache_config in zip(stages, _cache_configs(stages), strict=True)
        for rank in _ranks(stage, kv_cache_config, layout, config)
    ]
    return OfflineEngine(stages[0].vllm_config, config, tuple(ranks))


@dataclass(frozen=True, slots=True)
class _Stage:
    """One pipeline stage: its ranks' copy of the configuration, and the layers made from it."""

    number: int
    vllm_config: VllmConfig
    layers: Mapping[str, Any]
    specs: dict[str, KVCacheSpec]

    @classmethod
    def make(cls, vllm_config: VllmConfig, number: int) -> _Stage:
        """Make the layers in a copy of the engine's configuration, as each worker has one."""
        own = copy.deepcopy(vllm_config)
        with set_current_vllm_config(own):
            layers = stage_layers(own, number)
            specs = {name: spec for name, layer in layers.items() if (spec := _spec(layer, own))}
        return cls(number, own, layers, specs)


def _resolve_layout(stages: Sequence[_Stage]) -> Any:
    """Have every stage know the one layout on which the engine's core settles."""
    supported = []
    for stage in stages:
        backends = list(dict.fromkeys(each.get_attn_backend() for each in stage.layers.values()))
        with set_current_vllm_config(stage.vllm_config):
            supported.append([layout.name for layout in get_supported_kv_cache_layouts(backends)])
    specs = [spec for stage in stages for spec in stage.specs.values()]
    core = stages[0].vllm_config
    layout = resolve_kv_cache_layout(core, supported, specs)
    for stage in stages[1:]:
        stage.vllm_config.cache_config.kv_cache_layout = core.cache_config.kv_cache_layout
    return layout


def _cache_configs(stages: Sequence[_Stage]) -> list[KVCacheConfig]:
    """Return the groups of the model's cache, over a few blocks, as each stage is told them."""
    core = stages[0].vllm_config  # with one rank the core has the very configuration of its worker
    core.cache_config.num_gpu_blocks_override = NUM_BLOCKS
    core.model_config.max_model_len = 1  # else a long model does not fit into them
    memory = [MEMORY_BYTES] * len(stages)
    with set_current_vllm_config(core):
        configs = get_kv_cache_configs(core, [stage.specs for stage in stages], memory)
    for stage, kv_cache_config in zip(stages, configs, strict=True):
        _settle_block_sizes(stage.vllm_config, kv_cache_config)
    return list(configs)


def _ranks(
    stage: _Stage, kv_cache_config: KVCacheConfig, layout: Any, config: KVXferConfig
) -> Iterator[OfflineRank]:
    """Yield the ranks of a stage in the engine's order; their tensors are alike."""
    vllm_config = stage.vllm_config
    with set_current_vllm_config(vllm_config):
        _tell_layers_their_format(vllm_config, kv_cache_config, stage.layers)
        tensors = worker_utils.allocate_kv_cache(kv_cache_config, torch.device("cpu"), layout)
    sizes = StageRanks.of(vllm_config)
    names = None
    for pcp_rank, tp_rank in itertools.product(range(sizes.pcp_size), range(sizes.tp_size)):
        place = RankPlace(tp_rank, stage.number, pcp_rank)
        facts = read_engine(vllm_config, kv_cache_config, config, place)
        blocks = BlockLayout.from_regions(
            regions(facts, tensors),
            value_order=config.value_order,
            head_shard={i: s.heads_per_shard for i, s in enumerate(facts.layer_sets)},
            num_blocks=facts.num_blocks,
        )
        if names is None:  # it reads the checkpoint, and ranks of a stage name alike
            names = _names(vllm_config, facts, config, blocks.value_order)
        yield OfflineRank(facts, blocks, names)


def _names(
    vllm_config: VllmConfig, facts: EngineFacts, config: KVXferConfig, value_order: str
) -> ValueNames:
    layers = [name for layer_set in facts.layer_sets for name in layer_set.layers]
    content = content_format(vllm_config, layers)
    return name_values(vllm_config, facts, config, value_order=value_order, content_format=content)


def _spec(layer: Any, vllm_config: VllmConfig) -> KVCacheSpec | None:
    """Return the spec of a layer's cache; None where it has none or uses another layer's."""
    if getattr(layer, "kv_sharing_target_layer_name", None):
        return None
    spec = layer.get_kv_cache_spec(vllm_config)
    customize = getattr(worker_utils, "customize_attention_spec", None)  # not in 0.31
    if customize is not None and isinstance(spec, AttentionSpec):
        spec = customize(layer.get_attn_backend(), spec)
    return spec


def _settle_block_sizes(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Do what vLLM's core does between the groups and the connector."""
    from vllm.v1.core import kv_cache_utils  # noqa: PLC0415  # by name: 0.31 lacks one of them

    groups = kv_cache_config.kv_cache_groups
    sizes = [g.kv_cache_spec.block_size for g in groups if g.kv_cache_spec.prefix_cacheable]
    every = [g.kv_cache_spec.block_size for g in groups]
    if not every:
        raise UnsupportedError("this model keeps no KV cache: there is nothing to store")
    vllm_config.cache_config.block_size = min(sizes or every)
    vllm_config.cache_config.num_gpu_blocks = kv_cache_config.num_blocks
    block, unit = kv_cache_utils.resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    align = getattr(kv_cache_utils, "resolve_cache_hit_alignment_tokens", None)
    if align is not None:
        kv_cache_config.hash_block_size = unit
        kv_cache_config.cache_hit_alignment_tokens = align(
            kv_cache_config, vllm_config, block, unit
        )


def _tell_layers_their_format(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, layers: Mapping[str, Any]
) -> None:
    """Have vLLM's CPU backends tell their layers how they pack, as they do at start-up."""
    if not current_platform.is_cpu():
        return
    for group in kv_cache_config.kv_cache_groups:
        for name, spec in _layer_specs(group.layer_names, group.kv_cache_spec):
            backend = layers[name].get_attn_backend()
            if not backend.is_ssm():
                builder_cls = backend.get_builder_cls()
                builder_cls(spec, [name], vllm_config, torch.device("cpu"))


def _layer_specs(names: Iterable[str], spec: Any) -> list[tuple[str, Any]]:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return [(name, spec.kv_cache_specs[name]) for name in names]
    return [(name, spec) for name in names]
