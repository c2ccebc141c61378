# SPDX-License-Identifier: Apache-2.0
"""The contract of a store: what every backend promises, whatever lies behind it."""

from __future__ import annotations

import abc
import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvxfer.errors import UnsupportedError
from kvxfer.stores.parts import Parts, TransferMode


class Outcome(enum.IntEnum):
    """How one key of a batch fared. Only ``OK`` means that the bytes are where they should be."""

    OK = 0
    EXISTS = 1
    """A put found the key present and left it as it was: a success, same key, same bytes."""
    MISSING = 2
    WRONG_SIZE = 3
    """The stored value has another size than the target; the target is untouched."""
    NO_SPACE = 4
    FAILED = 5
    """The backend failed; the reason was logged and counted."""
    CLOSED = 6
    CORRUPT = 7
    """The bytes are not those that were put; the target holds something of no use."""

    @property
    def stored(self) -> bool:
        """Whether the value is in the store after a put."""
        return self in (Outcome.OK, Outcome.EXISTS)

    @property
    def is_useless(self) -> bool:
        """Whether a get of this value will never succeed, so that it had better be removed."""
        return self in (Outcome.WRONG_SIZE, Outcome.CORRUPT)


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Counters since the store was opened, and what it holds now."""

    num_values: int
    used_bytes: int
    capacity_bytes: int
    counters: dict[str, int]
    """By name, those that are not 0: ``exists_found``, ``exists_missing``, ``exists_failed``;
    ``get_`` and ``put_`` with each ``Outcome``; ``evicted``; ``removed``."""


class StoredValue(NamedTuple):
    """One value that a scan met."""

    key: bytes
    num_bytes: int
    """What it takes of the store, its share of pages and books included where there are any."""


class Store(abc.ABC):
    """A batched map from key bytes to value bytes, shared by threads and possibly by processes.

    Methods in the order of use: ``register`` buffers, then any number of ``exists``,
    ``get_into``, ``put_from``, ``remove``, ``remove_prefix``, then ``close``. All may be called
    from any thread at once. All are bounded in time and release the GIL while bytes move. A key
    that fails costs that key only: batches never raise for what the backend did, only for wrong
    arguments (``ValueError``), before anything was done. After ``close`` every key answers as
    absent or ``CLOSED``.

    Keys are 1 to 511 bytes; values 1 byte or more, whole or absent: a reader never sees part of
    one. A batch lists keys in the order of a prefix, from its head: what does not fit or must
    leave is taken from the tail.
    """

    @abc.abstractmethod
    def register(self, buffer: memoryview) -> None:
        """Announce a buffer that later targets and sources lie in; ``StoreError`` if refused."""

    def watch_evictions(  # noqa: B027  # a backend that cannot say does nothing
        self, on_evicted: Callable[[Sequence[bytes]], None]
    ) -> None:
        """Have ``on_evicted`` told which keys puts of this store evict, by the thread that puts.

        What other processes evict is not told, and a backend that cannot say calls it never. It
        must return at once and raise nothing.
        """

    @abc.abstractmethod
    def exists(self, keys: Sequence[bytes]) -> bytearray:
        """Return one byte per key: 1 where a value is stored, else 0 (failures included).

        A key answered with 1 is protected from eviction for the store's lease.
        """

    @abc.abstractmethod
    def get_into(self, keys: Sequence[bytes], targets: Sequence[memoryview]) -> list[Outcome]:
        """Copy each value into its target, a writable contiguous byte buffer of the same size.

        ``OK``, ``MISSING``, ``WRONG_SIZE``, ``FAILED`` or ``CLOSED`` per key, where checksums are
        kept also ``CORRUPT``; a target is written only for ``OK`` and ``CORRUPT``.
        """

    @abc.abstractmethod
    def put_from(self, keys: Sequence[bytes], sources: Sequence[memoryview]) -> list[Outcome]:
        """Store a copy of each source; the sources are free again on return.

        ``OK``, ``EXISTS``, ``NO_SPACE``, ``FAILED`` or ``CLOSED`` per key.
        """

    @property
    def transfer_mode(self) -> TransferMode:
        """How this store is to be handed values; ``PACKED`` where it takes no parts."""
        return TransferMode.PACKED

    @property
    def most_parts(self) -> int:
        """Parts that a value may have in ``get_parts`` and ``put_parts``; 0: this has neither."""
        return 0

    def get_parts(self, keys: Sequence[bytes], parts: Parts) -> list[Outcome]:
        """Copy each value into its parts, which lie in registered buffers; else as ``get_into``.

        A call returns when nothing can write a part any more, however late that is. The bytes are
        those that ``get_into`` would bring; after ``FAILED`` the parts hold something of no use.
        """
        raise UnsupportedError(f"{type(self).__name__} takes no parts of values")

    def put_parts(self, keys: Sequence[bytes], parts: Parts) -> list[Outcome]:
        """Store each value from its parts, which lie in registered buffers; else as ``put_from``.

        The same value is stored as by ``put_from``, whatever its parts were.
        """
        raise UnsupportedError(f"{type(self).__name__} takes no parts of values")

    @abc.abstractmethod
    def remove(self, keys: Sequence[bytes]) -> int:
        """Remove values that a get found to be of no use, and return how many went.

        A key that resists, or is not there any more, stays as it is. One that somebody put anew
        since that get goes too: that costs a miss.
        """

    @abc.abstractmethod
    def remove_prefix(self, prefix: bytes) -> int:
        """Remove every key that starts with ``prefix`` and return how many; others survive.

        ``StoreError`` where some may be left, so that a reset is never taken for done.
        """

    def scan(self, prefix: bytes) -> Iterator[StoredValue]:
        """Yield every value under ``prefix``, in no order; not even a lease changes.

        For people and their tools: it takes time in proportion to all that the store holds. What
        is put, used or removed meanwhile may be left out or come twice. ``StoreError`` where it
        cannot be read to the end, ``UnsupportedError`` where the backend lists no keys.
        """
        raise UnsupportedError(f"{type(self).__name__} lists no keys")

    @abc.abstractmethod
    def stats(self) -> StoreStats:
        """Return counters and occupancy; after ``close`` those of its last moment."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release the handle; idempotent, bounded in time."""
