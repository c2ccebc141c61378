# SPDX-License-Identifier: Apache-2.0
"""Model check of saves over scheduler side, ranks and block pool: pins hold as long as needed."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")
sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "scheduler"))

from engine_fakes import (
    FakeLookups,
    FakeManager,
    FakePool,
    FakeRequest,
    allocated,
    make_config,
    make_facts,
    step,
    worker_output,
)
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvxfer.messages import KVXferWorkerMetadata
from kvxfer.scheduler import KVXferScheduler
from kvxfer.transfer import JobBoard, JobResult, JobState

NUM_RANKS = 3
TOKENS = 16
GENERATED_BLOCKS = 8
MAX_PINNED = 20
small = st.integers(0, 30)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class SaveLife(RuleBasedStateMachine):
    """Requests run, generate, finish, come back under the same id; ranks pack, fail, run late."""

    def __init__(self):
        super().__init__()
        self.clock, self.pool = Clock(), FakePool(512)
        self.scheduler = KVXferScheduler(
            make_config(max_pinned_blocks=MAX_PINNED, save_decode_cache=True),
            make_facts(num_ranks=NUM_RANKS, num_blocks=512),
            FakeLookups(),
            self.clock,
        )
        self.tables = {}  # request id -> block ids of the only group
        self.scheduler.bind_kv_cache_manager(FakeManager(self.pool, self.tables))
        self.boards = [JobBoard(self.clock) for _ in range(NUM_RANKS)]
        self.jobs = [{} for _ in range(NUM_RANKS)]  # rank -> job id -> Job, not reported as ended
        self.blocks = {}  # job id -> block ids
        self.computed = {}  # request -> tokens
        self.saved = []  # (request, block index), as ordered
        self.next_block = 1

    @rule(name=st.sampled_from("abc"), num_blocks=st.integers(1, 12))
    def arrive(self, name, num_blocks):
        if all(request.request_id != name for request in self.computed):
            request = FakeRequest(name, num_blocks * TOKENS + 3)
            num_blocks += 1 + GENERATED_BLOCKS
            request.table = list(range(self.next_block, self.next_block + num_blocks))
            self.next_block = (self.next_block + num_blocks) % 400 + 1
            self.tables[name] = [request.table]
            self.scheduler.get_num_new_matched_tokens(request, 0)
            self.scheduler.update_state_after_alloc(request, allocated(*request.table), 0)
            self.computed[request] = 0

    @rule(counts=st.lists(st.integers(1, 16) | st.integers(1, 60), min_size=3, max_size=3))
    def run_step(self, counts):
        for (request, done), count in zip(self.computed.items(), counts, strict=False):
            if done == request.num_tokens:
                last = request.num_prompt_tokens + GENERATED_BLOCKS * TOKENS
                request.num_tokens = min(last, done + count)
        cached = [
            (request.request_id, done, min(count, request.num_tokens - done))
            for (request, done), count in zip(self.computed.items(), counts, strict=False)
        ]
        meta = self.scheduler.build_connector_meta(step(cached=cached))
        for request, (_, done, count) in zip(list(self.computed), cached, strict=False):
            self.computed[request] = done + count
        for save in meta.saves:
            self.take(save)

    def take(self, save):
        (chunks,) = save.chunks
        for block_hash, block in chunks.by_hash().items():
            name, place = block_hash.rstrip(b".").decode().split("-")
            (request,) = [r for r in self.computed if r.request_id == name]
            place = int(place)
            assert request.table[place] == block
            assert (place + 1) * TOKENS <= self.computed[request], "not computed yet"
            assert (request, place) not in self.saved, "saved twice"
            self.saved.append((request, place))
        self.blocks[save.job_id] = chunks.block_ids.tolist()
        for board, jobs in zip(self.boards, self.jobs, strict=True):
            jobs[save.job_id] = board.submit(save.job_id, 10)

    @rule(number=small)
    def finish(self, number):
        if self.computed:
            request = list(self.computed)[number % len(self.computed)]
            assert self.scheduler.request_finished(request) is False
            del self.computed[request]

    @rule(rank=st.integers(0, NUM_RANKS - 1), number=small, last=st.booleans(), fails=st.booleans())
    def advance(self, rank, number, last, fails):
        """Take one job of a rank one state on."""
        board, jobs = self.boards[rank], list(self.jobs[rank].values())
        if not jobs:
            return
        job = jobs[number % len(jobs)]
        if job.state is JobState.QUEUED:
            board.start(job)
        elif job.state is JobState.COPYING:
            board.end_copy(job, last=last)
        elif job.state is JobState.RUNNING and not job.blocks_free and not fails:
            board.begin_copy(job)
        elif job.state is JobState.RUNNING:
            board.end(job, JobResult.FAILED if fails else JobResult.DONE)

    @rule(seconds=st.integers(1, 6))
    def pass_time(self, seconds):
        self.clock.now += seconds

    @rule()
    def report(self):
        meta = None
        for board, jobs in zip(self.boards, self.jobs, strict=True):
            reports = board.take_reports()
            for job_id in reports.ended:
                del jobs[job_id]
            rank_meta = KVXferWorkerMetadata(
                dict.fromkeys(reports.blocks_free, 1), dict.fromkeys(reports.ended, 1)
            )
            meta = rank_meta if meta is None else meta.aggregate(rank_meta)
        self.scheduler.update_connector_output(worker_output(meta))

    @invariant()
    def blocks_that_a_rank_may_read_are_pinned(self):
        for jobs in self.jobs:
            for job in jobs.values():
                if not job.blocks_free:
                    assert all(self.pool.references[block] for block in self.blocks[job.job_id])

    @invariant()
    def pins_stay_within_their_bound(self):
        assert sum(self.pool.references.values()) <= MAX_PINNED

    def teardown(self):
        for board, jobs in zip(self.boards, self.jobs, strict=True):
            for job in jobs.values():
                if job.state is JobState.COPYING:
                    board.end_copy(job, last=True)
        self.clock.now += 100
        self.report()
        assert self.pool.pinned == set()
        assert not self.scheduler.has_pending_push_work()
        for request in list(self.computed):
            self.scheduler.request_finished(request)
        assert self.scheduler.num_requests == 0


TestSaveLife = SaveLife.TestCase
