# SPDX-License-Identifier: Apache-2.0
"""Which chunks are whole in the store: every shard of every stage, asked with few keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from kvxfer.keys import KeySpace
from kvxfer.lookup.hashes import PackedHashes
from kvxfer.stores import Store
from kvxfer.stores.flags import presence_flags

MAX_KEYS_AT_ONCE = 512
"""Up to so many keys all shards are asked in one call; above, the others follow the first."""

Query = tuple[int, NDArray[np.int32]]


class StorePresence:
    """Answers ``hits.Coordinator`` for one prompt: 1 where every shard of a chunk is stored.

    ``spaces`` maps each cache group to the key spaces of all its shards, over all ranks.
    Worker side, in the lookup thread; made anew for every lookup.
    """

    def __init__(
        self, store: Store, spaces: Mapping[int, Sequence[KeySpace]], hashes: PackedHashes
    ) -> None:
        self._store, self._spaces, self._hashes = store, spaces, hashes
        self.num_keys = 0

    def exists(self, queries: Sequence[Query]) -> list[NDArray[np.uint8]]:
        """Return one (n,) uint8 array per (group, (n,) hash indices): 1 where all shards are."""
        num_keys = sum(len(idx) * len(self._spaces[group]) for group, idx in queries)
        if num_keys <= MAX_KEYS_AT_ONCE:
            return self._ask([(group, idx, self._spaces[group]) for group, idx in queries])
        found = self._ask([(group, idx, self._spaces[group][:1]) for group, idx in queries])
        left = [np.flatnonzero(answer) for answer in found]
        others = self._ask(
            [
                (group, idx[chosen], self._spaces[group][1:])
                for (group, idx), chosen in zip(queries, left, strict=True)
            ]
        )
        for answer, chosen, other in zip(found, left, others, strict=True):
            answer[chosen] = other
        return found

    def _ask(
        self, questions: Sequence[tuple[int, NDArray[np.int32], Sequence[KeySpace]]]
    ) -> list[NDArray[np.uint8]]:
        """Ask for every key of every question in one call; no keys, no call."""
        keys = [
            key
            for _, idx, spaces in questions
            for space in spaces
            for key in space.keys(self._hashes.buffer, self._hashes.width, idx)
        ]
        self.num_keys += len(keys)
        present = presence_flags(self._store, keys)
        answers: list[NDArray[np.uint8]] = []
        start = 0
        for _, idx, spaces in questions:
            stop = start + len(idx) * len(spaces)
            every = present[start:stop].reshape(len(spaces), len(idx))
            answers.append(np.logical_and.reduce(every, axis=0).astype(np.uint8))
            start = stop
        return answers
