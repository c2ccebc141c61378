# SPDX-License-Identifier: Apache-2.0
"""The marker of an LMDB store: what its file is, and whether the file can be trusted."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

MARKER_NAME = "kvxfer.json"
FORMAT = 1
"""Of the databases in data.mdb; a store of another format is set aside."""


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
    """Return the folder's marker; None where there is none or it cannot be read."""
    try:
        marker = Marker(**json.loads((folder / MARKER_NAME).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
    sizes_are_whole = isinstance(marker.file_bytes, int) and isinstance(marker.capacity_bytes, int)
    return marker if sizes_are_whole else None


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


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
