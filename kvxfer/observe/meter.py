# SPDX-License-Identifier: Apache-2.0
"""Numbers since they were last taken: cheap to note, bounded, never lost."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable

from kvxfer.observe.definitions import SECONDS_BOUNDS

MAX_NOTES = 4096
"""Notes that wait to be added up; the one that makes it more adds them up itself."""

Counts = Iterable[tuple[str, int]]
Buckets = dict[str, dict[int, list[float]]]
"""Series of seconds -> index of a bucket -> [observations, their sum]."""


class Tally:
    """Counters and histograms of one thread since the last ``take``.

    Histograms are kept by bucket, so that their size has a bound whatever happened.
    """

    def __init__(self) -> None:
        self._counters: dict[str, int] = {}
        self._seconds: Buckets = {}

    def count(self, name: str, number: int = 1) -> None:
        """Add to one counter; a counter that nothing was added to is not told."""
        if number:
            self._counters[name] = self._counters.get(name, 0) + number

    def observe(self, name: str, seconds: float) -> None:
        """Add an observation to a histogram."""
        add_seconds(self._seconds, name, bisect_left(SECONDS_BOUNDS, seconds), 1, seconds)

    def take(self) -> tuple[dict[str, int], Buckets]:
        """Return and forget counters and histograms, those alone that something happened to."""
        taken = self._counters, self._seconds
        self._counters, self._seconds = {}, {}
        return taken


class Meter:
    """A ``Tally`` that all threads note in and one takes.

    A note is one append: who notes never waits for who takes.
    """

    def __init__(self) -> None:
        self._notes: deque[tuple[str, float, Counts]] = deque()
        self._lock = threading.Lock()
        self._tally = Tally()  # guarded by _lock

    def note(self, seconds_name: str, seconds: float, counts: Counts = ()) -> None:
        """Note an observation of ``seconds_name``, "" for none, and what to add to counters."""
        self._notes.append((seconds_name, seconds, counts))
        if len(self._notes) > MAX_NOTES:
            with self._lock:
                self._add_up()

    def take(self) -> tuple[dict[str, int], Buckets]:
        """Return and forget counters and histograms, as ``Tally.take``."""
        with self._lock:
            self._add_up()
            return self._tally.take()

    def _add_up(self) -> None:
        notes, tally = self._notes, self._tally
        while notes:
            name, seconds, counts = notes.popleft()
            for counter, number in counts:
                tally.count(counter, number)
            if name:
                tally.observe(name, seconds)


def add_seconds(buckets: Buckets, name: str, idx: int, number: float, total_s: float) -> None:
    """Add observations of one bucket to a series."""
    series = buckets.get(name)
    if series is None:
        buckets[name] = {idx: [number, total_s]}
    elif idx not in series:
        series[idx] = [number, total_s]
    else:
        bucket = series[idx]
        bucket[0] += number
        bucket[1] += total_s
