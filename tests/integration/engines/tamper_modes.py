# SPDX-License-Identifier: Apache-2.0
"""What ``tampered_connector`` can do to loads, named for both sides of the process border."""

from pathlib import Path

CORRUPT = "corrupt"
"""Every value that arrives has its halves exchanged: right size, finite numbers, wrong cache."""
SWAP_SHARDS = "swap_shards"
"""The shards of KV heads 0 and 1 stand under each other's key."""
HOLD = "hold"
"""A load waits until the mode changes, and says so with a file."""


def held_file(tamper_file: Path) -> Path:
    """Return the file that appears when a load is held."""
    return tamper_file.with_suffix(".held")
