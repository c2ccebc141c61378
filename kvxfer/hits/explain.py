# SPDX-License-Identifier: Apache-2.0
"""Why a hit is as long as it is: what each group had, what it offered, and what cut it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvxfer._native.hits import ABSENT, PRESENT
from kvxfer.hits.kinds import KindSearch
from kvxfer.hits.search import Step


class Cut(enum.Enum):
    """What kept a hit from being longer: the last thing that shortened it."""

    TOO_SHORT = "too short to match"
    """The prompt, or what of it has hashes, ends before the first boundary."""
    MISSING = "missing chunk"
    """A chunk that a group needs is not stored."""
    EAGLE = "EAGLE block given back"
    """All was stored; a drafter needs its last block computed again."""
    ALIGNMENT = "alignment"
    """All was stored up to the hit's boundary; the next lies beyond the prompt or the stored."""
    LAST_TOKEN = "last token left to compute"
    """The whole prompt was stored; a hit leaves at least one token."""


@dataclass(frozen=True, slots=True)
class GroupReport:
    """One cache group in a lookup, in tokens."""

    group: int
    kind: str
    stored_tokens: int
    """Where the stored chunks end: before the first hole for what is read from the left, else the
    last one. Only as far as the lookup asked."""
    offered_tokens: int
    """What it made of the length that the groups before it had left."""
    missing_tokens: int | None
    """Where the first chunk ends that its scan found missing."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """A hit and why it ends there."""

    num_tokens: int
    hit_length: int
    cut: Cut
    cut_by: tuple[int, ...]
    """The cache groups that made the cut, one or those of one spec; empty where none did."""
    groups: tuple[GroupReport, ...]
    """By cache group; those that are not cacheable have none."""
    align_tokens: int

    @property
    def line(self) -> str:
        """The explanation in one line of text."""
        parts = [f"hit {self.hit_length} of {self.num_tokens} tokens: {self._reason()}"]
        parts += [
            f"group {report.group} ({report.kind}) stored to {report.stored_tokens}, "
            f"offered {report.offered_tokens}"
            for report in self.groups
        ]
        return "; ".join(parts)

    def _reason(self) -> str:
        if self.cut is Cut.MISSING:
            lack = "lacks" if len(self.cut_by) == 1 else "lack"
            report = next(report for report in self.groups if report.group == self.cut_by[0])
            return f"{self._who()} {lack} the chunk that ends at token {report.missing_tokens}"
        reason = self.cut.value
        if self.cut in (Cut.TOO_SHORT, Cut.ALIGNMENT):
            reason += f" (a hit ends on a multiple of {self.align_tokens})"
        return f"{reason}, {self._who()}" if self.cut_by else reason

    def _who(self) -> str:
        plural = "s" if len(self.cut_by) > 1 else ""
        return f"group{plural} {', '.join(map(str, self.cut_by))}"


def too_short(num_tokens: int, align_tokens: int) -> Explanation:
    """Return the explanation of a prompt that ends before the first boundary."""
    return Explanation(num_tokens, 0, Cut.TOO_SHORT, (), (), align_tokens)


def explain_hit(
    searches: Sequence[KindSearch],
    rows: Sequence[NDArray[np.uint8]],
    steps: Sequence[Step],
    num_tokens: int,
    max_tokens: int,
    hit_length: int,
    derived_again: bool,
) -> Explanation:
    """Explain the hit that ``steps`` led to, from ``max_tokens``, over the answers of ``rows``.

    ``derived_again``: a first search had covered the whole prompt.
    """
    align_tokens = searches[0].align_tokens
    cuts = [step for step in steps if step.after < step.before]
    reports = sorted(
        (
            _report(group, search, rows[idx], _first_of(idx, steps, max_tokens))
            for idx, search in enumerate(searches)
            for group in search.merged.members
        ),
        key=lambda report: report.group,
    )
    if cuts:
        cut, members = _cut_of(cuts[-1], searches, rows)
    else:
        cut, members = Cut.LAST_TOKEN if derived_again else Cut.ALIGNMENT, ()
    return Explanation(num_tokens, hit_length, cut, members, tuple(reports), align_tokens)


def _first_of(idx: int, steps: Sequence[Step], max_tokens: int) -> Step:
    """Return what a merged group did first; a search below token 0 never got to it."""
    return next((step for step in steps if step.idx == idx), Step(idx, max_tokens, 0, False))


def _report(group: int, search: KindSearch, row: NDArray[np.uint8], first: Step) -> GroupReport:
    missing_idx = _missing_idx(search, row, first)
    stored_idx = np.flatnonzero(row == PRESENT)
    if search.from_left and missing_idx is not None:
        stored_idx = stored_idx[stored_idx < missing_idx]
    return GroupReport(
        group=group,
        kind=search.merged.group.kind,
        stored_tokens=(int(stored_idx[-1]) + 1) * search.hash_tokens if len(stored_idx) else 0,
        offered_tokens=first.after,
        missing_tokens=None if missing_idx is None else (missing_idx + 1) * search.hash_tokens,
    )


def _missing_idx(search: KindSearch, row: NDArray[np.uint8], step: Step) -> int | None:
    """Return the hash index of the first chunk that was missing where ``step`` looked for it."""
    peek = search.peek_tokens if step.gave_back else 0
    stop = (step.before + peek) // search.hash_tokens
    holes = np.flatnonzero(row[step.after // search.hash_tokens : stop] == ABSENT)
    if not len(holes) or step.after >= step.before:
        return None
    return step.after // search.hash_tokens + int(holes[0 if search.from_left else -1])


def _cut_of(
    step: Step, searches: Sequence[KindSearch], rows: Sequence[NDArray[np.uint8]]
) -> tuple[Cut, tuple[int, ...]]:
    search = searches[step.idx]
    if _missing_idx(search, rows[step.idx], step) is not None:
        return Cut.MISSING, search.merged.members
    return (Cut.EAGLE if step.gave_back else Cut.ALIGNMENT), search.merged.members
