# SPDX-License-Identifier: Apache-2.0
"""What became of the prompt tokens that vLLM's own cache did not have, and of the lookups."""

from __future__ import annotations

from kvxfer.lookup import LookupReply
from kvxfer.lookup.protocol import Status
from kvxfer.observe.definitions import (
    LOOKUP_OUTCOMES,
    MISS_REASONS,
    lookup_outcome,
    series_name,
)
from kvxfer.observe.meter import Tally
from kvxfer.scheduler.requests import RequestState

REFUSED = "refused"
NOT_STORED = "not_stored"

_LOOKUPS = {outcome: series_name("lookups", outcome) for outcome in LOOKUP_OUTCOMES}
_MISSED = {reason: series_name("missed_tokens", reason) for reason in MISS_REASONS}
_STATUSES = {status: lookup_outcome(status) for status in Status}
_OK = Status.OK


class TokenCounts:
    """Counts each wanted token of an admitted request once: hit, or missed for one reason.

    Wanted are the tokens of a prompt beyond vLLM's own hit when the request is first admitted;
    what a later admission computes or loads again is not counted. Scheduler side; a few dict
    accesses a request, nothing a step.
    """

    def __init__(self, tally: Tally, align_tokens: int, *, enable_lookup: bool) -> None:
        self._tally, self._align_tokens = tally, align_tokens
        self._enable_lookup = enable_lookup

    def lookup_ended(self, reply: LookupReply, refused: bool, seconds: float) -> str:
        """Count a lookup's end; return the reason for which what it left open is missed."""
        if reply.status is not _OK:
            outcome = _STATUSES[reply.status]
        elif refused:
            outcome = REFUSED
        else:
            outcome = "hit" if reply.hit_length else "miss"
        self._tally.count(_LOOKUPS[outcome])
        self._tally.observe("lookup_seconds", seconds)
        return NOT_STORED if outcome in ("hit", "miss") else outcome

    def admitted(self, state: RequestState, num_external: int) -> None:
        """Count a request's tokens, of which ``num_external`` are about to be loaded.

        Called before offer and answer are forgotten, with the local hit of the same step.
        """
        if state.is_counted:
            return
        state.is_counted = True
        state.loading_tokens = num_external
        num_tokens = state.request.num_tokens
        self._tally.count("wanted_tokens", num_tokens - state.local_tokens)
        for reason, number in self._missed(state, num_tokens, state.local_tokens + num_external):
            if number:
                self._tally.count(_MISSED[reason], number)

    def load_ended(self, state: RequestState, failed_as: str | None = None) -> None:
        """Count the tokens of a request's load, if one was under way: hit, or missed for a reason.

        A load that failed in part counts as missed as a whole.
        """
        number, state.loading_tokens = state.loading_tokens, 0
        if number:
            self._tally.count("hit_tokens" if failed_as is None else _MISSED[failed_as], number)

    def _missed(
        self, state: RequestState, num_tokens: int, known_tokens: int
    ) -> tuple[tuple[str, int], ...]:
        """Return (reason, tokens) for what lies beyond ``known_tokens``."""
        missed = num_tokens - known_tokens
        if not self._enable_lookup:
            return (("lookup_off", missed),)
        if getattr(state.request, "skip_reading_prefix_cache", False):
            return (("not_wanted", missed),)
        if num_tokens < self._align_tokens:
            return (("too_short", missed),)
        boundary = max(known_tokens, (num_tokens - 1) // self._align_tokens * self._align_tokens)
        offered = found = known_tokens
        reason = NOT_STORED
        if state.offer is not None:
            offered = max(offered, state.offer.hit_tokens)
        if state.answer is not None:
            found = state.answer.hit_tokens
            reason = state.answer.miss_reason
        found = max(offered, found)
        return (
            ("not_taken", offered - known_tokens),
            ("not_worth", found - offered),
            (reason, boundary - found),
            ("last_block", num_tokens - boundary),
        )
