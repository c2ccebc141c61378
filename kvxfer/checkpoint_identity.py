# SPDX-License-Identifier: Apache-2.0
"""What tells two checkpoints apart when a folder's name does not."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

SAMPLE_BYTES = 4 << 10
MAX_HEADER_BYTES = 100 << 20
"""What the safetensors format itself allows."""
OTHER_SUFFIXES = (".bin", ".pt", ".pth", ".gguf")


def checkpoint_fingerprint(folder: str | os.PathLike[str]) -> str:
    """Return 32 hex digits over a checkpoint's weights.

    Of safetensors files every tensor counts, by its name, type, shape and the first, middle and
    last 4 KiB of its bytes: training, merging or editing a matrix changes it nearly everywhere.
    Equal for a copy under another path. Of other formats the name, size and time of change of
    each file, so that a copy counts as another checkpoint: a miss, never a wrong hit. Without
    any weight file the path and the times of all files count. OSError where a file cannot be
    read, ValueError for a malformed one.

    Not seen: an edit of a few rows in the middle of a large matrix; set ``model_id`` then.
    """
    digest = hashlib.sha256()
    path = Path(folder)
    files = [path] if path.is_file() else sorted(path.iterdir())
    weights = [file for file in files if file.suffix == ".safetensors"]
    for file in weights:
        for part in _tensor_samples(file):
            digest.update(part)
    if not weights:
        others = [file for file in files if file.suffix in OTHER_SUFFIXES]
        for file in others or files:
            status = file.stat()
            name = file.name if others else str(file.absolute())
            digest.update(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:32]


def _tensor_samples(path: Path) -> Iterator[bytes]:
    """Yield the file's name, its header and the samples of each tensor; ValueError if malformed."""
    yield path.name.encode()
    with path.open("rb") as file:
        num_header_bytes = int.from_bytes(file.read(8), "little")
        if num_header_bytes > MAX_HEADER_BYTES:
            raise ValueError(f"{path} is no safetensors file: a header of {num_header_bytes} bytes")
        header = file.read(num_header_bytes)
        yield header
        for name, tensor in sorted(json.loads(header).items()):
            if name != "__metadata__":
                yield from _samples(file, 8 + num_header_bytes, tensor)


def _samples(file: BinaryIO, data_start: int, tensor: dict[str, Any]) -> Iterator[bytes]:
    start, end = tensor["data_offsets"]
    last = max(start, end - SAMPLE_BYTES)
    for offset in sorted({start, (start + last) // 2, last}):
        file.seek(data_start + offset)
        yield file.read(min(SAMPLE_BYTES, end - offset))
