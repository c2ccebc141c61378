# SPDX-License-Identifier: Apache-2.0
"""Two pipeline stages: each stores its own layers, and a hit needs the chunks of both."""

import pytest
from engine_checks import assert_loads_matter, compute_again, compute_cold, whole_blocks
from engine_models import loadable

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def stages_store(new_store):
    return new_store()


@pytest.fixture
def engine(engine_pool, settings, stages_store):
    return engine_pool.get(
        settings.but(pipeline_parallel=2, store=stages_store.uri, core_process=True)
    )


def test_warm_outputs_equal_cold_ones_over_two_stages(engine, stages_store, prompts):
    batch = [prompts.draw(num_tokens) for num_tokens in (127, 128, 129, 300)]
    cold = compute_cold(engine, stages_store, batch, num_values=2 * whole_blocks(batch))
    warm = compute_again(engine, batch)
    assert warm.external_hits == sum(loadable(len(prompt)) for prompt in batch)
    assert warm.outputs == cold.outputs
    assert_loads_matter(engine, batch, cold)


def test_reset_of_the_connector_empties_the_store_of_both_stages(engine, stages_store, prompts):
    batch = [prompts.draw(129)]
    cold = compute_cold(engine, stages_store, batch, num_values=2 * whole_blocks(batch))
    engine.reset_store()
    assert stages_store.num_values() == 0
    again = engine.generate(batch)
    assert again.external_hits == 0
    assert again.outputs == cold.outputs
    stages_store.wait_for(2 * whole_blocks(batch))
