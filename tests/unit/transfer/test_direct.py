# SPDX-License-Identifier: Apache-2.0
"""Values that a store moves to and from the KV cache by itself: the same bytes, the same ends."""

import ctypes
import hashlib

import numpy as np
import pytest
from memory_store import Gate, MemoryStore

from kvxfer.blocks import BlockLayout, Region, StagingPool, gather_items
from kvxfer.blocks.movers import HostMover
from kvxfer.errors import ConfigError
from kvxfer.keys import KeySpace
from kvxfer.stores import Outcome
from kvxfer.stores.parts import TransferMode
from kvxfer.transfer import Chunks, JobBoard, JobResult, Loader, LoadSpec, Route, Saver, SaveSpec
from kvxfer.transfer.direct import direct_blocks
from kvxfer.transfer.pieces import Pieces

NUM_BLOCKS, HEADS, TOKENS, CONTENT = 12, 4, 2, 16
UNTOUCHED = 0xA5


def layers_apart(rng):
    return [_random(rng, (NUM_BLOCKS, HEADS, TOKENS, CONTENT)) for _ in range(3)]


def block_outermost(rng):
    whole = _random(rng, (NUM_BLOCKS, 3, HEADS, TOKENS, CONTENT))
    return [whole[:, layer] for layer in range(3)]


def padded_tokens_first(rng):
    whole = _random(rng, (NUM_BLOCKS, TOKENS, HEADS, CONTENT + 16))
    return [whole.transpose(0, 2, 1, 3)[..., :CONTENT]]


def _random(rng, shape):
    return rng.integers(0, 256, shape, dtype=np.uint8)


MADE = {each.__name__: each for each in (layers_apart, block_outermost, padded_tokens_first)}


def make_layout(caches, heads_per_shard=HEADS, content=CONTENT):
    axes = ("block", "head", "token", "content")
    return BlockLayout.from_regions(
        [
            Region(cache[..., :content], 0, f"layer{i}", axes, heads=(0, HEADS))
            for i, cache in enumerate(caches)
        ],
        head_shard={0: heads_per_shard},
        num_blocks=NUM_BLOCKS,
    )


def chunks(blocks):
    hashes = b"".join(hashlib.sha256(bytes([n])).digest() for n in range(len(blocks)))
    return (Chunks(0, np.array(blocks, np.int32), hashes, 32),)


def spaces_of(layout):
    return {
        0: [
            KeySpace(0, f"p/h{c.heads}/".encode(), i, c.value_bytes)
            for i, c in enumerate(layout.classes)
        ]
    }


@pytest.fixture
def store():
    made = MemoryStore()
    made.mode = TransferMode.DIRECT
    return made


class Rank:
    """One rank's transfers, in place, over its own cache."""

    def __init__(self, store, caches, *, slot_bytes=1 << 14, clock=None, in_place=True, **layout):
        self.caches, self.layout = caches, make_layout(caches, **layout)
        self.board = JobBoard(clock) if clock else JobBoard()
        self.staging = StagingPool(2, slot_bytes)
        direct = direct_blocks(self.layout, store) if in_place else None
        route = Route(store, HostMover(self.layout), self.staging, spaces_of(self.layout), direct)
        options = {"num_threads": 1, "max_queued": 4, "timeout_s": 20}
        self.saver = Saver(self.board, route, **options)
        self.loader = Loader(self.board, route, **options)
        self.free, self.ended = [], {}

    def poll(self):
        reports = self.board.take_reports()
        self.free += reports.blocks_free
        self.ended |= reports.ended

    def finish(self):
        """Wait for the queued jobs and return their results."""
        for transfer in (self.saver, self.loader):
            assert transfer._threads.wait_idle(20)
        self.poll()
        return self.ended


@pytest.fixture
def make_rank(store):
    ranks = []

    def make(caches, **options):
        ranks.append(Rank(store, caches, **options))
        return ranks[-1]

    yield make
    for gate in store.gates.values():
        gate.open()
    for rank in ranks:
        rank.saver.close(5)
        rank.loader.close(5)


@pytest.mark.parametrize("heads_per_shard", [1, 2, HEADS])
@pytest.mark.parametrize("make_caches", MADE.values(), ids=MADE)
def test_parts_are_what_gather_would_pack(store, make_caches, heads_per_shard):
    layout = make_layout(make_caches(np.random.default_rng(1)), heads_per_shard)
    pieces = Pieces.of(chunks([3, 0, 11]), spaces_of(layout))
    slot = np.zeros(1 << 14, np.uint8)
    (batch,) = pieces.batches(len(slot))
    gather_items(layout, pieces.items(batch, slot.ctypes.data))
    parts = direct_blocks(layout, store).parts(pieces, batch)
    parts.check(len(pieces), 64)
    read = b"".join(
        ctypes.string_at(ptr, size)
        for ptr, size in zip(parts.ptrs.tolist(), parts.sizes.tolist(), strict=True)
    )
    packed = b"".join(map(bytes, pieces.views(batch, memoryview(slot))))
    assert read == packed
    assert parts.value_bytes().tolist() == pieces.sizes.tolist()


@pytest.mark.parametrize("reader_in_place", [True, False])
@pytest.mark.parametrize("writer_in_place", [True, False])
@pytest.mark.parametrize("slot_bytes", [512, 1 << 14], ids="slot_bytes={}".format)
def test_values_moved_in_place_and_packed_ones_are_the_same(
    make_rank, store, writer_in_place, reader_in_place, slot_bytes
):
    rng = np.random.default_rng(2)
    options = {"slot_bytes": slot_bytes, "heads_per_shard": 2}
    writer = make_rank(layers_apart(rng), in_place=writer_in_place, **options)
    writer.saver.submit(SaveSpec(0, 0, chunks([1, 2, 3])))
    assert writer.finish() == {0: JobResult.DONE}
    assert writer.free == [0]
    empty = [np.full_like(cache, UNTOUCHED) for cache in writer.caches]
    reader = make_rank(empty, in_place=reader_in_place, **options)
    reader.loader.submit(LoadSpec(1, "request", 0, 3, chunks([7, 5, 9])))
    assert reader.finish() == {1: JobResult.DONE}
    assert reader.loader.take_valid_chunks(1) == 3
    for ours, theirs in zip(reader.caches, writer.caches, strict=True):
        assert np.array_equal(ours[[7, 5, 9]], theirs[[1, 2, 3]])
        others = [block for block in range(NUM_BLOCKS) if block not in (7, 5, 9)]
        assert (ours[others] == UNTOUCHED).all()
    asked = {name for name, _ in store.calls}
    assert ("get_parts" in asked) == reader_in_place
    assert ("put_parts" in asked) == writer_in_place


def test_blocks_are_not_free_while_the_store_reads_them(make_rank, store):
    rank = make_rank(layers_apart(np.random.default_rng(3)))
    store.gates["put_parts"] = Gate()
    rank.saver.submit(SaveSpec(0, 0, chunks([1])))
    assert store.gates["put_parts"].reached.wait(20)
    rank.poll()
    assert not rank.free
    store.gates["put_parts"].open()
    assert rank.finish() == {0: JobResult.DONE}
    assert rank.free == [0]


def test_late_load_is_reported_only_when_the_store_has_let_go_of_its_blocks(make_rank, store):
    now = [0.0]
    caches = layers_apart(np.random.default_rng(4))
    rank = make_rank(caches, clock=lambda: now[0])
    rank.saver.submit(SaveSpec(0, 0, chunks([1])))
    rank.finish()
    store.gates["get_parts"] = Gate()
    rank.loader.submit(LoadSpec(1, "request", 0, 1, chunks([5])))
    assert store.gates["get_parts"].reached.wait(20)
    now[0] = 100.0
    rank.poll()
    assert 1 not in rank.ended
    store.gates["get_parts"].open()
    assert rank.finish()[1] is JobResult.EXPIRED


@pytest.mark.parametrize(
    "answer", [lambda keys: None, lambda keys: [Outcome.FAILED] * len(keys), RuntimeError("no")]
)
def test_load_that_fails_has_no_valid_chunk(make_rank, store, answer):
    rank = make_rank(layers_apart(np.random.default_rng(5)))
    rank.saver.submit(SaveSpec(0, 0, chunks([1, 2])))
    rank.finish()
    store.answers["get_parts"] = answer
    rank.loader.submit(LoadSpec(1, "request", 0, 2, chunks([5, 6])))
    assert rank.finish()[1] is JobResult.FAILED
    assert rank.loader.take_valid_chunks(1) == 0


@pytest.mark.parametrize(
    ("make_caches", "heads_per_shard", "in_place"),
    [(block_outermost, HEADS, True), (block_outermost, 1, False), (layers_apart, HEADS, False)],
)
def test_auto_moves_in_place_where_a_value_is_one_run(
    store, make_caches, heads_per_shard, in_place
):
    store.mode = TransferMode.AUTO
    layout = make_layout(make_caches(np.random.default_rng(6)), heads_per_shard)
    assert (direct_blocks(layout, store) is not None) == in_place
    assert bool(store.registered) == in_place


def test_memory_is_registered_once_however_many_layers_share_it(store):
    layout = make_layout(block_outermost(np.random.default_rng(7)))
    direct_blocks(layout, store)
    assert [buffer.nbytes for buffer in store.registered] == [
        NUM_BLOCKS * 3 * HEADS * TOKENS * CONTENT
    ]


@pytest.mark.parametrize(
    ("layout", "most_parts", "reason"),
    [({}, 2, "3 parts in the KV cache, at most 2"), ({"content": 3}, 64, "zeros between")],
)
def test_what_cannot_be_moved_in_place_is_refused_with_the_way_out(
    store, layout, most_parts, reason
):
    store.most_parts = most_parts
    made = make_layout(layers_apart(np.random.default_rng(8)), **layout)
    with pytest.raises(ConfigError, match=f"{reason}.*use transfer=auto"):
        direct_blocks(made, store)


def test_store_that_takes_no_parts_is_handed_none():
    layout = make_layout(block_outermost(np.random.default_rng(9)))
    assert direct_blocks(layout, MemoryStore()) is None
