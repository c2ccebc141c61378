# SPDX-License-Identifier: Apache-2.0
"""Stores as the commands open them: nothing is made, resized, lent or leased on the way."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from kvxfer.config import default_store
from kvxfer.errors import ConfigError, StoreError
from kvxfer.stores import StoreStats
from kvxfer.stores.base import StoredValue
from kvxfer.stores.uri import StoreUri, parse_uri

if TYPE_CHECKING:
    from kvxfer.stores.lmdb import LmdbStore


class OpenedStore(Protocol):
    """What the commands ask of a store; see ``kvxfer.stores.Store`` for each."""

    def scan(self, prefix: bytes) -> Iterator[StoredValue]:
        """Yield every value under ``prefix``."""
        ...

    def stats(self) -> StoreStats:
        """Return what the whole store holds."""
        ...

    def remove_prefix(self, prefix: bytes) -> int:
        """Remove every key under ``prefix`` and return how many."""
        ...

    def close(self) -> None:
        """Release it."""
        ...


def open_existing(uri: str | None) -> OpenedStore:
    """Open the store of a URI, or the one that an engine without one would take.

    ``StoreError`` where there is none: a command that looks makes no store. An embedded store
    keeps its capacity, whatever the URI says, and a pool gets no memory from this process.
    """
    parsed = parse_uri(uri or default_store(os.environ))
    if parsed.scheme == "lmdb":
        return open_lmdb(parsed)
    if parsed.scheme == "mooncake":
        from kvxfer.cli.mooncake_pool import MooncakePool  # noqa: PLC0415  # only its users need it
        from kvxfer.stores.mooncake_options import MooncakeOptions  # noqa: PLC0415

        return MooncakePool(MooncakeOptions.from_uri(parsed))
    raise ConfigError(
        f"store {parsed.text!r} has scheme {parsed.scheme!r}; write lmdb:// or mooncake://host:port"
    )


def open_lmdb(uri: StoreUri) -> LmdbStore:
    """Open the embedded store of a URI as it is; ``StoreError`` where there is none."""
    from kvxfer.stores.lmdb import LmdbStore  # noqa: PLC0415  # Mooncake's users need no LMDB
    from kvxfer.stores.lmdb_marker import FORMAT, read_marker  # noqa: PLC0415
    from kvxfer.stores.lmdb_options import LmdbOptions  # noqa: PLC0415

    options = LmdbOptions.from_uri(uri)
    marker = read_marker(options.folder)
    if marker is None:
        raise StoreError(f"there is no store in {options.folder}; no engine has used it yet")
    if marker.format != FORMAT:
        raise StoreError(
            f"the store in {options.folder} has format {marker.format}, this version of kvxfer "
            f"has {FORMAT}: use the version that made it"
        )
    return LmdbStore(dataclasses.replace(options, capacity_bytes=None))
