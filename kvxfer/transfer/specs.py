# SPDX-License-Identifier: Apache-2.0
"""What the scheduler side orders: frozen, picklable, and free of vLLM."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NULL_BLOCK_ID = 0
"""vLLM's placeholder block: it holds nothing and is never stored."""


@dataclass(frozen=True, slots=True)
class Chunks:
    """Consecutive chunks of one cache group, in prefix order.

    ``block_ids`` (n,) int32; ``hashes``: n hashes of ``hash_bytes`` bytes, back to back, each
    closing its chunk's last token.
    """

    group: int
    block_ids: NDArray[np.int32]
    hashes: bytes
    hash_bytes: int

    def __len__(self) -> int:
        return len(self.block_ids)

    def without_block(self, block_id: int) -> Chunks:
        """Return the chunks whose block is another than ``block_id``."""
        kept = np.flatnonzero(self.block_ids != block_id)
        if len(kept) == len(self):
            return self
        hashes = np.frombuffer(self.hashes, np.uint8).reshape(len(self), self.hash_bytes)[kept]
        return Chunks(self.group, self.block_ids[kept], hashes.tobytes(), self.hash_bytes)


@dataclass(frozen=True, slots=True)
class SaveSpec:
    """One save: ``blocks_free`` and ``ended`` are owed once per rank.

    ``epoch`` counts resets; a worker drops saves of an epoch before its last reset.
    """

    job_id: int
    request_id: str
    epoch: int
    chunks: tuple[Chunks, ...]


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """One load: tokens ``local_tokens`` to ``hit_tokens`` of a request, into allocated blocks.

    Not ``is_whole``: the blocks that vLLM allocated are not those that the hit needs. Nothing is
    loaded then, and the request is reported as failed, that is, recomputed.
    """

    job_id: int
    request_id: str
    local_tokens: int
    hit_tokens: int
    chunks: tuple[Chunks, ...]
    is_whole: bool = True
