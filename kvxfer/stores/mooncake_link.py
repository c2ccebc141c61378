# SPDX-License-Identifier: Apache-2.0
"""The link to a Mooncake master: up, down while the master is gone, up again by itself."""

from __future__ import annotations

import contextlib
import enum
import logging
import threading
from collections.abc import Callable, Iterable, Iterator

from kvxfer.errors import StoreError
from kvxfer.stores.mooncake_client import Client
from kvxfer.stores.mooncake_codes import has_lost_master
from kvxfer.stores.mooncake_counts import Counts
from kvxfer.stores.mooncake_memory import Memory

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 5.0
TRIES_BEFORE_SETUP = 8
"""Failed probes of a reachable master, some 25 s, after which its client is set up again. Late:
a client finds a restarted master by itself, and to end one and set one up holds the GIL."""
PROBE = ["kvxfer-check/probe"]

_abandoned: list[tuple[Client, Memory]] = []
"""Clients of calls that never returned, and the memory that these may still write: kept alive."""


class State(enum.Enum):
    """Of a link: ``UP`` <-> ``DOWN``, and ``CLOSED`` for good."""

    UP = "up"
    DOWN = "down"
    CLOSED = "closed"


class Link:
    """Owns the client and says whether it may be called.

    | state  | calls               | ends when                                              |
    |--------|---------------------|--------------------------------------------------------|
    | UP     | go to the client    | a call found the master gone or silent -> DOWN; close  |
    | DOWN   | are refused at once | the master answers a probe -> UP; close                |
    | CLOSED | are refused at once | never                                                  |

    While it is down a thread of its own asks every 0.25 to 5 s, and nobody waits for it. A client
    that goes on failing though its master takes connections is closed and set up again, for
    which the native calls hold the GIL, 0.2 to 2.5 s where measured.
    """

    def __init__(
        self,
        client: Client,
        memory: Memory,
        counts: Counts,
        *,
        connect: Callable[[], Client],
        is_reachable: Callable[[], bool],
        timeout_s: float,
        first_pause_s: float = FIRST_PAUSE_S,
    ) -> None:
        self._memory, self._counts = memory, counts
        self._connect, self._is_reachable = connect, is_reachable
        self._timeout_s, self._first_pause_s = timeout_s, first_pause_s
        self._changed = threading.Condition()
        self._client: Client | None = client  # guarded by _changed
        self._state = State.UP  # guarded by _changed
        self._num_calls = 0  # guarded by _changed
        self._has_abandoned = False  # guarded by _changed
        self._watcher: threading.Thread | None = None  # guarded by _changed

    @property
    def state(self) -> State:
        """The state now; it may be another one at the next look."""
        with self._changed:
            return self._state

    @contextlib.contextmanager
    def call(self) -> Iterator[Client | None]:
        """Hold the client for a call; None unless the link is up."""
        client = self._enter(State.UP)
        try:
            yield client
        finally:
            if client is not None:
                self._leave()

    def note(self, codes: Iterable[int]) -> None:
        """Take the link down where the codes of a call say that the master is gone."""
        if not has_lost_master(codes):
            return
        with self._changed:
            if self._state is not State.UP:
                return
            self._state = State.DOWN
            self._watcher = threading.Thread(
                target=self._watch, name="kvxfer-mooncake-watch", daemon=True
            )
            self._watcher.start()
        self._counts.add("master_lost")
        self._counts.complain("the master does not answer", "its calls fail until it does")

    def wait_up(self, timeout_s: float) -> bool:
        """Wait until the link is up; False where it is not within ``timeout_s``."""
        with self._changed:
            return self._changed.wait_for(lambda: self._state is State.UP, timeout_s)

    def close(self) -> bool:
        """Refuse calls, wait for those in flight and end the client; idempotent.

        False where some did not return within ``timeout_s``, now or when another client took over:
        theirs is left to them, and the memory has to stay registered.
        """
        with self._changed:
            self._state = State.CLOSED
            watcher = self._watcher
            self._changed.notify_all()
        if watcher is not None:
            watcher.join(self._timeout_s)
        has_ended = self._end_client()
        with self._changed:
            return has_ended and not self._has_abandoned

    def _end_client(self) -> bool:
        """Close the client once its calls have ended; False where that takes too long."""
        with self._changed:
            is_idle = self._changed.wait_for(lambda: self._num_calls == 0, self._timeout_s)
            client, self._client = self._client, None
            self._has_abandoned |= client is not None and not is_idle
        if client is None:
            return True
        if not is_idle:
            _abandoned.append((client, self._memory))
            self._counts.add("clients_abandoned")
            logger.error("a Mooncake client is stuck in a call; it is left behind")
            return False
        client.close()
        return True

    def _enter(self, wanted: State) -> Client | None:
        with self._changed:
            client = self._client if self._state is wanted else None
            self._num_calls += client is not None
            return client

    def _leave(self) -> None:
        with self._changed:
            self._num_calls -= 1
            self._changed.notify_all()

    def _watch(self) -> None:
        pause_s, num_failures = self._first_pause_s, 0
        while not self._wait_closed(pause_s):
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            if not self._is_reachable():
                continue
            if self._probe():
                self._come_up()
                return
            num_failures += 1
            if num_failures % TRIES_BEFORE_SETUP == 0:
                self._set_up_again()

    def _wait_closed(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._state is State.CLOSED, seconds)

    def _probe(self) -> bool:
        client = self._enter(State.DOWN)
        if client is None:
            return False
        try:
            return client.exists(PROBE)[0] >= 0
        finally:
            self._leave()

    def _come_up(self) -> None:
        with self._changed:
            if self._state is State.DOWN:
                self._state = State.UP
            self._changed.notify_all()
        self._counts.add("master_found")
        logger.warning("Mooncake's master answers again")

    def _set_up_again(self) -> None:
        if not self._end_client():
            return
        try:
            client = self._connect_and_attach()
        except StoreError as error:
            self._counts.complain("the client could not be set up again", error)
            return
        self._counts.add("clients_set_up_again")
        with self._changed:
            is_closed = self._state is State.CLOSED
            if not is_closed:
                self._client = client
        if is_closed:
            client.close()

    def _connect_and_attach(self) -> Client:
        """Return a new client that has registered our memory; ``StoreError`` leaves none behind."""
        client = self._connect()
        try:
            self._memory.attach(client)
        except StoreError:
            client.close()
            raise
        return client
