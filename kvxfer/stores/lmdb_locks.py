# SPDX-License-Identifier: Apache-2.0
"""File locks with deadlines; the kernel drops them when their process dies, however it dies."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

FIRST_PAUSE_S = 0.000_1
LONGEST_PAUSE_S = 0.002
"""Between two tries: a write transaction of the store lasts 1 to 20 ms."""


class FileLock:
    """One lock on a file of its own, exclusive or shared, held by this object until released.

    ``flock`` locks belong to the open file description: two objects exclude each other, within a
    process too. Not thread-safe. A forked child may only ``close`` what it inherited, which
    leaves the parent's lock as it is.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def try_lock(self, *, exclusive: bool) -> bool:
        """Take the lock, or turn a held one into the other kind, without waiting.

        A failed turn loses the lock that was held.
        """
        kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
        try:
            fcntl.flock(self._fd, kind | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            return False
        return True

    def lock(self, *, exclusive: bool, deadline: float) -> bool:
        """Take the lock by polling until ``time.monotonic()`` is past ``deadline``."""
        pause_s = FIRST_PAUSE_S
        while not self.try_lock(exclusive=exclusive):
            if time.monotonic() > deadline:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return True

    def unlock(self) -> None:
        """Release the lock; nothing happens if it is not held."""
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the file; the lock goes unless a parent or child process still has it open."""
        os.close(self._fd)


class Gate:
    """Lets one thread of one process on the host in at a time, and gives up at a deadline.

    LMDB has a writer lock of its own, but one that waits for ever. Whoever passes the gate never
    waits there, because every writer of the folder passes it first.
    """

    def __init__(self, path: Path) -> None:
        self._thread_lock = threading.Lock()
        self._file_lock = FileLock(path)

    @contextlib.contextmanager
    def entered(self, deadline: float) -> Iterator[bool]:
        """Hold the gate during the block; False where it did not open before ``deadline``."""
        if not self._thread_lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            yield False
            return
        try:
            inside = self._file_lock.lock(exclusive=True, deadline=deadline)
            try:
                yield inside
            finally:
                if inside:
                    self._file_lock.unlock()
        finally:
            self._thread_lock.release()

    def close(self) -> None:
        """Release the file; nobody may be inside."""
        self._file_lock.close()
