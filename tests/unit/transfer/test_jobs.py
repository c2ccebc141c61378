# SPDX-License-Identifier: Apache-2.0
"""The job board: unit tests of its edges, and a model check of its promises."""

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvxfer.transfer.jobs import JobBoard, JobResult, JobState


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def board(clock):
    return JobBoard(clock)


def test_job_that_is_done_reports_blocks_free_and_end_once(board):
    job = board.submit(7, 1.0)
    assert board.start(job)
    assert board.begin_copy(job)
    assert board.end_copy(job, last=True)
    assert board.take_reports().blocks_free == (7,)
    assert board.end(job, JobResult.DONE)
    reports = board.take_reports()
    assert reports.blocks_free == ()
    assert reports.ended == {7: JobResult.DONE}
    assert board.take_reports().ended == {}


def test_job_id_cannot_be_used_again_before_it_is_reported(board):
    board.end(board.submit(1, 1.0), JobResult.DONE)
    with pytest.raises(ValueError, match="job 1 exists already"):
        board.submit(1, 1.0)


def test_deadline_ends_a_queued_job_and_frees_its_blocks(board, clock):
    job = board.submit(1, 1.0)
    clock.now = 1.0
    reports = board.take_reports()
    assert reports.ended == {1: JobResult.EXPIRED}
    assert reports.blocks_free == (1,)
    assert not board.start(job)


def test_deadline_never_ends_a_job_during_a_copy(board, clock):
    job = board.submit(1, 1.0)
    board.start(job)
    board.begin_copy(job)
    clock.now = 5.0
    assert board.take_reports().ended == {}
    assert not board.end_copy(job, last=True)
    assert board.take_reports().ended == {1: JobResult.EXPIRED}


def test_overdue_job_ends_with_the_last_of_its_copies_and_begins_no_other(board, clock):
    job = board.submit(1, 1.0)
    board.start(job)
    assert board.begin_copy(job)
    assert board.begin_copy(job)
    clock.now = 2.0
    assert board.take_reports().ended == {}
    assert not board.begin_copy(job)
    assert not board.end_copy(job, last=False)
    assert board.take_reports().ended == {}
    assert not board.end_copy(job, last=False)
    assert board.take_reports().ended == {1: JobResult.EXPIRED}


def test_late_thread_may_not_touch_blocks_of_an_expired_job(board, clock):
    job = board.submit(1, 1.0)
    board.start(job)
    clock.now = 2.0
    board.take_reports()
    assert not board.begin_copy(job)
    assert not board.end(job, JobResult.DONE)
    assert board.take_reports().ended == {}


def test_ending_a_job_during_its_copy_is_a_mistake(board):
    job = board.submit(1, 1.0)
    board.start(job)
    board.begin_copy(job)
    with pytest.raises(ValueError, match="end_copy comes first"):
        board.end(job, JobResult.FAILED)


def test_end_copy_without_begin_copy_is_a_mistake(board):
    job = board.submit(1, 1.0)
    with pytest.raises(ValueError, match="not copying"):
        board.end_copy(job, last=True)


class JobBoardMachine(RuleBasedStateMachine):
    """Threads, deadlines and reports in any order, against what every job is owed."""

    def __init__(self):
        super().__init__()
        self.clock = Clock()
        self.board = JobBoard(self.clock)
        self.jobs = []
        self.free = Counter()
        self.ended = Counter()
        self.copies = Counter()  # under way, by job

    def pick(self, number, *states):
        jobs = [job for job in self.jobs if job.state in states]
        return jobs[number % len(jobs)] if jobs else None

    @rule(timeout=st.integers(1, 5))
    def submit(self, timeout):
        self.jobs.append(self.board.submit(len(self.jobs), timeout))

    @rule(number=st.integers(0, 20))
    def start(self, number):
        if job := self.pick(number, JobState.QUEUED, JobState.ENDED):
            assert self.board.start(job) == (job.state is JobState.RUNNING)

    @rule(number=st.integers(0, 20))
    def begin_copy(self, number):
        if job := self.pick(number, JobState.RUNNING, JobState.COPYING, JobState.ENDED):
            was_over = job.state is JobState.ENDED or job.overdue
            assert self.board.begin_copy(job) is not was_over
            self.copies[job.job_id] += not was_over

    @rule(number=st.integers(0, 20), last=st.booleans())
    def end_copy(self, number, last):
        if job := self.pick(number, JobState.COPYING):
            assert self.board.end_copy(job, last=last) is not job.overdue
            self.copies[job.job_id] -= 1
            is_last = self.copies[job.job_id] == 0
            assert (job.state is not JobState.COPYING) == is_last
            assert (job.state is JobState.ENDED) == (is_last and job.overdue)

    @rule(number=st.integers(0, 20), result=st.sampled_from(JobResult))
    def end(self, number, result):
        if job := self.pick(number, JobState.QUEUED, JobState.RUNNING, JobState.ENDED):
            was_over = job.state is JobState.ENDED
            assert self.board.end(job, result) is not was_over

    @rule(seconds=st.integers(0, 3))
    def pass_time(self, seconds):
        self.clock.now += seconds

    @rule()
    def report(self):
        copying = {job.job_id for job in self.jobs if job.state is JobState.COPYING}
        reports = self.board.take_reports()
        self.free.update(reports.blocks_free)
        self.ended.update(reports.ended.keys())
        assert not copying & reports.ended.keys()
        for job in self.jobs:
            due = job.deadline_s <= self.clock.now and job.state is not JobState.COPYING
            assert not due or job.state is JobState.ENDED

    @invariant()
    def nothing_is_reported_twice_and_no_end_before_its_blocks(self):
        assert all(count == 1 for count in self.free.values())
        assert all(count == 1 for count in self.ended.values())
        assert self.ended.keys() <= self.free.keys()

    def teardown(self):
        for job in self.jobs:
            while job.state is JobState.COPYING:
                self.board.end_copy(job, last=False)
        self.clock.now += 100
        self.report()
        assert self.ended.keys() == self.free.keys() == {job.job_id for job in self.jobs}
        assert self.board.num_live == 0


TestJobBoardMachine = JobBoardMachine.TestCase
