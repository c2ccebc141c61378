# SPDX-License-Identifier: Apache-2.0
"""The marker of an LMDB store: what its file is, and whether the file can be trusted."""

from __future__ import annotations

import json
import mmap
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from kvxfer.stores.lmdb_options import MIN_CAPACITY_BYTES
from kvxfer.stores.uri import MOST_BYTES

MARKER_NAME = "kvxfer.json"
FORMAT = 1
"""Of the databases in data.mdb; a store of another format is set aside."""
_MOST_MARKER_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Marker:
    """What the last process to change the store's state said about it.

    ``clean_mtime_ns`` is the modification time of a data file that was synced and closed in
    order; None from the moment it is opened, so that it stays None after a crash. ``boot_id``
    names the run of the operating system that the file was last open in.
    """

    format: int
    boot_id: str
    file_bytes: int
    capacity_bytes: int
    clean_mtime_ns: int | None = None


def read_marker(folder: Path) -> Marker | None:
    """Return the folder's marker; None where there is none, or none that we can have written."""
    try:
        with open(folder / MARKER_NAME, "rb") as file:
            marker = Marker(**json.loads(file.read(_MOST_MARKER_BYTES)))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    return marker if _is_possible(marker) else None


def write_marker(folder: Path, marker: Marker) -> None:
    """Replace the marker at once and durably: after a crash the old or the new one is there."""
    scratch = folder / (MARKER_NAME + ".new")
    with open(scratch, "w", encoding="utf-8", opener=_open_private) as file:
        json.dump(asdict(marker), file)
        file.flush()
        os.fsync(file.fileno())
    scratch.rename(folder / MARKER_NAME)
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Make the folder's names durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def boot_id() -> str:
    """Return the name of this run of the operating system; ``""`` where it has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _is_possible(marker: Marker) -> bool:
    """Whether every field has a type and a value that ``write_marker`` may have been given."""
    numbers = (marker.format, marker.file_bytes, marker.capacity_bytes, marker.clean_mtime_ns or 0)
    return (
        all(type(number) is int for number in numbers)
        and type(marker.boot_id) is str
        and MIN_CAPACITY_BYTES <= marker.capacity_bytes < marker.file_bytes + mmap.PAGESIZE
        and marker.file_bytes <= MOST_BYTES
    )


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
