# SPDX-License-Identifier: Apache-2.0
"""Values in several parts through a Mooncake client: bounds, sharing, and calls that are late."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest
from mooncake_fakes import FakeNative, open_fake

from kvxfer.stores import Outcome
from kvxfer.stores.mooncake_memory import Buffer, ScatteredBuffers
from kvxfer.stores.mooncake_options import MooncakeOptions
from kvxfer.stores.parts import Parts, TransferMode

PART_BYTES = 16


class Room(bytearray):
    """Bytes whose end can be watched."""


@pytest.fixture
def native():
    return FakeNative()


@pytest.fixture
def store(monkeypatch, native):
    store = open_fake(monkeypatch, native, "in_flight=8")
    yield store
    store.close()


def new_parts(store, *counts):
    """Return registered memory full of its own byte numbers, and parts of it, end to end."""
    memory = np.arange(sum(counts) * PART_BYTES).astype(np.uint8)
    store.register(memory.data)
    ptrs = memory.ctypes.data + PART_BYTES * np.arange(sum(counts))
    return memory, Parts(ptrs, np.full(sum(counts), PART_BYTES), np.array(counts))


def keys_of(number):
    return [b"k%d" % idx for idx in range(number)]


def test_a_value_may_have_as_many_parts_as_half_of_the_wire(store):
    assert store.most_parts == MooncakeOptions("m:1", in_flight=8).most_segments == 4
    assert MooncakeOptions("m:1", in_flight=1).most_segments == 1


def test_no_native_call_takes_more_segments_than_half_of_the_wire(store, native):
    _, parts = new_parts(store, 3, 1, 2, 2, 4, 1, 1)
    assert store.put_parts(keys_of(7), parts) == [Outcome.OK] * 7
    assert store.get_parts(keys_of(7), parts) == [Outcome.OK] * 7
    for act in ("put", "get"):
        calls = [[len(ptrs) for ptrs in all_ptrs] for _, all_ptrs, _ in native.calls[act]]
        assert calls == [[3, 1], [2, 2], [4], [1, 1]]
    assert store._transfers._wire.peak_segments == 4


def test_native_calls_of_parts_are_bounded_in_bytes_and_keys(monkeypatch, native):
    store = open_fake(monkeypatch, native, "batch_bytes=64&batch_keys=3")
    _, parts = new_parts(store, 2, 2, 2, 5, 1, 1, 1, 1)
    assert store.put_parts(keys_of(8), parts) == [Outcome.OK] * 8
    assert [len(names) for names, *_ in native.calls["put"]] == [2, 1, 1, 2, 2]
    store.close()


def test_parts_above_the_staging_of_a_disk_tier_fail_alone(monkeypatch, native):
    monkeypatch.setenv("MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES", "12288")
    store = open_fake(monkeypatch, native, "offload=yes")
    _, parts = new_parts(store, 2, 300)
    store.put_parts(keys_of(2), parts)
    assert store.get_parts(keys_of(2), parts) == [Outcome.OK, Outcome.FAILED]
    assert store.stats().counters["get_oversize"] == 1
    store.close()


def test_a_copy_for_a_follower_goes_part_by_part():
    source = np.arange(64, dtype=np.uint8)
    target = np.zeros(64, np.uint8)
    places = []
    for memory, starts in ((source, [40, 0]), (target, [10, 50])):
        parts = Parts(memory.ctypes.data + np.array(starts), np.array([9, 5]), np.array([2]))
        places.append(ScatteredBuffers.of(parts)[0])
    places[1].fill_from(places[0])
    expected = np.zeros(64, np.uint8)
    expected[10:19], expected[50:55] = source[40:49], source[:5]
    assert (target == expected).all()


def test_gets_of_one_value_in_equal_parts_travel_once(store, native):
    """Those in other parts, or packed, travel by themselves."""
    memory, parts = new_parts(store, 2)
    store.put_parts([b"k"], parts)
    value = memory.tobytes()
    places = [new_parts(store, 2) for _ in range(3)]
    for other, _ in places:
        other[:] = 0
    is_in, may_go = threading.Event(), threading.Event()

    def wait(names, all_ptrs, all_sizes):
        if all_ptrs[0][0] == places[0][0].ctypes.data:
            is_in.set()
            assert may_go.wait(10)
        return ...

    native.scripts["get"] = wait
    outcomes = []
    threads = [
        threading.Thread(target=lambda p=p: outcomes.extend(store.get_parts([b"k"], p[1])))
        for p in places[:2]
    ]
    threads[0].start()
    assert is_in.wait(10)
    threads[1].start()
    while not any(flight.followers for flight in store._transfers._gets._under_way.values()):
        assert threads[1].is_alive()
    packed = bytearray(len(value))
    assert store.get_into([b"k"], [memoryview(packed)]) == [Outcome.OK]
    whole = Parts(places[2][1].ptrs[:1], np.array([2 * PART_BYTES]), np.array([1]))
    assert store.get_parts([b"k"], whole) == [Outcome.OK]
    may_go.set()
    for thread in threads:
        thread.join(10)
    assert outcomes == [Outcome.OK] * 2
    assert [other.tobytes() for other, _ in places] == [value] * 3
    assert packed == value
    assert len(native.calls["get"]) == 3


@pytest.mark.parametrize("act", ["get", "put"])
def test_a_call_that_is_late_ends_when_it_has_returned_and_its_memory_stays(
    monkeypatch, native, act
):
    """Whatever else ends meanwhile, the store among it: what is late still writes."""
    store = open_fake(monkeypatch, native)
    monkeypatch.setattr("kvxfer.stores.mooncake_link._abandoned", abandoned := [])
    room = Room(2 * PART_BYTES)
    ended = weakref.ref(room)
    store.register(memoryview(room))
    start = Buffer.of(memoryview(room)).ptr
    parts = Parts(start + np.array([0, 16]), np.array([16, 16]), np.array([2]))
    store.put_parts([b"k"], parts)
    is_in, may_go = threading.Event(), threading.Event()

    def wait(*arguments):
        is_in.set()
        assert may_go.wait(30)
        return ...

    native.scripts[act] = wait
    outcomes = []
    call = getattr(store, f"{act}_parts")
    thread = threading.Thread(target=lambda: outcomes.extend(call([b"%s" % act.encode()], parts)))
    if act == "get":
        native.values["get"] = bytes(range(32))
    thread.start()
    assert is_in.wait(10)
    del room
    store.close()
    gc.collect()
    assert thread.is_alive()
    assert outcomes == []
    assert ended() is not None
    assert len(abandoned) == 1
    may_go.set()
    thread.join(10)
    assert outcomes == [Outcome.OK]
    if act == "get":
        assert ended() == bytes(range(32))


def test_a_transfer_that_fails_is_told_by_name_in_parts_too(store, native):
    _, parts = new_parts(store, 2, 1)
    store.put_parts(keys_of(2), parts)
    native.scripts["get"] = lambda names, ptrs, sizes: [32, -707]
    assert store.get_parts(keys_of(2), parts) == [Outcome.OK, Outcome.FAILED]
    native.scripts["put"] = lambda names, ptrs, sizes: [-200, 0]
    assert store.put_parts([b"x", b"y"], parts) == [Outcome.NO_SPACE, Outcome.OK]
    counters = store.stats().counters
    assert counters["get_failed_lease_expired"] == 1
    assert counters["put_backoffs"] == 1


def test_parts_of_a_store_without_a_master_are_failures(store, native, monkeypatch):
    monkeypatch.setattr("kvxfer.stores.mooncake.is_reachable", lambda master: False)
    _, parts = new_parts(store, 2)
    store._link.note([-900])
    assert store.get_parts([b"k"], parts) == [Outcome.FAILED]
    assert store.put_parts([b"k"], parts) == [Outcome.FAILED]
    assert native.calls["get"] == native.calls["put"] == []


@pytest.mark.parametrize("mode", list(TransferMode), ids=lambda mode: mode.value)
def test_the_transfer_mode_is_that_of_the_uri(monkeypatch, native, mode):
    store = open_fake(monkeypatch, native, f"transfer={mode.value}")
    assert store.transfer_mode is mode
    store.close()
