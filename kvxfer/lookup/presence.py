# SPDX-License-Identifier: Apache-2.0
"""Which chunks are whole in the store: every shard of every stage, asked with few keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvxfer.keys import KeySpace
from kvxfer.lookup.hashes import PackedHashes
from kvxfer.stores import Store
from kvxfer.stores.flags import presence_flags

MAX_KEYS_AT_ONCE = 512
"""A prompt of up to so many keys is asked in one call; of a longer one the other shards follow
the first, so that a cold one costs a window of one shard."""
MAX_KEYS_PER_CALL = 4096
"""Largest call otherwise: keys of some 100 bytes that stay in a core's cache until they are
looked up. A full hit of 65,536 keys took a half to a third of the time of one call."""

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
        self._is_short = sum(map(len, spaces.values())) * len(hashes) <= MAX_KEYS_AT_ONCE
        self.num_keys = 0

    def exists(self, queries: Sequence[Query]) -> list[NDArray[np.uint8]]:
        """Return one (n,) uint8 array per (group, (n,) hash indices): 1 where all shards are."""
        if self._is_short:
            return self._ask([(group, idx, self._spaces[group]) for group, idx in queries])
        return [self._narrow(group, idx) for group, idx in queries]

    def _narrow(self, group: int, idx: NDArray[np.int32]) -> NDArray[np.uint8]:
        """Ask the first shard of every chunk, the others only of what it has, in bounded calls."""
        first, others = self._spaces[group][:1], self._spaces[group][1:]
        answer = np.concatenate(
            [self._ask([(group, part, first)])[0] for part in _parts(idx, MAX_KEYS_PER_CALL)]
        )
        if others:
            left = np.flatnonzero(answer)
            for part in _parts(left, max(1, MAX_KEYS_PER_CALL // len(others))):
                answer[part] = self._ask([(group, idx[part], others)])[0]
        return answer

    def _ask(
        self, questions: Sequence[tuple[int, NDArray[np.int32], Sequence[KeySpace]]]
    ) -> list[NDArray[np.uint8]]:
        """Ask for every key of every question in one call; no keys, no call."""
        keys: list[bytes] = []
        for _, idx, spaces in questions:
            for space in spaces:
                keys += space.keys(self._hashes.buffer, self._hashes.width, idx)
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


def _parts(array: NDArray[Any], size: int) -> Iterator[NDArray[Any]]:
    """Yield ``array`` in parts of at most ``size``; an empty array as one empty part."""
    for start in range(0, max(1, len(array)), size):
        yield array[start : start + size]
