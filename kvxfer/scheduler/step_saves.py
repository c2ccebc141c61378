# SPDX-License-Identifier: Apache-2.0
"""The save jobs of a step in the making: large saves alone, small ones together."""

from __future__ import annotations

from collections.abc import Iterator

from kvxfer.scheduler.pins import BlockPins
from kvxfer.transfer.specs import Chunks, SaveSpec, merge_chunks

SMALL_SAVE_BLOCKS = 8
"""A save of at most so many blocks shares its job with others: one more is worth a job's cost."""
SHARED_JOB_BLOCKS = 64
"""Most blocks of a shared job; its pins last until the last of them is packed."""


class StepSaves:
    """Makes jobs of what is added, and pins their blocks; scheduler side.

    What ``add`` takes is certain of its pins: those of a job that is still open count as taken.
    They are placed by ``close_job``, which must come before anything can free the blocks, so at
    the latest when ``take`` hands out the jobs. A job names each chunk once, though several
    requests may have added it.
    """

    def __init__(self, pins: BlockPins, job_ids: Iterator[int]) -> None:
        self._pins, self._job_ids = pins, job_ids
        self._closed: list[SaveSpec] = []
        self._shared: list[Chunks] = []
        self._num_shared = 0
        self.epoch = 0
        """Resets so far; stamped on every job."""

    @property
    def num_free(self) -> int:
        """Blocks for which there is room."""
        return self._pins.num_free - self._num_shared

    def add(self, chunks: tuple[Chunks, ...]) -> bool:
        """Take a save; False, and nothing is taken, without room for all of its blocks."""
        num_blocks = sum(map(len, chunks))
        if num_blocks > self.num_free:
            return False
        if num_blocks > SMALL_SAVE_BLOCKS:
            self.add_job(chunks)
            return True
        if self._num_shared + num_blocks > SHARED_JOB_BLOCKS:
            self.close_job()
        self._shared += chunks
        self._num_shared += num_blocks
        return True

    def add_job(self, chunks: tuple[Chunks, ...]) -> None:
        """Take a save as a job of its own; ValueError without room."""
        block_ids = [block for part in chunks for block in part.block_ids.tolist()]
        if block_ids:
            spec = SaveSpec(next(self._job_ids), self.epoch, chunks)
            self._pins.pin(spec.job_id, block_ids)
            self._closed.append(spec)

    def close_job(self) -> None:
        """Close the job that small saves share, if there is any: its blocks are pinned now."""
        shared, self._shared, self._num_shared = self._shared, [], 0
        self.add_job(merge_chunks(shared))

    def take(self) -> tuple[SaveSpec, ...]:
        """Return and forget all jobs, in the order of their ids."""
        self.close_job()
        closed, self._closed = self._closed, []
        return tuple(closed)
