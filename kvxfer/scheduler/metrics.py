# SPDX-License-Identifier: Apache-2.0
"""What the scheduler side counts, and what it hands to vLLM each step."""

from __future__ import annotations

from collections.abc import Mapping

from kvxfer.config import KVXferConfig
from kvxfer.observe.meter import Tally
from kvxfer.observe.stats import KVXferStats
from kvxfer.observe.worker_metrics import name_source
from kvxfer.scheduler.token_counts import TokenCounts
from kvxfer.vllm_specs import EngineFacts


class SchedulerMetrics:
    """Counters and gauges of an engine's scheduler side; in its thread."""

    def __init__(self, config: KVXferConfig, facts: EngineFacts) -> None:
        self._tally = Tally()
        self.tokens = TokenCounts(
            self._tally, facts.align_tokens, enable_lookup=config.enable_lookup
        )
        """What becomes of wanted tokens and of lookups."""
        self._source = name_source(facts.engine_id, "scheduler")
        self._told: dict[str, int] = {}
        self._num_pinned = 0

    def take(self, num_pinned: int, totals: Mapping[str, int]) -> KVXferStats | None:
        """Return what happened since the last call; None if nothing.

        ``totals``: counters that are kept elsewhere, since the start.
        """
        for name, total in totals.items():
            if total:
                self._tally.count(name, total - self._told.get(name, 0))
                self._told[name] = total
        counters, seconds = self._tally.take()
        gauges = {}
        if num_pinned != self._num_pinned:
            self._num_pinned = num_pinned
            gauges = {self._source: {"pinned_blocks": float(num_pinned)}}
        return KVXferStats.of(counters, seconds, gauges)
