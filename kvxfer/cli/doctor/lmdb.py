# SPDX-License-Identifier: Apache-2.0
"""Checks of embedded stores: the URI, the folder, its disk, what lies in it, one value."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from kvxfer.cli.doctor.findings import Check, Finding, fault, note, ok, warning
from kvxfer.cli.doctor.surroundings import Surroundings
from kvxfer.cli.opened_store import open_lmdb
from kvxfer.errors import ConfigError, StoreError
from kvxfer.keys import FORMAT as KEY_FORMAT
from kvxfer.stores import Outcome, Store
from kvxfer.stores.lmdb_data import DAMAGE_NAME, DATA_NAME
from kvxfer.stores.lmdb_marker import FORMAT, MARKER_NAME, Marker, boot_id, read_marker
from kvxfer.stores.lmdb_options import LmdbOptions, default_capacity_bytes
from kvxfer.stores.lmdb_space import NETWORK_FILESYSTEMS, filesystem_of
from kvxfer.stores.uri import StoreUri

PROBE_BYTES = 4096
ENTER_BITS = 0o077


def _each(around: Surroundings) -> Iterator[tuple[StoreUri, LmdbOptions]]:
    """Yield the embedded stores whose URIs are in order."""
    for uri in around.stores():
        if uri.scheme == "lmdb":
            try:
                yield uri, LmdbOptions.from_uri(uri)
            except ConfigError:
                continue  # the check of the URI says so


def _folder(around: Surroundings) -> Iterator[Finding]:
    for _, options in _each(around):
        nearest = nearest_existing(options.folder)
        filesystem = filesystem_of(nearest)
        if filesystem in NETWORK_FILESYSTEMS:
            yield fault(
                f"{options.folder} is on {filesystem}, where LMDB is wrong",
                "choose a folder on a disk of this host, or a mooncake:// store",
            )
        elif nearest == options.folder:
            yield _of_existing(options.folder)
        elif not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
            yield fault(
                f"{options.folder} cannot be made: {nearest} is not a folder that this user may "
                "write to",
                "choose another folder (lmdb:///path), or make this one for the user of vLLM",
            )
        else:
            yield ok(f"{options.folder} will be made in {nearest}")


def _of_existing(folder: Path) -> Finding:
    if not folder.is_dir():
        return fault(f"{folder} is no folder", "choose another path: lmdb:///path")
    info = folder.stat()
    if info.st_uid != os.geteuid():
        return fault(
            f"{folder} belongs to user {info.st_uid}, doctor runs as {os.geteuid()}",
            "run doctor as vLLM's user; give each user's engines a folder of their own",
        )
    if not info.st_mode & ENTER_BITS:
        return ok(f"{folder} is this user's alone")
    if any(folder.iterdir()) and not (folder / MARKER_NAME).exists():
        return fault(
            f"{folder} is open to other users (mode {info.st_mode & 0o777:04o}) and holds other "
            "files: it is refused at start-up",
            f"choose a folder for the store alone, or chmod 700 {folder}",
        )
    return warning(
        f"{folder} is open to other users (mode {info.st_mode & 0o777:04o}); the first engine "
        "closes it",
        f"chmod 700 {folder}",
    )


def _space(around: Surroundings) -> Iterator[Finding]:
    for _, options in _each(around):
        nearest = nearest_existing(options.folder)
        if nearest.is_dir():
            yield _room(options, nearest, read_marker(options.folder))


def _room(options: LmdbOptions, nearest: Path, marker: Marker | None) -> Finding:
    """Return whether the disk has what the store will allocate."""
    free = shutil.disk_usage(nearest).free
    capacity = options.capacity_bytes
    if marker is not None and capacity is None:
        return ok(f"the store has {marker.capacity_bytes:,} bytes, allocated already")
    if capacity is None:
        try:
            capacity = default_capacity_bytes(nearest)
        except StoreError as error:
            return fault(str(error), "name a capacity, or a folder on a larger disk")
        return note(f"capacity is not set: a new store takes {capacity:,} of {free:,} bytes free")
    needed = capacity - (marker.file_bytes if marker is not None else 0)
    if needed <= free:
        return ok(f"capacity {capacity:,} bytes, {free:,} are free")
    way_out = f"set capacity to {free} or less, or choose a folder on a larger disk"
    if marker is not None:
        return warning(
            f"the store cannot grow to {capacity:,} bytes: {free:,} are free; it keeps "
            f"{marker.file_bytes:,}",
            way_out,
        )
    return fault(f"a store of {capacity:,} bytes does not fit: {free:,} are free", way_out)


def _contents(around: Surroundings) -> Iterator[Finding]:
    for _, options in _each(around):
        marker = read_marker(options.folder)
        if marker is None:
            continue
        if marker.format != FORMAT:
            yield fault(
                f"the store in {options.folder} has format {marker.format}, this kvxfer {FORMAT}: "
                "the first engine sets it aside and starts empty",
                "give engines of different kvxfer versions folders of their own",
            )
        elif (options.folder / DAMAGE_NAME).exists():
            yield warning(
                f"LMDB met damage in {options.folder}: the next engine that is alone with it sets "
                "it aside and starts empty",
                "end the engines that use it, then start them again; look at the disk's health",
            )
        elif marker.clean_mtime_ns is None and marker.boot_id != boot_id():
            yield note(
                f"the store in {options.folder} was open when this host went down: it will start "
                "empty"
            )
        for aside in sorted(options.folder.glob(f"{DATA_NAME}.*-*")):
            yield warning(
                f"{aside} was set aside, {aside.stat().st_size:,} bytes",
                "remove it once nobody wants to look into it",
            )


def _hosts(around: Surroundings) -> Iterator[Finding]:
    nodes = around.deployment.arguments.get("nnodes", 1)
    if nodes > 1 and any(True for _ in _each(around)):
        yield fault(
            f"the embedded store is of one host, the engine's ranks are on {nodes}",
            'set "store" to mooncake://host:port',
        )


def _round_trip(around: Surroundings) -> Iterator[Finding]:
    for uri, options in _each(around):
        marker = read_marker(options.folder)
        if marker is None:
            yield note(f"no engine has made the store in {options.folder} yet: no value was tried")
            continue
        if marker.format != FORMAT:
            continue  # opening it would set it aside
        try:
            store = open_lmdb(uri)
        except StoreError as error:
            yield fault(f"the store cannot be opened: {error}", "see docs/troubleshooting.md")
            continue
        try:
            yield try_value(store, str(options.folder))
        finally:
            store.close()


def try_value(store: Store, where: str) -> Finding:
    """Put a value of 4 KiB, read, compare and remove it; a key of its own under our format."""
    key = f"{KEY_FORMAT}/doctor/{secrets.token_hex(8)}".encode()
    value, found = secrets.token_bytes(PROBE_BYTES), bytearray(PROBE_BYTES)
    (put,) = store.put_from([key], [memoryview(value)])
    (got,) = store.get_into([key], [memoryview(found)])
    num_removed = store.remove([key])
    if put.stored and got is Outcome.OK and found == value and num_removed == 1:
        return ok(f"a value was stored in {where}, read back, compared and removed")
    if put is Outcome.NO_SPACE:
        return warning(
            f"{where} takes no value now: it is full of values that may not leave yet",
            "wait for the leases to end, or raise the capacity",
        )
    return fault(
        f"a value did not come back from {where} as it went: put {put.name}, get {got.name}, "
        f"{'equal' if found == value else 'different'} bytes, {num_removed} removed",
        "see docs/troubleshooting.md, and the log of this command for the reason",
    )


def nearest_existing(path: Path) -> Path:
    """Return the path itself or its nearest parent that exists."""
    absolute = path.absolute()
    return next(each for each in (absolute, *absolute.parents) if os.path.exists(each))


CHECKS = (
    Check("lmdb.folder", _folder),
    Check("lmdb.space", _space),
    Check("lmdb.contents", _contents),
    Check("lmdb.hosts", _hosts),
    Check("lmdb.round_trip", _round_trip),
)
