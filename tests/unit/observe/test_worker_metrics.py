# SPDX-License-Identifier: Apache-2.0
"""What a rank counts: jobs, waits, queues, and what its store holds."""

import threading
from unittest import mock

import pytest

pytest.importorskip("vllm")

from kvxfer.blocks import StagingPool
from kvxfer.observe.worker_metrics import WorkerMetrics, name_source
from kvxfer.stores import Outcome, open_store
from kvxfer.transfer import JobBoard, JobResult, Route, Saver

NONE_QUEUED = {"load": 0, "save": 0}


@pytest.fixture
def store(tmp_path):
    store = open_store(f"lmdb://{tmp_path}/store?capacity=8MiB")
    yield store
    store.close()


@pytest.fixture
def make(store):
    def make(tells_of_store=True):
        metrics = WorkerMetrics(store, "engine/0", tells_of_store=tells_of_store)
        metrics.take(NONE_QUEUED)  # the zeros of the start
        return metrics

    return make


def test_first_stats_have_every_gauge(store):
    metrics = WorkerMetrics(store, "engine/0", tells_of_store=True)
    assert metrics.take(NONE_QUEUED).data["gauges"] == {
        "engine/0": {
            "queued_jobs/load": 0,
            "queued_jobs/save": 0,
            "in_flight_bytes/get": 0,
            "in_flight_bytes/put": 0,
        }
    }


def test_rank_that_nothing_happened_to_tells_nothing(make):
    metrics = make()
    assert metrics.take(NONE_QUEUED) is None


def test_gauges_are_told_when_they_change(make):
    metrics = make()
    assert metrics.take({"load": 0, "save": 3}).data["gauges"] == {
        "engine/0": {"queued_jobs/save": 3}
    }
    assert metrics.take({"load": 0, "save": 3}) is None


def test_jobs_are_counted_by_result_and_timed(make):
    metrics = make()
    metrics.note_job("load", JobResult.DONE, 0.5)
    metrics.note_job("load", JobResult.DONE, 0.25)
    metrics.note_job("save", JobResult.SKIPPED, 0.125)
    data = metrics.take(NONE_QUEUED).data
    assert data["counters"] == {"jobs/load/done": 2, "jobs/save/skipped": 1}
    totals = {k: sum(s for _, s in v.values()) for k, v in data["seconds"].items()}
    assert totals == {"job_seconds/load": 0.75, "job_seconds/save": 0.125}


@pytest.mark.parametrize("tells", [True, False])
def test_what_the_store_holds_is_told_by_one_rank(make, tells):
    metrics = make(tells_of_store=tells)
    assert metrics.store.put_from([b"key"], [memoryview(b"value")]) == [Outcome.OK]
    data = metrics.take(NONE_QUEUED).data
    assert data["counters"] == {"store_keys/put/ok": 1, "store_bytes/put": 5}
    assert data["gauges"].get("engine/0", {}).get("store_values") == (1 if tells else None)
    if tells:
        held = data["gauges"]["engine/0"]
        assert held["store_capacity_bytes"] == 8 << 20
        assert 0 < held["store_used_bytes"] < 8 << 20


def test_sources_of_two_children_and_of_two_sides_differ():
    names = {
        name_source(engine_id, side)
        for engine_id in ("engine/" + "a" * 64, "engine/" + "b" * 64)
        for side in (0, 1, "scheduler")
    }
    assert len(names) == 6


def test_board_tells_of_each_end_once_with_the_time_since_its_submission():
    now, ended = [10.0], []
    board = JobBoard(lambda: now[0], on_end=lambda *end: ended.append(end))
    done, expired = board.submit(1, timeout_s=5.0), board.submit(2, timeout_s=5.0)
    now[0] = 12.0
    board.start(done)
    board.end(done, JobResult.DONE)
    now[0] = 16.0
    board.take_reports()
    board.end(done, JobResult.FAILED)
    board.end(expired, JobResult.DONE)
    assert ended == [(1, JobResult.DONE, 2.0), (2, JobResult.EXPIRED, 6.0)]


def test_waits_for_staging_are_told_and_free_slots_are_not():
    board, waits = JobBoard(), []
    staging = StagingPool(1, 4096)
    saver = Saver(
        board,
        Route(mock.Mock(), mock.Mock(), staging, {}),
        num_threads=1,
        max_queued=1,
        timeout_s=10.0,
    )
    saver.on_staging_wait = waits.append
    job = board.submit(1, timeout_s=10.0)
    slot = saver._acquire(job)
    assert waits == []
    timer = threading.Timer(0.05, slot.release)
    timer.start()
    with saver._acquire(job):
        (waited_s,) = waits
    timer.join()
    assert 0.01 < waited_s < 10.0
    saver.close(1.0)
