# SPDX-License-Identifier: Apache-2.0
"""The engine in kvxfer's words: sizes, ranks and groups; what cannot be served is refused here."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import (
    resolve_dcp_kv_cache_spec,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.kv_cache_interface import MambaSpec, get_mamba_prefill_checkpoint_position

from kvxfer.config import KVXferConfig
from kvxfer.errors import UnsupportedError
from kvxfer.hits import CacheGroup, Coordinator
from kvxfer.vllm_specs.groups import cache_group_from_spec, layer_specs
from kvxfer.vllm_specs.layer_sets import LayerSet, layer_sets
from kvxfer.vllm_specs.ranks import RankPlace, StageRanks

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

SUPPORTED = ((0, 31), (0, 34))
"""vLLM versions from the first, below the second."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What both sides need to know about the engine; equal on every rank but for the rank."""

    engine_id: str
    role: str
    rank: int
    """This rank among all of the engine, by pipeline stage first."""
    pp_rank: int
    pp_size: int
    dp_rank: int
    num_ranks: int
    max_steps_in_flight: int
    """Steps that may be scheduled before the results of the first of them are known."""
    num_blocks: int
    block_tokens: int
    """Common block size of all groups, tokens."""
    hash_tokens: int
    partial_hits: bool
    use_eagle: bool
    retention_tokens: int | None
    groups: tuple[CacheGroup, ...]
    layer_sets: tuple[LayerSet, ...]

    @property
    def align_tokens(self) -> int:
        """What a hit's length is a multiple of."""
        return self.hash_tokens if self.partial_hits else self.block_tokens

    @property
    def keeps_valid_prefix(self) -> bool:
        """Whether the blocks before a failed one suffice to go on: so with full attention alone.

        A window or a state needs blocks that a load to a longer hit never filled.
        """
        return len(self.groups) == 1 and self.groups[0].kind == "full"

    def dense_coordinator(self) -> Coordinator | None:
        """Return one whose save masks keep windows at every boundary; None where that is of no use.

        By default vLLM's cache retains windows and states at the boundaries of prompts alone, so a
        second turn never hits in what the first one generated. Windows can be kept all the same;
        states cannot, they come from the core.
        """
        kinds = {group.kind for group in self.groups if group.cacheable}
        if self.retention_tokens != 0 or "mamba" in kinds:
            return None
        return replace(self, retention_tokens=None).coordinator()

    def coordinator(self, eagle_groups: Collection[int] = ()) -> Coordinator:
        """Return the hit computation of this engine; ``eagle_groups`` are flagged besides."""
        groups = [
            replace(group, eagle=group.eagle or idx in eagle_groups)
            for idx, group in enumerate(self.groups)
        ]
        return Coordinator(
            groups,
            self.hash_tokens,
            self.block_tokens,
            partial_hits=self.partial_hits,
            use_eagle=self.use_eagle,
            retention_tokens=self.retention_tokens,
        )


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
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    config: KVXferConfig,
    place: RankPlace | None = None,
) -> EngineFacts:
    """Describe the engine as its rank at ``place`` sees it, by default the first.

    UnsupportedError or ConfigError for what cannot be served.
    """
    _refuse(vllm_config, kv_cache_config, config)
    cacheable = set(kv_cache_config.prefix_cacheable_group_ids)
    block_tokens, hash_tokens = _block_sizes(vllm_config, kv_cache_config)
    alignment = getattr(kv_cache_config, "cache_hit_alignment_tokens", None)
    parallel, transfer = vllm_config.parallel_config, vllm_config.kv_transfer_config
    assert transfer is not None
    assert transfer.engine_id is not None
    speculative = vllm_config.speculative_config
    ranks, place = StageRanks.of(vllm_config), place or RankPlace()
    return EngineFacts(
        engine_id=transfer.engine_id,
        role=str(transfer.kv_role),
        rank=ranks.number(place),
        pp_rank=place.pp_rank,
        pp_size=parallel.pipeline_parallel_size,
        dp_rank=parallel.data_parallel_rank,
        num_ranks=parallel.world_size,
        max_steps_in_flight=int(vllm_config.max_concurrent_batches),
        num_blocks=kv_cache_config.num_blocks,
        block_tokens=block_tokens,
        hash_tokens=hash_tokens,
        partial_hits=alignment is not None and alignment < block_tokens,
        use_eagle=speculative is not None and _drops_eagle_block(speculative),
        retention_tokens=getattr(kv_cache_config, "prefix_cache_retention_interval", None),
        groups=tuple(
            _cache_group(group, idx in cacheable, ranks.dcp_size)
            for idx, group in enumerate(kv_cache_config.kv_cache_groups)
        ),
        layer_sets=tuple(
            layer_set
            for idx, group in enumerate(kv_cache_config.kv_cache_groups)
            if idx in cacheable
            for layer_set in layer_sets(vllm_config, config, idx, group, ranks, place)
        ),
    )


def prefill_checkpoint(prompt_tokens: int, hash_tokens: int, use_eagle: bool) -> int:
    """Return the boundary at which a repeat of a prompt resumes from a recurrent state; 0: none."""
    return int(get_mamba_prefill_checkpoint_position(prompt_tokens, hash_tokens, use_eagle))


def context_parallel(vllm_config: VllmConfig) -> list[int]:
    """Return what decides which tokens of a block a rank holds: sizes, and tokens in a row."""
    ranks = StageRanks.of(vllm_config)
    in_a_row = int(vllm_config.parallel_config.cp_kv_cache_interleave_size or 1)
    return [ranks.dcp_size, ranks.pcp_size, in_a_row if ranks.dcp_size > 1 else 1]


def _cache_group(group: KVCacheGroupSpec, cacheable: bool, dcp_size: int) -> CacheGroup:
    """Return a group with blocks as long as over all ranks that share them."""
    spec = resolve_dcp_kv_cache_spec(group.kv_cache_spec, dcp_size)
    if not cacheable:  # skipped everywhere, whatever its kind
        return CacheGroup("full", spec.block_size, cacheable=False)
    return cache_group_from_spec(spec, eagle=group.is_eagle_group)


def _refuse(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: KVXferConfig) -> None:
    parallel = vllm_config.parallel_config
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
    _refuse_groups(kv_cache_config)


def _refuse_groups(kv_cache_config: KVCacheConfig) -> None:
    groups = [
        kv_cache_config.kv_cache_groups[idx] for idx in kv_cache_config.prefix_cacheable_group_ids
    ]
    if not groups:
        raise UnsupportedError(
            "no cache group of this model can be cached by prefix; turn the connector off"
        )
    for spec in (spec for group in groups for spec in layer_specs(group.kv_cache_spec)):
        if isinstance(spec, MambaSpec) and spec.mamba_cache_mode != "align":
            raise UnsupportedError(
                f"recurrent states with mamba_cache_mode {spec.mamba_cache_mode!r} cannot be "
                "cached by prefix; start vLLM with --enable-prefix-caching --mamba-cache-mode align"
            )


def _block_sizes(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> tuple[int, int]:
    block_tokens, hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    return int(block_tokens), int(hash_tokens)


def _drops_eagle_block(speculative: Any) -> bool:
    drops = getattr(speculative, "use_eagle_block_drop", speculative.use_eagle)
    return bool(drops())
