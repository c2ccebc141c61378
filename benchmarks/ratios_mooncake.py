# SPDX-License-Identifier: Apache-2.0
"""Print throughput and failures of packed values and of scatter lists, on real Mooncake pools.

    python benchmarks/ratios_mooncake.py

The rival makes the in-tree connector's calls (one list of addresses per value, a segment per
layer). First the load that overflows the transport's queue: 64 values of 80 layers of 16 KiB, 20
times. Then a table of layers and segment sizes; each call moves at most 1,024 segments, so that
both sides work. Packed values' time is shown as the transport's alone, and with the copy into
staging or out of it by one thread; several transfers overlap those in part. Values of one layer,
which are one run of the cache, are also moved where they lie.

In the table all sides share a native client, so that nothing but their calls differs, and take
turns in an order that turns round. A ratio is of two times of one turn; shown are the median, and
where 95 % of such medians would be. A row takes turns until that is within 2.5 % of the median for
every ratio, or its time is up.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from config import IS_SMOKE, KIB
from mooncake_sides import IMPLS, Blocks, Packed, Scatter, open_side, open_sides

from kvxfer.errors import StoreError
from kvxfer.stores.mooncake_native import import_client

NUM_LOADS = 2 if IS_SMOKE else 20
LARGE = (8, 4, 4 * KIB) if IS_SMOKE else (80, 64, 16 * KIB)
"""Layers, values, bytes of a segment."""
LAYERS = (1, 4) if IS_SMOKE else (1, 16, 32, 61, 80)
SEGMENT_BYTES = (4 * KIB,) if IS_SMOKE else (4 * KIB, 16 * KIB, 64 * KIB)
MOST_SEGMENTS = 1024
FEWEST_TURNS, MOST_TURNS = (6, 6) if IS_SMOKE else (40, 2000)
ROW_S = 25.0
"""Time of a row, of which copies and checks between the measured calls take a part."""
NARROW = 0.025


def main() -> None:
    try:
        import_client()
    except StoreError as error:
        print(f"left out: {error}")
        return
    print(f"{LARGE[1]} values of {LARGE[0]} x {LARGE[2] // KIB} KiB in one call, {NUM_LOADS} times")
    for impl in IMPLS:
        print_large(impl)
    print("\nbytes per second, over those of scatter lists; last: GB/s of put and get")
    heads = "".join(f"{head:>22}" for head in ("put", "put, packing", "get", "get, unpacking"))
    print(f"{'layers':>6}{'KiB':>5}{'values':>7}{'side':>8}{'turns':>6}{heads}  put, get")
    for segment_bytes in SEGMENT_BYTES:
        for num_layers in LAYERS:
            print_rows(num_layers, segment_bytes)


def print_large(impl: str) -> None:
    """Print how many values of each put and load failed, and how long the whole ones took."""
    blocks = Blocks(*LARGE)
    with open_side(impl, blocks) as side:
        blocks.fill()
        side.pack()
        names = side.new_names()
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
        one_more = side.put(side.new_names())
    rate = f"{gbps(blocks, statistics.median(get_s))} GB/s" if get_s else "none whole"
    print(
        f"  {impl:>8}: put {failed_puts} failed in {put_s:.2f} s; loads with failures "
        f"{sum(map(bool, failed_gets))} of {NUM_LOADS} (values failed: {min(failed_gets)} to "
        f"{max(failed_gets)}), {rate}; one more put: {one_more} failed",
        flush=True,
    )


def print_rows(num_layers: int, segment_bytes: int) -> None:
    """Measure all sides in turns and print a row for each of ours."""
    blocks = Blocks(num_layers, max(1, min(256, MOST_SEGMENTS // num_layers)), segment_bytes)
    with open_sides(blocks) as sides:
        turns = Turns(sides, blocks)
        deadline = time.monotonic() + ROW_S
        while len(turns) < FEWEST_TURNS or not (
            turns.are_narrow() or len(turns) >= MOST_TURNS or time.monotonic() > deadline
        ):
            turns.take()
    for name in turns.ours:
        cells = "".join(f"{shown(turns.ratios(name, column)):>22}" for column in range(4))
        rates = [gbps(blocks, statistics.median(turns.times(name, column))) for column in (0, 2)]
        print(
            f"{num_layers:>6}{segment_bytes // KIB:>5}{blocks.shape[1]:>7}{name:>8}"
            f"{len(turns):>6}{cells}  {', '.join(rates)}",
            flush=True,
        )


class Turns:
    """Times of all sides, turn by turn: of a put, with packing, of a get, with unpacking."""

    def __init__(self, sides: dict[str, Packed | Scatter], blocks: Blocks) -> None:
        self._sides = sides
        self._times: dict[str, list[tuple[float, ...]]] = {name: [] for name in sides}
        self.ours = [name for name in sides if name != "scatter"]
        blocks.fill()
        self._names = {name: side.new_names() for name, side in sides.items()}
        for name, side in sides.items():
            put(side, self._names[name])

    def __len__(self) -> int:
        return len(self._times["scatter"])

    def take(self) -> None:
        """Measure each side once."""
        order = list(self._sides) if len(self) % 2 else list(reversed(self._sides))
        fresh = {name: self._sides[name].new_names() for name in order}
        puts = {name: put(self._sides[name], fresh[name]) for name in order}
        gets = {name: get(self._sides[name], self._names[name]) for name in order}
        for name in order:
            self._times[name].append(puts[name] + gets[name])
            self._sides[name].remove(fresh[name])

    def times(self, name: str, column: int) -> list[float]:
        return [times[column] for times in self._times[name]]

    def ratios(self, name: str, column: int) -> list[float]:
        """Return the sorted ratios of the transport's time of scatter lists to one of ours."""
        theirs = self.times("scatter", column - column % 2)
        both = zip(theirs, self.times(name, column), strict=True)
        return sorted(their_s / our_s for their_s, our_s in both)

    def are_narrow(self) -> bool:
        """Whether all medians are known well enough."""
        ratios = [self.ratios(name, column) for name in self.ours for column in range(4)]
        return all(is_narrow(each) for each in ratios)


def bounds(ratios: list[float]) -> tuple[float, float]:
    """Return between which of the sorted ratios 95 % of medians would be."""
    middle, half = len(ratios) // 2, int(0.98 * len(ratios) ** 0.5) + 1
    return ratios[max(0, middle - half)], ratios[min(len(ratios) - 1, middle + half)]


def is_narrow(ratios: list[float]) -> bool:
    low, high = bounds(ratios)
    median = statistics.median(ratios)
    return max(high - median, median - low) <= NARROW * median


def shown(ratios: list[float]) -> str:
    low, high = bounds(ratios)
    return f"{statistics.median(ratios):.2f} [{low:.2f}, {high:.2f}]"


def put(side: Packed | Scatter, names: list[Any]) -> tuple[float, float]:
    """Return the seconds of a put, and with the packing before it."""
    _, copy_s = timed(side.pack)
    failed, seconds = timed(side.put, names)
    assert failed == 0
    return seconds, seconds + copy_s


def get(side: Packed | Scatter, names: list[Any]) -> tuple[float, float]:
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


def gbps(blocks: Blocks, seconds: float) -> str:
    return f"{blocks.total_bytes / seconds / 1e9:.2f}"


if __name__ == "__main__":
    main()
