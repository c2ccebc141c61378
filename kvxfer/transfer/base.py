# SPDX-License-Identifier: Apache-2.0
"""What saves and loads share: where they copy, which threads run them, how their jobs end."""

from __future__ import annotations

import abc
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from kvxfer.blocks import Slot, StagingPool
from kvxfer.blocks.movers import Mover
from kvxfer.keys import KeySpace
from kvxfer.stores import Outcome, Store
from kvxfer.transfer.direct import DirectBlocks
from kvxfer.transfer.jobs import Job, JobBoard, JobResult
from kvxfer.transfer.specs import LoadSpec, SaveSpec
from kvxfer.transfer.threads import TaskThreads

Spec = TypeVar("Spec", SaveSpec, LoadSpec)


@dataclass(frozen=True, slots=True)
class Route:
    """The two ends of a rank's transfers and the buffers between them; shared, owned elsewhere.

    ``spaces`` maps a cache group to the key spaces that this rank saves, or loads. With
    ``direct`` neither mover nor staging is used.
    """

    store: Store
    mover: Mover
    staging: StagingPool
    spaces: Mapping[int, Sequence[KeySpace]]
    direct: DirectBlocks | None = None
    """Where the store moves values to and from the blocks by itself."""


@dataclass(frozen=True, slots=True)
class Task:
    """What a thread does: a job from its start, or, without ``job``, help with one under way."""

    run: Callable[[], None]
    job: Job | None = None


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
        self.on_staging_wait: Callable[[float], None] | None = None
        """Told of each wait for a staging slot, in seconds, by the thread that waited."""
        self._counting = threading.Lock()
        self.counts: Counter[str] = Counter()  # written under _counting
        """Values and bytes moved, and jobs that did not end as DONE, by name."""
        self._threads: TaskThreads[Task] = TaskThreads(
            name,
            num_threads=num_threads,
            max_queued=max_queued,
            run=lambda task: task.run(),
            on_error=lambda task, _: self._end_task(task, JobResult.FAILED),
            on_dropped=lambda task: self._end_task(task, refused),
            on_start=route.mover.attach_thread,
        )

    @abc.abstractmethod
    def _run(self, job: Job, spec: Spec, after: Any) -> None:
        """Do the job on a thread of the pool, and end it."""

    def submit(self, spec: Spec, after: Any = None) -> None:
        """Take the job; it is reported through the board whatever happens.

        ``after``: what the engine has queued up to here (``Mover.mark``) comes before its copies.
        """
        job = self._board.submit(spec.job_id, self._timeout_s)
        if not any(len(part) for part in spec.chunks):
            self._end(job, JobResult.DONE)
        elif not self._threads.submit(Task(lambda: self._start(job, spec, after), job)):
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

    def _start(self, job: Job, spec: Spec, after: Any) -> None:
        if self._board.start(job):
            self._run(job, spec, after)

    def _end_task(self, task: Task, result: JobResult) -> None:
        if task.job is not None:
            self._end(task.job, result)

    def _end(self, job: Job, result: JobResult) -> None:
        """End the job, unless it ended before."""
        if self._board.end(job, result) and result is not JobResult.DONE:
            self._count(f"jobs_{result.value}", 1)

    def _count(self, name: str, number: int) -> None:
        with self._counting:
            self.counts[name] += number

    @contextmanager
    def _slot(self, job: Job) -> Iterator[Slot | None]:
        """Lend a staging slot, or None if none came free before the job's deadline.

        The slot goes back when the block ends, however late the store's call returns, so a call
        that outlives its job never shares a slot with another.
        """
        slot = self._acquire(job)
        try:
            yield slot
        finally:
            if slot is not None:
                slot.release()

    def _acquire(self, job: Job) -> Slot | None:
        staging, begun_s = self._route.staging, time.monotonic()
        must_wait = staging.num_free == 0
        slot = staging.acquire(self._board.remaining_s(job))
        if must_wait and self.on_staging_wait is not None:
            self.on_staging_wait(time.monotonic() - begun_s)
        return slot


def refusals(outcomes: Sequence[Outcome] | None, num_keys: int) -> dict[str, int]:
    """Count the outcomes by name, for a log line; keys without one count as ``UNANSWERED``."""
    counts = Counter(Outcome(outcome).name for outcome in outcomes or ())
    counts["UNANSWERED"] += max(0, num_keys - len(outcomes or ()))
    return {name: count for name, count in counts.items() if count}
