# SPDX-License-Identifier: Apache-2.0
"""Names, batches, turns on the wire, shared flights, the client's import and its bounds."""

from __future__ import annotations

import re
import sys
import threading
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import StoreError
from kvxfer.stores import Outcome
from kvxfer.stores.mooncake_flights import Flights
from kvxfer.stores.mooncake_memory import Buffers
from kvxfer.stores.mooncake_names import group_of, names_of, prefix_pattern
from kvxfer.stores.mooncake_native import bound_client, import_client
from kvxfer.stores.mooncake_pressure import LONGEST_PAUSE_S, Pressure
from kvxfer.stores.mooncake_wire import Side, Wire, cut

# Names


@given(st.lists(st.binary(min_size=1, max_size=20), max_size=8))
def test_names_are_printable_and_different_for_different_keys(keys):
    names = names_of(keys)
    assert all(name.isascii() and name.isprintable() and " " not in name for name in names)
    assert len(set(names)) == len(set(keys))


@given(st.binary(min_size=1, max_size=12), st.binary(max_size=3))
def test_a_pattern_finds_the_names_under_its_prefix_and_no_others(key, prefix):
    (name,) = names_of([key])
    assert bool(re.search(prefix_pattern(prefix), name)) == key.startswith(prefix)


def test_names_of_plain_keys_are_the_keys():
    keys = [b"kvx1/p/org--model+1/0a/g(1)/s0/h0-8/ff", b"x"]
    assert names_of(keys) == [key.decode() for key in keys]
    assert names_of([*keys, b"%"])[:2] == names_of(keys)
    assert names_of([]) == []


def test_a_pattern_escapes_what_a_regular_expression_reads():
    assert prefix_pattern(b"kvx1/a.b+(c)") == r"^kvx1\/a\.b\+\(c\)"


def test_a_group_is_the_chunk_of_all_layers_and_shards():
    assert group_of("kvx1/p/m/d/g0/s0/h0-4/ff") == group_of("kvx1/p/m/d/g1/s1/h4-8/ff")
    assert group_of("kvx1/p/m/d/g0/s0/h0-4/ff") != group_of("kvx1/p/m/d/g0/s0/h0-4/fe")


# Batches


@given(st.lists(st.integers(0, 50), max_size=40), st.integers(1, 10), st.integers(1, 100))
def test_cut_covers_everything_in_order_within_its_bounds(sizes, most_keys, most_bytes):
    ranges = list(cut(sizes, most_keys, most_bytes))
    assert [idx for rows in ranges for idx in rows] == list(range(len(sizes)))
    for rows in ranges:
        assert 1 <= len(rows) <= most_keys
        assert len(rows) == 1 or sum(sizes[idx] for idx in rows) <= most_bytes


# The wire


def run_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    return thread


def waiting(wire, side, number):
    """Wait until ``number`` calls of a side wait."""
    while len(wire._waiting[side]) != number:
        pass


def test_the_wire_never_carries_more_than_its_bound_over_all_threads():
    wire, inside, most = Wire(100), [], []

    def call(side, num_segments):
        for _ in range(40):
            with wire.admit(side, num_segments, 10):
                inside.append(num_segments)
                most.append(sum(inside))
                inside.remove(num_segments)

    sides = [(Side.LOAD, 30), (Side.LOAD, 7), (Side.SAVE, 50), (Side.SAVE, 11)]
    threads = [run_thread(lambda each=each: call(*each)) for each in sides]
    for thread in threads:
        thread.join(60)
    assert max(most) <= 100
    assert wire.peak_segments <= 100


def test_a_side_alone_may_take_the_whole_wire():
    wire = Wire(100)
    with wire.admit(Side.SAVE, 50, 10), wire.admit(Side.SAVE, 50, 10):
        assert wire.peak_segments == 100


def test_a_load_that_waits_comes_before_saves_that_came_later():
    wire, order = Wire(100), []

    def call(side, name):
        with wire.admit(side, 50, 10):
            order.append(name)

    with wire.admit(Side.SAVE, 50, 10):
        with wire.admit(Side.SAVE, 50, 10):
            load = run_thread(lambda: call(Side.LOAD, "load"))
            waiting(wire, Side.LOAD, 1)
            save = run_thread(lambda: call(Side.SAVE, "save"))
            waiting(wire, Side.SAVE, 1)
        load.join(10)
        assert order[0] == "load"
    save.join(10)
    assert sorted(order) == ["load", "save"]


def test_a_side_gets_half_of_the_wire_while_the_other_is_on_it():
    wire = Wire(100)
    with wire.admit(Side.LOAD, 10, 10), wire.admit(Side.SAVE, 40, 10):
        third = run_thread(lambda: enter_and_leave(wire, Side.SAVE, 20))
        waiting(wire, Side.SAVE, 1)
        third.join(0.05)
        assert third.is_alive()  # there is room for it, in the other half
    third.join(10)
    assert not third.is_alive()
    assert wire.peak_segments == 50


def test_a_small_call_does_not_pass_a_large_one_of_its_side():
    wire = Wire(100)
    with wire.admit(Side.LOAD, 40, 10), wire.admit(Side.LOAD, 40, 10):
        large = run_thread(lambda: enter_and_leave(wire, Side.LOAD, 50))
        waiting(wire, Side.LOAD, 1)
        small = run_thread(lambda: enter_and_leave(wire, Side.LOAD, 5))
        waiting(wire, Side.LOAD, 2)
        small.join(0.05)
        assert small.is_alive()
    for thread in (large, small):
        thread.join(10)
        assert not thread.is_alive()


def enter_and_leave(wire, side, num_segments):
    with wire.admit(side, num_segments, 10):
        pass


def test_a_wire_of_one_segment_serves_both_sides():
    wire, order = Wire(1), []

    def call(side):
        for _ in range(20):
            with wire.admit(side, 1, 10):
                order.append(side)

    threads = [run_thread(lambda side=side: call(side)) for side in Side]
    for thread in threads:
        thread.join(60)
    assert sorted(order) == [Side.LOAD] * 20 + [Side.SAVE] * 20
    assert wire.peak_segments == 1


def test_a_call_that_the_wire_does_not_admit_in_time_holds_nothing():
    wire = Wire(100)
    full = wire.admit(Side.LOAD, 50, 10), wire.admit(Side.LOAD, 50, 10)
    with full[0], full[1], wire.admit(Side.LOAD, 1, 0.01) as entered:
        assert not entered
    with wire.admit(Side.LOAD, 50, 10) as first, wire.admit(Side.LOAD, 50, 10) as second:
        assert first
        assert second


# Flights


def buffers(*texts):
    views = [memoryview(bytearray(text)) for text in texts]
    return Buffers.of(views, "texts", len(texts), writable=True)


def claim(flights, keys, *texts):
    """Return a flight and its buffers."""
    places = buffers(*texts)
    return flights.claim(keys, places), places


def contents(places):
    return [bytes(owner) for owner in places.owners]


def test_a_flight_shares_its_outcome_and_its_bytes():
    flights = Flights(copies=True)
    leader, _ = claim(flights, ["k", "l"], b"value", b"other")
    follower, places = claim(flights, ["m", "l", "k"], b"3", b"-----", b"-----")
    assert (list(leader.led), leader.followed) == ([0, 1], [])
    assert follower.led == [0]
    leader.land([0], [Outcome.OK])
    leader.land([1], [Outcome.OK])
    follower.land([0], [Outcome.MISSING])
    assert leader.wait(10) == [Outcome.OK] * 2
    assert follower.wait(10) == [Outcome.MISSING, Outcome.OK, Outcome.OK]
    assert contents(places) == [b"3", b"other", b"value"]


def test_a_flight_that_failed_leaves_its_followers_untouched():
    flights = Flights(copies=True)
    leader, _ = claim(flights, ["k"], b"value")
    follower, places = claim(flights, ["k"], b"-----")
    leader.land([0], [Outcome.MISSING])
    assert follower.wait(10) == [Outcome.MISSING]
    assert contents(places) == [b"-----"]


def test_a_follower_that_gave_up_gets_no_byte_later():
    """Its buffer may hold something else by then."""
    flights = Flights(copies=True)
    leader, _ = claim(flights, ["k"], b"value")
    follower, places = claim(flights, ["k"], b"-----")
    patient, other_places = claim(flights, ["k"], b"-----")
    assert follower.wait(0.01) == [Outcome.FAILED]
    leader.land([0], [Outcome.OK])
    assert patient.wait(10) == [Outcome.OK]
    assert contents(places) == [b"-----"]
    assert contents(other_places) == [b"value"]


def test_equal_keys_of_one_flight_follow_the_first():
    flights = Flights(copies=True)
    flight, places = claim(flights, ["k", "k", "l", "k"], b"1", b"-", b"2", b"-")
    assert list(flight.led) == [0, 2]
    flight.land(flight.led, [Outcome.OK, Outcome.FAILED])
    assert flight.wait(10) == [Outcome.OK, Outcome.OK, Outcome.FAILED, Outcome.OK]
    assert contents(places) == [b"1", b"1", b"2", b"1"]


def test_a_key_that_has_landed_is_free_again():
    flights = Flights(copies=False)
    first, _ = claim(flights, ["k", "l"], b"1", b"1")
    first.land([0], [Outcome.OK])
    again, _ = claim(flights, ["k"], b"1")
    assert first.not_landed == [1]
    assert again.not_landed == [0]


# Pressure


def test_the_pause_doubles_up_to_its_bound_and_ends_with_a_success():
    now = [0.0]
    pressure = Pressure(lambda: now[0])
    pauses = []
    for _ in range(8):
        pressure.refused()
        pressure.refused()  # of a call that began before
        start = now[0]
        while pressure.is_on:
            now[0] += 0.125
        pauses.append(now[0] - start)
    assert pauses == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    assert pauses[-1] == LONGEST_PAUSE_S
    assert pressure.num_backoffs == 8
    pressure.stored()
    assert not pressure.is_on
    pressure.refused()
    now[0] += 0.25
    assert not pressure.is_on


# The client


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            ModuleNotFoundError("No module named 'mooncake'", name="mooncake"),
            "No module named 'mooncake'.*pip install mooncake-transfer-engine",
        ),
        (
            ImportError("libibverbs.so.1: cannot open shared object file: No such file"),
            "libibverbs.so.1: cannot open.*apt-get install -y libibverbs1 librdmacm1",
        ),
        (ImportError("undefined symbol: _ZN8mooncake"), "undefined symbol.*Builds found"),
    ],
    ids=["package", "library", "symbol"],
)
def test_an_import_error_is_shown_with_the_line_that_mends_it(monkeypatch, error, message):
    def fail(name):
        raise error

    monkeypatch.setattr("kvxfer.stores.mooncake_native.importlib.import_module", fail)
    with pytest.raises(StoreError, match=message) as caught:
        import_client()
    assert caught.value.__cause__ is error


def test_the_client_is_imported_by_its_users_only(monkeypatch):
    module = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "mooncake", SimpleNamespace(store=module))
    monkeypatch.setitem(sys.modules, "mooncake.store", module)
    assert import_client() is module


def test_the_client_is_bounded_where_the_user_has_not_bounded_it():
    environ = {"MC_RPC_TIMEOUT_MS": "77"}
    bound_client(2.5, environ)
    assert environ == {
        "MC_RPC_TIMEOUT_MS": "77",
        "MC_TCP_PROGRESS_TIMEOUT_SEC": "2",
        "MC_TCP_STATUS_TIMEOUT_SEC": "2",
        "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    }
