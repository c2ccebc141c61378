# SPDX-License-Identifier: Apache-2.0
"""Every metric: name, unit, labels. ``docs/metrics.md`` tells what each says, and when to worry."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvxfer.lookup.protocol import Status
from kvxfer.stores import Outcome
from kvxfer.transfer.jobs import JobResult

PREFIX = "vllm:kvxfer_"
SECONDS_BOUNDS = tuple(
    float(f"{digit}e{exponent}") for exponent in range(-4, 2) for digit in (1, 2.5, 5)
)
"""Upper bounds of the buckets of every histogram: 100 us to 50 s, three a decade."""


class Kind(enum.Enum):
    """Prometheus' kinds, as far as they are used; histograms are of seconds."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. In stats its series are named ``name`` or ``name/value of each label``."""

    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()
    series: tuple[tuple[str, ...], ...] = ((),)
    """Label values that are exposed from the start, at 0; others come when they happen."""

    @property
    def full_name(self) -> str:
        """Its name for Prometheus' client, which adds ``_total`` to counters."""
        return PREFIX + self.name

    @property
    def exposed_names(self) -> tuple[str, ...]:
        """The names of its samples in a scrape."""
        endings = {
            Kind.COUNTER: ("_total",),
            Kind.GAUGE: ("",),
            Kind.HISTOGRAM: ("_bucket", "_count", "_sum"),
        }
        return tuple(self.full_name + ending for ending in endings[self.kind])


def series_name(name: str, *label_values: str) -> str:
    """Return how a series is named in stats."""
    return "/".join((name, *label_values))


def lookup_outcome(status: Status) -> str:
    """Return what a lookup that got no believable answer is counted as."""
    return status.name.lower()


MISSED_LOOKUPS = tuple(lookup_outcome(status) for status in Status if status is not Status.OK)
LOOKUP_OUTCOMES = ("hit", "miss", "refused", *MISSED_LOOKUPS)
MISS_REASONS = (
    "not_stored",
    "too_short",
    "last_block",
    "lookup_off",
    "not_wanted",
    "not_taken",
    "not_worth",
    "load_failed",
    "aborted",
    "refused",
    *MISSED_LOOKUPS,
)
JOBS = ("load", "save")
GET_OUTCOMES = (
    Outcome.OK,
    Outcome.MISSING,
    Outcome.WRONG_SIZE,
    Outcome.CORRUPT,
    Outcome.FAILED,
    Outcome.CLOSED,
)
PUT_OUTCOMES = (Outcome.OK, Outcome.EXISTS, Outcome.NO_SPACE, Outcome.FAILED, Outcome.CLOSED)


def _each(values: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    return tuple((value,) for value in values)


METRICS = (
    Metric(
        "lookups",
        Kind.COUNTER,
        "Answered or given up questions to the store, by outcome; one an engine.",
        ("outcome",),
        _each(LOOKUP_OUTCOMES),
    ),
    Metric(
        "lookup_seconds",
        Kind.HISTOGRAM,
        "From a lookup's question to the step that took its answer.",
    ),
    Metric(
        "wanted_tokens",
        Kind.COUNTER,
        "Tokens of admitted prompts that vLLM's own cache did not have; hits and misses of them.",
    ),
    Metric("hit_tokens", Kind.COUNTER, "Wanted tokens that were loaded."),
    Metric(
        "missed_tokens",
        Kind.COUNTER,
        "Wanted tokens that were computed, by reason.",
        ("reason",),
        _each(MISS_REASONS),
    ),
    Metric(
        "jobs",
        Kind.COUNTER,
        "Loads of requests and saves of steps that have ended, by result; each rank has its own.",
        ("operation", "outcome"),
        tuple((job, result.value) for job in JOBS for result in JobResult),
    ),
    Metric(
        "job_seconds",
        Kind.HISTOGRAM,
        "From the order of a load or a save to its end, on each rank.",
        ("operation",),
        _each(JOBS),
    ),
    Metric(
        "queued_jobs", Kind.GAUGE, "Jobs that no thread has begun.", ("operation",), _each(JOBS)
    ),
    Metric(
        "staging_wait_seconds",
        Kind.HISTOGRAM,
        "Waits of a transfer thread for a staging slot, where none was free.",
    ),
    Metric(
        "store_call_seconds",
        Kind.HISTOGRAM,
        "Calls of the store, each for a batch of keys.",
        ("operation",),
        _each(("exists", "get", "put", "remove")),
    ),
    Metric(
        "store_keys",
        Kind.COUNTER,
        "Keys that the store was called with, by outcome.",
        ("operation", "outcome"),
        (
            ("exists", "found"),
            ("exists", "missing"),
            *(("get", outcome.name.lower()) for outcome in GET_OUTCOMES),
            *(("put", outcome.name.lower()) for outcome in PUT_OUTCOMES),
            ("remove", "removed"),
        ),
    ),
    Metric(
        "store_bytes",
        Kind.COUNTER,
        "Bytes of values that were read from the store or newly stored.",
        ("operation",),
        _each(("get", "put")),
    ),
    Metric(
        "in_flight_bytes",
        Kind.GAUGE,
        "Bytes of values in store calls that have not returned.",
        ("operation",),
        _each(("get", "put")),
    ),
    Metric(
        "store_events",
        Kind.COUNTER,
        "What the store's client tells besides: evictions, back-offs, lost masters.",
        ("event",),
        (),
    ),
    Metric("store_values", Kind.GAUGE, "Values in the store, of all its users; rank 0's view."),
    Metric("store_used_bytes", Kind.GAUGE, "Bytes that they take; rank 0's view."),
    Metric("store_capacity_bytes", Kind.GAUGE, "Bytes that the store may take; rank 0's view."),
    Metric("pinned_blocks", Kind.GAUGE, "Blocks kept from reuse until saves have read them."),
    Metric("saves_put_off", Kind.COUNTER, "Saves that found no room for their pins in a step."),
    Metric("kv_events_dropped", Kind.COUNTER, "Blocks that no event told of, for want of room."),
)
