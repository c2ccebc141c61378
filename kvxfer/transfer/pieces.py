# SPDX-License-Identifier: Apache-2.0
"""The values of a job as flat arrays, and their cut into batches that fit a staging slot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress, pairwise

import numpy as np
from numpy.typing import NDArray

from kvxfer.blocks import ITEM_DTYPE
from kvxfer.keys import KeySpace, shard_keys
from kvxfer.transfer.specs import Chunks

VALUE_ALIGN = 64
"""Bytes; one cache line, so that streaming stores of neighbours never share one."""
PAGE_BYTES = 4096
"""Where every value of a job is as large, values begin on pages: whole ones on any transport."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Values ``start`` to ``stop`` of a job, and where each lies in the slot.

    ``offsets`` (stop - start,) int64 bytes from the slot's start.
    """

    start: int
    stop: int
    offsets: NDArray[np.int64]
    num_bytes: int
    """Of the slot, up to the end of the last value."""

    @property
    def rows(self) -> slice:
        """The batch's part of the job's arrays."""
        return slice(self.start, self.stop)


@dataclass(frozen=True, slots=True)
class Pieces:
    """One entry per value: a chunk's values stand together, chunks in prefix order.

    ``keys`` (n,); ``sizes`` (n,) int64 bytes; ``block_ids``, ``class_ids``, ``chunk_idx`` (n,)
    int32, the last counting through all chunks of the job.
    """

    keys: list[bytes]
    sizes: NDArray[np.int64]
    block_ids: NDArray[np.int32]
    class_ids: NDArray[np.int32]
    chunk_idx: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.keys)

    @classmethod
    def of(cls, chunks: Sequence[Chunks], spaces: Mapping[int, Sequence[KeySpace]]) -> Pieces:
        """List the values of ``chunks`` in ``spaces``, which maps a group to its key spaces."""
        parts, first_chunk = [], 0
        for part in chunks:
            parts.append(_pieces_of_group(part, spaces.get(part.group, ()), first_chunk))
            first_chunk += len(part)
        return parts[0] if len(parts) == 1 else _concatenate(parts)

    def select(self, chosen: NDArray[np.bool_]) -> Pieces:
        """Return the entries where ``chosen`` (n,) is True."""
        if chosen.all():
            return self
        keys = list(compress(self.keys, chosen.tolist()))
        return Pieces(
            keys=keys,
            sizes=self.sizes[chosen],
            block_ids=self.block_ids[chosen],
            class_ids=self.class_ids[chosen],
            chunk_idx=self.chunk_idx[chosen],
        )

    def batches(self, slot_bytes: int) -> Iterator[Batch]:
        """Cut into runs that fit ``slot_bytes``; ValueError for a value that never fits."""
        align = PAGE_BYTES if len(self) and self.sizes.min() >= PAGE_BYTES else VALUE_ALIGN
        padded = -(-self.sizes // align) * align
        if len(padded) and int(padded.max()) > slot_bytes:
            raise ValueError(f"a value has {int(padded.max())} bytes, a staging slot {slot_bytes}")
        ends = np.cumsum(padded)
        bounds = _cut(ends, slot_bytes)
        bases = np.repeat(np.append(0, ends)[bounds[:-1]], np.diff(bounds))
        offsets = ends - padded - bases
        for start, stop in pairwise(bounds):
            num_bytes = int(offsets[stop - 1] + padded[stop - 1])
            yield Batch(start, stop, offsets[start:stop], num_bytes)

    def items(self, batch: Batch, slot_ptr: int) -> NDArray[np.void]:
        """Return the copy items of a batch (``blocks.ITEM_DTYPE``)."""
        items = np.empty(batch.stop - batch.start, dtype=ITEM_DTYPE)
        items["value_ptr"] = batch.offsets.view(np.uint64) + np.uint64(slot_ptr)
        items["block_id"] = self.block_ids[batch.rows]
        items["class_id"] = self.class_ids[batch.rows]
        return items

    def views(self, batch: Batch, buffer: memoryview) -> list[memoryview]:
        """Return the part of the slot's ``buffer`` that each value of a batch takes."""
        starts = batch.offsets.tolist()
        sizes = self.sizes[batch.rows].tolist()
        return [buffer[at : at + size] for at, size in zip(starts, sizes, strict=True)]


def _pieces_of_group(chunks: Chunks, spaces: Sequence[KeySpace], first_chunk: int) -> Pieces:
    num_chunks, num_spaces = len(chunks), len(spaces)
    every = np.arange(num_chunks, dtype=np.int32)
    pieces = Pieces(
        keys=shard_keys(spaces, chunks.hashes, chunks.hash_bytes, every),
        sizes=np.tile(np.array([s.value_bytes for s in spaces], dtype=np.int64), num_chunks),
        block_ids=np.repeat(chunks.block_ids, num_spaces),
        class_ids=np.tile(np.array([s.class_id for s in spaces], dtype=np.int32), num_chunks),
        chunk_idx=np.repeat(every + np.int32(first_chunk), num_spaces),
    )
    if len(pieces) == 0 or all(space.num_turns == 1 for space in spaces):
        return pieces
    return pieces.select(_on_turn(chunks, spaces))


def _on_turn(chunks: Chunks, spaces: Sequence[KeySpace]) -> NDArray[np.bool_]:
    """Return (chunks x spaces,) which values are this rank's: replicas share them by the hash."""
    last_bytes = np.frombuffer(chunks.hashes, np.uint8).reshape(len(chunks), -1)[:, -4:]
    numbers = np.ascontiguousarray(last_bytes).view(np.uint32)  # (chunks, 1)
    turns = np.array([space.turn for space in spaces], dtype=np.uint32)
    num_turns = np.array([space.num_turns for space in spaces], dtype=np.uint32)
    chosen: NDArray[np.bool_] = (numbers % num_turns == turns).ravel()
    return chosen


def _cut(ends: NDArray[np.int64], slot_bytes: int) -> list[int]:
    """Return where batches of at most ``slot_bytes`` begin, and the end of the last.

    ``ends`` (n,) int64: bytes up to the end of each value, none of which is above ``slot_bytes``.
    """
    bounds, base = [0], 0
    while bounds[-1] < len(ends):
        stop = int(ends.searchsorted(base + slot_bytes, side="right"))
        base = int(ends[stop - 1])
        bounds.append(stop)
    return bounds


def _concatenate(parts: Sequence[Pieces]) -> Pieces:
    return Pieces(
        keys=list(chain.from_iterable(part.keys for part in parts)),
        sizes=np.concatenate([np.zeros(0, np.int64), *(part.sizes for part in parts)]),
        block_ids=np.concatenate([np.zeros(0, np.int32), *(part.block_ids for part in parts)]),
        class_ids=np.concatenate([np.zeros(0, np.int32), *(part.class_ids for part in parts)]),
        chunk_idx=np.concatenate([np.zeros(0, np.int32), *(part.chunk_idx for part in parts)]),
    )
