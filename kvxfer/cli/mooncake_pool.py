# SPDX-License-Identifier: Apache-2.0
"""A Mooncake pool as the commands see it: listed over its master's HTTP port, without a client."""

from __future__ import annotations

import dataclasses
import http.client
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import quote, unquote_to_bytes

from kvxfer.errors import StoreError
from kvxfer.stores import StoreStats
from kvxfer.stores.base import StoredValue
from kvxfer.stores.mooncake_metrics import read_occupancy
from kvxfer.stores.mooncake_names import names_of
from kvxfer.stores.mooncake_options import MooncakeOptions, master_address

TIMEOUT_S = 10.0
NAMES_AT_ONCE = 64
"""Names of one question for sizes: they travel in its URL, some 150 bytes each."""


def quieten_client() -> None:
    """Have the client print errors alone, where the user has set nothing else; before its import.

    It prints twenty lines of its own for a value that is tried.
    """
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")


class MooncakePool:
    """Lists and counts what a pool holds; a client is started to remove, and only then.

    Clients have no call that lists keys, the master's metrics port has (``metrics_port`` of the
    URI). Asking for a size may lease the value, as any question to a master does.
    """

    def __init__(self, options: MooncakeOptions) -> None:
        """Keep the options; ``StoreError`` for a master known by a high-availability name."""
        address = master_address(options.master)
        if address is None:
            raise StoreError(
                f"the master {options.master} has no HTTP address that could be asked; "
                "name the leader: mooncake://host:port"
            )
        self._options = options
        self._host = address[0]

    def scan(self, prefix: bytes) -> Iterator[StoredValue]:
        """Yield name and size of every value under ``prefix``; ``StoreError`` as a store does."""
        (start,) = names_of([prefix])
        names = [name for name in self._get("/get_all_keys").split() if name.startswith(start)]
        for first in range(0, len(names), NAMES_AT_ONCE):
            yield from self._sizes(names[first : first + NAMES_AT_ONCE])

    def stats(self) -> StoreStats:
        """Return what the whole pool holds, all users' values included; no counters."""
        try:
            held = read_occupancy(self._host, self._options.metrics_port)
        except OSError as error:
            raise self._unanswered(error) from error
        return StoreStats(held.num_values, held.used_bytes, held.capacity_bytes, {})

    def remove_prefix(self, prefix: bytes) -> int:
        """Remove every key under ``prefix`` through a client that lends the pool no memory."""
        quieten_client()
        from kvxfer.stores.mooncake import MooncakeStore  # noqa: PLC0415  # loads the client

        options = dataclasses.replace(self._options, segment_bytes=0, check=False)
        store = MooncakeStore(options)
        try:
            return store.remove_prefix(prefix)
        finally:
            store.close()

    def close(self) -> None:
        """Nothing is held open."""

    def _sizes(self, names: Sequence[str]) -> Iterator[StoredValue]:
        """Yield those of the names that are still there, with the bytes of all their copies."""
        keys = ",".join(quote(name, safe="/") for name in names)
        answer = json.loads(self._get(f"/batch_query_keys?keys={keys}"))
        for name, found in answer.get("data", {}).items():
            if found.get("ok"):
                yield StoredValue(unquote_to_bytes(name), sum(map(_copy_bytes, _copies(found))))

    def _get(self, path: str) -> str:
        port = self._options.metrics_port
        connection = http.client.HTTPConnection(self._host, port, timeout=TIMEOUT_S)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            body = answer.read().decode("utf-8", errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise self._unanswered(error) from error
        finally:
            connection.close()
        if answer.status != http.client.OK:
            raise self._unanswered(f"{path.partition('?')[0]} gave status {answer.status}")
        return body

    def _unanswered(self, why: object) -> StoreError:
        return StoreError(
            f"Mooncake's master does not list its keys at {self._host}:"
            f"{self._options.metrics_port} ({why}); start it with --metrics_port, and name that "
            "port in the URI: mooncake://host:port?metrics_port=9003"
        )


def _copies(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the descriptions of a value's copies in memory and on disks."""
    for kind in ("values", "disk_values", "local_disk_values", "nof_values"):
        yield from found.get(kind) or ()


def _copy_bytes(copy: dict[str, Any]) -> int:
    return int(copy.get("size_", 0))
