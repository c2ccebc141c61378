# SPDX-License-Identifier: Apache-2.0
"""What the two model runners do differently: order of calls, and how preempted requests resume."""

from unittest import mock

import pytest
from sched_configs import KINDS

CALLS = (
    "handle_preemptions",
    "bind_connector_metadata",
    "start_load_kv",
    "finish_forward",
    "wait_for_save",
    "get_transfer_results",
    "build_connector_worker_meta",
    "clear_connector_metadata",
)
ORDERS = {
    "v1": ({"runner": 1}, [0, 1, 2, 4, 5, 6, 7]),
    "v1_drafts": ({"runner": 1, "num_spec_tokens": 2}, [0, 1, 2, 5, 6, 4, 7]),
    "v2": ({"runner": 2}, [0, 1, 3, 2, 4, 5, 6, 7]),
}


@pytest.mark.parametrize("order", ORDERS)
def test_runner_calls_the_worker_side_in_its_own_order(make, prompt, order):
    options, wanted = ORDERS[order]
    tokens = prompt(70)
    make(**options).serve("a", tokens)
    engine = make(**options)
    engine.add("a", tokens)
    engine.step()
    connector, seen = engine.ranks[0].connector, []
    with mock.patch.multiple(
        connector,
        **{name: _noting(seen, name, getattr(connector, name)) for name in CALLS},
    ):
        engine.until(lambda: engine.outputs[-1].num_scheduled_tokens)
    first = len(seen) - 1 - seen[::-1].index("handle_preemptions")
    assert seen[first:] == [CALLS[idx] for idx in wanted]
    engine.run("a")
    engine.settle()
    engine.assert_generated("a")
    engine.assert_empty()


def _noting(seen, name, call):
    def noting(*args, **kwargs):
        seen.append(name)
        return call(*args, **kwargs)

    return noting


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("runner", [1, 2])
def test_preempted_request_resumes_with_the_blocks_that_it_has_then(
    make, prompt, store_uri, runner, kind
):
    engine = make(num_blocks=12, runner=runner, save_decode_cache=True, **KINDS[kind])
    for name in "abc":
        engine.add(name, prompt(40), max_tokens=60)
    engine.run("a", "b", "c")
    engine.settle()
    assert resumed_by(engine) == {runner}
    for name in "abc":
        engine.assert_generated(name)
        saved = engine.saved_blocks(name)
        assert len(saved) == len(set(saved))
    engine.assert_empty()
    engine.assert_store_is_true(store_uri)


def resumed_by(engine):
    """Return the runners, by number, in whose way a request has been resumed."""
    ways = set()
    for output in engine.outputs:
        if output.scheduled_cached_reqs.resumed_req_ids:
            ways.add(1)
        if any(new.prefill_token_ids and _resumed(new) for new in output.scheduled_new_reqs):
            ways.add(2)
    return ways


def _resumed(new):
    return len(new.prefill_token_ids) > len(new.prompt_token_ids)


@pytest.mark.parametrize("runner", [1, 2])
def test_preempted_request_loads_its_own_generated_blocks(make, prompt, runner):
    """Its blocks have been evicted: it resumes with a load, over more than its prompt."""
    engine = make(
        num_blocks=16,
        runner=runner,
        save_decode_cache=True,
        lookup_async=False,
        max_pinned_blocks=8,
    )
    for name in "abcd":
        engine.add(name, prompt(48), max_tokens=70)
    while not set("abcd") <= set(engine.finished):
        engine.step()
        engine.until(lambda: not engine.num_live_jobs, step=False)
    engine.settle()
    assert max(load.hit_tokens for load in engine.loads) > 48
    assert resumed_by(engine) == {runner}
    for name in "abcd":
        engine.assert_generated(name)
    engine.assert_empty()
