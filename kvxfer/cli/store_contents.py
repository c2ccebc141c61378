# SPDX-License-Identifier: Apache-2.0
"""What a store holds, by model, digest and cache group: read from the keys alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rich.filesize import decimal
from rich.table import Table

from kvxfer.keys import FORMAT, key_prefix
from kvxfer.stores.base import StoredValue
from kvxfer.stores.checksums import SUM_SUFFIX

_NUM_PARTS = key_prefix("prefix", "model", "digest", "group", 0, None).count(b"/") + 1
"""Parts of a key, the hash included."""


@dataclass(frozen=True, slots=True, order=True)
class GroupName:
    """Which layers of which engines values belong to: the parts of their keys."""

    cache_prefix: str
    model: str
    digest: str
    group: str


@dataclass(slots=True)
class Holding:
    """What is stored of one group."""

    num_values: int = 0
    num_bytes: int = 0
    shards: set[str] = field(default_factory=set)
    """Pipeline stages with head ranges."""

    def as_json(self) -> dict[str, object]:
        """Return the numbers as JSON has them."""
        shards = sorted(self.shards)
        return {"values": self.num_values, "bytes": self.num_bytes, "shards": shards}


def whole_prefix(text: str) -> bytes:
    """Return the start of the keys that ``text`` names: whole parts, ``kvx1/`` before them.

    Never anything beyond our own keys: a pool may hold other people's.
    """
    parts = [part for part in text.split("/") if part]
    if not parts or parts[0] != FORMAT:
        parts.insert(0, FORMAT)
    return "/".join([*parts, ""]).encode()


def read_contents(values: Iterable[StoredValue]) -> dict[GroupName, Holding]:
    """Add up values by group, sorted; keys that are none of ours count under empty names."""
    found: dict[GroupName, Holding] = {}
    for value in values:
        parts = value.key.decode(errors="replace").split("/")
        if len(parts) != _NUM_PARTS:
            name, shard = GroupName("", "", "", ""), ""
        else:
            name, shard = GroupName(*parts[1:5]), "/".join(parts[5:7])
        holding = found.setdefault(name, Holding())
        holding.num_bytes += value.num_bytes
        holding.num_values += not value.key.endswith(SUM_SUFFIX)  # a checksum is no value
        holding.shards.add(shard)
    return dict(sorted(found.items()))


def contents_table(contents: dict[GroupName, Holding]) -> Table:
    """Return the table to show."""
    table = Table(title="stored values")
    for title in ("cache prefix", "model", "digest", "group"):
        table.add_column(title, overflow="fold")
    for title in ("shards", "values", "bytes"):
        table.add_column(title, justify="right")
    for name, held in contents.items():
        table.add_row(
            *(name.cache_prefix, name.model, name.digest[:12], name.group[:12]),
            *(f"{len(held.shards)}", f"{held.num_values:,}", decimal(held.num_bytes)),
        )
    return table


def contents_json(contents: dict[GroupName, Holding]) -> list[dict[str, object]]:
    """Return the same for programs, names in full."""
    return [
        {
            "cache_prefix": name.cache_prefix,
            "model": name.model,
            "digest": name.digest,
            "group": name.group,
            **held.as_json(),
        }
        for name, held in contents.items()
    ]
