# SPDX-License-Identifier: Apache-2.0
"""The layers that a pipeline stage's first rank would make, without its process group or weights.

For ``offline``. A drafter's layers come after the target's, as vLLM makes them.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import vllm.distributed.parallel_state as parallel_state
from vllm.config import get_layers_from_vllm_config, replace
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype

from kvxfer.errors import UnsupportedError

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

_SIZES: dict[str, Callable[[Any], int]] = {
    "_WORLD": lambda parallel: parallel.world_size,
    "_TP": lambda parallel: parallel.tensor_parallel_size,
    "_EP": lambda parallel: parallel.tensor_parallel_size,
    "_DCP": lambda parallel: parallel.decode_context_parallel_size,
    "_PCP": lambda parallel: getattr(parallel, "prefill_context_parallel_size", 1),
    "_PP": lambda parallel: parallel.pipeline_parallel_size,
    "_DP": lambda parallel: 1,
}
"""vLLM's process groups by the name of their variable, and how many ranks each has."""
_DRAFTERS = ("eagle", "eagle3")
"""Methods whose drafter is a model that vLLM makes like any other, whatever its model runner."""
_WITHOUT_CACHE = ("ngram", "ngram_gpu", "suffix", "medusa")
"""Methods whose drafts need no KV cache."""


class NotDescribedError(UnsupportedError):
    """The engine can be served, and cannot be described without starting it."""


def refuse_what_takes_an_engine(vllm_config: VllmConfig) -> None:
    """Raise ``NotDescribedError`` where arguments alone do not tell layers, or keys, of all ranks.

    Most drafters' layers are the doing of a model runner, and how a drafter's layers are numbered
    behind pipeline stages depends on the stages: they may take the numbers of a target's. Of ranks
    that differ by stage and by prefill context, vLLM hands on some handshakes only, so rank 0 may
    not know all keys.
    """
    parallel = vllm_config.parallel_config
    has_stages = parallel.pipeline_parallel_size > 1
    if has_stages and _SIZES["_PCP"](parallel) > 1:
        raise NotDescribedError(
            "which keys an engine with pipeline stages and prefill context parallelism asks for "
            "shows only once it runs"
        )
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method in _WITHOUT_CACHE:
        return
    if has_stages:
        raise NotDescribedError(
            f"an engine with pipeline stages and a drafter (method {speculative.method!r}) cannot "
            "be described without starting it: which numbers vLLM gives the drafter's layers "
            "depends on the stages"
        )
    if speculative.method not in _DRAFTERS:
        raise NotDescribedError(
            f"an engine with a drafter of method {speculative.method!r} cannot be described "
            f"without starting it (known: {', '.join(_DRAFTERS + _WITHOUT_CACHE)}): describe it "
            "without speculative_config; the target's layers have the same keys"
        )


def stage_layers(vllm_config: VllmConfig, stage: int) -> dict[str, Any]:
    """Return the layers with a cache of a stage's first rank by name, in the order of making.

    ``vllm_config``: the rank's own copy, in which layers are entered. It replaces vLLM's process
    groups, and raises what vLLM does where the engine could not make these layers either.
    """
    _stand_alone(vllm_config.parallel_config, stage)
    _make_model(vllm_config, vllm_config.model_config)
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method in _DRAFTERS:
        _make_model(_draft_config(vllm_config), speculative.draft_model_config)
    current_platform.update_block_size_for_backend(vllm_config)
    return dict(get_layers_from_vllm_config(vllm_config, AttentionLayerBase))


def _make_model(vllm_config: VllmConfig, model_config: ModelConfig) -> None:
    """Make a model, which enters its layers in the configuration; its weights take no memory."""
    with set_default_torch_dtype(model_config.dtype), torch.device("meta"):
        initialize_model(vllm_config, model_config=model_config)


def _draft_config(vllm_config: VllmConfig) -> VllmConfig:
    """Return the configuration under which the drafter's layers choose backend and format.

    vLLM's first model runner lets a drafter choose its backend anew where none is set for it, the
    second has it keep the target's.
    """
    speculative: Any = vllm_config.speculative_config
    changes: dict[str, Any] = {}
    backend = getattr(speculative, "attention_backend", None)
    if backend is not None or not getattr(vllm_config, "use_v2_model_runner", False):
        changes["attention_config"] = replace(vllm_config.attention_config, backend=backend)
    cache_dtype = getattr(speculative, "kv_cache_dtype", None)
    if cache_dtype is not None:
        changes["cache_config"] = replace(vllm_config.cache_config, cache_dtype=cache_dtype)
    return replace(vllm_config, **changes) if changes else vllm_config


def _stand_alone(parallel: Any, stage: int) -> None:
    """Have layers meet process groups of the right size in which nobody else can be talked to."""
    sizes = {variable: size_of(parallel) for variable, size_of in _SIZES.items()}
    first = stage * (sizes["_WORLD"] // sizes["_PP"])
    parallel.rank = first
    for variable, size in sizes.items():
        rank = {"_WORLD": first, "_PP": stage}.get(variable, 0)
        setattr(parallel_state, variable, _group_of(size, rank))


def _group_of(size: int, rank: int) -> SimpleNamespace:
    """Return what layers read of a process group, as its member of that number."""
    members = SimpleNamespace(size=lambda: size, rank=lambda: rank)
    return SimpleNamespace(
        world_size=size,
        rank=rank,
        rank_in_group=rank,
        local_rank=rank,
        ranks=list(range(size)),
        first_rank=0,
        last_rank=size - 1,
        is_first_rank=rank == 0,
        is_last_rank=rank == size - 1,
        device_group=members,
        cpu_group=members,
        device_communicator=None,
        use_device_communicator=False,
    )
