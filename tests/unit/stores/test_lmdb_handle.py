# SPDX-License-Identifier: Apache-2.0
"""One environment per process and folder: shared, closed last, bounded in time, safe to fork."""

from __future__ import annotations

import threading
import time

import lmdb
import pytest
from store_children import children, finish, get_whole, put, value

from kvxfer.errors import StoreError
from kvxfer.stores import Outcome, lmdb_handle, open_store
from kvxfer.stores.lmdb_locks import Gate


@pytest.fixture
def uri(tmp_path):
    """A store whose writers soon give up."""
    return f"lmdb://{tmp_path}/store?capacity=8MiB&timeout_s=0.1"


def count_open():
    return len(lmdb_handle._handles)


def test_stores_of_one_folder_share_an_environment(uri, tmp_path):
    before = count_open()
    first = open_store(uri)
    (tmp_path / "link").symlink_to(tmp_path / "store")
    second = open_store(f"lmdb://{tmp_path}/link")
    assert count_open() == before + 1
    put(first, [b"k"])
    assert get_whole(second, b"k")
    first.close()
    assert first.exists([b"k"]) == b"\0"
    assert second.exists([b"k"]) == b"\1"
    assert put(second, [b"j"]) == [Outcome.OK]
    second.close()
    assert count_open() == before


def test_a_folder_can_be_opened_again_after_it_was_closed(uri):
    for idx in range(3):
        store = open_store(uri)
        assert store.stats().num_values == idx
        put(store, [b"%d" % idx])
        store.close()


def test_a_folder_can_be_opened_while_a_call_outlives_its_store(uri, monkeypatch):
    """The environment must not be opened twice in a process, so the call's is used again."""
    monkeypatch.setattr(lmdb_handle, "DRAIN_TIMEOUT_S", 0.05)
    store = open_store(uri)
    put(store, [b"k"])
    handle = store._reference.handle()
    is_inside, may_leave = threading.Event(), threading.Event()

    def stay_inside():
        with handle.call():
            is_inside.set()
            may_leave.wait(30)

    thread = threading.Thread(target=stay_inside)
    thread.start()
    is_inside.wait(30)
    store.close()
    again = open_store(uri)
    assert again._reference.handle() is handle
    may_leave.set()
    thread.join()
    assert get_whole(again, b"k")
    again.close()
    with handle.call() as call:
        assert call is None


def test_the_last_call_closes_what_its_store_could_not(uri, monkeypatch):
    monkeypatch.setattr(lmdb_handle, "DRAIN_TIMEOUT_S", 0.05)
    before = count_open()
    store = open_store(uri)
    handle = store._reference.handle()
    with handle.call():
        started = time.monotonic()
        store.close()
        assert time.monotonic() - started < 5
        assert count_open() == before + 1
    assert count_open() == before


def test_stores_opened_and_closed_by_many_threads(tmp_path):
    uri = f"lmdb://{tmp_path}/store?capacity=8MiB"
    errors = []

    def work():
        try:
            for _ in range(10):
                store = open_store(uri)
                assert put(store, [b"shared"])[0].stored
                assert get_whole(store, b"shared")
                store.close()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


@pytest.mark.skipif(lmdb.__version__ < "2", reason="py-lmdb notices it from 2.0 on")
def test_an_environment_opened_by_somebody_else_is_an_error(uri, tmp_path):
    open_store(uri).close()
    env = lmdb.open(str(tmp_path / "store"), map_size=8 << 20)
    with pytest.raises(StoreError, match="cannot be opened"):
        open_store(uri)
    env.close()
    open_store(uri).close()


# Bounded in time


def test_a_put_that_waits_for_a_writer_fails_in_time(uri, tmp_path):
    store = open_store(uri)
    put(store, [b"k"])
    gate = Gate(tmp_path / "store" / "writer.lock")
    with gate.entered(time.monotonic() + 5):
        started = time.monotonic()
        assert put(store, [b"k", b"new", b"newer"]) == [
            Outcome.EXISTS,
            Outcome.FAILED,
            Outcome.FAILED,
        ]
        assert 0.1 <= time.monotonic() - started < 5
        assert store.exists([b"k", b"new"]) == b"\1\0"
        assert get_whole(store, b"k")
        with pytest.raises(StoreError, match="may be removed in part"):
            store.remove_prefix(b"k")
    assert put(store, [b"new"]) == [Outcome.OK]
    assert store.remove_prefix(b"k") == 1
    gate.close()
    store.close()


def test_a_store_opens_in_time_or_not_at_all(uri, tmp_path):
    open_store(uri).close()
    gate = Gate(tmp_path / "store" / "writer.lock")
    with gate.entered(time.monotonic() + 5), pytest.raises(StoreError, match="writer has held it"):
        open_store(uri)
    gate.close()
    open_store(uri).close()


def test_failures_of_lmdb_are_outcomes(uri, monkeypatch, caplog):
    store = open_store(uri)
    put(store, [b"k"])
    handle = store._reference.handle()

    class BrokenEnvironment:
        def begin(self, **kwargs):
            raise lmdb.Error("mdb_txn_begin", 5)

    monkeypatch.setattr(handle.reader, "_env", BrokenEnvironment())
    assert store.exists([b"k"]) == b"\0"
    target = bytearray(3)
    assert store.get_into([b"k"], [memoryview(target)]) == [Outcome.FAILED]
    assert target == bytes(3)
    assert put(store, [b"k", b"j"]) == [Outcome.FAILED] * 2
    assert store.stats().num_values == 0
    monkeypatch.undo()
    monkeypatch.setattr(handle.writer, "_env", BrokenEnvironment())
    assert put(store, [b"k", b"j"]) == [Outcome.EXISTS, Outcome.FAILED]
    with pytest.raises(StoreError, match="may be removed in part"):
        store.remove_prefix(b"k")
    monkeypatch.undo()
    assert put(store, [b"j"]) == [Outcome.OK]
    assert get_whole(store, b"k")
    counters = store.stats().counters
    assert (counters["exists_failed"], counters["get_failed"], counters["put_failed"]) == (1, 1, 3)
    store.close()


def test_a_get_that_fails_in_the_middle_answers_for_what_it_copied(uri, monkeypatch):
    store = open_store(uri)
    keys = [b"%d" % idx for idx in range(40)]
    put(store, keys)
    reader = store._reference.handle().reader
    snapshot, num_snapshots = reader._snapshot, 0

    def fail_the_second():
        nonlocal num_snapshots
        num_snapshots += 1
        if num_snapshots == 2:
            raise lmdb.Error("mdb_txn_begin", 5)
        return snapshot()

    monkeypatch.setattr(reader, "_snapshot", fail_the_second)
    targets = [bytearray(len(value(key))) for key in keys]
    outcomes = store.get_into(keys, [memoryview(target) for target in targets])
    num_copied = outcomes.count(Outcome.OK)
    assert outcomes == [Outcome.OK] * num_copied + [Outcome.FAILED] * (40 - num_copied)
    assert 0 < num_copied < 40
    for key, target, outcome in zip(keys, targets, outcomes, strict=True):
        assert target == (value(key) if outcome is Outcome.OK else bytes(len(target)))
    store.close()


def test_the_log_has_one_line_a_minute_per_kind_of_failure(uri, tmp_path, caplog):
    store = open_store(uri)
    gate = Gate(tmp_path / "store" / "writer.lock")
    with gate.entered(time.monotonic() + 5):
        for _ in range(3):
            put(store, [b"k"])
    assert caplog.text.count("other writers held it for too long") == 1
    gate.close()
    store.close()


# Forks, in a child of their own: pytest has threads


@pytest.mark.parametrize(
    "scenario", ["use_in_forked_child", "fork_while_reading", "fork_and_close", "fork_in_a_call"]
)
def test_forks(tmp_path, scenario):
    with children((scenario, f"lmdb://{tmp_path}/store?capacity=8MiB")) as (child,):
        assert finish(child)[-1] == "done"
