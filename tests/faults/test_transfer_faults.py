# SPDX-License-Identifier: Apache-2.0
"""Saves and loads over a faulty LMDB store: one report each, no wrong byte, bounded in time.

Every fault is injected into the store beneath the checksums, as the backend's own doing.
"""

import threading

import pytest
from faulty_store import FAULTS_OF, Fault, FaultyStore, ScriptedFaults
from known_rank import UNTOUCHED, WAIT_S, KnownRank

from kvxfer.blocks import movers
from kvxfer.stores import Outcome
from kvxfer.stores.checksums import ChecksummedStore
from kvxfer.transfer import JobResult

SOURCE = {0: ([1, 2, 3], [10, 11, 12]), 1: ([4], [20])}
TARGET = {0: ([7, 8, 9], [10, 11, 12]), 1: ([13], [20])}
TARGET_BLOCKS = {0: [7, 8, 9], 1: [13]}
FAULTS = [(call, fault) for call, faults in FAULTS_OF.items() for fault in faults]
HARMLESS = {"exists.delay", "exists.late", "put.delay", "put.late", "get.delay", "get.late"}
"""Late calls have time enough here; test_late_calls.py has those that have not."""


class Faulty:
    """Ranks over one store that is faulty for some and plain for others."""

    def __init__(self, store, checksums):
        self._store, self._checksums = store, checksums
        self._ranks = []

    def rank(self, script=None, *, pause=lambda seconds: None, seed=0, **options):
        """Return a rank whose calls have the faults of ``script``, in order; then none."""
        self.faulty = FaultyStore(self._store, ScriptedFaults(script or {}, seed=seed), pause)
        store = ChecksummedStore(self.faulty) if self._checksums else self.faulty
        self._ranks.append(KnownRank(store, **options))
        return self._ranks[-1]

    def close(self):
        for rank in self._ranks:
            rank.close()


@pytest.fixture(params=[True, False], ids=["checksums", "plain"])
def faulty(request, lmdb_store):
    made = Faulty(lmdb_store, request.param)
    made.checksums = request.param
    yield made
    made.close()


@pytest.fixture
def checked(lmdb_store):
    """Return a source of ranks whose values have checksums."""
    made = Faulty(lmdb_store, checksums=True)
    yield made
    made.close()


def assert_reported_once(rank, *job_ids):
    """Close the rank and check that each job had one ``blocks_free`` and one ``ended``."""
    rank.close()
    assert rank.ended == dict.fromkeys(job_ids, 1)
    assert rank.free == dict.fromkeys(job_ids, 1)


def assert_target_is_right(rank, *, num_valid):
    """Check every byte: valid chunks whole, the others untouched or right, nothing elsewhere."""
    order = [(group, *pair) for group, part in TARGET.items() for pair in zip(*part, strict=True)]
    assert all(rank.holds(*chunk) for chunk in order[:num_valid])
    assert all(rank.holds_nothing_else(*chunk) for chunk in order[num_valid:])
    for group, used in TARGET_BLOCKS.items():
        others = set(range(rank.layout.num_blocks)) - set(used)
        assert all(rank.is_untouched(group, block) for block in others)


@pytest.mark.parametrize("slot_bytes", [256, 1 << 16], ids="slot_bytes={}".format)
@pytest.mark.parametrize(("call", "fault"), FAULTS, ids=lambda part: str(part))
def test_every_fault_costs_a_recompute_at_most(checked, call, fault, slot_bytes):
    script = {call: [None, fault] if slot_bytes == 256 and call != "exists" else [fault]}
    if call != "get":
        rank = checked.rank(script, slot_bytes=slot_bytes)
        rank.save(0, SOURCE)
        expected = {JobResult.DONE, JobResult.FAILED}
        assert rank.result(0) in ({JobResult.DONE} if f"{call}.{fault}" in HARMLESS else expected)
        assert checked.faulty.counts == {f"{call}.{fault}": 1}
        assert_reported_once(rank, 0)
        script = {}
    else:
        saver = checked.rank()
        saver.save(0, SOURCE)
        assert saver.result(0) is JobResult.DONE
    rank = checked.rank(script, slot_bytes=slot_bytes)
    rank.load(1, TARGET)
    result = rank.result(1)
    if call == "get":
        assert checked.faulty.counts == {f"get.{fault}": 1}
        assert (result is JobResult.DONE) == (f"get.{fault}" in HARMLESS)
    assert (rank.valid[1] == 4) == (result is JobResult.DONE)
    assert_target_is_right(rank, num_valid=rank.valid[1])
    assert_reported_once(rank, 1)


@pytest.mark.parametrize("fault", FAULTS_OF["put"])
def test_store_heals_when_what_failed_is_saved_again(checked, fault):
    rank = checked.rank({"put": [fault]})
    rank.save(0, SOURCE)
    rank.result(0)
    for job_id in range(1, 4):  # a load that finds damage, a save that mends it, a load
        (rank.save if job_id == 2 else rank.load)(job_id, SOURCE if job_id == 2 else TARGET)
        rank.result(job_id)
        rank.finish_work()  # damaged values are removed after their load was reported
    assert rank.results[3] is JobResult.DONE
    assert_reported_once(rank, 0, 1, 2, 3)


@pytest.mark.parametrize("call", ["get", "put"])
def test_damage_is_noticed_with_checksums_and_only_with_them(faulty, call):
    """The control of all tests here: without checksums the damage does reach the blocks."""
    saver = faulty.rank({"put": [Fault.CORRUPT]} if call == "put" else {})
    saver.save(0, SOURCE)
    assert saver.result(0) is JobResult.DONE
    rank = faulty.rank({"get": [Fault.CORRUPT]} if call == "get" else {})
    rank.load(1, TARGET)
    assert rank.result(1) is (JobResult.FAILED if faulty.checksums else JobResult.DONE)
    order = [(group, *pair) for group, part in TARGET.items() for pair in zip(*part, strict=True)]
    assert all(rank.holds_nothing_else(*chunk) for chunk in order) == faulty.checksums


def test_faults_of_one_job_leave_the_jobs_beside_it_alone(faulty):
    rank = faulty.rank({"get": [Fault.RAISE, None, Fault.NO_ANSWER, None]}, num_threads=2)
    rank.save(0, SOURCE)
    rank.result(0)
    for job_id in range(1, 5):
        rank.load(job_id, {0: ([5 + job_id], [10])})
    results = [rank.result(job_id) for job_id in range(1, 5)]
    assert results.count(JobResult.DONE) == 2
    for job_id, result in enumerate(results, 1):
        assert rank.holds(0, 5 + job_id, 10) == (result is JobResult.DONE)
    assert_reported_once(rank, 0, 1, 2, 3, 4)


# Calls that return after their job was reported


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class LateCall:
    """Holds a late call until the test lets it go on."""

    def __init__(self):
        self.reached, self._go_on = threading.Event(), threading.Event()

    def __call__(self, seconds):
        self.reached.set()
        assert self._go_on.wait(WAIT_S)

    def go_on(self):
        self._go_on.set()


@pytest.fixture
def late():
    call = LateCall()
    yield call
    call.go_on()


def reuse_all_blocks(rank):
    """Overwrite every block, as the engine does once a job has ended, and return the bytes."""
    for caches in rank.caches.values():
        for cache in caches:
            cache[:] = UNTOUCHED ^ 0xFF
    return rank.snapshot()


@pytest.mark.parametrize("position", [0, 1, 3], ids="call={}".format)
def test_get_that_returns_after_its_load_was_reported_writes_no_block(faulty, late, position):
    saver = faulty.rank()
    saver.save(0, SOURCE)
    saver.result(0)
    clock = Clock()
    script = {"get": [None] * position + [Fault.LATE]}
    rank = faulty.rank(script, pause=late, clock=clock, timeout_s=5, slot_bytes=256)
    rank.load(1, TARGET)
    assert late.reached.wait(WAIT_S)
    clock.now = 6
    assert rank.result(1) is JobResult.EXPIRED
    assert_target_is_right(rank, num_valid=rank.valid[1])
    reused = reuse_all_blocks(rank)
    late.go_on()
    rank.wait(lambda: rank.staging.num_free == rank.staging.num_slots)
    assert_reported_once(rank, 1)
    assert rank.equals(reused)


@pytest.mark.parametrize("call", ["exists", "put"])
def test_save_that_goes_on_after_it_was_reported_stores_no_later_byte(
    faulty, late, lmdb_store, call
):
    clock = Clock()
    rank = faulty.rank({call: [Fault.LATE]}, pause=late, clock=clock, timeout_s=5)
    rank.save(0, SOURCE)
    assert late.reached.wait(WAIT_S)
    clock.now = 6
    assert rank.result(0) is JobResult.EXPIRED
    assert rank.free == {0: 1}
    reused = reuse_all_blocks(rank)
    late.go_on()
    assert rank.saver.drain(0, WAIT_S)
    assert_reported_once(rank, 0)
    assert rank.equals(reused)
    target = faulty.rank()
    target.load(1, TARGET)
    stored = target.result(1) is JobResult.DONE
    assert stored == (call == "put")
    assert_target_is_right(target, num_valid=4 if stored else 0)
    assert lmdb_store.exists(target.keys(0, 10)) == bytes([stored] * 2)


@pytest.mark.parametrize(("kind", "copy"), [("save", "gather_items"), ("load", "scatter_items")])
def test_job_is_not_reported_while_its_copy_runs(checked, late, monkeypatch, kind, copy):
    if kind == "load":
        first = checked.rank()
        first.save(0, SOURCE)
        first.result(0)
    real_copy = getattr(movers, copy)
    monkeypatch.setattr(movers, copy, lambda *args: (late(None), real_copy(*args)))
    clock = Clock()
    rank = checked.rank(clock=clock, timeout_s=5)
    getattr(rank, kind)(1, TARGET)
    assert late.reached.wait(WAIT_S)
    clock.now = 6
    rank.poll()
    assert not rank.ended
    assert not rank.free
    late.go_on()
    assert rank.result(1) is JobResult.EXPIRED
    assert_reported_once(rank, 1)
    assert_target_is_right(rank, num_valid=4)


def test_close_leaves_a_call_that_does_not_return_and_stays_in_time(faulty, late):
    rank = faulty.rank({"put": [Fault.LATE]}, pause=late)
    rank.save(0, SOURCE)
    assert late.reached.wait(WAIT_S)
    rank.saver.close(0.05)
    assert rank.saver.num_abandoned == 1


def test_wrapper_passes_on_what_it_does_not_touch(lmdb_store):
    store = FaultyStore(lmdb_store, ScriptedFaults({}))
    target = bytearray(3)
    assert store.put_from([b"a"], [memoryview(b"abc")]) == [Outcome.OK]
    assert store.exists([b"a", b"b"]) == b"\1\0"
    assert store.get_into([b"a"], [memoryview(target)]) == [Outcome.OK]
    assert target == b"abc"
    assert store.counts == {}
