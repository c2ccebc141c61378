# SPDX-License-Identifier: Apache-2.0
"""``kvxfer bench``: what this machine does, as a table, JSON, an HTML page or a PNG."""

from __future__ import annotations

import html
import importlib
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvxfer.cli.bench_cases import OURS, BenchSizes, Measured, measure_all
from kvxfer.errors import UnsupportedError

BAR_CELLS = 20
BAR_PIXELS = 420
COLORS = {OURS: "#2a7f62"}
OTHER_COLOR = "#b9c4cc"


def run_bench(
    sizes: BenchSizes, console: Console, *, as_json: bool, plots: Sequence[Path] = ()
) -> None:
    """Measure, show, and write each of ``plots`` in the format of its suffix.

    ``UnsupportedError`` before anything is measured where a plot cannot be drawn.
    """
    for path in plots:
        _check_plot(path)
    found = []
    with Console(stderr=True).status("measuring") as status:
        for measured in measure_all(sizes):
            status.update(f"measured: {measured.title}")
            found.append(measured)
    if as_json:
        facts = {"machine": machine(), "results": [each.as_json() for each in found]}
        print(json.dumps(facts, indent=1))
    else:
        console.print(table_of(found))
    for path in plots:
        if path.suffix == ".html":
            path.write_text(page_of(found), encoding="utf-8")
        else:
            draw(found, path)


def machine() -> str:
    """Return the machine in a few words."""
    return f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}"


def table_of(found: Sequence[Measured]) -> Table:
    """Return the results with a bar each; the longest of a case is its largest number."""
    table = Table(title=f"kvxfer on {machine()}", show_lines=False)
    for title in ("", "who", ""):
        table.add_column(title)
    table.add_column("median", justify="right")
    for measured in found:
        longest = max(measured.medians.values())
        for idx, (who, median) in enumerate(measured.medians.items()):
            bar = "█" * max(1, round(BAR_CELLS * median / longest))
            title = measured.title if idx == 0 else ""
            style = "green" if who == OURS else "dim"
            table.add_row(title, who, f"[{style}]{bar}[/{style}]", shown(measured, median))
        table.add_section()
    return table


def shown(measured: Measured, median: float) -> str:
    """Return a number with its unit."""
    return f"{median:.3g} {measured.unit}"


def page_of(found: Sequence[Measured]) -> str:
    """Return one page without scripts or anything to fetch: a bar chart a case."""
    charts = "\n".join(map(_chart, found))
    title = f"kvxfer on {html.escape(machine())}"
    return (
        "<!doctype html>\n<meta charset=utf-8>\n"
        f"<title>{title}</title>\n"
        "<style>body{font:16px system-ui;max-width:46em;margin:3em auto;color:#223}"
        "h2{font-size:1em;margin:2em 0 .4em}text{font:14px system-ui}</style>\n"
        f"<h1>{title}</h1>\n<p>Medians. Longer is better for GB/s, shorter for us and ms.</p>\n"
        f"{charts}\n"
    )


def _chart(measured: Measured) -> str:
    longest = max(measured.medians.values())
    rows = []
    for idx, (who, median) in enumerate(measured.medians.items()):
        top, width = 26 * idx, max(2, round(BAR_PIXELS * median / longest))
        color = COLORS.get(who, OTHER_COLOR)
        rows.append(
            f'<text x="0" y="{top + 15}">{html.escape(who)}</text>'
            f'<rect x="110" y="{top}" width="{width}" height="20" rx="3" fill="{color}"/>'
            f'<text x="{116 + width}" y="{top + 15}">{shown(measured, median)}</text>'
        )
    height = 26 * len(rows)
    return (
        f'<h2>{html.escape(measured.title)}</h2>\n<svg width="700" height="{height}" '
        f'role="img">{"".join(rows)}</svg>'
    )


def draw(found: Sequence[Measured], path: Path) -> None:
    """Draw the same with matplotlib, one axis a case."""
    pyplot: Any = _pyplot()
    figure, axes = pyplot.subplots(len(found), 1, figsize=(8, 1.4 * len(found)), squeeze=False)
    for axis, measured in zip(axes[:, 0], found, strict=True):
        names = list(measured.medians)
        colors = [COLORS.get(name, OTHER_COLOR) for name in names]
        axis.barh(names, list(measured.medians.values()), color=colors)
        axis.set_title(f"{measured.title} ({measured.unit})", loc="left", fontsize=9)
        axis.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _check_plot(path: Path) -> None:
    """Raise ``UnsupportedError`` for what cannot be written."""
    if path.suffix not in (".html", ".png"):
        raise UnsupportedError(f"--plot {path}: write a name that ends with .html or .png")
    if not path.absolute().parent.is_dir():
        raise UnsupportedError(f"--plot {path}: there is no such folder")
    if path.suffix == ".png":
        _pyplot()


def _pyplot() -> Any:
    try:
        importlib.import_module("matplotlib").use("Agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise UnsupportedError(
            f"a PNG takes matplotlib ({error}): pip install matplotlib, or write --plot bench.html"
        ) from error
