# SPDX-License-Identifier: Apache-2.0
"""Values as they lie in the KV cache: where a store moves them without staging and copies."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvxfer.blocks import BlockLayout
from kvxfer.errors import ConfigError
from kvxfer.stores import Store
from kvxfer.stores.parts import Parts, TransferMode
from kvxfer.transfer.pieces import Batch, Pieces


@dataclass(frozen=True, slots=True)
class _ClassParts:
    """The parts of every value of one class, in the order of the value.

    ``bases``, ``block_steps``, ``sizes`` (p,) int64: a block's part i lies at
    ``bases[i] + block_id * block_steps[i]``.
    """

    bases: NDArray[np.int64]
    block_steps: NDArray[np.int64]
    sizes: NDArray[np.int64]

    @classmethod
    def of(cls, layout: BlockLayout, class_id: int) -> _ClassParts | None:
        """Return them; None where a value has zeros between its segments."""
        row = layout.class_rows[class_id]
        first, num_runs = int(row["first_run"]), int(row["num_runs"])
        if num_runs != int(row["num_copy_runs"]):
            return None
        runs = layout.runs[first : first + num_runs]
        counts = runs["outer_count"].astype(np.int64) * runs["inner_count"]
        places = [_fragments(run) for run in runs]
        order = np.argsort(np.concatenate([value for _, value in places]))
        return cls(
            bases=np.concatenate([page for page, _ in places])[order],
            block_steps=np.repeat(runs["block_step"].astype(np.int64), counts)[order],
            sizes=np.repeat(runs["fragment_bytes"].astype(np.int64), counts)[order],
        )


class DirectBlocks:
    """The parts of any value of a layout; made once, after the layout."""

    def __init__(self, classes: list[_ClassParts]) -> None:
        self._classes = classes

    def parts(self, pieces: Pieces, batch: Batch) -> Parts:
        """Return where the values of a batch lie."""
        class_ids, block_ids = pieces.class_ids[batch.rows], pieces.block_ids[batch.rows]
        counts = np.array([len(each.sizes) for each in self._classes], np.int64)[class_ids]
        starts = np.cumsum(counts) - counts
        ptrs, sizes = np.empty((2, int(counts.sum())), np.int64)
        for class_id in np.unique(class_ids).tolist():
            of_class, rows = self._classes[class_id], np.flatnonzero(class_ids == class_id)
            at = starts[rows][:, None] + np.arange(len(of_class.sizes))
            ptrs[at] = of_class.bases + block_ids[rows][:, None] * of_class.block_steps
            sizes[at] = of_class.sizes
        return Parts(ptrs, sizes, counts)


def direct_blocks(layout: BlockLayout, store: Store) -> DirectBlocks | None:
    """Return the parts of a layout's values where the store is to move them in place, else None.

    By the store's ``transfer_mode``: always, never, or where each value is one run of the cache.
    Registers the cache's memory with the store. ``ConfigError`` where it has to be and cannot.
    """
    mode = store.transfer_mode
    if mode is TransferMode.PACKED:
        return None
    found = [_ClassParts.of(layout, class_id) for class_id in range(len(layout.classes))]
    reason = _why_not(layout, found, 1 if mode is TransferMode.AUTO else store.most_parts)
    if reason:
        if mode is TransferMode.DIRECT:
            raise ConfigError(f"transfer=direct cannot be here: {reason}; use transfer=auto")
        return None
    for start, num_bytes in layout.memory_spans:
        memory = (ctypes.c_ubyte * num_bytes).from_address(start)
        memory.owner = layout  # type: ignore[attr-defined]  # keeps the tensors mapped
        store.register(memoryview(memory).cast("B"))
    return DirectBlocks([each for each in found if each is not None])


def _why_not(layout: BlockLayout, found: list[_ClassParts | None], most_parts: int) -> str:
    if layout.device != "cpu" or not layout.writable:
        return f"the KV cache is on {layout.device}, where a store cannot reach it"
    if any(each is None for each in found):
        return "a value has zeros between its layers"
    largest = max(len(each.sizes) for each in found if each is not None)
    if largest > most_parts:
        return f"a value has {largest} parts in the KV cache, at most {most_parts} can be moved"
    return ""


def _fragments(run: np.void) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the addresses (of block 0) and the value offsets of a run's fragments."""
    outer = np.arange(int(run["outer_count"]), dtype=np.int64)[:, None]
    inner = np.arange(int(run["inner_count"]), dtype=np.int64)
    pages, values = (
        int(run[base]) + outer * int(run[f"outer_{of}_step"]) + inner * int(run[f"inner_{of}_step"])
        for base, of in (("base", "page"), ("value_offset", "value"))
    )
    return pages.ravel(), values.ravel()
