# SPDX-License-Identifier: Apache-2.0
"""Changes of an LMDB store: puts with the evictions they need, and removals."""

from __future__ import annotations

import errno
import time
from collections.abc import Sequence, Set
from typing import Any

import lmdb

from kvxfer.errors import StoreError
from kvxfer.stores.base import Outcome
from kvxfer.stores.lmdb_calls import Call
from kvxfer.stores.lmdb_ledger import Batch, Counters, Item, Ledger, Row, Sweep
from kvxfer.stores.lmdb_locks import Gate
from kvxfer.stores.lmdb_space import write_zeros
from kvxfer.stores.lmdb_uses import UseTable

LARGEST_VALUE_SHARE = 8
"""A value costs an eighth of the limit at most: runs of free pages that long can be had."""
MOST_FRUITLESS_SWEEPS = 8
MOST_TRIES = 4
"""Of one put that meets MAP_FULL, each after evicting twice as much as before."""
RETRY_PAUSE_S = 0.005
"""Before the second try, then four times as long each: 105 ms for a reader to end its copy."""
ROWS_PER_REMOVAL = 4096
WARM_BYTES = 8 << 20
"""Written ahead at a time, at least."""


class Writer:
    """Makes every change in short write transactions, inside the gate, one chunk at a time.

    A chunk (``chunk_bytes``) bounds how long others wait and how much a transaction can lose.
    Pages that one transaction frees serve the next but one, so room is made in a transaction of
    its own and the limit leaves a share of the file free.
    """

    def __init__(
        self,
        env: Any,
        ledger: Ledger,
        uses: UseTable,
        gate: Gate,
        *,
        chunk_bytes: int,
        file_bytes: int,
        warm_fd: int | None,
    ) -> None:
        self._env = env
        self._ledger = ledger
        self._uses = uses
        self._gate = gate
        self._chunk_bytes = chunk_bytes
        self._file_bytes = file_bytes
        self._warm_fd = warm_fd
        self._page_bytes = int(env.stat()["psize"])

    def put(
        self,
        keys: Sequence[bytes],
        sources: Sequence[memoryview],
        deadline: float,
        call: Call,
    ) -> list[Outcome]:
        """Store values under keys, in order; ``OK``, ``EXISTS``, ``NO_SPACE`` or ``FAILED`` each.

        Gives up waiting for other writers at ``deadline``. ``call`` learns why keys failed, and
        counts ``evicted`` and ``map_full``.
        """
        batch = Batch()
        outcomes: list[Outcome] = []
        while len(outcomes) < len(keys):
            chunk = self._next_chunk(keys, sources, len(outcomes))
            with self._gate.entered(deadline) as inside:
                if not inside:
                    call.complain("other writers held it for too long")
                    return outcomes + [Outcome.FAILED] * (len(keys) - len(outcomes))
                outcomes += self._put_or_fail(chunk, batch, call)
            if batch.is_refused:
                return outcomes + [Outcome.NO_SPACE] * (len(keys) - len(outcomes))
        return outcomes

    def remove(self, keys: Set[bytes], timeout_s: float, call: Call) -> int:
        """Remove the keys; those that moved to another rank meanwhile stay. Return how many went.

        ``StoreError`` where that took more than ``timeout_s``: nothing was removed then.
        """
        deadline = time.monotonic() + timeout_s
        rows = self._find_rows(keys, deadline)
        if not rows:
            return 0
        with self._gate.entered(deadline) as inside:
            if not inside:
                raise StoreError(f"other writers held the store for {timeout_s} s")
            num_removed = self._remove_rows(rows)
        call.counts["removed"] += num_removed
        return num_removed

    def remove_prefix(self, prefix: bytes, timeout_s: float, call: Call) -> int:
        """Remove the keys under ``prefix`` that were there before the call; return how many.

        Goes through the rows of ``order`` slice by slice. Rows move only to higher ranks, ahead
        of it. ``StoreError`` where other writers keep the gate for ``timeout_s``.
        """
        num_removed = 0
        rank: bytes | None = b""
        while rank is not None:
            with self._gate.entered(time.monotonic() + timeout_s) as inside:
                if not inside:
                    raise StoreError(f"other writers held the store for {timeout_s} s")
                num, rank = self._remove_slice_or_less(prefix, rank, call)
            num_removed += num
            call.counts["removed"] += num
        return num_removed

    def _remove_rows(self, rows: Sequence[Row]) -> int:
        """Remove rows that were read before, as far as they are still what they were."""
        with self._env.begin(write=True) as txn:
            counters = Counters.load(txn, self._ledger.tables)
            num_removed = sum(self._ledger.remove_if_there(txn, counters, row) for row in rows)
            counters.save(txn, self._ledger.tables)
        return num_removed

    def _find_rows(self, keys: Set[bytes], deadline: float) -> list[Row]:
        """Return the rows of the keys, read without the gate, slice by slice."""
        found: list[Row] = []
        rank = b""
        while len(found) < len(keys):
            if time.monotonic() > deadline:
                raise StoreError("looking for the rows of values took too long")
            with self._env.begin() as txn:
                rows = self._ledger.rows_after(txn, rank, ROWS_PER_REMOVAL)
            if not rows:
                break
            found += [row for row in rows if row.key in keys]
            rank = rows[-1].rank
        return found

    def _next_chunk(
        self, keys: Sequence[bytes], sources: Sequence[memoryview], start: int
    ) -> list[Item]:
        """Return the pairs from ``start`` on that fit a chunk, one at least."""
        chunk: list[Item] = []
        chunk_bytes = 0
        for idx in range(start, len(keys)):
            item = Item(keys[idx], sources[idx], self._cost_bytes(keys[idx], sources[idx]))
            chunk_bytes += item.cost_bytes
            if chunk and chunk_bytes > self._chunk_bytes:
                break
            chunk.append(item)
        return chunk

    def _cost_bytes(self, key: bytes, source: memoryview) -> int:
        return self._ledger.cost_bytes(len(key), source.nbytes)

    def _put_or_fail(self, chunk: list[Item], batch: Batch, call: Call) -> list[Outcome]:
        """Put a chunk's first keys, one at least, and return their outcomes.

        Marks the batch as refused once there is no space: what is left of it is not tried, as it
        is of little use without this part, and would search the full store again and again.
        """
        try:
            return self._put_chunk(chunk, batch, call)
        except (lmdb.Error, OSError) as error:
            call.complain("a put failed", error)
            full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
            return [Outcome.NO_SPACE if full else Outcome.FAILED] * len(chunk)

    def _put_chunk(self, chunk: list[Item], batch: Batch, call: Call) -> list[Outcome]:
        """Make room and insert; on MAP_FULL go on with the first key alone and make more room.

        MAP_FULL under the limit means that no run of free pages is long enough, or that a reader
        keeps freed pages from being reused; one that died is cleared away.
        """
        for retry in range(MOST_TRIES):
            need_bytes = sum(item.cost_bytes for item in chunk if self._can_ever_fit(item))
            try:
                if retry:
                    time.sleep(RETRY_PAUSE_S * 4 ** (retry - 1))
                    self._make_room(need_bytes, need_bytes << retry, batch, call)
                    self._settle()
                else:
                    self._make_room(need_bytes, 0, batch, call)
                return self._insert(chunk, need_bytes, batch)
            except lmdb.MapFullError:
                call.counts["map_full"] += 1
                self._env.reader_check()
                chunk = chunk[:1]
        batch.is_refused = True
        return [Outcome.NO_SPACE]

    def _make_room(self, need_bytes: int, extra_bytes: int, batch: Batch, call: Call) -> None:
        """Evict until ``need_bytes`` fit under the limit, and ``extra_bytes`` in any case.

        Falls short where too much is leased. A sweep looks at a bounded number of rows, evicts a
        bounded number of bytes, and moves what it could not evict to higher ranks, so that the
        next one looks at others.
        """
        sweeps_left = MOST_FRUITLESS_SWEEPS
        while sweeps_left:
            with self._env.begin() as txn:
                used_bytes = Counters.load(txn, self._ledger.tables).used_bytes
            excess_bytes = max(used_bytes + need_bytes - self._ledger.limit_bytes, extra_bytes)
            if excess_bytes <= 0:
                return
            with self._uses.evicting():
                sweep = self._sweep(min(excess_bytes, 2 * self._chunk_bytes), batch)
            if not sweep.victims and not sweep.moves:
                return
            sweeps_left -= not sweep.victims
            call.counts["evicted"] += len(sweep.victims)
            call.evicted += [row.key for row in sweep.victims]
            extra_bytes -= sum(row.cost_bytes for row in sweep.victims)

    def _sweep(self, excess_bytes: int, batch: Batch) -> Sweep:
        with self._env.begin(write=True) as txn:
            counters = Counters.load(txn, self._ledger.tables)
            self._ledger.check(txn, counters, self._file_bytes)
            self._ledger.begin_batch(counters, batch)
            sweep = self._ledger.choose(txn, counters, excess_bytes, batch, time.monotonic())
            self._ledger.apply(txn, counters, sweep)
            counters.save(txn, self._ledger.tables)
        return sweep

    def _settle(self) -> None:
        """Commit a transaction, after which the pages that the last one freed can be reused."""
        with self._env.begin(write=True) as txn:
            Counters.load(txn, self._ledger.tables).save(txn, self._ledger.tables)

    def _insert(self, chunk: list[Item], need_bytes: int, batch: Batch) -> list[Outcome]:
        self._warm(need_bytes)
        with self._env.begin(write=True) as txn:
            counters = Counters.load(txn, self._ledger.tables)
            self._ledger.begin_batch(counters, batch)
            outcomes = [self._insert_one(txn, counters, batch, item) for item in chunk]
            counters.save(txn, self._ledger.tables)
        return outcomes

    def _insert_one(self, txn: Any, counters: Counters, batch: Batch, item: Item) -> Outcome:
        can_fit = self._can_ever_fit(item)
        fits = counters.used_bytes + item.cost_bytes <= self._ledger.limit_bytes
        if not can_fit or not fits:
            batch.is_refused = batch.is_refused or can_fit
            is_there = txn.cursor(db=self._ledger.tables.values).set_key(item.key)
            return Outcome.EXISTS if is_there else Outcome.NO_SPACE
        added = self._ledger.insert(txn, counters, batch, item)
        return Outcome.OK if added else Outcome.EXISTS

    def _can_ever_fit(self, item: Item) -> bool:
        return item.cost_bytes <= self._ledger.limit_bytes // LARGEST_VALUE_SHARE

    def _remove_slice_or_less(
        self, prefix: bytes, rank: bytes, call: Call
    ) -> tuple[int, bytes | None]:
        """Remove a slice, a smaller one each time that LMDB finds no page for its own trees.

        A removal copies the pages it changes before it frees any; readers may still use those
        that earlier ones freed. ``lmdb.MapFullError`` where the last try fails too.
        """
        for retry in range(MOST_TRIES - 1):
            try:
                return self._remove_slice(prefix, rank, self._chunk_bytes >> 4 * retry)
            except lmdb.MapFullError:
                call.counts["map_full"] += 1
                self._env.reader_check()
                time.sleep(RETRY_PAUSE_S * 4**retry)
        return self._remove_slice(prefix, rank, 0)

    def _remove_slice(
        self, prefix: bytes, rank: bytes, slice_bytes: int
    ) -> tuple[int, bytes | None]:
        """Remove about ``slice_bytes`` above ``rank``; return how many and where to go on."""
        num_removed = removed_bytes = 0
        with self._env.begin(write=True) as txn:
            counters = Counters.load(txn, self._ledger.tables)
            rows = self._ledger.rows_after(txn, rank, ROWS_PER_REMOVAL)
            for row in rows:
                if removed_bytes > slice_bytes:
                    break
                rank = row.rank
                if row.key.startswith(prefix):
                    self._ledger.remove(txn, counters, row)
                    removed_bytes += row.cost_bytes
                    num_removed += 1
            counters.save(txn, self._ledger.tables)
        return num_removed, rank if rows else None

    def _warm(self, need_bytes: int) -> None:
        """Write zeros over pages that LMDB will use for the first time soon; OSError if it cannot.

        The first store to an allocated but unwritten page through the map costs ext4 8 us: 0.5
        GB/s. After a plain write of the same pages it is 7 GB/s (bench_stores, 5.9 for that write).
        And a disk that is full after all, as where blocks are shared or compressed, shows here and
        not as a SIGBUS. No snapshot uses pages beyond the last one in use.
        """
        if self._warm_fd is None:
            return
        used_end = (int(self._env.info()["last_pgno"]) + 1) * self._page_bytes
        soon = min(used_end + 2 * need_bytes, self._file_bytes)
        start = max(used_end, self._uses.warmed_bytes)
        if start < soon:
            end = min(max(soon, start + WARM_BYTES), self._file_bytes)
            write_zeros(self._warm_fd, start, end)
            self._uses.warmed_bytes = end
