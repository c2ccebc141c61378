# SPDX-License-Identifier: Apache-2.0
"""The metrics of a running engine, as its ``/metrics`` page tells them."""

from __future__ import annotations

import re
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field

from kvxfer.errors import KvxferError
from kvxfer.observe.definitions import PREFIX

TIMEOUT_S = 5.0
MOST_BYTES = 64 << 20
_SAMPLE = re.compile(rf"^{re.escape(PREFIX)}(\w+)(?:\{{(.*)\}})? (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class ScrapeError(KvxferError, OSError):
    """An engine's metrics cannot be read."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of the page: its name without kvxfer's prefix, labels, value."""

    name: str
    labels: dict[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Scrape:
    """All samples of kvxfer at one moment."""

    taken_s: float
    """``time.monotonic()`` of the answer."""
    samples: list[Sample] = field(default_factory=list)

    def total(self, name: str, **labels: str) -> float:
        """Return the sum over ranks and engines of the samples with these labels."""
        return sum(sample.value for sample in self._matching(name, labels))

    def largest(self, name: str) -> float:
        """Return the largest value: of what engines that share a store all tell alike."""
        return max((sample.value for sample in self._matching(name, {})), default=0.0)

    def by_label(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Return the sums by the values of ``label``; those that are not 0."""
        sums: dict[str, float] = {}
        for sample in self._matching(name, labels):
            value = sample.labels.get(label, "")
            sums[value] = sums.get(value, 0.0) + sample.value
        return {value: number for value, number in sums.items() if number}

    def _matching(self, name: str, labels: dict[str, str]) -> list[Sample]:
        wanted = labels.items()
        return [s for s in self.samples if s.name == name and wanted <= s.labels.items()]


def scrape(url: str) -> Scrape:
    """Read an engine's metrics; ``ScrapeError`` where nobody answers or no sample is kvxfer's."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            text = answer.read(MOST_BYTES).decode("utf-8", errors="replace")
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ScrapeError(
            f"{url} does not answer ({reason}); give the address of vLLM's server, e.g. "
            "http://localhost:8000/metrics"
        ) from error
    found = Scrape(time.monotonic(), read_samples(text))
    if not found.samples:
        raise ScrapeError(
            f"{url} has no metrics of kvxfer: its engine runs without the connector, or with "
            "--disable-log-stats"
        )
    return found


def read_samples(text: str) -> list[Sample]:
    """Return kvxfer's samples of a page in Prometheus' text format."""
    samples = []
    for line in text.splitlines():
        if match := _SAMPLE.match(line):
            name, labels, value = match.groups()
            samples.append(Sample(name, dict(_LABEL.findall(labels or "")), float(value)))
    return samples
