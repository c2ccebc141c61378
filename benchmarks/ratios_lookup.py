# SPDX-License-Identifier: Apache-2.0
"""Print how much longer the in-tree connector takes for lookups, keys and the plan of a load.

    python benchmarks/ratios_lookup.py

Every figure is a ratio of two times taken right after each other: median and [lowest, highest] of
interleaved pairs, since a shared machine changes its speed from one minute to the next. Lookups
are of one prompt on eight shards, keys and store calls included, the channel left out.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable

import numpy as np
from bench_hits import CASES, expected_hit, lookup_on
from bench_load_plan import KEYS, PLANS
from config import SIZES

NUM_PAIRS = SIZES.min_rounds + 1
TOKENS = SIZES.prompt_tokens


def main() -> None:
    print(f"time of the in-tree connector / ours, {TOKENS} tokens, {NUM_PAIRS} pairs")
    print(f"{'what':>36}  {'ratio':>26}  {'ours':>10}")
    for store in ("stub", "0.4us"):
        for case in CASES:
            ours, theirs = (lookup_on(impl, TOKENS, case, store) for impl in ("kvxfer", "upstream"))
            assert (
                ours.hit_length(TOKENS) == theirs.hit_length(TOKENS) == expected_hit(TOKENS, case)
            )
            print_row(
                f"lookup {case} store={store}",
                lambda side=ours: side.hit_length(TOKENS),
                lambda side=theirs: side.hit_length(TOKENS),
            )
    hashes = [hashlib.sha256(i.to_bytes(8, "little")).digest() for i in range(SIZES.num_hashes)]
    blocks = np.arange(1, SIZES.num_hashes + 1, dtype=np.int32)
    for name, makers in (("keys", KEYS), (f"keys and plan, {SIZES.num_layers} layers", PLANS)):
        print_row(name, makers["kvxfer"](hashes, blocks), makers["upstream"](hashes, blocks))


def print_row(name: str, ours: Callable[[], object], theirs: Callable[[], object]) -> None:
    ratios, own_s = [], []
    for _ in range(NUM_PAIRS):
        ours_s, theirs_s = seconds(ours), seconds(theirs)
        ratios.append(theirs_s / ours_s)
        own_s.append(ours_s)
    spread = f"{statistics.median(ratios):.1f} [{min(ratios):.1f}, {max(ratios):.1f}]"
    print(f"{name:>36}  {spread:>26}  {statistics.median(own_s) * 1e3:>7.3f} ms", flush=True)


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
