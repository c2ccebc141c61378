# SPDX-License-Identifier: Apache-2.0
"""Requests end at any point of a load: blocks come back, and nothing of them is left."""

import threading

import pytest

RANKS = pytest.mark.parametrize("num_ranks", [1, 2])
WINDOWED = pytest.mark.parametrize("windowed", [False, True])


@pytest.fixture
def tokens(prompt):
    return prompt(70)


@pytest.fixture
def stored(make, tokens):
    """Return an engine in which ``tokens`` are a hit; nothing is in its own cache."""

    def stored(**options):
        make(**{k: v for k, v in options.items() if k in ("num_ranks", "windowed")}).serve(
            "earlier", tokens
        )
        return make(**options)

    return stored


def plan_load(engine, name="a"):
    """Step until a load is planned; the plan has not been run."""
    while True:
        output = engine.plan()
        if engine.loaded(name):
            return output
        engine.perform(output)
        threading.Event().wait(0.001)


@RANKS
@WINDOWED
def test_abort_in_the_step_of_the_load(stored, tokens, num_ranks, windowed):
    engine = stored(num_ranks=num_ranks, windowed=windowed)
    engine.add("a", tokens)
    output = plan_load(engine)
    engine.abort("a")
    engine.perform(output)
    engine.settle()
    assert engine.reported["received", "a"] == 1
    engine.assert_empty()


@RANKS
@WINDOWED
def test_abort_during_a_load_holds_the_blocks_until_every_rank_has_ended(
    stored, tokens, num_ranks, windowed
):
    engine = stored(num_ranks=num_ranks, windowed=windowed)
    stuck = engine.ranks[-1]
    stuck.switches.gets.shut()
    engine.add("a", tokens)
    engine.until(lambda: stuck.switches.calls["get"] > 0)
    engine.abort("a")
    engine.until(lambda: engine.num_live_jobs == 1)
    for _ in range(5):
        engine.step()
    assert engine.pool.get_num_free_blocks() < engine.num_blocks - 1
    assert engine.vllm.has_requests(), "vLLM would stop stepping"
    stuck.switches.mend()
    engine.settle()
    assert engine.reported["received", "a"] == 1
    engine.assert_empty()


def test_abort_while_one_rank_has_yet_to_report(stored, tokens):
    engine = stored(num_ranks=2)
    engine.ranks[1].hold_reports()
    engine.add("a", tokens)
    engine.until(lambda: engine.loaded("a") and not engine.num_live_jobs)
    engine.step()
    engine.abort("a")
    engine.step()
    assert engine.pool.get_num_free_blocks() < engine.num_blocks - 1
    engine.ranks[1].release_reports()
    engine.settle()
    engine.assert_empty()


@WINDOWED
def test_load_that_is_aborted_and_fails_too_is_forgotten(stored, tokens, windowed):
    engine = stored(num_ranks=2, windowed=windowed)
    engine.ranks[0].switches.lost_values = (0,)
    engine.add("a", tokens)
    output = plan_load(engine)
    engine.abort("a")
    engine.perform(output)
    engine.settle()
    engine.assert_empty()
    engine.ranks[0].switches.mend()
    engine.serve("a", tokens)
    assert len(engine.loaded("a")) == 2, "a new request of that id may load"
    engine.assert_generated("a")


def test_stuck_load_of_an_aborted_request_ends_by_its_deadline(stored, tokens):
    engine = stored()
    engine.ranks[0].switches.gets.shut()
    engine.add("a", tokens)
    engine.until(lambda: engine.ranks[0].switches.calls["get"] > 0)
    engine.abort("a")
    engine.clock.skip(100)
    engine.settle()
    engine.assert_empty()


@pytest.mark.parametrize("lookup_async", [False, True])
def test_abort_before_blocks_are_allocated(stored, tokens, prompt, lookup_async):
    engine = stored(num_blocks=8, lookup_async=lookup_async)
    engine.add("big", prompt(90), max_tokens=20)
    engine.step()
    engine.add("a", tokens)
    engine.until(lambda: engine.ours._requests.get("a") is not None and _offered(engine, "a"))
    assert engine.loaded("a") == []
    engine.abort("a")
    engine.run("big")
    engine.settle()
    engine.assert_empty()


def _offered(engine, name):
    return engine.ours._requests[name].offer is not None


def test_abort_twice_and_of_unknown_requests(stored, tokens):
    engine = stored()
    engine.add("a", tokens)
    engine.abort("nobody")
    engine.step()
    engine.abort("a", "nobody")
    engine.abort("a")
    engine.settle()
    engine.abort("a")
    engine.assert_empty()


def test_id_is_used_again_after_each_kind_of_end(stored, tokens, prompt):
    engine = stored()
    for ends_early in (True, False, True, False):
        engine.add("a", tokens)
        engine.step()
        if ends_early:
            engine.abort("a")
        engine.run("a")
        engine.settle()
        engine.assert_empty()
        engine.serve("a", prompt(50))
        engine.assert_generated("a")
        engine.assert_empty()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_abort_of_a_running_request_whose_blocks_are_being_saved(make, prompt, asynchronous):
    engine = make(asynchronous=asynchronous, save_decode_cache=True)
    engine.ranks[0].switches.puts.shut()
    engine.add("a", prompt(70), max_tokens=100)
    engine.until(lambda: engine.ranks[0].switches.calls["put"] > 0)
    engine.abort("a")
    engine.step()
    engine.ranks[0].switches.mend()
    engine.settle()
    engine.assert_empty()


def test_preempted_request_can_be_aborted(make, prompt):
    engine = make(num_blocks=10)
    for name in "ab":
        engine.add(name, prompt(40), max_tokens=80)
    engine.until(lambda: any(r.num_preemptions for r in engine.requests.values()))
    (preempted,) = (n for n, r in engine.requests.items() if r.num_preemptions)
    engine.abort(preempted)
    engine.run(*"ab")
    engine.settle()
    engine.assert_empty()


def test_a_thousand_aborted_lookups_leave_every_table_empty(stored, tokens):
    engine = stored()
    for number in range(1000):
        engine.add(f"r{number}", [2 + number % 50, *tokens], max_tokens=1)
    engine.step()
    assert engine.ours._lookups.num_open > 0
    engine.abort(*[f"r{number}" for number in range(1000)])
    engine.settle()
    engine.assert_empty()
    assert engine.ranks[0].workers[0]._server._reset_thread is None
    engine.serve("a", tokens)
    assert engine.loaded("a") == [(0, 64)]
    engine.assert_generated("a")
