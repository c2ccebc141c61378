# SPDX-License-Identifier: Apache-2.0
"""Page-aligned buffers in which values wait between KV cache and store."""

from __future__ import annotations

import enum
import logging
import mmap
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)


class _State(enum.Enum):
    HELD = "held"
    QUARANTINED = "quarantined"
    RELEASED = "released"


@dataclass(frozen=True, slots=True)
class StagingMemory:
    """Memory that a pool cuts into slots, kept alive by ``buffer``."""

    buffer: memoryview
    """Writable bytes. Of a GPU's memory it only says where that lies: the CPU cannot reach it."""
    ptr: int
    """Address of the first byte, a multiple of the page size."""
    tensor: Any = None
    """A GPU's memory as a torch tensor (uint8, as long as ``buffer``); None for the host's."""


class Slot:
    """One lease of a buffer: from `StagingPool.acquire` to `release`, by any thread.

    A lease is released once; the buffer's next lease is another `Slot`, so a late or repeated
    release never touches it.
    """

    def __init__(self, pool: StagingPool, index: int, buffer: memoryview, ptr: int) -> None:
        self.index = index
        self.buffer = buffer
        """Writable bytes, (slot_bytes,), see `StagingMemory`; keeps the memory mapped."""
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
    """A fixed number of equal buffers in one piece of memory, shared by the threads of a process.

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

    Memory of the pool's own is the host's: private, anonymous, on huge pages where the system has
    them, and touched once at the start, so that no copy pays for page faults. After ``close`` no
    buffer is handed out; memory goes when the pool and the last slot have gone, never under a call
    that still runs.
    """

    def __init__(
        self, num_slots: int, slot_bytes: int, memory: StagingMemory | None = None
    ) -> None:
        """``memory``: `bytes_needed` or more to cut the slots from, instead of the pool's own."""
        if num_slots < 1 or slot_bytes < 1:
            raise ValueError(
                f"num_slots is {num_slots}, slot_bytes is {slot_bytes}; both must be at least 1"
            )
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self._step = self.bytes_needed(1, slot_bytes)
        self.memory = memory or _map_memory(self.bytes_needed(num_slots, slot_bytes))
        self.buffer = self.memory.buffer
        """All of it, for ``store.register``; slots lie in it a multiple of a page apart."""
        self.ptr = self.memory.ptr
        self._changed = threading.Condition()
        self._free = list(reversed(range(num_slots)))  # guarded by _changed
        self._num_quarantined = 0  # guarded by _changed
        self._closed = False  # guarded by _changed

    @staticmethod
    def bytes_needed(num_slots: int, slot_bytes: int) -> int:
        """Return the bytes that so many slots take, each a whole number of pages."""
        return num_slots * -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE

    @property
    def on_device(self) -> bool:
        """Whether the slots are a GPU's memory, which the CPU cannot reach."""
        return self.memory.tensor is not None

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


def _map_memory(num_bytes: int) -> StagingMemory:
    """Return private zeroed memory, resident, on huge pages where the system grants them."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:
            logger.debug("no huge pages for staging: %s", error)
    content = np.frombuffer(memory, dtype=np.uint8)
    content[:: mmap.PAGESIZE] = 0
    return StagingMemory(memoryview(memory), content.ctypes.data)
