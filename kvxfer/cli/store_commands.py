# SPDX-License-Identifier: Apache-2.0
"""``kvxfer store``: look at what a store holds, and remove some of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.filesize import decimal

from kvxfer.cli.failures import failures_end_the_command
from kvxfer.cli.opened_store import OpenedStore, open_existing
from kvxfer.cli.store_contents import (
    GroupName,
    Holding,
    contents_json,
    contents_table,
    read_contents,
    whole_prefix,
)

store_app = typer.Typer(
    no_args_is_help=True, help="List what a store holds, measure it, remove some of it."
)

StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        help="URI of the store, e.g. lmdb:///path or mooncake://host:port. Default: the one that "
        "an engine without a store in its configuration takes.",
    ),
]
PrefixOption = Annotated[
    str,
    typer.Option(
        help="Only keys that start with these whole parts, e.g. default/Llama-3.1-8B: cache "
        "prefix, model, digest, group.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


@store_app.command("list")
def list_store(
    store: StoreOption = None, prefix: PrefixOption = "", as_json: JsonOption = False
) -> None:
    """List stored values by model, digest and cache group.

    Nothing changes in the store, and engines that use it go on. Exit code 1 where there is no
    store or it cannot be read.
    """
    with _opened(store) as opened:
        contents = _contents(opened, prefix)
    if as_json:
        print(json.dumps(contents_json(contents), indent=1))
    elif contents:
        Console().print(contents_table(contents))
    else:
        Console().print("nothing is stored" + (f" under {prefix}" if prefix else ""))


@store_app.command("size")
def size_of_store(
    store: StoreOption = None, prefix: PrefixOption = "", as_json: JsonOption = False
) -> None:
    """Say how full a store is, and how much of it lies under a prefix.

    Exit code 1 where there is no store or it cannot be read.
    """
    with _opened(store) as opened:
        stats = opened.stats()
        contents = _contents(opened, prefix) if prefix else {}
    under = _total(contents)
    if as_json:
        numbers: dict[str, object] = {
            "values": stats.num_values,
            "used_bytes": stats.used_bytes,
            "capacity_bytes": stats.capacity_bytes,
        }
        if prefix:
            numbers["prefix"] = {"values": under.num_values, "bytes": under.num_bytes}
        print(json.dumps(numbers, indent=1))
        return
    share = stats.used_bytes / stats.capacity_bytes if stats.capacity_bytes else 0.0
    console = Console()
    console.print(
        f"{stats.num_values:,} values, {decimal(stats.used_bytes)} of "
        f"{decimal(stats.capacity_bytes)} ({share:.1%})"
    )
    if prefix:
        console.print(f"under {prefix}: {_shown(under)}")


@store_app.command("purge")
def purge_store(
    prefix: Annotated[
        str,
        typer.Option(
            help="Remove the keys that start with these whole parts, e.g. default/Llama-3.1-8B: "
            "cache prefix, model, digest, group. An empty one: all of kvxfer's keys."
        ),
    ],
    store: StoreOption = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove stored values, after showing what goes and asking.

    Engines may run meanwhile: what they miss they compute again. Keys that are not kvxfer's stay.
    Exit code 1 where there is no store, it cannot be changed, or the answer is no.
    """
    if as_json and not yes:
        raise typer.BadParameter("--json asks no question; give --yes too")
    start = whole_prefix(prefix)
    with _opened(store) as opened:
        if not as_json:
            contents = _contents(opened, prefix)
            if not contents:
                Console().print(f"nothing is stored under {start.decode()}")
                return
            Console().print(contents_table(contents))
            if not yes:
                typer.confirm(f"Remove {_shown(_total(contents))}?", abort=True)
        num_removed = opened.remove_prefix(start)
    if as_json:
        print(json.dumps({"prefix": start.decode(), "removed": num_removed}))
    else:
        Console().print(f"{num_removed:,} entries removed")


@contextmanager
def _opened(uri: str | None) -> Iterator[OpenedStore]:
    with failures_end_the_command():
        opened = open_existing(uri)
        try:
            yield opened
        finally:
            opened.close()


def _contents(opened: OpenedStore, prefix: str) -> dict[GroupName, Holding]:
    with Console(stderr=True).status("reading the store's keys"):
        return read_contents(opened.scan(whole_prefix(prefix)))


def _total(contents: dict[GroupName, Holding]) -> Holding:
    return Holding(
        sum(held.num_values for held in contents.values()),
        sum(held.num_bytes for held in contents.values()),
    )


def _shown(held: Holding) -> str:
    return f"{held.num_values:,} values, {decimal(held.num_bytes)}"
