# SPDX-License-Identifier: Apache-2.0
"""An engine's groups, layout and key names from its arguments alone: no engine, no weights.

For tools. The model's layers are made on torch's meta device, as the first rank would make them;
what they say of their cache then goes the way that vLLM's core takes it, over a few blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import vllm
import vllm.distributed.parallel_state as parallel_state
import vllm.v1.worker.utils as worker_utils
from vllm import SamplingParams
from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.utils.torch_utils import set_default_torch_dtype
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
from kvxfer.vllm_specs.tensors import regions

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

NUM_BLOCKS = 16
"""Of the cache that the layout is read from: enough for a state and a window of every group."""
MEMORY_BYTES = 1 << 50
"""What vLLM is told of the memory: the blocks are few whatever it says."""
_SIZES: dict[str, Callable[[Any], int]] = {
    "_WORLD": lambda parallel: parallel.world_size,
    "_TP": lambda parallel: parallel.tensor_parallel_size,
    "_EP": lambda parallel: parallel.tensor_parallel_size,
    "_DCP": lambda parallel: parallel.decode_context_parallel_size,
    "_PCP": lambda parallel: getattr(parallel, "prefill_context_parallel_size", 1),
    "_PP": lambda parallel: 1,
    "_DP": lambda parallel: 1,
}
"""vLLM's process groups by the name of their variable, and how many ranks each has."""


class NotDescribedError(UnsupportedError):
    """The engine can be served, and cannot be described without its ranks or its drafter."""


@dataclass(frozen=True, slots=True)
class OfflineEngine:
    """An engine as its first rank would see it."""

    vllm_config: VllmConfig
    config: KVXferConfig
    facts: EngineFacts
    layout: BlockLayout
    names: ValueNames

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

    ``NotDescribedError`` for pipeline stages and drafters, which take an engine. Else raises what
    start-up would: ``UnsupportedError`` or ``ConfigError`` of ours, and whatever vLLM raises for
    arguments and models that it does not take. For a process of its own: it replaces vLLM's
    process groups.
    """
    check_version(vllm.__version__)
    vllm_config = EngineArgs(**arguments).create_engine_config()
    _refuse_what_takes_ranks(vllm_config)
    config = read_config(vllm_config)
    _stand_alone(vllm_config.parallel_config)
    with set_current_vllm_config(vllm_config):
        _make_layers(vllm_config)
        kv_cache_config, kv_caches = _make_cache(vllm_config)
    facts = read_engine(vllm_config, kv_cache_config, config)
    layout = BlockLayout.from_regions(
        regions(facts, kv_caches),
        value_order=config.value_order,
        head_shard={i: s.heads_per_shard for i, s in enumerate(facts.layer_sets)},
        num_blocks=facts.num_blocks,
    )
    layers = [name for layer_set in facts.layer_sets for name in layer_set.layers]
    names = name_values(
        vllm_config,
        facts,
        config,
        value_order=layout.value_order,
        content_format=content_format(vllm_config, layers),
    )
    return OfflineEngine(vllm_config, config, facts, layout, names)


def _refuse_what_takes_ranks(vllm_config: VllmConfig) -> None:
    """Raise ``NotDescribedError`` for layers that the first rank's own model does not have."""
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        raise NotDescribedError(
            "an engine with pipeline stages cannot be described without starting it"
        )
    speculative = vllm_config.speculative_config
    if speculative is not None and not _is_ngram(speculative):
        raise NotDescribedError(
            "an engine with a drafter cannot be described without starting it: describe it without "
            "speculative_config; the target's layers have the same keys"
        )


def _is_ngram(speculative: Any) -> bool:
    return "ngram" in str(speculative.method)


def _stand_alone(parallel: Any) -> None:
    """Have layers meet process groups of the right size in which nobody else can be talked to."""
    for variable, size_of in _SIZES.items():
        setattr(parallel_state, variable, _group_of(size_of(parallel)))


def _group_of(size: int) -> SimpleNamespace:
    """Return what layers read of a process group, as its first rank."""
    members = SimpleNamespace(size=lambda: size, rank=lambda: 0)
    return SimpleNamespace(
        world_size=size,
        rank=0,
        rank_in_group=0,
        local_rank=0,
        ranks=list(range(size)),
        first_rank=0,
        last_rank=size - 1,
        is_first_rank=True,
        is_last_rank=size == 1,
        device_group=members,
        cpu_group=members,
        device_communicator=None,
        use_device_communicator=False,
    )


def _make_layers(vllm_config: VllmConfig) -> None:
    """Make the model, which enters its layers in the configuration; its weights take no memory."""
    with ExitStack() as stack:
        stack.enter_context(set_default_torch_dtype(vllm_config.model_config.dtype))
        stack.enter_context(torch.device("meta"))
        initialize_model(vllm_config)
    current_platform.update_block_size_for_backend(vllm_config)


def _make_cache(vllm_config: VllmConfig) -> tuple[KVCacheConfig, dict[str, torch.Tensor]]:
    """Return the groups of the model's cache and one tensor a layer, as a worker registers them."""
    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)
    specs = {name: spec for name, layer in layers.items() if (spec := _spec(layer, vllm_config))}
    backends = list(dict.fromkeys(layer.get_attn_backend() for layer in layers.values()))
    names = [layout.name for layout in get_supported_kv_cache_layouts(backends)]
    layout = resolve_kv_cache_layout(vllm_config, [names], specs.values())
    vllm_config.cache_config.num_gpu_blocks_override = NUM_BLOCKS
    vllm_config.model_config.max_model_len = 1  # else a long model does not fit into them
    (kv_cache_config,) = get_kv_cache_configs(vllm_config, [specs], [MEMORY_BYTES])
    _settle_block_sizes(vllm_config, kv_cache_config)
    _tell_layers_their_format(vllm_config, kv_cache_config, layers)
    tensors = worker_utils.allocate_kv_cache(kv_cache_config, torch.device("cpu"), layout)
    return kv_cache_config, tensors


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
