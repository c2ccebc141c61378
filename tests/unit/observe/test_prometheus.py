# SPDX-License-Identifier: Apache-2.0
"""From stats to a scrape that Prometheus' own parser reads."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiKVConnectorPromMetrics,
)

from kvxfer.connector import KVXferConnector
from kvxfer.observe.definitions import METRICS, PREFIX, SECONDS_BOUNDS, Kind
from kvxfer.observe.meter import Meter
from kvxfer.observe.prometheus import KVXferPromMetrics
from kvxfer.observe.stats import KVXferStats

LABELS = ["model_name", "engine"]
ENGINES = {0: ["model", "0"], 1: ["model", "1"]}


class Frontend:
    """The collectors of a frontend of two engines, in a registry of their own."""

    def __init__(self):
        self.registry = CollectorRegistry()
        types = {cls: self._in_registry(cls) for cls in (Counter, Gauge, Histogram)}
        config = SimpleNamespace(kv_transfer_config=None)
        self.metrics = KVXferConnector.build_prom_metrics(config, types, LABELS, ENGINES)

    def _in_registry(self, cls):
        return lambda **arguments: cls(registry=self.registry, **arguments)

    def observe(self, stats, engine=0):
        self.metrics.observe(stats.to_dict(), engine)

    def families(self):
        """Return what a scrape has, but for the times at which series were created."""
        text = generate_latest(self.registry).decode()
        families = {family.name: family for family in text_string_to_metric_families(text)}
        return {k: v for k, v in families.items() if not k.endswith("_created")}

    def value(self, name, engine=0, **labels):
        """Return the one sample of a name, without our prefix, that has the labels."""
        labels = {"engine": str(engine), "model_name": "model", **labels}
        (found,) = [
            sample.value
            for family in self.families().values()
            for sample in family.samples
            if sample.name == PREFIX + name and sample.labels == labels
        ]
        return found


@pytest.fixture
def frontend():
    return Frontend()


def counted(seconds=(), **counters):
    meter = Meter()
    meter.note("", 0.0, list(counters.items()))
    for name, value in seconds:
        meter.note(name, value)
    return KVXferStats.of(*meter.take(), {})


def test_every_metric_is_exposed_from_the_start_with_its_kind(frontend):
    families = frontend.families()
    assert {name: family.type for name, family in families.items()} == {
        metric.full_name: metric.kind.value for metric in METRICS
    }
    for metric in METRICS:
        samples = families[metric.full_name].samples
        exposed = {sample.name for sample in samples}
        assert exposed == (set(metric.exposed_names) if metric.series else set())
        assert all(sample.value == 0 for sample in samples)
        series = {tuple(sample.labels[label] for label in metric.labels) for sample in samples}
        assert series == set(metric.series)


def test_names_follow_the_conventions():
    for metric in METRICS:
        assert metric.full_name.islower()
        assert not metric.full_name.endswith("_total")  # the client adds it
        assert not metric.name.endswith(("_ms", "_us", "_kb", "_mb"))
        assert metric.name.endswith("_seconds") == (metric.kind is Kind.HISTOGRAM)
        assert metric.text.endswith(".")
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    assert list(SECONDS_BOUNDS) == sorted(set(SECONDS_BOUNDS))


def test_counters_grow_by_what_each_step_tells(frontend):
    frontend.observe(counted(hit_tokens=3))
    frontend.observe(counted(hit_tokens=4))
    assert frontend.value("hit_tokens_total") == 7


def test_engines_are_told_apart(frontend):
    frontend.observe(counted(hit_tokens=3), engine=0)
    frontend.observe(counted(hit_tokens=40), engine=1)
    assert frontend.value("hit_tokens_total", engine=0) == 3
    assert frontend.value("hit_tokens_total", engine=1) == 40


def test_histogram_has_each_observation_in_its_bucket(frontend):
    values = [0.0001, 0.00011, 0.1, 0.1, 0.1, 70.0]
    frontend.observe(counted([("lookup_seconds", value) for value in values]))
    assert frontend.value("lookup_seconds_count") == len(values)
    assert frontend.value("lookup_seconds_sum") == pytest.approx(sum(values))
    for bound in SECONDS_BOUNDS:
        exact = sum(value <= bound for value in values)
        assert frontend.value("lookup_seconds_bucket", le=str(bound)) == exact, bound
    assert frontend.value("lookup_seconds_bucket", le="+Inf") == len(values)


def test_mean_that_rounding_takes_out_of_its_bucket_stays_in(frontend):
    # three times 0.1 makes more than 0.3
    frontend.observe(counted([("lookup_seconds", 0.1)] * 3))
    assert frontend.value("lookup_seconds_bucket", le="0.1") == 3


def gauge(source, name, value):
    return KVXferStats.of({}, {}, {source: {name: value}})


def test_gauge_is_the_sum_of_the_last_values_of_all_ranks(frontend):
    queued = {"operation": "save"}
    frontend.observe(
        gauge("a/0", "queued_jobs/save", 3).aggregate(gauge("a/1", "queued_jobs/save", 4))
    )
    assert frontend.value("queued_jobs", **queued) == 7
    frontend.observe(gauge("a/1", "queued_jobs/save", 0))
    assert frontend.value("queued_jobs", **queued) == 3
    assert frontend.value("queued_jobs", engine=1, **queued) == 0


def test_gauges_of_one_source_that_are_not_told_again_stay(frontend):
    frontend.observe(gauge("a/0", "store_values", 3))
    frontend.observe(gauge("a/1", "store_values", 4))
    frontend.observe(gauge("a/0", "pinned_blocks", 5))
    frontend.observe(gauge("a/1", "store_values", 0))
    assert frontend.value("store_values") == 3
    assert frontend.value("pinned_blocks") == 5


def test_event_of_a_store_appears_when_it_happens(frontend):
    frontend.observe(counted(**{"store_events/evicted": 5}))
    assert frontend.value("store_events_total", event="evicted") == 5


def test_children_of_a_multi_connector_reach_our_collectors(frontend):
    multi = MultiKVConnectorPromMetrics(
        SimpleNamespace(kv_transfer_config=None),
        {Counter: Counter, Gauge: Gauge, Histogram: Histogram},
        LABELS,
        ENGINES,
        {"KVXferConnector": frontend.metrics},
    )
    multi.observe({"KVXferConnector": counted(hit_tokens=2).to_dict()}, 1)
    assert frontend.value("hit_tokens_total", engine=1) == 2


def test_second_set_of_collectors_is_refused_by_the_registry(frontend):
    types = {cls: frontend._in_registry(cls) for cls in (Counter, Gauge, Histogram)}
    with pytest.raises(ValueError, match="Duplicated"):
        KVXferPromMetrics(SimpleNamespace(kv_transfer_config=None), types, LABELS, ENGINES)
