# SPDX-License-Identifier: Apache-2.0
"""What the scheduler side remembers of an unfinished request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request


NEVER = 1 << 62
"""More tokens than a request ever has."""


@dataclass(slots=True)
class Offer:
    """A hit that was promised to vLLM: tokens ``local_tokens`` to ``hit_tokens`` can be loaded."""

    local_tokens: int
    hit_tokens: int
    tail_boundaries: dict[int, int]


@dataclass(slots=True)
class Answer:
    """A lookup's answer, kept while the request waits for blocks."""

    hit_tokens: int
    tail_boundaries: dict[int, int]
    """Cache group -> token at which the chunk of its last block ends."""
    num_tokens: int
    """Prompt length that was asked about; another length needs another answer."""
    expires_s: float
    pays: bool | None = None
    """Whether the hit is to be loaded; decided once, when it is offered."""
    miss_reason: str = "not_stored"
    """Why tokens beyond the hit are missed; one of ``observe.definitions.MISS_REASONS``."""


@dataclass(slots=True)
class RequestState:
    """What is remembered of one unfinished request."""

    request: Request
    saved_tokens: int = 0
    """Tokens from the start that are stored or ordered to be: saves go on from here."""
    save_due_tokens: int = 0
    """No save can be due before so many tokens are computed; 0: not known, to be looked at."""
    answer: Answer | None = None
    offer: Offer | None = None
    prefill_tokens: int = 0
    """Tokens that the last admission prefills: the prompt, and what a resumed request had made."""
    tail_ordered: bool = False
    """The prompt's tail below the common block was ordered."""
    may_save: bool = True
    """False for a request that was alive at a reset."""
    load_failed: bool = False
    """A load failed: nothing is offered again, so that the request makes progress."""
    asked_s: float | None = None
    """When the lookup in flight was asked for the first time."""
    local_tokens: int = 0
    """vLLM's own hit, when it last asked for ours."""
    is_counted: bool = False
    """Its tokens were counted, at its first admission."""
    loading_tokens: int = 0
    """Tokens of the load under way that are still to be counted."""
    load: tuple[int, float] | None = None
    """Tokens of the load under way, and when it was ordered."""
    worth_tokens: int = NEVER
    """Tokens from the start that were seen often enough to be saved."""
