# SPDX-License-Identifier: Apache-2.0
"""A GPU that runs what is queued in any order that its streams and events allow.

``ModelQueues`` has the face of ``kvxfer.blocks.cuda_queues.Queues``. Device memory is host memory,
and nothing that is queued runs before somebody waits for it or a test lets time pass.
"""

import ctypes
import sys
from collections import deque
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvxfer.blocks import host
from kvxfer.blocks.cuda_fragments import Fragments


@dataclass(eq=False)
class Event:
    """Passed once everything that its streams held at its last `record` has run."""

    num_due: int = 0

    @property
    def passed(self):
        return self.num_due == 0

    def note_passed(self):
        self.num_due -= 1


class FailingCallError(Exception):
    """What a call of the model raises on demand."""


class ModelQueues:
    """Queues over a layout of host memory.

    ``random`` chooses which stream goes on; ``between`` is called before each call and each wait:
    whatever else happens at the same time. Calls of `wait` and `synchronize` from the source line
    ``without`` do nothing; with ``one_memory`` all lanes get the same. ``fail_at`` is (method,
    number of the call from 0) that raises.
    """

    def __init__(self, layout, random, *, without=None, device_bytes=None, one_memory=False):
        self._layout, self._random, self._without = layout, random, without
        self.fragments, self.num_batches = Fragments(layout), 0
        self._free_bytes = device_bytes
        self._one_memory = np.full(1 << 16, 0xEE, dtype=np.uint8) if one_memory else None
        self.fail_at, self.has_failed = None, False
        self._streams = []
        self.between = lambda: None
        self.engine = self.new_stream(urgent=False)
        self.pinned = 0

    # Time

    def queue(self, stream, work):
        """Queue a function."""
        stream.append(work)

    def run_one(self):
        """Run the next work of a stream that is not waiting; False if there is none."""
        ready = [stream for stream in self._streams if self._is_ready(stream)]
        if not ready:
            return False
        work = self._random.choice(ready).popleft()
        if isinstance(work, Event):
            return True  # a wait that is over
        work()
        return True

    def run_all(self):
        """Run everything; fails where streams wait for each other."""
        while self.run_one():
            pass
        assert not any(self._streams)

    @staticmethod
    def _is_ready(stream):
        return bool(stream) and (not isinstance(stream[0], Event) or stream[0].passed)

    # The face

    def use_device(self):
        pass

    def new_stream(self, *, urgent):
        self._streams.append(deque())
        return self._streams[-1]

    def new_event(self, stream):
        return Event()

    def empty(self, num_bytes, stream):
        if self._free_bytes is not None:
            if num_bytes > self._free_bytes:
                return None
            self._free_bytes -= num_bytes
        memory = np.full(num_bytes, 0xEE, dtype=np.uint8)
        if self._one_memory is not None:
            memory = self._one_memory[:num_bytes]
        return memory, memory.ctypes.data

    def pin(self, staging):
        self.pinned += 1
        return np.frombuffer(staging.buffer, dtype=np.uint8)

    def unpin(self, staging):
        self.pinned -= 1

    def mark(self):
        event = Event()
        self.record(event, self.engine)
        return event

    def record(self, event, stream):
        self._enter("record")
        event.num_due += 1
        self.queue(stream, event.note_passed)

    def wait(self, stream, event):
        self.between()
        if not self._is_left_out():
            self.queue(stream, event)

    def drain(self, stream):
        while stream:
            assert self.run_one(), "a stream that will never end"

    def synchronize(self, event):
        self.between()
        if not self._is_left_out():
            while not event.passed:
                assert self.run_one(), "a wait for what will never happen"
                self.between()

    def copy(self, target, source, stream):
        self._enter("copy")
        assert len(target) == len(source)
        self.queue(stream, lambda: np.copyto(target, source))

    def copy_batch(self, copies, stream):
        self._enter("copy_batch")
        self.num_batches += 1
        columns = (copies.targets, copies.sources, copies.sizes)
        batch = list(zip(*(column.tolist() for column in columns), strict=True))
        for column in columns:
            column[...] = 0  # read: whoever made it may use it again
        self._random.shuffle(batch)
        for copy in batch:
            self.queue(stream, partial(ctypes.memmove, *copy))

    def gather(self, items, values, stream, quota):
        self._enter("gather")
        items = self._checked(items, values)
        self.queue(stream, lambda: host.gather_items(self._layout, items))

    def scatter(self, items, values, stream, quota):
        self._enter("scatter")
        items = self._checked(items, values)
        self.queue(stream, lambda: host.scatter_items(self._layout, items))

    def _enter(self, name):
        self.between()
        if self.fail_at is not None and self.fail_at[0] == name:
            self.fail_at = (name, self.fail_at[1] - 1)
            if self.fail_at[1] < 0:
                self.fail_at, self.has_failed = None, True
                raise FailingCallError(name)

    def _checked(self, items, values):
        """Return a copy of the items, whose values have to lie in ``values``."""
        start = values.ctypes.data
        for item in items:
            size = self._layout.classes[item["class_id"]].value_bytes
            assert start <= item["value_ptr"] <= start + len(values) - size
        return items.copy()

    def _is_left_out(self):
        return sys._getframe(2).f_lineno == self._without
