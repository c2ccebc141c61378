# SPDX-License-Identifier: Apache-2.0
"""What tells two checkpoints apart when a folder's name does not."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

SAMPLE_BYTES = 64 << 10
SAMPLES_PER_FILE = 16
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")


def checkpoint_fingerprint(folder: str | os.PathLike[str]) -> str:
    """Return 32 hex digits over a checkpoint's weights; equal for a copy under another path.

    Reads, of each weight file, its name, its size and 16 samples of 64 KiB spread evenly over
    it: a training step moves nearly all weights, so no sample of an updated tensor stays the
    same. At most 1 MiB a file is read. Raises OSError where a file cannot be read.
    """
    digest = hashlib.sha256()
    for path in _weight_files(Path(folder)):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            for offset in _sample_offsets(size):
                file.seek(offset)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def _weight_files(folder: Path) -> list[Path]:
    if folder.is_file():
        return [folder]
    return sorted(path for path in folder.iterdir() if path.suffix in WEIGHT_SUFFIXES)


def _sample_offsets(size: int) -> list[int]:
    last = max(0, size - SAMPLE_BYTES)
    return sorted({last * i // (SAMPLES_PER_FILE - 1) for i in range(SAMPLES_PER_FILE)})
