# SPDX-License-Identifier: Apache-2.0
"""Model check of requests under vLLM's schedulers: whatever happens to them, all is in order."""

import contextlib
import os
import shutil
import tempfile
import threading

import numpy as np
import pytest

pytest.importorskip("vllm")
pytest.importorskip("torch")

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sched_engine import Engine
from sched_model import VOCABULARY

from kvxfer.errors import StoreError

EXAMPLES = int(os.environ.get("KVXFER_FUZZ_EXAMPLES", "0"))
NUM_BLOCKS = 28
FAMILIES = [
    [int(t) for t in np.random.default_rng(seed).integers(2, VOCABULARY, 120)] for seed in range(3)
]
names = st.sampled_from("abcdef")
ranks = st.integers(0, 1)


class SchedulerLife(RuleBasedStateMachine):
    """Requests with shared prefixes come, run, are preempted, aborted, and come back.

    Stores lose values, fail and get stuck, ranks report late, deadlines pass, caches are reset.
    Every step checks each computed token's bytes; the end checks that nothing is left.
    """

    def __init__(self):
        super().__init__()
        self.engine = None
        self.folder = tempfile.mkdtemp(prefix="kvxfer-life-")
        self.store_uri = f"lmdb://{self.folder}/store?capacity=32MiB"

    @initialize(
        num_ranks=st.integers(1, 2),
        windowed=st.booleans(),
        asynchronous=st.booleans(),
        num_spec_tokens=st.sampled_from([0, 0, 3]),
        runner=st.integers(1, 2),
        policy=st.sampled_from(["recompute", "recompute", "fail"]),
        save_decode_cache=st.booleans(),
        lookup_async=st.booleans(),
        is_warm=st.sampled_from([True, True, True, False]),
        ends_early=st.sampled_from([False, False, True]),
    )
    def start(self, is_warm, ends_early, **options):
        self.ends_early = ends_early
        if is_warm:
            self.warm_up(options["num_ranks"], options["windowed"])
        self.engine = Engine(self.store_uri, num_blocks=NUM_BLOCKS, reset_timeout_s=0.3, **options)

    def warm_up(self, num_ranks, windowed):
        """Have another engine save every family, so that new requests have something to load."""
        other = Engine(self.store_uri, num_ranks=num_ranks, windowed=windowed)
        try:
            for idx, family in enumerate(FAMILIES):
                other.serve(str(idx), family, max_tokens=1)
        finally:
            other.close()

    def let_transfers_end(self):
        """Give the transfer threads what time they need, so that an example runs alike again."""
        for rank in self.engine.ranks:
            if rank.switches.is_open:
                self.engine.until(lambda rank=rank: not rank.num_live_jobs, step=False)

    @rule(
        name=names,
        family=st.sampled_from(FAMILIES),
        shared=st.integers(1, 110),
        own=st.integers(0, 8),
        max_tokens=st.integers(1, 40),
    )
    def add(self, name, family, shared, own, max_tokens):
        if name in self.engine.vllm.requests:
            return
        if not self.engine.is_in_flight(name):  # else vLLM gives it what the old one computed
            tail = [ord(name) % VOCABULARY + 2] * own
            self.engine.add(name, family[:shared] + tail, max_tokens=max_tokens)

    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            self.engine.step()
            self.let_transfers_end()

    @rule(name=names)
    def abort(self, name):
        self.engine.abort(name)

    @rule(rank=ranks)
    def hold_reports(self, rank):
        self.engine.ranks[rank % self.engine.num_ranks].hold_reports()

    @rule()
    def release_reports(self):
        for rank in self.engine.ranks:
            rank.release_reports()

    @rule(
        name=names,
        family=st.sampled_from(FAMILIES),
        blocks=st.integers(2, 6),
        how=st.sampled_from(["well", "well", "lost", "broken"]),
        rank=ranks,
        count=st.integers(1, 8),
    )
    def add_what_is_stored(self, name, family, blocks, how, rank, count):
        """Add a request that may load, from a store that may fail it."""
        switches = self.engine.ranks[rank % self.engine.num_ranks].switches
        if how == "lost":
            switches.lost_values = (blocks - 1, 1)
        if how == "broken":
            switches.get_error = StoreError("made up")
        self.add(name, family, blocks * 16, 1, 20)
        self.step(count)

    @rule(rank=ranks)
    def refuse_puts(self, rank):
        self.engine.ranks[rank % self.engine.num_ranks].switches.puts_fail = True

    @rule(running=st.booleans())
    def forget_what_is_local(self, running):
        """Reset vLLM's own cache alone, so that the store's is asked for again."""
        with contextlib.suppress(RuntimeError):  # blocks are in use
            self.engine.vllm.reset_prefix_cache(reset_running_requests=running)

    @rule(rank=ranks, gate=st.sampled_from(["gets", "puts"]))
    def stick(self, rank, gate):
        getattr(self.engine.ranks[rank % self.engine.num_ranks].switches, gate).shut()

    @rule()
    def mend(self):
        for rank in self.engine.ranks:
            rank.switches.mend()
        self.let_transfers_end()

    @rule()
    def let_deadlines_pass(self):
        self.engine.clock.skip(100)

    @rule(running=st.booleans())
    def replace_the_weights(self, running):
        """Reset both caches; where that is done, all KV is computed with other weights then."""
        pinned = self.engine.pool.get_num_free_blocks() < NUM_BLOCKS - 1
        try:
            done = self.engine.vllm.reset_prefix_cache(
                reset_running_requests=running, reset_connector=True
            )
        except RuntimeError:
            assert running
            assert pinned
            return
        if done:
            assert self.engine.assert_store_is_true(self.store_uri) == 0
            self.engine.model.weights = (self.engine.model.weights + 1) % 5

    @rule()
    def reset_before_the_ranks_hear_of_a_step(self):
        output = self.engine.plan()
        done = self.engine.vllm.reset_connector_cache()
        self.engine.perform(output)
        if done:
            self.let_transfers_end()
            assert self.engine.assert_store_is_true(self.store_uri) == 0

    @precondition(lambda self: self.engine is not None)
    @invariant()
    def pins_stay_within_their_bound(self):
        assert self.engine.ours._pins.num_blocks <= max(1, NUM_BLOCKS // 8)

    def teardown(self):
        try:
            if self.engine is not None:
                self.end()
        finally:
            shutil.rmtree(self.folder)

    def end(self):
        """Let everything end, or shut down with whatever is under way."""
        try:
            if not self.ends_early:
                self.let_everything_end()
        finally:
            self.engine.close()
        self.engine.assert_store_is_true(self.store_uri)
        assert [each.name for each in threading.enumerate() if "kvxfer" in each.name] == []

    def let_everything_end(self):
        self.mend()
        self.release_reports()
        self.engine.run(*self.engine.vllm.requests)
        self.engine.settle()
        self.engine.assert_empty()
        for name in self.engine.requests:
            self.engine.assert_generated(name)


SchedulerLife.TestCase.settings = settings(
    max_examples=EXAMPLES or 40,
    stateful_step_count=40,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.slow
@pytest.mark.timeout(0 if EXAMPLES else 300)
class TestSchedulerLife(SchedulerLife.TestCase):
    pass
