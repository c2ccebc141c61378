# SPDX-License-Identifier: Apache-2.0
"""Whether a hit is worth loading: what a load brings against what computing it would cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

HALF_LIFE_S = 30.0
"""Of a measurement: after so long it counts half."""
PROBE_S = 10.0
"""While loads do not pay, one is done all the same after so long, to measure again."""


@dataclass(slots=True)
class _Rate:
    """Tokens per second over the recent past: sums that fade."""

    tokens: float = 0.0
    seconds: float = 0.0
    noted_s: float = 0.0

    def note(self, now: float, tokens: int, seconds: float) -> None:
        kept = 0.5 ** ((now - self.noted_s) / HALF_LIFE_S)
        self.tokens = self.tokens * kept + tokens
        self.seconds = self.seconds * kept + seconds
        self.noted_s = now

    @property
    def tokens_per_s(self) -> float | None:
        """None while nothing was measured."""
        return self.tokens / self.seconds if self.seconds > 0 else None


class LoadWorth:
    """Compares the rate of loads with that of prefills, as the scheduler sees both.

    A load counts from its order to the report of the last rank, queues and steps included; a
    prefill by the prompt tokens of a step and the time until the next. Both fade with a half-life,
    so the answer follows the load of the machine. Rates given by the caller are not measured.
    Until both are known every load pays, and while none does, one in ``PROBE_S`` is done.
    """

    def __init__(
        self,
        *,
        min_tokens: int = 1,
        measures: bool = False,
        load_tokens_per_s: float | None = None,
        prefill_tokens_per_s: float | None = None,
        clock: Callable[[], float],
    ) -> None:
        """``min_tokens``: fewer are never loaded. Without ``measures`` nothing else counts."""
        self.measures = measures
        self._min_tokens, self._clock = min_tokens, clock
        self._fixed_load, self._fixed_prefill = load_tokens_per_s, prefill_tokens_per_s
        self._loads, self._prefills = _Rate(), _Rate()
        self._step: tuple[float, int] | None = None  # begin, prompt tokens
        self._probed_s = clock()

    def note_step(self, prompt_tokens: int) -> None:
        """Note the beginning of a step that computes so many prompt tokens.

        The time of a step counts where another follows: an engine that ran out of work is idle.
        """
        if not self.measures:
            return
        now = self._clock()
        if self._step is not None and self._step[1] > 0:
            begin, tokens = self._step
            self._prefills.note(now, tokens, now - begin)
        self._step = now, prompt_tokens

    def note_idle(self) -> None:
        """Note that no step follows at once: the time until the next one is no step's."""
        self._step = None

    def note_load(self, num_tokens: int, seconds: float) -> None:
        """Note a load that has ended well."""
        if self.measures:
            self._loads.note(self._clock(), num_tokens, seconds)

    def pays(self, num_tokens: int) -> bool:
        """Return whether to load ``num_tokens`` rather than to compute them."""
        if num_tokens < self._min_tokens:
            return False
        if not self.measures:
            return True
        load, prefill = self.load_tokens_per_s, self.prefill_tokens_per_s
        if load is None or prefill is None or load >= prefill:
            return True
        now = self._clock()
        if now - self._probed_s < PROBE_S:
            return False
        self._probed_s = now
        return True

    @property
    def load_tokens_per_s(self) -> float | None:
        """Tokens that loads bring in a second; None while it is not known."""
        return self._fixed_load or self._loads.tokens_per_s

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Prompt tokens that are computed in a second; None while it is not known."""
        return self._fixed_prefill or self._prefills.tokens_per_s
