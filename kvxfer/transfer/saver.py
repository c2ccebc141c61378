# SPDX-License-Identifier: Apache-2.0
"""Saves: KV cache -> staging -> store, beside the engine's steps."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvxfer.blocks import Slot
from kvxfer.stores import Outcome
from kvxfer.stores.flags import presence_flags
from kvxfer.transfer.base import Route, Transfer, refusals
from kvxfer.transfer.direct import DirectBlocks
from kvxfer.transfer.jobs import Job, JobBoard, JobResult
from kvxfer.transfer.pieces import Batch, Pieces
from kvxfer.transfer.specs import SaveSpec

logger = logging.getLogger(__name__)


class Saver(Transfer[SaveSpec]):
    """Packs blocks into values and puts them; worker side, one per rank.

    What the store holds already is neither packed nor put. ``blocks_free`` is reported when the
    last gather is complete, ``ended`` when the last put has returned. A full queue and an old
    epoch end a job at once as SKIPPED.
    """

    def __init__(
        self, board: JobBoard, route: Route, *, num_threads: int, max_queued: int, timeout_s: float
    ) -> None:
        self._epoch = 0
        super().__init__(
            board,
            route,
            name="kvxfer-save",
            num_threads=num_threads,
            max_queued=max_queued,
            timeout_s=timeout_s,
            refused=JobResult.SKIPPED,
        )

    def drain(self, epoch: int, timeout_s: float) -> bool:
        """Drop every save ordered before ``epoch`` and wait for those in a store call.

        After True no put of an earlier epoch can land any more, not even of a job that has yet
        to arrive. False if a call did not return within ``timeout_s``.
        """
        self._epoch = max(self._epoch, epoch)
        self._threads.drop_queued()
        return self._threads.wait_idle(timeout_s)

    def _run(self, job: Job, spec: SaveSpec, after: Any) -> None:
        self._end(job, self._save(job, spec, after))

    def _save(self, job: Job, spec: SaveSpec, after: Any) -> JobResult:
        if spec.epoch < self._epoch:
            return JobResult.SKIPPED
        pieces = Pieces.of(spec.chunks, self._route.spaces)
        present = presence_flags(self._route.store, pieces.keys)
        self._count("values_present", int(np.count_nonzero(present)))
        pieces = pieces.select(present == 0)
        for batch in pieces.batches(self._route.staging.slot_bytes):
            if not self._save_batch(job, pieces, batch, after):
                return JobResult.FAILED
        return JobResult.DONE

    def _save_batch(self, job: Job, pieces: Pieces, batch: Batch, after: Any) -> bool:
        if self._route.direct is not None:
            return self._save_in_place(job, pieces, batch, self._route.direct)
        with self._slot(job) as slot:
            return (
                slot is not None
                and self._pack(job, pieces, batch, slot, after)
                and self._put(pieces, batch, slot)
            )

    def _save_in_place(self, job: Job, pieces: Pieces, batch: Batch, direct: DirectBlocks) -> bool:
        """Have the store read one batch from its blocks, which stay pinned until it has."""
        if not self._board.begin_copy(job):
            return False
        in_time = False
        try:
            keys = pieces.keys[batch.rows]
            outcomes = self._route.store.put_parts(keys, direct.parts(pieces, batch))
            stored = self._all_stored(pieces, batch, outcomes)
        finally:
            in_time = self._board.end_copy(job, last=batch.stop == len(pieces))
        return in_time and stored

    def _pack(self, job: Job, pieces: Pieces, batch: Batch, slot: Slot, after: Any) -> bool:
        """Gather one batch; False if the job ended before or its deadline passed meanwhile."""
        if not self._board.begin_copy(job):
            return False
        in_time = False
        try:
            items = pieces.items(batch, slot.ptr)
            packed = self._route.mover.pack(items, slot, batch.num_bytes, after)
        finally:
            in_time = self._board.end_copy(job, last=batch.stop == len(pieces))
        packed.wait()
        return in_time

    def _put(self, pieces: Pieces, batch: Batch, slot: Slot) -> bool:
        """Put one batch; False if a value was not stored."""
        keys = pieces.keys[batch.rows]
        outcomes = self._route.store.put_from(keys, pieces.views(batch, slot.buffer))
        return self._all_stored(pieces, batch, outcomes)

    def _all_stored(self, pieces: Pieces, batch: Batch, outcomes: Sequence[Outcome]) -> bool:
        """Return whether a put stored every value; count, and log the others."""
        keys = pieces.keys[batch.rows]
        stored = np.zeros(len(keys), dtype=np.bool_)
        stored[: len(outcomes)] = [Outcome(outcome).stored for outcome in outcomes]
        self._count("values_saved", int(stored.sum()))
        self._count("bytes_saved", int(pieces.sizes[batch.rows][stored].sum()))
        if not stored.all():
            logger.warning(
                "%d of %d values were not saved: %s",
                len(keys) - int(stored.sum()),
                len(keys),
                refusals(outcomes, len(keys)),
            )
        return bool(stored.all())
