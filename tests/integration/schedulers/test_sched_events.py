# SPDX-License-Identifier: Apache-2.0
"""KV events under vLLM's schedulers; the reference is what vLLM tells of its own cache."""

from collections import Counter

import pytest
import sched_engine
from sched_configs import BLOCK, KINDS
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvxfer.stores import open_store

MEDIUM = "LMDB"


@pytest.fixture
def published(make, monkeypatch):
    """Return a function that makes an engine with KV events, and the list of what it publishes."""
    make_config = sched_engine.make_vllm_config

    def with_events(transfer, **options):
        config = make_config(transfer, **options)
        config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        return config

    monkeypatch.setattr(sched_engine, "make_vllm_config", with_events)

    def make_published(**options):
        engine, events = make(**options), []
        engine.vllm.kv_event_publisher.publish = lambda batch: events.extend(batch.events)
        return engine, events

    return make_published


def of_block(event, idx):
    """Return what an event says of one of its blocks, but for where it lies."""
    size, parents = event.block_size, [event.parent_block_hash, *event.block_hashes]
    return (
        event.block_hashes[idx],
        parents[idx],
        tuple(event.token_ids[idx * size : (idx + 1) * size]),
        size,
        event.lora_id,
        event.lora_name,
        event.extra_keys[idx] if event.extra_keys else None,
        event.group_idx,
        event.kv_cache_spec_kind,
        event.kv_cache_spec_sliding_window,
    )


def stored(events, medium):
    """Return {(group, hash): what is said of the block}, and how many blocks were told of."""
    told = [
        of_block(event, idx)
        for event in events
        if isinstance(event, BlockStored) and event.medium == medium
        for idx in range(len(event.block_hashes))
    ]
    return {(block[7], block[0]): block for block in told}, len(told)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_stored_blocks_are_told_of_once_as_vllm_tells_of_its_own(
    published, prompt, kind, num_ranks
):
    engine, events = published(num_ranks=num_ranks, save_decode_cache=True, **kind)
    engine.serve("a", prompt(70), max_tokens=30, cache_salt="salt", salt=b"salt")
    engine.serve("b", prompt(40), max_tokens=4)
    ours, num_ours = stored(events, MEDIUM)
    theirs, _ = stored(events, "GPU")
    saved = [h for name in "ab" for h in engine.saved_blocks(name)]
    assert num_ours == len(ours) == len(saved) >= 5 + 2
    assert ours == {key: theirs[key] for key in ours}
    assert {block_hash for _, block_hash in ours} == set(map(maybe_convert_block_hash, saved))
    assert {e.locality for e in events if e.medium == MEDIUM} == {"LOCAL"}
    assert not engine.vllm.connector.has_pending_push_work()


def test_blocks_of_windows_are_told_of_by_their_group(published, prompt):
    engine, events = published(windowed=True)
    engine.serve("a", prompt(150))
    ours, num_ours = stored(events, MEDIUM)
    theirs, _ = stored(events, "GPU")
    assert {group for group, _ in ours} == {0, 1}
    assert num_ours == len(ours) == sum(len(c) for save in engine.saves for c in save.chunks)
    assert ours == {key: theirs[key] for key in ours}


def test_block_is_told_of_when_the_last_rank_has_stored_it(published, prompt):
    engine, events = published(num_ranks=2)
    slow = engine.ranks[1]
    slow.switches.puts.shut()
    engine.add("a", prompt(70), max_tokens=2)
    engine.run("a")
    engine.until(lambda: not engine.ranks[0].num_live_jobs)
    engine.until(lambda: engine.ours._pins.num_jobs == 0)
    assert stored(events, MEDIUM) == ({}, 0)
    assert engine.vllm.connector.has_pending_push_work(), "steps go on until the event is out"
    slow.switches.mend()
    engine.settle()
    assert stored(events, MEDIUM)[1] == 4
    assert not engine.vllm.connector.has_pending_push_work()


def test_save_that_failed_on_one_rank_is_not_told_of(published, prompt):
    engine, events = published(num_ranks=2)
    engine.ranks[1].switches.puts_fail = True
    engine.serve("a", prompt(70))
    assert stored(events, MEDIUM) == ({}, 0)
    engine.ranks[1].switches.mend()
    engine.serve("b", prompt(40))
    assert stored(events, MEDIUM)[1] == 2


def test_reset_removes_what_was_told_of(published, prompt):
    engine, events = published(num_ranks=2)
    engine.serve("a", prompt(70))
    told, _ = stored(events, MEDIUM)
    events.clear()
    assert engine.vllm.reset_prefix_cache(reset_connector=True)
    engine.serve("b", prompt(20))
    removed = [
        (event.group_idx, block_hash)
        for event in events
        if isinstance(event, BlockRemoved) and event.medium == MEDIUM
        for block_hash in event.block_hashes
    ]
    assert removed == list(told)
    events.clear()
    assert engine.vllm.reset_prefix_cache(reset_connector=True)
    engine.serve("c", prompt(5))
    assert [type(e) for e in events] == [AllBlocksCleared, BlockRemoved], "that of b, and no more"


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("windowed", [False, True])
def test_events_follow_a_store_that_evicts(published, prompt, tmp_path, num_ranks, windowed):
    uri = f"lmdb://{tmp_path}/small?capacity=1MiB&lease_s=0"
    engine, events = published(uri=uri, num_ranks=num_ranks, windowed=windowed)
    for idx in range(80 if windowed else 40):
        engine.serve(f"request-{idx}", prompt(100), max_tokens=1)
    engine.serve("last", prompt(5))
    told = set()
    for event in (event for event in events if getattr(event, "medium", None) == MEDIUM):
        blocks = {(event.group_idx, block_hash) for block_hash in event.block_hashes}
        told = told | blocks if isinstance(event, BlockStored) else told - blocks
    assert any(isinstance(e, BlockRemoved) and e.medium == MEDIUM for e in events)
    whole = whole_blocks(engine, uri)
    assert told <= whole, "a router would send requests for what is gone"
    # A block that one rank lost while another was about to store it is not told of: be it so.
    assert len(told) > 0.9 * len(whole)


def whole_blocks(engine, uri):
    """Return (group, hash) of every block of which a store has the value of each rank."""
    store = open_store(uri)
    keys = {value.key for value in store.scan(b"")}
    store.close()
    shards = Counter()
    for rank in engine.ranks:
        for spaces in rank.workers[0]._spaces.held.values():
            for space in spaces:
                shards.update(
                    (space.group, maybe_convert_block_hash(bytes.fromhex(key[-64:].decode())))
                    for key in keys
                    if key.startswith(space.prefix)
                )
    return {block for block, number in shards.items() if number == len(engine.ranks)}


def test_value_that_a_load_misses_removes_its_block(published, prompt):
    engine, events = published()
    tokens = prompt(70)
    engine.serve("a", tokens)
    events.clear()
    engine.vllm.reset_prefix_cache()
    engine.ranks[0].switches.lost_values = (1,)
    engine.serve("again", tokens)
    removed = [e for e in events if isinstance(e, BlockRemoved) and e.medium == MEDIUM]
    second = maybe_convert_block_hash(engine.requests["a"].block_hashes[1])
    assert [event.block_hashes for event in removed] == [[second]]


def test_reset_that_one_rank_cannot_do_tells_of_no_removal(published, prompt):
    engine, events = published(num_ranks=2, reset_timeout_s=0.2)
    engine.serve("a", prompt(70))
    engine.ranks[1].switches.puts.shut()
    engine.add("b", prompt(70), max_tokens=2)
    engine.run("b")
    engine.until(lambda: engine.ours._pins.num_jobs == 0)
    events.clear()
    assert not engine.vllm.reset_prefix_cache(reset_connector=True)
    engine.ranks[1].switches.mend()
    engine.settle()
    engine.serve("c", prompt(5))
    assert not [e for e in events if getattr(e, "medium", None) == MEDIUM]


def test_without_kv_events_nothing_is_gathered(make, prompt):
    engine = make()
    engine.serve("a", prompt(2 * BLOCK + 1))
    assert engine.ours._events is None
    assert list(engine.vllm.connector.take_events()) == []
