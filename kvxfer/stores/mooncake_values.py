# SPDX-License-Identifier: Apache-2.0
"""The values of one call on a Mooncake store, cut and picked on their way to native calls."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvxfer.stores.base import Outcome
from kvxfer.stores.mooncake_flights import Flight
from kvxfer.stores.mooncake_memory import Buffers, ScatteredBuffers


@dataclass(frozen=True, slots=True)
class Values:
    """Values of one call that travel together, column by column, each (n,); rows of a flight.

    ``ptrs`` and ``shapes`` are the addresses and the sizes, of all parts of a value where there
    are several; ``sizes`` are those of the values.
    """

    flight: Flight
    rows: Sequence[int]
    names: Sequence[str]
    ptrs: Sequence[Any]
    shapes: Sequence[Any]
    sizes: Sequence[int]

    @classmethod
    def led_by(
        cls, flight: Flight, names: Sequence[str], buffers: Buffers | ScatteredBuffers
    ) -> Values:
        """Return what the flight leads; ``names`` and ``buffers`` are of all its rows."""
        values = cls(flight, range(len(names)), names, buffers.ptrs, buffers.shapes, buffers.sizes)
        return values if len(flight.led) == len(names) else values.pick(flight.led)

    @property
    def are_scattered(self) -> bool:
        """Whether the values have parts."""
        return self.shapes is not self.sizes

    @property
    def num_segments(self) -> int:
        """Segments that the transport moves."""
        return sum(map(len, self.shapes)) if self.are_scattered else len(self)

    def __len__(self) -> int:
        """Return how many."""
        return len(self.names)

    def part(self, places: range) -> Values:
        """Return those from one place to another."""
        if len(places) == len(self):
            return self
        return self._of(operator.itemgetter(slice(places.start, places.stop)))

    def pick(self, places: Sequence[int]) -> Values:
        """Return those at some places."""
        return self._of(lambda column: [column[place] for place in places])

    def land(self, outcomes: Sequence[Outcome]) -> None:
        """Tell how they fared."""
        self.flight.land(self.rows, outcomes)

    def _of(self, choose: Callable[[Sequence[Any]], Any]) -> Values:
        sizes = choose(self.sizes)
        shapes = choose(self.shapes) if self.are_scattered else sizes
        rows, names, ptrs = map(choose, (self.rows, self.names, self.ptrs))
        return Values(self.flight, rows, names, ptrs, shapes, sizes)


def without_equal_names(values: Values) -> Iterator[Values]:
    """Yield the values in lists of different names: a native get mixes up equal ones."""
    while len(set(values.names)) < len(values):
        firsts = {name: place for place, name in reversed(list(enumerate(values.names)))}.values()
        yield values.pick(sorted(firsts))
        values = values.pick(sorted(set(range(len(values))) - set(firsts)))
    yield values
