# SPDX-License-Identifier: Apache-2.0
"""vLLM's cache specs as the groups of ``kvxfer.hits``.

A kind is native when vLLM itself would search it with the very functions that the native search
follows; every other registered spec keeps its own manager.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import (
    ChunkedLocalAttentionManager,
    FullAttentionManager,
    MambaManager,
    SlidingWindowManager,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from kvxfer.errors import UnsupportedError
from kvxfer.hits import CacheGroup

_NATIVE_KINDS = (
    ("full", FullAttentionSpec, FullAttentionManager),
    ("sliding_window", SlidingWindowSpec, SlidingWindowManager),
    ("chunked_local", ChunkedLocalAttentionSpec, ChunkedLocalAttentionManager),
    ("mamba", MambaSpec, MambaManager),
)
_RULES = ("find_longest_cache_hit", "reachable_block_mask", "_contiguous_blocks_for_hit")
_HASH_BYTES = 8


def cache_group_from_spec(spec: KVCacheSpec, *, eagle: bool) -> CacheGroup:
    """Return the cache group of a spec whose block already counts context-parallel ranks.

    ``UnsupportedError`` where no manager is registered, or one that cannot cache by prefix.
    """
    layer_spec = _layer_spec(spec)
    manager_cls = KVCacheSpecRegistry.get_manager_class(layer_spec)
    if manager_cls is None or isinstance(layer_spec, CrossAttentionSpec):
        raise UnsupportedError(
            f"{type(layer_spec).__name__} has no prefix cache in vLLM: turn the connector off"
        )
    kind = _kind(layer_spec, manager_cls)
    return CacheGroup(
        kind,
        layer_spec.block_size,
        window_tokens=layer_spec.sliding_window if kind == "sliding_window" else None,
        retained_tokens=layer_spec.extra_retained_tokens if kind == "sliding_window" else 0,
        chunk_tokens=layer_spec.attention_chunk_size if kind == "chunked_local" else None,
        eagle=eagle,
        cacheable=spec.prefix_cacheable,
        spec_id=_covered_spec(layer_spec),
        manager=RegisteredManager(layer_spec, manager_cls) if kind == "other" else None,
    )


def layer_specs(spec: KVCacheSpec) -> list[KVCacheSpec]:
    """Return the specs of a group's layers: one each where layers are listed, else one for all."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return list(spec.kv_cache_specs.values())
    return [spec]


def _layer_spec(spec: KVCacheSpec) -> KVCacheSpec:
    """Return the spec that is searched: that of the first layer where layers are listed."""
    return spec.first_spec if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _covered_spec(layer_spec: KVCacheSpec) -> KVCacheSpec:
    """Return the spec with the window as wide as what a hit has to hold (``retained_tokens``)."""
    if not isinstance(layer_spec, SlidingWindowSpec) or not layer_spec.extra_retained_tokens:
        return layer_spec
    covered_tokens = layer_spec.sliding_window + layer_spec.extra_retained_tokens
    return replace(layer_spec, sliding_window=covered_tokens, extra_retained_tokens=0)


def _kind(spec: KVCacheSpec, manager_cls: type[Any]) -> str:
    for kind, spec_cls, native_cls in _NATIVE_KINDS:
        if isinstance(spec, spec_cls) and _same_rules(manager_cls, native_cls):
            return kind
    return "other"


def _same_rules(manager_cls: type[Any], native_cls: type[Any]) -> bool:
    """Return whether a manager searches and saves with the native one's own functions."""
    same_functions = all(
        getattr(getattr(manager_cls, rule, None), "__func__", None)
        is getattr(getattr(native_cls, rule, None), "__func__", None)
        for rule in _RULES
    )
    fine = "supports_fine_grained_hash_lookup"
    return same_functions and getattr(manager_cls, fine) == getattr(native_cls, fine)


class _StoredPool:
    """A block pool to vLLM's managers: it holds the blocks that an array says are stored."""

    def __init__(self, stored: NDArray[np.uint8], hash_tokens: int) -> None:
        self.hash_block_size = hash_tokens
        self.null_block = KVCacheBlock(block_id=0)
        self._stored = stored
        self._block = KVCacheBlock(block_id=1)

    def get_cached_block(
        self, block_hash: bytes, kv_cache_group_ids: Sequence[int]
    ) -> list[KVCacheBlock] | None:
        if not self._stored[int.from_bytes(block_hash, "big")]:
            return None
        return [self._block] * len(kv_cache_group_ids)


class RegisteredManager:
    """A registered vLLM manager as ``kvxfer.hits.Manager``: searches in Python, block by block.

    Its hashes are positions: what a manager may do with a hash is look it up.
    """

    def __init__(self, spec: KVCacheSpec, manager_cls: type[Any]) -> None:
        self._spec = spec
        self._manager_cls = manager_cls
        self.searched_first = isinstance(spec, FullAttentionSpec)
        self.gives_back_eagle = not isinstance(spec, MambaSpec)
        self.below_block = bool(manager_cls.supports_fine_grained_hash_lookup)

    def find_longest_cache_hit(
        self,
        stored: NDArray[np.uint8],
        max_tokens: int,
        hash_tokens: int,
        align_tokens: int,
        drop_eagle: bool,
    ) -> tuple[int, list[bool]]:
        """Return the manager's hit and which of its blocks are not null."""
        pool = _StoredPool(stored, hash_tokens)
        (blocks,), tokens = self._manager_cls.find_longest_cache_hit(
            block_hashes=[idx.to_bytes(_HASH_BYTES, "big") for idx in range(len(stored))],
            max_length=max_tokens,
            kv_cache_group_ids=[0],
            block_pool=pool,
            kv_cache_spec=self._spec,
            drop_eagle_block=drop_eagle,
            alignment_tokens=align_tokens,
        )
        return tokens, [block is not pool.null_block for block in blocks]

    def reachable_block_mask(
        self,
        start_block: int,
        end_block: int,
        align_tokens: int,
        use_eagle: bool,
        retention_tokens: int | None,
        boundaries: Sequence[int],
    ) -> Sequence[bool] | None:
        """Return the manager's mask of [start, end); None where every block is kept."""
        mask: Sequence[bool] | None = self._manager_cls.reachable_block_mask(
            start_block=start_block,
            end_block=end_block,
            alignment_tokens=align_tokens,
            kv_cache_spec=self._spec,
            use_eagle=use_eagle,
            retention_interval=retention_tokens,
            reachable_boundaries=boundaries,
            dcp_world_size=1,
        )
        return mask
