# SPDX-License-Identifier: Apache-2.0
"""Engines of other tensor-parallel sizes on one store: each loads what another one saved.

All of a pool set ``store_tp`` alike. Comparisons are exact, logprobs included: in these models
each output of a matrix reads one input (``exact_sums``), so that ranks add zeros to one product,
and an engine of four ranks computes, bit by bit, what an engine of one does. With two KV heads,
two of four ranks hold the same one.

What the CPU offers in layouts (vLLM 0.32): attention has LBHNC alone
(``CPUAttentionBackend.supported_kv_cache_layouts``, v1/attention/backends/cpu_attn.py line 75).
Values lie in another order than the cache only under ``value_order: token_major``, as in one pool
here. Latent attention accepts every layout (v1/attention/backend.py line 372), but it views a
layer's cache as one run of tokens (v1/attention/backends/mla/cpu_mla.py line 209), which fails
with the block-outermost ones. The others differ in the stride of the single head; each engine of
the latent pool has its own.
"""

from dataclasses import dataclass

import pytest
import tamper_modes
from engine_checks import assert_loads_matter, compute_again, compute_cold, whole_blocks
from engine_families import FAMILIES, FULL, LATENT, Family, write_family
from engine_harness import EngineSettings
from engine_models import loadable

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


@dataclass(frozen=True)
class Pool:
    """Engines that share a store: one model, one ``store_tp``."""

    family: Family
    sides: tuple[tuple[int, int], ...]
    """Ranks of the engine that saves and of the one that loads, ordered so that each engine is
    started once: two are alive, and the one used last stays."""
    extra: tuple[tuple[str, object], ...] = (("store_tp", 4),)
    connector: str = "tampered_connector"
    layouts: tuple[tuple[int, str], ...] = ()
    """What an engine of so many ranks asks for instead of vLLM's default."""
    one_head_shards: bool = True
    num_window_blocks: int = 0
    """Blocks of sliding windows that are stored for a prompt, besides those of full attention."""

    def num_values(self, prompts):
        """Return how many values are stored for prompts, in two shards each."""
        return 2 * (whole_blocks(prompts) + self.num_window_blocks * len(prompts))

    def settings(self, num_ranks, **common):
        """Return the settings of the pool's engine of so many ranks."""
        layout = dict(self.layouts).get(num_ranks)
        return EngineSettings(
            tensor_parallel=num_ranks,
            besides=self.family.arguments,
            extra=self.extra,
            connector=self.connector,
            environment=(("VLLM_KV_CACHE_LAYOUT", layout),) if layout else (),
            **common,
        )


POOLS = {
    "full": Pool(FULL, sides=((1, 4), (4, 1))),
    "full_token_major": Pool(
        Family(FULL.config | {"num_key_value_heads": 4}),
        sides=((1, 2), (2, 1)),
        extra=(("store_tp", 2), ("value_order", "token_major")),
        one_head_shards=False,
    ),
    "sliding_and_full": Pool(
        FAMILIES["sliding_and_full"],
        sides=((2, 1), (1, 2), (2, 4), (4, 2)),
        num_window_blocks=4,  # two groups with windows of two blocks
    ),
}
LATENT_POOL = Pool(
    LATENT,
    sides=((1, 2), (2, 1)),
    connector="rotating_connector",
    layouts=((2, "LHBNC"),),
)


@pytest.fixture(scope="module")
def shared_store(new_store):
    return new_store()


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    """Return a function that writes a family's checkpoint, once, and returns its folder."""
    folders = {}

    def write(family):
        key = str(family.config)
        if key not in folders:
            folder = tmp_path_factory.mktemp("store-tp")
            folders[key] = write_family(folder, family, exact_sums=True)
        return folders[key]

    return write


def sides_of(pools):
    return [
        pytest.param((pool, *sides), id=f"pool={name}-writer={sides[0]}-reader={sides[1]}")
        for name, pool in pools.items()
        for sides in pool.sides
    ]


@pytest.fixture(scope="module")
def start(engine_pool, model_of, shared_store):
    """Return a function that gives a pool's two engines: the one that saves, and the other."""

    def engines(pool, *sides):
        common = {"model": model_of(pool.family), "store": shared_store.uri}
        return [engine_pool.get(pool.settings(ranks, **common)) for ranks in sides]

    return engines


@pytest.fixture(scope="module", params=sides_of(POOLS))
def sides(request):
    return request.param


def test_engine_loads_all_that_another_saved(start, sides, shared_store, prompts):
    """Prompts that end before, on and after a block's end, and one beyond the window."""
    pool, *_ = sides
    writer, reader = start(*sides)
    batch = [prompts.draw(num_tokens) for num_tokens in (127, 128, 129, 321)]
    cold = compute_cold(writer, shared_store, batch, num_values=pool.num_values(batch))
    warm = reader.generate(batch)
    assert warm.external_hits == sum(loadable(len(prompt)) for prompt in batch)
    assert warm.outputs == cold.outputs
    assert_loads_matter(reader, batch, cold)
    if pool.one_head_shards:
        assert_loads_matter(reader, batch, cold, mode=tamper_modes.SWAP_SHARDS)
    assert_computes_itself(reader, batch, cold)


def test_turns_of_a_conversation_alternate_between_engines(start, sides, shared_store, prompts):
    """The last turn loads blocks that both engines saved."""
    pool, *_ = sides
    one, other = start(*sides)
    first = prompts.draw(200)
    answered = compute_cold(one, shared_store, [first], num_values=pool.num_values([first]))
    more = answered.outputs[0].tokens + prompts.draw(77)
    second = [first + more]
    expected = shared_store.num_values() + pool.num_values([more])
    cold = other.generate(second)
    assert cold.external_hits == loadable(len(first))
    shared_store.wait_for(expected)
    warm = compute_again(one, second)
    assert warm.external_hits == loadable(len(second[0]))
    assert warm.outputs == cold.outputs
    assert_loads_matter(one, second, cold)


@pytest.mark.parametrize("latent_sides", sides_of({"latent": LATENT_POOL}))
def test_engine_goes_on_where_another_left_a_latent_cache(
    start, latent_sides, shared_store, prompts
):
    """The first generated token is left to compute, through the kernel that decoding took.

    All ranks hold the same bytes, of which one saves them.
    """
    writer, reader = start(*latent_sides)
    for num_tokens in (64, 320):
        prompt = prompts.draw(num_tokens)
        cold = compute_cold(writer, shared_store, [prompt])
        shared_store.settle()  # its blocks have 16 tokens where the CPU has no AMX
        decoded = cold.outputs[0]
        longer = [prompt + decoded.tokens[:1]]
        warm = reader.generate(longer, max_tokens=7)
        assert warm.external_hits == num_tokens
        assert warm.outputs[0].tokens == decoded.tokens[1:]
        assert warm.outputs[0].logprobs == decoded.logprobs[1:]
        assert_loads_matter(reader, longer, warm, max_tokens=7)
        assert_computes_itself(reader, [prompt], cold)


def assert_computes_itself(engine, batch, expected):
    """Check that an engine with nothing to load has the outputs of the other: the reference."""
    engine.reset_store()
    own = engine.generate(batch)
    assert own.external_hits == 0
    assert own.outputs == expected.outputs
