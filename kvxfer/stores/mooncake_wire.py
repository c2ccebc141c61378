# SPDX-License-Identifier: Apache-2.0
"""How much is on its way at once: batches of bounded size, and turns for loads and saves."""

from __future__ import annotations

import contextlib
import enum
import threading
from collections import deque
from collections.abc import Iterator, Sequence


class Side(enum.IntEnum):
    """Who uses the wire."""

    LOAD = 0
    SAVE = 1

    @property
    def other(self) -> Side:
        """The side to share with."""
        return Side.SAVE if self is Side.LOAD else Side.LOAD


class Wire:
    """Admits segments of native calls, at most ``most_segments`` at once over all threads.

    The TCP transport refuses what comes past about 2,048 outstanding segments per peer; the bound
    holds even where all values lie with one peer. While both sides want the wire, each gets half
    of it at most; a side alone may take all. Calls of a side are admitted in order of arrival.
    """

    def __init__(self, most_segments: int) -> None:
        self._most, self._half = most_segments, max(1, most_segments // 2)
        self._changed = threading.Condition()
        self._used = [0, 0]  # by side; guarded by _changed
        self._waiting: list[deque[object]] = [deque(), deque()]  # by side; guarded by _changed
        self.peak_segments = 0

    @contextlib.contextmanager
    def admit(self, side: Side, num_segments: int, timeout_s: float) -> Iterator[bool]:
        """Hold ``num_segments``, half of the wire at most, once the calls before it are through.

        Yields False, and holds nothing, where that took longer than ``timeout_s``.
        """
        assert num_segments <= self._half
        entered = self._enter(side, num_segments, timeout_s)
        try:
            yield entered
        finally:
            if entered:
                with self._changed:
                    self._used[side] -= num_segments
                    self._changed.notify_all()

    def _enter(self, side: Side, num_segments: int, timeout_s: float) -> bool:
        ticket = object()
        with self._changed:
            self._waiting[side].append(ticket)
            entered = self._changed.wait_for(
                lambda: self._may_enter(side, ticket, num_segments), timeout_s
            )
            self._waiting[side].remove(ticket)
            if entered:
                self._used[side] += num_segments
                self.peak_segments = max(self.peak_segments, sum(self._used))
            self._changed.notify_all()
        return entered

    def _may_enter(self, side: Side, ticket: object, num_segments: int) -> bool:
        if self._waiting[side][0] is not ticket:
            return False
        if sum(self._used) + num_segments > self._most:
            return False
        is_shared = bool(self._used[side.other] or self._waiting[side.other])
        share = self._half if is_shared else self._most
        return self._used[side] + num_segments <= share


def cut(sizes: Sequence[int], most_keys: int, most_bytes: int) -> Iterator[range]:
    """Yield ranges of at most ``most_keys`` entries and ``most_bytes`` bytes; one entry at least.

    ``sizes`` (n,) bytes of each entry. An entry above ``most_bytes`` is a range of its own.
    """
    if 0 < len(sizes) <= most_keys and sum(sizes) <= most_bytes:
        yield range(len(sizes))
        return
    start, total = 0, 0
    for idx, size in enumerate(sizes):
        if idx > start and (idx - start >= most_keys or total + size > most_bytes):
            yield range(start, idx)
            start, total = idx, 0
        total += size
    if start < len(sizes):
        yield range(start, len(sizes))
