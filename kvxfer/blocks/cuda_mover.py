# SPDX-License-Identifier: Apache-2.0
"""Between blocks on a GPU and pinned staging slots, in order with the engine's forward passes.

    pack     [mark] -> gather -> event -> DMA -> event        blocks free at the first event,
                                                              the store may read at the second
    unpack   DMA -> [mark] -> scatter -> event                the store has written before;
                                                              the blocks are whole at the event

Each call has a lane to itself: a stream and a piece of device memory. Two kinds of jobs need no
such memory, and take one step where the others take two:

    small jobs (below ``staged_from_bytes``)       the kernel writes to the pinned slot, or reads it
    large fragments (from ``dma_from_bytes`` on)   the copy engine moves them, and no kernel runs
"""

from __future__ import annotations

import logging
import queue
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvxfer.blocks import plan
from kvxfer.blocks.cuda import QuotaName
from kvxfer.blocks.cuda_dma import CopyEngineError
from kvxfer.blocks.cuda_fragments import Copies
from kvxfer.blocks.cuda_queues import Queues
from kvxfer.blocks.staging import Slot, StagingPool

logger = logging.getLogger(__name__)

NEVER_BYTES = 1 << 62
"""More than a slot has: no job is staged, or no fragment is left to the copy engine."""
USUAL_DMA_BYTES = 128 << 10
"""Where nothing was measured: published rates of batched copies are full from 64 KiB on."""


@dataclass(frozen=True, slots=True, eq=False)
class _Lane:
    """A stream, its two events, and device memory that only what is queued there touches."""

    stream: Any
    read: Any
    """Passed once the source of the current call has been read."""
    done: Any
    memory: Any = None
    ptr: int = 0
    num_bytes: int = 0


class CudaMover:
    """The `movers.Mover` of a GPU.

    Owns its lanes: ``num_pack_lanes`` and ``num_unpack_lanes`` calls of either kind at a time, no
    more. It waits only in the calling thread, never in the engine's streams: those see nothing of
    it but an event a step. An error of CUDA leaves a call as torch raises it, after what the call
    had queued has ended.
    """

    def __init__(
        self,
        queues: Queues,
        staging: StagingPool,
        *,
        num_pack_lanes: int,
        num_unpack_lanes: int,
        device_bytes: int,
        staged_from_bytes: int = 1 << 20,
        dma_from_bytes: int = USUAL_DMA_BYTES,
    ) -> None:
        """``device_bytes``: of the GPU's memory, for all lanes together, at most.

        ``staged_from_bytes`` is of a job, ``dma_from_bytes``, at least 1, of each of its fragments;
        both may be set between calls.
        """
        self._queues, self._staging = queues, staging
        self.staged_from_bytes = staged_from_bytes
        self.dma_from_bytes = dma_from_bytes
        lane_bytes = device_bytes // (num_pack_lanes + num_unpack_lanes)
        lane_bytes = min(lane_bytes, staging.slot_bytes)
        if lane_bytes < staging.slot_bytes:
            logger.warning(
                "device_staging_bytes leaves %d bytes a thread; larger batches, up to %d, go "
                "straight to pinned memory, which is slower",
                lane_bytes,
                staging.slot_bytes,
            )
        self._pack_lanes = self._make_lanes(num_pack_lanes, lane_bytes, urgent=False)
        self._unpack_lanes = self._make_lanes(num_unpack_lanes, lane_bytes, urgent=True)
        self._pinned: Any = queues.pin(staging)
        self._is_pinned = True

    def attach_thread(self) -> None:
        """Let the calling thread work on the GPU of the blocks."""
        self._queues.use_device()

    def mark(self) -> Any:
        """Return an event behind what the engine has queued."""
        return self._queues.mark()

    def pack(self, items: plan.Table, slot: Slot, num_bytes: int, after: Any) -> _CudaPacked:
        """Gather, and send the values on to the slot; see `movers.Mover`."""
        lane = self._pack_lanes.get_nowait()
        try:
            self._queue_pack(items, slot, num_bytes, after, lane)
            self._queues.synchronize(lane.read)
        except BaseException as error:
            self._give_up(lane, self._pack_lanes, error)
            raise
        return _CudaPacked(self._queues, lane, self._pack_lanes)

    def unpack(self, items: plan.Table, slot: Slot, num_bytes: int, after: Any) -> None:
        """Fetch the values from the slot, and scatter them; see `movers.Mover`."""
        lane = self._unpack_lanes.get_nowait()
        try:
            self._queue_unpack(items, slot, num_bytes, after, lane)
            self._queues.synchronize(lane.done)
        except BaseException as error:
            self._give_up(lane, self._unpack_lanes, error)
            raise
        self._unpack_lanes.put(lane)

    def close(self) -> None:
        """Unpin the staging memory; idempotent."""
        if self._is_pinned:
            self._is_pinned = False
            self._queues.unpin(self._staging)

    def _queue_pack(
        self, items: plan.Table, slot: Slot, num_bytes: int, after: Any, lane: _Lane
    ) -> None:
        queues = self._queues
        if after is not None:
            queues.wait(lane.stream, after)
        if self._is_dma(items):
            queues.copy_batch(self._copies(items, slot, num_bytes, to_value=True), lane.stream)
            queues.record(lane.read, lane.stream)
        elif self._is_staged(lane, num_bytes):
            items = _moved(items, slot.ptr, lane.ptr)
            queues.gather(items, lane.memory, lane.stream, "background")
            queues.record(lane.read, lane.stream)
            queues.copy(self._part(slot, num_bytes), lane.memory[:num_bytes], lane.stream)
        else:
            queues.gather(items, self._pinned, lane.stream, "background")
            queues.record(lane.read, lane.stream)
        queues.record(lane.done, lane.stream)

    def _queue_unpack(
        self, items: plan.Table, slot: Slot, num_bytes: int, after: Any, lane: _Lane
    ) -> None:
        queues = self._queues
        values: Any = self._pinned
        quota: QuotaName = "background"  # fills the bus
        by_engine = self._is_dma(items)
        if not by_engine and self._is_staged(lane, num_bytes):
            values, quota = lane.memory, "full"
            items = _moved(items, slot.ptr, lane.ptr)
            queues.copy(lane.memory[:num_bytes], self._part(slot, num_bytes), lane.stream)
        if after is not None:
            queues.wait(lane.stream, after)
        if by_engine:
            queues.copy_batch(self._copies(items, slot, num_bytes, to_value=False), lane.stream)
        else:
            queues.scatter(items, values, lane.stream, quota)
        queues.record(lane.done, lane.stream)

    def _give_up(self, lane: _Lane, lanes: queue.SimpleQueue[_Lane], error: BaseException) -> None:
        """Let what was queued end, so that nothing touches blocks or slot after an error.

        Where the copy engine was refused a batch it is given none any more: one job is lost.
        """
        try:
            self._queues.drain(lane.stream)
        except Exception:
            logger.exception("a stream of the GPU does not end")
        lanes.put(lane)
        if isinstance(error, CopyEngineError):
            logger.warning("batched copies do not work here, kernels copy everything: %s", error)
            self.dma_from_bytes = NEVER_BYTES

    def _is_staged(self, lane: _Lane, num_bytes: int) -> bool:
        """Whether a job passes through the lane's memory."""
        return self.staged_from_bytes <= num_bytes <= lane.num_bytes

    def _is_dma(self, items: plan.Table) -> bool:
        """Whether the copy engine moves a job's fragments: all of them are large enough."""
        return self._queues.fragments.smallest_of(items) >= self.dma_from_bytes

    def _copies(self, items: plan.Table, slot: Slot, num_bytes: int, *, to_value: bool) -> Copies:
        """Return the copies between blocks and the slot's bytes in use."""
        memory = slot.ptr, slot.ptr + num_bytes
        return self._queues.fragments.copies(items, memory, to_value=to_value)

    def _part(self, slot: Slot, num_bytes: int) -> Any:
        """Return the slot's bytes in use."""
        start = slot.ptr - self._staging.ptr
        return self._pinned[start : start + num_bytes]

    def _make_lanes(
        self, num_lanes: int, lane_bytes: int, *, urgent: bool
    ) -> queue.SimpleQueue[_Lane]:
        lanes: queue.SimpleQueue[_Lane] = queue.SimpleQueue()
        for _ in range(num_lanes):
            stream = self._queues.new_stream(urgent=urgent)
            events = self._queues.new_event(stream), self._queues.new_event(stream)
            found = self._queues.empty(lane_bytes, stream)
            if found is None:
                logger.warning(
                    "no %d bytes of GPU memory are left for staging; copies go straight to pinned "
                    "memory, which is slower. Lower gpu_memory_utilization a little.",
                    lane_bytes,
                )
                lanes.put(_Lane(stream, *events))
            else:
                lanes.put(_Lane(stream, *events, *found, lane_bytes))
        return lanes


class _CudaPacked:
    """A pack whose blocks are read; it holds its lane until the values lie in the slot."""

    def __init__(self, queues: Queues, lane: _Lane, lanes: queue.SimpleQueue[_Lane]) -> None:
        self._queues, self._lane, self._lanes = queues, lane, lanes

    def wait(self) -> None:
        """Return once the values lie in the slot; see `movers.Packed`."""
        try:
            self._queues.synchronize(self._lane.done)
        finally:
            self._lanes.put(self._lane)


def _moved(items: plan.Table, source_ptr: int, target_ptr: int) -> plan.Table:
    """Return the items with their values at the same place of other memory."""
    moved = items.copy()
    moved["value_ptr"] += np.uint64((target_ptr - source_ptr) % 2**64)
    return moved
