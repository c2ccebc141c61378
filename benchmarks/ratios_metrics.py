# SPDX-License-Identifier: Apache-2.0
"""Print what counting and KV events cost, as a part of the lookup that they belong to.

    python benchmarks/ratios_metrics.py

The difference of a lookup with and without counting drowns in the noise of a lookup, so what
counting adds is timed alone, many times in a row, and divided by the time of the lookups: on their
whole way, from a client here over a socket to a server in a process of its own and back, with a
stub store behind it. A lookup waits for the note of its store call (worker) and for that of its
outcome (scheduler). Counting tokens at a request's admission and adding up at a step's end come
later, and are shown beside it. Times are CPU time of the thread, of whole lookups the clock on the
wall; a row's is the median of rounds, with [lowest, highest].
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from config import IS_SMOKE, SIZES
from lookup_channels import open_channel, random_hashes
from lookup_sides import StubStore
from scheduler_steps import BLOCK
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from kvxfer.lookup import LookupReply
from kvxfer.lookup.protocol import Status
from kvxfer.observe.events import SaveEvents
from kvxfer.observe.meter import Meter, Tally
from kvxfer.observe.metered_store import MeteredStore
from kvxfer.scheduler.requests import Answer, RequestState
from kvxfer.scheduler.token_counts import TokenCounts
from kvxfer.transfer.specs import Chunks, SaveSpec

ROUNDS = SIZES.min_rounds
CALLS = 50 if IS_SMOKE else 5_000
EVENT_BLOCKS = 64
"""Blocks of a step's saves: 64 requests that complete one each."""

CALL_KEYS = 64
KEYS = [b"key"] * CALL_KEYS

Call = Callable[[], object]


def main() -> None:
    print(f"us a call, medians of {ROUNDS} rounds of {CALLS} calls [lowest, highest]")
    store = StubStore(True, 0)
    plain_us = print_us(f"store call of {CALL_KEYS} keys", lambda: store.exists(KEYS))
    added_us = print_us("the same, noted", noted_exists(store)) - plain_us
    added_us += print_us("outcome of a lookup", outcomes())
    print(f"{'counting adds to a lookup':>48} {added_us:8.2f}")
    for case in ("cold", "full_hit"):
        for num_tokens in sorted({1_024, SIZES.prompt_tokens}):
            print_share(added_us, num_tokens, case)
    print_us("tokens of a request, at its admission", admissions())
    print_us("a step's end, nothing noted", Meter().take)
    print_us("a step's end, one store call noted (its note too)", steps())
    block_us = print_us(f"KV events of {EVENT_BLOCKS} stored blocks", events()) / EVENT_BLOCKS
    print(f"{'of one block':>48} {block_us:8.2f}")


def noted_exists(store: StubStore) -> Call:
    """Return a noted store call; it adds up notes that nobody takes whenever they are too many."""
    meter = Meter()
    metered = MeteredStore(store, meter)  # type: ignore[arg-type]
    return lambda: metered.exists(KEYS)


def outcomes() -> Call:
    """Return what the scheduler side does when a lookup has ended."""
    tokens, reply = TokenCounts(Tally(), BLOCK, enable_lookup=True), LookupReply(Status.OK, 1_008)
    return lambda: tokens.lookup_ended(reply, False, 0.001)


def admissions() -> Call:
    """Return what the scheduler side counts of a request that loads most of its prompt."""
    tokens = TokenCounts(Tally(), BLOCK, enable_lookup=True)
    state = RequestState(Request("a", [1] * 1_024, SamplingParams(), None))
    state.answer = Answer(1_008, {}, 1_024, 0.0)

    def call() -> None:
        state.is_counted = False
        tokens.admitted(state, 1_008)
        tokens.load_ended(state)

    return call


def steps() -> Call:
    """Return the note of a store call and a step that takes it."""
    meter = Meter()
    counts = (("store_keys/exists/found", 64), ("store_keys/exists/missing", 0))

    def call() -> None:
        meter.note("store_call_seconds/exists", 0.001, counts)
        meter.take()

    return call


def events() -> Call:
    """Return what the scheduler side does for the events of a step's saves."""
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256)
    tokens = list(range(EVENT_BLOCKS * BLOCK))
    request = Request("a", tokens, SamplingParams(), None, block_hasher=hasher)
    chunks = (Chunks.of(0, {bytes(h): 1 for h in request.block_hashes}),)
    made = SaveEvents([BLOCK], hash_tokens=BLOCK, num_ranks=1, store="lmdb://")
    spec = SaveSpec(1, 0, chunks)

    def call() -> None:
        made.note((request, at, at + BLOCK) for at in range(0, len(tokens), BLOCK))
        made.ordered([spec])
        made.ended({1: 1}, ())
        assert len(made.take()) == EVENT_BLOCKS

    return call


def print_share(added_us: float, num_tokens: int, case: str) -> None:
    """Print a lookup's time on its whole way, and what counting adds to it."""
    hashes = random_hashes(num_tokens)
    with open_channel("kvxfer", case) as client:
        client.look_up("warm-up", num_tokens, hashes)
        num_calls = max(3, CALLS * 64 // len(hashes) // 50)
        call = lambda: client.look_up("request", num_tokens, hashes)  # noqa: E731
        lookup_us = print_us(
            f"whole way, {num_tokens} tokens, {case}", call, num_calls, time.perf_counter
        )
    print(f"{'counting adds':>48} {added_us / lookup_us:8.2%}")


def print_us(
    name: str, call: Call, num_calls: int = CALLS, clock: Callable[[], float] = time.thread_time
) -> float:
    """Print and return the microseconds of one call."""
    rounds = [round_us(call, num_calls, clock) for _ in range(ROUNDS)]
    median = statistics.median(rounds)
    print(f"{name:>48} {median:8.2f} [{min(rounds):.2f}, {max(rounds):.2f}]", flush=True)
    return median


def round_us(call: Call, num_calls: int, clock: Callable[[], float]) -> float:
    start = clock()
    for _ in range(num_calls):
        call()
    return (clock() - start) / num_calls * 1e6


if __name__ == "__main__":
    main()
