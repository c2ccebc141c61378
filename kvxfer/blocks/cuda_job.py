# SPDX-License-Identifier: Apache-2.0
"""One launch: the parameters that a kernel takes by value, and how much of the GPU it may use.

The dtypes mirror ``kvx_job`` and ``kvx_inline_job`` of ``csrc/block_copy.h``; a test compares the
sizes. The words of a job are its spans, two words each, then its items, sorted by class.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvxfer._native import block_copy
from kvxfer.blocks import plan
from kvxfer.errors import LayoutError

JOB_DTYPE = np.dtype(
    [
        ("runs_ptr", "<u8"),
        ("tiles_ptr", "<u8"),
        ("words_ptr", "<u8"),
        ("num_spans", "<u4"),
        ("num_work", "<u4"),
    ]
)
INLINE_WORDS = 2045
"""As many as fit into the 32,764 bytes of a kernel's parameters: about 2,000 items."""
INLINE_JOB_DTYPE = np.dtype([("job", JOB_DTYPE), ("words", plan.ITEM_DTYPE, (INLINE_WORDS,))])
WORDS_PER_SPAN = plan.SPAN_DTYPE.itemsize // plan.ITEM_DTYPE.itemsize

THREADS = 512
"""Of a CTA: 16 warps. The kernels are compiled for CTAs of no more."""
BACKGROUND_CTAS = 8
"""128 warps of 2 KiB under way each: meant to fill PCIe beside a forward pass, not yet measured."""


@dataclass(frozen=True, slots=True)
class Quota:
    """How much of a GPU one launch may occupy, for as long as it runs."""

    num_ctas: int
    threads: int = THREADS

    def __post_init__(self) -> None:
        if self.num_ctas < 1 or self.threads not in range(32, THREADS + 1, 32):
            raise LayoutError(
                f"a quota of {self.num_ctas} CTAs of {self.threads} threads; take at least 1 CTA "
                f"of 32 to {THREADS} threads in steps of 32"
            )

    def grid(self, num_work: int) -> int:
        """Return the CTAs of a launch: never more than there are tiles to copy."""
        return min(self.num_ctas, num_work)


def background_quota() -> Quota:
    """Return the quota of copies beside a forward pass."""
    return Quota(BACKGROUND_CTAS)


def full_quota(num_multiprocessors: int, major: int) -> Quota:
    """Return the quota of copies that wait for nothing else: as many CTAs as run at once.

    ``major`` is that of the device's compute capability.
    """
    return Quota(ctas_per_multiprocessor(major) * num_multiprocessors)


def ctas_per_multiprocessor(major: int) -> int:
    """Return the CTAs whose registers fit a multiprocessor; ``csrc/block_copy.cu`` says why."""
    return 1 if major >= 10 else 2


def count_words(num_classes: int, num_items: int) -> int:
    """Return the words that a job may need."""
    return WORDS_PER_SPAN * min(num_classes, num_items) + num_items


def pack(
    items: plan.Table,
    classes: plan.Table,
    first_tile: npt.NDArray[np.int64],
    words: plan.Table,
    *,
    to_value: bool,
) -> tuple[int, int]:
    """Write spans and items of checked ``items`` into ``words``; return (spans, work ids).

    ``LayoutError`` if the job has 2**31 tiles or more.
    """
    counts = np.zeros(len(classes), dtype=np.int64)
    num_spans, num_work = block_copy.pack_job(items, classes, first_tile, to_value, counts, words)
    if num_work >= plan.INDEX_LIMIT:
        raise LayoutError(
            f"{len(items)} items make {num_work} tiles; copy fewer than 2**31 at once"
        )
    return num_spans, num_work


def job_parameters(**fields: Any) -> npt.NDArray[np.void]:
    """Return a kvx_job with these fields; the others are 0."""
    parameters = np.zeros((), dtype=JOB_DTYPE)
    for name, value in fields.items():
        parameters[name] = value
    return parameters
