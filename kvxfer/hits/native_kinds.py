# SPDX-License-Identifier: Apache-2.0
"""The kinds whose scans are native: full attention, windows, local chunks, recurrent states.

The scan of each is in ``_native.hits``; here is which chunks it can read, so that the store is
asked for those and no others, and which blocks a load or a save of the kind consists of.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvxfer._native.hits import (
    find_chunked_local,
    find_full,
    find_mamba,
    find_sliding_window,
)
from kvxfer.errors import UnsupportedError
from kvxfer.hits.groups import MergedGroup
from kvxfer.hits.kinds import Found, KindSearch, SavePolicy


class _FullSearch(KindSearch):
    """Full attention and MLA: from the left to the first hole."""

    @property
    def peek_tokens(self) -> int:
        return min(self.block_tokens, self.align_tokens)

    @property
    def _below_block(self) -> bool:
        return self.align_tokens < self.block_tokens

    def find(self, states: NDArray[np.uint8], max_tokens: int, drop_eagle: bool) -> Found:
        return Found(
            *find_full(
                states,
                max_tokens,
                self.block_tokens,
                self.hash_tokens,
                self.align_tokens,
                drop_eagle,
            )
        )

    def num_candidates(self, max_tokens: int) -> int:
        return max_tokens // (self.hash_tokens if self._below_block else self.block_tokens)

    def candidates(self, max_tokens: int) -> NDArray[np.int32]:
        if self._below_block:
            return np.arange(max_tokens // self.hash_tokens, dtype=np.int32)
        return self._block_ends(0, max_tokens // self.block_tokens)

    def window(self, unknown_idx: int, num_chunks: int, max_tokens: int) -> NDArray[np.int32]:
        block = unknown_idx // self._scale
        if (unknown_idx + 1) % self._scale:  # inside the block after the last whole one
            return np.arange(block * self._scale, unknown_idx + 1, dtype=np.int32)
        stop = min(block + num_chunks, max_tokens // self.block_tokens)
        return np.arange(unknown_idx, stop * self._scale, self._scale, dtype=np.int32)


class _SlidingWindowSearch(KindSearch):
    """Sliding windows: from the right, the last boundary below which a window is whole."""

    from_left = False

    def __init__(self, merged: MergedGroup, hash_tokens: int, align_tokens: int) -> None:
        super().__init__(merged, hash_tokens, align_tokens)
        assert merged.group.covered_tokens is not None
        self.window_tokens = merged.group.covered_tokens
        self.window_blocks = -(-(self.window_tokens - 1) // self.block_tokens)
        self._peek = 1 if merged.eagle else 0
        self._step = max(1, align_tokens // self.block_tokens)

    def find(self, states: NDArray[np.uint8], max_tokens: int, drop_eagle: bool) -> Found:
        return Found(
            *find_sliding_window(
                states,
                max_tokens,
                self.block_tokens,
                self.hash_tokens,
                self.align_tokens,
                drop_eagle,
                self.window_tokens,
            )
        )

    @property
    def _run_blocks(self) -> int:
        """Blocks in a row that a hit wants, the EAGLE block included."""
        return max(1, self.window_blocks) + self._peek

    def num_candidates(self, max_tokens: int) -> int:
        blocks = max_tokens // self.block_tokens
        if self._run_blocks >= self._step:
            return blocks
        tails, rest = divmod(max(0, blocks - self._peek), self._step)
        return tails * self._run_blocks + max(0, rest - (self._step - self._run_blocks))

    def candidates(self, max_tokens: int) -> NDArray[np.int32]:
        return self._tails(0, max_tokens // self.block_tokens)

    def window(self, unknown_idx: int, num_chunks: int, max_tokens: int) -> NDArray[np.int32]:
        del max_tokens
        block = unknown_idx // self._scale
        num_tails = -(-num_chunks // min(self._run_blocks, self._step))
        return self._tails(max(0, block + 1 - num_tails * self._step), block + 1)[-num_chunks:]

    def runs_on(self, window: NDArray[np.int32], unknown_idx: int) -> bool:
        return bool(0 < window[0] - unknown_idx <= self._step * self._scale)

    def first_window(self, ends_on_boundary: bool) -> int:
        again = min(self._run_blocks, self._step) if ends_on_boundary else 0
        return self._run_blocks + again

    def save_mask(self, start_block: int, end_block: int, policy: SavePolicy) -> NDArray[np.bool_]:
        if policy.align_tokens % self.block_tokens:
            return np.ones(end_block - start_block, dtype=np.bool_)
        wanted = self.window_blocks + self._peek
        segment = policy.align_tokens
        if policy.retention_tokens is not None:
            segment = policy.retention_tokens
        mask = np.zeros(end_block - start_block, dtype=np.bool_)
        if segment:
            step = segment // self.block_tokens
            if wanted >= step:
                mask[:] = True
                return mask
            blocks = np.arange(start_block, end_block) - self._peek
            mask[:] = (blocks >= 0) & (blocks % step >= step - wanted)
        if policy.retention_tokens is not None:
            for boundary in policy.boundaries:
                end = boundary // policy.align_tokens * policy.align_tokens // self.block_tokens
                end += self._peek
                first, last = max(start_block, end - wanted), min(end_block, end)
                if first < last:
                    mask[first - start_block : last - start_block] = True
        return mask

    def _tails(self, first_block: int, stop_block: int) -> NDArray[np.int32]:
        """Return the hash indices of the blocks of a range that a run can lie on."""
        ends = self._block_ends(first_block, stop_block)
        if self._run_blocks >= self._step:
            return ends
        places = np.arange(first_block, stop_block) - self._peek
        on_tail = (places >= 0) & (places % self._step >= self._step - self._run_blocks)
        return ends[on_tail]


class _ChunkedLocalSearch(KindSearch):
    """Chunked local attention: from the start of the last chunk to the first hole."""

    def __init__(self, merged: MergedGroup, hash_tokens: int, align_tokens: int) -> None:
        super().__init__(merged, hash_tokens, align_tokens)
        assert merged.group.chunk_tokens is not None
        self.chunk_tokens = merged.group.chunk_tokens
        if merged.eagle:
            raise UnsupportedError(
                "chunked local attention with EAGLE: vLLM has no hit rule for it; "
                "turn speculative decoding with EAGLE or MTP off"
            )
        if self.block_tokens != align_tokens:
            raise UnsupportedError(
                f"chunked local attention with blocks of {self.block_tokens} tokens where hits "
                f"end on {align_tokens}: vLLM wants one block size for all groups; set it so"
            )

    def find(self, states: NDArray[np.uint8], max_tokens: int, drop_eagle: bool) -> Found:
        del drop_eagle
        return Found(
            *find_chunked_local(
                states, max_tokens, self.block_tokens, self.hash_tokens, self.chunk_tokens
            )
        )

    def num_candidates(self, max_tokens: int) -> int:
        return max_tokens // self.block_tokens

    def candidates(self, max_tokens: int) -> NDArray[np.int32]:
        return self._block_ends(0, max_tokens // self.block_tokens)

    def window(self, unknown_idx: int, num_chunks: int, max_tokens: int) -> NDArray[np.int32]:
        block = unknown_idx // self._scale
        return self._block_ends(block, min(block + num_chunks, max_tokens // self.block_tokens))


class _MambaSearch(KindSearch):
    """Recurrent states in align mode: from the right, the last boundary with its state."""

    from_left = False

    @property
    def peek_tokens(self) -> int:
        return 0

    @property
    def _units(self) -> int:
        return self.align_tokens // self.hash_tokens

    def find(self, states: NDArray[np.uint8], max_tokens: int, drop_eagle: bool) -> Found:
        del drop_eagle
        return Found(
            *find_mamba(states, max_tokens, self.block_tokens, self.hash_tokens, self.align_tokens)
        )

    def num_candidates(self, max_tokens: int) -> int:
        return max_tokens // self.align_tokens

    def candidates(self, max_tokens: int) -> NDArray[np.int32]:
        return self._boundaries(0, max_tokens // self.align_tokens)

    def window(self, unknown_idx: int, num_chunks: int, max_tokens: int) -> NDArray[np.int32]:
        del max_tokens
        stop = unknown_idx // self._units + 1
        return self._boundaries(max(0, stop - num_chunks), stop)

    def runs_on(self, window: NDArray[np.int32], unknown_idx: int) -> bool:
        return bool(unknown_idx == window[0] - self._units)

    def first_window(self, ends_on_boundary: bool) -> int:
        return 2 if ends_on_boundary else 1

    def save_mask(self, start_block: int, end_block: int, policy: SavePolicy) -> NDArray[np.bool_]:
        """Return none: states are saved only from the blocks that the core hands over."""
        del policy
        return np.zeros(end_block - start_block, dtype=np.bool_)

    def _boundaries(self, first: int, stop: int) -> NDArray[np.int32]:
        return np.arange(first + 1, stop + 1, dtype=np.int32) * np.int32(self._units) - np.int32(1)


_SEARCHES: dict[str, type[KindSearch]] = {
    "full": _FullSearch,
    "sliding_window": _SlidingWindowSearch,
    "chunked_local": _ChunkedLocalSearch,
    "mamba": _MambaSearch,
}


def native_search(merged: MergedGroup, hash_tokens: int, align_tokens: int) -> KindSearch:
    """Return the native search of a merged group.

    UnsupportedError where vLLM has no hit rule for the kind with EAGLE or with these sizes.
    """
    return _SEARCHES[merged.group.kind](merged, hash_tokens, align_tokens)
