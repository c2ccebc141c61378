# SPDX-License-Identifier: Apache-2.0
"""The Prometheus collectors of an engine's frontend."""

from __future__ import annotations

from math import inf, nextafter
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

from kvxfer.observe.definitions import METRICS, SECONDS_BOUNDS, Kind, Metric
from kvxfer.observe.stats import COUNTERS, GAUGES, SECONDS, sum_gauges

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class KVXferPromMetrics(KVConnectorPromMetrics):
    """Adds what ``KVXferStats`` tell to collectors that vLLM exposes; frontend process.

    All labels of vLLM's own metrics come first, ``engine`` among them. Of gauges the last value
    of every source counts, and what is exposed is their sum.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        """Register the collectors; vLLM's registry refuses a second set in one process."""
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._collectors = {metric.name: self._collector(metric) for metric in METRICS}
        self._series: dict[tuple[int, str], Any] = {}
        self._gauges: dict[int, dict[str, dict[str, float]]] = {}
        for engine_idx in per_engine_labelvalues:
            for metric in METRICS:
                for values in metric.series:
                    self._of(engine_idx, "/".join((metric.name, *values)))

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take the stats of one step of one engine, as ``KVXferStats.data``."""
        for name, number in transfer_stats_data.get(COUNTERS, {}).items():
            self._of(engine_idx, name).inc(number)
        for name, by_bucket in transfer_stats_data.get(SECONDS, {}).items():
            series = self._of(engine_idx, name)
            for idx, (number, total_s) in by_bucket.items():
                # The collector takes observations one by one: the mean keeps bucket and sum right.
                mean_s = _within_bucket(total_s / number, int(idx))
                for _ in range(int(number)):
                    series.observe(mean_s)
        by_source = self._gauges.setdefault(engine_idx, {})
        for source, gauges in transfer_stats_data.get(GAUGES, {}).items():
            by_source[source] = by_source.get(source, {}) | gauges
        for name, value in sum_gauges(by_source).items():
            self._of(engine_idx, name).set(value)

    def _collector(self, metric: Metric) -> Any:
        arguments: dict[str, Any] = {
            "name": metric.full_name,
            "documentation": metric.text,
            "labelnames": [*self._labelnames, *metric.labels],
        }
        if metric.kind is Kind.COUNTER:
            return self._counter_cls(**arguments)
        if metric.kind is Kind.GAUGE:
            return self._gauge_cls(multiprocess_mode="mostrecent", **arguments)
        return self._histogram_cls(buckets=SECONDS_BOUNDS, **arguments)

    def _of(self, engine_idx: int, name: str) -> Any:
        """Return the child collector of a series of an engine."""
        series = self._series.get((engine_idx, name))
        if series is None:
            metric, *values = name.split("/")
            labels = [*self.per_engine_labelvalues[engine_idx], *values]
            series = self._series[engine_idx, name] = self._collectors[metric].labels(*labels)
        return series


def _within_bucket(seconds: float, idx: int) -> float:
    """Return ``seconds``, a mean of values of bucket ``idx``, without what rounding took it out."""
    lowest = nextafter(SECONDS_BOUNDS[idx - 1], inf) if idx else -inf
    highest = SECONDS_BOUNDS[idx] if idx < len(SECONDS_BOUNDS) else inf
    return min(max(seconds, lowest), highest)
