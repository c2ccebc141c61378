# SPDX-License-Identifier: Apache-2.0
"""The embedded store: an LMDB file that all processes of a host share."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

from kvxfer.errors import StoreError
from kvxfer.stores.arguments import byte_view, byte_views, check_keys, check_prefix
from kvxfer.stores.base import Outcome, Store, StoredValue, StoreStats
from kvxfer.stores.lmdb_calls import BACKEND_ERRORS, Call
from kvxfer.stores.lmdb_handle import Handle, Reference
from kvxfer.stores.lmdb_ledger import Row
from kvxfer.stores.lmdb_options import LmdbOptions
from kvxfer.stores.uri import StoreUri

SCAN_ROWS = 4096
"""Of one read transaction of a scan, 2 ms: an open one keeps freed pages from being reused."""


class LmdbStore(Store):
    """A store in one folder of this host, for any number of threads and processes.

    Values survive every process, however it ends: a value is there whole or not at all. They
    survive a restart of the host only where the last process closed the store in order. The
    folder holds one file of ``capacity`` bytes, allocated when the store is made, so that a full
    disk is an error then and no crash later; values may take 85 % of it. When that is full, what
    was not used for the longest time leaves; of a put call's keys the last one first; nothing
    that ``exists`` reported within ``lease_s``. If nothing may leave, a put is ``NO_SPACE``.

    The capacity is the store's: the process that opens it while no other has it open sets it. A
    larger one grows the file if the disk allows; a smaller one lowers the limit and leaves the
    file. A value that costs more than an eighth of the limit is ``NO_SPACE`` at once.

    All calls are bounded in time: reads wait for nobody, a put for ``timeout_s`` at most until
    the writers before it are done. Stores of one folder in one process share one environment and
    its counters. A forked child opens its own at its first call. After ``close``, calls in flight
    in other threads end normally.
    """

    def __init__(self, options: LmdbOptions) -> None:
        self._options = options
        self._reference = Reference(options)
        self._closed = False
        self._last_stats = StoreStats(0, 0, 0, {})
        self._on_evicted: Callable[[Sequence[bytes]], None] | None = None

    @classmethod
    def open(cls, uri: StoreUri) -> LmdbStore:
        """Open the store of an ``lmdb://`` URI; see ``LmdbOptions.from_uri``."""
        return cls(LmdbOptions.from_uri(uri))

    def register(self, buffer: memoryview) -> None:
        """Accept a buffer; LMDB copies from and to any memory."""
        byte_view(buffer, "buffer", writable=False)

    def watch_evictions(self, on_evicted: Callable[[Sequence[bytes]], None]) -> None:
        """Tell of the keys that puts through this object evict, whatever puts fail with."""
        self._on_evicted = on_evicted

    def exists(self, keys: Sequence[bytes]) -> bytearray:
        """Return which keys are stored and lease those; one read transaction, no write."""
        check_keys(keys)
        with self._call() as (handle, call):
            if handle is None or not keys:
                return bytearray(len(keys))
            try:
                found = handle.reader.exists(keys, self._options.lease_s)
            except BACKEND_ERRORS as error:
                call.complain("a lookup failed", error)
                call.counts["exists_failed"] += len(keys)
                return bytearray(len(keys))
            num_found = found.count(1)
            call.counts["exists_found"] += num_found
            call.counts["exists_missing"] += len(keys) - num_found
            return found

    def get_into(self, keys: Sequence[bytes], targets: Sequence[memoryview]) -> list[Outcome]:
        """Copy values out of the map, without the GIL, 32 MiB or less per transaction."""
        check_keys(keys)
        views = byte_views(targets, "targets", len(keys), writable=True)
        with self._call() as (handle, call):
            if handle is None:
                return self._refuse(keys)
            outcomes: list[Outcome] = []
            try:
                handle.reader.get_into(keys, views, outcomes)
            except BACKEND_ERRORS as error:
                call.complain("a get failed", error)
                outcomes += [Outcome.FAILED] * (len(keys) - len(outcomes))
            call.count_outcomes("get", outcomes)
            return outcomes

    def put_from(self, keys: Sequence[bytes], sources: Sequence[memoryview]) -> list[Outcome]:
        """Copy values into the map; keys that are there are answered from a read transaction."""
        check_keys(keys)
        views = byte_views(sources, "sources", len(keys), writable=False)
        with self._call() as (handle, call):
            if handle is None:
                return self._refuse(keys)
            try:
                outcomes = self._put(handle, call, keys, views)
            except BACKEND_ERRORS as error:
                call.complain("a put failed", error)
                outcomes = [Outcome.FAILED] * len(keys)
            call.count_outcomes("put", outcomes)
            if self._on_evicted is not None and call.evicted:
                self._on_evicted(call.evicted)
            return outcomes

    def remove(self, keys: Sequence[bytes]) -> int:
        """Remove values by key; finding those that are there takes 0.1 s for 100,000 values."""
        check_keys(keys)
        with self._call() as (handle, call):
            if handle is None:
                return 0
            try:
                found = handle.reader.present(keys)
                there = {key for key, is_there in zip(keys, found, strict=True) if is_there}
                return handle.writer.remove(there, self._options.timeout_s, call)
            except BACKEND_ERRORS as error:
                call.complain("a removal failed", error)
                return 0

    def remove_prefix(self, prefix: bytes) -> int:
        """Remove every key under ``prefix``; ``StoreError`` where some may be left."""
        check_prefix(prefix)
        with self._call() as (handle, call):
            if handle is None:
                return 0
            try:
                return handle.writer.remove_prefix(prefix, self._options.timeout_s, call)
            except BACKEND_ERRORS as error:
                call.complain("a removal failed", error)
                raise StoreError(f"prefix {prefix!r} may be removed in part: {error}") from error

    def scan(self, prefix: bytes) -> Iterator[StoredValue]:
        """Yield from the books, some thousand rows at a time; no value is read."""
        check_prefix(prefix)
        rank = b""
        while rows := self._rows_after(rank):
            rank = rows[-1].rank
            for row in rows:
                if row.key.startswith(prefix):
                    yield StoredValue(row.key, row.cost_bytes)

    def stats(self) -> StoreStats:
        """Return occupancy and this process's counters; after ``close`` the last ones."""
        with self._call() as (handle, call):
            if handle is None:
                return self._last_stats
            try:
                num_values, used_bytes = handle.reader.count()
            except BACKEND_ERRORS as error:
                call.complain("counting failed", error)
                num_values = used_bytes = 0
            return StoreStats(
                num_values, used_bytes, handle.capacity_bytes, handle.snapshot_counters()
            )

    def close(self) -> None:
        """Release the folder; the last one on the host syncs the file, within seconds or not."""
        if not self._closed:
            self._last_stats = self.stats()
            self._closed = True
            self._reference.release()

    @contextlib.contextmanager
    def _call(self) -> Iterator[tuple[Handle | None, Call]]:
        """Begin a call; without a handle where the store is closed or could not be reopened."""
        handle = None if self._closed else self._reference.handle()
        if handle is None:
            yield None, Call(self._options.folder)
            return
        with handle.call() as call:
            yield (handle, call) if call is not None else (None, Call(self._options.folder))

    def _put(
        self, handle: Handle, call: Call, keys: Sequence[bytes], sources: Sequence[memoryview]
    ) -> list[Outcome]:
        absent = [idx for idx, found in enumerate(handle.reader.present(keys)) if not found]
        outcomes = [Outcome.EXISTS] * len(keys)
        deadline = time.monotonic() + self._options.timeout_s
        added = handle.writer.put(
            [keys[idx] for idx in absent], [sources[idx] for idx in absent], deadline, call
        )
        for idx, outcome in zip(absent, added, strict=True):
            outcomes[idx] = outcome
        return outcomes

    def _rows_after(self, rank: bytes) -> list[Row]:
        with self._call() as (handle, call):
            if handle is None:
                return []
            try:
                return handle.reader.rows_after(rank, SCAN_ROWS)
            except BACKEND_ERRORS as error:
                call.complain("a scan failed", error)
                raise StoreError(f"store {self._options.folder} cannot be read: {error}") from error

    def _refuse(self, keys: Sequence[bytes]) -> list[Outcome]:
        return [Outcome.CLOSED if self._closed else Outcome.FAILED] * len(keys)
