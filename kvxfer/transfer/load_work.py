# SPDX-License-Identifier: Apache-2.0
"""One load, shared out by batches to the threads that have time."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvxfer.transfer.jobs import Job
from kvxfer.transfer.pieces import Batch, Pieces


class LoadWork:
    """Which batches of a load are taken, unpacked and over; any number of threads may call.

    A thread calls `take`, fetches and unpacks the batch, calls `note_unpacked` while the job
    lives, then `finish`. Batches are handed out in prefix order, and no more once one has failed.
    """

    def __init__(
        self, job: Job, after: Any, pieces: Pieces, *, slot_bytes: int, num_chunks: int
    ) -> None:
        """``num_chunks``: of the job, with those of groups that this rank has no layers of."""
        self.job, self.after, self.pieces = job, after, pieces
        self.batches: list[Batch] = list(pieces.batches(slot_bytes))
        self.useless: list[bytes] = []
        """Keys of values that no load can ever use."""
        self._num_chunks = num_chunks
        self._lock = threading.Lock()
        self._num_taken = 0  # guarded by _lock
        self._num_running = 0  # guarded by _lock
        self._failed = False  # guarded by _lock
        self._unpacked: dict[int, tuple[int, bool]] = {}  # guarded by _lock

    def take(self) -> int | None:
        """Return the next batch as its position in ``batches``; None: there is none to do."""
        with self._lock:
            if self._nothing_to_take():
                return None
            self._num_running += 1
            self._num_taken += 1
            return self._num_taken - 1

    def note_unpacked(self, idx: int, fetched: NDArray[np.bool_]) -> int:
        """Note that what precedes the first value of batch ``idx`` not ``fetched`` is in its block.

        Returns how many of the job's leading chunks are whole by now: a batch counts once all
        before it do.
        """
        with self._lock:
            self._unpacked[idx] = self._num_whole(idx, fetched), bool(fetched.all())
            num_valid = 0
            for position in range(self._num_taken):
                chunks, whole = self._unpacked.get(position, (num_valid, False))
                num_valid = chunks
                if not whole:
                    break
            return num_valid

    def finish(self, *, whole: bool) -> bool:
        """End a batch that was taken; True for the one after which nothing is left to do."""
        with self._lock:
            self._num_running -= 1
            self._failed |= not whole
            return self._nothing_to_take() and self._num_running == 0

    @property
    def failed(self) -> bool:
        """Whether a batch was not whole."""
        with self._lock:
            return self._failed

    def _nothing_to_take(self) -> bool:
        return self._failed or self._num_taken == len(self.batches)

    def _num_whole(self, idx: int, fetched: NDArray[np.bool_]) -> int:
        """Return how many chunks are whole once this batch, and all before it, are unpacked."""
        batch, chunk_idx = self.batches[idx], self.pieces.chunk_idx
        if not fetched.all():
            return int(chunk_idx[batch.rows][~fetched].min())
        return self._num_chunks if batch.stop == len(self.pieces) else int(chunk_idx[batch.stop])
