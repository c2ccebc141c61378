# SPDX-License-Identifier: Apache-2.0
"""From how many bytes on a job passes through device memory: measured at start-up.

A kernel that writes to pinned memory itself saves a small job one step; the copy engine has the
better rate and leaves the multiprocessors to the engine, so going straight has to be faster by
`MARGIN` to be chosen. Where they meet depends on the machine.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import numpy as np

from kvxfer.blocks import plan
from kvxfer.blocks.cuda_mover import NEVER_BYTES, CudaMover
from kvxfer.blocks.layout import BlockLayout
from kvxfer.blocks.staging import Slot, StagingPool

logger = logging.getLogger(__name__)

SMALLEST_BYTES, LARGEST_BYTES, STEP = 64 << 10, 16 << 20, 4
NUM_RUNS = 3
MARGIN = 1.2
UNMEASURED_BYTES = 1 << 20
"""The answer for a cache too small to measure on."""
VALUE_ALIGN = 64


def calibrate(
    mover: CudaMover,
    layout: BlockLayout,
    staging: StagingPool,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Set ``mover.staged_from_bytes`` by packing blocks both ways; reads blocks, writes none.

    Called once, before any other use of the mover. Takes some milliseconds.
    """
    jobs = _jobs(layout, staging.slot_bytes)
    slot = staging.acquire(0)
    assert slot is not None, "calibration comes before the first job"
    with slot:
        times = [_time_both(mover, items, num_bytes, slot, clock) for items, num_bytes in jobs]
    mover.staged_from_bytes = choose([num_bytes for _, num_bytes in jobs], times)
    logger.info(
        "copies of %s pass through device memory from %s bytes on; measured (bytes, straight, "
        "through): %s",
        layout.device,
        mover.staged_from_bytes,
        [
            (num_bytes, f"{1e6 * straight:.0f} us", f"{1e6 * through:.0f} us")
            for (_, num_bytes), (straight, through) in zip(jobs, times, strict=True)
        ],
    )


def choose(sizes: Sequence[int], times: Sequence[tuple[float, float]]) -> int:
    """Return the smallest size from which on going straight is not faster by `MARGIN`.

    ``times``: seconds straight and through device memory, per size, ascending. Beyond the largest
    size every job goes through device memory.
    """
    if not sizes:
        return UNMEASURED_BYTES
    chosen = sizes[-1] + 1
    for size, (straight, through) in reversed(list(zip(sizes, times, strict=True))):
        if through > MARGIN * straight:
            break
        chosen = size
    return chosen


def _jobs(layout: BlockLayout, slot_bytes: int) -> list[tuple[plan.Table, int]]:
    """Return jobs of one class, in ascending size: items with addresses from 0, and bytes."""
    value_bytes = layout.classes[0].value_bytes
    step = -(-value_bytes // VALUE_ALIGN) * VALUE_ALIGN
    jobs: list[tuple[plan.Table, int]] = []
    size = SMALLEST_BYTES
    while size <= min(LARGEST_BYTES, slot_bytes):
        num_values = max(1, size // step)
        if num_values > layout.num_blocks or num_values * step > slot_bytes:
            break
        if not jobs or num_values > len(jobs[-1][0]):
            items = np.zeros(num_values, dtype=plan.ITEM_DTYPE)
            items["value_ptr"] = np.arange(num_values, dtype=np.uint64) * np.uint64(step)
            items["block_id"] = np.arange(num_values, dtype=np.int32)
            jobs.append((items, num_values * step))
        size *= STEP
    return jobs


def _time_both(
    mover: CudaMover, items: plan.Table, num_bytes: int, slot: Slot, clock: Callable[[], float]
) -> tuple[float, float]:
    """Return seconds straight to pinned memory, and through device memory; the best of some."""
    placed = items.copy()
    placed["value_ptr"] += np.uint64(slot.ptr)
    best = []
    for staged_from_bytes in (NEVER_BYTES, 0):
        mover.staged_from_bytes = staged_from_bytes
        seconds = []
        for _ in range(NUM_RUNS + 1):  # the first pays for what is loaded lazily
            begin = clock()
            mover.pack(placed, slot, num_bytes, mover.mark()).wait()
            seconds.append(clock() - begin)
        best.append(min(seconds[1:]))
    return best[0], best[1]
