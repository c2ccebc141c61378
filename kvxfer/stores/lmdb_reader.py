# SPDX-License-Identifier: Apache-2.0
"""Reads of an LMDB store: which keys are there, and copies of their values."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import lmdb
import numpy as np

from kvxfer.stores.base import Outcome
from kvxfer.stores.lmdb_ledger import Counters, Row, Tables, read_rows
from kvxfer.stores.lmdb_locks import Gate
from kvxfer.stores.lmdb_uses import UseTable

CONFIRM_TIMEOUT_S = 0.05
"""Evictions take milliseconds; one that takes longer has died or is stopped."""
CONFIRM_PAUSE_S = 0.000_2


class Reader:
    """Answers from snapshots; waits for no writer, and holds no transaction between calls.

    (LMDB locks its table of readers for the instant in which a transaction begins.)

    An open read transaction keeps every page that its snapshot uses from being reused, so one
    transaction copies ``chunk_bytes`` at most. ``lmdb.Error`` where LMDB fails.
    """

    def __init__(
        self, env: Any, tables: Tables, uses: UseTable, gate: Gate, chunk_bytes: int
    ) -> None:
        self._env = env
        self._tables = tables
        self._uses = uses
        self._gate = gate
        self._chunk_bytes = chunk_bytes

    def exists(self, keys: Sequence[bytes], lease_s: float) -> bytearray:
        """Return 1 for each key that is there, leased from now on, and 0 for the others.

        Looks again while an eviction is going on, since it may have passed a key before the lease.
        """
        slots = self._uses.slots(keys)
        deadline = time.monotonic() + CONFIRM_TIMEOUT_S
        while True:
            epoch = self._uses.epoch
            found, generation = self._look(keys)
            held = slots[np.frombuffer(found, np.bool_)]
            self._uses.note_use(held, generation)
            self._uses.lease(held, time.monotonic() + lease_s)
            if epoch == self._uses.epoch and not epoch & 1:
                return found
            if time.monotonic() > deadline:
                self._mend_epoch()
                return found
            time.sleep(CONFIRM_PAUSE_S)

    def present(self, keys: Sequence[bytes]) -> bytearray:
        """Return the same without a lease: the keys that are there count as used."""
        found, generation = self._look(keys)
        slots = self._uses.slots(keys)[np.frombuffer(found, np.bool_)]
        self._uses.note_use(slots, generation)
        return found

    def get_into(
        self, keys: Sequence[bytes], targets: Sequence[memoryview], outcomes: list[Outcome]
    ) -> None:
        """Copy values into byte targets of the same size, untouched unless ``OK``.

        Outcomes are appended as they come: where this raises, the other targets are untouched.
        """
        while len(outcomes) < len(keys):
            with self._snapshot() as txn:
                generation = Counters.load(txn, self._tables).generation
                start = len(outcomes)
                self._copy_chunk(txn, keys, targets, outcomes)
            self._note_copied(keys[start : len(outcomes)], outcomes[start:], generation)

    def count(self) -> tuple[int, int]:
        """Return the number of values and what they cost in bytes."""
        with self._snapshot() as txn:
            num_values = txn.stat(self._tables.values)["entries"]
            return int(num_values), Counters.load(txn, self._tables).used_bytes

    def rows_after(self, rank: bytes, most: int) -> list[Row]:
        """Return up to ``most`` rows of the order above ``rank``, in a transaction of their own."""
        with self._snapshot() as txn:
            return read_rows(txn, self._tables, rank, most)

    @contextlib.contextmanager
    def _snapshot(self) -> Iterator[Any]:
        """Open a read transaction; reader slots that killed processes left are cleared at need."""
        try:
            txn = self._env.begin(buffers=True)
        except lmdb.ReadersFullError:
            self._env.reader_check()
            txn = self._env.begin(buffers=True)
        try:
            yield txn
        finally:
            txn.abort()

    def _look(self, keys: Sequence[bytes]) -> tuple[bytearray, int]:
        """Return the keys' presence and the present generation.

        ``set_key`` reads tree pages only. ``get`` would touch every page of the values as well.
        """
        with self._snapshot() as txn:
            found = bytearray(map(txn.cursor(db=self._tables.values).set_key, keys))
            return found, Counters.load(txn, self._tables).generation

    def _mend_epoch(self) -> None:
        """End an eviction whose process died; one that is merely slow still holds the gate."""
        with self._gate.entered(deadline=time.monotonic()) as inside:
            if inside:
                self._uses.mend()

    def _copy_chunk(
        self,
        txn: Any,
        keys: Sequence[bytes],
        targets: Sequence[memoryview],
        outcomes: list[Outcome],
    ) -> None:
        """Append outcomes, of one key at least, until ``chunk_bytes`` were copied.

        NumPy copies without the GIL; a slice assignment between memoryviews keeps it.
        """
        cursor = txn.cursor(db=self._tables.values)
        copied_bytes = 0
        while len(outcomes) < len(keys) and copied_bytes < self._chunk_bytes:
            target = targets[len(outcomes)]
            if not cursor.set_key(keys[len(outcomes)]):
                outcomes.append(Outcome.MISSING)
                continue
            value = cursor.value()
            if value.nbytes != target.nbytes:
                outcomes.append(Outcome.WRONG_SIZE)
                continue
            np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(value, np.uint8))
            copied_bytes += value.nbytes
            outcomes.append(Outcome.OK)

    def _note_copied(
        self, keys: Sequence[bytes], outcomes: Sequence[Outcome], generation: int
    ) -> None:
        copied = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome is Outcome.OK]
        self._uses.note_use(self._uses.slots(copied), generation)
