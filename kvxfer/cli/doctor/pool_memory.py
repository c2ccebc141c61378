# SPDX-License-Identifier: Apache-2.0
"""What values take of a Mooncake pool: more than their bytes, and the master does not count it."""

from __future__ import annotations

import math
from collections.abc import Sequence

EVICTS_AT = 0.9
"""Share of the pool at which a master evicts by default (``--eviction_high_watermark_ratio``)."""
MARGIN = 0.03
"""Between that share and the one at which the memory is full: the master looks now and then."""
SIZE_BITS = 4


def allocated_bytes(num_bytes: int) -> int:
    """Return the memory that a value of ``num_bytes`` takes, of Mooncake's default allocator.

    Its sizes have four significant bits: between two powers of two there are eight, so that up to
    an eighth of the value is added. Measured with 0.3.13 (``--memory_allocator=offset``). Segments
    of 4 GiB and more count in units of 2 bytes and more: a difference for tiny values only.
    """
    step = 1 << max(num_bytes.bit_length() - SIZE_BITS, 0)
    return -(-num_bytes // step) * step


def full_share(values: Sequence[int]) -> float:
    """Return the share of a pool that its master counts as used once values of these sizes fill it.

    It counts the bytes of values alone. Below ``EVICTS_AT`` nothing is evicted before puts fail:
    of 1,500 puts of 131,088 bytes into 64 MiB, which are full at 88.9%, 754 were stored; all were
    with a watermark of 0.85 (one master and one owner, leases of 1 ms).
    """
    return sum(values) / sum(map(allocated_bytes, values))


def watermark_below(share: float) -> float:
    """Return the ``--eviction_high_watermark_ratio`` that evicts before a pool is full."""
    return math.floor(100 * (share - MARGIN)) / 100
