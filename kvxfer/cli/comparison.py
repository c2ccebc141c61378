# SPDX-License-Identifier: Apache-2.0
"""Cold run against warm run: the verdict of the demo, and its table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from kvxfer.cli.engine_client import EngineReport, Moved, PromptResult


@dataclass(frozen=True, slots=True)
class Comparison:
    """Engine A computed ``prompt_tokens`` tokens in each prompt; engine B met the same prompts.

    The reference of a prompt is engine A's own hit of the same length, where it computed the
    prompt again, else its cold run. A cold run goes through other chunks, which round otherwise:
    ``rounds`` says that this may well change a token (types below float32).
    """

    prompt_tokens: int
    cold: EngineReport
    warm: EngineReport
    rounds: bool = False

    @property
    def hit_tokens(self) -> int:
        """Tokens that engine B loaded instead of computing them, all prompts."""
        return sum(prompt.hit_tokens for prompt in self.warm.prompts)

    @property
    def outputs_identical(self) -> bool:
        """Whether every token of every prompt is the same."""
        return not self._differences()

    def failures(self) -> list[str]:
        """Return why the demo failed, one sentence each; empty where it succeeded."""
        reasons = self._differences()
        if reasons and self.rounds and self._num_cold:
            reasons.append(
                f"{self._num_cold} prompt(s) could be compared with a cold run alone, from which "
                "rounding differs: --dtype float32 tells whether that is the reason"
            )
        if stale := sum(prompt.hit_tokens for prompt in self.cold.prompts):
            reasons.append(
                f"engine A found {stale} tokens in the store, so that it was no cold run"
            )
        if self.hit_tokens == 0:
            reasons.append(
                f"nothing hit: engine A saved {self.cold.saved.num_values} values, and engine B "
                "found none of its prompts in the store"
            )
        return reasons

    def table(self) -> Table:
        """Return the table to show."""
        cold_s, warm_s = _median_first_token_s(self.cold), _median_first_token_s(self.warm)
        total_tokens = self.prompt_tokens * len(self.warm.prompts)
        table = Table(title="engine A saved, engine B loaded", show_header=False)
        table.add_column()
        table.add_column(justify="right")
        table.add_row("prompts", f"{len(self.warm.prompts)}")
        table.add_row("prompt tokens", f"{total_tokens:,}")
        table.add_row("external hit tokens", f"{self.hit_tokens:,}")
        table.add_row("time to first token, cold (median)", _milliseconds(cold_s))
        table.add_row("time to first token, warm (median)", _milliseconds(warm_s))
        table.add_row("saved", _moved(self.cold.saved))
        table.add_row("loaded", _moved(self.warm.loaded))
        table.add_row("largest logprob difference", f"{self._largest_logprob_difference():.1e}")
        if self.cold.again:
            table.add_row("compared with", self._reference_words())
        table.add_row("outputs identical", "yes" if self.outputs_identical else "NO")
        return table

    def _differences(self) -> list[str]:
        return [
            f"outputs differ: prompt {number}, output token {place}"
            for number, (reference, warm) in enumerate(self._pairs(), start=1)
            if (place := _first_difference(reference.tokens, warm.tokens)) is not None
        ]

    def _largest_logprob_difference(self) -> float:
        # Some 4e-6 here with vLLM's own prefix cache as well: the rest of a prompt is multiplied
        # in smaller matrices, which round otherwise.
        return max(
            abs(a - b)
            for reference, warm in self._pairs()
            for a, b in zip(reference.logprobs, warm.logprobs, strict=False)  # the common length
        )

    def _pairs(self) -> list[tuple[PromptResult, PromptResult]]:
        """Return the reference of each prompt, and what engine B made of it."""
        again = self.cold.again or self.cold.prompts
        triples = zip(self.cold.prompts, again, self.warm.prompts, strict=True)
        return [(local if _same_hit(local, w) else cold, w) for cold, local, w in triples]

    @property
    def _num_cold(self) -> int:
        """Prompts whose reference is the cold run."""
        return sum(not _same_hit(reference, warm) for reference, warm in self._pairs())

    def _reference_words(self) -> str:
        if self._num_cold == 0:
            return "vLLM's own cache"
        if self._num_cold == len(self.warm.prompts):
            return "the cold run"
        return f"vLLM's own cache ({self._num_cold} with the cold run)"


def _same_hit(local: PromptResult, warm: PromptResult) -> bool:
    """Whether vLLM's own cache gave one what the store gave the other."""
    return warm.hit_tokens > 0 and (local.local_hit_tokens, local.hit_tokens) == (
        warm.hit_tokens,
        0,
    )


def _first_difference(cold: Sequence[int], warm: Sequence[int]) -> int | None:
    """Return the number (from 1) of the first token that differs or is missing on one side."""
    for number, (a, b) in enumerate(zip(cold, warm, strict=False), start=1):
        if a != b:
            return number
    return None if len(cold) == len(warm) else min(len(cold), len(warm)) + 1


def _median_first_token_s(report: EngineReport) -> float:
    return statistics.median(prompt.first_token_s for prompt in report.prompts)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms"


def _moved(moved: Moved) -> str:
    megabytes = moved.num_bytes / 1e6
    return f"{moved.num_values:,} values, {megabytes:,.1f} MB, {moved.rate_gb_s:.2f} GB/s"
