# SPDX-License-Identifier: Apache-2.0
"""The back-off of saves while a pool takes nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 8.0


class Pressure:
    """Says whether a put is worth trying; shared by all threads of one store.

    A put that was refused for want of room, or whose transfer failed, starts a pause in which
    nothing is tried; the first try after it decides: a stored value ends the back-off, another
    refusal doubles the pause, up to 8 s. So a pool with room again is found within 8 s.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._pause_s = 0.0  # guarded by _lock; 0 where there is no pressure
        self._until = 0.0  # guarded by _lock
        self.num_backoffs = 0

    @property
    def is_on(self) -> bool:
        """Whether puts had better not be tried now."""
        with self._lock:
            return self._pause_s > 0 and self._clock() < self._until

    def refused(self) -> None:
        """Begin or lengthen the back-off; refusals within one pause count once."""
        with self._lock:
            now = self._clock()
            if self._pause_s and now < self._until:
                return
            self._pause_s = min(max(2 * self._pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
            self._until = now + self._pause_s
            self.num_backoffs += 1

    def stored(self) -> None:
        """End the back-off."""
        with self._lock:
            self._pause_s = 0.0
