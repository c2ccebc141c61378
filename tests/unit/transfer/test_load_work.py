# SPDX-License-Identifier: Apache-2.0
"""One load on several threads: what is handed out, what counts, and who is the last."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.keys import KeySpace
from kvxfer.transfer import Chunks
from kvxfer.transfer.load_work import LoadWork
from kvxfer.transfer.pieces import Pieces

VALUE_BYTES = 64


def make_work(num_chunks, num_shards=1, values_per_batch=2, others=0):
    """Return the work of a load; ``others``: chunks of groups without layers on this rank."""
    hashes = b"".join(bytes([n]) * 32 for n in range(num_chunks))
    chunks = Chunks(0, np.arange(1, num_chunks + 1, dtype=np.int32), hashes, 32)
    spaces = {0: [KeySpace(0, b"h%d/" % i, i, VALUE_BYTES) for i in range(num_shards)]}
    pieces = Pieces.of((chunks,), spaces)
    slot_bytes = values_per_batch * VALUE_BYTES
    return LoadWork(None, None, pieces, slot_bytes=slot_bytes, num_chunks=num_chunks + others)


def all_of(work, idx):
    batch = work.batches[idx]
    return np.ones(batch.stop - batch.start, dtype=np.bool_)


def test_chunk_counts_once_every_batch_that_has_a_shard_of_it_is_unpacked():
    work = make_work(num_chunks=3, num_shards=2, values_per_batch=3)
    assert [work.take(), work.take(), work.take()] == [0, 1, None]
    assert work.note_unpacked(0, all_of(work, 0)) == 1
    assert work.note_unpacked(1, all_of(work, 1)) == 3


def test_batch_unpacked_before_an_earlier_one_counts_when_that_is():
    work = make_work(num_chunks=4)
    work.take(), work.take()
    assert work.note_unpacked(1, all_of(work, 1)) == 0
    assert work.note_unpacked(0, all_of(work, 0)) == 4


def test_chunks_of_groups_without_layers_here_lack_nothing():
    work = make_work(num_chunks=2, others=3)
    work.take()
    assert work.note_unpacked(0, all_of(work, 0)) == 5


def test_nothing_is_handed_out_after_a_failure():
    work = make_work(num_chunks=6)
    work.take()
    assert work.finish(whole=False)
    assert work.take() is None
    assert work.failed


@pytest.mark.parametrize("first_whole", [True, False])
def test_thread_that_ends_last_is_told(first_whole):
    work = make_work(num_chunks=4)
    work.take(), work.take()
    assert not work.finish(whole=first_whole)
    assert work.finish(whole=True)
    assert work.failed is not first_whole


@given(
    data=st.data(),
    num_chunks=st.integers(1, 9),
    num_shards=st.integers(1, 3),
    values_per_batch=st.integers(1, 5),
    num_threads=st.integers(1, 4),
)
def test_any_order_of_threads_counts_the_prefix_that_is_unpacked(
    data, num_chunks, num_shards, values_per_batch, num_threads
):
    """Against a list of what each thread did; chunk by chunk."""
    work = make_work(num_chunks, num_shards, values_per_batch)
    num_values = num_chunks * num_shards
    bad = data.draw(st.sets(st.integers(0, num_values - 1), max_size=2))
    unpacked, busy, num_last, handed = set(), [], 0, []
    while True:
        if len(busy) < num_threads and (idx := work.take()) is not None:
            handed.append(idx)
            busy.append(idx)
            if data.draw(st.booleans()):
                continue
        if not busy:
            break
        idx = busy.pop(data.draw(st.integers(0, len(busy) - 1)))
        batch = work.batches[idx]
        values = range(batch.start, batch.stop)
        fetched = np.array([value not in bad for value in values])
        failures = [value for value in values if value in bad]
        first_bad_chunk = min((value // num_shards for value in failures), default=num_chunks)
        unpacked |= {value for value in values if value // num_shards < first_bad_chunk}
        whole = [
            all(chunk * num_shards + shard in unpacked for shard in range(num_shards))
            for chunk in range(num_chunks)
        ]
        expected = whole.index(False) if False in whole else num_chunks
        assert work.note_unpacked(idx, fetched) == expected
        num_last += work.finish(whole=not failures)
    assert num_last == 1
    assert handed == list(range(len(handed)))
    assert work.failed == bool(bad & {value for i in handed for value in _values(work, i)})


def _values(work, idx):
    return range(work.batches[idx].start, work.batches[idx].stop)
