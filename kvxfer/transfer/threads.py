# SPDX-License-Identifier: Apache-2.0
"""Named threads over one bounded queue: how saves and loads run beside the engine's steps."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

Task = TypeVar("Task")


class TaskThreads(Generic[Task]):
    """Runs ``run(task)`` for every task, in order of arrival, on ``num_threads`` threads.

    ``submit`` never waits. Each thread calls ``on_start`` first. ``run`` answers for its task
    whatever happens; an exception that leaves it all the same goes to ``on_error(task, error)``.
    ``close`` refuses new tasks, lets queued ones run for a while, hands the rest to
    ``on_dropped`` and joins the threads; a thread that is stuck in a native call is abandoned
    (it is a daemon), logged and counted.
    """

    def __init__(
        self,
        name: str,
        *,
        num_threads: int,
        max_queued: int,
        run: Callable[[Task], None],
        on_error: Callable[[Task, Exception], None],
        on_dropped: Callable[[Task], None],
        on_start: Callable[[], None] = lambda: None,
    ) -> None:
        self._run, self._on_error, self._on_dropped = run, on_error, on_dropped
        self._on_start = on_start
        self._max_queued = max_queued
        self._changed = threading.Condition()
        self._queue: deque[Task] = deque()  # guarded by _changed
        self._num_running = 0  # guarded by _changed
        self._closing = False  # guarded by _changed
        self.num_abandoned = 0
        self._threads = [
            threading.Thread(target=self._loop, name=f"{name}-{i}", daemon=True)
            for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, task: Task) -> bool:
        """Queue the task; False if the queue is full or closed."""
        with self._changed:
            if self._closing or len(self._queue) >= self._max_queued:
                return False
            self._queue.append(task)
            self._changed.notify_all()
            return True

    def submit_if_idle(self, task: Task) -> bool:
        """Queue the task if a thread is free for it now; False otherwise."""
        with self._changed:
            if self._closing or self._num_running + len(self._queue) >= len(self._threads):
                return False
            self._queue.append(task)
            self._changed.notify_all()
            return True

    def drop_queued(self) -> int:
        """Hand every task that no thread has begun to ``on_dropped``; return how many."""
        with self._changed:
            dropped = list(self._queue)
            self._queue.clear()
            self._changed.notify_all()
        for task in dropped:
            self._on_dropped(task)
        return len(dropped)

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing is queued or running; False if that took longer."""
        with self._changed:
            return self._changed.wait_for(self._is_idle, timeout_s)

    @property
    def num_queued(self) -> int:
        """Tasks that no thread has begun."""
        with self._changed:
            return len(self._queue)

    def close(self, timeout_s: float) -> None:
        """Run what is queued within ``timeout_s``, drop the rest, join; idempotent."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._changed.wait_for(self._is_idle, timeout_s)
        self.drop_queued()
        for thread in self._threads:
            thread.join(max(0.1, deadline - time.monotonic()))
            if thread.is_alive():
                self.num_abandoned += 1
                logger.error("thread %s is stuck in a native call; abandoned", thread.name)
        self._threads = []

    def _is_idle(self) -> bool:
        return not self._queue and self._num_running == 0

    def _loop(self) -> None:
        try:
            self._on_start()
        except Exception:
            logger.exception("a transfer thread could not be set up")
        while (task := self._next()) is not None:
            try:
                self._run(task)
            except Exception as error:
                logger.exception("a transfer failed")
                self._on_error(task, error)
            finally:
                with self._changed:
                    self._num_running -= 1
                    self._changed.notify_all()

    def _next(self) -> Task | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            if not self._queue:
                return None
            self._num_running += 1
            return self._queue.popleft()
