# SPDX-License-Identifier: Apache-2.0
"""Settings of the LMDB store: its URI options, its default folder and its default capacity."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from kvxfer.errors import ConfigError, StoreError
from kvxfer.stores.uri import StoreUri, check_options, parse_seconds, parse_size

FOLDER_VARIABLE = "KVXFER_STORE_DIR"
VALID_OPTIONS = ("capacity", "lease_s", "timeout_s")

MIN_CAPACITY_BYTES = 1 << 20
"""Below this the trees that LMDB keeps beside the values are most of the file."""
DEFAULT_CAPACITY_BYTES = 8 << 30
DEFAULT_DISK_SHARE = 0.25
"""Share of the free space that a store without a ``capacity`` may take."""
MIN_DEFAULT_CAPACITY_BYTES = 64 << 20
"""A default below this would hardly hold one request: an error is clearer."""


@dataclass(frozen=True, slots=True)
class LmdbOptions:
    """How to open an LMDB store.

    ``capacity_bytes`` is the size of its file; None keeps the capacity of an existing store and
    takes ``default_capacity_bytes`` for a new one. ``lease_s`` is how long a key that ``exists``
    reported is kept. ``timeout_s`` bounds how long a put or a removal waits for other writers.
    """

    folder: Path
    capacity_bytes: int | None = None
    lease_s: float = 30.0
    timeout_s: float = 10.0

    def __post_init__(self) -> None:
        capacity = self.capacity_bytes
        if capacity is not None and capacity < MIN_CAPACITY_BYTES:
            raise ConfigError(f"capacity is {capacity} bytes; at least {MIN_CAPACITY_BYTES} (1MiB)")

    @classmethod
    def from_uri(cls, uri: StoreUri) -> LmdbOptions:
        """Read ``lmdb:///folder?capacity=8GiB&lease_s=30&timeout_s=10``; all of it is optional."""
        if uri.host:
            raise ConfigError(
                f"store {uri.text!r} names host {uri.host!r}, but lmdb is local; a folder takes "
                f"three slashes: lmdb:///{uri.host}{uri.path}"
            )
        check_options(uri, VALID_OPTIONS)
        given = uri.options
        capacity = given.get("capacity")
        return cls(
            folder=Path(uri.path) if uri.path not in ("", "/") else default_folder(),
            capacity_bytes=None if capacity is None else parse_size(capacity, "capacity"),
            lease_s=parse_seconds(given.get("lease_s", "30"), "lease_s"),
            timeout_s=parse_seconds(given.get("timeout_s", "10"), "timeout_s"),
        )


def default_folder() -> Path:
    """Return ``$KVXFER_STORE_DIR``, else a folder in the user's cache, else one in the temp folder.

    The cache is ``$XDG_CACHE_HOME`` or ``~/.cache``; the temp folder serves users without a
    writable home, as in many containers.
    """
    if chosen := os.environ.get(FOLDER_VARIABLE):
        return Path(chosen)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    if cache.is_absolute() and _can_make(cache):
        return cache / "kvxfer" / "lmdb"
    return Path(tempfile.gettempdir()) / f"kvxfer-lmdb-{os.geteuid()}"


def default_capacity_bytes(folder: Path) -> int:
    """Return 8 GiB or a quarter of what the disk of the existing ``folder`` has free, if less.

    ``StoreError`` where that is under 64 MiB.
    """
    free = shutil.disk_usage(folder).free
    capacity = min(DEFAULT_CAPACITY_BYTES, int(free * DEFAULT_DISK_SHARE))
    if capacity < MIN_DEFAULT_CAPACITY_BYTES:
        raise StoreError(
            f"the disk of {folder} has {free} bytes free, too few for a default capacity; give "
            f"one (lmdb:///path?capacity=32MiB) or set {FOLDER_VARIABLE} to a folder elsewhere"
        )
    return capacity


def _can_make(folder: Path) -> bool:
    """Whether ``folder`` is writable, or could be made in its nearest existing parent."""
    nearest = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    return nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)
