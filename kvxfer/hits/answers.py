# SPDX-License-Identifier: Apache-2.0
"""What the store has said about one prompt, and how much of it is asked at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from kvxfer._native.hits import ABSENT, PRESENT, UNKNOWN, count_unknown, note_answers
from kvxfer.hits.kinds import KindSearch

ONE_CALL_CHUNKS = 512
"""Up to so many candidates are asked in one call: its round trip costs more than they do."""

Exists = Callable[[list[tuple[int, NDArray[np.int32]]]], Sequence[NDArray[np.uint8]]]
"""``exists([(group, hash indices), ...]) -> [uint8 array, ...]``: 1 where every shard is there."""


class Answers:
    """The store's answers for one prompt: asked for once each, when a search needs them.

    Owns one row a merged group, (num_hashes,) uint8 of UNKNOWN, ABSENT, PRESENT by hash index, and
    one a member that is asked for where a merged group has several. A window that continues the
    last one of its group is twice as long, so that a scan asks for at most twice what it reads,
    plus its first window.
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
        self._member_rows: dict[int, NDArray[np.uint8]] = {}

    def ask_all_if_few(self, max_tokens: Sequence[int]) -> None:
        """Ask for every candidate below each group's bound in one call, if they are few enough."""
        bounds = list(zip(self._searches, max_tokens, strict=True))
        num_chunks = sum(
            search.num_candidates(bound) * len(search.merged.members) for search, bound in bounds
        )
        if num_chunks <= ONE_CALL_CHUNKS:
            self._ask({i: search.candidates(bound) for i, (search, bound) in enumerate(bounds)})

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
        row = self.rows[idx]
        if count_unknown(row, hash_idx) < len(hash_idx):
            hash_idx = hash_idx[row[hash_idx] == UNKNOWN]
        self._ask({idx: hash_idx})

    def member_row(self, idx: int, group: int) -> NDArray[np.uint8]:
        """Return the answers for one cache group of merged group ``idx``."""
        if len(self._searches[idx].merged.members) == 1:
            return self.rows[idx]
        if group not in self._member_rows:
            self._member_rows[group] = np.zeros_like(self.rows[idx])
        return self._member_rows[group]

    def _ask(self, wanted: Mapping[int, NDArray[np.int32]]) -> None:
        """Ask for ``wanted[idx]`` of each merged group, for all members, in one call."""
        question = [
            (group, hash_idx)
            for idx, hash_idx in wanted.items()
            for group in self._searches[idx].merged.members
            if len(hash_idx)
        ]
        if not question:
            return
        question.sort(key=itemgetter(0))
        self.num_calls += 1
        self.num_keys_asked += sum([len(hash_idx) for _, hash_idx in question])
        answers = self._exists(question)
        if len(answers) != len(question):
            raise ValueError(f"exists gave {len(answers)} answers to {len(question)} questions")
        stored = {group: answer for (group, _), answer in zip(question, answers, strict=True)}
        for idx, hash_idx in wanted.items():
            if len(hash_idx):
                self._note(idx, hash_idx, stored)

    def _note(
        self, idx: int, hash_idx: NDArray[np.int32], stored: Mapping[int, NDArray[np.uint8]]
    ) -> None:
        """Fill the rows of merged group ``idx`` and of its members, which ``stored`` speaks of."""
        members = self._searches[idx].merged.members
        for group in members:
            answer = _flags(stored[group])
            if len(answer) != len(hash_idx):
                raise ValueError(
                    f"exists gave {len(answer)} answers for {len(hash_idx)} chunks of group {group}"
                )
            note_answers(self.member_row(idx, group), hash_idx, answer)
        if len(members) > 1:
            known = [self.member_row(idx, group)[hash_idx] for group in members]
            self.rows[idx][hash_idx] = np.min(known, axis=0)


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
    return np.where(np.asarray(answer) == 1, np.uint8(PRESENT), np.uint8(ABSENT))


def _flags(answer: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return ``answer`` itself where it is bytes back to back, else 1 where it is 1."""
    if isinstance(answer, np.ndarray) and answer.dtype == np.uint8 and answer.flags.c_contiguous:
        return answer
    is_there: NDArray[np.bool_] = np.asarray(answer) == 1
    return is_there.view(np.uint8)
