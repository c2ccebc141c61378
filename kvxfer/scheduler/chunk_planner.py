# SPDX-License-Identifier: Apache-2.0
"""Which chunks a load or a save consists of: blocks of vLLM's tables, hashes at their ends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvxfer._native.keys import pack_hashes
from kvxfer.hits import Coordinator
from kvxfer.transfer.specs import NULL_BLOCK_ID, Chunks

Tables = Sequence[Sequence[int]]
"""Block ids of one request, by cache group."""
HandedBlock = tuple[int, int, int]
"""(group, block id, tokens): the core hands over a block whose state covers so many tokens."""


class Hashed(Protocol):
    """The part of vLLM's request that planning reads."""

    block_hashes: list[bytes]
    num_prompt_tokens: int


class ChunkPlanner:
    """Turns token ranges into chunks, by the masks of ``hits.Coordinator``; scheduler side.

    Null blocks never become chunks. Tokens without a hash never do: callers ask for hashed
    tokens only, and a hand-over beyond the hashes is left out. Where ``generated`` is given, its
    save masks count besides from the last boundary of the prompt on.
    """

    def __init__(self, coordinator: Coordinator, generated: Coordinator | None = None) -> None:
        self._coordinator, self._generated = coordinator, generated
        self._hash_tokens = coordinator.hash_tokens
        self._block_tokens = [group.block_tokens for group in coordinator.groups]
        kinds = {group.kind for group in coordinator.groups if group.cacheable}
        self._all_full = kinds == {"full"}
        self._cacheable = [
            (idx, group.block_tokens, group.block_tokens // coordinator.hash_tokens)
            for idx, group in enumerate(coordinator.groups)
            if group.cacheable
        ]
        common = coordinator.block_tokens
        self.blocks_per_common_block = sum(common // size for _, size, _ in self._cacheable)
        """Blocks of all cached groups that hold as many tokens as the common block."""
        # A window is saved at each boundary: each of its blocks, where all of them end at one.
        windows = (generated or coordinator).retention_tokens is None
        self.saves_every_generated_block = all(
            group.kind == "full"
            or (group.kind == "sliding_window" and windows and group.block_tokens == common)
            for group in coordinator.groups
            if group.cacheable
        )
        """Beyond the prompt ``saves`` leaves out no block: ``common_blocks`` says the same."""

    def loads(
        self,
        request: Hashed,
        tables: Tables,
        local_tokens: int,
        hit_tokens: int,
        tail_boundaries: Mapping[int, int],
    ) -> tuple[Chunks, ...] | None:
        """Return what each group needs beyond ``local_tokens`` to hold a hit of ``hit_tokens``.

        ``tail_boundaries``: group -> token at which the chunk ends under whose key the group's
        last block is stored. None where ``hit_tokens`` is no boundary, or a block that the hit
        needs was not allocated: such a load can never be complete.
        """
        if self._coordinator.align_lookup_length(hit_tokens) != hit_tokens:
            return None
        found = []
        for group, mask in enumerate(self._coordinator.load_mask(hit_tokens)):
            first = local_tokens // self._block_tokens[group]
            block_idx = np.flatnonzero(mask[first:]) + first
            ends = np.minimum((block_idx + 1) * self._block_tokens[group], hit_tokens)
            if len(ends) and block_idx[-1] == len(mask) - 1:
                ends[-1] = tail_boundaries.get(group, ends[-1])
            chunks = self._chunks(request, group, tables[group], block_idx, ends)
            if len(chunks) < len(block_idx):
                return None
            found.append(chunks)
        return tuple(chunks for chunks in found if len(chunks))

    def saves(self, request: Hashed, tables: Tables, start: int, end: int) -> tuple[Chunks, ...]:
        """Return the chunks of tokens [start, end), multiples of the common block, to save.

        What vLLM's own prefix cache would retain; recurrent states are handed over instead.
        """
        if self._all_full:
            return self._every_chunk(request, tables, start, end)
        found = []
        for group, block_idx in enumerate(self._saved_blocks(start, end, request)):
            ends = (block_idx + 1) * self._block_tokens[group]
            found.append(self._chunks(request, group, tables[group], block_idx, ends))
        return tuple(chunks for chunks in found if len(chunks))

    def common_blocks(
        self, requests: Iterable[tuple[Sequence[bytes], Sequence[Sequence[Any]], int]]
    ) -> tuple[Chunks, ...]:
        """Return all chunks of one common block of each request.

        A request is given as its block hashes, vLLM's blocks of each group, and the tokens at
        which the common block ends, for which there are hashes. Null blocks and those that are
        not in the table are left out; of chunks that several requests have, one is kept.
        """
        requests = list(requests)
        common, hash_tokens = self._coordinator.block_tokens, self._hash_tokens
        found = []
        for group, size, _ in self._cacheable:
            by_hash: dict[bytes, int] = {}
            for hashes, tables, end in requests:
                table = tables[group]
                for stop in range(end - common + size, min(end, len(table) * size) + 1, size):
                    by_hash[hashes[stop // hash_tokens - 1]] = table[stop // size - 1].block_id
            found.append(Chunks.of(group, by_hash).without_block(NULL_BLOCK_ID))
        return tuple(filter(len, found))

    def handed(self, request: Hashed, blocks: Iterable[HandedBlock]) -> tuple[Chunks, ...]:
        """Return the chunks of blocks that the core hands over, each keyed at its tokens."""
        hashed_tokens = len(request.block_hashes) * self._hash_tokens
        found = []
        for group, block_id, tokens in blocks:
            if 0 < tokens <= hashed_tokens and tokens % self._hash_tokens == 0:
                end = np.array([tokens])
                found.append(self._chunks(request, group, [block_id], np.array([0]), end))
        return tuple(chunks for chunks in found if len(chunks))

    def prompt_tail(
        self, request: Hashed, tables: Tables, boundary: int, computed_tokens: int
    ) -> tuple[Chunks, ...]:
        """Return what a hit at ``boundary``, below a common block, needs of the attention groups.

        Their blocks from the last common block to ``boundary`` and, for EAGLE groups, as far as
        the search reads past a hit; the last one is keyed where that ends. Groups of which that
        is not computed or hashed yet are left out, recurrent ones are handed over.
        """
        found = []
        start = boundary // self._coordinator.block_tokens * self._coordinator.block_tokens
        known = min(computed_tokens, len(request.block_hashes) * self._hash_tokens)
        for group, description in enumerate(self._coordinator.groups):
            end = boundary + self._coordinator.eagle_tokens(group)
            if not description.cacheable or description.kind == "mamba" or end > known:
                continue
            size = self._block_tokens[group]
            block_idx = np.arange(start // size, -(-end // size))
            ends = np.minimum((block_idx + 1) * size, end)
            found.append(self._chunks(request, group, tables[group], block_idx, ends))
        return tuple(chunks for chunks in found if len(chunks))

    def _every_chunk(
        self, request: Hashed, tables: Tables, start: int, end: int
    ) -> tuple[Chunks, ...]:
        """Return all chunks of tokens [start, end): most steps complete one block of a request."""
        found = []
        for group, size, per_block in self._cacheable:
            first, last = start // size, end // size
            block_ids = tables[group][first:last]
            if NULL_BLOCK_ID in block_ids or len(block_ids) < last - first:
                block_idx = np.arange(first, last)
                found.append(
                    self._chunks(request, group, tables[group], block_idx, (block_idx + 1) * size)
                )
                continue
            at = (first + 1) * per_block - 1
            hashes = request.block_hashes[at : last * per_block : per_block]
            ids = np.array(block_ids, dtype=np.int32)
            found.append(Chunks(group, ids, b"".join(hashes), len(hashes[0])))
        return tuple(filter(len, found))

    def _saved_blocks(self, start: int, end: int, request: Hashed) -> list[NDArray[np.int64]]:
        """Return the indices of the blocks to save, by group."""
        prompt = request.num_prompt_tokens
        masks = self._coordinator.save_mask(end, start, prompt)
        last_boundary = self._coordinator.align_lookup_length(prompt - 1)
        if self._generated is not None and end > last_boundary:
            more = self._generated.save_mask(end, max(start, last_boundary), prompt)
            masks = [one | other for one, other in zip(masks, more, strict=True)]
        return [np.flatnonzero(mask) for mask in masks]

    def _chunks(
        self,
        request: Hashed,
        group: int,
        table: Sequence[int],
        block_idx: NDArray[np.int64],
        ends: NDArray[np.int64],
    ) -> Chunks:
        """Return the blocks at ``block_idx`` of a table, keyed by the hashes at ``ends``."""
        inside = block_idx < len(table)
        block_idx, ends = block_idx[inside], ends[inside]
        block_ids = np.array([table[idx] for idx in block_idx.tolist()], dtype=np.int32)
        hashes = pack_hashes(request.block_hashes, (ends // self._hash_tokens - 1).astype(np.int32))
        chunks = Chunks(group, block_ids, hashes, len(hashes) // max(1, len(block_ids)))
        return chunks.without_block(NULL_BLOCK_ID)
