# SPDX-License-Identifier: Apache-2.0
"""What the calls on a Mooncake store count, and how their failures reach the log."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence

from kvxfer.stores.base import Outcome

logger = logging.getLogger(__name__)

COMPLAINT_INTERVAL_S = 60.0
"""Between two log lines of one kind: a full pool would write one per put."""


class Counts:
    """Counters of one store and its log lines, each kind once a minute; for all threads."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()  # guarded by _lock
        self._last_complaints: dict[str, float] = {}  # guarded by _lock

    def add(self, name: str, number: int = 1) -> None:
        """Count ``number`` more of ``name``."""
        if number:
            with self._lock:
                self._counts[name] += number

    def add_outcomes(self, act: str, outcomes: Sequence[Outcome]) -> None:
        """Count outcomes as ``get_ok``, ``put_no_space`` and so on."""
        if outcomes.count(Outcome.OK) == len(outcomes):  # a twentieth of the time for each
            self.add(f"{act}_ok", len(outcomes))
            return
        for outcome, number in Counter(outcomes).items():
            self.add(f"{act}_{outcome.name.lower()}", number)

    def snapshot(self) -> dict[str, int]:
        """Return the counters that are not 0."""
        with self._lock:
            return dict(self._counts)

    def complain(self, kind: str, detail: object) -> None:
        """Log a failure as a warning, unless one of its kind was logged within the minute."""
        now = time.monotonic()
        with self._lock:
            if now - self._last_complaints.get(kind, -COMPLAINT_INTERVAL_S) < COMPLAINT_INTERVAL_S:
                return
            self._last_complaints[kind] = now
        logger.warning("store %s: %s: %s", self._where, kind, detail)
