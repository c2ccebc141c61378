# SPDX-License-Identifier: Apache-2.0
"""The data file of an LMDB store: made at full size, grown, checked, synced, set aside.

Everything here but ``sync_within`` is for a process that is alone with the store and does not
have it open.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import lmdb

from kvxfer.errors import StoreError
from kvxfer.stores import lmdb_check
from kvxfer.stores.lmdb_marker import FORMAT, Marker, boot_id
from kvxfer.stores.lmdb_space import allocate

logger = logging.getLogger(__name__)

DATA_NAME = "data.mdb"
LOCK_NAME = "lock.mdb"
READER_BYTES = 64
"""Of LMDB's lock file, for each read transaction."""
DAMAGE_NAME = "damaged"
"""Left by a process that met damage while others may have had the store open."""

CHECK_TIMEOUT_S = 60.0


def why_not_trusted(folder: Path, marker: Marker | None) -> str:
    """Return why the folder's data file must not be used, ``""`` if it may.

    A killed process leaves a sound file: LMDB never changes what a snapshot uses, and the kernel
    keeps what was written. That is checked all the same, structure only. Once the operating
    system has gone down, pages may be missing anywhere, a value's too, unless the file was synced
    and closed before: nothing but a clean marker can be trusted then.
    """
    info = os.stat(folder / DATA_NAME)
    if marker is None:
        return "it is not a kvxfer store"
    if marker.format != FORMAT:
        return f"it has format {marker.format}, this version has {FORMAT}"
    if info.st_size != marker.file_bytes:
        return f"it has {info.st_size} bytes, {marker.file_bytes} when it was made"
    if (folder / DAMAGE_NAME).exists():
        return "LMDB found it damaged"
    if marker.clean_mtime_ns == info.st_mtime_ns:
        return ""
    if marker.clean_mtime_ns is None and marker.boot_id != boot_id():
        return "it was open when the operating system went down"
    return _check_in_child(folder)


def make_data(folder: Path, file_bytes: int) -> None:
    """Make an empty data file, all of it allocated; ``StoreError`` where the disk is too small."""
    try:
        _make_data(folder, file_bytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not _drop_set_aside(folder):
            raise _no_room(folder, file_bytes, error) from error
        try:
            _make_data(folder, file_bytes)
        except OSError as second:
            raise _no_room(folder, file_bytes, second) from second


def allocate_lock(folder: Path, most_readers: int) -> None:
    """Make LMDB's lock file, or what it lacks, of real blocks; OSError where there are none.

    LMDB maps it, and would make it with holes: to write into one is a SIGBUS on a full disk. Its
    own size is a little more, within the last block, and as much as ``most_readers`` need: a
    larger file would let in more of them.
    """
    fd = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        allocate(fd, 0, READER_BYTES * (most_readers + 1))
    finally:
        os.close(fd)


def grow_data(folder: Path, old_bytes: int, new_bytes: int) -> bool:
    """Allocate more room at the end of the data file; False, and nothing changed, if there is none.

    The size is put back with a truncation: nobody has the file open.
    """
    fd = os.open(folder / DATA_NAME, os.O_RDWR | os.O_CLOEXEC)
    try:
        allocate(fd, old_bytes, new_bytes - old_bytes)
    except OSError as error:
        os.ftruncate(fd, old_bytes)
        logger.warning("store %s keeps %d bytes: %s", folder, old_bytes, error.strerror)
        return False
    finally:
        os.close(fd)
    return True


def set_aside(folder: Path, marker: Marker | None, reason: str) -> None:
    """Rename the data file; of those that were ours, keep the newest only."""
    kind = "foreign" if marker is None else "damaged"
    target = folder / f"{DATA_NAME}.{kind}-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}"
    if marker is not None:
        _drop_set_aside(folder)
        (folder / LOCK_NAME).unlink(missing_ok=True)
    elif (folder / LOCK_NAME).exists():  # whoever has the foreign file open still locks with it
        (folder / LOCK_NAME).rename(f"{target}-lock")
    (folder / DATA_NAME).rename(target)
    (folder / DAMAGE_NAME).unlink(missing_ok=True)
    logger.warning("store %s set aside as %s: %s; starting empty", folder, target.name, reason)


def sync_within(path: Path, timeout_s: float) -> bool:
    """Write the file's pages to the disk; False where that fails or takes longer.

    A sync that takes longer goes on in a daemon thread.
    """
    synced: list[bool] = []
    thread = threading.Thread(
        target=lambda: synced.append(_sync(path)), name="kvxfer-store-sync", daemon=True
    )
    try:
        thread.start()
    except RuntimeError:  # the interpreter is shutting down
        return False
    thread.join(timeout_s)
    return bool(synced and synced[0])


def _sync(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        logger.warning("store file %s was not synced: %s", path, error.strerror)
        return False
    return True


def _make_data(folder: Path, file_bytes: int) -> None:
    """Make the file in a folder of its own and move it in whole, so that a kill leaves no part."""
    new = folder / "new"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(mode=0o700)
    try:
        allocate_lock(new, 1)
        env = lmdb.open(
            os.fspath(new),
            map_size=1 << 20,
            mode=0o600,
            max_readers=1,
            max_dbs=len(lmdb_check.DATABASES),
        )
        for name in lmdb_check.DATABASES:
            env.open_db(name)
        env.close()
        fd = os.open(new / DATA_NAME, os.O_RDWR | os.O_CLOEXEC)
        try:
            written = os.fstat(fd).st_size
            allocate(fd, written, file_bytes - written)
        finally:
            os.close(fd)
        (folder / LOCK_NAME).unlink(missing_ok=True)
        (new / DATA_NAME).rename(folder / DATA_NAME)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _no_room(folder: Path, file_bytes: int, error: OSError) -> StoreError:
    free = shutil.disk_usage(folder).free
    return StoreError(
        f"store {folder}: no file of {file_bytes} bytes could be made ({error.strerror}); {free} "
        "bytes are free: give a smaller capacity or a folder on another disk"
    )


def _drop_set_aside(folder: Path) -> int:
    """Delete the damaged files that were our own; return how many went."""
    paths = list(folder.glob(f"{DATA_NAME}.damaged-*"))
    for path in paths:
        path.unlink()
    return len(paths)


def _check_in_child(folder: Path) -> str:
    """Return why the child could not read the store, ``""`` if it could."""
    if not sys.executable:
        return "it was not closed in order, and there is no Python executable to check it with"
    search_path = os.path.dirname(os.path.dirname(lmdb.__file__))
    command = [sys.executable, "-P", "-S", lmdb_check.__file__, os.fspath(folder)]
    try:
        child = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": search_path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=CHECK_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"its check did not finish: {error}"
    if child.returncode == 0:
        return ""
    last_words = child.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    return f"its check ended with status {child.returncode}: {last_words or 'no message'}"
