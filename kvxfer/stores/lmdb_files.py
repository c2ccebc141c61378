# SPDX-License-Identifier: Apache-2.0
"""The folder of an LMDB store: private, prepared by whoever is alone with it, shared by the rest.

data.mdb, lock.mdb   LMDB's own
kvxfer.json          the ``Marker``
uses.bin             the ``UseTable``
open.lock            held while a process opens or closes the store
users.lock           held shared by every process that has it open; who gets it exclusively is
                     alone, and only then are files made, checked, grown, renamed
writer.lock          the ``Gate``
new/                 a data file being made
data.mdb.*-<time>    files that were set aside
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path

from kvxfer.errors import StoreError
from kvxfer.stores.lmdb_data import (
    DAMAGE_NAME,
    DATA_NAME,
    grow_data,
    make_data,
    set_aside,
    sync_within,
    why_not_trusted,
)
from kvxfer.stores.lmdb_locks import FileLock, Gate
from kvxfer.stores.lmdb_marker import (
    FORMAT,
    MARKER_NAME,
    Marker,
    boot_id,
    read_marker,
    write_marker,
)
from kvxfer.stores.lmdb_options import default_capacity_bytes
from kvxfer.stores.lmdb_space import NETWORK_FILESYSTEMS, filesystem_of
from kvxfer.stores.lmdb_uses import UseTable, make_table, table_bytes

logger = logging.getLogger(__name__)

USES_NAME = "uses.bin"

OPEN_TIMEOUT_S = 120.0
"""How long an opening waits for another process that is making or checking the store."""
SYNC_TIMEOUT_S = 5.0
"""How long the last close waits for the disk; longer, and the store stays marked as in use."""


class StoreFolder:
    """One process's stake in a store's folder, from ``joined`` to ``leave``.

        joined   open.lock, then users.lock: alone -> trust, set aside, make, grow, mark in use;
                 else -> read the marker. The block opens LMDB; then users.lock is held shared
        leave    the block's LMDB is closed; alone -> sync and mark clean; users.lock is given up

    A killed process loses both locks, and the next to be alone finds the marker still in use.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        _make_private(path)
        filesystem = filesystem_of(path)
        if filesystem in NETWORK_FILESYSTEMS:
            raise StoreError(f"store {path} is on {filesystem}; LMDB needs a disk of this host")
        self._opening = FileLock(path / "open.lock")
        self._users = FileLock(path / "users.lock")

    @contextlib.contextmanager
    def joined(self, capacity_bytes: int | None) -> Iterator[Marker]:
        """Prepare the files and yield their marker; the share is held if the block succeeds.

        Nobody else opens or closes the store during the block.
        """
        if not self._opening.lock(exclusive=True, deadline=time.monotonic() + OPEN_TIMEOUT_S):
            raise StoreError(f"store {self.path} has been opening elsewhere for {OPEN_TIMEOUT_S} s")
        try:
            alone = self._users.try_lock(exclusive=True)
            marker = self._prepare(capacity_bytes) if alone else self._meet(capacity_bytes)
            if not self._users.try_lock(exclusive=False):
                raise StoreError(f"store {self.path}: users.lock is held by something else")
            yield marker
        except BaseException:
            self._users.unlock()
            raise
        finally:
            self._opening.unlock()

    def leave(self) -> None:
        """Give up the share; the last to leave syncs the file and marks it clean, in 5 s or not."""
        deadline = time.monotonic() + SYNC_TIMEOUT_S
        if self._opening.lock(exclusive=True, deadline=deadline):
            try:
                if self._users.try_lock(exclusive=True):
                    self._mark_clean(deadline)
            except OSError as error:  # the store stays marked as in use, and is checked next time
                logger.warning("store %s was not marked clean: %s", self.path, error)
            finally:
                self._users.unlock()
                self._opening.unlock()
        self.close()

    def close(self) -> None:
        """Close the lock files, as a forked child does with what it inherited."""
        self._opening.close()
        self._users.close()

    def gate(self) -> Gate:
        """Return a new gate of the store's writers."""
        return Gate(self.path / "writer.lock")

    def use_table(self) -> UseTable:
        """Map the table of uses."""
        return UseTable(self.path / USES_NAME)

    def _prepare(self, capacity_bytes: int | None) -> Marker:
        """Bring the files in order, being alone; return the marker, in use now."""
        found = read_marker(self.path)
        data = self.path / DATA_NAME
        if data.exists() and (reason := why_not_trusted(self.path, found)):
            set_aside(self.path, found, reason)
        fresh = found is None or not data.exists()
        marker = self._make(capacity_bytes) if fresh or found is None else found
        if not fresh and capacity_bytes is not None:
            marker = self._resize(marker, capacity_bytes)
        self._prepare_uses(marker, fresh or marker.boot_id != boot_id())
        marker = dataclasses.replace(marker, boot_id=boot_id(), clean_mtime_ns=None)
        write_marker(self.path, marker)
        return marker

    def _meet(self, capacity_bytes: int | None) -> Marker:
        """Return the marker of a store that others have open."""
        marker = read_marker(self.path)
        if marker is None or marker.format != FORMAT:
            raise StoreError(f"store {self.path} is open in another version of kvxfer")
        if marker.boot_id != boot_id():
            raise StoreError(f"store {self.path} is open on another host; give each host its own")
        # LMDB sets the file to the size that it is told: a smaller one is a SIGBUS for the others.
        if marker.file_bytes != os.stat(self.path / DATA_NAME).st_size:
            raise StoreError(f"store {self.path} is open, but its marker has another file size")
        if capacity_bytes not in (None, marker.capacity_bytes):
            logger.info(
                "store %s is open with capacity %d, which stays; %d was asked for",
                self.path,
                marker.capacity_bytes,
                capacity_bytes,
            )
        return marker

    def _make(self, capacity_bytes: int | None) -> Marker:
        if capacity_bytes is None:
            capacity_bytes = default_capacity_bytes(self.path)
        file_bytes = capacity_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        marker = Marker(FORMAT, boot_id(), file_bytes, capacity_bytes)
        write_marker(self.path, marker)  # first: a data file without a marker is taken for foreign
        make_data(self.path, file_bytes)
        logger.info("store %s made with %d bytes", self.path, file_bytes)
        return marker

    def _resize(self, marker: Marker, capacity_bytes: int) -> Marker:
        """Return the marker for another capacity: a larger file, or the same with a lower limit.

        The file never shrinks; values beyond the new limit leave when the next ones come.
        """
        file_bytes = capacity_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        if file_bytes <= marker.file_bytes:
            return dataclasses.replace(marker, capacity_bytes=capacity_bytes)
        if not grow_data(self.path, marker.file_bytes, file_bytes):
            return dataclasses.replace(marker, capacity_bytes=marker.file_bytes)
        return dataclasses.replace(marker, file_bytes=file_bytes, capacity_bytes=capacity_bytes)

    def _prepare_uses(self, marker: Marker, renew: bool) -> None:
        """Make the table of uses anew, unless it fits and its clock is still running."""
        path = self.path / USES_NAME
        size = table_bytes(marker.file_bytes)
        fits = path.exists() and path.stat().st_size == size
        if renew or not fits or not UseTable(path).is_possible(time.monotonic()):
            make_table(path, size)

    def _mark_clean(self, deadline: float) -> None:
        marker = read_marker(self.path)
        data = self.path / DATA_NAME
        if marker is None or (self.path / DAMAGE_NAME).exists():
            return
        if sync_within(data, deadline - time.monotonic()):
            mtime_ns = data.stat().st_mtime_ns
            write_marker(self.path, dataclasses.replace(marker, clean_mtime_ns=mtime_ns))


def _make_private(path: Path) -> None:
    """Make the folder for this user alone; ``StoreError`` where it may belong to something else.

    A folder of ours that others may enter is closed to them, if it holds a store or nothing.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = path.stat()
    if info.st_uid != os.geteuid():
        raise StoreError(f"store {path} belongs to user {info.st_uid}; choose a folder of your own")
    if not info.st_mode & 0o077:
        return
    if any(path.iterdir()) and not (path / MARKER_NAME).exists():
        raise StoreError(
            f"store {path} is open to other users and holds other files; "
            f"choose a folder for the store alone (or chmod 700 {path})"
        )
    path.chmod(0o700)
    logger.warning("store %s was open to other users; its mode is now 0700", path)
