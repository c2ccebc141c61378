# SPDX-License-Identifier: Apache-2.0
"""Print throughput and failures of packed values and of scatter lists, on real Mooncake pools.

    python benchmarks/ratios_mooncake.py

The rival makes the in-tree connector's calls (one list of addresses per value, a segment per
layer). First the load that overflows the transport's queue: 64 values of 80 layers of 16 KiB, 20
times. Then a table of layers and segment sizes; each call moves at most 1,024 segments, so that
both sides work. kvxfer's time is shown as the transport's alone, and with the copy into staging or
out of it by one thread; several transfers overlap those in part. A ratio is of two times taken
right after each other; shown are the median and [lowest, highest] of interleaved pairs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from config import IS_SMOKE, KIB
from mooncake_sides import IMPLS, Blocks, Packed, Scatter, new_names, open_side

from kvxfer.errors import StoreError
from kvxfer.stores.mooncake_native import import_client

NUM_LOADS = 2 if IS_SMOKE else 20
LARGE = (8, 4, 4 * KIB) if IS_SMOKE else (80, 64, 16 * KIB)
"""Layers, values, bytes of a segment."""
LAYERS = (1, 4) if IS_SMOKE else (1, 16, 32, 61, 80)
SEGMENT_BYTES = (4 * KIB,) if IS_SMOKE else (4 * KIB, 16 * KIB, 64 * KIB)
MOST_SEGMENTS = 1024
NUM_PAIRS = 2 if IS_SMOKE else 11


def main() -> None:
    try:
        import_client()
    except StoreError as error:
        print(f"left out: {error}")
        return
    print(f"{LARGE[1]} values of {LARGE[0]} x {LARGE[2] // KIB} KiB in one call, {NUM_LOADS} times")
    for impl in IMPLS:
        print_large(impl)
    print(f"\nbytes per second of kvxfer / of scatter lists, {NUM_PAIRS} pairs; last: our GB/s")
    heads = "".join(f"{head:>21}" for head in ("put", "put, packing", "get", "get, unpacking"))
    print(f"{'layers':>6}{'KiB':>5}{'values':>7}{heads}  put, get")
    for segment_bytes in SEGMENT_BYTES:
        for num_layers in LAYERS:
            print_row(num_layers, segment_bytes)


def print_large(impl: str) -> None:
    """Print how many values of each put and load failed, and how long the whole ones took."""
    blocks = Blocks(*LARGE)
    with open_side(impl, blocks) as side:
        blocks.fill()
        side.pack()
        names = new_names(blocks.shape[1])
        failed_puts, put_s = timed(side.put, names)
        failed_gets, get_s = [], []
        for _ in range(NUM_LOADS):
            blocks.cache[:] = 0
            failed, seconds = timed(side.get, names)
            side.unpack()
            failed_gets.append(failed)
            if not failed:
                assert blocks.is_whole()
                get_s.append(seconds)
        one_more = side.put(new_names(blocks.shape[1]))
    rate = f"{gbps(blocks, statistics.median(get_s))} GB/s" if get_s else "none whole"
    print(
        f"  {impl:>8}: put {failed_puts} failed in {put_s:.2f} s; loads with failures "
        f"{sum(map(bool, failed_gets))} of {NUM_LOADS} (values failed: {min(failed_gets)} to "
        f"{max(failed_gets)}), {rate}; one more put: {one_more} failed",
        flush=True,
    )


def print_row(num_layers: int, segment_bytes: int) -> None:
    num_values = max(1, min(256, MOST_SEGMENTS // num_layers))
    blocks = Blocks(num_layers, num_values, segment_bytes)
    with open_side("kvxfer", blocks) as packed, open_side("scatter", blocks) as scatter:
        blocks.fill()
        names = new_names(blocks.shape[1])
        for side in (packed, scatter):
            put(side, names)
        puts, gets = [], []
        for _ in range(NUM_PAIRS):
            fresh = new_names(blocks.shape[1])
            puts.append([put(side, fresh) for side in (packed, scatter)])
            gets.append([get(side, names) for side in (packed, scatter)])
            for side in (packed, scatter):
                side.remove(fresh)
    cells = "".join(f"{cell:>21}" for pairs in (puts, gets) for cell in compared(pairs))
    rates = [gbps(blocks, statistics.median(ours for (ours, _), _ in p)) for p in (puts, gets)]
    print(
        f"{num_layers:>6}{segment_bytes // KIB:>5}{num_values:>7}{cells}  {', '.join(rates)}",
        flush=True,
    )


def put(side: Packed | Scatter, names: list[str]) -> tuple[float, float]:
    """Return the seconds of a put, and with the packing before it."""
    _, copy_s = timed(side.pack)
    failed, seconds = timed(side.put, names)
    assert failed == 0
    return seconds, seconds + copy_s


def get(side: Packed | Scatter, names: list[str]) -> tuple[float, float]:
    """Return the seconds of a get, and with the unpacking after it; checks every byte."""
    side.blocks.cache[:] = 0
    failed, seconds = timed(side.get, names)
    _, copy_s = timed(side.unpack)
    assert failed == 0
    assert side.blocks.is_whole()
    return seconds, seconds + copy_s


def timed(call: Callable[..., Any], *arguments: object) -> tuple[Any, float]:
    start = time.perf_counter()
    answer = call(*arguments)
    return answer, time.perf_counter() - start


def compared(pairs: list[list[tuple[float, float]]]) -> list[str]:
    """Return the ratios of the transport's times and of those with our copies."""
    cells = []
    for with_copies in (0, 1):
        ratios = [theirs[0] / ours[with_copies] for ours, theirs in pairs]
        low, high = min(ratios), max(ratios)
        cells.append(f"{statistics.median(ratios):.2f} [{low:.2f}, {high:.2f}]")
    return cells


def gbps(blocks: Blocks, seconds: float) -> str:
    return f"{blocks.total_bytes / seconds / 1e9:.2f}"


if __name__ == "__main__":
    main()
