# SPDX-License-Identifier: Apache-2.0
"""What one rank counts, and what it hands to vLLM each step."""

from __future__ import annotations

from collections.abc import Mapping

from kvxfer.observe.definitions import series_name
from kvxfer.observe.meter import Meter
from kvxfer.observe.metered_store import MeteredStore
from kvxfer.observe.stats import KVXferStats
from kvxfer.stores import Store
from kvxfer.transfer.jobs import JobResult

ROLES = ("load", "save")
_JOBS = {
    act: {result: series_name("jobs", act, result.value) for result in JobResult} for act in ROLES
}
_JOB_SECONDS = {act: series_name("job_seconds", act) for act in ROLES}


class WorkerMetrics:
    """Counters and gauges of one rank; noted by any thread, taken by the worker's.

    ``source`` names the rank and its connector among all whose stats vLLM adds up. What the whole
    store holds is told by rank 0 alone, so that the sum over ranks is right.
    """

    def __init__(self, store: Store, source: str, *, tells_of_store: bool) -> None:
        self._meter = Meter()
        self.store = MeteredStore(store, self._meter)
        """The store to use in place of the given one."""
        self._source, self._tells_of_store = source, tells_of_store
        self._last_gauges: dict[str, float] = {}

    def note_job(self, act: str, result: JobResult, seconds: float) -> None:
        """Count a job of ``load`` or ``save`` that has ended."""
        self._meter.note(_JOB_SECONDS[act], seconds, ((_JOBS[act][result], 1),))

    def note_staging_wait(self, seconds: float) -> None:
        """Note how long a transfer thread found no free staging slot."""
        self._meter.note("staging_wait_seconds", seconds)

    def take(self, num_queued: Mapping[str, int]) -> KVXferStats | None:
        """Return what happened since the last call, with gauges that have changed; None if nothing.

        ``num_queued``: jobs of ``load`` and ``save`` that no thread has begun.
        """
        counters, seconds = self._meter.take()
        gauges = self._gauges(num_queued)
        changed = {k: v for k, v in gauges.items() if self._last_gauges.get(k) != v}
        self._last_gauges = gauges
        return KVXferStats.of(counters, seconds, {self._source: changed} if changed else {})

    def _gauges(self, num_queued: Mapping[str, int]) -> dict[str, float]:
        gauges: dict[str, float] = {
            series_name("queued_jobs", act): number for act, number in num_queued.items()
        }
        for act in ("get", "put"):
            gauges[series_name("in_flight_bytes", act)] = self.store.in_flight_bytes(act)
        stats = self.store.last_stats
        if self._tells_of_store and stats is not None:
            gauges["store_values"] = stats.num_values
            gauges["store_used_bytes"] = stats.used_bytes
            gauges["store_capacity_bytes"] = stats.capacity_bytes
        return gauges


def name_source(engine_id: str, side: object) -> str:
    """Return the name of one side of one connector among those whose stats vLLM adds up."""
    return f"{engine_id[-16:]}/{side}"
