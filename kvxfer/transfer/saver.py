# SPDX-License-Identifier: Apache-2.0
"""Saves: KV cache -> staging -> store, beside the engine's steps."""

from __future__ import annotations

import logging

import numpy as np

from kvxfer.blocks import Slot, gather_items
from kvxfer.stores import Outcome
from kvxfer.stores.flags import presence_flags
from kvxfer.transfer.base import Route, Transfer, refusals
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

    def _run(self, job: Job, spec: SaveSpec) -> JobResult:
        if spec.epoch < self._epoch:
            return JobResult.SKIPPED
        pieces = Pieces.of(spec.chunks, self._route.spaces)
        present = presence_flags(self._route.store, pieces.keys)
        self.counts["values_present"] += int(np.count_nonzero(present))
        pieces = pieces.select(present == 0)
        for batch in pieces.batches(self._route.staging.slot_bytes):
            if not self._save_batch(job, pieces, batch):
                return JobResult.FAILED
        return JobResult.DONE

    def _save_batch(self, job: Job, pieces: Pieces, batch: Batch) -> bool:
        with self._slot(job) as slot:
            return (
                slot is not None
                and self._pack(job, pieces, batch, slot)
                and self._put(pieces, batch, slot)
            )

    def _pack(self, job: Job, pieces: Pieces, batch: Batch, slot: Slot) -> bool:
        """Gather one batch; False if the job ended before or its deadline passed meanwhile."""
        if not self._board.begin_copy(job):
            return False
        in_time = False
        try:
            gather_items(self._route.layout, pieces.items(batch, slot.ptr))
        finally:
            in_time = self._board.end_copy(job, last=batch.stop == len(pieces))
        return in_time

    def _put(self, pieces: Pieces, batch: Batch, slot: Slot) -> bool:
        """Put one batch; False if a value was not stored, which is logged and counted."""
        keys = pieces.keys[batch.rows]
        outcomes = self._route.store.put_from(keys, pieces.views(batch, slot.buffer))
        stored = np.zeros(len(keys), dtype=np.bool_)
        stored[: len(outcomes)] = [Outcome(outcome).stored for outcome in outcomes]
        self.counts["values_saved"] += int(stored.sum())
        self.counts["bytes_saved"] += int(pieces.sizes[batch.rows][stored].sum())
        if not stored.all():
            logger.warning(
                "%d of %d values were not saved: %s",
                len(keys) - int(stored.sum()),
                len(keys),
                refusals(outcomes, len(keys)),
            )
        return bool(stored.all())
