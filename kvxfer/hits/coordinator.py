# SPDX-License-Identifier: Apache-2.0
"""The hit of a prompt over all cache groups, and the blocks to load and to save for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvxfer._native.hits import PRESENT
from kvxfer.errors import ConfigError
from kvxfer.hits.answers import Answers, Exists, known_rows
from kvxfer.hits.explain import Explanation, explain_hit, too_short
from kvxfer.hits.groups import CacheGroup, MergedGroup, merge_groups
from kvxfer.hits.kinds import KindSearch, SavePolicy
from kvxfer.hits.manager_kind import manager_search
from kvxfer.hits.native_kinds import native_search
from kvxfer.hits.search import Hit, Step, longest_hit, read_bound


@dataclass(frozen=True, slots=True)
class LookupAnswer:
    """How much of a prompt every group can reuse, and what that load consists of.

    ``load_masks`` has one array a cache group, bool, by the group's own blocks from token 0: True
    where the block is loaded. Each was seen stored in this lookup, for every shard.
    ``tail_boundaries`` says, for each group that loads its last block, at which token the chunk
    ends under whose key that block is stored: the hit length, or where hits fall below the block,
    possibly a later one. ``num_keys_asked`` counts chunks, shards apart.
    """

    hit_length: int
    load_masks: list[NDArray[np.bool_]]
    tail_boundaries: list[tuple[int, int]] = field(default_factory=list)
    num_keys_asked: int = 0
    num_calls: int = 0


class Coordinator:
    """Finds the longest prefix that every cache group can reuse from the store.

    Built once from what the engine resolved: ``groups`` in the engine's order, ``hash_tokens`` a
    block hash, ``block_tokens`` the common block of all groups. A hit ends on a multiple of
    ``block_tokens``, or with ``partial_hits`` of ``hash_tokens``. With ``use_eagle`` and no group
    flagged, every group gives its EAGLE block back. ``retention_tokens`` is vLLM's retention
    interval for the save masks: None keeps every boundary, 0 the replay boundaries alone.

    Immutable, so any thread may use it. ``ConfigError`` where sizes do not divide one another,
    ``UnsupportedError`` where vLLM has no hit rule for the groups.

    Lookups: :meth:`align_lookup_length`, :meth:`lookup`, :meth:`explain`. Masks:
    :meth:`load_mask`, :meth:`save_mask`. Over a known set: :meth:`find_longest_cache_hit`.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        hash_tokens: int,
        block_tokens: int,
        partial_hits: bool = False,
        use_eagle: bool = False,
        retention_tokens: int | None = None,
    ) -> None:
        self.groups = tuple(groups)
        self.hash_tokens = hash_tokens
        self.block_tokens = block_tokens
        self.partial_hits = partial_hits
        self.retention_tokens = retention_tokens
        _check_sizes(self.groups, hash_tokens, block_tokens, retention_tokens)
        self.align_tokens = hash_tokens if partial_hits else block_tokens
        merged = merge_groups(self.groups, use_eagle)
        if not merged:
            raise ConfigError("no cache group is cacheable: there is nothing to look up")
        self._searches = [_search_of(m, hash_tokens, self.align_tokens) for m in merged]
        self._any_eagle = any(m.eagle for m in merged)

    def align_lookup_length(self, num_tokens: int) -> int:
        """Return ``num_tokens`` rounded down to where a hit may end."""
        return num_tokens // self.align_tokens * self.align_tokens

    def lookup(
        self, num_tokens: int, block_hashes: Sequence[bytes], exists: Exists
    ) -> LookupAnswer:
        """Return the longest hit of a prompt of ``num_tokens``, at least one token short of it.

        Of ``block_hashes`` only the length is read; tokens without a hash are not looked up. No
        chunk is asked for twice. Up to 512 candidates cost one call of ``exists``. Above, each scan
        asks for at most twice the chunks that it reads plus its first window: full attention
        ``2 * blocks matched + 64``, a sliding window that starts at full attention's hit
        ``2 * (blocks between the hits + window) + window``, states ``2 * boundaries between + 3``.
        A hit that covers all ``num_tokens`` is derived again below from the same answers. What
        ``exists`` raises is passed on.
        """
        ran = self._run(num_tokens, len(block_hashes), exists)
        if ran is None:
            return LookupAnswer(0, _empty_masks(len(self.groups)))
        answers, hit = ran.answers, ran.hit
        masks, tails = _empty_masks(len(self.groups)), []
        if hit.tokens > 0:
            masks = self._masks(hit)
            tails = self._tail_boundaries(answers, hit.tokens, masks)
        return LookupAnswer(hit.tokens, masks, tails, answers.num_keys_asked, answers.num_calls)

    def explain(
        self, num_tokens: int, block_hashes: Sequence[bytes], exists: Exists
    ) -> Explanation:
        """Return what a lookup of the same arguments finds, and what cut its hit.

        It asks the store what :meth:`lookup` asks but for tails, so it says how far each group is
        stored as far as the lookup would have read.
        """
        hashed_tokens = len(block_hashes) * self.hash_tokens
        ran = self._run(num_tokens, len(block_hashes), exists)
        if ran is None:
            return too_short(num_tokens, self.align_tokens)
        steps: list[Step] = []
        rows = ran.answers.rows
        longest_hit(self._searches, rows, ran.max_tokens, hashed_tokens, steps=steps)
        return explain_hit(
            self._searches,
            rows,
            steps,
            num_tokens,
            ran.max_tokens,
            ran.hit.tokens,
            ran.derived_again,
        )

    def find_longest_cache_hit(
        self,
        max_tokens: int,
        stored: Sequence[NDArray[np.uint8]],
        apply_eagle: bool = True,
    ) -> tuple[int, list[NDArray[np.bool_]]]:
        """Return vLLM's hit of at most ``max_tokens`` over a presence set, with its load masks.

        ``stored`` has one array a cache group, (num_hashes,) uint8: 1 where the chunk that ends
        with that hash is there; those of groups that are not cacheable are not read. All tokens
        may be hit. With ``apply_eagle`` off no block is given back, as for load masks.
        """
        rows = known_rows(self._searches, stored)
        hashed_tokens = len(rows[0]) * self.hash_tokens
        hit = longest_hit(
            self._searches, rows, min(max_tokens, hashed_tokens), hashed_tokens, apply_eagle
        )
        assert isinstance(hit, Hit)
        return hit.tokens, self._masks(hit)

    def load_mask(self, hit_length: int) -> list[NDArray[np.bool_]]:
        """Return which blocks each group holds after a hit: what a load of it fetches.

        ``hit_length`` is that of a lookup: EAGLE is not given back a second time. Any other length
        is rounded down to where a hit may end.
        """
        hit_tokens = self.align_lookup_length(hit_length)
        row = np.full(hit_tokens // self.hash_tokens, PRESENT, dtype=np.uint8)
        hit = longest_hit(
            self._searches, [row] * len(self._searches), hit_tokens, hit_tokens, apply_eagle=False
        )
        assert isinstance(hit, Hit)
        return self._masks(hit)

    def save_mask(
        self, num_tokens: int, start_token: int, prompt_tokens: int
    ) -> list[NDArray[np.bool_]]:
        """Return which blocks of each group a later hit can need, given ``num_tokens`` computed.

        One array a group, by its own blocks from token 0 to ``num_tokens`` rounded down to where a
        hit may end; blocks that end at or before ``start_token`` are False, being saved already.
        It is what vLLM's local prefix cache retains: all of full attention, the tails of windows
        at every boundary or as ``retention_tokens`` says, with the boundaries at which a repeat of
        the ``prompt_tokens`` resumes. Recurrent states are never saved by position.
        """
        end_tokens = self.align_lookup_length(num_tokens)
        policy = SavePolicy(
            self.align_tokens, self.retention_tokens, self._replay_boundaries(prompt_tokens)
        )
        masks = _empty_masks(len(self.groups))
        for search in self._searches:
            end_block = end_tokens // search.block_tokens
            start_block = min(end_block, max(0, start_token) // search.block_tokens)
            mask = np.zeros(end_block, dtype=np.bool_)
            mask[start_block:] = search.save_mask(start_block, end_block, policy)
            for group in search.merged.members:
                masks[group] = mask
        return masks

    def eagle_tokens(self, group: int) -> int:
        """Return how far past a hit a group's search reads before it gives that back; often 0."""
        for search in self._searches:
            if group in search.merged.members and search.merged.eagle:
                return search.peek_tokens
        return 0

    def _replay_boundaries(self, prompt_tokens: int) -> tuple[int, ...]:
        """Return where a repeat of the prompt, or a longer one, resumes.

        Follows vLLM's ``replay_boundaries``: without EAGLE one token before the end, rounded down
        later; with it one common block below the last boundaries of the two.
        """
        if not self._any_eagle:
            return (prompt_tokens - 1,)
        block = self.block_tokens
        ends = {prompt_tokens - 1, prompt_tokens}
        return tuple(sorted({max(end // block * block - block, 0) for end in ends}))

    def _read_bounds(self, max_tokens: int, hashed_tokens: int) -> list[int]:
        alone = len(self._searches) == 1
        return [read_bound(s, max_tokens, hashed_tokens, alone) for s in self._searches]

    def _run(self, num_tokens: int, num_hashes: int, exists: Exists) -> _Run | None:
        """Search, asking for what is unknown; None where the prompt is too short to match."""
        hashed_tokens = num_hashes * self.hash_tokens
        max_tokens = self.align_lookup_length(min(num_tokens, hashed_tokens))
        if max_tokens <= 0:
            return None
        answers = Answers(self._searches, num_hashes, exists, boundary=max_tokens == num_tokens)
        answers.ask_all_if_few(self._read_bounds(max_tokens, hashed_tokens))
        hit = self._resolve(answers, max_tokens, hashed_tokens)
        if hit.tokens < num_tokens:
            return _Run(answers, hit, max_tokens, derived_again=False)
        max_tokens = self.align_lookup_length(num_tokens - 1)
        hit = self._resolve(answers, max_tokens, hashed_tokens) if max_tokens > 0 else Hit(0, [])
        return _Run(answers, hit, max_tokens, derived_again=True)

    def _resolve(self, answers: Answers, max_tokens: int, hashed_tokens: int) -> Hit:
        """Search until no answer that matters is unknown."""
        while True:
            hit = longest_hit(self._searches, answers.rows, max_tokens, hashed_tokens)
            if isinstance(hit, Hit):
                return hit
            answers.ask_window(hit.idx, hit.hash_idx, hit.max_tokens)

    def _masks(self, hit: Hit) -> list[NDArray[np.bool_]]:
        masks = _empty_masks(len(self.groups))
        for search, found in zip(self._searches, hit.found, strict=True):
            mask = found.load_mask()
            for group in search.merged.members:
                masks[group] = mask
        return masks

    def _tail_boundaries(
        self, answers: Answers, hit_tokens: int, masks: Sequence[NDArray[np.bool_]]
    ) -> list[tuple[int, int]]:
        """Return, for each group that loads its last block, where the chunk of that block ends."""
        tails = []
        for idx, search in enumerate(self._searches):
            stop = -(-hit_tokens // search.block_tokens) * search.block_tokens // self.hash_tokens
            for group in search.merged.members:
                if not len(masks[group]) or not masks[group][-1]:
                    continue
                boundary = hit_tokens
                if self.partial_hits:
                    boundary = self._tail_boundary(answers, idx, group, hit_tokens, stop)
                tails.append((group, boundary))
        return sorted(tails)

    def _tail_boundary(
        self, answers: Answers, idx: int, group: int, hit_tokens: int, stop: int
    ) -> int:
        """Return the first stored boundary from ``hit_tokens`` to the end of its block."""
        row = answers.member_row(idx, group)
        first = hit_tokens // self.hash_tokens - 1
        span = np.arange(first, min(stop, len(row)), dtype=np.int32)
        if row[first] != PRESENT:
            answers.ask(idx, span)
        stored = np.flatnonzero(row[span] == PRESENT)
        return (first + 1 + int(stored[0])) * self.hash_tokens if len(stored) else hit_tokens


@dataclass(frozen=True, slots=True)
class _Run:
    """A lookup's searches: what was asked, the hit, and the length below which it was found."""

    answers: Answers
    hit: Hit
    max_tokens: int
    derived_again: bool
    """The first hit covered the whole prompt, so this is the one below its last token."""


def _search_of(merged: MergedGroup, hash_tokens: int, align_tokens: int) -> KindSearch:
    make = manager_search if merged.group.kind == "other" else native_search
    return make(merged, hash_tokens, align_tokens)


def _empty_masks(num_groups: int) -> list[NDArray[np.bool_]]:
    return [np.zeros(0, dtype=np.bool_) for _ in range(num_groups)]


def _check_sizes(
    groups: Sequence[CacheGroup],
    hash_tokens: int,
    block_tokens: int,
    retention_tokens: int | None,
) -> None:
    """Raise ConfigError unless hash unit, blocks, common block and retention divide in turn."""
    if hash_tokens < 1 or block_tokens < 1 or block_tokens % hash_tokens:
        raise ConfigError(
            f"block_tokens is {block_tokens}, wants a multiple of hash_tokens {hash_tokens}"
        )
    for idx, group in enumerate(groups):
        if not group.cacheable:
            continue
        if group.block_tokens % hash_tokens or block_tokens % group.block_tokens:
            raise ConfigError(
                f"group {idx} has blocks of {group.block_tokens} tokens, wants a multiple of "
                f"hash_tokens {hash_tokens} that divides block_tokens {block_tokens}"
            )
    if retention_tokens is not None and (retention_tokens < 0 or retention_tokens % block_tokens):
        raise ConfigError(
            f"retention_tokens is {retention_tokens}, wants 0 or a multiple of {block_tokens}"
        )
