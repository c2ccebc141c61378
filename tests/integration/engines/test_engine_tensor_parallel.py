# SPDX-License-Identifier: Apache-2.0
"""Two ranks, each with the shard of its own heads; and one rank that reads both shards."""

import pytest
import tamper_modes
from engine_checks import assert_loads_matter, compute_again, compute_cold, whole_blocks
from engine_models import BLOCK_TOKENS

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
SUM_TOLERANCE = 1e-4
"""Two ranks add partial sums in another order than one: logprobs differ in the last bits."""


@pytest.fixture(scope="module")
def sharded_store(new_store):
    return new_store()


@pytest.fixture(scope="module")
def two_ranks(settings, sharded_store):
    return settings.but(store=sharded_store.uri, tensor_parallel=2)


def test_two_ranks_load_their_own_shards(engine_pool, two_ranks, sharded_store, prompts):
    engine = engine_pool.get(two_ranks)
    batch = [prompts.draw(4 * BLOCK_TOKENS + offset) for offset in (-1, 0, 1)]
    cold = compute_cold(engine, sharded_store, batch, num_values=2 * whole_blocks(batch))
    warm = compute_again(engine, batch)
    assert warm.external_hits == (3 + 3 + 4) * BLOCK_TOKENS
    assert warm.outputs == cold.outputs
    assert_loads_matter(engine, batch, cold)
    assert_loads_matter(engine, batch, cold, mode=tamper_modes.SWAP_SHARDS)


def test_one_rank_loads_what_two_ranks_saved(engine_pool, two_ranks, sharded_store, prompts):
    batch = [prompts.draw(4 * BLOCK_TOKENS + 1) for _ in range(2)]
    writer = engine_pool.get(two_ranks)
    cold = compute_cold(writer, sharded_store, batch, num_values=2 * whole_blocks(batch))
    reader = engine_pool.get(one_rank_of_a_pool_of_two(two_ranks))
    warm = reader.generate(batch)
    assert warm.external_hits == 8 * BLOCK_TOKENS
    assert_outputs_close(warm, cold)
    assert_loads_matter(reader, batch, warm)
    assert_loads_matter(reader, batch, warm, mode=tamper_modes.SWAP_SHARDS)


def test_two_ranks_load_what_one_rank_saved(engine_pool, two_ranks, sharded_store, prompts):
    batch = [prompts.draw(4 * BLOCK_TOKENS + 1) for _ in range(2)]
    writer = engine_pool.get(one_rank_of_a_pool_of_two(two_ranks))
    cold = compute_cold(writer, sharded_store, batch, num_values=2 * whole_blocks(batch))
    reader = engine_pool.get(two_ranks)
    warm = reader.generate(batch)
    assert warm.external_hits == 8 * BLOCK_TOKENS
    assert_outputs_close(warm, cold)
    assert_loads_matter(reader, batch, warm)


def one_rank_of_a_pool_of_two(two_ranks):
    """Return the settings of an engine of one rank that stores two shards for each block."""
    return two_ranks.but(tensor_parallel=1, extra=(("store_tp", 2),))


def assert_outputs_close(one, other):
    """Check that tokens are equal, and the logprobs of the tokens nearly."""
    for a, b in zip(one.outputs, other.outputs, strict=True):
        assert a.tokens == b.tokens
        assert a.token_logprobs() == pytest.approx(b.token_logprobs(), abs=SUM_TOLERANCE)
