# SPDX-License-Identifier: Apache-2.0
"""What a check is, what it finds, and how findings are shown."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from kvxfer.cli.doctor.surroundings import Surroundings


class Status(enum.StrEnum):
    """How bad a finding is."""

    OK = "ok"
    NOTE = "note"
    """Something to know; nothing to do."""
    WARNING = "warning"
    """It works, but less well than it could, or not under all circumstances."""
    FAULT = "fault"
    """A start-up is refused, requests fail, or nothing is ever saved or hit."""


STYLES = {
    Status.OK: ("✔", "green"),
    Status.NOTE: ("·", "cyan"),
    Status.WARNING: ("!", "yellow"),
    Status.FAULT: ("✘", "red"),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence of a check: what was found, and the way out where something is wrong."""

    status: Status
    text: str
    way_out: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """A named look at the surroundings; it yields a finding for each thing that it looked at.

    Nothing is yielded where the check does not apply. It changes nothing, but for a value of its
    own that it stores and removes.
    """

    name: str
    look: Callable[[Surroundings], Iterator[Finding]]


@dataclass(frozen=True, slots=True)
class Named:
    """A finding with the name of its check."""

    check: str
    finding: Finding

    def as_json(self) -> dict[str, str]:
        """Return it for programs."""
        found = self.finding
        return {
            "check": self.check,
            "status": found.status.value,
            "text": found.text,
            "way_out": found.way_out,
        }


def ok(text: str) -> Finding:
    """Return that all is well."""
    return Finding(Status.OK, text)


def note(text: str) -> Finding:
    """Return something to know."""
    return Finding(Status.NOTE, text)


def warning(text: str, way_out: str) -> Finding:
    """Return something that could be better, and how."""
    return Finding(Status.WARNING, text, way_out)


def fault(text: str, way_out: str) -> Finding:
    """Return something that has to be changed, and how."""
    return Finding(Status.FAULT, text, way_out)


def run_checks(checks: Iterable[Check], surroundings: Surroundings) -> Iterator[Named]:
    """Yield the findings as they come; a check that breaks is a fault of its own."""
    for check in checks:
        try:
            for finding in check.look(surroundings):
                yield Named(check.name, finding)
        except Exception as error:  # noqa: BLE001  # one broken check hides no other's finding
            text = f"this check itself failed: {type(error).__name__}: {error}"
            yield Named(check.name, fault(text, "report it, with the output of kvxfer doctor"))


def show(named: Named, console: Console) -> None:
    """Print one finding, its way out below it."""
    sign, style = STYLES[named.finding.status]
    line = Text.assemble((f"{sign} ", style), (f"{named.check:<22} ", "bold"), named.finding.text)
    console.print(line, soft_wrap=True)
    if named.finding.way_out:
        console.print(Text(f"    -> {named.finding.way_out}", style=style), soft_wrap=True)


def summary(found: Sequence[Named]) -> str:
    """Return the last line: how many of each."""
    counts = dict.fromkeys(Status, 0)
    for named in found:
        counts[named.finding.status] += 1
    faults, warnings = counts[Status.FAULT], counts[Status.WARNING]
    if not faults and not warnings:
        return f"healthy: {len(found)} findings, nothing to change"
    return f"{_number(faults, 'fault')}, {_number(warnings, 'warning')}"


def _number(count: int, word: str) -> str:
    return f"{count} {word}" + ("" if count == 1 else "s")
