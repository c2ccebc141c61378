# SPDX-License-Identifier: Apache-2.0
"""One transfer per key at a time: who asks for a key that is under way shares its outcome."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from kvxfer.stores.base import Outcome
from kvxfer.stores.mooncake_memory import Buffer


@dataclass(slots=True, eq=False)
class Flight:
    """A transfer under way: its leader moves the bytes, its followers wait for the outcome."""

    key: Hashable
    landing: Buffer
    followers: list[Buffer] | None = None
    outcome: Outcome | None = None
    """None until it has landed."""


Placed = tuple[int, Flight]
"""A flight, and its position among the keys of a claim."""


class Flights:
    """The transfers of one act in this process; ``claim``, ``land`` what is led, then ``wait``.

    A claim leads what nobody else leads and follows the rest. Whoever leads lands everything
    before it waits for anybody, so no two calls wait for each other. Followers of a load get a
    copy of the bytes: the wire carries them once.
    """

    def __init__(self, *, copies: bool) -> None:
        self._copies = copies
        self._changed = threading.Condition()
        self._under_way: dict[Hashable, Flight] = {}  # guarded by _changed

    def claim(
        self, keys: Iterable[Hashable], landings: Sequence[Buffer]
    ) -> tuple[list[Placed], list[Placed]]:
        """Return the flights to lead and those to follow, each with its position."""
        led, followed = [], []
        with self._changed:
            for idx, (key, landing) in enumerate(zip(keys, landings, strict=True)):
                flight = self._under_way.get(key)
                if flight is None:
                    flight = self._under_way[key] = Flight(key, landing)
                    led.append((idx, flight))
                else:
                    flight.followers = [*(flight.followers or ()), landing]
                    followed.append((idx, flight))
        return led, followed

    def land(self, flights: Iterable[Flight], outcomes: Iterable[Outcome]) -> None:
        """End flights: followers get the outcome and, of a load that is OK, the bytes.

        A flight that has landed before keeps its outcome.
        """
        pairs = zip(flights, outcomes, strict=False)  # outcomes may repeat one for ever
        landing = [(flight, outcome) for flight, outcome in pairs if flight.outcome is None]
        with self._changed:
            for flight, _ in landing:
                del self._under_way[flight.key]  # from here on nobody follows it
        for flight, outcome in landing:
            if flight.followers and self._copies and outcome is Outcome.OK:
                for follower in flight.followers:
                    copy_bytes(follower.ptr, flight.landing.ptr, follower.num_bytes)
        with self._changed:
            for flight, outcome in landing:
                flight.outcome = outcome
            self._changed.notify_all()

    def wait(self, flight: Flight) -> Outcome:
        """Return the outcome of a flight, once its leader has landed it."""
        if flight.outcome is None:
            with self._changed:
                self._changed.wait_for(lambda: flight.outcome is not None)
        assert flight.outcome is not None
        return flight.outcome


def copy_bytes(target_ptr: int, source_ptr: int, num_bytes: int) -> None:
    """Copy between two buffers that the caller keeps alive, without the GIL."""
    ctypes.memmove(target_ptr, source_ptr, num_bytes)
