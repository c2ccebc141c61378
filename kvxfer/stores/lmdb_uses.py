# SPDX-License-Identifier: Apache-2.0
"""Leases and last uses of keys, in a small memory-mapped file that all processes of a host share.

A lookup writes here instead of in LMDB, so that it needs no write transaction. What is lost when
the table is lost is only an order of eviction.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvxfer.errors import StoreError
from kvxfer.stores.lmdb_space import allocate
from kvxfer.stores.uri import LONGEST_S

HEADER_BYTES = 4096
SLOT_BYTES = 16
FEWEST_SLOTS = 1 << 12
BYTES_PER_SLOT = 16 << 10
"""Of the store's file; a slot for each of the smallest usual values."""

_EPOCH, _WARMED = 0, 1

SlotArray = npt.NDArray[np.uint32]


def table_bytes(file_bytes: int) -> int:
    """Return the size of the table beside a store of ``file_bytes``; its slots are a power of 2."""
    num_slots = max(FEWEST_SLOTS, 1 << (file_bytes // BYTES_PER_SLOT - 1).bit_length())
    return HEADER_BYTES + num_slots * SLOT_BYTES


def _is_table_size(size_bytes: int) -> bool:
    num_slots, rest = divmod(size_bytes - HEADER_BYTES, SLOT_BYTES)
    return not rest and num_slots >= FEWEST_SLOTS and num_slots.bit_count() == 1


def make_table(path: Path, size_bytes: int) -> None:
    """Replace the table by an empty one; nobody may have the store open."""
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        allocate(fd, 0, size_bytes)
    finally:
        os.close(fd)


class UseTable:
    """One slot per hash of a key: until when it is leased, and the generation of its last use.

    Keys that share a slot share their protection: one may stay longer than it should, never
    shorter. Any thread and process may read and write at once; each field is one aligned word.

    An evictor works between two steps of ``epoch``, which is odd meanwhile (``evicting``). A
    reader that found a key, leased it, and sees the same even epoch before and after knows that
    no evictor decided on the key without seeing the lease.
    """

    def __init__(self, path: Path) -> None:
        """Map the table; ``StoreError`` for a file that is none."""
        with open(path, "r+b") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            if not _is_table_size(size_bytes):
                raise StoreError(f"{path} has {size_bytes} bytes, which is no table of uses")
            self._map = mmap.mmap(file.fileno(), 0)
        num_slots = (len(self._map) - HEADER_BYTES) // SLOT_BYTES
        self._header = np.frombuffer(self._map, np.uint64, 2)
        self._leased_until = np.frombuffer(self._map, np.float64, num_slots, HEADER_BYTES)
        self._last_use = np.frombuffer(
            self._map, np.uint64, num_slots, HEADER_BYTES + 8 * num_slots
        )
        self._mask = num_slots - 1
        self._fence = threading.Lock()

    def is_possible(self, now_s: float) -> bool:
        """Whether no lease is longer than any can be, and the epoch is one that was counted up.

        For whoever is alone with the store: a lease without an end would keep it full for ever.
        """
        leases_end = bool(np.all(self._leased_until <= now_s + LONGEST_S))  # False for NaN
        return leases_end and self.epoch < 2**62

    def slots(self, keys: Sequence[bytes]) -> SlotArray:
        """Return the slot of each key."""
        hashes = np.fromiter(map(zlib.crc32, keys), np.uint32, len(keys))
        return hashes & np.uint32(self._mask)

    def slot(self, key: bytes) -> int:
        """Return the slot of one key."""
        return zlib.crc32(key) & self._mask

    def note_use(self, slots: SlotArray, generation: int) -> None:
        """Record a use of the slots' keys in the present ``generation``."""
        self._last_use[slots] = generation

    def lease(self, slots: SlotArray, until_s: float) -> None:
        """Protect the slots' keys from eviction until ``time.monotonic()`` is ``until_s``."""
        self._leased_until[slots] = np.maximum(self._leased_until[slots], until_s)

    def is_leased(self, slot: int, now_s: float) -> bool:
        """Whether a lease on the slot runs beyond ``now_s``."""
        return bool(self._leased_until[slot] > now_s)

    def last_use(self, slot: int) -> int:
        """Return the generation of the slot's last use, 0 if there was none."""
        return int(self._last_use[slot])

    @property
    def epoch(self) -> int:
        """The number of steps that evictors made; all earlier writes of this thread precede it."""
        with self._fence:  # its atomic instruction keeps the read behind the writes
            return int(self._header[_EPOCH])

    @contextlib.contextmanager
    def evicting(self) -> Iterator[None]:
        """Hold the epoch odd: from before leases are read until the eviction is committed.

        For whoever is inside the gate.
        """
        self.mend()
        self._header[_EPOCH] += np.uint64(1)
        try:
            yield
        finally:
            self._header[_EPOCH] += np.uint64(1)

    def mend(self) -> None:
        """Make the epoch even again after an evictor was killed. For whoever is inside the gate."""
        self._header[_EPOCH] += self._header[_EPOCH] & np.uint64(1)

    @property
    def warmed_bytes(self) -> int:
        """How far the store's file has been written ahead of LMDB (``Writer``)."""
        return int(self._header[_WARMED])

    @warmed_bytes.setter
    def warmed_bytes(self, value: int) -> None:
        self._header[_WARMED] = value
