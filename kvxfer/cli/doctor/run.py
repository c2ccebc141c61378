# SPDX-License-Identifier: Apache-2.0
"""All checks in order, shown as they come."""

from __future__ import annotations

import json
from itertools import chain

from rich.console import Console

from kvxfer.cli.doctor import install, lmdb, model, mooncake, settings, uris
from kvxfer.cli.doctor.findings import Check, Named, Status, run_checks, show, summary
from kvxfer.cli.doctor.surroundings import Surroundings

CHECKS: tuple[Check, ...] = tuple(
    chain.from_iterable(m.CHECKS for m in (settings, uris, lmdb, mooncake, install, model))
)
"""What takes no time first: a process that imports vLLM and torch takes ten seconds."""


def run_doctor(
    surroundings: Surroundings, console: Console, *, as_json: bool = False, strict: bool = False
) -> int:
    """Run every check, print what it finds, and return the exit code.

    0 without a fault, 1 with one; ``strict``: 1 with a warning too.
    """
    found: list[Named] = []
    with Console(stderr=True).status("looking"):
        for named in run_checks(CHECKS, surroundings):
            found.append(named)
            if not as_json:
                show(named, console)
    if as_json:
        print(json.dumps([named.as_json() for named in found], indent=1))
    else:
        console.print()
        console.print(summary(found), style="bold", highlight=False)
    statuses = {named.finding.status for named in found}
    bad = {Status.FAULT, Status.WARNING} if strict else {Status.FAULT}
    return 1 if statuses & bad else 0
