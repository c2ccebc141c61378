# SPDX-License-Identifier: Apache-2.0
import threading

import pytest

from kvxfer.observe.definitions import SECONDS_BOUNDS
from kvxfer.observe.meter import MAX_NOTES, Meter


def test_take_returns_what_was_noted_and_forgets_it():
    meter = Meter()
    meter.note("call_seconds/get", 0.25, (("keys/ok", 3), ("keys/missing", 1)))
    meter.note("call_seconds/get", 0.5, (("keys/ok", 2),))
    meter.note("", 0.0, (("jobs", 1),))
    counters, seconds = meter.take()
    assert counters == {"keys/ok": 5, "keys/missing": 1, "jobs": 1}
    assert {k: sorted(map(tuple, v.values())) for k, v in seconds.items()} == {
        "call_seconds/get": [(1, 0.25), (1, 0.5)]
    }
    assert meter.take() == ({}, {})


def test_counter_that_nothing_was_added_to_is_not_told():
    meter = Meter()
    meter.note("", 0.0, (("keys/missing", 0),))
    assert meter.take() == ({}, {})


@pytest.mark.parametrize(
    ("seconds", "idx"),
    [
        (0.0, 0),
        (SECONDS_BOUNDS[0], 0),
        (SECONDS_BOUNDS[0] * 1.001, 1),
        (SECONDS_BOUNDS[-1], len(SECONDS_BOUNDS) - 1),
        (1e9, len(SECONDS_BOUNDS)),
    ],
)
def test_observation_falls_into_the_bucket_whose_bound_it_does_not_exceed(seconds, idx):
    meter = Meter()
    meter.note("x", seconds)
    assert meter.take() == ({}, {"x": {idx: [1, seconds]}})


def test_notes_that_nobody_takes_are_added_up_and_kept():
    meter = Meter()
    for _ in range(3 * MAX_NOTES):
        meter.note("x", 1.0, (("n", 1),))
        assert len(meter._notes) <= MAX_NOTES + 1
    counters, seconds = meter.take()
    assert counters == {"n": 3 * MAX_NOTES}
    ((number, total_s),) = seconds["x"].values()
    assert (number, total_s) == (3 * MAX_NOTES, 3.0 * MAX_NOTES)


def test_nothing_is_lost_or_doubled_between_threads():
    meter, rounds = Meter(), 20_000
    start, taken = threading.Barrier(4), []

    def note():
        start.wait()
        for _ in range(rounds):
            meter.note("x", 1.0, (("n", 1),))

    threads = [threading.Thread(target=note) for _ in range(3)]
    for thread in threads:
        thread.start()
    start.wait()
    while any(thread.is_alive() for thread in threads):
        taken.append(meter.take())
    for thread in threads:
        thread.join()
    taken.append(meter.take())
    assert sum(counters.get("n", 0) for counters, _ in taken) == 3 * rounds
    buckets = [bucket for _, seconds in taken for bucket in seconds.get("x", {}).values()]
    assert sum(number for number, _ in buckets) == 3 * rounds
