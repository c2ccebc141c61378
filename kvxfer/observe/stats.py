# SPDX-License-Identifier: Apache-2.0
"""What a step hands to vLLM: summed over ranks, children and steps, sent as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvxfer.observe.meter import Buckets, add_seconds

COUNTERS, SECONDS, GAUGES = "counters", "seconds", "gauges"


class KVXferStats(KVConnectorStats):
    """Counters, histograms and gauges of some ranks over some steps; ``data`` alone is sent.

    ``data`` has three parts: counters by series; seconds by series and bucket, as
    ``meter.Buckets``; gauges by source, which is a rank's side of one connector, and series.
    Counters and histograms add up. A gauge of a source replaces an earlier one of the same, so
    that adding ranks together keeps each rank's, and adding steps together the last.
    """

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__({COUNTERS: {}, SECONDS: {}, GAUGES: {}} | (data or {}))

    @classmethod
    def of(
        cls, counters: dict[str, int], seconds: Buckets, gauges: dict[str, dict[str, float]]
    ) -> KVXferStats | None:
        """Return the stats of one source, None where there is nothing to tell."""
        if not (counters or seconds or gauges):
            return None
        return cls({COUNTERS: counters, SECONDS: seconds, GAUGES: gauges})

    def reset(self) -> None:
        """Forget everything."""
        self.data: dict[str, Any] = {COUNTERS: {}, SECONDS: {}, GAUGES: {}}

    def copy(self) -> KVXferStats:
        """Return the same numbers, which grow apart from these."""
        return KVXferStats().aggregate(self)

    def aggregate(self, other: KVConnectorStats) -> KVXferStats:
        """Add another's numbers to these, and return these; the other stays as it is."""
        counters = self.data[COUNTERS]
        for name, number in other.data[COUNTERS].items():
            counters[name] = counters.get(name, 0) + number
        for name, by_bucket in other.data[SECONDS].items():
            for idx, (number, total_s) in by_bucket.items():
                add_seconds(self.data[SECONDS], name, idx, number, total_s)
        for source, gauges in other.data[GAUGES].items():
            self.data[GAUGES][source] = self.data[GAUGES].get(source, {}) | gauges
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return one number a series for vLLM's log line; of seconds the count and the mean."""
        numbers: dict[str, int | float] = dict(sorted(self.data[COUNTERS].items()))
        for name, by_bucket in sorted(self.data[SECONDS].items()):
            count = sum(number for number, _ in by_bucket.values())
            numbers[f"{name} count"] = count
            numbers[f"{name} mean"] = round(sum(s for _, s in by_bucket.values()) / count, 6)
        return numbers | sum_gauges(self.data[GAUGES])

    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not any(self.data.values())


def sum_gauges(by_source: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return gauges by series, added up over their sources."""
    total: dict[str, float] = {}
    for gauges in by_source.values():
        for name, value in gauges.items():
            total[name] = total.get(name, 0) + value
    return total
