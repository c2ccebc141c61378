# SPDX-License-Identifier: Apache-2.0
"""The tensors that vLLM registers, as the regions that ``blocks.BlockLayout`` is made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvxfer.blocks import Region
from kvxfer.errors import UnsupportedError
from kvxfer.vllm_specs.engine import EngineFacts
from kvxfer.vllm_specs.layer_sets import LayerSet

if TYPE_CHECKING:
    import torch


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
    if tensor.device.type not in ("cpu", "cuda"):
        raise UnsupportedError(
            f"the cache of layer {layer} is on {tensor.device}; kvxfer copies caches on a CPU and "
            "on CUDA devices"
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
