# SPDX-License-Identifier: Apache-2.0
"""What the store has said about one prompt, and how much of it is asked at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvxfer._native.hits import ABSENT, PRESENT, UNKNOWN
from kvxfer.hits.kinds import KindSearch

ONE_CALL_CHUNKS = 512
"""Up to so many candidates are asked in one call: its round trip costs more than they do."""

Exists = Callable[[list[tuple[int, NDArray[np.int32]]]], Sequence[NDArray[np.uint8]]]
"""``exists([(group, hash indices), ...]) -> [uint8 array, ...]``: 1 where every shard is there."""


class Answers:
    """The store's answers for one prompt: asked for once each, when a search needs them.

    Owns one row a merged group, (num_hashes,) uint8 of UNKNOWN, ABSENT, PRESENT by hash index, and
    one a member where a merged group has several. A window that continues the last one of its group
    is twice as long, so that a scan asks for at most twice what it reads, plus its first window.
    """

    def __init__(
        self, searches: Sequence[KindSearch], num_hashes: int, exists: Exists, boundary: bool
    ) -> None:
        self.num_keys_asked = 0
        self.num_calls = 0
        self.rows = [np.zeros(num_hashes, dtype=np.uint8) for _ in searches]
        self._searches = searches
        self._exists = exists
        self._first_chunks = [search.first_window(boundary) for search in searches]
        self._last_windows: list[tuple[NDArray[np.int32], int] | None] = [None] * len(searches)
        self._member_rows = _member_rows(searches, self.rows)

    def ask_all_if_few(self, max_tokens: Sequence[int]) -> None:
        """Ask for every candidate below each group's bound in one call, if they are few enough."""
        bounds = list(zip(self._searches, max_tokens, strict=True))
        num_chunks = sum(
            search.num_candidates(bound) * len(search.merged.members) for search, bound in bounds
        )
        if num_chunks <= ONE_CALL_CHUNKS:
            self._ask([search.candidates(bound) for search, bound in bounds])

    def ask_window(self, idx: int, unknown_idx: int, max_tokens: int) -> None:
        """Ask for the next window of merged group ``idx``, in which ``unknown_idx`` lies."""
        search, last = self._searches[idx], self._last_windows[idx]
        num_chunks = self._first_chunks[idx]
        if last is not None and search.runs_on(last[0], unknown_idx):
            num_chunks = 2 * last[1]
        window = search.window(unknown_idx, num_chunks, max_tokens)
        self._last_windows[idx] = (window, num_chunks)
        self.ask(idx, window)
        assert self.rows[idx][unknown_idx] != UNKNOWN, "a window must hold what it was asked for"

    def ask(self, idx: int, hash_idx: NDArray[np.int32]) -> None:
        """Ask for those chunks of merged group ``idx`` that are not known yet."""
        wanted = [np.empty(0, dtype=np.int32)] * len(self.rows)
        wanted[idx] = hash_idx[self.rows[idx][hash_idx] == UNKNOWN]
        self._ask(wanted)

    def member_row(self, group: int) -> NDArray[np.uint8]:
        """Return the answers for one cache group, whatever it is merged with."""
        return self._member_rows[group]

    def _ask(self, wanted: Sequence[NDArray[np.int32]]) -> None:
        """Ask for ``wanted[i]`` of each merged group, for all members, in one call."""
        question = [
            (group, hash_idx)
            for search, hash_idx in zip(self._searches, wanted, strict=True)
            for group in search.merged.members
            if len(hash_idx)
        ]
        if not question:
            return
        question.sort(key=lambda part: part[0])
        self.num_calls += 1
        self.num_keys_asked += sum(len(hash_idx) for _, hash_idx in question)
        answers = self._exists(question)
        self._fill(question, answers)
        for row, search, hash_idx in zip(self.rows, self._searches, wanted, strict=True):
            members = search.merged.members
            if len(members) > 1 and len(hash_idx):
                row[hash_idx] = np.min([self._member_rows[g][hash_idx] for g in members], axis=0)

    def _fill(
        self,
        question: list[tuple[int, NDArray[np.int32]]],
        answers: Sequence[NDArray[np.uint8]],
    ) -> None:
        if len(answers) != len(question):
            raise ValueError(f"exists gave {len(answers)} answers to {len(question)} questions")
        for (group, hash_idx), answer in zip(question, answers, strict=True):
            if len(answer) != len(hash_idx):
                raise ValueError(
                    f"exists gave {len(answer)} answers for {len(hash_idx)} chunks of group {group}"
                )
            self._member_rows[group][hash_idx] = _states(answer)


def known_rows(
    searches: Sequence[KindSearch], stored: Sequence[NDArray[np.uint8]]
) -> list[NDArray[np.uint8]]:
    """Return the rows of a search over a presence set known as a whole.

    ``stored`` is (num_hashes,) for each cache group, 1 where the chunk is there.
    """
    rows = []
    for search in searches:
        members = [_states(stored[group]) for group in search.merged.members]
        rows.append(members[0] if len(members) == 1 else np.min(members, axis=0))
    return rows


def _states(answer: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return PRESENT where the answer is 1 and ABSENT elsewhere."""
    stored: NDArray[np.uint8] = (np.asarray(answer) == 1).view(np.uint8)
    return stored * np.uint8(PRESENT - ABSENT) + np.uint8(ABSENT)


def _member_rows(
    searches: Sequence[KindSearch], rows: Sequence[NDArray[np.uint8]]
) -> dict[int, NDArray[np.uint8]]:
    """Return each cache group's row: the merged group's own where it is the only member."""
    member_rows = {}
    for search, row in zip(searches, rows, strict=True):
        members = search.merged.members
        for group in members:
            member_rows[group] = row if len(members) == 1 else np.zeros_like(row)
    return member_rows
