# SPDX-License-Identifier: Apache-2.0
"""Disk space, reserved so that a full disk is an error and never a SIGBUS."""

from __future__ import annotations

import os
from pathlib import Path

ZEROS = memoryview(bytes(4 << 20))

NETWORK_FILESYSTEMS = frozenset({"nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "afs"})
"""LMDB is wrong on these: their locks and maps do not agree between hosts, nor always on one."""

MEMORY_FILESYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs"})


def allocate(fd: int, start: int, length: int) -> None:
    """Give bytes [start, start + length) of the file real disk blocks; OSError where it cannot."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, start, length)
    else:  # not on macOS
        write_zeros(fd, start, start + length)


def write_zeros(fd: int, start: int, end: int) -> None:
    """Write zeros over bytes [start, end) of the file; OSError for the first that cannot be."""
    while start < end:
        start += os.pwrite(fd, ZEROS[: end - start], start)


def filesystem_of(path: Path) -> str:
    """Return the type of the file system that ``path`` is on, ``""`` where it is not known."""
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:  # no /proc: not Linux
        return ""
    for mount in mounts.splitlines():
        before, _, after = mount.partition(" - ")
        if before.split()[2] == wanted:
            return after.split()[0]
    return ""
