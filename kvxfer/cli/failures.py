# SPDX-License-Identifier: Apache-2.0
"""How a command ends that cannot do its work: one sentence on standard error, exit code 1."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from kvxfer.errors import KvxferError


@contextmanager
def failures_end_the_command() -> Iterator[None]:
    """Turn what kvxfer raises on purpose into its sentence; anything else is a bug and goes on."""
    try:
        yield
    except KvxferError as error:
        console = Console(stderr=True)
        console.print("FAILED", style="red", end="")
        console.print(f": {error}", soft_wrap=True, highlight=False, markup=False)
        raise typer.Exit(1) from error
