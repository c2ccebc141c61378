# SPDX-License-Identifier: Apache-2.0
"""The life of saves and loads on one rank: every job is reported exactly once."""

from __future__ import annotations

import enum
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field


class JobState(enum.Enum):
    """Where a job stands; see :class:`JobBoard`."""

    QUEUED = "queued"
    RUNNING = "running"
    COPYING = "copying"
    ENDED = "ended"


class JobResult(enum.Enum):
    """How a job ended. Everything but ``DONE`` costs a recompute, never more."""

    DONE = "done"
    FAILED = "failed"
    SKIPPED = "skipped"
    EXPIRED = "expired"


@dataclass(slots=True, eq=False)
class Job:
    """One save or load on one rank; its fields change under its board's lock only."""

    job_id: int
    deadline_s: float
    """On the board's clock."""
    begun_s: float = 0.0
    """When it was submitted, on the board's clock."""
    state: JobState = JobState.QUEUED
    blocks_free: bool = False
    """No copy of this job will touch vLLM's blocks again."""
    num_copies: int = 0
    """Copies under way, each on its own thread."""
    overdue: bool = False
    """The deadline passed during a copy; no other begins, and the job ends with the last one."""
    result: JobResult | None = None


@dataclass(frozen=True, slots=True)
class Reports:
    """What happened since the last report: ids of packed jobs, and of ended ones."""

    blocks_free: tuple[int, ...] = ()
    ended: dict[int, JobResult] = field(default_factory=dict)


class JobBoard:
    """Keeps the state of all jobs of one rank, for its worker and its transfer threads.

    =========  ==========================  =====================================================
    state      who holds it                event -> next state
    =========  ==========================  =====================================================
    QUEUED     a queue                     start -> RUNNING; end, deadline -> ENDED
    RUNNING    threads, in store calls     begin_copy -> COPYING; end, deadline -> ENDED
    COPYING    threads, some of which      begin_copy: one more; end_copy: one less, the last
               copy blocks                 -> RUNNING; deadline -> overdue: begin_copy refused,
                                           the last end_copy -> ENDED as EXPIRED
    ENDED      nobody                      start, begin_copy -> refused; end -> ignored
    =========  ==========================  =====================================================

    ``begin_copy`` and ``end_copy`` enclose every access to vLLM's blocks, so a job never ends
    while one is under way, and nothing is accessed after it ended. ``end_copy(last=True)``, by a
    job that copies on one thread, is the event ``blocks_free``; ending implies it. Each job
    yields one ``blocks_free`` and one ``ended`` over all reports. Any thread may call any method.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        on_end: Callable[[int, JobResult, float], None] | None = None,
    ) -> None:
        """``on_end`` is told of each ended job: id, result, seconds since it was submitted.

        It runs under the board's lock: it must return at once and raise nothing.
        """
        self._clock, self._on_end = clock, on_end
        self._lock = threading.Lock()
        self._live: dict[int, Job] = {}  # guarded by _lock
        self._free: list[int] = []  # guarded by _lock
        self._ended: dict[int, JobResult] = {}  # guarded by _lock
        self.counts: Counter[JobResult] = Counter()  # guarded by _lock

    def submit(self, job_id: int, timeout_s: float) -> Job:
        """Open a job; ValueError if its id is live or waits to be reported."""
        now_s = self._clock()
        job = Job(job_id, now_s + timeout_s, now_s)
        with self._lock:
            if job_id in self._live or job_id in self._ended:
                raise ValueError(f"job {job_id} exists already; ids are never reused")
            self._live[job_id] = job
        return job

    def start(self, job: Job) -> bool:
        """A thread takes the job; False if it ended while it was queued."""
        with self._lock:
            if job.state is JobState.ENDED:
                return False
            if job.state is not JobState.QUEUED:
                raise ValueError(f"job {job.job_id} is {job.state.value}, not queued")
            job.state = JobState.RUNNING
            return True

    def begin_copy(self, job: Job) -> bool:
        """Whether the blocks may be touched until ``end_copy``; False once the job ended or is due.

        ValueError for a job that no thread has taken.
        """
        with self._lock:
            if job.state is JobState.ENDED or job.overdue:
                return False
            if job.state is JobState.QUEUED:
                raise ValueError(f"job {job.job_id} is queued, not running")
            job.state = JobState.COPYING
            job.num_copies += 1
            return True

    def end_copy(self, job: Job, *, last: bool) -> bool:
        """Close a ``begin_copy``; ``last`` frees the blocks. False if the job is overdue."""
        with self._lock:
            if job.state is not JobState.COPYING:
                raise ValueError(f"job {job.job_id} is {job.state.value}, not copying")
            job.num_copies -= 1
            if last:
                self._free_blocks(job)
            if job.num_copies == 0:
                job.state = JobState.RUNNING
                if job.overdue:
                    self._end(job, JobResult.EXPIRED)
            return not job.overdue

    def end(self, job: Job, result: JobResult) -> bool:
        """End the job; False if it had ended. ValueError during a copy."""
        with self._lock:
            if job.state is JobState.COPYING:
                raise ValueError(f"job {job.job_id} is copying; end_copy comes first")
            if job.state is JobState.ENDED:
                return False
            self._end(job, result)
            return True

    def is_live(self, job: Job) -> bool:
        """Return whether the job has not ended: whether work for it still has a use."""
        with self._lock:
            return job.state is not JobState.ENDED

    def remaining_s(self, job: Job) -> float:
        """Seconds until the job's deadline, at least 0."""
        return max(0.0, job.deadline_s - self._clock())

    def take_reports(self) -> Reports:
        """Expire what is due, then return and forget what happened since the last call."""
        now = self._clock()
        with self._lock:
            for job in [job for job in self._live.values() if job.deadline_s <= now]:
                if job.state is JobState.COPYING:
                    job.overdue = True
                else:
                    self._end(job, JobResult.EXPIRED)
            reports = Reports(tuple(self._free), self._ended)
            self._free, self._ended = [], {}
        return reports

    @property
    def num_live(self) -> int:
        """Jobs that have not ended."""
        with self._lock:
            return len(self._live)

    def _end(self, job: Job, result: JobResult) -> None:
        self._free_blocks(job)
        job.state, job.result = JobState.ENDED, result
        del self._live[job.job_id]
        self._ended[job.job_id] = result
        self.counts[result] += 1
        if self._on_end is not None:
            self._on_end(job.job_id, result, self._clock() - job.begun_s)

    def _free_blocks(self, job: Job) -> None:
        if not job.blocks_free:
            job.blocks_free = True
            self._free.append(job.job_id)
