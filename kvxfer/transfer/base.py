# SPDX-License-Identifier: Apache-2.0
"""What saves and loads share: where they copy, which threads run them, how their jobs end."""

from __future__ import annotations

import abc
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvxfer.blocks import BlockLayout, Slot, StagingPool
from kvxfer.keys import KeySpace
from kvxfer.stores import Outcome, Store
from kvxfer.transfer.jobs import Job, JobBoard, JobResult
from kvxfer.transfer.specs import LoadSpec, SaveSpec
from kvxfer.transfer.threads import TaskThreads

Spec = TypeVar("Spec", SaveSpec, LoadSpec)


@dataclass(frozen=True, slots=True)
class Route:
    """The two ends of a rank's transfers and the buffers between them; shared, owned elsewhere.

    ``spaces`` maps a cache group to the key spaces that this rank saves, or loads.
    """

    store: Store
    layout: BlockLayout
    staging: StagingPool
    spaces: Mapping[int, Sequence[KeySpace]]


class Transfer(abc.ABC, Generic[Spec]):
    """Runs jobs of one kind on its own threads; every one ends through the board.

    ``submit`` never waits and never raises for what a store does. An exception in a job fails
    that job only.
    """

    def __init__(
        self,
        board: JobBoard,
        route: Route,
        *,
        name: str,
        num_threads: int,
        max_queued: int,
        timeout_s: float,
        refused: JobResult,
    ) -> None:
        """``refused``: the result of jobs that find the queue full or closed."""
        self._board, self._route = board, route
        self._timeout_s, self._refused = timeout_s, refused
        self.counts: Counter[str] = Counter()
        """Values and bytes moved, and jobs that did not end as DONE, by name."""
        self._threads: TaskThreads[tuple[Job, Spec]] = TaskThreads(
            name,
            num_threads=num_threads,
            max_queued=max_queued,
            run=self._run_task,
            on_error=lambda task, _: self._end(task[0], JobResult.FAILED),
            on_dropped=lambda task: self._end(task[0], refused),
        )

    @abc.abstractmethod
    def _run(self, job: Job, spec: Spec) -> JobResult:
        """Do the job on a thread of the pool; the result counts unless it ended meanwhile."""

    def submit(self, spec: Spec) -> None:
        """Take the job; it is reported through the board whatever happens."""
        job = self._board.submit(spec.job_id, self._timeout_s)
        if not any(len(part) for part in spec.chunks):
            self._end(job, JobResult.DONE)
        elif not self._threads.submit((job, spec)):
            self._end(job, self._refused)

    def close(self, timeout_s: float) -> None:
        """Finish what is queued within ``timeout_s``, drop the rest, join the threads."""
        self._threads.close(timeout_s)

    @property
    def num_queued(self) -> int:
        """Jobs that no thread has begun."""
        return self._threads.num_queued

    @property
    def num_abandoned(self) -> int:
        """Threads that were stuck in a native call when the transfer closed."""
        return self._threads.num_abandoned

    def _run_task(self, task: tuple[Job, Spec]) -> None:
        job, spec = task
        if self._board.start(job):
            self._end(job, self._run(job, spec))

    def _end(self, job: Job, result: JobResult) -> None:
        if self._board.end(job, result) and result is not JobResult.DONE:
            self.counts[f"jobs_{result.value}"] += 1

    @contextmanager
    def _slot(self, job: Job) -> Iterator[Slot | None]:
        """Lend a staging slot, or None if none came free before the job's deadline.

        The slot goes back when the block ends, however late the store's call returns, so a call
        that outlives its job never shares a slot with another.
        """
        slot = self._route.staging.acquire(self._board.remaining_s(job))
        try:
            yield slot
        finally:
            if slot is not None:
                slot.release()


def refusals(outcomes: Sequence[Outcome] | None, num_keys: int) -> dict[str, int]:
    """Count the outcomes by name, for a log line; keys without one count as ``UNANSWERED``."""
    counts = Counter(Outcome(outcome).name for outcome in outcomes or ())
    counts["UNANSWERED"] += max(0, num_keys - len(outcomes or ()))
    return {name: count for name, count in counts.items() if count}
