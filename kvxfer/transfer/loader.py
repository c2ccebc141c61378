# SPDX-License-Identifier: Apache-2.0
"""Loads: store -> staging -> KV cache, beside the engine's steps."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvxfer.blocks import Slot, scatter_items
from kvxfer.stores import Outcome
from kvxfer.transfer.base import Route, Transfer, refusals
from kvxfer.transfer.jobs import Job, JobBoard, JobResult
from kvxfer.transfer.pieces import Batch, Pieces
from kvxfer.transfer.specs import LoadSpec

logger = logging.getLogger(__name__)


class Loader(Transfer[LoadSpec]):
    """Fetches values and unpacks them into allocated blocks; worker side, one per rank.

    Chunks are unpacked in prefix order: from the first chunk of which a value is missing, of
    another size, late or refused, nothing counts, and ``take_valid_chunks`` tells how many
    chunks before it are whole. A full queue fails the job.
    """

    def __init__(
        self, board: JobBoard, route: Route, *, num_threads: int, max_queued: int, timeout_s: float
    ) -> None:
        self._lock = threading.Lock()
        self._valid_chunks: dict[int, int] = {}  # guarded by _lock
        super().__init__(
            board,
            route,
            name="kvxfer-load",
            num_threads=num_threads,
            max_queued=max_queued,
            timeout_s=timeout_s,
            refused=JobResult.FAILED,
        )

    def take_valid_chunks(self, job_id: int) -> int:
        """Return and forget how many leading chunks of an ended job are in their blocks."""
        with self._lock:
            return self._valid_chunks.pop(job_id, 0)

    def close(self, timeout_s: float) -> None:
        """Fail what no thread has begun, wait ``timeout_s`` for the rest, join the threads."""
        self._threads.drop_queued()
        super().close(timeout_s)

    def _run(self, job: Job, spec: LoadSpec) -> JobResult:
        pieces = Pieces.of(spec.chunks, self._route.spaces)
        if len(pieces) == 0:  # the groups have no layers on this pipeline stage
            if not self._board.begin_copy(job):
                return JobResult.FAILED
            self._note_valid(job, sum(map(len, spec.chunks)))
            self._board.end_copy(job, last=False)
            return JobResult.DONE
        useless: list[bytes] = []
        for batch in pieces.batches(self._route.staging.slot_bytes):
            if not self._load_batch(job, pieces, batch, sum(map(len, spec.chunks)), useless):
                self._end(job, JobResult.FAILED)  # nobody waits for what follows
                self._remove(useless)
                return JobResult.FAILED
        return JobResult.DONE

    def _load_batch(
        self, job: Job, pieces: Pieces, batch: Batch, num_chunks: int, useless: list[bytes]
    ) -> bool:
        """Fetch and unpack one batch; False if a value failed or the job ended meanwhile.

        Keys of values that no load can ever use are added to ``useless``.
        """
        with self._slot(job) as slot:
            if slot is None:
                return False
            fetched = self._fetch(pieces, batch, slot, useless)
            num_whole = _num_whole_chunks(pieces, batch, fetched, num_chunks)
            return self._unpack(job, pieces, batch, slot, fetched, num_whole) and bool(
                fetched.all()
            )

    def _fetch(
        self, pieces: Pieces, batch: Batch, slot: Slot, useless: list[bytes]
    ) -> NDArray[np.bool_]:
        """Get the values of a batch; return (n,) which of them lie whole in the slot."""
        keys = pieces.keys[batch.rows]
        outcomes = self._route.store.get_into(keys, pieces.views(batch, slot.buffer))
        fetched = np.zeros(len(keys), dtype=np.bool_)
        answered = [outcome == Outcome.OK for outcome in outcomes or ()][: len(keys)]
        fetched[: len(answered)] = answered
        self.counts["values_loaded"] += int(fetched.sum())
        self.counts["bytes_loaded"] += int(pieces.sizes[batch.rows][fetched].sum())
        if not fetched.all():
            logger.warning(
                "%d of %d values were not loaded: %s",
                len(keys) - int(fetched.sum()),
                len(keys),
                refusals(outcomes, len(keys)),
            )
            answers = zip(keys, outcomes or (), strict=False)
            useless += [key for key, outcome in answers if Outcome(outcome).is_useless]
        return fetched

    def _note_valid(self, job: Job, num_chunks: int) -> None:
        """Note progress between ``begin_copy`` and ``end_copy``: who asks comes after the end."""
        with self._lock:
            self._valid_chunks[job.job_id] = num_chunks

    def _remove(self, useless: Sequence[bytes]) -> None:
        """Remove values that no load can use, so that the recomputed ones replace them."""
        if useless:
            self.counts["values_removed"] += self._route.store.remove(useless)

    def _unpack(
        self,
        job: Job,
        pieces: Pieces,
        batch: Batch,
        slot: Slot,
        fetched: NDArray[np.bool_],
        num_whole: int,
    ) -> bool:
        """Scatter what was fetched before the first failure; False if the job ended before."""
        chunk_idx = pieces.chunk_idx[batch.rows]
        if not self._board.begin_copy(job):
            return False
        in_time = False
        try:
            scatter_items(
                self._route.layout,
                pieces.items(batch, slot.ptr)[fetched & _before_failure(chunk_idx, fetched)],
            )
            self._note_valid(job, num_whole)
        finally:
            in_time = self._board.end_copy(job, last=False)
        return in_time


def _before_failure(chunk_idx: NDArray[np.int32], fetched: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return (n,) which values belong to chunks before the first that failed."""
    if fetched.all():
        return fetched
    before: NDArray[np.bool_] = chunk_idx < chunk_idx[~fetched].min()
    return before


def _num_whole_chunks(
    pieces: Pieces, batch: Batch, fetched: NDArray[np.bool_], num_chunks: int
) -> int:
    """Return how many of the job's ``num_chunks`` are whole once this batch is unpacked.

    Chunks of groups without layers on this pipeline stage have no pieces and lack nothing.
    """
    if not fetched.all():
        return int(pieces.chunk_idx[batch.rows][~fetched].min())
    if batch.stop == len(pieces):
        return num_chunks
    return int(pieces.chunk_idx[batch.stop])
