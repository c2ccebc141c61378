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

from block_cases import GATHER, SCATTER, Copy, CopyCase, copy_in_one_call
from config import IS_SMOKE, KIB, MIB, SIZES

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
        cells.append(f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]")
    label = f"{case.num_layers} x {case.fragment}" if case.num_layers > 1 else str(case.fragment)
    print(f"{label:>16} " + " ".join(f"{cell:>20}" for cell in cells), end="")
    print(f"  {statistics.median(rates):.1f}", flush=True)


def _seconds(copy: Copy, case: CopyCase) -> float:
    start = time.perf_counter()
    copy(case)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
