# SPDX-License-Identifier: Apache-2.0
"""How often a prefix was asked for: what comes once need not be stored."""

from __future__ import annotations

from collections.abc import Sequence

MAX_HASHES = 1 << 20
"""Hashes that are remembered; the oldest half goes when there are more."""


class Sightings:
    """Counts the block hashes of requests, scheduler side, in bounded memory.

    A prefix is worth saving once ``min_sightings`` requests had it. A hash names everything before
    it, so along a prompt the counts only fall, and what is worth saving is a prefix too.
    """

    def __init__(self, min_sightings: int, max_hashes: int = MAX_HASHES) -> None:
        if min_sightings < 1 or max_hashes < 2:
            raise ValueError(f"min_sightings {min_sightings}, max_hashes {max_hashes}: too small")
        self._min_sightings = min_sightings
        self._max_newer = max_hashes // 2
        self._newer: dict[bytes, int] = {}
        self._older: dict[bytes, int] = {}

    def note(self, block_hashes: Sequence[bytes]) -> int:
        """Count one request's hashes; return how many of them, from the first, are worth saving."""
        if self._min_sightings == 1:
            return len(block_hashes)
        num_worth = 0
        for idx, block_hash in enumerate(block_hashes):
            count = self._count(block_hash)
            if count >= self._min_sightings and num_worth == idx:
                num_worth = idx + 1
        return num_worth

    @property
    def num_hashes(self) -> int:
        """Hashes that are remembered."""
        return len(self._newer.keys() | self._older.keys())

    def _count(self, block_hash: bytes) -> int:
        """Count one hash; what was not seen for long is forgotten, half of all at a time."""
        count = self._newer.get(block_hash) or self._older.get(block_hash, 0)
        count = min(count + 1, self._min_sightings)
        self._newer[block_hash] = count
        if len(self._newer) >= self._max_newer:
            self._older, self._newer = self._newer, {}
        return count
