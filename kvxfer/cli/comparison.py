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
    """Engine A computed ``prompt_tokens`` tokens in each prompt; engine B met the same prompts."""

    prompt_tokens: int
    cold: EngineReport
    warm: EngineReport

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
        table.add_row("outputs identical", "yes" if self.outputs_identical else "NO")
        return table

    def _differences(self) -> list[str]:
        return [
            f"outputs differ: prompt {number}, output token {place}"
            for number, (cold, warm) in enumerate(self._pairs(), start=1)
            if (place := _first_difference(cold.tokens, warm.tokens)) is not None
        ]

    def _largest_logprob_difference(self) -> float:
        # Some 4e-6 here with vLLM's own prefix cache as well: the rest of a prompt is multiplied
        # in smaller matrices, which round otherwise.
        return max(
            abs(a - b)
            for cold, warm in self._pairs()
            for a, b in zip(cold.logprobs, warm.logprobs, strict=False)  # of the common length
        )

    def _pairs(self) -> list[tuple[PromptResult, PromptResult]]:
        return list(zip(self.cold.prompts, self.warm.prompts, strict=True))


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
