# SPDX-License-Identifier: Apache-2.0
"""The kind that the native search does not know: its own manager searches, in Python."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvxfer._native.hits import PRESENT, UNKNOWN
from kvxfer.hits.groups import Manager, MergedGroup
from kvxfer.hits.kinds import Found, KindSearch, SavePolicy


class _ManagerSearch(KindSearch):
    """A kind that only its own manager knows: asked as a whole below the hit so far."""

    def __init__(self, merged: MergedGroup, hash_tokens: int, align_tokens: int) -> None:
        super().__init__(merged, hash_tokens, align_tokens)
        assert merged.group.manager is not None
        self._manager: Manager = merged.group.manager
        self._below_block = self._manager.below_block and align_tokens < self.block_tokens

    @property
    def peek_tokens(self) -> int:
        if not self._manager.gives_back_eagle:
            return 0
        return self.hash_tokens if self._below_block else self.block_tokens

    def find(self, states: NDArray[np.uint8], max_tokens: int, drop_eagle: bool) -> Found:
        wanted = self.candidates(min(max_tokens, len(states) * self.hash_tokens))
        unknown = wanted[states[wanted] == UNKNOWN]
        if len(unknown):
            return Found(0, 0, 0, int(unknown[-1]))
        tokens, mask = self._manager.find_longest_cache_hit(
            (states == PRESENT).astype(np.uint8),
            max_tokens,
            self.hash_tokens,
            self.align_tokens,
            drop_eagle,
        )
        loaded = np.asarray(mask, dtype=np.bool_)
        return Found(tokens, 0, len(loaded), mask=loaded)

    def num_candidates(self, max_tokens: int) -> int:
        return max_tokens // (self.hash_tokens if self._below_block else self.block_tokens)

    def candidates(self, max_tokens: int) -> NDArray[np.int32]:
        if self._below_block:
            return np.arange(max_tokens // self.hash_tokens, dtype=np.int32)
        return self._block_ends(0, max_tokens // self.block_tokens)

    def window(self, unknown_idx: int, num_chunks: int, max_tokens: int) -> NDArray[np.int32]:
        del num_chunks, max_tokens
        return self.candidates((unknown_idx + 1) * self.hash_tokens)

    def save_mask(self, start_block: int, end_block: int, policy: SavePolicy) -> NDArray[np.bool_]:
        mask = self._manager.reachable_block_mask(
            start_block,
            end_block,
            policy.align_tokens,
            self.merged.eagle,
            policy.retention_tokens,
            policy.boundaries,
        )
        if mask is None:
            return np.ones(end_block - start_block, dtype=np.bool_)
        return np.asarray(mask, dtype=np.bool_)


def manager_search(merged: MergedGroup, hash_tokens: int, align_tokens: int) -> KindSearch:
    """Return the search of a merged group of kind ``"other"``."""
    return _ManagerSearch(merged, hash_tokens, align_tokens)
