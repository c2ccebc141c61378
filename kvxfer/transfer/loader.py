# SPDX-License-Identifier: Apache-2.0
"""Loads: store -> staging -> KV cache, beside the engine's steps."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvxfer.blocks import Slot
from kvxfer.stores import Outcome
from kvxfer.transfer.base import Route, Task, Transfer, refusals
from kvxfer.transfer.direct import DirectBlocks
from kvxfer.transfer.jobs import Job, JobBoard, JobResult
from kvxfer.transfer.load_work import LoadWork
from kvxfer.transfer.pieces import Batch, Pieces
from kvxfer.transfer.specs import LoadSpec

logger = logging.getLogger(__name__)


class Loader(Transfer[LoadSpec]):
    """Fetches values and unpacks them into allocated blocks; worker side, one per rank.

    A load of more than one batch is done by all threads that are idle, so that one thread fetches
    while another unpacks. From the first chunk of which a value is missing, of another size, late
    or refused, nothing counts, and ``take_valid_chunks`` tells how many chunks before it are
    whole. A full queue fails the job.
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

    def _run(self, job: Job, spec: LoadSpec, after: Any) -> None:
        """Cut the load into batches and do them, with the help of threads that are idle."""
        pieces, num_chunks = Pieces.of(spec.chunks, self._route.spaces), sum(map(len, spec.chunks))
        if len(pieces) == 0:  # the groups have no layers on this pipeline stage
            if self._board.begin_copy(job):
                self._note_valid(job, num_chunks)
                self._board.end_copy(job, last=False)
            self._end(job, JobResult.DONE)
            return
        slot_bytes = self._route.staging.slot_bytes
        work = LoadWork(job, after, pieces, slot_bytes=slot_bytes, num_chunks=num_chunks)
        for _ in work.batches[1:]:
            if not self._threads.submit_if_idle(Task(lambda: self._do_batches(work))):
                break
        self._do_batches(work)

    def _do_batches(self, work: LoadWork) -> None:
        """Do batches until none is left; the thread that does the last one ends the job."""
        while (idx := work.take()) is not None:
            whole = False
            try:
                whole = self._load_batch(work, idx)
            except Exception:
                logger.exception("a load failed")
            if work.finish(whole=whole):
                self._end(work.job, JobResult.FAILED if work.failed else JobResult.DONE)
                self._remove(work.useless)

    def _load_batch(self, work: LoadWork, idx: int) -> bool:
        """Fetch and unpack one batch; False if a value failed or the job ended meanwhile."""
        if self._route.direct is not None:
            return self._load_in_place(work, idx, self._route.direct)
        with self._slot(work.job) as slot:
            if slot is None or not self._board.is_live(work.job):
                return False
            batch = work.batches[idx]
            keys = work.pieces.keys[batch.rows]
            views = work.pieces.views(batch, slot.buffer)
            fetched = self._fetched(work, batch, self._route.store.get_into(keys, views))
            return self._unpack(work, idx, slot, fetched) and bool(fetched.all())

    def _load_in_place(self, work: LoadWork, idx: int, direct: DirectBlocks) -> bool:
        """Have the store write one batch into its blocks: a copy, for as long as the call takes."""
        if not self._board.begin_copy(work.job):
            return False
        in_time, batch = False, work.batches[idx]
        try:
            keys, parts = work.pieces.keys[batch.rows], direct.parts(work.pieces, batch)
            fetched = self._fetched(work, batch, self._route.store.get_parts(keys, parts))
            self._note_valid(work.job, work.note_unpacked(idx, fetched))
        finally:
            in_time = self._board.end_copy(work.job, last=False)
        return in_time and bool(fetched.all())

    def _fetched(
        self, work: LoadWork, batch: Batch, outcomes: Sequence[Outcome] | None
    ) -> NDArray[np.bool_]:
        """Return (n,) which values of a batch a get brought whole; count, and log the others."""
        pieces, keys = work.pieces, work.pieces.keys[batch.rows]
        fetched = np.zeros(len(keys), dtype=np.bool_)
        answered = [outcome == Outcome.OK for outcome in outcomes or ()][: len(keys)]
        fetched[: len(answered)] = answered
        self._count("values_loaded", int(fetched.sum()))
        self._count("bytes_loaded", int(pieces.sizes[batch.rows][fetched].sum()))
        if not fetched.all():
            logger.warning(
                "%d of %d values were not loaded: %s",
                len(keys) - int(fetched.sum()),
                len(keys),
                refusals(outcomes, len(keys)),
            )
            answers = zip(keys, outcomes or (), strict=False)
            work.useless += [key for key, outcome in answers if Outcome(outcome).is_useless]
        return fetched

    def _note_valid(self, job: Job, num_chunks: int) -> None:
        """Note progress between ``begin_copy`` and ``end_copy``: who asks comes after the end."""
        with self._lock:
            self._valid_chunks[job.job_id] = max(num_chunks, self._valid_chunks.get(job.job_id, 0))

    def _remove(self, useless: Sequence[bytes]) -> None:
        """Remove values that no load can use, so that the recomputed ones replace them."""
        if useless:
            self._count("values_removed", self._route.store.remove(useless))

    def _unpack(self, work: LoadWork, idx: int, slot: Slot, fetched: NDArray[np.bool_]) -> bool:
        """Scatter what was fetched before the first failure; False if the job ended before."""
        if not self._board.begin_copy(work.job):
            return False
        in_time = False
        pieces, batch = work.pieces, work.batches[idx]
        try:
            counts = fetched & _before_failure(pieces.chunk_idx[batch.rows], fetched)
            items = pieces.items(batch, slot.ptr)[counts]
            self._route.mover.unpack(items, slot, batch.num_bytes, work.after)
            self._note_valid(work.job, work.note_unpacked(idx, fetched))
        finally:
            in_time = self._board.end_copy(work.job, last=False)
        return in_time


def _before_failure(chunk_idx: NDArray[np.int32], fetched: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return (n,) which values belong to chunks before the first that failed."""
    if fetched.all():
        return fetched
    before: NDArray[np.bool_] = chunk_idx < chunk_idx[~fetched].min()
    return before
