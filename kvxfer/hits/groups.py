# SPDX-License-Identifier: Apache-2.0
"""Cache groups as the hit computation sees them, and how those of one spec become one."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import ConfigError, UnsupportedError

KINDS = ("full", "sliding_window", "chunked_local", "mamba", "other")


class Manager(Protocol):
    """The cache manager of a kind that the native search does not know.

    Kept free of vLLM's types: :mod:`kvxfer.vllm_specs` wraps the registered manager class. All
    lengths are tokens; ``stored`` is (num_hashes,) uint8, 1 where the chunk whose end that hash
    closes is stored.
    """

    searched_first: bool
    """Full attention by vLLM's reckoning: searched first and once, then only cut shorter."""
    gives_back_eagle: bool
    """Whether an EAGLE group of this kind matches one block more and gives it back."""
    below_block: bool
    """Whether its search can end a hit below the block."""

    def find_longest_cache_hit(
        self,
        stored: NDArray[np.uint8],
        max_tokens: int,
        hash_tokens: int,
        align_tokens: int,
        drop_eagle: bool,
    ) -> tuple[int, Sequence[bool]]:
        """Return the hit length and, from block 0, which of its blocks are loaded."""
        ...

    def reachable_block_mask(
        self,
        start_block: int,
        end_block: int,
        align_tokens: int,
        use_eagle: bool,
        retention_tokens: int | None,
        boundaries: Sequence[int],
    ) -> Sequence[bool] | None:
        """Return which blocks of [start, end) a later hit can need; None where all of them."""
        ...


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """One cache group: what of it decides where a hit may end and which blocks it needs.

    ``block_tokens`` is the block as the block table counts it, ranks of context parallelism
    included. ``window_tokens`` belongs to sliding windows, ``chunk_tokens`` to chunked local
    attention. ``retained_tokens``, below the window, are those of drafters that prefill the end of
    a hit again: the core allocates their blocks, so a hit has them too. ``eagle`` marks the group
    of a drafter's layers. A group that is not ``cacheable`` is skipped: its masks are empty.
    Groups of equal ``spec_id`` (vLLM's specs compare equal) are searched as one; None equals none.
    ``manager`` serves kind ``"other"`` alone.
    """

    kind: str
    block_tokens: int
    window_tokens: int | None = None
    chunk_tokens: int | None = None
    retained_tokens: int = 0
    eagle: bool = False
    cacheable: bool = True
    spec_id: Hashable | None = None
    manager: Manager | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UnsupportedError(f"cache group kind {self.kind!r} is none of {', '.join(KINDS)}")
        if self.block_tokens < 1:
            raise ConfigError(f"block_tokens is {self.block_tokens}, wants at least 1")
        if self.retained_tokens < 0:
            raise ConfigError(f"retained_tokens is {self.retained_tokens}, wants at least 0")
        self._check_belongs("window_tokens", self.window_tokens, "sliding_window")
        self._check_belongs("chunk_tokens", self.chunk_tokens, "chunked_local")
        if self.kind == "other" and self.cacheable and self.manager is None:
            raise ConfigError("a cache group of kind 'other' needs the manager that searches it")

    @property
    def covered_tokens(self) -> int | None:
        """Tokens before a hit's end that a sliding window has to hold."""
        return None if self.window_tokens is None else self.window_tokens + self.retained_tokens

    def _check_belongs(self, name: str, value: int | None, kind: str) -> None:
        if self.kind == kind and (value is None or value < 1):
            raise ConfigError(f"{name} is {value}, a group of kind {kind!r} wants at least 1")


@dataclass(frozen=True, slots=True)
class MergedGroup:
    """Cache groups of one spec: a chunk is stored when every member's is.

    ``members`` are group indices, ascending. ``eagle`` holds if it holds for any member: members
    are searched jointly, so they give the block back jointly.
    """

    group: CacheGroup
    members: tuple[int, ...]
    eagle: bool

    @property
    def searched_first(self) -> bool:
        """Whether this is full attention: its stored blocks have no hole below its hit."""
        manager = self.group.manager
        return self.group.kind == "full" or (manager is not None and manager.searched_first)


def merge_groups(groups: Sequence[CacheGroup], use_eagle: bool) -> tuple[MergedGroup, ...]:
    """Return the cacheable groups merged by spec, in the order in which they are searched.

    Full attention comes first, otherwise in the order given. With ``use_eagle`` and no group
    flagged, all are.
    """
    specs: list[list[int]] = []
    for idx, group in enumerate(groups):
        if not group.cacheable:
            continue
        for members in specs:
            first = groups[members[0]]
            if group.spec_id is not None and first.spec_id == group.spec_id:
                _check_mergeable(members[0], first, idx, group)
                members.append(idx)
                break
        else:
            specs.append([idx])
    flag_all = use_eagle and not any(groups[idx].eagle for members in specs for idx in members)
    merged = [
        MergedGroup(
            groups[members[0]],
            tuple(members),
            flag_all or any(groups[idx].eagle for idx in members),
        )
        for members in specs
    ]
    return tuple(sorted(merged, key=lambda group: not group.searched_first))


def _check_mergeable(first_idx: int, first: CacheGroup, idx: int, group: CacheGroup) -> None:
    """Raise ConfigError where groups of one spec are described differently."""
    if _searched_alike(first) != _searched_alike(group):
        raise ConfigError(
            f"cache groups {first_idx} and {idx} share spec_id {group.spec_id!r} "
            "but not kind, block and window"
        )


def _searched_alike(group: CacheGroup) -> tuple[object, ...]:
    return (group.kind, group.block_tokens, group.covered_tokens, group.chunk_tokens)
