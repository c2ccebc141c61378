# SPDX-License-Identifier: Apache-2.0
"""vLLM's own answers over an external presence set, for the tests of ``kvxfer.hits``."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import coordinator as in_tree
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.coordinator import (
    ExternalCachedBlockPool,
    MooncakeStoreCoordinator,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker import (
    MooncakeStoreWorker,
)
from vllm.v1.core import kv_cache_coordinator
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator, get_kv_cache_coordinator
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id, resolve_dcp_kv_cache_spec
from vllm.v1.core.single_type_kv_cache_manager import (
    FullAttentionManager,
    SlidingWindowManager,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

KVCacheSpecRegistry._ensure_registered()  # built-in specs first, or a plugin's stands alone

from kvxfer.hits import CacheGroup, Coordinator
from kvxfer.vllm_specs.groups import cache_group_from_spec

BEFORE_0_32 = not hasattr(kv_cache_coordinator, "replay_boundaries")
"""Then a search with EAGLE reads no chunk past the length asked for; kvxfer's always may."""
BEFORE_0_33 = not hasattr(in_tree, "_coverage_spec")
"""Then the in-tree connector leaves out blocks below a window that the core allocates."""

HEADS = {"num_kv_heads": 1, "dtype": torch.float16}


class EvenBoundaryManager(SlidingWindowManager):
    """A plugin's rule that no built-in kind has: a hit ends on an even number of boundaries."""

    @classmethod
    def find_longest_cache_hit(cls, *args, **kwargs):
        step = 2 * kwargs.pop("alignment_tokens")
        return super().find_longest_cache_hit(*args, alignment_tokens=step, **kwargs)


class OwnFullAttentionManager(FullAttentionManager):
    """A plugin's full attention: vLLM's rule behind a function of its own."""

    @classmethod
    def find_longest_cache_hit(cls, *args, **kwargs):
        return super().find_longest_cache_hit(*args, **kwargs)


@dataclass(frozen=True, kw_only=True)
class EvenBoundarySpec(SlidingWindowSpec):
    """A spec as a plugin registers it, with a hit rule of its own."""


@dataclass(frozen=True, kw_only=True)
class OwnFullAttentionSpec(FullAttentionSpec):
    """A plugin's spec that is full attention by its base class."""


KVCacheSpecRegistry.register(EvenBoundarySpec, EvenBoundaryManager, SlidingWindowSpec)
KVCacheSpecRegistry.register(OwnFullAttentionSpec, OwnFullAttentionManager, FullAttentionSpec)


def make_spec(kind: str, block_tokens: int, reach: int, head_size: int) -> KVCacheSpec:
    """Return a real spec; ``reach`` is the window or chunk, ``head_size`` tells specs apart."""
    sizes = {"block_size": block_tokens, "head_size": head_size, **HEADS}
    match kind:
        case "full":
            return FullAttentionSpec(**sizes)
        case "mla":
            return MLAAttentionSpec(**sizes)
        case "rswa":
            return RSWASpec(**sizes, rswa_window=reach)
        case "sliding_window":
            return SlidingWindowSpec(**sizes, sliding_window=reach, extra_retained_tokens=3)
        case "sliding_window_mla":
            return SlidingWindowMLASpec(**sizes, sliding_window=reach)
        case "bounded_replay":
            return SlidingWindowMLASpec(**sizes, sliding_window=reach, bounded_replay=True)
        case "chunked_local":
            return ChunkedLocalAttentionSpec(**sizes, attention_chunk_size=reach)
        case "mamba":
            return MambaSpec(
                block_size=block_tokens,
                shapes=((head_size,),),
                dtypes=(torch.float32,),
                mamba_cache_mode="align",
            )
        case "ring":
            return CircularBufferSpec(**sizes)
        case "uniform":
            layers = {name: FullAttentionSpec(**sizes) for name in ("a", "b")}
            return UniformTypeKVCacheSpecs(block_size=block_tokens, kv_cache_specs=layers)
        case "plugin_window":
            return EvenBoundarySpec(**sizes, sliding_window=reach)
        case "plugin_full":
            return OwnFullAttentionSpec(**sizes)
    raise ValueError(kind)


def covered(spec: KVCacheSpec) -> KVCacheSpec:
    """Return a spec whose window is as wide as what the core allocates below a hit."""
    extra_tokens = getattr(spec, "extra_retained_tokens", 0)
    if not extra_tokens:
        return spec
    return replace(spec, sliding_window=spec.sliding_window + extra_tokens, extra_retained_tokens=0)


def layer_spec(spec: KVCacheSpec) -> KVCacheSpec:
    return spec.first_spec if isinstance(spec, UniformTypeKVCacheSpecs) else spec


@dataclass(frozen=True)
class Setup:
    """One engine's cache groups, as vLLM resolves them."""

    specs: tuple[KVCacheSpec, ...]
    eagle_groups: frozenset[int]
    hash_tokens: int
    block_tokens: int
    partial_hits: bool = False
    use_eagle: bool = False
    retention_tokens: int | None = None

    @property
    def align_tokens(self) -> int:
        return self.hash_tokens if self.partial_hits else self.block_tokens

    @property
    def flags_cacheable(self) -> bool:
        """Whether a group is flagged for EAGLE that counts for the store."""
        return any(self.specs[idx].prefix_cacheable for idx in self.eagle_groups)

    @property
    def num_distinct(self) -> int:
        """Groups left where those of one spec are merged."""
        distinct: list[KVCacheSpec] = []
        for spec in map(layer_spec, self.specs):
            if spec.prefix_cacheable and spec not in distinct:
                distinct.append(spec)
        return len(distinct)

    def groups(self) -> list[CacheGroup]:
        return [
            cache_group_from_spec(spec, eagle=idx in self.eagle_groups)
            for idx, spec in enumerate(self.specs)
        ]

    def coordinator(self) -> Coordinator:
        return Coordinator(
            self.groups(),
            self.hash_tokens,
            self.block_tokens,
            partial_hits=self.partial_hits,
            use_eagle=self.use_eagle,
            retention_tokens=self.retention_tokens,
        )

    def group_specs(self) -> list[KVCacheGroupSpec]:
        return [
            KVCacheGroupSpec([f"layer.{idx}"], spec, is_eagle_group=idx in self.eagle_groups)
            for idx, spec in enumerate(self.specs)
        ]

    def store_coordinator(self) -> MooncakeStoreCoordinator:
        told = replace(self, specs=tuple(map(covered, self.specs))) if BEFORE_0_33 else self
        coordinator = MooncakeStoreCoordinator(
            told.group_specs(),
            self.block_tokens,
            self.hash_tokens,
            use_eagle=self.use_eagle,
            retention_interval=self.retention_tokens,
        )
        # Like the argument of this name, which 0.31 does not have: it works the answer out itself.
        coordinator.enable_partial_hash_hits = self.partial_hits
        return coordinator


def block_hashes(num_hashes: int) -> list[bytes]:
    return [idx.to_bytes(4, "big") for idx in range(num_hashes)]


@dataclass(frozen=True)
class OracleAnswer:
    """A hit of vLLM's, in the terms of ``kvxfer.hits.LookupAnswer``."""

    hit_length: int
    load_masks: list[list[bool]]
    tail_boundaries: list[tuple[int, int]]


class StoreOracle:
    """The in-tree store connector's lookup, with every stored chunk known to it.

    The connector asks for fewer chunks than its managers would read when it may give an EAGLE
    block back; here they read what is stored.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._coordinator = setup.store_coordinator()

    def lookup(self, num_tokens: int, stored: Sequence[np.ndarray]) -> OracleAnswer:
        """Return the connector's answer: align, search, and again below a hit on the whole."""
        hashes = block_hashes(len(stored[0]))
        pool = ExternalCachedBlockPool(self._setup.hash_tokens, _exists(hashes, stored))
        max_tokens = self._coordinator.align_lookup_length(num_tokens)
        masks, hit = self._search(hashes, max_tokens, pool)
        if hit >= num_tokens:
            max_tokens = self._coordinator.align_lookup_length(num_tokens - 1)
            masks, hit = self._search(hashes, max_tokens, pool)
        return OracleAnswer(hit, masks, self._tails(hashes, hit, masks, pool))

    def load_mask(self, hit_length: int, num_hashes: int) -> list[list[bool]]:
        return [list(m) for m in self._coordinator.load_mask(block_hashes(num_hashes), hit_length)]

    def _search(self, hashes, max_tokens, pool) -> tuple[list[list[bool]], int]:
        if max_tokens <= 0:
            return [[] for _ in self._setup.specs], 0
        masks, hit = self._coordinator.find_longest_cache_hit(hashes, max_tokens, pool)
        return [list(mask) for mask in masks], hit

    def _tails(self, hashes, hit, masks, pool) -> list[tuple[int, int]]:
        """Ask the connector about the groups that load their last block; it asserts on others."""
        worker = SimpleNamespace(
            hash_block_size=self._setup.hash_tokens,
            token_dbs=[SimpleNamespace(block_size=s.block_size) for s in self._setup.specs],
            _kv_cache_groups=[
                SimpleNamespace(
                    kv_cache_spec=SimpleNamespace(prefix_cacheable=bool(mask) and mask[-1])
                )
                for mask in masks
            ],
            coord=self._coordinator,
        )
        tails = MooncakeStoreWorker._tail_key_boundaries(worker, hashes, hit, pool)
        return [(tail.group_id, tail.num_tokens) for tail in tails]


def replay_boundaries(
    prompt_tokens: int, block_tokens: int, eagle_groups: Collection[int]
) -> tuple[int, ...]:
    """Return where a repeat of a prompt can resume, as vLLM has it."""
    if not BEFORE_0_32:
        function = kv_cache_coordinator.replay_boundaries
        return function(prompt_tokens, block_tokens, use_eagle=bool(eagle_groups))
    core = SimpleNamespace(eagle_group_ids=eagle_groups, scheduler_block_size=block_tokens)
    request = SimpleNamespace(num_prompt_tokens=prompt_tokens)
    return KVCacheCoordinator.get_replay_boundaries(core, request)


def _exists(hashes, stored) -> set[tuple[int, bytes]]:
    return {(group, hashes[idx]) for group, row in enumerate(stored) for idx in np.flatnonzero(row)}


def local_save_mask(
    setup: Setup, num_tokens: int, start_token: int, prompt_tokens: int
) -> list[list[bool]]:
    """Return what vLLM's local prefix cache retains of each group, recurrent states apart."""
    store = setup.store_coordinator()
    boundaries = replay_boundaries(prompt_tokens, setup.block_tokens, store.eagle_group_ids)
    end_tokens = num_tokens // setup.align_tokens * setup.align_tokens
    masks = []
    for group, spec in enumerate(setup.specs):
        if not spec.prefix_cacheable:
            masks.append([])
            continue
        searched = layer_spec(covered(spec))
        end = end_tokens // spec.block_size
        start = min(end, start_token // spec.block_size)
        if isinstance(searched, MambaSpec):
            masks.append([False] * end)
            continue
        mask = KVCacheSpecRegistry.get_manager_class(searched).reachable_block_mask(
            start_block=start,
            end_block=end,
            alignment_tokens=setup.align_tokens,
            kv_cache_spec=searched,
            use_eagle=group in store.eagle_group_ids,
            retention_interval=setup.retention_tokens,
            reachable_boundaries=boundaries,
        )
        masks.append([False] * start + ([True] * (end - start) if mask is None else mask))
    return masks


def across_ranks(setup: Setup, dcp_size: int) -> Setup:
    """Return the set-up with blocks that span ``dcp_size`` ranks, where vLLM shards the group."""
    specs = tuple(resolve_dcp_kv_cache_spec(spec, dcp_size) for spec in setup.specs)
    block_tokens = math.lcm(*(spec.block_size for spec in specs))
    return replace(setup, specs=specs, block_tokens=block_tokens, retention_tokens=None)


def core_hit(
    setup: Setup, max_tokens: int, stored: Sequence[np.ndarray], dcp_size: int = 1
) -> tuple[bool, int, list[list[bool]]]:
    """Return the engine core's own hit: whether it hits below the block, its length, its masks.

    Real coordinator, real managers, real block pool; the stored chunks are its cached blocks. With
    ``dcp_size`` ranks the specs are those of one rank, and the core scales their blocks itself.
    """
    unwrapped = replace(setup, specs=tuple(covered(layer_spec(spec)) for spec in setup.specs))
    num_blocks = 1 + sum(int(row.sum()) for row in stored)
    coordinator = get_kv_cache_coordinator(
        KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=unwrapped.group_specs(),
        ),
        max_model_len=1 << 20,
        max_in_flight_tokens=1 << 10,
        use_eagle=setup.use_eagle,
        enable_caching=True,
        enable_kv_cache_events=False,
        dcp_world_size=dcp_size,
        pcp_world_size=1,
        scheduler_block_size=across_ranks(setup, dcp_size).block_tokens,
        hash_block_size=setup.hash_tokens,
        allow_partial_hash_hits=setup.partial_hits,
    )
    pool = coordinator.block_pool
    hashes = block_hashes(len(stored[0]))
    blocks = iter(pool.blocks[1:])
    for group, block_hash in sorted(_exists(hashes, stored)):
        key = make_block_hash_with_group_id(block_hash, group)
        pool.cached_block_hash_to_block.insert(key, next(blocks))
    found, hit, _ = coordinator.find_longest_cache_hit(hashes, max_tokens)
    masks = [[block is not pool.null_block for block in blocks] for blocks in found]
    return coordinator.enable_partial_hash_hits, hit, masks
