# SPDX-License-Identifier: Apache-2.0
"""What the two sides tell each other through vLLM, once a step and once at start-up."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvxfer.transfer.specs import LoadSpec, SaveSpec


@dataclass(frozen=True)
class KVXferMetadata(KVConnectorMetadata):
    """Scheduler to every worker: the jobs that this step orders."""

    saves: tuple[SaveSpec, ...] = ()
    loads: tuple[LoadSpec, ...] = ()


@dataclass(frozen=True)
class KVXferWorkerMetadata(KVConnectorWorkerMetadata):
    """Workers to scheduler: job id -> number of ranks on which the event has happened."""

    blocks_free: dict[int, int] = field(default_factory=dict)
    ended: dict[int, int] = field(default_factory=dict)
    failed_loads: frozenset[str] = frozenset()
    """Requests of which a load failed on some rank, wholly or in part."""
    failed_saves: frozenset[int] = frozenset()
    """Of the ended jobs, saves that did not store everything on some rank."""
    lost: frozenset[tuple[int, bytes]] = frozenset()
    """(cache group, block hash) of blocks of which some rank saw a value go, or gone."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVXferWorkerMetadata:
        """Return both ranks' events together."""
        if not isinstance(other, KVXferWorkerMetadata):
            raise TypeError(f"expected KVXferWorkerMetadata, got {type(other).__name__}")
        return KVXferWorkerMetadata(
            blocks_free=_add(self.blocks_free, other.blocks_free),
            ended=_add(self.ended, other.ended),
            failed_loads=self.failed_loads | other.failed_loads,
            failed_saves=self.failed_saves | other.failed_saves,
            lost=self.lost | other.lost,
        )


@dataclass(frozen=True)
class KVXferHandshake(KVConnectorHandshakeMetadata):
    """One rank to the scheduler at start-up: how to reach it and what its keys start with."""

    endpoint: str
    host: str
    key_prefixes: tuple[tuple[int, bytes], ...]
    """(cache group, key prefix) of every shard that the rank holds."""


def _add(one: dict[int, int], other: dict[int, int]) -> dict[int, int]:
    return {job: one.get(job, 0) + other.get(job, 0) for job in one.keys() | other.keys()}
