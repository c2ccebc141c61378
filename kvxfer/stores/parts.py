# SPDX-License-Identifier: Apache-2.0
"""Values that lie in several parts, and how a transfer hands values to a store."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray


class TransferMode(enum.Enum):
    """How values go between the KV cache and a store."""

    PACKED = "packed"
    """As one run of bytes each, by way of staging."""
    DIRECT = "direct"
    """In the parts in which they lie in the KV cache, without a copy."""
    AUTO = "auto"
    """``DIRECT`` where a value is one run of the KV cache, else ``PACKED``."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Where the bytes of n values lie: the parts of a value, one after the other, are the value.

    ``ptrs``, ``sizes`` (m,) int64: addresses and bytes of all parts, value by value; ``counts``
    (n,) int64: how many parts each value has. The memory is the caller's, who keeps it for the
    time of a call; parts that a call writes do not overlap.
    """

    ptrs: NDArray[np.int64]
    sizes: NDArray[np.int64]
    counts: NDArray[np.int64]

    def check(self, num_keys: int, most_parts: int) -> None:
        """Raise ``ValueError`` for what cannot be the parts of ``num_keys`` values."""
        for name in ("ptrs", "sizes", "counts"):
            column = getattr(self, name)
            if column.dtype != np.int64 or column.ndim != 1:
                raise ValueError(f"{name} is {column.dtype} of {column.ndim} axes, not int64 of 1")
        if len(self.counts) != num_keys:
            raise ValueError(f"{num_keys} keys, but parts of {len(self.counts)} values")
        if not len(self.ptrs) == len(self.sizes) == int(self.counts.sum()):
            raise ValueError(
                f"parts have {len(self.ptrs)} addresses and {len(self.sizes)} sizes, their counts "
                f"say {int(self.counts.sum())}"
            )
        wrong = np.flatnonzero((self.counts < 1) | (self.counts > most_parts))
        if len(wrong):
            raise ValueError(
                f"value {wrong[0]} has {self.counts[wrong[0]]} parts, not 1 to {most_parts}"
            )
        empty = np.flatnonzero(self.sizes < 1)
        if len(empty):
            raise ValueError(f"part {empty[0]} has {self.sizes[empty[0]]} bytes")

    def value_bytes(self) -> NDArray[np.int64]:
        """Return (n,) the bytes of each value."""
        if not len(self.counts):
            return np.zeros(0, np.int64)
        return np.add.reduceat(self.sizes, np.cumsum(self.counts) - self.counts, dtype=np.int64)

    def by_value(self) -> tuple[list[list[int]], list[tuple[int, ...]]]:
        """Return the addresses and the sizes of the parts of each value, each (n,)."""
        num_values = len(self.counts)
        if num_values and (self.counts == self.counts[0]).all():
            ptrs = self.ptrs.reshape(num_values, -1).tolist()
            return ptrs, list(map(tuple, self.sizes.reshape(num_values, -1).tolist()))
        bounds = [slice(*ends) for ends in pairwise(accumulate(self.counts.tolist(), initial=0))]
        all_ptrs, all_sizes = self.ptrs.tolist(), tuple(self.sizes.tolist())
        return [all_ptrs[bound] for bound in bounds], [all_sizes[bound] for bound in bounds]
