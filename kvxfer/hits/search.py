# SPDX-License-Identifier: Apache-2.0
"""The hit on which all groups agree: vLLM's fixed-point search over known answers.

Full attention is searched first, because its scan is cheap and bounds the others; then each group
takes the length so far or shortens it, and a round that shortened it is followed by another. It
follows ``HybridKVCacheCoordinator.find_longest_cache_hit``; a test compares the two.

The search reads answers and never asks for any: where one is unknown it stops and says which. So
its result depends on what it read alone, and asking for less cannot change it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvxfer.hits.kinds import Found, KindSearch


@dataclass(frozen=True, slots=True)
class Hit:
    """The hit length in tokens, and what each merged group loads for it."""

    tokens: int
    found: list[Found]


@dataclass(frozen=True, slots=True)
class Step:
    """What one merged group made of a length: for :mod:`kvxfer.hits.explain`."""

    idx: int
    before: int
    after: int
    gave_back: bool
    """Whether the group gave its EAGLE block back in this step."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """The answer that the search lacked: merged group, hash index, and how far it may read."""

    idx: int
    hash_idx: int
    max_tokens: int


def longest_hit(
    searches: Sequence[KindSearch],
    rows: Sequence[NDArray[np.uint8]],
    max_tokens: int,
    hashed_tokens: int,
    apply_eagle: bool = True,
    steps: list[Step] | None = None,
) -> Hit | Unknown:
    """Return the longest hit of at most ``max_tokens``, or the answer that is missing.

    ``rows`` has the answers of each search. ``hashed_tokens`` is the end of the last hash: EAGLE
    groups read so far beyond the length at hand, by one block or hash unit that they give back.
    With ``apply_eagle`` off no group does. ``steps`` is extended by what each group did.
    """
    steps = [] if steps is None else steps
    if len(searches) == 1:
        return _single_hit(searches[0], rows[0], max_tokens, apply_eagle, steps)
    return _FixedPoint(searches, rows, hashed_tokens, apply_eagle, steps).run(max_tokens)


def read_bound(search: KindSearch, max_tokens: int, hashed_tokens: int, alone: bool) -> int:
    """Return how far, in tokens, a search below ``max_tokens`` reads at most."""
    if alone or not search.merged.eagle:
        return max_tokens
    return min(max_tokens + search.peek_tokens, hashed_tokens)


def _single_hit(
    search: KindSearch,
    row: NDArray[np.uint8],
    max_tokens: int,
    apply_eagle: bool,
    steps: list[Step],
) -> Hit | Unknown:
    give_back = apply_eagle and search.merged.eagle
    found = search.find(row, max_tokens, give_back)
    if found.unknown_idx >= 0:
        return Unknown(0, found.unknown_idx, max_tokens)
    steps.append(Step(0, max_tokens, found.tokens, give_back))
    return Hit(found.tokens, [found])


class _FixedPoint:
    """One run of the search over several merged groups."""

    def __init__(
        self,
        searches: Sequence[KindSearch],
        rows: Sequence[NDArray[np.uint8]],
        hashed_tokens: int,
        apply_eagle: bool,
        steps: list[Step],
    ) -> None:
        self._searches = searches
        self._steps = steps
        self._rows = rows
        self._hashed_tokens = hashed_tokens
        self._apply_eagle = apply_eagle
        self._found: list[Found | None] = [None] * len(searches)
        self._eagle_given_back: set[int] = set()  # at the length that the round has reached

    def run(self, max_tokens: int) -> Hit | Unknown:
        # full attention and one other: the second is found below the first and needs no check
        one_round = len(self._searches) == 2 and self._searches[0].merged.searched_first
        tokens = max_tokens
        while True:
            reached = self._round(tokens)
            if isinstance(reached, Unknown):
                return reached
            if reached >= tokens:
                break
            tokens = reached
            if one_round:
                break
        return Hit(tokens, [self._cut(idx, tokens) for idx in range(len(self._searches))])

    def _round(self, tokens: int) -> int | Unknown:
        """Let every group shorten ``tokens``; return what is left."""
        for idx, search in enumerate(self._searches):
            before = self._found[idx]
            if search.merged.searched_first and before is not None:
                self._steps.append(Step(idx, tokens, min(tokens, before.tokens), False))
                tokens = min(tokens, before.tokens)
                continue
            give_back = (
                self._apply_eagle and search.merged.eagle and idx not in self._eagle_given_back
            )
            max_tokens = tokens
            if give_back and search.peek_tokens:
                max_tokens = min(tokens + search.peek_tokens, self._hashed_tokens)
            found = search.find(self._rows[idx], max_tokens, give_back)
            if found.unknown_idx >= 0:
                return Unknown(idx, found.unknown_idx, max_tokens)
            if give_back:
                self._eagle_given_back.add(idx)
            elif found.tokens < tokens:
                self._eagle_given_back.clear()  # proved at a length that no longer stands
            self._steps.append(Step(idx, tokens, found.tokens, give_back))
            tokens = found.tokens
            self._found[idx] = found
        return tokens

    def _cut(self, idx: int, tokens: int) -> Found:
        """Return what a group loads; full attention was searched once, so its end is cut here."""
        found = self._found[idx]
        assert found is not None
        search = self._searches[idx]
        if not search.merged.searched_first:
            return found
        num_blocks = min(found.num_blocks, -(-tokens // search.block_tokens))
        return found._replace(tokens=tokens, num_blocks=num_blocks)
