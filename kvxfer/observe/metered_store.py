# SPDX-License-Identifier: Apache-2.0
"""A store whose calls are counted."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kvxfer.observe.definitions import series_name
from kvxfer.observe.meter import Meter
from kvxfer.stores import Outcome, Store, StoreStats
from kvxfer.stores.base import StoredValue
from kvxfer.stores.parts import Parts, TransferMode

logger = logging.getLogger(__name__)
_now = time.perf_counter

STATS_INTERVAL_S = 10.0
"""Between two looks at the store's own statistics, which may ask a master over the network."""

_CALL_SECONDS = {
    act: series_name("store_call_seconds", act) for act in ("exists", "get", "put", "remove")
}
_EXISTS_SECONDS = _CALL_SECONDS["exists"]
_FOUND = series_name("store_keys", "exists", "found")
_MISSING = series_name("store_keys", "exists", "missing")
_KEYS = {
    act: {each: series_name("store_keys", act, each.name.lower()) for each in Outcome}
    for act in ("get", "put")
}
_BYTES = {act: series_name("store_bytes", act) for act in ("get", "put")}
_COUNTED_HERE = {f"{act}_{outcome.name.lower()}" for act in ("get", "put") for outcome in Outcome}
_COUNTED_HERE |= {"exists_found", "exists_missing", "removed"}


class MeteredStore(Store):
    """Passes every call on, and notes in a ``Meter`` how long it took and how its keys fared.

    The store's own statistics are looked at after a put, every 10 s at most, by the thread that
    put: what changes them in earnest is a put. Statistics that cannot be read are logged, once.
    """

    def __init__(self, store: Store, meter: Meter) -> None:
        self._store, self._meter = store, meter
        self._lock = threading.Lock()
        self._in_flight = {"get": 0, "put": 0}  # guarded by _lock
        self._told: dict[str, int] = {}  # guarded by _lock
        self._complained = False
        self._on_lost: Callable[[Sequence[bytes]], None] | None = None
        self._next_stats_s = 0.0
        self.last_stats: StoreStats | None = None
        """What the store said of itself last; None before the first put and where it failed."""

    def in_flight_bytes(self, act: str) -> int:
        """Return the bytes of values in calls of ``get`` or ``put`` that have not returned."""
        return self._in_flight[act]

    def register(self, buffer: memoryview) -> None:
        """Pass on."""
        self._store.register(buffer)

    def watch_losses(self, on_lost: Callable[[Sequence[bytes]], None]) -> None:
        """Have ``on_lost`` told of keys whose values are gone, as far as a call here shows it.

        Evicted by a put, removed, or missed or found useless by a get.
        """
        self._on_lost = on_lost
        self._store.watch_evictions(on_lost)

    def watch_evictions(self, on_evicted: Callable[[Sequence[bytes]], None]) -> None:
        """Pass on."""
        self._store.watch_evictions(on_evicted)

    def exists(self, keys: Sequence[bytes]) -> bytearray:
        """Pass on; keys that could not be asked for count as missing."""
        begun_s = _now()
        found = self._store.exists(keys)
        seconds, num_found = _now() - begun_s, found.count(1)
        counts = ((_FOUND, num_found), (_MISSING, len(found) - num_found))
        self._meter.note(_EXISTS_SECONDS, seconds, counts)
        return found

    def get_into(self, keys: Sequence[bytes], targets: Sequence[memoryview]) -> list[Outcome]:
        """Pass on."""
        sizes = [target.nbytes for target in targets]
        with self._timed("get", sizes):
            outcomes = self._store.get_into(keys, targets)
        self._note_get(keys, outcomes, sizes)
        return outcomes

    def put_from(self, keys: Sequence[bytes], sources: Sequence[memoryview]) -> list[Outcome]:
        """Pass on; only what was not there yet counts in bytes."""
        sizes = [source.nbytes for source in sources]
        with self._timed("put", sizes):
            outcomes = self._store.put_from(keys, sources)
        self._note_put(outcomes, sizes)
        return outcomes

    @property
    def transfer_mode(self) -> TransferMode:
        """The store's own."""
        return self._store.transfer_mode

    @property
    def most_parts(self) -> int:
        """The store's own."""
        return self._store.most_parts

    def get_parts(self, keys: Sequence[bytes], parts: Parts) -> list[Outcome]:
        """Pass on; counted as ``get_into`` is."""
        sizes = parts.value_bytes().tolist()
        with self._timed("get", sizes):
            outcomes = self._store.get_parts(keys, parts)
        self._note_get(keys, outcomes, sizes)
        return outcomes

    def put_parts(self, keys: Sequence[bytes], parts: Parts) -> list[Outcome]:
        """Pass on; counted as ``put_from`` is."""
        sizes = parts.value_bytes().tolist()
        with self._timed("put", sizes):
            outcomes = self._store.put_parts(keys, parts)
        self._note_put(outcomes, sizes)
        return outcomes

    def remove(self, keys: Sequence[bytes]) -> int:
        """Pass on."""
        begun_s = _now()
        num_removed = self._note_removed(begun_s, self._store.remove(keys))
        if self._on_lost is not None:
            self._on_lost(keys)
        return num_removed

    def remove_prefix(self, prefix: bytes) -> int:
        """Pass on."""
        begun_s = _now()
        return self._note_removed(begun_s, self._store.remove_prefix(prefix))

    def scan(self, prefix: bytes) -> Iterator[StoredValue]:
        """Pass on, uncounted."""
        return self._store.scan(prefix)

    def stats(self) -> StoreStats:
        """Pass on."""
        return self._store.stats()

    def close(self) -> None:
        """Pass on."""
        self._store.close()

    @contextmanager
    def _timed(self, act: str, sizes: Sequence[int]) -> Iterator[None]:
        """Note how long the block takes, raising or not; its values are in flight meanwhile."""
        num_bytes = sum(sizes)
        with self._lock:
            self._in_flight[act] += num_bytes
        begun_s = _now()
        try:
            yield
        finally:
            self._meter.note(_CALL_SECONDS[act], _now() - begun_s)
            with self._lock:
                self._in_flight[act] -= num_bytes

    def _note_get(
        self, keys: Sequence[bytes], outcomes: Sequence[Outcome] | None, sizes: Sequence[int]
    ) -> None:
        self._note_outcomes("get", outcomes, sizes)
        if self._on_lost is not None:
            self._on_lost([k for k, o in zip(keys, outcomes or (), strict=False) if _is_lost(o)])

    def _note_put(self, outcomes: Sequence[Outcome] | None, sizes: Sequence[int]) -> None:
        self._note_outcomes("put", outcomes, sizes)
        if time.monotonic() >= self._next_stats_s:
            self._look_at_stats()

    def _note_outcomes(
        self, act: str, outcomes: Sequence[Outcome] | None, sizes: Sequence[int]
    ) -> None:
        """Count a call's keys by outcome; a store that breaks its word may give too few."""
        counts = [
            (_KEYS[act][Outcome(outcome)], number)
            for outcome, number in Counter(outcomes or ()).items()
        ]
        moved = (size for o, size in zip(outcomes or (), sizes, strict=False) if o == Outcome.OK)
        self._meter.note("", 0.0, [*counts, (_BYTES[act], sum(moved))])

    def _note_removed(self, begun_s: float, num_removed: int) -> int:
        counts = ((series_name("store_keys", "remove", "removed"), num_removed),)
        self._meter.note(_CALL_SECONDS["remove"], _now() - begun_s, counts)
        return num_removed

    def _look_at_stats(self) -> None:
        """Keep the store's statistics, and count what its counters have gained since last time."""
        self._next_stats_s = time.monotonic() + STATS_INTERVAL_S
        try:
            stats = self._store.stats()
        except Exception:
            if not self._complained:
                logger.warning("the store's statistics cannot be read", exc_info=True)
            self._complained = True
            return
        with self._lock:
            self.last_stats = stats
            for event, number in stats.counters.items():
                if event not in _COUNTED_HERE:
                    gained = max(0, number - self._told.get(event, 0))
                    self._meter.note("", 0.0, ((series_name("store_events", event), gained),))
                    self._told[event] = number


def _is_lost(outcome: Outcome) -> bool:
    return outcome == Outcome.MISSING or Outcome(outcome).is_useless
