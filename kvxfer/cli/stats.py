# SPDX-License-Identifier: Apache-2.0
"""``kvxfer stats``: a table of what an engine or a store counts, live with ``--watch``."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass

from rich.console import Console
from rich.filesize import decimal
from rich.live import Live
from rich.table import Table

from kvxfer.cli.opened_store import OpenedStore
from kvxfer.cli.scrape import Scrape, scrape
from kvxfer.stores import StoreStats

GOOD_KEYS = ("ok", "exists", "found", "missing", "removed")
GOOD_JOBS = ("done",)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: a number now, and its growth a second since the last look."""

    title: str
    value: float
    show: Callable[[float], str]
    grows: bool = True
    """False for what rises and falls."""


def engine_rows(now: Scrape) -> Iterator[Row]:
    """Yield what an engine's metrics say: tokens, lookups, transfers, queues, failures, store."""
    wanted, hit = now.total("wanted_tokens_total"), now.total("hit_tokens_total")
    yield Row("tokens wanted", wanted, _count)
    yield Row("tokens hit", hit, _count)
    yield Row("hit rate", hit / wanted if wanted else 0.0, "{:.1%}".format, grows=False)
    for reason, tokens in sorted(now.by_label("missed_tokens_total", "reason").items()):
        yield Row(f"tokens missed: {reason}", tokens, _count)
    for outcome, number in sorted(now.by_label("lookups_total", "outcome").items()):
        yield Row(f"lookups: {outcome}", number, _count)
    yield Row("lookup, mean", _mean_s(now, "lookup_seconds"), _milliseconds, grows=False)
    for operation, title in (("get", "loaded"), ("put", "saved")):
        yield Row(title, now.total("store_bytes_total", operation=operation), decimal_bytes)
        rate = _rate(now, operation)
        yield Row(f"{title}, inside store calls", rate, _rate_shown, grows=False)
    for operation in ("load", "save"):
        queued = now.total("queued_jobs", operation=operation)
        yield Row(f"{operation}s waiting", queued, _count, grows=False)
    in_flight = now.total("in_flight_bytes")
    yield Row("in flight", in_flight, decimal_bytes, grows=False)
    yield Row("blocks pinned", now.total("pinned_blocks"), _count, grows=False)
    yield from _failures(now)
    used, capacity = now.largest("store_used_bytes"), now.largest("store_capacity_bytes")
    yield Row("store, values", now.largest("store_values"), _count, grows=False)
    yield Row("store, used", used, decimal_bytes, grows=False)
    yield Row("store, full", used / capacity if capacity else 0.0, "{:.1%}".format, grows=False)


def store_rows(stats: StoreStats) -> Iterator[Row]:
    """Yield what a store holds."""
    yield Row("values", stats.num_values, _count)
    yield Row("used", stats.used_bytes, decimal_bytes)
    yield Row("capacity", stats.capacity_bytes, decimal_bytes, grows=False)
    share = stats.used_bytes / stats.capacity_bytes if stats.capacity_bytes else 0.0
    yield Row("full", share, "{:.1%}".format, grows=False)


def run_stats(
    look: Callable[[], list[Row]], console: Console, *, watch_s: float | None, as_json: bool
) -> None:
    """Show the rows once, or anew every ``watch_s`` seconds until interrupted."""
    rows = look()
    if as_json:
        print(json.dumps({row.title: row.value for row in rows}, indent=1))
    elif watch_s is None:
        console.print(table_of(rows))
    else:
        _watch(look, rows, console, watch_s)


def look_at_engine(url: str) -> list[Row]:
    """Return an engine's rows; ``ScrapeError`` where it cannot be read."""
    return list(engine_rows(scrape(url)))


def look_at_store(open_it: Callable[[], OpenedStore]) -> list[Row]:
    """Return a store's rows; it is opened for the moment only, so that its engines may end."""
    with closing(open_it()) as store:
        return list(store_rows(store.stats()))


def table_of(
    rows: list[Row], before: dict[str, float] | None = None, elapsed_s: float = 0.0
) -> Table:
    """Return the table; with what was ``before`` it has a column of growth a second."""
    table = Table(show_header=before is not None)
    table.add_column("")
    table.add_column("now", justify="right")
    if before is not None:
        table.add_column("a second", justify="right")
    for row in rows:
        cells = [row.title, row.show(row.value)]
        if before is not None:
            growth = (row.value - before.get(row.title, 0.0)) / elapsed_s if row.grows else None
            cells.append("" if growth is None else row.show(growth))
        table.add_row(*cells)
    return table


def decimal_bytes(number: float) -> str:
    """Return bytes as people read them; fewer may be there than before."""
    return ("-" if number < 0 else "") + decimal(int(abs(number)))


def _watch(
    look: Callable[[], list[Row]], rows: list[Row], console: Console, watch_s: float
) -> None:
    with Live(table_of(rows), console=console, auto_refresh=False) as live:
        before, looked_s = rows, _now_s()
        while True:
            time.sleep(watch_s)
            rows = look()
            now_s = _now_s()
            numbers = {row.title: row.value for row in before}
            live.update(table_of(rows, numbers, now_s - looked_s), refresh=True)
            before, looked_s = rows, now_s


def _now_s() -> float:
    return time.monotonic()


def _failures(now: Scrape) -> Iterator[Row]:
    """Yield every way of failing that has happened, by name."""
    for operation in ("load", "save"):
        outcomes = now.by_label("jobs_total", "outcome", operation=operation)
        for outcome, number in sorted(outcomes.items()):
            if outcome not in GOOD_JOBS:
                yield Row(f"{operation}s {outcome}", number, _count)
    for operation in ("exists", "get", "put"):
        outcomes = now.by_label("store_keys_total", "outcome", operation=operation)
        for outcome, number in sorted(outcomes.items()):
            if outcome not in GOOD_KEYS:
                yield Row(f"keys of {operation}: {outcome}", number, _count)
    for event, number in sorted(now.by_label("store_events_total", "event").items()):
        yield Row(f"store: {event}", number, _count)


def _mean_s(now: Scrape, name: str) -> float:
    number = now.total(f"{name}_count")
    return now.total(f"{name}_sum") / number if number else 0.0


def _rate(now: Scrape, operation: str) -> float:
    """Return bytes a second while calls of the store ran."""
    seconds = now.total("store_call_seconds_sum", operation=operation)
    return now.total("store_bytes_total", operation=operation) / seconds if seconds else 0.0


def _count(number: float) -> str:
    return f"{number:,.0f}" if number == int(number) else f"{number:,.1f}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"


def _rate_shown(bytes_a_second: float) -> str:
    return f"{bytes_a_second / 1e9:.2f} GB/s"
