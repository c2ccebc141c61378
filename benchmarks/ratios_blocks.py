# SPDX-License-Identifier: Apache-2.0
"""Print how gather and scatter compare with one memcpy over the same bytes, NumPy and torch.

    python benchmarks/ratios_blocks.py

Every figure is the rate of a copy divided by the rate of the memcpy that ran right before it:
median and [lowest, highest] of interleaved pairs, since a shared machine changes its speed from one
minute to the next. The last column is the memcpy's own median rate.
"""

from __future__ import annotations

import statistics
import time
from functools import partial

import numpy as np
from block_cases import GATHER, SCATTER, WAYS, Copy, CopyCase, copy_in_one_call
from config import IS_SMOKE, KIB, MIB, SIZES

from kvxfer.blocks import plan

NUM_PAIRS = SIZES.min_rounds + 1
COPY_BYTES = SIZES.copy_bytes if IS_SMOKE else 512 * MIB
CASES = [(fragment, 1) for fragment in SIZES.fragment_bytes]
CASES += [(4 * KIB if IS_SMOKE else 16 * KIB, SIZES.num_layers)]


def main() -> None:
    for name, copies in (("gather", GATHER), ("scatter", SCATTER)):
        rivals = [impl for impl in copies if impl != "memcpy"]
        print(f"{name}: rate as a ratio to memcpy, {NUM_PAIRS} pairs")
        print(f"{'fragment':>16} " + " ".join(f"{impl:>20}" for impl in rivals) + "  memcpy GB/s")
        for fragment, num_layers in CASES:
            _print_row(CopyCase(fragment, num_layers, COPY_BYTES), [copies[i] for i in rivals])
    _print_ways()
    _print_items()


def _print_ways() -> None:
    """Print what streaming stores gain, and what a second thread does."""
    print("\nrate as a ratio to our own loop with plain stores")
    print(f"{'fragment':>16} " + " ".join(f"{name:>41}" for name in WAYS))
    print(f"{'':>16} " + " ".join(f"{way:>20}" for way in ("by itself", "two threads") * 2))
    for fragment, num_layers in CASES:
        case = CopyCase(fragment, num_layers, COPY_BYTES)
        case.prepare()
        cells = []
        for plain, *others in WAYS.values():
            for copy in others:
                copy(case)
                case.check()
                pairs = [(_seconds(plain, case), _seconds(copy, case)) for _ in range(NUM_PAIRS)]
                cells.append(_cell([plain_s / copy_s for plain_s, copy_s in pairs]))
        print(f"{_label(case):>16} " + " ".join(f"{cell:>20}" for cell in cells), flush=True)


def _print_items() -> None:
    """Print how long the items of a job of 1,000 blocks take, whatever the number of layers."""
    ids = np.random.default_rng(1).permutation(100_000)[:1000].astype(np.int64)
    build = partial(
        plan.make_items,
        ids,
        None,
        num_blocks=100_000,
        class_id=0,
        value_ptr=1 << 40,
        value_step=160 * 4096,
    )
    times = []
    for _ in range(100 * NUM_PAIRS):
        start = time.perf_counter()
        build()
        times.append(time.perf_counter() - start)
    print(f"\nitems of 1,000 blocks x 160 regions: {statistics.median(times) * 1e6:.0f} us")


def _print_row(case: CopyCase, copies: list[Copy]) -> None:
    case.prepare()
    cells, rates = [], []
    for copy in copies:
        copy(case)
        case.check()
        ratios = []
        for _ in range(NUM_PAIRS):
            reference_s, copy_s = _seconds(copy_in_one_call, case), _seconds(copy, case)
            ratios.append(reference_s / copy_s)
            rates.append(case.bytes_moved / reference_s / 1e9)
        cells.append(_cell(ratios))
    print(f"{_label(case):>16} " + " ".join(f"{cell:>20}" for cell in cells), end="")
    print(f"  {statistics.median(rates):.1f}", flush=True)


def _cell(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"


def _label(case: CopyCase) -> str:
    return f"{case.num_layers} x {case.fragment}" if case.num_layers > 1 else str(case.fragment)


def _seconds(copy: Copy, case: CopyCase) -> float:
    start = time.perf_counter()
    copy(case)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
