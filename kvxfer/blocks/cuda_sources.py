# SPDX-License-Identifier: Apache-2.0
"""The kernels' source text, and the binary that a build with nvcc made of it.

An installed package carries both in ``blocks/kernels``; a checkout has the text in ``csrc`` and
the binary in ``build/kernels``. A record beside the binary names the text that it was made of, so
that a stale one is never launched. Standard library only: setup.py runs this file as well.
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCE_NAMES = ("block_copy.cu", "block_copy.h")
BINARY_NAME = "block_copy.fatbin"
RECORD_NAME = "block_copy.fatbin.json"
ARCHITECTURES = (80, 86, 89, 90, 100, 120)
"""Compute capabilities, times ten, that a build makes machine code for where its nvcc can."""
PTX_ARCHITECTURE = 80
"""Of the portable code that a driver compiles for all others, those to come among them."""
INCLUDE_LINE = '#include "block_copy.h"\n'

PACKAGED = Path(__file__).parent / "kernels"
_CHECKOUT = Path(__file__).parents[2]


def source_folder() -> Path:
    """Return where the kernels' sources lie."""
    return PACKAGED if (PACKAGED / SOURCE_NAMES[0]).exists() else _CHECKOUT / "csrc"


def binary_folder() -> Path:
    """Return where a build would have put the binary."""
    return PACKAGED if (PACKAGED / SOURCE_NAMES[0]).exists() else _CHECKOUT / "build" / "kernels"


def read_source(folder: Path) -> str:
    """Return the kernels as one text, the header in place of its include: what NVRTC compiles."""
    kernel, header = ((folder / name).read_text() for name in SOURCE_NAMES)
    if kernel.count(INCLUDE_LINE) != 1:
        raise ValueError(f"{folder / SOURCE_NAMES[0]} does not include its header in one line")
    return kernel.replace(INCLUDE_LINE, header)


def hash_source(text: str) -> str:
    """Return what names a source text in a record: its SHA-256 in hex."""
    return hashlib.sha256(text.encode()).hexdigest()


def find_binary(folder: Path, source: str) -> Path | None:
    """Return the binary in ``folder`` if it was made of ``source``; None, logged, if it is stale.

    None without a word where there is none: nvcc was not there at build.
    """
    binary, record = folder / BINARY_NAME, folder / RECORD_NAME
    if not binary.exists():
        return None
    if recorded_hash(record) != hash_source(source):
        logger.warning("%s was not made of the sources that are here; it is not used", binary)
        return None
    return binary


def recorded_hash(record: Path) -> str | None:
    """Return the hash in a record, None where it is missing or unreadable."""
    try:
        entries = json.loads(record.read_text())
    except (OSError, ValueError):
        return None
    found = entries.get("source_sha256") if isinstance(entries, dict) else None
    return found if isinstance(found, str) else None
