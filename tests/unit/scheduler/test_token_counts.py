# SPDX-License-Identifier: Apache-2.0
"""Every wanted token of an admitted request is counted once, and so is every lookup."""

import pytest

pytest.importorskip("vllm")

from engine_fakes import (
    FakeLookups,
    FakePool,
    FakeRequest,
    allocated,
    make_config,
    make_facts,
    worker_output,
)

from kvxfer.lookup import LookupReply
from kvxfer.lookup.protocol import Status
from kvxfer.messages import KVXferWorkerMetadata
from kvxfer.scheduler import KVXferScheduler

PROMPT = 70
BOUNDARY = 64


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Side:
    """A scheduler side over scripted lookups, and what it has counted since the last look."""

    def __init__(self, **settings):
        self.lookups, self.clock = FakeLookups(), Clock()
        self.scheduler = KVXferScheduler(
            make_config(**settings), make_facts(), self.lookups, self.clock
        )
        self.scheduler.bind_gpu_block_pool(FakePool())

    def admit(self, request, *, local=0, external=None):
        """Offer and admit a request; ``external`` tokens are allocated, by default the offer."""
        offered, _ = self.scheduler.get_num_new_matched_tokens(request, local)
        taken = offered if external is None else external
        blocks = allocated(*range(1, 1 + (local + taken) // 16))
        self.scheduler.update_state_after_alloc(request, blocks, taken)
        return taken

    def counted(self):
        stats = self.scheduler.take_stats()
        return {} if stats is None else stats.data["counters"]

    def tokens(self):
        """Return (wanted, hit, {reason: missed})."""
        counters = self.counted()
        missed = {
            name.partition("/")[2]: number
            for name, number in counters.items()
            if name.startswith("missed_tokens/")
        }
        return counters.get("wanted_tokens", 0), counters.get("hit_tokens", 0), missed


@pytest.fixture
def side():
    return Side()


def received(name):
    return worker_output(finished_recving={name})


def failed(name):
    return worker_output(KVXferWorkerMetadata(failed_loads=frozenset({name})), {name})


def test_prompt_that_is_not_stored_is_missed(side):
    side.lookups.answer("a", 0)
    side.admit(FakeRequest("a", PROMPT))
    assert side.tokens() == (PROMPT, 0, {"not_stored": BOUNDARY, "last_block": PROMPT - BOUNDARY})


def test_local_tokens_are_not_wanted(side):
    side.lookups.answer("a", 0)
    side.admit(FakeRequest("a", PROMPT), local=16)
    assert side.tokens() == (PROMPT - 16, 0, {"not_stored": 48, "last_block": 6})


def test_loaded_tokens_are_hits_once_the_load_has_ended(side):
    side.lookups.answer("a", 48)
    side.admit(FakeRequest("a", PROMPT), local=16)
    assert side.tokens() == (54, 0, {"not_stored": 16, "last_block": 6})
    side.scheduler.update_connector_output(received("a"))
    assert side.tokens() == (0, 32, {})
    side.scheduler.update_connector_output(received("a"))
    assert side.tokens() == (0, 0, {})


def test_tokens_of_a_failed_load_are_missed(side):
    side.lookups.answer("a", 64)
    request = FakeRequest("a", PROMPT)
    side.admit(request)
    side.scheduler.update_connector_output(failed("a"))
    assert side.tokens() == (PROMPT, 0, {"last_block": 6, "load_failed": 64})
    side.admit(request)  # computed again: counted before
    assert side.tokens() == (0, 0, {})


def test_load_that_failed_on_another_rank_before_is_missed(side):
    side.lookups.answer("a", 64)
    side.admit(FakeRequest("a", PROMPT))
    side.scheduler.update_connector_output(
        worker_output(KVXferWorkerMetadata(failed_loads=frozenset({"a"})))
    )
    side.scheduler.update_connector_output(received("a"))
    assert side.tokens()[1:] == (0, {"last_block": 6, "load_failed": 64})


def test_tokens_of_an_aborted_load_are_missed(side):
    side.lookups.answer("a", 64)
    request = FakeRequest("a", PROMPT)
    side.admit(request)
    side.scheduler.request_finished(request)
    side.scheduler.update_connector_output(received("a"))
    assert side.tokens() == (PROMPT, 0, {"last_block": 6, "aborted": 64})


@pytest.mark.parametrize(("external", "not_taken"), [(0, 48), (16, 32)])
def test_offer_that_vllm_did_not_take_is_told_apart(side, external, not_taken):
    side.lookups.answer("a", 48)
    side.admit(FakeRequest("a", PROMPT), external=external)
    missed = {"not_taken": not_taken, "not_stored": 16, "last_block": 6}
    assert side.tokens() == (PROMPT, 0, missed)


def test_hit_that_was_not_offered_was_not_worth_it(side):
    side.lookups.answer("a", 48)
    request = FakeRequest("a", PROMPT)
    side.scheduler.get_num_new_matched_tokens(request, 16)
    side.scheduler._requests["a"].offer = None
    side.scheduler.update_state_after_alloc(request, allocated(1), 0)
    missed = {"not_worth": 32, "not_stored": 16, "last_block": 6}
    assert side.tokens() == (PROMPT - 16, 0, missed)


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (Status.TIMED_OUT, "timed_out"),
        (Status.UNSENT, "unsent"),
        (Status.FAILED, "failed"),
        (Status.NOT_READY, "not_ready"),
        (Status.MALFORMED, "malformed"),
    ],
)
def test_lookup_without_an_answer_is_the_reason(side, status, reason):
    side.lookups.script["a"] = [LookupReply(status)]
    side.admit(FakeRequest("a", PROMPT))
    counters = side.counted()
    assert counters[f"lookups/{reason}"] == 1
    assert counters[f"missed_tokens/{reason}"] == BOUNDARY


def test_answer_that_cannot_be_is_refused(side):
    side.lookups.answer("a", 17)
    side.admit(FakeRequest("a", PROMPT))
    counters = side.counted()
    assert counters["lookups/refused"] == 1
    assert counters["missed_tokens/refused"] == BOUNDARY


@pytest.mark.parametrize(
    ("num_tokens", "local", "missed"),
    [
        (15, 0, {"too_short": 15}),
        (16, 0, {"last_block": 16}),
        (PROMPT, BOUNDARY, {"last_block": 6}),
        (BOUNDARY, 48, {"last_block": 16}),
    ],
)
def test_prompts_that_nothing_could_be_loaded_for_are_not_looked_up(
    side, num_tokens, local, missed
):
    side.admit(FakeRequest("a", num_tokens), local=local)
    assert side.lookups.asked == []
    assert side.tokens() == (num_tokens - local, 0, missed)


def test_lookups_that_are_off_are_the_reason():
    side = Side(enable_lookup=False)
    side.admit(FakeRequest("a", PROMPT))
    assert side.tokens() == (PROMPT, 0, {"lookup_off": PROMPT})


def test_request_that_must_not_read_the_cache_is_the_reason(side):
    side.admit(FakeRequest("a", PROMPT, skip_reading_prefix_cache=True))
    assert side.tokens() == (PROMPT, 0, {"not_wanted": PROMPT})


def test_request_that_is_never_admitted_is_not_counted(side):
    side.lookups.answer("a", 48)
    request = FakeRequest("a", PROMPT)
    for _ in range(3):
        side.scheduler.get_num_new_matched_tokens(request, 0)
    side.scheduler.request_finished(request)
    assert side.counted() == {"lookups/hit": 1}


def test_resumed_request_is_not_counted_again(side):
    request = FakeRequest("a", PROMPT)
    side.lookups.answer("a", 0, 48)
    side.admit(request)
    side.counted()
    request.num_tokens += 20
    side.admit(request)
    side.scheduler.update_connector_output(received("a"))
    assert side.tokens() == (0, 0, {})


def test_lookup_takes_as_long_as_its_answer_is_waited_for(side):
    request = FakeRequest("a", PROMPT)
    side.lookups.answer("a", None, None, 48)
    for now in (10.0, 10.25, 10.5):
        side.clock.now = now
        side.scheduler.get_num_new_matched_tokens(request, 0)
    data = side.scheduler.take_stats().data
    assert data["counters"] == {"lookups/hit": 1}
    ((number, total_s),) = data["seconds"]["lookup_seconds"].values()
    assert (number, total_s) == (1, 0.5)


def test_pins_and_saves_put_off_are_told_when_they_change(side):
    scheduler = side.scheduler
    assert scheduler.take_stats() is None
    scheduler._pins.pin(1, [3, 4])
    scheduler._saves.counts["saves_put_off"] += 2
    data = scheduler.take_stats().data
    assert data["counters"] == {"saves_put_off": 2}
    assert data["gauges"] == {"engine/scheduler": {"pinned_blocks": 2.0}}
    assert scheduler.take_stats() is None
    scheduler._pins.note_free({1: 1})
    assert scheduler.take_stats().data["gauges"] == {"engine/scheduler": {"pinned_blocks": 0.0}}
