# SPDX-License-Identifier: Apache-2.0
"""What one call on an LMDB store counts, and how its failures reach the log."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import lmdb

from kvxfer.stores.base import Outcome
from kvxfer.stores.lmdb_data import DAMAGE_NAME

logger = logging.getLogger(__name__)

COMPLAINT_INTERVAL_S = 60.0
"""Between two log lines about the same kind of failure: a full store would write one per put."""

DAMAGE_ERRORS = (
    lmdb.CorruptedError,
    lmdb.PageNotFoundError,
    lmdb.PanicError,
    lmdb.InvalidError,
)
OPENING_DAMAGE_ERRORS = (
    *DAMAGE_ERRORS,
    lmdb.VersionMismatchError,
    lmdb.IncompatibleError,
    lmdb.NotFoundError,
)
"""While a store is opened: a header or a database is not what we have written."""
BACKEND_ERRORS = (lmdb.Error, OSError)
"""What a call turns into outcomes."""

_last_complaints: dict[tuple[str, str], float] = {}


class Call:
    """One call in flight; ``counts`` joins the handle's counters when it ends."""

    def __init__(self, folder: Path) -> None:
        self.counts: Counter[str] = Counter()
        self.evicted: list[bytes] = []
        """Keys of values that left to make room."""
        self._folder = folder

    def count_outcomes(self, act: str, outcomes: Sequence[Outcome]) -> None:
        """Count outcomes as ``get_ok``, ``put_no_space`` and so on."""
        for outcome, number in Counter(outcomes).items():
            self.counts[f"{act}_{outcome.name.lower()}"] += number

    def complain(self, what: str, error: BaseException | None = None) -> None:
        """Log a failure, each kind once a minute; damage is also noted in the store's folder."""
        if isinstance(error, DAMAGE_ERRORS):
            note_damage(self._folder)
        now = time.monotonic()
        kind = (str(self._folder), what)
        if now - _last_complaints.get(kind, -COMPLAINT_INTERVAL_S) < COMPLAINT_INTERVAL_S:
            return
        _last_complaints[kind] = now
        logger.warning("store %s: %s%s", *kind, f": {error}" if error else "")


def note_damage(folder: Path) -> None:
    """Have whoever is next alone with the store set its file aside."""
    try:
        (folder / DAMAGE_NAME).touch(mode=0o600)
    except OSError as error:  # the check at the next opening finds it, or LMDB again
        logger.warning("store %s: damage could not be noted: %s", folder, error)
