# SPDX-License-Identifier: Apache-2.0
import pickle

import pytest

pytest.importorskip("vllm")

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiConnector,
    MultiKVConnectorStats,
)
from vllm.v1.metrics.stats import SchedulerStats

from kvxfer.connector import KVXferConnector
from kvxfer.observe.stats import KVXferStats


def stats(source="engine/0", gauge=None, **counters):
    gauges = {} if gauge is None else {source: {"queued_jobs/save": gauge}}
    found = KVXferStats.of(counters, {"job_seconds/save": {3: [2, 0.5]}}, gauges)
    assert found is not None
    return found


def test_stats_of_nothing_are_none():
    assert KVXferStats.of({}, {}, {}) is None
    assert KVXferStats().is_empty()
    assert not stats().is_empty()


def test_ranks_add_up_and_the_other_is_left_alone():
    one, other = stats(a=1, b=2), stats(b=3, c=4)
    before = pickle.dumps(other.data)
    total = one.aggregate(other)
    assert total is one
    assert total.data["counters"] == {"a": 1, "b": 5, "c": 4}
    assert total.data["seconds"] == {"job_seconds/save": {3: [4, 1.0]}}
    assert pickle.dumps(other.data) == before
    one.aggregate(other)
    assert pickle.dumps(other.data) == before


def test_gauges_add_up_over_ranks_but_not_over_steps():
    first_step = stats("engine/0", gauge=5).aggregate(stats("engine/1", gauge=7))
    assert first_step.reduce()["queued_jobs/save"] == 12
    later = first_step.aggregate(stats("engine/0", gauge=1))
    assert later.reduce()["queued_jobs/save"] == 8
    other = KVXferStats.of({}, {}, {"engine/0": {"store_values": 6}})
    assert later.aggregate(other).reduce()["queued_jobs/save"] == 8


def test_reduce_gives_one_number_a_series():
    assert stats(a=1).aggregate(stats(a=2)).reduce() == {
        "a": 3,
        "job_seconds/save count": 4,
        "job_seconds/save mean": 0.25,
    }


def test_reset_forgets_everything():
    found = stats(a=1, gauge=3)
    found.reset()
    assert found.is_empty()
    assert found.reduce() == {}


def test_stats_survive_pickling_between_worker_and_scheduler():
    found = pickle.loads(pickle.dumps(stats(a=1, gauge=3)))
    assert isinstance(found, KVXferStats)
    assert found.data == stats(a=1, gauge=3).data


def test_stats_survive_the_way_to_the_frontend():
    sent = msgspec.msgpack.encode(SchedulerStats(kv_connector_stats=stats(a=1, gauge=3).to_dict()))
    received = msgspec.msgpack.decode(sent, type=SchedulerStats).kv_connector_stats
    assert received == stats(a=1, gauge=3).data
    assert KVXferConnector.build_kv_connector_stats(received).reduce() == (
        stats(a=1, gauge=3).reduce()
    )


def test_stats_for_the_log_grow_apart_from_what_was_sent():
    sent = stats(a=1).to_dict()
    KVXferConnector.build_kv_connector_stats(sent).aggregate(stats(a=5))
    assert sent == stats(a=1).to_dict()


def test_children_of_a_multi_connector_add_up_by_class():
    worker = MultiKVConnectorStats({"KVXferConnector": stats(a=1)})
    scheduler = MultiKVConnectorStats({"KVXferConnector": stats(a=2), "Other": stats(a=4)})
    total = worker.aggregate(scheduler).to_dict()
    assert total["KVXferConnector"]["counters"] == {"a": 3}
    assert total["Other"]["counters"] == {"a": 4}


def test_log_of_a_multi_connector_knows_its_children_by_name():
    log = KVConnectorLogging(None)
    log.connector_cls = MultiConnector
    lines = []
    for _ in range(2):
        log.observe({"KVXferConnector": stats(a=1).to_dict()})
    log.log(lambda text, numbers: lines.append(numbers))
    assert len(lines) == 1
    assert "'a': 2" in lines[0]
