# SPDX-License-Identifier: Apache-2.0
import threading

import numpy as np
import pytest

from kvxfer.observe import metered_store
from kvxfer.observe.meter import Meter
from kvxfer.observe.metered_store import MeteredStore
from kvxfer.stores import Outcome, Store, StoreStats
from kvxfer.stores.parts import Parts, TransferMode


class ScriptedStore(Store):
    """Answers what a test sets; ``during`` runs inside a get or a put."""

    def __init__(self):
        self.found = b"\1\0\1"
        self.outcomes = [Outcome.OK]
        self.counters = {"put_ok": 9, "evicted": 2}
        self.during = lambda: None
        self.num_looks = 0
        self.calls = []

    def watch_evictions(self, on_evicted):
        self.on_evicted = on_evicted

    def register(self, buffer):
        self.calls.append(("register", buffer))

    def exists(self, keys):
        return bytearray(self.found)

    def get_into(self, keys, targets):
        self.during()
        return self.outcomes

    def put_from(self, keys, sources):
        self.during()
        return self.outcomes

    transfer_mode = TransferMode.DIRECT
    most_parts = 5

    def get_parts(self, keys, parts):
        return self.get_into(keys, parts)

    def put_parts(self, keys, parts):
        return self.put_from(keys, parts)

    def remove(self, keys):
        return len(keys)

    def remove_prefix(self, prefix):
        return 7

    def scan(self, prefix):
        return iter([prefix])

    def stats(self):
        self.num_looks += 1
        return StoreStats(3, 300, 1000, dict(self.counters))

    def close(self):
        self.calls.append(("close",))


def buffers(*sizes):
    return [memoryview(bytearray(size)) for size in sizes]


@pytest.fixture
def inner():
    return ScriptedStore()


@pytest.fixture
def meter():
    return Meter()


@pytest.fixture
def store(inner, meter):
    return MeteredStore(inner, meter)


def counters(meter):
    return meter.take()[0]


def test_exists_counts_found_and_missing_keys(store, meter):
    assert store.exists([b"a", b"b", b"c"]) == b"\1\0\1"
    found, seconds = meter.take()
    assert found == {"store_keys/exists/found": 2, "store_keys/exists/missing": 1}
    assert list(seconds) == ["store_call_seconds/exists"]


def test_get_counts_outcomes_and_the_bytes_that_came(store, inner, meter):
    inner.outcomes = [Outcome.OK, Outcome.MISSING, Outcome.OK, Outcome.CORRUPT]
    assert store.get_into([b"a"] * 4, buffers(10, 20, 40, 80)) == inner.outcomes
    found, seconds = meter.take()
    assert found == {
        "store_keys/get/ok": 2,
        "store_keys/get/missing": 1,
        "store_keys/get/corrupt": 1,
        "store_bytes/get": 50,
    }
    assert list(seconds) == ["store_call_seconds/get"]


def test_put_counts_bytes_of_values_that_are_new(store, inner, meter):
    inner.outcomes = [Outcome.EXISTS, Outcome.OK, Outcome.NO_SPACE]
    store.put_from([b"a"] * 3, buffers(10, 20, 40))
    found = counters(meter)
    assert found.pop("store_events/evicted") == 2
    assert found == {
        "store_keys/put/exists": 1,
        "store_keys/put/ok": 1,
        "store_keys/put/no_space": 1,
        "store_bytes/put": 20,
    }


@pytest.mark.parametrize("act", ["get", "put"])
def test_values_in_parts_count_as_whole_ones_do(store, inner, meter, act):
    inner.outcomes = [Outcome.OK, Outcome.FAILED]
    inner.counters = {}
    seen = []
    inner.during = lambda: seen.append(store.in_flight_bytes(act))
    column = np.array([10, 20, 40], np.int64)
    parts = Parts(ptrs=column, sizes=column, counts=np.array([2, 1], np.int64))
    call = {"get": store.get_parts, "put": store.put_parts}[act]
    assert call([b"a", b"b"], parts) == inner.outcomes
    assert seen == [70]
    assert counters(meter) == {
        f"store_keys/{act}/ok": 1,
        f"store_keys/{act}/failed": 1,
        f"store_bytes/{act}": 30,
    }


def test_what_the_store_takes_is_told_by_the_metered_one(store, inner):
    assert store.transfer_mode is TransferMode.DIRECT
    assert store.most_parts == 5


@pytest.mark.parametrize("answer", [None, [], [Outcome.OK]])
def test_answer_that_is_too_short_counts_what_it_says(store, inner, meter, answer):
    inner.outcomes = answer
    assert store.get_into([b"a", b"b"], buffers(10, 20)) == answer
    assert counters(meter) == ({"store_keys/get/ok": 1, "store_bytes/get": 10} if answer else {})


def test_removals_count_what_went(store, meter):
    assert store.remove([b"a", b"b"]) == 2
    assert store.remove_prefix(b"a") == 7
    found, seconds = meter.take()
    assert found == {"store_keys/remove/removed": 9}
    assert sum(number for number, _ in seconds["store_call_seconds/remove"].values()) == 2


@pytest.mark.parametrize("act", ["get", "put"])
def test_bytes_are_in_flight_until_the_call_returns(store, inner, act):
    call = {"get": store.get_into, "put": store.put_from}[act]
    seen = []
    inner.during = lambda: seen.append(store.in_flight_bytes(act))
    call([b"a", b"b"], buffers(10, 20))
    assert seen == [30]
    assert store.in_flight_bytes(act) == 0


def test_call_that_raises_is_timed_and_no_longer_in_flight(store, inner, meter):
    def fail():
        raise RuntimeError("boom")

    inner.during = fail
    with pytest.raises(RuntimeError, match="boom"):
        store.get_into([b"a"], buffers(10))
    assert store.in_flight_bytes("get") == 0
    assert list(meter.take()[1]) == ["store_call_seconds/get"]


def test_own_statistics_are_looked_at_now_and_then_and_counted_once(
    store, inner, meter, monkeypatch
):
    assert store.last_stats is None
    for _ in range(3):
        store.put_from([b"a"], buffers(10))
    assert inner.num_looks == 1
    assert store.last_stats.used_bytes == 300
    assert counters(meter)["store_events/evicted"] == 2
    monkeypatch.setattr(metered_store, "STATS_INTERVAL_S", 0.0)
    store._next_stats_s = 0.0
    inner.counters["evicted"] = 5
    for _ in range(3):
        store.put_from([b"a"], buffers(10))
    assert counters(meter)["store_events/evicted"] == 3


def test_statistics_that_cannot_be_read_cost_no_save_and_one_log_line(
    store, inner, monkeypatch, caplog
):
    monkeypatch.setattr(metered_store, "STATS_INTERVAL_S", 0.0)
    monkeypatch.setattr(inner, "stats", lambda: 1 / 0)
    for _ in range(3):
        assert store.put_from([b"a"], buffers(10)) == [Outcome.OK]
    assert [record.message for record in caplog.records] == [
        "the store's statistics cannot be read"
    ]


def test_keys_whose_values_are_gone_are_told(store, inner):
    lost = []
    store.watch_losses(lost.extend)
    inner.on_evicted([b"evicted"])
    store.remove([b"removed"])
    inner.outcomes = [Outcome.OK, Outcome.MISSING, Outcome.WRONG_SIZE, Outcome.CORRUPT]
    store.get_into([b"there", b"missing", b"size", b"corrupt"], buffers(1, 1, 1, 1))
    inner.outcomes = [Outcome.FAILED, Outcome.CLOSED]
    store.get_into([b"who", b"knows"], buffers(1, 1))
    assert lost == [b"evicted", b"removed", b"missing", b"size", b"corrupt"]


def test_everything_else_is_passed_on(store, inner):
    (buffer,) = buffers(10)
    store.register(buffer)
    assert list(store.scan(b"p")) == [b"p"]
    assert store.stats().capacity_bytes == 1000
    store.close()
    assert inner.calls == [("register", buffer), ("close",)]


def test_bytes_in_flight_are_right_with_several_threads(store, inner):
    together = threading.Barrier(3)
    inner.during = together.wait
    threads = [
        threading.Thread(target=store.get_into, args=([b"a"], buffers(100))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    while together.n_waiting < 2:
        pass
    assert store.in_flight_bytes("get") == 200
    together.wait()
    for thread in threads:
        thread.join()
    assert store.in_flight_bytes("get") == 0
