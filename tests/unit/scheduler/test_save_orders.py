# SPDX-License-Identifier: Apache-2.0
"""Recurrent states and prompt tails: when they are ordered, and that they hold their own pins."""

from dataclasses import replace

import pytest

pytest.importorskip("vllm")

from engine_fakes import (
    FakeLookups,
    FakePool,
    FakeRequest,
    allocated,
    make_config,
    make_facts,
    step,
    worker_output,
)

from kvxfer.hits import CacheGroup
from kvxfer.messages import KVXferWorkerMetadata
from kvxfer.scheduler import KVXferScheduler

GROUPS = (CacheGroup("full", 16, spec_id="f"), CacheGroup("mamba", 64, spec_id="m"))


class Hybrid:
    """A scheduler side over one full-attention and one recurrent group, common block 64."""

    def __init__(self, *, role="kv_both", partial_hits=False, **settings):
        facts = make_facts(block_tokens=64, role=role)
        facts = replace(facts, groups=GROUPS, hash_tokens=16, partial_hits=partial_hits)
        self.pool = FakePool()
        self.scheduler = KVXferScheduler(make_config(**settings), facts, FakeLookups())
        self.scheduler.bind_gpu_block_pool(self.pool)
        self.tables = {}

    def start(self, name, num_tokens):
        request = FakeRequest(name, num_tokens)
        request.num_computed_tokens = 0
        self.scheduler.get_num_new_matched_tokens(request, 0)
        self.scheduler.update_state_after_alloc(request, allocated(), 0)
        self.tables[name] = [list(range(1, 2 + num_tokens // 16)), [0, 0, 0, 90]]
        return request

    def step(self, cached=(), handed=None):
        output = step(cached=cached, handed=handed)
        output.kv_connector_block_state.get_block_ids = self.tables.get
        return self.scheduler.build_connector_meta(output).saves


def of_group(saves, group):
    return [
        (int(block), part.hashes[i * 32 : (i + 1) * 32].rstrip(b".").decode())
        for save in saves
        for part in save.chunks
        if part.group == group
        for i, block in enumerate(part.block_ids)
    ]


def test_handed_state_is_saved_in_the_step_in_which_it_is_handed_over():
    engine = Hybrid()
    engine.start("a", 200)
    saves = engine.step(cached=[("a", 0, 192)], handed={"a": [(1, 77, 192)]})
    assert of_group(saves, 1) == [(77, "a-11")]
    assert 77 in engine.pool.pinned


def test_handed_state_is_pinned_until_packed():
    engine = Hybrid()
    engine.start("a", 200)
    saves = engine.step(handed={"a": [(1, 77, 192)]})
    assert engine.pool.pinned == {77}
    free = KVXferWorkerMetadata(blocks_free={save.job_id: 1 for save in saves})
    engine.scheduler.update_connector_output(worker_output(free))
    assert engine.pool.pinned == set()


@pytest.mark.parametrize(("decode", "expected"), [(False, []), (True, [(77, "a-15")])])
def test_state_of_generated_tokens_is_saved_only_where_asked(decode, expected):
    engine = Hybrid(save_decode_cache=decode)
    request = engine.start("a", 200)
    request.num_tokens = 260
    assert of_group(engine.step(handed={"a": [(1, 77, 256)]}), 1) == expected


def test_consumer_saves_no_states():
    engine = Hybrid(role="kv_consumer")
    engine.start("a", 200)
    assert engine.step(handed={"a": [(1, 77, 192)]}) == ()


def test_state_of_an_unknown_request_is_passed_over():
    assert Hybrid().step(handed={"nobody": [(1, 77, 192)]}) == ()


def test_state_handed_over_at_the_end_goes_out_with_the_next_step_under_its_own_pins():
    engine = Hybrid()
    request = engine.start("a", 200)
    request.num_computed_tokens = 200
    finished = engine.scheduler.register_finished_partial_tail(
        request, tuple(engine.tables["a"]), [(1, 77, 192)]
    )
    assert finished is False
    assert engine.pool.pinned == {77}
    engine.scheduler.request_finished(request)
    assert of_group(engine.step(), 1) == [(77, "a-11")]


def test_nothing_of_a_request_that_was_alive_at_a_reset_is_saved_at_its_end(monkeypatch):
    monkeypatch.setattr("kvxfer.scheduler.side.reset_ranks", lambda *_: True)
    engine = Hybrid(partial_hits=True)
    request = engine.start("a", 125)
    request.num_computed_tokens = 125
    assert engine.scheduler.reset()
    engine.scheduler.register_finished_partial_tail(
        request, tuple(engine.tables["a"]), [(1, 77, 112)]
    )
    assert engine.step() == ()


def test_prompt_tail_without_room_is_ordered_by_a_later_step():
    engine = Hybrid(partial_hits=True, max_pinned_blocks=2)
    engine.start("a", 61)
    assert engine.step(cached=[("a", 0, 61)]) == ()
    engine.scheduler._pins._max_blocks = 100
    assert of_group(engine.step(cached=[("a", 61, 1)]), 0) == [(1, "a-0"), (2, "a-1"), (3, "a-2")]


def test_prompt_tail_is_ordered_once_when_the_prompt_is_covered():
    engine = Hybrid(partial_hits=True)
    engine.start("a", 125)
    first = engine.step(cached=[("a", 0, 100)])
    assert of_group(first, 0) == [(i + 1, f"a-{i}") for i in range(4)]
    tail = engine.step(cached=[("a", 100, 25)])
    assert of_group(tail, 0) == [(5, "a-4"), (6, "a-5"), (7, "a-6")]
    assert engine.step(cached=[("a", 125, 1)]) == ()


def test_prompt_tail_is_ordered_again_with_the_state_at_its_boundary():
    engine = Hybrid(partial_hits=True)
    engine.start("a", 125)
    engine.step(cached=[("a", 0, 125)])
    saves = engine.step(cached=[("a", 125, 1)], handed={"a": [(1, 77, 112)]})
    assert of_group(saves, 1) == [(77, "a-6")]
    assert of_group(saves, 0) == [(5, "a-4"), (6, "a-5"), (7, "a-6")]


def test_without_hits_below_the_block_no_tail_is_ordered():
    engine = Hybrid()
    engine.start("a", 125)
    assert of_group(engine.step(cached=[("a", 0, 125)]), 0) == [(i + 1, f"a-{i}") for i in range(4)]
