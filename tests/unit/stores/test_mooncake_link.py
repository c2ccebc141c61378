# SPDX-License-Identifier: Apache-2.0
"""The link to the master: down at the first loss, up by itself, set up again, closed in time."""

from __future__ import annotations

import threading
import time

import pytest
from mooncake_fakes import FakeNative, fake_module, open_fake

from kvxfer.errors import StoreError
from kvxfer.stores import Outcome
from kvxfer.stores.mooncake_client import Client
from kvxfer.stores.mooncake_counts import Counts
from kvxfer.stores.mooncake_link import TRIES_BEFORE_SETUP, Link, State
from kvxfer.stores.mooncake_memory import Memory
from kvxfer.stores.mooncake_native import Replication
from kvxfer.stores.mooncake_options import MooncakeOptions


class Site:
    """A link whose master a test switches off, and the clients that were set up for it."""

    def __init__(self, monkeypatch, timeout_s=5.0):
        monkeypatch.setattr("kvxfer.stores.mooncake_link.LONGEST_PAUSE_S", 0.01)
        self.natives = []
        self.is_reachable = True
        self.memory, self.counts = Memory(), Counts("here")
        first = self.connect()
        self.memory.attach(first)
        self.link = Link(
            first,
            self.memory,
            self.counts,
            connect=self.connect,
            is_reachable=lambda: self.is_reachable,
            timeout_s=timeout_s,
            first_pause_s=0.001,
        )

    def connect(self):
        native = FakeNative()
        self.natives.append(native)
        options = MooncakeOptions("m:1")
        return Client(native, Replication.probe(fake_module(native), options))

    def lose_master(self):
        self.link.note([0, -900])


@pytest.fixture
def site(monkeypatch):
    site = Site(monkeypatch)
    yield site
    site.link.close()


def test_codes_that_say_nothing_of_the_master_leave_the_link_up(site):
    site.link.note([0, -704, -800, -200, -707])
    assert site.link.state is State.UP


@pytest.mark.parametrize("code", [-900, -901])
def test_a_lost_master_takes_the_link_down_and_calls_are_refused(site, code):
    site.is_reachable = False
    site.link.note([code])
    assert site.link.state is State.DOWN
    with site.link.call() as client:
        assert client is None


def test_the_link_comes_up_once_the_master_answers(site):
    site.natives[0].scripts["exists"] = lambda names: [-900]
    site.lose_master()
    assert not site.link.wait_up(0.05)
    del site.natives[0].scripts["exists"]
    assert site.link.wait_up(10)
    with site.link.call() as client:
        assert client is not None
    assert site.counts.snapshot() == {"master_lost": 1, "master_found": 1}
    assert len(site.natives) == 1


def test_no_call_goes_to_a_master_that_takes_no_connection(site):
    site.is_reachable = False
    site.lose_master()
    assert not site.link.wait_up(0.1)
    assert site.natives[0].calls["exists"] == []


def test_a_client_that_goes_on_failing_is_set_up_again_with_all_buffers(site):
    site.memory.register(memoryview(bytearray(64)))
    site.natives[0].scripts["exists"] = lambda names: [-900]
    site.lose_master()
    assert site.link.wait_up(10)
    first, second = site.natives
    assert len(first.calls["exists"]) == TRIES_BEFORE_SETUP
    assert len(first.calls["close"]) == 1
    assert second.regions == first.regions
    assert site.counts.snapshot()["clients_set_up_again"] == 1


def test_close_waits_for_calls_in_flight(site):
    with site.link.call() as client:
        closing = threading.Thread(target=site.link.close)
        closing.start()
        while site.link.state is not State.CLOSED:
            time.sleep(0.001)
        assert client is not None
        assert site.natives[0].calls["close"] == []
    closing.join(10)
    assert len(site.natives[0].calls["close"]) == 1


def test_close_leaves_a_client_that_is_stuck_to_its_call(monkeypatch):
    site = Site(monkeypatch, timeout_s=0.05)
    with site.link.call():
        assert not site.link.close()
        assert site.natives[0].calls["close"] == []
    assert site.counts.snapshot()["clients_abandoned"] == 1
    site.link.close()
    assert site.natives[0].calls["close"] == []


def test_close_leaves_the_memory_to_a_client_that_was_left_behind_before(monkeypatch):
    site = Site(monkeypatch, timeout_s=0.05)

    def refuse():
        raise StoreError("not now")

    monkeypatch.setattr(site.link, "_connect", refuse)
    with site.link.call():
        site.natives[0].scripts["exists"] = lambda names: [-900]
        site.lose_master()
        while "clients_abandoned" not in site.counts.snapshot():
            assert site.link.state is State.DOWN
        assert not site.link.close()
    assert not site.link.close()
    assert site.natives[0].calls["close"] == []


def test_close_ends_the_watch(site):
    site.is_reachable = False
    site.lose_master()
    site.link.close()
    assert not [t for t in threading.enumerate() if t.name == "kvxfer-mooncake-watch"]
    assert site.link.state is State.CLOSED


def test_a_store_answers_at_once_while_the_master_is_gone(monkeypatch):
    native = FakeNative()
    store = open_fake(monkeypatch, native)
    monkeypatch.setattr("kvxfer.stores.mooncake.is_reachable", lambda master: False)
    native.scripts["exists"] = lambda names: [-900] * len(names)
    assert store.exists([b"a"]) == b"\0"
    num_calls = len(native.calls["exists"])
    assert store.exists([b"a", b"b"]) == b"\0\0"
    assert store.put_from([b"a"], [memoryview(b"1")]) == [Outcome.FAILED]
    assert store.get_into([b"a"], [memoryview(bytearray(1))]) == [Outcome.FAILED]
    assert store.remove([b"a"]) == 0
    assert len(native.calls["exists"]) == num_calls
    assert store.stats().counters["exists_failed"] == 3
    store.close()


def test_a_call_of_many_parts_ends_where_the_master_is_lost(monkeypatch):
    native = FakeNative()
    store = open_fake(monkeypatch, native, "batch_keys=1")
    monkeypatch.setattr("kvxfer.stores.mooncake.is_reachable", lambda master: False)
    native.scripts["get"] = lambda names, ptrs, sizes: [-901]
    keys = [b"%d" % number for number in range(50)]
    outcomes = store.get_into(keys, [memoryview(bytearray(1)) for _ in keys])
    assert outcomes == [Outcome.FAILED] * 50
    assert len(native.calls["get"]) == 1
    store.close()
