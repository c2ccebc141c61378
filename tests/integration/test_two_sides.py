# SPDX-License-Identifier: Apache-2.0
"""Scheduler side and ranks together, without an engine: real channel, real LMDB, real copies."""

import gc
import hashlib
import itertools
import sys
import threading
import time
import uuid
import weakref
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("vllm")
torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "scheduler"))

from engine_fakes import FakePool, FakeRequest, allocated, make_config, make_facts, step
from engine_fakes import worker_output as output

from kvxfer import worker as worker_module
from kvxfer.blocks.movers import HostMover
from kvxfer.hits import CacheGroup
from kvxfer.lookup import Endpoint, LookupClient
from kvxfer.scheduler import KVXferScheduler
from kvxfer.stores import open_store
from kvxfer.vllm_specs import LayerSet, ValueNames
from kvxfer.worker import KVXferWorker

LAYERS, HEADS, TOKENS, CONTENT, NUM_BLOCKS = 3, 4, 16, 8, 32
NAMES = ValueNames(model="model", digest="d" * 32, groups=("g" * 16,))


class HashedRequest(FakeRequest):
    """A request whose hashes differ in every byte, as vLLM's do."""

    @property
    def block_hashes(self):
        return [hashlib.sha256(readable).digest() for readable in super().block_hashes]


class Engine:
    """One scheduler side and its ranks over torch tensors of random bytes."""

    def __init__(
        self,
        store_uri,
        *,
        tp_size=1,
        pp_size=1,
        dcp_size=1,
        store_tp=2,
        names=NAMES,
        handshake=True,
        groups=None,
        replicated=False,
        **settings,
    ):
        self.config = make_config(
            store=store_uri, store_tp=store_tp, staging_bytes="1MiB", **settings
        )
        base = replace(
            make_facts(num_ranks=tp_size * pp_size, num_blocks=NUM_BLOCKS),
            engine_id=uuid.uuid4().hex,
            pp_size=pp_size,
        )
        base = replace(base, groups=groups or base.groups)
        self.caches, self.workers = [], []
        for stage, rank in itertools.product(range(pp_size), range(tp_size)):
            heads = HEADS * dcp_size // tp_size
            layer_set = _layer_set(rank // dcp_size, heads, store_tp)
            if replicated:
                heads = HEADS
                layer_set = _replicated_set(rank, tp_size)
            if dcp_size > 1:
                layer_set = replace(
                    layer_set, context_rank=rank % dcp_size, num_context_ranks=dcp_size
                )
            facts = replace(
                base, rank=stage * tp_size + rank, pp_rank=stage, layer_sets=(layer_set,)
            )
            of_stage = replace(names, groups=(f"{stage}{names.groups[0][1:]}",))
            worker = KVXferWorker(
                self.config, facts, open_store(store_uri), lambda order, own=of_stage: own
            )
            shape = (NUM_BLOCKS, heads, TOKENS // dcp_size, CONTENT)
            caches = {
                f"layer{i}": torch.randint(-128, 128, shape, dtype=torch.int8)
                for i in range(LAYERS)
            }
            if replicated and self.caches:
                caches = {name: cache.clone() for name, cache in self.caches[0].items()}
            worker.register_kv_caches(caches)
            self.caches.append(caches)
            self.workers.append(worker)
        self.pool = FakePool(NUM_BLOCKS)
        client = LookupClient(Endpoint.for_engine(base.engine_id), timeout_s=5)
        self.scheduler = KVXferScheduler(self.config, base, client)
        self.scheduler.bind_gpu_block_pool(self.pool)
        if handshake:
            self.scheduler.set_handshakes([w.get_handshake_metadata() for w in self.workers])
        self.finished, self.failed, self.bad_blocks = [], [], set()

    def close(self):
        self.scheduler.shutdown()
        for worker in self.workers:
            worker.shutdown()

    def run_step(self, **kwargs):
        """Plan a step, have every rank run it, and take their events."""
        metadata = self.scheduler.build_connector_meta(step(**kwargs))
        merged = None
        for worker in self.workers:
            worker.start_load_kv(metadata)
            worker.wait_for_save(metadata)
            results = worker.get_transfer_results()
            self.finished += results.finished_recving
            self.failed += results.failed_recving
            self.bad_blocks |= worker.get_block_ids_with_load_errors()
            meta = worker.build_connector_worker_meta()
            if meta is not None:
                merged = meta if merged is None else merged.aggregate(meta)
        self.scheduler.update_connector_output(output(merged))
        return metadata

    def until(self, condition):
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline, "nothing happened in 20 s"
            self.run_step()
            threading.Event().wait(0.002)

    def hit(self, request, local=0):
        """Return the tokens that can be loaded, once the lookup has answered."""
        answers = []
        self.until(
            lambda: (
                answers.append(self.scheduler.get_num_new_matched_tokens(request, local)[0])
                or answers[-1] is not None
            )
        )
        return answers[-1]

    def save(self, name, blocks, kind=FakeRequest):
        request = kind(name, len(blocks) * TOKENS + 1)
        self.hit(request)
        self.scheduler.update_state_after_alloc(request, allocated(*blocks), 0)
        self.run_step(new=[(name, 0, request.num_tokens)], tables={name: list(blocks)})
        self.until(lambda: not self.pool.pinned and not self.num_live_jobs())
        return request

    def num_live_jobs(self):
        return sum(worker._board.num_live for worker in self.workers)

    def load(self, request, blocks):
        tokens = self.hit(request)
        self.scheduler.update_state_after_alloc(request, allocated(*blocks), tokens)
        self.until(lambda: len(self.finished) == len(self.workers))
        return tokens

    def block(self, block):
        """Return a block's bytes over all ranks: [layer][head, token, content]."""
        return [
            torch.cat([caches[f"layer{i}"][block] for caches in self.caches]) for i in range(LAYERS)
        ]


def _layer_set(rank, heads, store_tp):
    return LayerSet(
        group=0,
        layers=tuple(f"layer{i}" for i in range(LAYERS)),
        num_heads=HEADS,
        local_heads=(rank * heads, (rank + 1) * heads),
        heads_per_shard=HEADS // store_tp,
        is_draft=False,
        spec_facts={},
    )


def _replicated_set(rank, tp_size):
    """Layers of which every rank holds the same bytes, as of a latent cache."""
    return replace(_layer_set(0, HEADS, 1), local_heads=None, replica=rank, num_replicas=tp_size)


@pytest.fixture
def store_uri(tmp_path):
    return f"lmdb://{tmp_path}/store?capacity=64MiB"


@pytest.fixture
def make(store_uri):
    engines = []

    def make(**options):
        engines.append(Engine(store_uri, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def marked(monkeypatch):
    """Let movers number their marks, as events of a GPU's stream would follow each other.

    Returns the list of what happens: ("mark", number), ("pack", number), ("unpack", number).
    """
    events, numbers = [], itertools.count(1)

    class MarkedMover(HostMover):
        def mark(self):
            events.append(("mark", next(numbers)))
            return events[-1][1]

        def pack(self, items, slot, num_bytes, after):
            events.append(("pack", after))
            return super().pack(items, slot, num_bytes, after)

        def unpack(self, items, slot, num_bytes, after):
            events.append(("unpack", after))
            super().unpack(items, slot, num_bytes, after)

    monkeypatch.setattr(worker_module, "HostMover", MarkedMover)
    return events


def assert_same_blocks(one, ours, other, theirs):
    for a, b in zip(ours, theirs, strict=True):
        for left, right in zip(one.block(a), other.block(b), strict=True):
            assert torch.equal(left, right)


def test_copies_come_after_what_the_engine_had_queued_at_their_step(make, marked):
    saver, loader = make(), make()
    saver.save("a", [1, 2])
    assert marked == [("mark", 1), ("pack", 1)]
    loader.load(FakeRequest("a", 2 * TOKENS + 1), [3, 4])
    assert marked[2:] == [("mark", 2), ("unpack", 2)]


def test_saves_that_vllm_does_not_wait_for_begin_with_the_next_step(make, marked):
    """As on the earlier pipeline stages of an engine with some drafters."""
    engine = make()
    (worker,) = engine.workers
    request = FakeRequest("a", 2 * TOKENS + 1)
    engine.hit(request)
    engine.scheduler.update_state_after_alloc(request, allocated(1, 2), 0)
    orders = [
        engine.scheduler.build_connector_meta(step(**arguments))
        for arguments in (
            {"new": [("a", 0, request.num_tokens)], "tables": {"a": [1, 2]}},
            {},
        )
    ]
    worker.begin_step(orders[0])
    assert marked == []
    worker.begin_step(orders[1])
    engine.until(lambda: not engine.pool.pinned and not engine.num_live_jobs())
    assert marked == [("mark", 1), ("pack", 1)]


def test_nothing_of_a_rank_that_is_closed_keeps_its_cache_alive(make):
    engine = make()
    engine.save("a", [1, 2])
    counts = engine.workers[0].counts()
    cache = weakref.ref(engine.caches[0]["layer0"])
    engine.close()
    engine.caches.clear()
    gc.collect()
    assert cache() is None
    assert engine.workers[0].counts() == counts


@pytest.mark.parametrize("saver_tp", [1, 2])
@pytest.mark.parametrize("loader_tp", [1, 2])
def test_engine_loads_what_another_saved_whatever_their_tensor_parallel_sizes(
    make, saver_tp, loader_tp
):
    saver = make(tp_size=saver_tp, value_order="head_major")
    saver.save("a", [3, 7, 5])
    loader = make(tp_size=loader_tp, value_order="head_major")
    assert loader.load(FakeRequest("a", 49), [9, 2, 11]) == 48
    assert loader.bad_blocks == set()
    assert_same_blocks(loader, [9, 2, 11], saver, [3, 7, 5])


def test_ranks_that_hold_the_same_bytes_share_the_saving_and_all_load(make):
    blocks = list(range(1, 17))
    saver = make(tp_size=2, replicated=True, max_pinned_blocks=16)
    saver.save("a", blocks, HashedRequest)
    saved = [worker.counts()["save_values_saved"] for worker in saver.workers]
    assert sum(saved) == len(blocks)
    assert all(saved)
    loader = make(tp_size=2, replicated=True)
    assert loader.load(HashedRequest("a", 16 * TOKENS + 1), blocks[::-1]) == 16 * TOKENS
    for caches in loader.caches:
        for name, cache in caches.items():
            assert torch.equal(cache[blocks[::-1]], saver.caches[0][name][blocks])


def test_prefix_of_which_one_shard_is_missing_is_no_hit(make, store_uri):
    saver = make(tp_size=2)
    saver.save("a", [3, 7, 5])
    store = open_store(store_uri)
    spaces = saver.workers[1]._spaces.held[0]
    hashes = FakeRequest("a", 49).block_hashes
    assert store.remove_prefix(spaces[0].prefix + hashes[1].hex().encode()) == 1
    store.close()
    assert make(tp_size=2).hit(FakeRequest("a", 49)) == 16


def test_values_gone_after_the_lookup_are_a_failed_load_that_is_not_offered_again(make, store_uri):
    make().save("a", [3, 7, 5])
    loader, request = make(), FakeRequest("a", 49)
    assert loader.hit(request) == 48
    store = open_store(store_uri)
    prefix = loader.workers[0]._spaces.held[0][0].prefix
    store.remove_prefix(prefix + request.block_hashes[1].hex().encode())
    store.close()
    loader.scheduler.update_state_after_alloc(request, allocated(9, 2, 11), 48)
    loader.until(lambda: loader.finished == ["a"])
    assert loader.bad_blocks == {2, 11}
    assert loader.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)


def test_failed_load_of_a_window_fails_the_request_and_not_its_blocks(make, store_uri):
    """What lies before the failed block was never loaded: a window has no valid prefix."""
    window = (CacheGroup("sliding_window", TOKENS, window_tokens=64, spec_id="w"),)
    make(groups=window).save("a", [3, 7, 5, 6])
    loader, request = make(groups=window), FakeRequest("a", 65)
    assert loader.hit(request) == 64
    store = open_store(store_uri)
    prefix = loader.workers[0]._spaces.held[0][0].prefix
    assert store.remove_prefix(prefix + request.block_hashes[2].hex().encode()) == 1
    store.close()
    loader.scheduler.update_state_after_alloc(request, allocated(9, 2, 11, 4), 64)
    loader.until(lambda: loader.finished == ["a"])
    assert loader.failed == ["a"]
    assert loader.bad_blocks == set()


def test_load_that_was_not_allocated_as_offered_is_reported_as_failed(make):
    make().save("a", [3, 7, 5])
    loader, request = make(), FakeRequest("a", 49)
    assert loader.hit(request) == 48
    loader.scheduler.update_state_after_alloc(request, allocated(9, 2, 11), 40)
    loader.until(lambda: loader.finished == ["a"])
    assert loader.failed == ["a"]
    assert loader.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)


def test_every_pipeline_stage_stores_and_loads_its_own_layers(make):
    saver = make(tp_size=2, pp_size=2)
    saver.save("a", [3, 7, 5])
    loader = make(tp_size=2, pp_size=2)
    assert loader.load(FakeRequest("a", 49), [9, 2, 11]) == 48
    assert_same_blocks(loader, [9, 2, 11], saver, [3, 7, 5])


def test_every_context_rank_stores_and_loads_its_own_share_of_the_tokens(make):
    saver = make(tp_size=4, dcp_size=2)
    saver.save("a", [3, 7, 5])
    loader = make(tp_size=4, dcp_size=2)
    assert loader.load(FakeRequest("a", 49), [9, 2, 11]) == 48
    assert_same_blocks(loader, [9, 2, 11], saver, [3, 7, 5])


def test_prefix_of_which_another_context_rank_lacks_its_share_is_no_hit(make, store_uri):
    saver = make(tp_size=2, dcp_size=2)
    saver.save("a", [3, 7, 5])
    store = open_store(store_uri)
    space = saver.workers[1]._spaces.held[0][0]
    assert space.prefix.endswith(b"c1/")
    hashes = FakeRequest("a", 49).block_hashes
    assert store.remove_prefix(space.prefix + hashes[1].hex().encode()) == 1
    store.close()
    assert make(tp_size=2, dcp_size=2).hit(FakeRequest("a", 49)) == 16


def test_prefix_of_which_another_stage_lacks_a_chunk_is_no_hit(make, store_uri):
    saver = make(pp_size=2)
    saver.save("a", [3, 7, 5])
    store = open_store(store_uri)
    spaces = saver.workers[1]._spaces.held[0]
    hashes = FakeRequest("a", 49).block_hashes
    assert store.remove_prefix(spaces[0].prefix + hashes[2].hex().encode()) == 1
    store.close()
    assert make(pp_size=2).hit(FakeRequest("a", 49)) == 32


def test_rank_0_answers_no_hit_before_it_knows_the_other_stages(make):
    make(pp_size=2).save("a", [3, 7, 5])
    engine = make(pp_size=2, handshake=False)
    assert engine.scheduler._lookups.ping(5)
    assert engine.hit(FakeRequest("a", 49)) == 0


def test_reset_removes_this_model_and_leaves_others(make):
    first = make()
    other = make(names=replace(NAMES, model="other"))
    first.save("a", [1, 2])
    other.save("a", [1, 2])
    assert first.scheduler.reset()
    assert make().hit(FakeRequest("a", 33)) == 0
    assert make(names=replace(NAMES, model="other")).hit(FakeRequest("a", 33)) == 32


def test_no_save_that_was_ordered_before_a_reset_lands_after_it(make, store_uri):
    engine = make(tp_size=2)
    request = FakeRequest("a", 33)
    engine.hit(request)
    engine.scheduler.update_state_after_alloc(request, allocated(1, 2), 0)
    metadata = engine.scheduler.build_connector_meta(step(new=[("a", 0, 33)], tables={"a": [1, 2]}))
    assert len(metadata.saves) == 1
    engine.workers[0].wait_for_save(metadata)
    assert engine.scheduler.reset()
    engine.workers[1].wait_for_save(metadata)  # the message arrives late on the other rank
    engine.until(lambda: not engine.pool.pinned)
    store = open_store(store_uri)
    assert store.stats().num_values == 0
    store.close()


def test_reset_of_a_stuck_rank_is_false_and_removes_nothing(make, monkeypatch):
    engine = make(tp_size=2, reset_timeout_s=0.5)
    engine.save("a", [1, 2])
    monkeypatch.setattr(engine.workers[1]._saver, "drain", lambda epoch, timeout_s: False)
    assert engine.scheduler.reset() is False
    assert make(tp_size=2).hit(FakeRequest("a", 33)) == 32


def test_shutdown_finishes_the_saves_that_are_queued(make):
    engine = make()
    request = FakeRequest("a", 33)
    engine.hit(request)
    engine.scheduler.update_state_after_alloc(request, allocated(1, 2), 0)
    engine.run_step(new=[("a", 0, 33)], tables={"a": [1, 2]})
    for worker in engine.workers:
        worker.shutdown()
        worker.shutdown()
    assert make().hit(FakeRequest("a", 33)) == 32


def test_staging_too_small_for_a_value_is_refused_with_the_setting(store_uri, make):
    with pytest.raises(ValueError, match=r"staging_bytes is \d+: .* set it to \d+ or more"):
        make(num_load_threads=200, num_save_threads=100)
