# SPDX-License-Identifier: Apache-2.0
"""One open LMDB environment per process and folder, shared by its stores, gone after a fork."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lmdb

from kvxfer.errors import StoreError
from kvxfer.stores.lmdb_calls import OPENING_DAMAGE_ERRORS, Call, note_damage
from kvxfer.stores.lmdb_check import DATABASES
from kvxfer.stores.lmdb_data import DATA_NAME, allocate_lock
from kvxfer.stores.lmdb_files import StoreFolder
from kvxfer.stores.lmdb_ledger import LIMIT_SHARE, Counters, Ledger, Tables
from kvxfer.stores.lmdb_marker import Marker
from kvxfer.stores.lmdb_options import LmdbOptions
from kvxfer.stores.lmdb_reader import Reader
from kvxfer.stores.lmdb_space import MEMORY_FILESYSTEMS, filesystem_of
from kvxfer.stores.lmdb_writer import Writer

logger = logging.getLogger(__name__)

MOST_READERS = 1024
"""Read transactions at once, of all processes."""
MOST_CHUNK_BYTES = 32 << 20
"""Of one write transaction, 3 to 10 ms; larger ones are no faster (bench_stores)."""
CHUNKS_PER_LIMIT = 32
"""Freed pages of two chunks wait to be reusable, out of the 15 % beyond the limit."""
MUST_CLOSE_INHERITED = int(lmdb.__version__.partition(".")[0]) >= 2
"""From 2.0 on, py-lmdb opens nothing twice in a process, and a forked child counts what its parent
had open. Before, it kept a read transaction at hand, which a child would end for its parent."""
DRAIN_TIMEOUT_S = 5.0
"""How long a close or a fork waits for calls in flight."""


class Handle:
    """An open environment with its folder, reader and writer; ``Reference`` makes and keeps it.

    Counted twice: ``references`` are open stores, ``calls`` are calls in flight.

        a reference made        references > 0
        the last one released   no calls: closed, the environment first, then the folder;
                                calls: the last to end closes it, unless a reference revives it

    A value that is being copied lies in the environment's map, so nothing is closed under a call.
    The counts are guarded by ``_counts``; opening and closing by ``_registry_lock``, taken first.
    """

    def __init__(self, options: LmdbOptions) -> None:
        self.counters: Counter[str] = Counter()  # of this process; guarded by _counts
        self._references = 0
        self._calls = 0
        self._is_paused = False
        self._closed = False
        self._counts = threading.Condition()
        with contextlib.ExitStack() as undo:
            self.folder = StoreFolder(options.folder)
            undo.callback(self.folder.close)
            with self.folder.joined(options.capacity_bytes) as marker:
                self._gate = self.folder.gate()
                undo.callback(self._gate.close)
                self._env = _open_environment(options.folder, marker)
                undo.callback(self._env.close)
                self._warm_fd = _open_to_warm(options.folder)
                if self._warm_fd is not None:
                    undo.callback(os.close, self._warm_fd)
                self._build(options, marker)
            undo.pop_all()

    @contextlib.contextmanager
    def call(self) -> Iterator[Call | None]:
        """Keep the environment open during the block; None where it is closed already."""
        with self._counts:
            self._counts.wait_for(lambda: not self._is_paused)
            call = None if self._closed else Call(self.folder.path)
            self._calls += call is not None
        if call is None:
            yield None
            return
        try:
            yield call
        finally:
            with self._counts:
                self.counters.update(call.counts)
                self._calls -= 1
                self._counts.notify_all()
                is_idle = not self._calls and not self._references
            if is_idle:
                self._close_if_idle()

    def snapshot_counters(self) -> dict[str, int]:
        """Return a copy of the counters."""
        with self._counts:
            return dict(self.counters)

    def add_reference(self) -> None:
        """Count one more open store; with ``_registry_lock`` held."""
        with self._counts:
            self._references += 1

    def drop_reference(self) -> None:
        """Count one fewer; the last one waits a while for calls, then closes if it can."""
        with self._counts:
            self._references -= 1
            if not self._references:
                self._wait_for_calls(time.monotonic() + DRAIN_TIMEOUT_S)
        self._close_if_idle()

    def pause(self, deadline: float) -> bool:
        """Before a fork: let calls end and hold new ones until ``resume``; whether none is left."""
        with self._counts:
            self._is_paused = True
            return self._wait_for_calls(deadline)

    def resume(self) -> None:
        """After a fork, in the parent: let calls begin again."""
        with self._counts:
            self._is_paused = False
            self._counts.notify_all()

    def forget(self, *, close_environment: bool) -> None:
        """After a fork, in the child: close the inherited locks, and the environment if asked to.

        Closing it also ends the transactions that it has open, the parent's included.
        """
        self.folder.close()
        if close_environment:
            self._close_environment()
        else:
            self._gate.close()

    def _close_if_idle(self) -> None:
        """Close unless a store or a call holds the handle, or it is closed."""
        with _registry_lock:
            with self._counts:
                if self._references or self._calls or self._closed:
                    return
                self._closed = True
            del _handles[os.fspath(self.folder.path)]
            self._close_environment()
            self.folder.leave()

    def _build(self, options: LmdbOptions, marker: Marker) -> None:
        """Make the reader and the writer of the environment that was just opened.

        ``lmdb.CorruptedError`` where its books cannot be true.
        """
        tables = self._open_tables(options)
        uses = self.folder.use_table()
        limit_bytes = int(LIMIT_SHARE * marker.capacity_bytes)
        chunk_bytes = min(MOST_CHUNK_BYTES, limit_bytes // CHUNKS_PER_LIMIT)
        page_bytes = int(self._env.stat()["psize"])
        ledger = Ledger(tables, uses, limit_bytes, page_bytes)
        with self._env.begin() as txn:
            ledger.check(txn, Counters.load(txn, tables), marker.file_bytes)
        self.capacity_bytes = marker.capacity_bytes
        self.reader = Reader(self._env, tables, uses, self._gate, chunk_bytes)
        self.writer = Writer(
            self._env,
            ledger,
            uses,
            self._gate,
            chunk_bytes=chunk_bytes,
            file_bytes=marker.file_bytes,
            warm_fd=self._warm_fd,
        )

    def _open_tables(self, options: LmdbOptions) -> Tables:
        """Open the databases. LMDB wants its writer lock for that, hence the gate."""
        with self._gate.entered(time.monotonic() + options.timeout_s) as inside:
            if not inside:
                raise StoreError(
                    f"store {options.folder}: a writer has held it for {options.timeout_s} s"
                )
            try:
                self._env.reader_check()
                self._env.begin().abort()
                return Tables(*(self._env.open_db(name, create=False) for name in DATABASES))
            except lmdb.LockError as error:
                raise StoreError(
                    f"store {options.folder}: {error}; a process of this pid has it open: "
                    "containers that share a store must share their pid namespace"
                ) from error

    def _wait_for_calls(self, deadline: float) -> bool:
        """With ``_counts`` held: whether no call is in flight, now or before ``deadline``."""
        return self._counts.wait_for(lambda: not self._calls, deadline - time.monotonic())

    def _close_environment(self) -> None:
        self._env.close()
        self._gate.close()
        if self._warm_fd is not None:
            os.close(self._warm_fd)


class Reference:
    """A store's hold on the handle of its folder, made anew in a forked child that calls it."""

    def __init__(self, options: LmdbOptions) -> None:
        """Open the folder or share its handle; ``StoreError`` where that cannot be."""
        self._options = dataclasses.replace(options, folder=Path(os.path.realpath(options.folder)))
        self._pid = os.getpid()
        self._handle: Handle | None = None
        with _registry_lock:
            self._handle = _acquire(self._options)

    def handle(self) -> Handle | None:
        """Return the handle; None once released, or where a child could not open the store."""
        if self._pid != os.getpid():
            self._renew()
        return self._handle

    def release(self) -> None:
        """Give the handle back; idempotent."""
        with _registry_lock:
            is_ours = self._pid == os.getpid()
            self._pid = os.getpid()
            handle, self._handle = self._handle, None
        if handle is not None and is_ours:
            handle.drop_reference()

    def _renew(self) -> None:
        with _registry_lock:
            if self._pid == os.getpid():
                return
            had_one, self._handle = self._handle is not None, None
            self._pid = os.getpid()
            try:
                self._handle = _acquire(self._options) if had_one else None
            except StoreError as error:
                logger.warning("a forked process goes without its store: %s", error)


_registry_lock = threading.Lock()
_handles: dict[str, Handle] = {}  # by real path; guarded by _registry_lock
_lost: set[str] = set()
"""In a forked child: folders whose inherited environment is open for ever, so they stay shut."""


def _acquire(options: LmdbOptions) -> Handle:
    """With ``_registry_lock`` held: return the folder's handle with one more reference."""
    key = os.fspath(options.folder)
    if key in _lost:
        raise StoreError(f"store {key} was being used while this process was forked")
    if key not in _handles:
        _handles[key] = _open(options)
    handle = _handles[key]
    if options.capacity_bytes not in (None, handle.capacity_bytes):
        logger.info("store %s is open here with capacity %d, kept", key, handle.capacity_bytes)
    handle.add_reference()
    return handle


def _open(options: LmdbOptions) -> Handle:
    """Open the folder; damage that LMDB finds on the way is set aside, if nobody else is inside."""
    try:
        try:
            return Handle(options)
        except OPENING_DAMAGE_ERRORS as error:
            logger.warning("store %s is damaged: %s", options.folder, error)
            note_damage(options.folder)
            return Handle(options)
    except StoreError:
        raise
    except (OSError, lmdb.Error) as error:
        raise StoreError(f"store {options.folder} cannot be opened: {error}") from error


def _open_environment(folder: Path, marker: Marker) -> Any:
    """Open LMDB with a writable map and without syncs.

    ``map_size`` is the file's size: with a writable map LMDB sets the file to the size of the map,
    and one that shrinks under another process is a SIGBUS there. Without ``writemap`` a put of
    1 MiB runs at 1.4 GB/s instead of 11 (bench_stores). ``max_spare_txns`` stays 0: a spare one
    would be shared with forked children.
    """
    allocate_lock(folder, MOST_READERS)
    return lmdb.open(
        os.fspath(folder),
        map_size=marker.file_bytes,
        writemap=True,
        sync=False,
        metasync=False,
        meminit=False,
        mode=0o600,
        create=False,
        max_readers=MOST_READERS,
        max_dbs=len(DATABASES),
        max_spare_txns=0,
    )


def _open_to_warm(folder: Path) -> int | None:
    """Return a descriptor for writing ahead of LMDB, None on file systems where it costs time."""
    if filesystem_of(folder) in MEMORY_FILESYSTEMS:
        return None
    return os.open(folder / DATA_NAME, os.O_RDWR | os.O_CLOEXEC)


@dataclass
class _Pause:
    """What ``_before_fork`` achieved, for the hooks that follow it."""

    registry_held: bool = False
    quiet: dict[str, bool] = field(default_factory=dict)  # by key of the paused handles


_pause = _Pause()


def _before_fork() -> None:
    """End calls in flight and begin none, so that the child inherits no open transaction."""
    global _pause
    deadline = time.monotonic() + DRAIN_TIMEOUT_S
    _pause = _Pause(registry_held=_registry_lock.acquire(timeout=DRAIN_TIMEOUT_S))
    if _pause.registry_held:
        _pause.quiet = {key: handle.pause(deadline) for key, handle in _handles.items()}


def _after_fork_in_parent() -> None:
    for key in _pause.quiet:
        _handles[key].resume()
    if _pause.registry_held:
        _registry_lock.release()


def _after_fork_in_child() -> None:
    """Close what was inherited; a folder that cannot be opened again is lost to the child."""
    global _registry_lock
    _registry_lock = threading.Lock()
    for key, handle in list(_handles.items()):
        can_close = MUST_CLOSE_INHERITED and _pause.quiet.get(key, False)
        handle.forget(close_environment=can_close)
        if not can_close:
            _inherited.append(handle)
            _lost.update({key} if MUST_CLOSE_INHERITED else ())
    _handles.clear()


_inherited: list[Handle] = []
"""Those with an open environment, kept so that nothing of them is finalised in the child."""

os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)
