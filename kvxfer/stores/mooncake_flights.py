# SPDX-License-Identifier: Apache-2.0
"""One transfer per key at a time: who asks for a key that is under way shares its outcome."""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable, Sequence
from typing import Any, Protocol, cast

from kvxfer.stores.base import Outcome


class Place(Protocol):
    """Where a value is read or written."""

    def fill_from(self, source: Any) -> None:
        """Copy the value from another place of its kind, under an equal key."""


class Places(Protocol):
    """A place for each key of a call."""

    def __getitem__(self, row: int) -> Place: ...


class Flight:
    """The transfers of one call: it leads some of its keys and follows other calls in the rest.

    Rows are positions among the call's keys. ``land`` every row of ``led``, in any number of
    steps; then ``wait``. A row lands once.
    """

    def __init__(self, flights: Flights, keys: Sequence[Hashable], places: Places) -> None:
        self._flights = flights
        self._rows: dict[Hashable, int] = {}  # guarded by the lock of the flights
        self.keys, self.places = keys, places
        self.outcomes: list[Outcome | None] = [None] * len(keys)
        """By row; None until it has landed."""
        self.led: Sequence[int] = range(len(keys))
        self.followed: list[tuple[int, Flight, int]] = []
        """Own row, and the flight and row that it follows, which may be this flight."""
        self.followers: dict[int, list[Place]] = {}
        """By row; guarded by the lock of the flights, and final once the row's key is free."""

    def row_of(self, key: Hashable) -> int:
        """Return the first row of a key; holds the lock of the flights."""
        if not self._rows:
            self._rows = {key: row for row, key in reversed(list(enumerate(self.keys)))}
        return self._rows[key]

    @property
    def not_landed(self) -> list[int]:
        """The rows that are led and have not landed."""
        if None not in self.outcomes:
            return []
        return [row for row in self.led if self.outcomes[row] is None]

    def land(self, rows: Sequence[int], outcomes: Sequence[Outcome]) -> None:
        """End rows: followers get the outcome and, of a load that is OK, the bytes."""
        self._flights.land(self, rows, outcomes)

    def wait(self, timeout_s: float) -> list[Outcome]:
        """Return (n,) the outcome of every key, once those that are followed have landed.

        A key whose leader has not landed within ``timeout_s`` is FAILED; its place is the caller's
        own again.
        """
        deadline = time.monotonic() + timeout_s
        for row, leader, at in self.followed:
            left_s = deadline - time.monotonic()
            self.outcomes[row] = self._flights.wait(leader, at, self.places[row], left_s)
        return cast("list[Outcome]", self.outcomes)


class Flights:
    """The transfers of one act in this process; any number of threads.

    A call leads the keys that nobody else leads and follows the rest. It lands all that it leads
    before it waits for anybody, so no two calls wait for each other. Followers of a load get a
    copy of the bytes: the wire carries them once.
    """

    def __init__(self, *, copies: bool) -> None:
        self._copies = copies
        self._changed = threading.Condition()
        self._under_way: dict[Hashable, Flight] = {}  # guarded by _changed

    def claim(self, keys: Sequence[Hashable], places: Places) -> Flight:
        """Return the flight of a call; ``places`` (n,) are where its keys are read or written."""
        flight = Flight(self, keys, places)
        ours = dict.fromkeys(keys, flight)
        with self._changed:
            is_alone = not self._under_way or self._under_way.keys().isdisjoint(ours)
            if is_alone and len(ours) == len(keys):
                self._under_way |= ours
            else:
                self._claim_each(flight)
        return flight

    def land(self, flight: Flight, rows: Sequence[int], outcomes: Sequence[Outcome]) -> None:
        """See ``Flight.land``."""
        with self._changed:
            if len(rows) == len(self._under_way):  # as a single call's are
                self._under_way.clear()
            else:
                for row in rows:
                    del self._under_way[flight.keys[row]]  # from here on nobody follows it
        if self._copies and flight.followers:
            for row, outcome in zip(rows, outcomes, strict=True):
                if outcome is Outcome.OK:
                    for follower in flight.followers.get(row, ()):
                        follower.fill_from(flight.places[row])
        with self._changed:
            if isinstance(rows, range):
                flight.outcomes[rows.start : rows.stop] = outcomes
            else:
                for row, outcome in zip(rows, outcomes, strict=True):
                    flight.outcomes[row] = outcome
            self._changed.notify_all()

    def wait(self, flight: Flight, row: int, place: Place, timeout_s: float) -> Outcome:
        """Return the outcome of a row that ``place`` follows, once its flight has landed it.

        Where that takes too long the place is withdrawn, so that nothing is copied to it later. A
        row that is being landed is waited for: only a copy in memory is left to do.
        """
        with self._changed:
            self._changed.wait_for(lambda: flight.outcomes[row] is not None, max(0.0, timeout_s))
            if self._under_way.get(flight.keys[row]) is flight:
                flight.followers[row].remove(place)
                return Outcome.FAILED
            self._changed.wait_for(lambda: flight.outcomes[row] is not None)
        outcome = flight.outcomes[row]
        assert outcome is not None
        return outcome

    def _claim_each(self, flight: Flight) -> None:
        """Lead or follow key by key; holds the lock."""
        led: list[int] = []
        for row, key in enumerate(flight.keys):
            leader = self._under_way.setdefault(key, flight)
            at = leader.row_of(key)
            if leader is flight and at == row:
                led.append(row)
            else:
                leader.followers.setdefault(at, []).append(flight.places[row])
                flight.followed.append((row, leader, at))
        flight.led = led
