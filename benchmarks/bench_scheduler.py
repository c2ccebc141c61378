# SPDX-License-Identifier: Apache-2.0
"""What the scheduler side adds to a step of 64 running requests, each 2,048 tokens long.

Measured is all that vLLM calls in such a step: ``build_connector_meta``,
``update_connector_output``, with the reports on the saves of the step before, and ``take_events``.
Requests, hashes, block tables and the block pool are vLLM's own.
"""

from types import SimpleNamespace

import pytest


@pytest.fixture
def steps():
    pytest.importorskip("vllm")
    import scheduler_steps

    return scheduler_steps


tells = pytest.mark.parametrize("tells", [False, True], ids="kv_events={}".format)


@tells
@pytest.mark.benchmark(group="scheduler.step")
def bench_step_without_a_completed_block(benchmark, steps, tells):
    """Goal: 50 us."""
    running = steps.Running(tells)
    running.grow(4)
    running.note(running.step(running.output(4, steps.PROMPT + 4)))
    metadata = benchmark(running.step, running.output(1, steps.PROMPT + 5))
    assert metadata.saves == ()


@tells
@pytest.mark.benchmark(group="scheduler.step")
def bench_step_in_which_every_request_completes_a_block(benchmark, steps, tells):
    """Goal: 200 us."""
    running = steps.Running(tells)
    state = SimpleNamespace(metadata=None, computed=steps.PROMPT, num_told=0)

    def complete_a_block():
        if state.metadata is not None:
            running.note(state.metadata)
            state.num_told = steps.NUM_REQUESTS * tells
        running.grow(steps.BLOCK)
        state.computed += steps.BLOCK
        return (running.output(1, state.computed),), {}

    def step(output):
        state.metadata = running.step(output)

    benchmark.pedantic(step, setup=complete_a_block, rounds=steps.ROUNDS)
    assert sum(len(save.chunks[0]) for save in state.metadata.saves) == steps.NUM_REQUESTS
    assert running.side._pins.num_blocks == steps.NUM_REQUESTS, "those before have been released"
    assert len(running.told) == state.num_told, "of those before, if there was a step before"
