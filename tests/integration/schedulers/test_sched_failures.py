# SPDX-License-Identifier: Apache-2.0
"""A store that says yes and then fails: one failed load, and what vLLM's policy makes of it."""

import pytest

from kvxfer.errors import StoreError


def lose(switches):
    switches.lost_values = (2,)


def break_(switches):
    switches.get_error = StoreError("made up")


FAILURES = {"lost": lose, "broken": break_}


@pytest.fixture(params=[1, 2], ids="ranks={}".format)
def num_ranks(request):
    return request.param


@pytest.fixture
def failing(make, prompt, num_ranks):
    """Return an engine and tokens that are a hit there, of which the last rank's load fails."""
    tokens = prompt(70)

    def failing(how, *, windowed=False, **options):
        make(num_ranks=num_ranks, windowed=windowed).serve("a", tokens)
        engine = make(num_ranks=num_ranks, windowed=windowed, **options)
        FAILURES[how](engine.ranks[-1].switches)
        return engine, tokens

    return failing


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("how", "valid"), [("lost", 32), ("broken", 0)])
def test_one_group_goes_on_from_the_valid_prefix(failing, how, valid, asynchronous):
    engine, tokens = failing(how, asynchronous=asynchronous)
    engine.serve("a", tokens)
    assert first_computed(engine, "a") == valid
    assert engine.reported["received", "a"] == 1
    assert engine.reported["failed", "a"] == 0
    assert sum(n for (kind, _), n in engine.reported.items() if kind == "bad block") == (
        4 - valid // 16
    )
    engine.assert_generated("a")
    engine.assert_empty()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("how", FAILURES)
def test_several_groups_fail_the_whole_request_once(failing, how, asynchronous):
    engine, tokens = failing(how, windowed=True, asynchronous=asynchronous)
    engine.serve("a", tokens)
    assert first_computed(engine, "a") == 0
    assert engine.reported["received", "a"] == engine.reported["failed", "a"] == 1
    assert not any(kind == "bad block" for kind, _ in engine.reported)
    engine.assert_generated("a")
    engine.assert_empty()


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("how", FAILURES)
def test_policy_fail_ends_the_request_with_an_error(failing, how, windowed):
    engine, tokens = failing(how, windowed=windowed, policy="fail")
    engine.serve("a", tokens)
    assert engine.finished["a"] == "error"
    assert engine.generated["a"] == []
    engine.assert_empty()


@pytest.mark.parametrize("windowed", [False, True])
def test_a_request_has_at_most_one_failed_load_however_often_it_is_preempted(
    make, prompt, windowed
):
    shared = prompt(48)
    prompts = {name: [*shared, *prompt(4)] for name in "abc"}
    saver = make(windowed=windowed)
    for name, tokens in prompts.items():
        saver.serve(name, tokens)
    engine = make(windowed=windowed, num_blocks=20 if windowed else 12)
    break_(engine.ranks[0].switches)
    for name, tokens in prompts.items():
        engine.add(name, tokens, max_tokens=60)
    engine.run(*prompts)
    engine.settle()
    assert max(request.num_preemptions for request in engine.requests.values()) > 0
    for name in prompts:
        assert len(engine.loaded(name)) <= 1
        engine.assert_generated(name)
    engine.assert_empty()


@pytest.mark.parametrize("windowed", [False, True])
def test_load_past_its_deadline_is_recomputed_while_the_call_is_stuck(make, prompt, windowed):
    tokens = prompt(70)
    make(windowed=windowed).serve("a", tokens)
    engine = make(windowed=windowed)
    engine.ranks[0].switches.gets.shut()
    engine.add("a", tokens)
    engine.until(lambda: engine.ranks[0].switches.calls["get"] > 0)
    engine.clock.skip(100)
    engine.run("a")
    engine.settle()
    engine.assert_generated("a")
    engine.assert_empty()


def test_what_a_failed_load_has_not_brought_is_saved_again(make, prompt, store_uri):
    tokens = prompt(70)
    make().serve("a", tokens)
    engine = make()
    lose(engine.ranks[0].switches)
    request = engine.serve("a", tokens)
    assert engine.saved_blocks("a") == [bytes(each) for each in request.block_hashes[:4]]
    assert engine.assert_store_is_true(store_uri) == 4


def first_computed(engine, name):
    """Return how many tokens counted as computed when the request was first scheduled."""
    return next(
        new.num_computed_tokens
        for output in engine.outputs
        for new in output.scheduled_new_reqs
        if new.req_id == name
    )
