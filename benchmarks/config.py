# SPDX-License-Identifier: Apache-2.0
"""The sizes of the benchmarks, in one place; ``KVXFER_BENCH_SMOKE=1`` shrinks them.

The full sizes are those of DESIGN.md's goals: a prompt of 131,072 tokens in blocks of 16, a model
of 80 layers, eight head shards. A smoke run only shows that every benchmark runs and checks its
result; its times mean nothing.
"""

import os
from dataclasses import dataclass

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the benchmarks work on. The defaults are the full sizes."""

    prompt_tokens: int = 131_072
    block_tokens: int = 16
    hash_bytes: int = 32
    num_layers: int = 80
    num_shards: int = 8

    fragment_bytes: tuple[int, ...] = (256, 1 * KIB, 4 * KIB, 16 * KIB, 128 * KIB, 1 * MIB)
    copy_bytes: int = 256 * MIB
    """Bytes that one gather or scatter moves: past every CPU's last-level cache."""
    pool_bytes: int = 1 * GIB
    """Bytes of the pool that its blocks are drawn from."""

    value_bytes: tuple[int, ...] = (64 * KIB, 1 * MIB)
    store_bytes: int = 256 * MIB
    """Bytes that one put or get of the store moves."""
    store_capacity_bytes: int = 2 * GIB

    min_rounds: int = 10
    """Rounds at least: fewer than ten say nothing of the spread."""
    calls_per_side: int = 3
    """Calls in a row of which one side of a pair is the median."""
    short_calls_per_side: int = 9
    """The same where ours takes microseconds: its caches are warm from about the third on."""

    @property
    def num_hashes(self) -> int:
        """Block hashes of the prompt."""
        return self.prompt_tokens // self.block_tokens

    @property
    def long_prompt_tokens(self) -> int:
        """A prompt of eight times the length: 1,048,576 tokens at full size."""
        return 8 * self.prompt_tokens


FULL = Sizes()
SMOKE = Sizes(
    prompt_tokens=2_048,
    num_layers=2,
    num_shards=2,
    fragment_bytes=(256, 4 * KIB),
    copy_bytes=1 * MIB,
    pool_bytes=4 * MIB,
    value_bytes=(64 * KIB,),
    store_bytes=1 * MIB,
    store_capacity_bytes=64 * MIB,
    min_rounds=1,
    calls_per_side=1,
    short_calls_per_side=2,
)
IS_SMOKE = os.environ.get("KVXFER_BENCH_SMOKE", "") == "1"
SIZES = SMOKE if IS_SMOKE else FULL
