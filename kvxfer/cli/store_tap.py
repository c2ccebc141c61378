# SPDX-License-Identifier: Apache-2.0
"""A tap between an engine and its store: counts what passes, and can damage what is put."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import kvxfer.stores
from kvxfer.stores.base import Outcome, Store, StoredValue, StoreStats


@dataclass(slots=True)
class Meter:
    """Values and bytes that moved one way, and the seconds spent in the store's calls.

    Calls of two threads at once count twice in ``seconds``: the rate is that of one thread.
    """

    num_values: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, moved: Sequence[memoryview], seconds: float) -> None:
        """Count one call that moved the given values."""
        with self._lock:
            self.num_values += len(moved)
            self.num_bytes += sum(value.nbytes for value in moved)
            self.seconds += seconds


class TappedStore(Store):
    """Passes every call on to ``store``.

    ``puts`` and ``gets`` meter what really moved (outcome ``OK``). With ``corrupt``, each value
    is stored with its halves exchanged: the right size, finite numbers, the wrong cache. Values
    pass packed, whatever the store takes: in parts they could be neither counted nor damaged here.
    """

    def __init__(self, store: Store, corrupt: bool = False) -> None:
        self.puts = Meter()
        self.gets = Meter()
        self._store = store
        self._corrupt = corrupt

    def register(self, buffer: memoryview) -> None:
        """Pass on."""
        self._store.register(buffer)

    def watch_evictions(self, on_evicted: Callable[[Sequence[bytes]], None]) -> None:
        """Pass on."""
        self._store.watch_evictions(on_evicted)

    def exists(self, keys: Sequence[bytes]) -> bytearray:
        """Pass on."""
        return self._store.exists(keys)

    def get_into(self, keys: Sequence[bytes], targets: Sequence[memoryview]) -> list[Outcome]:
        """Pass on and count what arrived."""
        started = time.perf_counter()
        outcomes = self._store.get_into(keys, targets)
        self.gets.add(_moved(targets, outcomes), time.perf_counter() - started)
        return outcomes

    def put_from(self, keys: Sequence[bytes], sources: Sequence[memoryview]) -> list[Outcome]:
        """Pass on, damaged where asked for, and count what was stored."""
        if self._corrupt:
            sources = [halves_exchanged(source) for source in sources]
        started = time.perf_counter()
        outcomes = self._store.put_from(keys, sources)
        self.puts.add(_moved(sources, outcomes), time.perf_counter() - started)
        return outcomes

    def remove(self, keys: Sequence[bytes]) -> int:
        """Pass on."""
        return self._store.remove(keys)

    def remove_prefix(self, prefix: bytes) -> int:
        """Pass on."""
        return self._store.remove_prefix(prefix)

    def scan(self, prefix: bytes) -> Iterator[StoredValue]:
        """Pass on."""
        return self._store.scan(prefix)

    def stats(self) -> StoreStats:
        """Pass on."""
        return self._store.stats()

    def close(self) -> None:
        """Pass on."""
        self._store.close()


def tap_open_store(corrupt: bool) -> list[TappedStore]:
    """Make ``kvxfer.stores.open_store`` return tapped stores; return the list they appear in.

    Call it before :mod:`kvxfer.worker` is imported. It lasts for the life of the process.
    """
    taps: list[TappedStore] = []
    original: Callable[..., Store] = kvxfer.stores.open_store

    def open_tapped(*args: object, **kwargs: object) -> Store:
        taps.append(TappedStore(original(*args, **kwargs), corrupt))
        return taps[-1]

    kvxfer.stores.open_store = open_tapped
    return taps


def halves_exchanged(value: memoryview) -> memoryview:
    """Return a damaged copy of ``value``, of the same size."""
    flat = value.cast("B")
    half = flat.nbytes // 2
    return memoryview(bytes(flat[half:]) + bytes(flat[:half]))


def _moved(values: Sequence[memoryview], outcomes: Sequence[Outcome]) -> list[memoryview]:
    return [v for v, outcome in zip(values, outcomes, strict=True) if outcome is Outcome.OK]
