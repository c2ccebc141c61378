# SPDX-License-Identifier: Apache-2.0
"""Which chunks are whole in the store: every shard of every stage, asked with few keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from kvxfer._native.hits import join_shards
from kvxfer.keys import KeySpace, shard_keys
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
            return self._ask_all(queries)
        return [self._narrow(group, idx) for group, idx in queries]

    def _narrow(self, group: int, idx: NDArray[np.int32]) -> NDArray[np.uint8]:
        """Ask the first shard of every chunk, the others only of what it has, in bounded calls."""
        whole = np.empty(len(idx), dtype=np.uint8)
        first, others = self._spaces[group][:1], self._spaces[group][1:]
        num_there = 0
        for part in _parts(len(idx), MAX_KEYS_PER_CALL):
            num_there += join_shards(self._ask(first, idx[part]), whole[part])
        if others and num_there:
            there = np.flatnonzero(whole)
            for part in _parts(num_there, max(1, MAX_KEYS_PER_CALL // len(others))):
                chunks = there[part]
                every = np.empty(len(chunks), dtype=np.uint8)
                join_shards(self._ask(others, idx[chunks]), every)
                whole[chunks] = every
        return whole

    def _ask(self, spaces: Sequence[KeySpace], idx: NDArray[np.int32]) -> NDArray[np.uint8]:
        """Ask for every key of the chunks in one call, a chunk's keys together."""
        return self._flags(self._keys(spaces, idx))

    def _ask_all(self, queries: Sequence[Query]) -> list[NDArray[np.uint8]]:
        """Ask for every key of every query in one call; no keys, no call."""
        by_query = [self._keys(self._spaces[group], idx) for group, idx in queries]
        flags = self._flags(list(chain.from_iterable(by_query)))
        answers, start = [], 0
        for (_, idx), keys in zip(queries, by_query, strict=True):
            whole = np.empty(len(idx), dtype=np.uint8)
            join_shards(flags[start : start + len(keys)], whole)
            answers.append(whole)
            start += len(keys)
        return answers

    def _keys(self, spaces: Sequence[KeySpace], idx: NDArray[np.int32]) -> list[bytes]:
        return shard_keys(spaces, self._hashes.buffer, self._hashes.width, idx)

    def _flags(self, keys: list[bytes]) -> NDArray[np.uint8]:
        self.num_keys += len(keys)
        return presence_flags(self._store, keys)


def _parts(length: int, size: int) -> Iterator[slice]:
    """Yield slices of at most ``size`` that cover ``length``."""
    for start in range(0, length, size):
        yield slice(start, start + size)
