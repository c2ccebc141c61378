# SPDX-License-Identifier: Apache-2.0
"""The scheduler side leaves out loads and saves that are not worth their while."""

import pytest

pytest.importorskip("vllm")

from engine_fakes import (
    FakeLookups,
    FakePool,
    FakeRequest,
    allocated,
    blocks_by_request,
    make_config,
    make_facts,
    step,
    worker_output,
)

from kvxfer.config import KVXferConfig
from kvxfer.errors import ConfigError
from kvxfer.scheduler import KVXferScheduler
from kvxfer.scheduler.load_worth import PROBE_S


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def lookups():
    return FakeLookups()


@pytest.fixture
def make(lookups, clock):
    def make(**settings):
        scheduler = KVXferScheduler(make_config(**settings), make_facts(), lookups, clock)
        scheduler.bind_gpu_block_pool(FakePool())
        return scheduler

    return make


def offered(scheduler, lookups, name, hit_tokens=64, local=0):
    """Return what the scheduler side offers for a new request of 65 tokens."""
    lookups.answer(name, hit_tokens)
    return scheduler.get_num_new_matched_tokens(FakeRequest(name, 65), local)


def run(scheduler, name, num_tokens=33, block=1):
    """Prefill a request in one step, end it, and return the blocks that are saved."""
    request = FakeRequest(name, num_tokens)
    scheduler.get_num_new_matched_tokens(request, 0)
    blocks = list(range(block, block + num_tokens // 16))
    scheduler.update_state_after_alloc(request, allocated(*blocks), 0)
    output = step(new=[(name, 0, num_tokens)], tables={name: blocks})
    saves = scheduler.build_connector_meta(output).saves
    scheduler.request_finished(request)
    return blocks_by_request(saves).get(name, [])


# Loads


def test_short_hits_are_computed(make, lookups):
    scheduler = make(min_load_tokens=64)
    assert offered(scheduler, lookups, "a", 48) == (0, False)
    assert offered(scheduler, lookups, "b", 64) == (64, True)
    assert offered(scheduler, lookups, "c", 64, local=16) == (0, False)


def test_loads_slower_than_prefills_are_left_out_but_for_a_probe(make, lookups, clock):
    scheduler = make(load_when="faster", load_tokens_per_s=10, prefill_tokens_per_s=20)
    assert offered(scheduler, lookups, "a") == (0, False)
    clock.now += PROBE_S
    assert offered(scheduler, lookups, "b") == (64, True)
    assert offered(scheduler, lookups, "c") == (0, False)


def test_a_request_that_waits_for_blocks_keeps_its_offer(make, lookups, clock):
    scheduler = make(load_when="faster", load_tokens_per_s=10, prefill_tokens_per_s=20)
    clock.now += PROBE_S
    lookups.answer("a", 64)
    request = FakeRequest("a", 65)
    for _ in range(3):
        assert scheduler.get_num_new_matched_tokens(request, 0) == (64, True)


def test_rates_are_measured_from_steps_and_loads(make, lookups, clock):
    scheduler = make(load_when="faster")
    computed = FakeRequest("computed", 1000)
    lookups.answer("computed", 0)
    scheduler.get_num_new_matched_tokens(computed, 0)
    scheduler.update_state_after_alloc(computed, allocated(*range(1, 63)), 0)
    tables = {"computed": list(range(1, 63))}
    scheduler.build_connector_meta(step(new=[("computed", 0, 1000)], tables=tables))
    clock.now += 1.0
    scheduler.build_connector_meta(step(cached=[("computed", 1000, 1)], tables=tables))
    assert offered(scheduler, lookups, "first") == (64, True)
    request = scheduler._requests["first"].request
    scheduler.update_state_after_alloc(request, allocated(70, 71, 72, 73), 64)
    clock.now += 2.0  # 32 tokens a second against 1,000
    scheduler.update_connector_output(worker_output(None, {"first"}))
    assert offered(scheduler, lookups, "second") == (0, False)


# Saves


def test_prefix_is_saved_at_its_second_request(make):
    scheduler = make(min_sightings=2)
    assert run(scheduler, "a") == []
    assert run(scheduler, "a", num_tokens=49) == [1, 2]
    assert run(scheduler, "a", num_tokens=49, block=11) == [11, 12, 13]
    assert run(scheduler, "b") == []


def test_generated_tokens_were_in_no_prompt_and_are_not_saved(make):
    scheduler = make(min_sightings=2, save_decode_cache=True)
    run(scheduler, "a")
    request = FakeRequest("a", 33)
    scheduler.get_num_new_matched_tokens(request, 0)
    scheduler.update_state_after_alloc(request, allocated(1, 2, 3, 4), 0)
    request.num_tokens = 65
    output = step(new=[("a", 0, 64)], tables={"a": [1, 2, 3, 4]})
    saves = scheduler.build_connector_meta(output).saves
    assert blocks_by_request(saves) == {"a": [1, 2]}


@pytest.mark.parametrize(
    "wrong", [{"load_when": "never"}, {"min_sightings": 0}, {"load_tokens_per_s": -1.0}]
)
def test_settings_that_nobody_can_mean_are_refused(wrong):
    with pytest.raises(ConfigError):
        KVXferConfig.from_extra(wrong, {})
