# SPDX-License-Identifier: Apache-2.0
"""Saves under vLLM's schedulers: whole hashed blocks, once, whoever samples how far ahead."""

import pytest
from sched_configs import BLOCK, KINDS


@pytest.fixture(params=KINDS, ids="kind={}".format)
def kind(request):
    return KINDS[request.param]


@pytest.mark.parametrize("runner", [1, 2])
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("windowed", [False, True])
def test_a_second_engine_goes_on_from_what_the_first_has_saved(
    make, prompt, store_uri, kind, runner, num_ranks, windowed
):
    tokens = prompt(70)
    options = {"runner": runner, "num_ranks": num_ranks, "windowed": windowed, **kind}
    for loads in ([], [(0, 64)]):
        engine = make(**options)
        engine.serve("a", tokens, max_tokens=20)
        assert engine.loaded("a") == loads
        engine.assert_generated("a")
        engine.assert_empty()
    assert engine.assert_store_is_true(store_uri) > 0


@pytest.mark.parametrize("save_decode_cache", [False, True])
def test_each_hashed_block_is_saved_once_and_in_order(
    make, prompt, store_uri, kind, save_decode_cache
):
    engine = make(save_decode_cache=save_decode_cache, **kind)
    request = engine.serve("a", prompt(40), max_tokens=64)
    num_blocks = 96 // BLOCK if save_decode_cache else 32 // BLOCK
    assert engine.saved_blocks("a") == [bytes(h) for h in request.block_hashes[:num_blocks]]
    assert engine.assert_store_is_true(store_uri) == num_blocks


def test_a_block_is_not_saved_before_its_last_token_is_known(make, prompt, kind):
    engine = make(save_decode_cache=True, **kind)
    request = engine.add("a", prompt(40), max_tokens=64)
    while "a" not in engine.finished:
        engine.step()
        assert len(engine.saved_blocks("a")) * BLOCK <= request.num_tokens


def test_blocks_of_generated_tokens_are_loaded_by_a_longer_prompt(make, prompt, kind):
    tokens = prompt(40)
    saver = make(save_decode_cache=True, **kind)
    request = saver.serve("a", tokens, max_tokens=64)
    loader = make(**kind)
    loader.serve("b", request.all_token_ids[:100])
    assert loader.loaded("b") == [(0, 96)]
    loader.assert_generated("b")


def test_consumer_loads_and_saves_nothing(make, prompt, store_uri):
    tokens = prompt(70)
    make().serve("a", tokens)
    consumer = make(role="kv_consumer")
    consumer.serve("a", tokens)
    consumer.serve("b", prompt(70))
    assert consumer.loaded("a") == [(0, 64)]
    assert consumer.saves == []


@pytest.mark.parametrize("windowed", [False, True])
def test_blocks_are_not_used_again_before_the_slower_rank_has_packed_them(
    make, prompt, store_uri, windowed
):
    engine = make(num_ranks=2, num_blocks=30, windowed=windowed, lookup_async=False)
    slow = engine.ranks[1]
    slow.switches.puts.shut()
    for name in "abcdef":  # the first save is stuck in its put, those behind it wait unpacked
        engine.add(name, prompt(70), max_tokens=2)
        engine.run(name)
        engine.until(lambda: not engine.ranks[0].num_live_jobs, step=False)
        engine.step()
    assert slow.num_live_jobs > 1
    slow.switches.mend()
    engine.settle()
    engine.assert_empty()
    assert engine.assert_store_is_true(store_uri) > 0


@pytest.mark.parametrize("windowed", [False, True])
def test_flipped_bit_of_a_loaded_value_is_seen_by_these_tests(make, prompt, windowed):
    """The control: without it a check that never fails would pass for one."""
    tokens = prompt(70)
    make(windowed=windowed).serve("a", tokens)
    loader = make(windowed=windowed)
    loader.ranks[0].switches.flips_a_bit = True
    with pytest.raises(AssertionError, match="lacks the KV of tokens"):
        loader.serve("a", tokens)
