# SPDX-License-Identifier: Apache-2.0
"""Print how much longer the in-tree connector takes for lookups, keys and the plan of a load.

    python benchmarks/ratios_lookup.py

A ratio is of two times taken right after each other; shown are the median and [lowest, highest] of
interleaved pairs, since a shared machine changes its speed from one minute to the next. A time is
CPU time of the calling thread, which does all the work: on a busy machine a call of milliseconds
is interrupted and one of microseconds is not, so that the clock on the wall would flatter ours.
Two ways, both sides alike in each:

- *in a row*: a side is the median of 3 calls one after the other, of 9 for a cold prompt.
  Garbage is collected before the first, untimed, so that neither side pays for what the other
  left. Modules are loaded and frozen before (``gc.freeze``, as vLLM does), so that no collection
  scans them.
- *in turn*: a side is one call, so that each meets caches full of the other's data. For a lookup
  of microseconds after one of milliseconds that is most of the time.

Lookups are on eight shards, keys and store calls included. ``whole way`` has the channel besides:
from a client here over a socket to a server in a process of its own, with its side's lookup and a
stub store behind it, and back; by the clock on the wall, since the work is elsewhere. In other
rows the channel is left out. The last table is on a store that looks each key up in a set.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from bench_hits import HIT_SHARES
from bench_load_plan import KEYS, PLANS
from config import SIZES
from lookup_channels import open_channel, random_hashes
from lookup_sides import CASES, IMPLS, expected_hit, lookup_of_share, lookup_on

NUM_PAIRS = SIZES.min_rounds + 1
TOKENS = SIZES.prompt_tokens

Call = Callable[[], object]
Clock = Callable[[], float]
WIDTHS = (27, 11, 11)
"""Of a ratio with its spread, our milliseconds and theirs."""


def main() -> None:
    print(
        f"time of the in-tree connector / ours, {TOKENS} tokens unless said otherwise, "
        f"{NUM_PAIRS} pairs, in a row: medians of {SIZES.calls_per_side} calls, "
        f"{SIZES.short_calls_per_side} where cold"
    )
    print_cells("", ["in a row", "ours ms", "in-tree ms", "in turn", "ours ms", "in-tree ms"])
    for impl in IMPLS:
        lookup_on(impl, TOKENS, "hybrid_cold").answer()  # loads what the side needs
    gc.collect()
    gc.freeze()
    for store in ("stub", "0.4us"):
        for case in CASES:
            print_lookup_row(f"{case} store={store}", TOKENS, case, store)
    for case in ("cold", "full_hit"):
        num_tokens = SIZES.long_prompt_tokens
        print_lookup_row(f"{case} {num_tokens} tokens", num_tokens, case)
    for case in ("cold", "full_hit"):
        with contextlib.ExitStack() as stack:
            calls = [stack.enter_context(way(impl, case)) for impl in IMPLS]
            num_calls = calls_of(expected_hit(TOKENS, case))
            print_row(f"whole way {case}", *calls, num_calls, time.perf_counter)
    print_plan_rows()
    print_hit_lengths()


def print_lookup_row(name: str, num_tokens: int, case: str, store: str = "stub") -> None:
    ours, theirs = (lookup_on(impl, num_tokens, case, store) for impl in IMPLS)
    assert ours.hit_length() == theirs.hit_length() == expected_hit(num_tokens, case)
    print_row(name, ours.hit_length, theirs.hit_length, calls_of(expected_hit(num_tokens, case)))


@contextlib.contextmanager
def way(impl: str, case: str) -> Iterator[Call]:
    """Yield a side's lookup from client to server and back."""
    hashes = random_hashes(TOKENS)
    with open_channel(impl, case) as client:
        assert client.look_up("warm-up", TOKENS, hashes) == expected_hit(TOKENS, case)
        yield lambda: client.look_up("request", TOKENS, hashes)


def print_plan_rows() -> None:
    hashes = [hashlib.sha256(i.to_bytes(8, "little")).digest() for i in range(SIZES.num_hashes)]
    blocks = np.arange(1, SIZES.num_hashes + 1, dtype=np.int32)
    for name, makers in (("keys", KEYS), (f"keys and plan, {SIZES.num_layers} layers", PLANS)):
        print_row(name, *[makers[impl](hashes, blocks) for impl in IMPLS])


def print_hit_lengths() -> None:
    print("\nby the part of the prompt that is stored; keys of all shards (calls of the store)")
    print_cells("", ["in a row", "ours ms", "in-tree ms", "keys of ours", "", "in-tree"])
    for share in HIT_SHARES:
        lookups = [lookup_of_share(impl, TOKENS, share) for impl in IMPLS]
        own, theirs = ("{} ({})".format(*lookup.asked()) for lookup in lookups)
        figures = compared(calls_of(share), *[lookup.hit_length for lookup in lookups])
        print_cells(f"{share:.0%}", [*figures, own, "", theirs])


def calls_of(hit_length: float) -> int:
    return SIZES.calls_per_side if hit_length else SIZES.short_calls_per_side


def print_row(
    name: str,
    ours: Call,
    theirs: Call,
    num_calls: int = SIZES.calls_per_side,
    clock: Clock = time.thread_time,
) -> None:
    in_a_row = compared(num_calls, ours, theirs, clock)
    print_cells(name, [*in_a_row, *compared(1, ours, theirs, clock)])


def print_cells(name: str, cells: Sequence[str]) -> None:
    line = "".join(f"{cell:>{width}}" for cell, width in zip(cells, WIDTHS * 2, strict=True))
    print(f"{name:>28}{line}", flush=True)


def compared(
    num_calls: int, ours: Call, theirs: Call, clock: Clock = time.thread_time
) -> tuple[str, str, str]:
    """Return the ratio with its spread, our time and theirs, of interleaved pairs.

    A side of a pair is the median of ``num_calls``; several are *in a row*, one is *in turn*.
    """
    sides = (ours, theirs)
    pairs = [[seconds(side, num_calls, clock) for side in sides] for _ in range(NUM_PAIRS)]
    ratios = [theirs_s / ours_s for ours_s, theirs_s in pairs]
    own_ms, their_ms = (statistics.median(times) * 1e3 for times in zip(*pairs, strict=True))
    spread = f"{statistics.median(ratios):.1f} [{min(ratios):.1f}, {max(ratios):.1f}]"
    return spread, f"{own_ms:.3f}", f"{their_ms:.1f}"


def seconds(call: Call, num_calls: int, clock: Clock) -> float:
    if num_calls > 1:
        gc.collect()
    times = []
    for _ in range(num_calls):
        start = clock()
        call()
        times.append(clock() - start)
    return statistics.median(times)


if __name__ == "__main__":
    main()
