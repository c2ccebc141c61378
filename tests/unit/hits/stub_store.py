# SPDX-License-Identifier: Apache-2.0
"""A store for the tests of hits: it knows token positions and remembers what it was asked."""

from __future__ import annotations

import numpy as np

from kvxfer.hits import CacheGroup, Coordinator, LookupAnswer


class StubStore:
    """Holds, for each group, the token positions whose chunk is stored.

    ``questions`` has one entry a call: {group: [positions asked for]}. Asking twice for a chunk
    is an error.
    """

    def __init__(self, stored, hash_tokens: int) -> None:
        self.stored = stored
        self.hash_tokens = hash_tokens
        self.questions: list[dict[int, list[int]]] = []

    def __call__(self, question):
        asked = {}
        answers = []
        for group, hash_idx in question:
            positions = ((hash_idx.astype(np.int64) + 1) * self.hash_tokens).tolist()
            before = [p for call in self.questions for p in call.get(group, [])]
            assert not set(positions) & set(before), "a chunk was asked for twice"
            assert len(set(positions)) == len(positions)
            asked[group] = positions
            answers.append(np.isin(positions, list(self.stored[group])).astype(np.uint8))
        self.questions.append(asked)
        return answers

    @property
    def num_keys(self) -> int:
        return sum(len(positions) for call in self.questions for positions in call.values())


def look_up(coordinator: Coordinator, num_tokens: int, stored) -> tuple[LookupAnswer, StubStore]:
    """Look a prompt up; ``stored`` has one collection of token positions a group."""
    store = StubStore(stored, coordinator.hash_tokens)
    hashes = [b""] * (num_tokens // coordinator.hash_tokens)
    answer = coordinator.lookup(num_tokens, hashes, store)
    assert answer.num_calls == len(store.questions)
    assert answer.num_keys_asked == store.num_keys
    return answer, store


def all_of(group: CacheGroup, num_tokens: int) -> range:
    """Return the ends of a group's blocks: everything it can have stored of a prompt."""
    return range(group.block_tokens, num_tokens + 1, group.block_tokens)


def bits(mask) -> str:
    return "".join("01"[int(there)] for there in mask)
