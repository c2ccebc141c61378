# SPDX-License-Identifier: Apache-2.0
"""What the search wants of a kind of cache group: its scan, what that can read, its masks.

One class a kind: :mod:`kvxfer.hits.native_kinds` and :mod:`kvxfer.hits.manager_kind`. All speak
of *hash indices* (positions in ``block_hashes``): the chunk that ends at token t has index
``t / hash_tokens - 1``. They follow ``find_longest_cache_hit`` and ``reachable_block_mask`` of
vLLM's managers.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvxfer.hits.groups import MergedGroup

FIRST_WINDOW_CHUNKS = 64
"""Chunks in the first window of a scan; each next one is twice as long. A cold prompt costs one."""


class Found(NamedTuple):
    """What one group offers: a hit length and the span of its blocks that would be loaded."""

    tokens: int
    first_block: int
    num_blocks: int
    unknown_idx: int = -1
    """The answer that the scan lacked, as a hash index; then the rest means nothing."""
    mask: NDArray[np.bool_] | None = None
    """The blocks to load where they are not ``[first_block, num_blocks)``."""

    def load_mask(self) -> NDArray[np.bool_]:
        """Return which of the group's blocks are loaded, (num_blocks,) bool from token 0."""
        if self.mask is not None:
            return self.mask[: self.num_blocks]
        mask = np.zeros(self.num_blocks, dtype=np.bool_)
        mask[self.first_block :] = True
        return mask


@dataclass(frozen=True, slots=True)
class SavePolicy:
    """What of a prompt is worth saving: see ``Coordinator.save_mask``."""

    align_tokens: int
    retention_tokens: int | None
    boundaries: tuple[int, ...]
    """Positions at which a later request can resume this prompt."""


class KindSearch(abc.ABC):
    """The search of one merged group, with the sizes of its coordinator. Immutable."""

    from_left = True
    """Whether the scan reads from token 0 on, or back from the length at hand."""

    def __init__(self, merged: MergedGroup, hash_tokens: int, align_tokens: int) -> None:
        self.merged = merged
        self.block_tokens = merged.group.block_tokens
        self.hash_tokens = hash_tokens
        self.align_tokens = align_tokens

    @property
    def peek_tokens(self) -> int:
        """How far past a hit an EAGLE group reads before it gives the block back."""
        return self.block_tokens

    @abc.abstractmethod
    def find(self, states: NDArray[np.uint8], max_tokens: int, drop_eagle: bool) -> Found:
        """Return the longest hit of at most ``max_tokens`` over the answers known so far."""

    @abc.abstractmethod
    def num_candidates(self, max_tokens: int) -> int:
        """Return how many chunks a search below ``max_tokens`` may read."""

    @abc.abstractmethod
    def candidates(self, max_tokens: int) -> NDArray[np.int32]:
        """Return the hash indices of those chunks."""

    @abc.abstractmethod
    def window(self, unknown_idx: int, num_chunks: int, max_tokens: int) -> NDArray[np.int32]:
        """Return the next ``num_chunks`` candidates in scan order, ``unknown_idx`` among them."""

    def runs_on(self, window: NDArray[np.int32], unknown_idx: int) -> bool:
        """Return whether a scan that has read ``window`` to its end reads ``unknown_idx`` next."""
        return bool(unknown_idx == window[-1] + self._scale)

    def first_window(self, ends_on_boundary: bool) -> int:
        """Return how many chunks to ask for when a scan starts.

        ``ends_on_boundary``: a full hit would be derived again one boundary lower, so what that
        reads is asked for too.
        """
        del ends_on_boundary
        return FIRST_WINDOW_CHUNKS

    def save_mask(self, start_block: int, end_block: int, policy: SavePolicy) -> NDArray[np.bool_]:
        """Return which blocks of [start, end) a later hit can need: all, unless overridden."""
        del policy
        return np.ones(end_block - start_block, dtype=np.bool_)

    @property
    def _scale(self) -> int:
        return self.block_tokens // self.hash_tokens

    def _block_ends(self, first_block: int, stop_block: int, step: int = 1) -> NDArray[np.int32]:
        """Return the hash index that closes each block of the range."""
        blocks = np.arange(first_block, stop_block, step, dtype=np.int32)
        return (blocks + 1) * np.int32(self._scale) - np.int32(1)
