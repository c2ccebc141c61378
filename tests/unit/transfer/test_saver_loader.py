# SPDX-License-Identifier: Apache-2.0
"""Saves and loads over a store that waits, fails and lies: what is moved and what is reported."""

import hashlib
import threading
import time

import numpy as np
import pytest
from memory_store import Gate, MemoryStore

from kvxfer.blocks import BlockLayout, Region, StagingPool
from kvxfer.blocks.movers import HostMover
from kvxfer.keys import KeySpace
from kvxfer.stores import Outcome
from kvxfer.transfer import Chunks, JobBoard, JobResult, Loader, LoadSpec, Route, Saver, SaveSpec
from kvxfer.transfer.pieces import Pieces

NUM_BLOCKS, HEADS, TOKENS, CONTENT = 16, 2, 4, 24
UNTOUCHED = 0xA5
VALUE_BYTES = 2 * TOKENS * CONTENT
"""Of a shard of one head, over both layers: three times 64, so nothing is padded."""


def make_caches(fill=None):
    """Return two layers' caches: random bytes, or every byte ``fill``."""
    shape = (NUM_BLOCKS, HEADS, TOKENS, CONTENT)
    if fill is not None:
        return [np.full(shape, fill, dtype=np.uint8) for _ in range(2)]
    rng = np.random.default_rng(5)
    return [rng.integers(0, 256, shape, dtype=np.uint8) for _ in range(2)]


def make_layout(caches):
    return BlockLayout.from_regions(
        [
            Region(
                tensor=cache,
                group=0,
                layer=f"layer{i}",
                axes=("block", "head", "token", "content"),
                kernel_blocks_per_block=1,
                heads=(0, HEADS),
            )
            for i, cache in enumerate(caches)
        ],
        value_order="native",
        head_shard={0: 1},
        num_blocks=NUM_BLOCKS,
    )


def hashes(*numbers):
    return b"".join(hashlib.sha256(bytes([n])).digest() for n in numbers)


def chunks(blocks, first=0):
    return Chunks(0, np.array(blocks, np.int32), hashes(*range(first, first + len(blocks))), 32)


class Rank:
    """One rank's transfers over its own cache and a shared store."""

    def __init__(
        self,
        store,
        caches,
        *,
        slot_values=64,
        num_slots=3,
        num_threads=1,
        timeout_s=20.0,
        clock=None,
    ):
        self.caches = caches
        self.layout = make_layout(caches)
        self.board = JobBoard(clock) if clock else JobBoard()
        self.staging = StagingPool(num_slots, slot_values * VALUE_BYTES)
        spaces = {
            0: [
                KeySpace(0, f"p/h{c.heads}/".encode(), i, c.value_bytes)
                for i, c in enumerate(self.layout.classes)
            ]
        }
        self.route = Route(store, HostMover(self.layout), self.staging, spaces)
        options = {"num_threads": num_threads, "max_queued": 4, "timeout_s": timeout_s}
        self.saver = Saver(self.board, self.route, **options)
        self.loader = Loader(self.board, self.route, **options)
        self.free, self.ended = [], {}

    def poll(self):
        reports = self.board.take_reports()
        self.free += reports.blocks_free
        self.ended.update(reports.ended)

    def wait(self, condition):
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline, "nothing happened in 20 s"
            threading.Event().wait(0.002)
            self.poll()

    def result(self, job_id):
        self.wait(lambda: job_id in self.ended)
        return self.ended[job_id]

    def close(self):
        self.saver.close(5)
        self.loader.close(5)
        self.staging.close()


@pytest.fixture
def store():
    return MemoryStore()


@pytest.fixture
def make_rank(store):
    ranks = []

    def make(caches=None, **options):
        ranks.append(Rank(store, caches if caches is not None else make_caches(), **options))
        return ranks[-1]

    yield make
    for gate in store.gates.values():
        gate.open()
    for rank in ranks:
        rank.close()


def save(rank, job_id, blocks, first=0, epoch=0):
    rank.saver.submit(SaveSpec(job_id, epoch, (chunks(blocks, first),)))


def load(rank, job_id, blocks, first=0):
    rank.loader.submit(LoadSpec(job_id, "r", 0, len(blocks) * TOKENS, (chunks(blocks, first),)))


def saved_rank(make_rank, blocks, **options):
    rank = make_rank(**options)
    save(rank, 0, blocks)
    assert rank.result(0) is JobResult.DONE
    return rank


# Round trips


@pytest.mark.parametrize("slot_values", [1, 3, 64], ids="slot_values={}".format)
def test_load_puts_the_saved_bytes_into_other_blocks_and_touches_nothing_else(
    make_rank, slot_values
):
    source = saved_rank(make_rank, [3, 9, 1, 12], slot_values=slot_values)
    target = make_rank(make_caches(UNTOUCHED), slot_values=slot_values)
    load(target, 1, [7, 2, 15, 4])
    assert target.result(1) is JobResult.DONE
    assert target.loader.take_valid_chunks(1) == 4
    for ours, theirs in zip(target.caches, source.caches, strict=True):
        np.testing.assert_array_equal(ours[[7, 2, 15, 4]], theirs[[3, 9, 1, 12]])
        others = np.delete(ours, [7, 2, 15, 4], axis=0)
        assert (others == UNTOUCHED).all()


def test_save_puts_one_value_per_chunk_and_shard(make_rank, store):
    rank = saved_rank(make_rank, [1, 2, 3])
    assert len(store.values) == 6
    assert {len(v) for v in store.values.values()} == {c.value_bytes for c in rank.layout.classes}


def test_save_of_what_is_stored_packs_and_puts_nothing(make_rank, store):
    rank = saved_rank(make_rank, [1, 2])
    store.calls.clear()
    save(rank, 1, [1, 2])
    assert rank.result(1) is JobResult.DONE
    assert [name for name, _ in store.calls] == ["exists"]


def test_save_adds_only_the_shard_that_is_missing(make_rank, store):
    rank = saved_rank(make_rank, [1, 2])
    lost = next(iter(store.values))
    value = store.values.pop(lost)
    save(rank, 1, [1, 2])
    assert rank.result(1) is JobResult.DONE
    assert store.values[lost] == value
    assert store.calls[-1] == ("put", 1)


@pytest.mark.parametrize("kind", ["save", "load"])
def test_job_without_chunks_is_done_at_once(make_rank, store, kind):
    rank = make_rank()
    (save if kind == "save" else load)(rank, 0, [])
    assert rank.result(0) is JobResult.DONE
    assert store.calls == []


# blocks_free and ended


def test_blocks_are_free_while_the_put_is_under_way(make_rank, store):
    store.gates["put"] = Gate()
    rank = make_rank()
    save(rank, 0, [1, 2])
    rank.wait(lambda: rank.free == [0])
    assert rank.ended == {}
    store.gates["put"].open()
    assert rank.result(0) is JobResult.DONE
    assert rank.free == [0]


def test_blocks_are_not_free_while_a_later_batch_has_yet_to_be_packed(make_rank, store):
    store.gates["put"] = Gate()
    rank = make_rank(slot_values=1)
    save(rank, 0, [1, 2, 3])
    assert store.gates["put"].reached.wait(20)
    rank.poll()
    assert rank.free == []
    store.gates["put"].open()
    assert rank.result(0) is JobResult.DONE
    assert rank.free == [0]
    assert sum(name == "put" for name, _ in store.calls) > 1


def test_blocks_changed_after_they_are_free_do_not_change_what_is_stored(make_rank, store):
    store.gates["put"] = Gate()
    rank = make_rank()
    before = [cache.copy() for cache in rank.caches]
    save(rank, 0, [1, 2])
    rank.wait(lambda: rank.free == [0])
    for cache in rank.caches:
        cache[:] = UNTOUCHED
    store.gates["put"].open()
    rank.result(0)
    target = make_rank(make_caches(0))
    load(target, 1, [1, 2])
    assert target.result(1) is JobResult.DONE
    for ours, theirs in zip(target.caches, before, strict=True):
        np.testing.assert_array_equal(ours[[1, 2]], theirs[[1, 2]])


def test_batches_of_one_load_are_fetched_at_the_same_time(make_rank, store):
    source = saved_rank(make_rank, [1, 2, 3, 4])
    target = make_rank(make_caches(UNTOUCHED), slot_values=2, num_threads=3)
    store.gates["get"] = Gate()
    load(target, 1, [5, 6, 7, 8])
    target.wait(lambda: store.calls.count(("get", 2)) == 3)
    store.gates["get"].open()
    assert target.result(1) is JobResult.DONE
    assert target.loader.take_valid_chunks(1) == 4
    for ours, theirs in zip(target.caches, source.caches, strict=True):
        np.testing.assert_array_equal(ours[5:9], theirs[1:5])


def test_help_with_a_load_takes_no_place_of_another_load(make_rank, store):
    """Two threads do one load of four batches each; four more loads wait, as many as may."""
    saved_rank(make_rank, [1, 2, 3, 4])
    target = make_rank(make_caches(UNTOUCHED), slot_values=2, num_threads=2)
    store.gates["get"] = Gate()
    for number in range(2):
        load(target, number, [5, 6, 7, 8])
    target.wait(lambda: store.calls.count(("get", 2)) == 2)
    for number in range(2, 6):
        load(target, number, [5, 6, 7, 8])
    store.gates["get"].open()
    assert {target.result(number) for number in range(6)} == {JobResult.DONE}


def test_threads_are_attached_to_the_mover_once_and_before_they_copy(make_rank, monkeypatch):
    attached, copied = [], []
    monkeypatch.setattr(
        HostMover, "attach_thread", lambda self: attached.append(threading.get_ident())
    )
    pack = HostMover.pack
    monkeypatch.setattr(
        HostMover, "pack", lambda *args: (copied.append(threading.get_ident()), pack(*args))[1]
    )
    saved_rank(make_rank, [1, 2])
    assert len(attached) == len(set(attached)) == 2  # one thread each to save and to load
    assert set(copied) <= set(attached)


# Failures


@pytest.mark.parametrize("failed", [0, 3, 6])
def test_load_on_several_threads_keeps_the_chunks_before_the_first_failure(
    make_rank, store, failed
):
    source = saved_rank(make_rank, list(range(1, 9)))
    missing = f"p/h{source.layout.classes[1].heads}/".encode() + hashes(failed).hex().encode()
    del store.values[missing]
    target = make_rank(make_caches(UNTOUCHED), slot_values=2, num_slots=4, num_threads=3)
    load(target, 1, list(range(8, 16)))
    assert target.result(1) is JobResult.FAILED
    assert target.loader.take_valid_chunks(1) == failed
    for ours, theirs in zip(target.caches, source.caches, strict=True):
        np.testing.assert_array_equal(ours[8 : 8 + failed], theirs[1 : 1 + failed])
        assert (ours[8 + failed] == UNTOUCHED).all()
        assert (ours[0:8] == UNTOUCHED).all()


@pytest.mark.parametrize("slot_values", [2, 64], ids="slot_values={}".format)
@pytest.mark.parametrize("failed", [0, 2, 3])
def test_load_keeps_the_chunks_before_the_first_failure_and_writes_no_other(
    make_rank, store, failed, slot_values
):
    source = saved_rank(make_rank, [1, 2, 3, 4], slot_values=slot_values)
    del store.values[
        f"p/h{source.layout.classes[1].heads}/".encode() + hashes(failed).hex().encode()
    ]
    target = make_rank(make_caches(UNTOUCHED), slot_values=slot_values)
    load(target, 1, [5, 6, 7, 8])
    assert target.result(1) is JobResult.FAILED
    assert target.loader.take_valid_chunks(1) == failed
    for ours, theirs in zip(target.caches, source.caches, strict=True):
        np.testing.assert_array_equal(ours[5 : 5 + failed], theirs[1 : 1 + failed])
        assert (ours[5 + failed : 9] == UNTOUCHED).all()


@pytest.mark.parametrize(
    "answer",
    [
        lambda keys: None,
        lambda keys: [],
        lambda keys: [Outcome.OK],
        lambda keys: [Outcome.WRONG_SIZE] * len(keys),
        lambda keys: [Outcome.FAILED] * len(keys),
        RuntimeError("the store broke"),
    ],
    ids=["none", "empty", "short", "wrong_size", "failed", "exception"],
)
def test_load_fails_for_whatever_is_no_plain_success(make_rank, store, answer):
    saved_rank(make_rank, [1, 2])
    store.answers["get"] = answer
    target = make_rank(make_caches(UNTOUCHED))
    load(target, 1, [5, 6])
    assert target.result(1) is JobResult.FAILED
    assert target.loader.take_valid_chunks(1) == 0
    assert all((cache == UNTOUCHED).all() for cache in target.caches)


def test_load_of_a_value_of_another_size_touches_no_block(make_rank, store):
    saved_rank(make_rank, [1])
    key = next(iter(store.values))
    store.values[key] += b"x"
    target = make_rank(make_caches(UNTOUCHED))
    load(target, 1, [5])
    assert target.result(1) is JobResult.FAILED
    assert all((cache == UNTOUCHED).all() for cache in target.caches)


def test_value_that_no_load_can_use_is_replaced_by_the_next_save(make_rank, store):
    source = saved_rank(make_rank, [1])
    key, whole = next(iter(store.values.items()))
    store.values[key] = whole + b"x"
    target = make_rank(make_caches(UNTOUCHED))
    load(target, 1, [5])
    assert target.result(1) is JobResult.FAILED
    assert key not in store.values
    assert target.loader.counts["values_removed"] == 1
    save(source, 1, [1])
    assert source.result(1) is JobResult.DONE
    assert store.values[key] == whole


@pytest.mark.parametrize("outcome", [Outcome.MISSING, Outcome.FAILED, Outcome.CLOSED])
def test_value_that_may_be_loaded_another_time_stays(make_rank, store, outcome):
    saved_rank(make_rank, [1])
    before = dict(store.values)
    store.answers["get"] = lambda keys: [outcome] * len(keys)
    target = make_rank(make_caches(UNTOUCHED))
    load(target, 1, [5])
    assert target.result(1) is JobResult.FAILED
    assert store.values == before


@pytest.mark.parametrize("call", ["exists", "put"])
@pytest.mark.parametrize("answer", [RuntimeError("broken"), lambda keys: bytearray()])
def test_save_that_fails_anywhere_ends_and_frees_its_blocks(make_rank, store, call, answer):
    store.answers[call] = answer
    rank = make_rank()
    save(rank, 0, [1, 2])
    assert rank.result(0) is JobResult.FAILED
    assert rank.free == [0]
    store.answers.clear()
    save(rank, 1, [1, 2])
    assert rank.result(1) is JobResult.DONE


def test_save_that_finds_no_space_is_a_failed_save(make_rank, store):
    store.answers["put"] = lambda keys: [Outcome.NO_SPACE] * len(keys)
    rank = make_rank()
    save(rank, 0, [1])
    assert rank.result(0) is JobResult.FAILED
    assert rank.saver.counts["jobs_failed"] == 1


def test_load_of_a_group_without_layers_on_this_rank_is_done(make_rank):
    rank = make_rank()
    part = chunks([1])
    foreign = Chunks(9, part.block_ids, part.hashes, part.hash_bytes)
    rank.loader.submit(LoadSpec(0, "r", 0, 4, (foreign,)))
    assert rank.result(0) is JobResult.DONE
    assert rank.loader.take_valid_chunks(0) == 1


def test_load_with_a_group_without_layers_on_this_rank_is_whole(make_rank):
    rank = saved_rank(make_rank, [1, 2])
    part = chunks([1, 2])
    foreign = Chunks(9, part.block_ids, part.hashes, part.hash_bytes)
    rank.loader.submit(LoadSpec(1, "r", 0, 8, (part, foreign)))
    assert rank.result(1) is JobResult.DONE
    assert rank.loader.take_valid_chunks(1) == 4


# Bounds and deadlines


@pytest.mark.parametrize(("kind", "call"), [("save", "exists"), ("load", "get")])
def test_jobs_beyond_the_queue_end_at_once(make_rank, store, kind, call):
    store.gates[call] = Gate()
    rank = make_rank()
    order = save if kind == "save" else load
    order(rank, 0, [1])
    assert store.gates[call].reached.wait(20)
    for job_id in range(1, 6):
        order(rank, job_id, [1])
    expected = JobResult.SKIPPED if kind == "save" else JobResult.FAILED
    assert rank.result(5) is expected
    assert set(rank.ended) == {5}


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_load_that_is_late_fails_and_its_late_bytes_reach_no_block(make_rank, store):
    saved_rank(make_rank, [1, 2])
    clock = Clock()
    store.gates["get"] = Gate()
    target = make_rank(make_caches(UNTOUCHED), clock=clock, timeout_s=5)
    load(target, 1, [5, 6])
    assert store.gates["get"].reached.wait(20)
    clock.now = 6
    target.poll()
    assert target.ended == {1: JobResult.EXPIRED}
    assert target.loader.take_valid_chunks(1) == 0
    store.gates["get"].open()
    target.wait(lambda: target.staging.num_free == 3)
    assert all((cache == UNTOUCHED).all() for cache in target.caches)
    target.poll()
    assert target.ended == {1: JobResult.EXPIRED}


def test_slot_of_a_late_call_is_lent_to_nobody_before_the_call_returns(make_rank, store):
    saved_rank(make_rank, [1, 2])
    clock = Clock()
    store.gates["get"] = Gate()
    target = make_rank(make_caches(UNTOUCHED), clock=clock, timeout_s=5, num_slots=1)
    load(target, 1, [5])
    assert store.gates["get"].reached.wait(20)
    clock.now = 6
    target.poll()
    assert target.staging.acquire(0.01) is None
    store.gates["get"].open()
    target.wait(lambda: target.staging.num_free == 1)


def test_save_that_is_late_in_its_put_ends_once(make_rank, store):
    clock = Clock()
    store.gates["put"] = Gate()
    rank = make_rank(clock=clock, timeout_s=5)
    save(rank, 0, [1])
    assert store.gates["put"].reached.wait(20)
    clock.now = 6
    rank.poll()
    assert rank.ended == {0: JobResult.EXPIRED}
    assert rank.free == [0]
    store.gates["put"].open()
    assert rank.saver.drain(0, 20)
    rank.poll()
    assert rank.free == [0]


# Reset and close


def test_drain_waits_for_the_put_under_way_and_drops_older_saves(make_rank, store):
    store.gates["put"] = Gate()
    rank = make_rank()
    save(rank, 0, [1])
    assert store.gates["put"].reached.wait(20)
    save(rank, 1, [2], first=1)
    assert not rank.saver.drain(1, 0.01)
    store.gates["put"].open()
    assert rank.saver.drain(1, 20)
    save(rank, 2, [3], first=2, epoch=0)
    assert rank.result(1) is JobResult.SKIPPED
    assert rank.result(2) is JobResult.SKIPPED
    assert len(store.values) == 2
    save(rank, 3, [3], first=2, epoch=1)
    assert rank.result(3) is JobResult.DONE


def test_close_finishes_queued_saves(make_rank, store):
    rank = make_rank()
    for job_id in range(4):
        save(rank, job_id, [job_id + 1], first=job_id)
    rank.saver.close(20)
    rank.poll()
    assert set(rank.ended.values()) == {JobResult.DONE}
    assert len(store.values) == 8


def test_close_abandons_a_stuck_thread_and_counts_it(make_rank, store):
    store.gates["put"] = Gate()
    rank = make_rank()
    save(rank, 0, [1])
    assert store.gates["put"].reached.wait(20)
    rank.saver.close(0.05)
    assert rank.saver.num_abandoned == 1
    save(rank, 1, [2])
    assert rank.result(1) is JobResult.SKIPPED


# Batches


def test_batches_cover_every_value_once_and_fit_the_slot():
    sizes = np.array([100, 64, 64, 1, 500, 63], np.int64)
    zeros = np.zeros(6, np.int32)
    pieces = Pieces([b"k"] * 6, sizes, zeros, zeros, zeros)
    batches = list(pieces.batches(512))
    assert [(b.start, b.stop) for b in batches] == [(0, 4), (4, 5), (5, 6)]
    for batch in batches:
        ends = batch.offsets + sizes[batch.rows]
        assert (batch.offsets % 64 == 0).all()
        assert (ends[:-1] <= batch.offsets[1:]).all()
        assert ends[-1] <= 512


def test_value_larger_than_a_slot_is_a_mistake():
    zeros = np.zeros(1, np.int32)
    with pytest.raises(ValueError, match="a value has 576 bytes, a staging slot 512"):
        list(Pieces([b"k"], np.array([513]), zeros, zeros, zeros).batches(512))
