# SPDX-License-Identifier: Apache-2.0
"""How the saves of a step share jobs."""

import itertools

import pytest
from engine_fakes import FakePool

from kvxfer.scheduler.pins import BlockPins
from kvxfer.scheduler.step_saves import SHARED_JOB_BLOCKS, SMALL_SAVE_BLOCKS, StepSaves
from kvxfer.transfer.specs import Chunks


@pytest.fixture
def pool():
    return FakePool(1000)


@pytest.fixture
def make(pool):
    def make(max_blocks=1000):
        return StepSaves(BlockPins(pool, num_ranks=1, max_blocks=max_blocks), itertools.count())

    return make


def part(first, num=1, group=0):
    """Return chunks of the blocks from ``first`` on, hashed by group and number."""
    return Chunks.of(group, {f"{group}:{i:04}".encode(): i for i in range(first, first + num)})


def blocks_of(jobs):
    return [{part.group: part.block_ids.tolist() for part in job.chunks} for job in jobs]


def test_small_saves_share_a_job_in_the_order_in_which_they_came(make):
    saves = make()
    for first in (7, 3, 5):
        assert saves.add((part(first, 2),))
    assert blocks_of(saves.take()) == [{0: [7, 8, 3, 4, 5, 6]}]


def test_shared_job_has_one_part_a_group(make):
    saves = make()
    saves.add((part(1), part(2, group=1)))
    saves.add((part(3, group=1),))
    saves.add((part(4, group=0), part(5, group=0)))
    assert blocks_of(saves.take()) == [{0: [1, 4, 5], 1: [2, 3]}]


def test_shared_job_keeps_each_hash_with_its_block(make):
    saves = make()
    saves.add((part(7, 2),))
    saves.add((part(3),))
    ((job,),) = [save.chunks for save in saves.take()]
    assert job.by_hash() == {b"0:0007": 7, b"0:0008": 8, b"0:0003": 3}


@pytest.mark.parametrize(
    ("num", "jobs"), [(SMALL_SAVE_BLOCKS, 1), (SMALL_SAVE_BLOCKS + 1, 2)], ids=["small", "large"]
)
def test_save_of_more_blocks_than_is_small_has_a_job_of_its_own(make, num, jobs):
    saves = make()
    saves.add((part(1),))
    saves.add((part(100, num),))
    saves.add((part(2),))
    assert len(saves.take()) == jobs


def test_shared_job_is_bounded(make):
    saves = make()
    for first in range(1, 2 * SHARED_JOB_BLOCKS + 2):
        saves.add((part(first),))
    assert [len(job.chunks[0]) for job in saves.take()] == [
        SHARED_JOB_BLOCKS,
        SHARED_JOB_BLOCKS,
        1,
    ]


def test_chunk_that_several_requests_have_is_saved_once(make, pool):
    saves = make()
    saves.add((Chunks.of(0, {b"same": 1, b"one!": 2}),))
    saves.add((Chunks.of(0, {b"same": 3}), Chunks.of(1, {b"same": 4})))
    (job,) = saves.take()
    assert [part.hashes for part in job.chunks] == [b"sameone!", b"same"]
    assert sum(pool.references.values()) == 3


def test_blocks_of_an_open_job_count_as_pinned(make, pool):
    saves = make(max_blocks=5)
    assert saves.add((part(1, 3),))
    assert pool.pinned == set()
    assert saves.num_free == 2
    assert not saves.add((part(10, 3),))
    assert saves.add((part(20, 2),))
    assert blocks_of(saves.take()) == [{0: [1, 2, 3, 20, 21]}]
    assert pool.pinned == {1, 2, 3, 20, 21}
    assert saves.num_free == 0


def test_closed_job_is_pinned_at_once_and_handed_out_once(make, pool):
    saves = make()
    saves.add((part(1),))
    saves.close_job()
    assert pool.pinned == {1}
    saves.add((part(2),))
    assert blocks_of(saves.take()) == [{0: [1]}, {0: [2]}]
    assert saves.take() == ()


def test_jobs_bear_the_epoch_in_which_they_were_closed(make):
    saves = make()
    saves.add((part(1),))
    saves.close_job()
    saves.epoch = 1
    saves.add((part(2),))
    assert [job.epoch for job in saves.take()] == [0, 1]
