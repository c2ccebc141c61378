# SPDX-License-Identifier: Apache-2.0
"""Entry point of the ``kvxfer`` command."""

from __future__ import annotations

_EXTRA = ("typer", "rich")


def main() -> None:
    """Run the command line; exits with the command's status."""
    try:
        from kvxfer.cli.app import app  # noqa: PLC0415 (needs the extra)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _EXTRA:
            raise
        raise SystemExit(f"{error}; the command line needs: pip install 'kvxfer[cli]'") from error
    app()
