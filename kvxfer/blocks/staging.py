# SPDX-License-Identifier: Apache-2.0
"""Page-aligned host buffers in which values wait between KV cache and store."""

from __future__ import annotations

import enum
import logging
import mmap
import threading
import time
from types import TracebackType

import numpy as np

logger = logging.getLogger(__name__)


class _State(enum.Enum):
    HELD = "held"
    QUARANTINED = "quarantined"
    RELEASED = "released"


class Slot:
    """One lease of a buffer: from `StagingPool.acquire` to `release`, by any thread.

    A lease is released once; the buffer's next lease is another `Slot`, so a late or repeated
    release never touches it.
    """

    def __init__(self, pool: StagingPool, index: int, buffer: memoryview, ptr: int) -> None:
        self.index = index
        self.buffer = buffer
        """Writable bytes, (slot_bytes,); keeps the memory mapped."""
        self.ptr = ptr
        """Address of the first byte, a multiple of the page size."""
        self._pool = pool
        self._state = _State.HELD  # guarded by _pool._changed

    def release(self) -> None:
        """Give the buffer back; nothing may touch it any more. Later calls do nothing."""
        self._pool._release(self)

    def __enter__(self) -> Slot:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Release, unless the slot was quarantined meanwhile: then whoever it waits for does."""
        self._pool._release(self, only_held=True)


class StagingPool:
    """A fixed number of equal buffers in one mapping, shared by the threads of a process.

    ====================  ===============================================  ================
    state of a buffer     event                                            next state
    ====================  ===============================================  ================
    free                  ``acquire``                                      held
    held                  ``slot.release``                                 free
    held                  ``quarantine``: its job ended while a native     quarantined
                          call may still read or write the buffer
    quarantined           ``slot.release`` by whoever gets that call's     free
                          late return
    ====================  ===============================================  ================

    Memory is private, anonymous, on huge pages where the system has them, and touched once at the
    start, so that no copy pays for page faults. After ``close`` no buffer is handed out; the
    mapping goes when the pool and the last slot have gone, never under a call that still runs.
    """

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        if num_slots < 1 or slot_bytes < 1:
            raise ValueError(
                f"num_slots is {num_slots}, slot_bytes is {slot_bytes}; both must be at least 1"
            )
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self._step = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory = _map_memory(num_slots * self._step)
        self.buffer = memoryview(self._memory)
        """The whole mapping, for ``store.register``; slots lie in it a multiple of a page apart."""
        self.ptr: int = np.frombuffer(self.buffer, dtype=np.uint8).ctypes.data
        self._changed = threading.Condition()
        self._free = list(reversed(range(num_slots)))  # guarded by _changed
        self._num_quarantined = 0  # guarded by _changed
        self._closed = False  # guarded by _changed

    def acquire(self, timeout_s: float) -> Slot | None:
        """Return a free buffer, waiting at most ``timeout_s`` for one.

        None when none came free in time, and at once after ``close``; ``closed`` tells which. A
        wait is ended by ``close``.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not self._free and not self._closed:
                left_s = deadline - time.monotonic()
                if left_s <= 0 or not self._changed.wait(left_s):
                    break
            if self._closed or not self._free:
                return None
            index = self._free.pop()
        start = index * self._step
        return Slot(self, index, self.buffer[start : start + self.slot_bytes], self.ptr + start)

    def quarantine(self, slot: Slot) -> bool:
        """Set a held buffer apart until ``slot.release``, because a native call may still use it.

        False if the lease was released already: the late return came first, and all is well.
        """
        with self._changed:
            if slot._state is _State.RELEASED:
                return False
            if slot._state is _State.HELD:
                slot._state = _State.QUARANTINED
                self._num_quarantined += 1
                logger.warning(
                    "staging slot %d quarantined, %d of %d now: a native call has not returned",
                    slot.index,
                    self._num_quarantined,
                    self.num_slots,
                )
            return True

    def close(self) -> None:
        """Hand out no more buffers and wake all waiters; buffers in use stay valid. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        with self._changed:
            return self._closed

    @property
    def num_free(self) -> int:
        """Buffers that ``acquire`` could hand out now, were the pool open."""
        with self._changed:
            return len(self._free)

    @property
    def num_quarantined(self) -> int:
        """Buffers that wait for the return of a native call."""
        with self._changed:
            return self._num_quarantined

    def _release(self, slot: Slot, *, only_held: bool = False) -> None:
        with self._changed:
            if slot._state is _State.RELEASED:
                return
            if slot._state is _State.QUARANTINED:
                if only_held:
                    return
                self._num_quarantined -= 1
            slot._state = _State.RELEASED
            self._free.append(slot.index)
            self._changed.notify()


def _map_memory(num_bytes: int) -> mmap.mmap:
    """Return private zeroed memory, resident, on huge pages where the system grants them."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:
            logger.debug("no huge pages for staging: %s", error)
    np.frombuffer(memory, dtype=np.uint8)[:: mmap.PAGESIZE] = 0
    return memory
