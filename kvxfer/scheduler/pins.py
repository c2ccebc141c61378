# SPDX-License-Identifier: Apache-2.0
"""Blocks that saves read: kept out of vLLM's free queue until every rank has packed them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Pool(Protocol):
    """The part of vLLM's block pool that pins use."""

    blocks: Sequence[Any]

    def touch(self, blocks: Sequence[Any]) -> None:
        """Take a reference on each block."""
        ...

    def free_blocks(self, ordered_blocks: Any) -> None:
        """Drop a reference of each block."""
        ...


class BlockPins:
    """References that save jobs hold on blocks; scheduler side, owned by the scheduler.

    ``pin`` takes one reference per block for a job; ``note_free`` counts the ranks that no
    longer read, and the last one releases them, exactly once. ``max_blocks`` bounds the pinned
    blocks over all jobs.
    """

    def __init__(self, pool: Pool, *, num_ranks: int, max_blocks: int) -> None:
        self._pool, self._num_ranks, self._max_blocks = pool, num_ranks, max_blocks
        self._jobs: dict[int, tuple[list[int], int]] = {}
        self.num_blocks = 0

    @property
    def num_jobs(self) -> int:
        """Jobs whose blocks some rank may still read."""
        return len(self._jobs)

    @property
    def num_free(self) -> int:
        """Blocks that may still be pinned."""
        return self._max_blocks - self.num_blocks

    def pin(self, job_id: int, block_ids: Sequence[int]) -> None:
        """Pin the blocks for a new job; ValueError beyond the bound or for a job that has pins."""
        if len(block_ids) > self.num_free or job_id in self._jobs:
            raise ValueError(
                f"job {job_id} wants {len(block_ids)} pins, {self.num_free} of {self._max_blocks} "
                "are free, one set a job"
            )
        if not block_ids:
            return
        self._pool.touch([self._pool.blocks[block] for block in block_ids])
        self._jobs[job_id] = (list(block_ids), self._num_ranks)
        self.num_blocks += len(block_ids)

    def note_free(self, ranks_by_job: Mapping[int, int]) -> None:
        """Count ranks that have packed; jobs without pins (loads) are passed over."""
        released: list[int] = []
        for job_id, num_ranks in ranks_by_job.items():
            if job_id not in self._jobs:
                continue
            block_ids, remaining = self._jobs[job_id]
            if remaining > num_ranks:
                self._jobs[job_id] = (block_ids, remaining - num_ranks)
                continue
            del self._jobs[job_id]
            # Tails first, as vLLM frees: the shared start of a prefix is evicted last.
            released += reversed(block_ids)
        if released:
            self.num_blocks -= len(released)
            self._pool.free_blocks([self._pool.blocks[block] for block in released])
