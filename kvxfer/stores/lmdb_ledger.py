# SPDX-License-Identifier: Apache-2.0
"""The books of an LMDB store: what each value costs, and in which order values leave.

Three LMDB databases change together, in one write transaction:

    values   key -> value
    order    rank -> cost and key; values leave from the lowest rank up
    state    one record, ``Counters``

A rank is (generation, inverse sequence number), big-endian. Generations are slices of written
bytes, a 32nd of the limit each, and one put call belongs to one generation: values of similar
age. Between generations the older leaves first; within one the later put leaves first, so that
of a prefix the tail goes before its head.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

import lmdb

from kvxfer.stores.lmdb_check import COST, COUNTERS_KEY
from kvxfer.stores.lmdb_uses import UseTable

LIMIT_SHARE = 0.85
"""Of the file that values may cost; the rest holds pages that are freed but not yet reusable,
and fragments. Mixed sizes then meet MAP_FULL rarely (tests), and a retry handles it."""
GENERATIONS = 32
MOST_EXAMINED = 4096
"""Order rows that one sweep looks at: 5 to 10 ms."""

_COUNTERS = struct.Struct("<4Q")
_RANK = struct.Struct(">2Q")
_LAST = 2**64 - 1
_MOST = 2**62
"""Above any number that a store counts up to."""
_MOST_KEY_BYTES = 511

_PAGE_HEADER_BYTES = 16
_NODE_BYTES = 10  # node header and its index
_TREE_SLACK = 2  # leaf pages are at least half full on average


class Tables(NamedTuple):
    """Handles of the databases, in the order of ``DATABASES``."""

    values: Any
    order: Any
    state: Any


@dataclass(slots=True)
class Counters:
    """The record that every write transaction reads first and writes last."""

    used_bytes: int = 0
    next_sequence: int = 1
    generation: int = 1
    generation_bytes: int = 0

    @classmethod
    def load(cls, txn: Any, tables: Tables) -> Counters:
        """Read the record of the transaction's snapshot; ``lmdb.CorruptedError`` if it is none."""
        record = txn.get(COUNTERS_KEY, db=tables.state)
        if record is None:
            return cls()
        numbers = _COUNTERS.unpack(record) if len(record) == _COUNTERS.size else (_LAST,)
        if max(numbers) > _MOST:
            raise lmdb.CorruptedError("the record of counters cannot be ours")
        return cls(*numbers)

    def save(self, txn: Any, tables: Tables) -> None:
        """Write the record."""
        record = _COUNTERS.pack(
            self.used_bytes, self.next_sequence, self.generation, self.generation_bytes
        )
        txn.put(COUNTERS_KEY, record, db=tables.state)


@dataclass(slots=True)
class Batch:
    """One put call: its generation and first sequence number, known from its first transaction.

    ``is_refused``: no space could be made for a part of it.
    """

    generation: int = 0
    first_sequence: int = 0
    is_refused: bool = False


class Item(NamedTuple):
    """One pair of a put; ``cost_bytes`` is what ``Ledger.cost_bytes`` says of it."""

    key: bytes
    source: memoryview
    cost_bytes: int


class Row(NamedTuple):
    """One row of ``order``."""

    rank: bytes
    cost_bytes: int
    key: bytes


class Sweep(NamedTuple):
    """What a sweep decided: rows to remove, and rows to move up with their new generation."""

    victims: list[Row]
    moves: list[tuple[Row, int]]


class Ledger:
    """Keeps the three databases of one store in step, inside the caller's write transactions."""

    def __init__(self, tables: Tables, uses: UseTable, limit_bytes: int, page_bytes: int) -> None:
        self.tables = tables
        self.limit_bytes = limit_bytes
        self._uses = uses
        self._page_bytes = page_bytes

    def cost_bytes(self, key_bytes: int, value_bytes: int) -> int:
        """Return what a value takes of the file: whole pages, and its rows in the trees."""
        return cost_bytes(self._page_bytes, key_bytes, value_bytes)

    def check(self, txn: Any, counters: Counters, file_bytes: int) -> None:
        """Raise ``lmdb.CorruptedError`` where the books cannot be true; a few counts, no search."""
        num_values = txn.stat(self.tables.values)["entries"]
        num_rows = txn.stat(self.tables.order)["entries"]
        if num_values != num_rows:
            raise lmdb.CorruptedError(f"{num_values} values have {num_rows} rows")
        if counters.used_bytes > file_bytes or bool(counters.used_bytes) != bool(num_rows):
            raise lmdb.CorruptedError(
                f"{num_rows} values cost {counters.used_bytes} bytes of a file of {file_bytes}"
            )

    def begin_batch(self, counters: Counters, batch: Batch) -> None:
        """Give a put call its generation, on its first transaction."""
        if batch.first_sequence:  # again after an aborted transaction, perhaps
            counters.generation = max(counters.generation, batch.generation)
            return
        if counters.generation_bytes >= self.limit_bytes // GENERATIONS:
            counters.generation += 1
            counters.generation_bytes = 0
        batch.generation = counters.generation
        batch.first_sequence = counters.next_sequence

    def insert(self, txn: Any, counters: Counters, batch: Batch, item: Item) -> bool:
        """Add a value of the batch; False, and nothing copied, where the key is present."""
        if not txn.put(item.key, item.source, overwrite=False, db=self.tables.values):
            return False
        rank = _RANK.pack(batch.generation, _LAST - counters.next_sequence)
        txn.put(rank, COST.pack(item.cost_bytes) + item.key, db=self.tables.order)
        counters.next_sequence += 1
        counters.used_bytes += item.cost_bytes
        counters.generation_bytes += item.cost_bytes
        return True

    def remove(self, txn: Any, counters: Counters, row: Row) -> None:
        """Remove a value and its row."""
        txn.delete(row.rank, db=self.tables.order)
        txn.delete(row.key, db=self.tables.values)
        counters.used_bytes = max(0, counters.used_bytes - row.cost_bytes)

    def remove_if_there(self, txn: Any, counters: Counters, row: Row) -> bool:
        """Remove a row read in another transaction, unless it was moved or removed since."""
        if txn.get(row.rank, db=self.tables.order) != COST.pack(row.cost_bytes) + row.key:
            return False
        self.remove(txn, counters, row)
        return True

    def choose(
        self, txn: Any, counters: Counters, excess_bytes: int, batch: Batch, now_s: float
    ) -> Sweep:
        """Decide what leaves to free ``excess_bytes``; may fall short.

        In rank order: a row of the batch itself is passed over; one under lease moves to the
        present generation; one used since it got its rank moves to the generation of that use;
        any other is a victim.
        """
        sweep = Sweep([], [])
        cursor = txn.cursor(db=self.tables.order)
        at_row = cursor.first()
        for _ in range(MOST_EXAMINED):
            if excess_bytes <= 0 or not at_row:
                break
            row = _read_row(cursor)
            generation, inverse = _RANK.unpack(row.rank)
            if generation == batch.generation and _LAST - inverse >= batch.first_sequence:
                at_row = cursor.set_range(_RANK.pack(generation, _LAST - batch.first_sequence + 1))
                continue
            target = self._generation_now_due(row.key, generation, counters, now_s)
            if target is None:
                sweep.victims.append(row)
                excess_bytes -= row.cost_bytes
            elif target > generation:
                sweep.moves.append((row, target))
            at_row = cursor.next()
        return sweep

    def apply(self, txn: Any, counters: Counters, sweep: Sweep) -> None:
        """Carry out a sweep in the transaction that it was chosen in."""
        for row in sweep.victims:
            self.remove(txn, counters, row)
        for row, generation in sweep.moves:
            _, inverse = _RANK.unpack(row.rank)
            txn.delete(row.rank, db=self.tables.order)
            rank = _RANK.pack(generation, inverse)
            txn.put(rank, COST.pack(row.cost_bytes) + row.key, db=self.tables.order)

    def rows_after(self, txn: Any, rank: bytes, most: int) -> list[Row]:
        """Return up to ``most`` rows whose rank is above ``rank`` (``b""``: from the first)."""
        return read_rows(txn, self.tables, rank, most)

    def _generation_now_due(
        self, key: bytes, generation: int, counters: Counters, now_s: float
    ) -> int | None:
        """Return the generation that the key belongs to by now; None if its turn has come."""
        slot = self._uses.slot(key)
        if self._uses.is_leased(slot, now_s):
            return counters.generation
        last_use = min(self._uses.last_use(slot), counters.generation)
        return last_use if last_use > generation else None


def cost_bytes(page_bytes: int, key_bytes: int, value_bytes: int) -> int:
    """Return what a value takes of a file with pages of ``page_bytes``: see ``Ledger``."""
    rows = 2 * (_NODE_BYTES + key_bytes) + _RANK.size + COST.size
    if _NODE_BYTES + key_bytes + value_bytes <= page_bytes // 2 - _PAGE_HEADER_BYTES:
        return _TREE_SLACK * (rows + value_bytes)
    num_pages = -(-(_PAGE_HEADER_BYTES + value_bytes) // page_bytes)
    return num_pages * page_bytes + _TREE_SLACK * rows


def read_rows(txn: Any, tables: Tables, rank: bytes, most: int) -> list[Row]:
    """Return up to ``most`` rows whose rank is above ``rank`` (``b""``: from the first)."""
    cursor = txn.cursor(db=tables.order)
    at_row = cursor.set_range(rank + b"\0") if rank else cursor.first()
    rows: list[Row] = []
    while at_row and len(rows) < most:
        rows.append(_read_row(cursor))
        at_row = cursor.next()
    return rows


def _read_row(cursor: lmdb.Cursor) -> Row:
    """Return the row at the cursor; ``lmdb.CorruptedError`` if it is none."""
    rank, record = bytes(cursor.key()), bytes(cursor.value())
    if len(rank) != _RANK.size or not COST.size < len(record) <= COST.size + _MOST_KEY_BYTES:
        raise lmdb.CorruptedError(f"the row {rank!r} of the order cannot be ours")
    return Row(rank, COST.unpack_from(record)[0], record[COST.size :])
