# SPDX-License-Identifier: Apache-2.0
"""``kvxfer explain``: what a lookup of a prompt would answer now, as a picture."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from kvxfer.cli.deployment import Deployment
from kvxfer.cli.model_client import ask
from kvxfer.errors import ConfigError, KvxferError

CELLS_PER_ROW = 64
MOST_ROWS = 16
"""Of one group; a longer prompt gets cells of several blocks."""
LOADED, STORED, PARTLY, MISSING = "█", "▒", "▞", "·"
STYLES = {LOADED: "green", STORED: "yellow", PARTLY: "magenta", MISSING: "dim"}
LEGEND = (
    f"{LOADED} stored, loaded by this hit   {STORED} stored   "
    f"{PARTLY} stored in part   {MISSING} not stored"
)


def read_token_ids(path: Path) -> list[int]:
    """Return the token ids of a file: a JSON list, or numbers with blanks or commas between.

    ``ConfigError`` where it has anything else, or nothing.
    """
    try:
        text = path.read_text(encoding="utf-8")
        ids = [int(word) for word in text.strip().strip("[]").replace(",", " ").split()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"--token-ids {path}: {error}; give a list of numbers") from error
    if not ids or min(ids) < 0:
        raise ConfigError(f"--token-ids {path} holds no token ids")
    return ids


def run_explain(
    deployment: Deployment,
    console: Console,
    *,
    token_ids: Sequence[int] | None = None,
    text: str | None = None,
    as_json: bool = False,
) -> None:
    """Explain the prompt of ``token_ids`` or ``text``; a prompt that hits nothing is no failure.

    ``KvxferError`` where vLLM or kvxfer refuses the model, or the process that asks them crashes.
    """
    question: dict[str, object] = {
        "task": "explain",
        "arguments": deployment.engine_arguments(),
        "token_ids": list(token_ids) if token_ids is not None else None,
        "text": text,
    }
    with Console(stderr=True).status("asking vLLM for the model's cache groups and the hashes"):
        answer = ask(question)
    if "error" in answer:
        raise KvxferError(f"{answer['kind']}: {answer['error']}")
    if as_json:
        print(json.dumps(answer, indent=1))
    else:
        show_answer(answer, console)


def show_answer(answer: dict[str, Any], console: Console) -> None:
    """Print the sentence, and the picture of each group."""
    sentence, *groups = answer["line"].split("; ")
    console.print(f"model {answer['model']}, digest {answer['digest']}", highlight=False)
    console.print(f"store {answer['store']}", highlight=False, soft_wrap=True)
    if answer["store_trouble"]:
        console.print(f"[yellow]{answer['store_trouble']}[/yellow]", soft_wrap=True)
    console.print(f"[bold]{sentence}[/bold]", highlight=False, soft_wrap=True)
    for line, group in zip(_lines_of(answer["groups"], groups), answer["groups"], strict=True):
        console.print()
        console.print(line, highlight=False)
        for row in picture(group):
            console.print(row)
    console.print()
    console.print(LEGEND, style="dim", highlight=False)


def picture(group: dict[str, Any]) -> Iterator[Text]:
    """Yield the rows of one group's picture: the token at which a row starts, then its cells.

    ``group``: ``block_tokens``; ``stored`` and ``needed``, a flag a block, ``needed`` as far as
    the hit goes.
    """
    stored: list[bool] = group["stored"]
    needed = [*group["needed"], *[False] * len(stored)][: len(stored)]
    per_cell = max(1, -(-len(stored) // (CELLS_PER_ROW * MOST_ROWS)))
    cells = [
        _cell(stored[start : start + per_cell], needed[start : start + per_cell])
        for start in range(0, len(stored), per_cell)
    ]
    width = len(f"{len(stored) * group['block_tokens']}")
    for start in range(0, len(cells), CELLS_PER_ROW):
        row = Text(f"{start * per_cell * group['block_tokens']:>{width}} ", style="dim")
        for cell in cells[start : start + CELLS_PER_ROW]:
            row.append(cell, style=STYLES[cell])
        yield row


def _cell(stored: Sequence[bool], needed: Sequence[bool]) -> str:
    if not any(stored):
        return MISSING
    if not all(stored):
        return PARTLY
    return LOADED if any(needed) else STORED


def _lines_of(groups: Sequence[dict[str, Any]], reports: Sequence[str]) -> list[str]:
    """Return a headline for each group: what the explanation says of it, where it does."""
    said = {report.split(" ", 2)[1]: report for report in reports}
    return [
        f"{said.get(str(group['group'])) or 'group {group} ({kind})'.format(**group)}, "
        f"blocks of {group['block_tokens']} tokens{_eagle(group)}"
        for group in groups
    ]


def _eagle(group: dict[str, Any]) -> str:
    """Return what a group gives back for a drafter, as the end of its headline."""
    return f", gives {group['eagle_tokens']} back for EAGLE" if group["eagle_tokens"] else ""
