# SPDX-License-Identifier: Apache-2.0
"""Saves and loads through a GPU's streams: right under every order that the waits leave open.

The engine is played on a stream of its own. It writes blocks just before their save, uses blocks
again as soon as they are reported free, and reads loaded blocks as soon as the load has ended.
"""

import ast
import hashlib
import random
from pathlib import Path

import numpy as np
import pytest
from gpu_model import FailingCallError, ModelQueues
from hypothesis import given
from hypothesis import strategies as st
from memory_store import MemoryStore

from kvxfer.blocks import ITEM_DTYPE, BlockLayout, StagingPool, cuda_mover
from kvxfer.blocks.cuda_mover import NEVER_BYTES, CudaMover
from kvxfer.keys import KeySpace
from kvxfer.transfer import Chunks, JobBoard, JobResult, Loader, LoadSpec, Route, Saver, SaveSpec
from kvxfer.transfer import base as transfer_base

NUM_BLOCKS, BLOCK_BYTES = 12, 192
FIRST, SECOND = [1, 2, 5, 3, 4], [9, 6, 7, 8, 10]
"""Blocks of a save, and of a load of the same chunks; some side by side, which may be one copy."""
SCRAPS = 0xA5
WAYS = {
    "through": {"staged_from_bytes": 0},
    "straight": {"staged_from_bytes": NEVER_BYTES},
    "both": {"staged_from_bytes": 2 * BLOCK_BYTES},
    "engine": {"dma_from_bytes": BLOCK_BYTES},
}


class ThreadOfTheCaller:
    """Instead of ``TaskThreads``: a task runs at once, so that the model alone decides on order."""

    def __init__(self, name, *, run, on_error, **_):
        self._run, self._on_error = run, on_error

    def submit(self, task):
        try:
            self._run(task)
        except FailingCallError as error:
            self._on_error(task, error)
        return True

    def submit_if_idle(self, task):
        return False

    def drop_queued(self):
        return 0

    def close(self, timeout_s):
        pass


@pytest.fixture(autouse=True)
def tasks_of_the_caller(monkeypatch):
    monkeypatch.setattr(transfer_base, "TaskThreads", ThreadOfTheCaller)


def content(number):
    """Return the bytes of a chunk."""
    return np.frombuffer(hashlib.shake_128(bytes([number])).digest(BLOCK_BYTES), np.uint8)


def chunks(blocks):
    hashes = b"".join(hashlib.sha256(bytes([n])).digest() for n in range(len(blocks)))
    return (Chunks(0, np.array(blocks, np.int32), hashes, 32),)


class Engine:
    """A rank on a model GPU, and a forward pass whenever one is possible."""

    def __init__(self, chance, *, slot_blocks=2, without=None, device_bytes=None, **thresholds):
        self.chance = chance
        self.cache = np.full((NUM_BLOCKS, BLOCK_BYTES), SCRAPS, dtype=np.uint8)
        layout = BlockLayout.from_tensors([self.cache])
        self.gpu = ModelQueues(layout, chance, without=without, device_bytes=device_bytes)
        self.staging = StagingPool(2, slot_blocks * BLOCK_BYTES)
        self.mover = CudaMover(
            self.gpu,
            self.staging,
            num_pack_lanes=1,
            num_unpack_lanes=1,
            device_bytes=2 * slot_blocks * BLOCK_BYTES,
            **({"staged_from_bytes": 0} | thresholds),
        )
        self.store, self.board = MemoryStore(), JobBoard()
        spaces = {0: [KeySpace(0, b"p/", 0, BLOCK_BYTES)]}
        route = Route(self.store, self.mover, self.staging, spaces)
        options = {"num_threads": 1, "max_queued": 4, "timeout_s": 60}
        self.saver = Saver(self.board, route, **options)
        self.loader = Loader(self.board, route, **options)
        self.ended, self.seen, self.seen_before = {}, None, None
        self.pace = chance.choice([0.0, 0.4, 0.8])  # of the GPU, against that of the threads
        self.gpu.between = self.go_on

    def go_on(self):
        """What happens beside a transfer: time passes on the GPU, the engine takes a step."""
        if self.chance.random() < 0.5:
            self.take_reports()
        while self.chance.random() < self.pace:
            self.gpu.run_one()

    def take_reports(self):
        reports = self.board.take_reports()
        self.ended.update(reports.ended)
        if 0 in reports.blocks_free:  # a step of other requests, in the save's blocks
            self.forward(lambda: self.write(FIRST, None))
        if 1 in reports.ended:  # the step of the request that was loaded
            self.forward(lambda: setattr(self, "seen", self.cache[SECOND].copy()))

    def forward(self, work):
        self.gpu.queue(self.gpu.engine, work)

    def write(self, blocks, numbers):
        for at, block in enumerate(blocks):
            self.cache[block] = SCRAPS if numbers is None else content(numbers[at])

    def save(self):
        """Compute the blocks of five chunks and save them."""
        self.forward(lambda: self.write(FIRST, range(5)))
        self.saver.submit(SaveSpec(0, 0, chunks(FIRST)), self.mover.mark())

    def load(self):
        """Load the chunks, into blocks that the step before still writes and reads."""

        def older_step():
            self.write(SECOND, None)
            self.seen_before = self.cache[SECOND].copy()

        self.forward(older_step)
        self.loader.submit(LoadSpec(1, "request", 0, 5, chunks(SECOND)), self.mover.mark())

    def finish(self):
        self.take_reports()
        self.gpu.run_all()

    def problems(self):
        """Return what went wrong, by name."""
        expected = [content(number) for number in range(5)]
        stored = list(self.store.values.values())
        checks = {
            "jobs": self.ended == {0: JobResult.DONE, 1: JobResult.DONE},
            "stored": [bytes(value) for value in stored] == [each.tobytes() for each in expected],
            "older step": (self.seen_before == SCRAPS).all(),
            "loaded": self.seen is not None and np.array_equal(self.seen, expected),
            "kept": np.array_equal(self.cache[SECOND], expected),
            "others": (self.cache[[0, 11]] == SCRAPS).all(),
        }
        return [name for name, right in checks.items() if not right]


def problems_of_a_run(chance, **options):
    engine = Engine(chance, **options)
    engine.save()
    engine.load()
    engine.finish()
    engine.mover.close()
    return engine.problems()


def lines_of_waits():
    """Return {line: function} of what in ``cuda_mover`` waits, in a stream or in the thread."""
    tree = ast.parse(Path(cuda_mover.__file__).read_text())
    return {
        call.lineno: f"{owner.name}.{function.name}"
        for owner in tree.body
        if isinstance(owner, ast.ClassDef)
        for function in owner.body
        if isinstance(function, ast.FunctionDef)
        for call in ast.walk(function)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in ("wait", "synchronize")
    }


WAITS = lines_of_waits()
SECOND_EVENT = "_CudaPacked.wait"
"""A batch of the copy engine has filled the slot when it has read the blocks: nothing is left."""


@pytest.mark.parametrize("way", WAYS)
@given(chance=st.randoms(use_true_random=False), slot_blocks=st.integers(1, 6))
def test_every_order_saves_and_loads_the_right_bytes(way, chance, slot_blocks):
    assert problems_of_a_run(chance, slot_blocks=slot_blocks, **WAYS[way]) == []


@pytest.mark.parametrize("way", ["both", "engine"])
@pytest.mark.parametrize("line", WAITS)
def test_no_wait_can_be_left_out(line, way):
    options = {"without": line, "slot_blocks": 3, **WAYS[way]}
    fails = any(problems_of_a_run(random.Random(seed), **options) for seed in range(200))
    assert fails == ((way, WAITS[line]) != ("engine", SECOND_EVENT))


def test_each_kind_of_wait_is_among_those_left_out():
    assert sorted(WAITS.values()) == [
        "CudaMover._queue_pack",
        "CudaMover._queue_unpack",
        "CudaMover.pack",
        "CudaMover.unpack",
        SECOND_EVENT,
    ]


class TwoLanes:
    """A mover of two lanes of each kind: one call begins anywhere within another."""

    def __init__(self, chance, *, dma_from_bytes=NEVER_BYTES, **options):
        self.chance = chance
        self.cache = np.array([content(number) for number in range(NUM_BLOCKS)])
        self.gpu = ModelQueues(BlockLayout.from_tensors([self.cache]), chance, **options)
        self.staging = StagingPool(2, 2 * BLOCK_BYTES)
        self.mover = CudaMover(
            self.gpu,
            self.staging,
            num_pack_lanes=2,
            num_unpack_lanes=2,
            device_bytes=8 * BLOCK_BYTES,
            staged_from_bytes=0,
            dma_from_bytes=dma_from_bytes,
        )

    def call(self, kind, blocks):
        """Pack blocks, or unpack into them what two other numbers have; return what came of it."""
        with self.staging.acquire(0) as slot:
            rows = np.frombuffer(slot.buffer, np.uint8).reshape(2, BLOCK_BYTES)
            items = np.zeros(2, dtype=ITEM_DTYPE)
            items["block_id"] = blocks
            items["value_ptr"] = slot.ptr + np.arange(2, dtype=np.uint64) * BLOCK_BYTES
            job = (items, slot, 2 * BLOCK_BYTES, self.mover.mark())
            if kind == "pack":
                rows[...] = 0
                self.mover.pack(*job).wait()
                return rows.copy()
            rows[...] = [content(100 + block) for block in blocks]
            self.mover.unpack(*job)
            return self.cache[blocks].copy()

    def nested(self, outer, inner):
        """Return the results of a call and of one that begins within it."""
        results = {}

        def between():
            if "inner" not in results and self.chance.random() > 0.7:
                results["inner"] = None
                results["inner"] = self.call(inner, [3, 4])
            while self.chance.random() > 0.7:
                self.gpu.run_one()

        self.gpu.between = between
        results["outer"] = self.call(outer, [1, 2])
        self.gpu.run_all()
        return results["outer"], results.get("inner")


def nested_problems(chance, outer, inner, **options):
    """Return which of two nested calls did not come to what it has to."""
    found = TwoLanes(chance, **options).nested(outer, inner)
    bases = [100 * (kind == "unpack") for kind in (outer, inner)]
    expected = [
        [content(base + block) for block in blocks]
        for base, blocks in zip(bases, ([1, 2], [3, 4]), strict=True)
    ]
    return [
        ours is not None and not np.array_equal(ours, theirs)
        for ours, theirs in zip(found, expected, strict=True)
    ]


KINDS = pytest.mark.parametrize("kind", ["pack", "unpack"])


@KINDS
@pytest.mark.parametrize("inner", ["pack", "unpack"])
@pytest.mark.parametrize("dma_from_bytes", [NEVER_BYTES, 1], ids=["kernel", "engine"])
@given(chance=st.randoms(use_true_random=False))
def test_calls_at_the_same_time_do_not_meet(kind, inner, dma_from_bytes, chance):
    assert not any(nested_problems(chance, kind, inner, dma_from_bytes=dma_from_bytes))


@KINDS
def test_lanes_that_shared_their_memory_would_be_noticed(kind):
    assert any(
        any(nested_problems(random.Random(seed), kind, kind, one_memory=True))
        for seed in range(200)
    )


CALLS_OF_A_WAY = {
    "through": ({}, ["record", "copy", "scatter", "gather"]),
    "straight": ({"device_bytes": 0}, ["record", "scatter", "gather"]),
    "engine": ({"dma_from_bytes": 1}, ["record", "copy_batch"]),
}


@pytest.mark.parametrize(
    ("way", "failing"),
    [(way, call) for way, (_, calls) in CALLS_OF_A_WAY.items() for call in calls],
)
@KINDS
def test_nothing_that_was_queued_runs_after_a_call_that_failed(kind, way, failing):
    for nth in range(3):
        rank = TwoLanes(random.Random(nth), **CALLS_OF_A_WAY[way][0])
        rank.gpu.fail_at = (failing, nth)
        try:
            rank.call(kind, [1, 2])
        except FailingCallError:
            rank.cache[...] = 1  # the blocks' next use, and the slot's
            np.frombuffer(rank.staging.buffer, np.uint8)[...] = 2
        rank.gpu.run_all()
        if rank.gpu.has_failed:
            assert (rank.cache == 1).all()
            assert (np.frombuffer(rank.staging.buffer, np.uint8) == 2).all()
        rank.gpu.fail_at = None
        again = rank.call("pack", [5, 6])
        assert np.array_equal(again, rank.cache[[5, 6]])


@pytest.mark.parametrize("way", ["through", "engine"])
def test_job_whose_copies_are_refused_fails_alone(way):
    engine = Engine(random.Random(1), slot_blocks=6, **WAYS[way])
    engine.gpu.fail_at = ({"through": "gather", "engine": "copy_batch"}[way], 0)
    engine.forward(lambda: engine.write(FIRST, range(5)))
    for job_id in (2, 3):
        engine.saver.submit(SaveSpec(job_id, 0, chunks(FIRST)), engine.mover.mark())
    engine.finish()
    assert engine.ended == {2: JobResult.FAILED, 3: JobResult.DONE}
    assert [bytes(value) for value in engine.store.values.values()] == [
        content(number).tobytes() for number in range(5)
    ]


@pytest.mark.parametrize(("way", "num_batches"), [("through", 0), ("engine", 2)])
def test_way_of_a_job_is_that_of_its_fragments(way, num_batches):
    engine = Engine(random.Random(1), slot_blocks=6, **WAYS[way])
    engine.save()
    engine.load()
    engine.finish()
    assert engine.gpu.num_batches == num_batches


def test_without_device_memory_copies_go_straight(caplog):
    assert problems_of_a_run(random.Random(1), device_bytes=0) == []
    assert "straight to pinned memory" in caplog.text


def test_staging_memory_is_unpinned_once():
    engine = Engine(random.Random(0))
    assert engine.gpu.pinned == 1
    engine.mover.close()
    engine.mover.close()
    assert engine.gpu.pinned == 0
