# SPDX-License-Identifier: Apache-2.0
"""Where a rank stands among those of its engine: tensor, pipeline and context parallelism.

vLLM numbers ranks by pipeline stage, then prefill context parallelism, then tensor parallelism.
Decode context parallelism has no ranks of its own: it cuts a stage's ranks into groups of
neighbours, along prefill context parallelism first. A group's ranks share each block's tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.parallel_state import (
    get_dcp_group,
    get_pcp_group,
    get_pp_group,
    get_tensor_model_parallel_rank,
)
from vllm.v1.core.kv_cache_utils import resolve_dcp_kv_cache_spec

from kvxfer.errors import UnsupportedError

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True, slots=True)
class RankPlace:
    """One rank's numbers in the three dimensions; the first rank's by default."""

    tp_rank: int = 0
    pp_rank: int = 0
    pcp_rank: int = 0


@dataclass(frozen=True, slots=True)
class StageRanks:
    """The ranks of one pipeline stage, all of which hold a part of the same blocks."""

    tp_size: int
    pcp_size: int
    dcp_size: int

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> StageRanks:
        """Read the sizes of the parallel configuration."""
        parallel = vllm_config.parallel_config
        return cls(
            tp_size=parallel.tensor_parallel_size,
            pcp_size=getattr(parallel, "prefill_context_parallel_size", 1),
            dcp_size=parallel.decode_context_parallel_size,
        )

    def shards(self, spec: Any) -> bool:
        """Return whether the ranks of a context group hold different tokens of a spec's blocks."""
        return bool(resolve_dcp_kv_cache_spec(spec, self.dcp_size).block_size != spec.block_size)

    def context_rank(self, place: RankPlace) -> int:
        """Return the number of a rank within its context group."""
        return (place.tp_rank * self.pcp_size + place.pcp_rank) % self.dcp_size

    def number(self, place: RankPlace) -> int:
        """Return the number of a rank within the engine."""
        return (place.pp_rank * self.pcp_size + place.pcp_rank) * self.tp_size + place.tp_rank

    def replica(self, place: RankPlace, bytes_of: Callable[[RankPlace], object]) -> tuple[int, int]:
        """Return a rank's number among those of its stage that hold the same bytes, and theirs."""
        stage = [
            RankPlace(tp_rank, place.pp_rank, pcp_rank)
            for pcp_rank in range(self.pcp_size)
            for tp_rank in range(self.tp_size)
        ]
        alike = [other for other in stage if bytes_of(other) == bytes_of(place)]
        return alike.index(place), len(alike)


def place_of_this_rank(vllm_config: VllmConfig) -> RankPlace:
    """Return where this worker's process stands.

    UnsupportedError where vLLM has cut its context groups in another way than is known here: keys
    would then name tokens that the rank does not hold.
    """
    ranks = StageRanks.of(vllm_config)
    place = RankPlace(
        tp_rank=get_tensor_model_parallel_rank(),
        pp_rank=get_pp_group().rank_in_group,
        pcp_rank=get_pcp_group().rank_in_group if ranks.pcp_size > 1 else 0,
    )
    _check_context_rank(ranks, place)
    return place


def _check_context_rank(ranks: StageRanks, place: RankPlace) -> None:
    found = get_dcp_group().rank_in_group if ranks.dcp_size > 1 else 0
    expected = ranks.context_rank(place)
    if found != expected:
        raise UnsupportedError(
            f"{place} has number {found} in its decode context group, expected {expected}; set "
            "decode_context_parallel_size to 1 with this vLLM"
        )
