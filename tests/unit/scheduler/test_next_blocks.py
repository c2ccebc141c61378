# SPDX-License-Identifier: Apache-2.0
"""Blocks of generated tokens, ordered for all requests of a step at once."""

from dataclasses import replace

import pytest

pytest.importorskip("vllm")

from engine_fakes import (
    FakeLookups,
    FakeManager,
    FakePool,
    FakeRequest,
    allocated,
    blocks_by_request,
    make_config,
    make_facts,
    step,
    worker_output,
)

from kvxfer.hits import CacheGroup
from kvxfer.messages import KVXferWorkerMetadata
from kvxfer.scheduler import KVXferScheduler
from kvxfer.scheduler.step_saves import SHARED_JOB_BLOCKS

FULL = CacheGroup("full", 16, spec_id="f")
WINDOW = CacheGroup("sliding_window", 16, window_tokens=32, spec_id="w")


class Generating:
    """Requests that have one whole block of prompt, saved, and generate from token 17 on."""

    def __init__(self, names, *, groups=(FULL,), facts=None, **settings):
        facts = replace(facts or make_facts(num_blocks=4000), groups=groups)
        self.pool = FakePool(4000)
        self.requests = {name: FakeRequest(name, 17) for name in names}
        self.tables = {
            name: [
                [at * 100 + group * 10 + place for place in range(1, 6)]
                for group in range(len(groups))
            ]
            for at, name in enumerate(names)
        }
        self.scheduler = KVXferScheduler(
            make_config(save_decode_cache=True, **settings), facts, FakeLookups()
        )
        self.scheduler.bind_kv_cache_manager(FakeManager(self.pool, self.tables))
        for request in self.requests.values():
            self.admit(request)
        self.prompts = []
        while len(blocks_by_request(self.prompts)) < len(names):
            saves = self.step(17)
            self.prompts += saves
            self.pack(saves)

    def admit(self, request):
        self.scheduler.get_num_new_matched_tokens(request, 0)
        self.scheduler.update_state_after_alloc(request, allocated(), 0)

    def step(self, computed, *, known=None, names=None):
        """Compute so many tokens of each request, of which ``known`` are hashed; return saves."""
        names = list(self.requests if names is None else names)
        for name in names:
            self.requests[name].num_tokens = known or computed
        output = step(cached=[(name, computed - 1, 1) for name in names])
        return self.scheduler.build_connector_meta(output).saves

    def part(self, name, computed, scheduled):
        """Compute a part of what one request has; return saves."""
        return self.scheduler.build_connector_meta(step(cached=[(name, computed, scheduled)])).saves

    def pack(self, saves):
        meta = KVXferWorkerMetadata({save.job_id: 1 for save in saves})
        self.scheduler.update_connector_output(worker_output(meta))


def names(count):
    return [f"r{i}" for i in range(count)]


def test_blocks_that_requests_complete_in_one_step_are_one_job():
    engine = Generating("abc")
    (save,) = engine.step(32)
    assert blocks_by_request([save]) == {"a": [2], "b": [102], "c": [202]}
    assert engine.pool.pinned == {2, 102, 202}
    engine.pack([save])
    assert engine.pool.pinned == set()


def test_each_block_is_ordered_in_the_step_that_completes_it_and_once():
    engine = Generating("ab")
    ordered = {c: blocks_by_request(engine.step(c)) for c in range(18, 65)}
    assert {computed: found for computed, found in ordered.items() if found} == {
        32: {"a": [2], "b": [102]},
        48: {"a": [3], "b": [103]},
        64: {"a": [4], "b": [104]},
    }


@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW)], ids=["full", "window"])
def test_job_of_many_requests_is_bounded(groups):
    engine = Generating(names(33), groups=groups)
    saves = engine.step(32)
    sizes = [sum(map(len, save.chunks)) for save in saves]
    assert sum(sizes) == 33 * len(groups)
    assert max(sizes) <= SHARED_JOB_BLOCKS
    assert len(sizes) == len(groups)


def test_windows_are_saved_in_a_part_of_their_own():
    engine = Generating("ab", groups=(FULL, WINDOW))
    engine.tables["b"][1][1] = 0  # gone out of the window already
    (save,) = engine.step(32)
    assert {part.group: part.block_ids.tolist() for part in save.chunks} == {
        0: [2, 102],
        1: [12],
    }


def test_what_finds_no_room_is_ordered_by_the_next_step():
    engine = Generating("abc", max_pinned_blocks=2)
    first = engine.step(32)
    assert blocks_by_request(first) == {"a": [2], "b": [102]}
    assert engine.scheduler._saves.counts["saves_put_off"] == 2, "the other is the prompt of c"
    assert engine.step(33) == ()
    engine.pack(first)
    assert blocks_by_request(engine.step(34)) == {"c": [202]}


def test_block_is_ordered_once_its_last_token_is_known():
    """With asynchronous scheduling a token is computed before it is known."""
    engine = Generating("ab")
    assert engine.step(32, known=31) == ()
    assert blocks_by_request(engine.step(33, known=32)) == {"a": [2], "b": [102]}


def test_chunk_that_two_requests_generate_is_saved_once():
    engine = Generating("ab")
    twin = engine.requests["b"]
    twin.request_id = "a"  # its hashes are those of a from now on
    twin.num_tokens = 32
    (save,) = engine.step(32)
    assert list(save.chunks[0].by_hash()) == [engine.requests["a"].block_hashes[1]]
    assert len(engine.pool.pinned) == 1


def test_request_of_before_a_reset_is_left_out(monkeypatch):
    monkeypatch.setattr("kvxfer.scheduler.side.reset_ranks", lambda *_: True)
    engine = Generating("ab")
    assert engine.scheduler.reset()
    engine.requests["c"] = FakeRequest("c", 17)
    engine.tables["c"] = [[301, 302, 303]]
    engine.admit(engine.requests["c"])
    engine.step(17, names="c")
    (save,) = engine.step(32)
    assert blocks_by_request([save]) == {"c": [302]}
    assert save.epoch == 1


def test_request_that_completes_several_blocks_at_once_goes_on_after_those_ordered():
    engine = Generating("ab")
    engine.step(32)
    engine.requests["a"].num_tokens = 80
    engine.requests["b"].num_tokens = 48
    output = step(cached=[("a", 32, 48), ("b", 47, 1)])
    saves = engine.scheduler.build_connector_meta(output).saves
    assert blocks_by_request(saves) == {"a": [3, 4, 5], "b": [103]}


@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW)], ids=["full", "window"])
def test_both_paths_order_the_same(groups):
    engine = Generating("abc", groups=groups)
    other = Generating("abc", groups=groups)
    other.scheduler._saves._planner.saves_every_generated_block = False
    for computed in range(18, 65):
        saves, expected = engine.step(computed), other.step(computed)
        assert chunks_of(saves) == chunks_of(expected)
        engine.pack(saves)
        other.pack(expected)


def test_windows_of_a_prompt_that_comes_block_by_block_are_saved_at_its_end_alone():
    """As vLLM's cache keeps them with retention 0, whatever becomes of generated tokens."""
    sparse = replace(make_facts(num_blocks=4000), retention_tokens=0)
    engine = Generating("a", groups=(FULL, WINDOW), facts=sparse)
    engine.requests["b"] = request = FakeRequest("b", 100)
    engine.tables["b"] = [list(range(100, 108)), list(range(200, 208))]
    engine.admit(request)
    saves = [save for done in range(0, 100, 16) for save in engine.part("b", done, 16)]
    request.num_tokens = 112
    saves += engine.part("b", 111, 1)
    assert {block for group, _, block in chunks_of(saves) if group == 0} == set(range(100, 107))
    assert {block for group, _, block in chunks_of(saves) if group == 1} == {204, 205, 206}


def chunks_of(saves):
    """Return {(group, hash, block)} of all jobs."""
    return {
        (part.group, *pair)
        for save in saves
        for part in save.chunks
        for pair in part.by_hash().items()
    }
