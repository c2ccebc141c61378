# SPDX-License-Identifier: Apache-2.0
"""What engines of several ranks, kinds and children count: each thing once."""

import pytest
from sched_configs import KINDS, kvxfer_transfer
from test_sched_multi import multi

from kvxfer.observe.stats import KVXferStats

VALUE_BYTES = 16 * 2 * 4 * 2 * 4 * 2  # tokens, K and V, bytes, heads, head size, layers


@pytest.fixture
def measured(make):
    """Return a function that makes an engine, and one that adds up what it has sent so far."""

    def make_measured(**options):
        engine, sent = make(**options), []
        update = engine.vllm.update_from_output

        def update_from_output(*args):
            by_client = update(*args)
            sent.extend(out.scheduler_stats for out in by_client.values())
            return by_client

        engine.vllm.update_from_output = update_from_output

        def counters():
            """Return the counters by series, of the children of a MultiConnector together."""
            total = KVXferStats()
            for stats in sent:
                data = stats.kv_connector_stats if stats is not None else None
                if data:
                    total.aggregate(KVXferStats(data.get("KVXferConnector", data)))
            return total.data["counters"]

        return engine, counters

    return make_measured


def flush(engine, prompt):
    """Serve a prompt too short to be looked up, so that everything is told."""
    engine.serve("flush", prompt(5))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_ranks_count_their_own_bytes_and_the_engine_its_tokens_once(
    measured, make, prompt, kind, num_ranks
):
    tokens = prompt(70)
    saver, saved = measured(num_ranks=num_ranks, **kind)
    saver.serve("a", tokens)
    flush(saver, prompt)
    found = saved()
    assert found["store_keys/put/ok"] == 4 * num_ranks
    assert found["store_bytes/put"] == 4 * VALUE_BYTES
    assert found["jobs/save/done"] == num_ranks * len(saver.saves)
    assert found["lookups/miss"] == 1
    assert found["missed_tokens/not_stored"] == 64
    loader, loaded = measured(num_ranks=num_ranks, **kind)
    loader.serve("a", tokens)
    flush(loader, prompt)
    found = loaded()
    assert found["store_keys/get/ok"] == 4 * num_ranks
    assert found["store_bytes/get"] == 4 * VALUE_BYTES
    assert found["jobs/load/done"] == num_ranks
    assert found["lookups/hit"] == 1
    assert found["hit_tokens"] == 64
    assert found["wanted_tokens"] == 70 + 5
    missed = {k: v for k, v in found.items() if k.startswith("missed_tokens/")}
    assert missed == {"missed_tokens/last_block": 6, "missed_tokens/too_short": 5}


@pytest.mark.parametrize("windowed", [False, True])
def test_tokens_of_a_load_that_fails_on_one_rank_are_missed(measured, make, prompt, windowed):
    tokens = prompt(70)
    make(num_ranks=2, windowed=windowed).serve("a", tokens)
    engine, counters = measured(num_ranks=2, windowed=windowed)
    engine.ranks[1].switches.lost_values = (1,)
    engine.serve("a", tokens)
    flush(engine, prompt)
    found = counters()
    assert found["jobs/load/done"] == found["jobs/load/failed"] == 1
    assert found["missed_tokens/load_failed"] == 64
    assert "hit_tokens" not in found
    assert found["store_keys/get/missing"] == 1


def test_failed_puts_are_counted_by_rank(measured, prompt):
    engine, counters = measured(num_ranks=2)
    engine.ranks[1].switches.puts_fail = True
    engine.serve("a", prompt(70))
    flush(engine, prompt)
    found = counters()
    assert found["jobs/save/done"] == found["jobs/save/failed"]
    assert found["store_keys/put/ok"] == found["store_keys/put/failed"] == 4


def test_hit_and_missed_tokens_add_up_to_those_wanted(measured, prompt):
    engine, counters = measured(num_ranks=2, num_blocks=24)
    shared = prompt(48)
    names = [f"request-{i}" for i in range(12)]
    for idx, name in enumerate(names):
        engine.add(name, shared[: 16 * (idx % 4)] + prompt(3 + 7 * idx), max_tokens=3)
    engine.run(*names)
    engine.settle()
    assert engine.vllm.reset_prefix_cache()
    for idx, name in enumerate(names):
        engine.add(f"{name}-again", engine.requests[name].prompt_token_ids, max_tokens=3)
        if idx % 3 == 0:
            engine.step()
            engine.abort(f"{name}-again")
    engine.run(*(f"{name}-again" for name in names))
    engine.settle()
    flush(engine, prompt)
    found = counters()
    missed = sum(v for k, v in found.items() if k.startswith("missed_tokens/"))
    assert found["hit_tokens"] > 0
    assert found["hit_tokens"] + missed == found["wanted_tokens"]


def test_children_of_a_multi_connector_count_for_themselves(measured, make, prompt, tmp_path):
    stores = [f"lmdb://{tmp_path}/{name}?capacity=32MiB" for name in ("first", "second")]
    tokens = prompt(70)
    make(stores[1]).serve("a", tokens)
    engine, counters = measured(transfer=multi(*map(kvxfer_transfer, stores)), num_ranks=1)
    engine.serve("a", tokens)
    flush(engine, prompt)
    found = counters()
    assert found["lookups/miss"] == found["lookups/hit"] == 1
    assert found["hit_tokens"] == 64
    assert found["missed_tokens/not_stored"] == 64
    assert found["store_keys/put/ok"] == 4, "the child that had nothing saves"
    assert found["store_keys/get/ok"] == 4
    assert found["wanted_tokens"] == 2 * 75
