# SPDX-License-Identifier: Apache-2.0
"""Which way a job takes between blocks and pinned memory: measured at start-up, on its own cache.

*From how many bytes on a job passes through device memory.* A kernel that writes to pinned memory
itself saves a small job one step; the copy engine has the better rate and leaves the
multiprocessors to the engine, so going straight has to be faster by `MARGIN` to be chosen.

*From which fragments on the copy engine moves them by itself.* Each is one copy, which costs time
however small it is, most of all on the way in. Measured on the fragments that the layout has, there
and back; a tie goes to the copy engine, which needs neither device memory nor multiprocessors.

Where either pair meets depends on the machine.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import numpy as np

from kvxfer.blocks import plan
from kvxfer.blocks.cuda_dma import CopyEngineError
from kvxfer.blocks.cuda_fragments import Fragments
from kvxfer.blocks.cuda_mover import NEVER_BYTES, USUAL_DMA_BYTES, CudaMover
from kvxfer.blocks.layout import BlockLayout
from kvxfer.blocks.staging import Slot, StagingPool

logger = logging.getLogger(__name__)

SMALLEST_BYTES, LARGEST_BYTES, STEP = 64 << 10, 16 << 20, 4
NUM_RUNS = 3
MARGIN = 1.2
UNMEASURED_BYTES = 1 << 20
"""The answer for a cache too small to measure on."""
SMALLEST_FRAGMENT_BYTES = 16 << 10
"""Not even tried below: copies to the GPU are said to be ten times slower there than large ones."""
VALUE_ALIGN = 64

Job = tuple[plan.Table, int]
"""Items with addresses from 0, and the bytes that their values take."""
Clock = Callable[[], float]


def calibrate(
    mover: CudaMover,
    layout: BlockLayout,
    staging: StagingPool,
    clock: Clock = time.perf_counter,
) -> None:
    """Set ``mover.staged_from_bytes`` and ``mover.dma_from_bytes`` by copying blocks each way.

    Called once, before any other use of the mover, and with nobody else at the blocks: those that
    are written get the bytes that they hold. Takes some milliseconds.
    """
    slot = staging.acquire(0)
    assert slot is not None, "calibration comes before the first job"
    with slot:
        mover.dma_from_bytes = NEVER_BYTES
        mover.staged_from_bytes = _measure_staging(mover, layout, slot, clock)
        mover.dma_from_bytes = _measure_fragments(mover, layout, slot, clock)


def choose(
    sizes: Sequence[int],
    times: Sequence[tuple[float, float]],
    *,
    margin: float = MARGIN,
    unmeasured: int = UNMEASURED_BYTES,
) -> int:
    """Return the smallest size from which on the first way is not faster by ``margin``.

    ``times``: seconds by the first way and by the second, per size, ascending. Beyond the largest
    size everything takes the second; ``unmeasured`` if there are no sizes.
    """
    if not sizes:
        return unmeasured
    chosen = sizes[-1] + 1
    for size, (first, second) in reversed(list(zip(sizes, times, strict=True))):
        if second > margin * first:
            break
        chosen = size
    return chosen


def _measure_staging(mover: CudaMover, layout: BlockLayout, slot: Slot, clock: Clock) -> int:
    """Return from how many bytes on jobs had better pass through device memory."""
    jobs = _jobs(layout, slot)
    times = []
    for job in jobs:
        mover.staged_from_bytes = NEVER_BYTES
        straight = _time(mover, job, slot, clock, there_and_back=False)
        mover.staged_from_bytes = 0
        through = _time(mover, job, slot, clock, there_and_back=False)
        times.append((straight, through))
    sizes = [num_bytes for _, num_bytes in jobs]
    chosen = choose(sizes, times)
    logger.info(
        "copies of %s pass through device memory from %s bytes on; measured (bytes, straight, "
        "through): %s",
        layout.device,
        chosen,
        _told(sizes, times),
    )
    return chosen


def _measure_fragments(mover: CudaMover, layout: BlockLayout, slot: Slot, clock: Clock) -> int:
    """Return from which fragments on the copy engine had better move them by itself."""
    jobs = _fragment_jobs(layout, slot)
    times = []
    try:
        for job in jobs.values():
            mover.dma_from_bytes = NEVER_BYTES
            by_kernel = _time(mover, job, slot, clock, there_and_back=True)
            mover.dma_from_bytes = 1
            times.append((by_kernel, _time(mover, job, slot, clock, there_and_back=True)))
    except CopyEngineError:  # the mover has logged it
        return NEVER_BYTES
    chosen = choose(list(jobs), times, margin=1.0, unmeasured=USUAL_DMA_BYTES)
    logger.info(
        "fragments of %s are moved by the copy engine from %s bytes on; measured (bytes, by a "
        "kernel, by the copy engine): %s",
        layout.device,
        chosen,
        _told(list(jobs), times),
    )
    return chosen


def _told(sizes: Sequence[int], times: Sequence[tuple[float, float]]) -> list[tuple[int, str, str]]:
    """Return sizes and their two times as a log shows them."""
    return [
        (size, f"{1e6 * first:.0f} us", f"{1e6 * second:.0f} us")
        for size, (first, second) in zip(sizes, times, strict=True)
    ]


def _jobs(layout: BlockLayout, slot: Slot) -> list[Job]:
    """Return jobs of one class, in ascending size."""
    step = _value_step(layout, 0)
    slot_bytes = len(slot.buffer)
    jobs: list[Job] = []
    size = SMALLEST_BYTES
    while size <= min(LARGEST_BYTES, slot_bytes):
        num_values = max(1, size // step)
        if num_values > layout.num_blocks or num_values * step > slot_bytes:
            break
        if not jobs or num_values > len(jobs[-1][0]):
            jobs.append(_job(layout, 0, num_values))
        size *= STEP
    return jobs


def _fragment_jobs(layout: BlockLayout, slot: Slot) -> dict[int, Job]:
    """Return a job for each size of fragments that the layout has, ascending, no larger than all.

    Blocks descend while values ascend, so that no two fragments make one copy: the worst case.
    """
    found: dict[int, Job] = {}
    for class_id, fragment_bytes in enumerate(Fragments(layout).smallest_bytes.tolist()):
        step = _value_step(layout, class_id)
        fitting = min(layout.num_blocks, len(slot.buffer) // step)
        if fragment_bytes < SMALLEST_FRAGMENT_BYTES or fragment_bytes in found or fitting == 0:
            continue
        items, num_bytes = _job(layout, class_id, min(fitting, max(1, LARGEST_BYTES // step)))
        items["block_id"] = items["block_id"][::-1].copy()
        found[fragment_bytes] = items, num_bytes
    return dict(sorted(found.items()))


def _value_step(layout: BlockLayout, class_id: int) -> int:
    """Return the bytes from one value to the next in a slot."""
    return -(-layout.classes[class_id].value_bytes // VALUE_ALIGN) * VALUE_ALIGN


def _job(layout: BlockLayout, class_id: int, num_values: int) -> Job:
    """Return a job of the first blocks of a class."""
    step = _value_step(layout, class_id)
    items = np.zeros(num_values, dtype=plan.ITEM_DTYPE)
    items["value_ptr"] = np.arange(num_values, dtype=np.uint64) * np.uint64(step)
    items["block_id"] = np.arange(num_values, dtype=np.int32)
    items["class_id"] = class_id
    return items, num_values * step


def _time(mover: CudaMover, job: Job, slot: Slot, clock: Clock, *, there_and_back: bool) -> float:
    """Return seconds from blocks to pinned memory, ``there_and_back``: and back; the best of some.

    Blocks get the very bytes that were read from them.
    """
    items, num_bytes = job[0].copy(), job[1]
    items["value_ptr"] += np.uint64(slot.ptr)
    seconds = []
    for _ in range(NUM_RUNS + 1):  # the first pays for what is loaded lazily
        begin = clock()
        mover.pack(items, slot, num_bytes, mover.mark()).wait()
        if there_and_back:
            mover.unpack(items, slot, num_bytes, mover.mark())
        seconds.append(clock() - begin)
    return min(seconds[1:])
