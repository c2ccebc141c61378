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
        if num_keys and not 1 <= self.counts.min() <= self.counts.max() <= most_parts:
            wrong = np.flatnonzero((self.counts < 1) | (self.counts > most_parts))[0]
            raise ValueError(f"value {wrong} has {self.counts[wrong]} parts, not 1 to {most_parts}")
        if num_keys and self.sizes.min() < 1:
            empty = np.flatnonzero(self.sizes < 1)[0]
            raise ValueError(f"part {empty} has {self.sizes[empty]} bytes")

    def value_bytes(self) -> NDArray[np.int64]:
        """Return (n,) the bytes of each value."""
        if len(self.counts) == len(self.sizes):  # one part each, or none at all
            return self.sizes
        return np.add.reduceat(self.sizes, np.cumsum(self.counts) - self.counts, dtype=np.int64)

    def by_value(self) -> tuple[list[list[int]], list[tuple[int, ...]]]:
        """Return the addresses and the sizes of the parts of each value, each (n,)."""
        num_values = len(self.counts)
        if num_values and (self.counts == self.counts[0]).all():
            ptrs = self.ptrs.reshape(num_values, -1).tolist()
            sizes = self.sizes.reshape(num_values, -1)
            if (sizes == sizes[0]).all():  # as those of one cache group are
                return ptrs, [tuple(sizes[0].tolist())] * num_values
            return ptrs, list(map(tuple, sizes.tolist()))
        bounds = [slice(*ends) for ends in pairwise(accumulate(self.counts.tolist(), initial=0))]
        all_ptrs, all_sizes = self.ptrs.tolist(), tuple(self.sizes.tolist())
        return [all_ptrs[bound] for bound in bounds], [all_sizes[bound] for bound in bounds]
