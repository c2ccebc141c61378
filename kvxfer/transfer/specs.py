# SPDX-License-Identifier: Apache-2.0
"""What the scheduler side orders: frozen, picklable, and free of vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NULL_BLOCK_ID = 0
"""vLLM's placeholder block: it holds nothing and is never stored."""


@dataclass(frozen=True, slots=True)
class Chunks:
    """Chunks of one cache group; those of one request are in prefix order.

    ``block_ids`` (n,) int32; ``hashes``: n hashes of ``hash_bytes`` bytes, back to back, each
    closing its chunk's last token. Those of a load are consecutive.
    """

    group: int
    block_ids: NDArray[np.int32]
    hashes: bytes
    hash_bytes: int

    @classmethod
    def of(cls, group: int, blocks: Mapping[bytes, int]) -> Chunks:
        """Return the chunks of ``blocks``, which maps hashes of one length to block ids."""
        hashes = b"".join(blocks)
        block_ids = np.fromiter(blocks.values(), np.int32, len(blocks))
        return cls(group, block_ids, hashes, len(hashes) // max(1, len(blocks)))

    def __len__(self) -> int:
        return len(self.block_ids)

    def by_hash(self) -> dict[bytes, int]:
        """Return the block id of each hash, in order."""
        starts = range(0, len(self.hashes), max(1, self.hash_bytes))
        hashes = [self.hashes[at : at + self.hash_bytes] for at in starts]
        return dict(zip(hashes, self.block_ids.tolist(), strict=True))

    def without_block(self, block_id: int) -> Chunks:
        """Return the chunks whose block is another than ``block_id``."""
        kept = np.flatnonzero(self.block_ids != block_id)
        if len(kept) == len(self):
            return self
        hashes = np.frombuffer(self.hashes, np.uint8).reshape(len(self), self.hash_bytes)[kept]
        return Chunks(self.group, self.block_ids[kept], hashes.tobytes(), self.hash_bytes)


def merge_chunks(parts: Iterable[Chunks]) -> tuple[Chunks, ...]:
    """Return one ``Chunks`` a group with all of ``parts``; of equal chunks one is kept."""
    groups: dict[int, dict[bytes, int]] = {}
    for part in parts:
        groups.setdefault(part.group, {}).update(part.by_hash())
    return tuple(Chunks.of(group, blocks) for group, blocks in groups.items())


@dataclass(frozen=True, slots=True)
class SaveSpec:
    """One save, of one request or several: ``blocks_free`` and ``ended`` are owed once per rank.

    ``epoch`` counts resets; a worker drops saves of an epoch before its last reset.
    """

    job_id: int
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
