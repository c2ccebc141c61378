# SPDX-License-Identifier: Apache-2.0
"""The books of KV events: which blocks wait, what is told, what is bounded."""

import pytest

pytest.importorskip("vllm")

import torch
from vllm import SamplingParams
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    maybe_convert_block_hash,
)
from vllm.v1.request import Request

from kvxfer.observe import events as events_module
from kvxfer.observe.events import SaveEvents
from kvxfer.transfer.specs import Chunks, SaveSpec

HASH = 16
BLOCKS = (16, 64)
"""Tokens of a block: full attention, and a group of larger blocks."""


@pytest.fixture
def make():
    def make(num_ranks=1, store="lmdb:///folder", **bounds):
        return SaveEvents(BLOCKS, hash_tokens=HASH, num_ranks=num_ranks, store=store, **bounds)

    return make


@pytest.fixture
def make_request():
    def make_request(num_tokens=150, first=0, hash_function=sha256, **facts):
        init_none_hash(hash_function)
        return Request(
            "a",
            None if num_tokens is None else [first + i for i in range(num_tokens)],
            SamplingParams(),
            None,
            block_hasher=get_request_block_hasher(HASH, hash_function),
            **facts,
        )

    return make_request


def save(events, request, job_id, *ends, group=0, start=0):
    """Order a save of the blocks that end at these tokens, of all that the step computed."""
    events.note([(request, start, request.num_tokens // HASH * HASH)])
    hashes = {bytes(request.block_hashes[end // HASH - 1]): end for end in ends}
    events.ordered([SaveSpec(job_id, 0, (Chunks.of(group, hashes),))])


def told(events):
    """Return (kind of event, where its block ends in the tokens, or None) of each."""
    return [
        (type(event), event.token_ids[-1] + 1 if isinstance(event, BlockStored) else None)
        for event in events.take()
    ]


def test_block_says_what_it_is(make, make_request):
    events, request = make(), make_request()
    events.describe_groups([("full_attention", None), ("sliding_window", 32)])
    save(events, request, 1, 48)
    events.ended({1: 1}, ())
    (event,) = events.take()
    assert event.block_hashes == [maybe_convert_block_hash(request.block_hashes[2])]
    assert event.parent_block_hash == maybe_convert_block_hash(request.block_hashes[1])
    assert event.token_ids == list(range(32, 48))
    assert event.block_size == 16
    assert (event.medium, event.locality, event.group_idx) == ("LMDB", "LOCAL", 0)
    assert (event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window) == (
        "full_attention",
        None,
    )
    assert (event.lora_id, event.lora_name, event.extra_keys) == (None, None, [None])
    assert events.take() == []


def test_first_block_has_no_parent(make, make_request):
    events = make()
    save(events, make_request(), 1, 16)
    events.ended({1: 1}, ())
    assert events.take()[0].parent_block_hash is None


@pytest.mark.parametrize(("end", "start"), [(64, 0), (128, 64), (80, 64), (112, 64), (16, 0)])
def test_larger_blocks_and_tails_reach_back_to_the_start_of_their_block(
    make, make_request, end, start
):
    events, request = make(), make_request()
    save(events, request, 1, end, group=1)
    events.ended({1: 1}, ())
    (event,) = events.take()
    assert event.token_ids == list(range(start, end))
    assert event.block_size == end - start
    parent = request.block_hashes[start // HASH - 1] if start else None
    assert event.parent_block_hash == (parent and maybe_convert_block_hash(parent))
    assert event.group_idx == 1


def test_pool_on_other_hosts_is_remote(make, make_request):
    events = make(store="mooncake://host:50051?protocol=tcp")
    save(events, make_request(), 1, 16)
    events.ended({1: 1}, ())
    (event,) = events.take()
    assert (event.medium, event.locality) == ("MOONCAKE", "REMOTE")


def test_adapter_and_salt_are_told(make, make_request):
    events = make()
    lora = LoRARequest("adapter", 3, "/nowhere")
    save(events, make_request(lora_request=lora, cache_salt="salt"), 1, 16, 32)
    events.ended({1: 1}, ())
    first, second = events.take()
    assert (first.lora_id, first.lora_name) == (3, "adapter")
    assert first.extra_keys == [("adapter", "salt")]
    assert second.extra_keys == [("adapter",)], "a salt is in the first block's hash alone"


def test_field_that_an_older_vllm_lacks_is_left_out(make, make_request, monkeypatch):
    fields = {cls: known - {"locality"} for cls, known in events_module._FIELDS.items()}
    monkeypatch.setattr(events_module, "_FIELDS", fields)
    events = make()
    save(events, make_request(), 1, 16)
    events.ended({1: 1}, ())
    assert events.take()[0].locality is None


def test_prompt_embeddings_are_told(make, make_request):
    events = make()
    request = make_request(num_tokens=None, prompt_embeds=torch.ones(32, 4))
    save(events, request, 1, 16, 32)
    events.ended({1: 1}, ())
    keys = [event.extra_keys for event in events.take()]
    assert [len(each) for each in keys] == [1, 1]
    assert all(isinstance(digest, bytes) for ((digest,),) in keys)


def short_hash(value):
    """Return a hash of half the length, as some of vLLM's are."""
    return sha256(value)[:16]


@pytest.mark.parametrize("hash_function", [sha256, short_hash])
@pytest.mark.parametrize("as_numbers", ["0", "1"], ids="as_numbers={}".format)
def test_hashes_are_published_as_vllm_does(
    make, make_request, monkeypatch, hash_function, as_numbers
):
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", as_numbers)
    events, request = make(), make_request(hash_function=hash_function)
    hashes = list(map(maybe_convert_block_hash, request.block_hashes))
    assert {type(each) for each in hashes} == {int if as_numbers == "1" else bytes}
    save(events, request, 1, 48, 64)
    events.ended({1: 1}, ())
    events.reset(is_empty=True)
    *stored, removed = events.take()
    assert [event.block_hashes for event in stored] == [[hashes[2]], [hashes[3]]]
    assert [event.parent_block_hash for event in stored] == hashes[1:3]
    assert removed.block_hashes == hashes[2:4]


def test_block_is_told_of_by_the_last_rank(make, make_request):
    events = make(num_ranks=3)
    save(events, make_request(), 1, 16, 32)
    events.ended({1: 1, 99: 1}, ())
    events.ended({1: 1}, ())
    assert told(events) == []
    assert events.num_saves == 1
    events.ended({1: 1}, ())
    assert told(events) == [(BlockStored, 16), (BlockStored, 32)]
    assert events.num_saves == 0


@pytest.mark.parametrize("failed_first", [True, False])
def test_save_that_any_rank_failed_is_not_told_of(make, make_request, failed_first):
    events = make(num_ranks=2)
    save(events, make_request(), 1, 16)
    events.ended({1: 1}, [1] if failed_first else ())
    events.ended({1: 1}, () if failed_first else [1])
    assert told(events) == []
    assert events.num_saves == 0
    assert events._failed == set()


def test_saves_of_one_step_keep_to_themselves(make, make_request):
    events, one, other = make(), make_request(), make_request(first=1000)
    events.note((request, 0, 32) for request in (one, other))
    hashes = [{bytes(request.block_hashes[0]): 7} for request in (one, other)]
    events.ordered(SaveSpec(job, 0, (Chunks.of(0, h),)) for job, h in enumerate(hashes))
    events.ended({1: 1}, ())
    assert told(events) == [(BlockStored, 1016)]
    events.ended({0: 1}, ())
    assert told(events) == [(BlockStored, 16)]


@pytest.mark.parametrize(
    "jobs", [[(0, 1), (2,)], [(0, 1, 2)], [(1, 2), (0,)], [(2, 1, 0)], [(0, 2), ()]], ids=str
)
def test_blocks_are_found_among_those_noted_whatever_job_they_are_in(make, make_request, jobs):
    events = make()
    requests = [make_request(first=1000 * number) for number in range(3)]
    events.note((request, 16, 32) for request in requests)
    hashes = [{bytes(requests[at].block_hashes[1]): 7 for at in job} for job in jobs]
    events.ordered(SaveSpec(job, 0, (Chunks.of(0, each),)) for job, each in enumerate(hashes))
    events.ended(dict.fromkeys(range(len(jobs)), 1), ())
    assert told(events) == [(BlockStored, 1000 * at + 32) for job in jobs for at in job]


def test_what_was_noted_is_forgotten_with_the_step(make, make_request):
    events, request = make(), make_request()
    events.note([(request, 0, 144)])
    events.ordered([])
    save(events, request, 1, 64, start=32)
    events.ordered([SaveSpec(2, 0, (Chunks.of(0, {bytes(request.block_hashes[0]): 7}),))])
    events.ended({1: 1, 2: 1}, ())
    assert told(events) == [(BlockStored, 64)]


def test_saves_beyond_the_bound_are_dropped_and_counted(make, make_request):
    events, request = make(max_pending=3), make_request()
    save(events, request, 1, 16, 32)
    save(events, request, 2, 48, 64)
    assert events.num_dropped == 2
    events.ended({1: 1, 2: 1}, ())
    assert told(events) == [(BlockStored, 16), (BlockStored, 32)]
    save(events, request, 3, 48, 64, 80)
    events.reset(is_empty=False)
    save(events, request, 4, 48, 64, 80)
    events.ended({4: 1}, ())
    assert len(told(events)) == 3


def key_of(request, end, group=0):
    """Return how ranks report that the block that ends there is lost."""
    return group, bytes(request.block_hashes[end // HASH - 1])


def test_lost_block_that_was_told_of_is_removed_once(make, make_request):
    events, request = make(), make_request()
    save(events, request, 1, 16, 32)
    events.ended({1: 1}, ())
    events.take()
    for _ in range(2):
        events.lost([key_of(request, 16), key_of(request, 48), key_of(request, 16, group=1)])
    (removed,) = events.take()
    assert isinstance(removed, BlockRemoved)
    assert removed.block_hashes == [maybe_convert_block_hash(request.block_hashes[0])]
    assert (removed.group_idx, removed.medium, removed.locality) == (0, "LMDB", "LOCAL")


def test_blocks_lost_together_are_removed_by_one_event_a_group(make, make_request):
    events, request = make(), make_request()
    save(events, request, 1, 16, 32, 48)
    save(events, request, 2, 64, 128, group=1)
    events.ended({1: 1, 2: 1}, ())
    events.take()
    lost = [(0, 16), (1, 128), (0, 48), (1, 64)]
    events.lost([key_of(request, end, group) for group, end in lost])
    assert [(event.group_idx, event.block_hashes) for event in events.take()] == [
        (group, [maybe_convert_block_hash(request.block_hashes[end // HASH - 1]) for end in ends])
        for group, ends in [(0, (16, 48)), (1, (128, 64))]
    ]


def test_block_that_is_lost_while_it_is_saved_is_not_told_of(make, make_request):
    events, request = make(num_ranks=2), make_request()
    save(events, request, 1, 16, 32)
    events.ended({1: 1}, ())
    events.lost([key_of(request, 16)])
    events.ended({1: 1}, ())
    assert told(events) == [(BlockStored, 32)]
    save(events, request, 2, 16)
    events.ended({2: 2}, ())
    assert told(events) == [(BlockStored, 16)]


def test_lost_blocks_are_not_remembered_without_saves(make, make_request):
    events, request = make(), make_request()
    events.lost([key_of(request, 16)])
    assert events._gone == set()
    save(events, request, 1, 32)
    events.lost([key_of(request, 16)])
    events.reset(is_empty=False)
    assert events._gone == set()


def test_lost_block_is_not_removed_again_by_a_reset(make, make_request):
    events, request = make(), make_request()
    save(events, request, 1, 16)
    events.ended({1: 1}, ())
    events.lost([key_of(request, 16)])
    events.take()
    events.reset(is_empty=True)
    assert events.take() == []


def test_reset_tells_once_of_the_removal_of_each_groups_blocks(make, make_request):
    events, request = make(), make_request()
    for job in (1, 2):
        save(events, request, job, 16, 32)
        events.ended({job: 1}, ())
    save(events, request, 3, 64, group=1)
    events.ended({3: 1}, ())
    events.take()
    events.reset(is_empty=True)
    removed = events.take()
    assert [type(event) for event in removed] == [BlockRemoved] * 2
    assert [(event.group_idx, event.block_hashes) for event in removed] == [
        (0, [maybe_convert_block_hash(request.block_hashes[idx]) for idx in (0, 1)]),
        (1, [maybe_convert_block_hash(request.block_hashes[3])]),
    ]
    assert {event.medium for event in removed} == {"LMDB"}
    events.reset(is_empty=True)
    assert events.take() == []


def test_saves_ordered_before_a_reset_are_never_told_of(make, make_request):
    events, request = make(num_ranks=2), make_request()
    save(events, request, 1, 16)
    events.ended({1: 1}, [1])
    events.reset(is_empty=True)
    events.ended({1: 1}, ())
    assert told(events) == []
    save(events, request, 2, 32)
    events.ended({2: 2}, ())
    assert told(events) == [(BlockStored, 32)]


def test_reset_that_emptied_nothing_removes_nothing(make, make_request):
    events = make()
    save(events, make_request(), 1, 16)
    events.ended({1: 1}, ())
    events.take()
    events.reset(is_empty=False)
    assert events.take() == []
    events.reset(is_empty=True)
    assert [type(event) for event in events.take()] == [BlockRemoved]


def test_after_more_blocks_than_are_remembered_a_reset_clears_everything(make, make_request):
    events, request = make(max_told=4), make_request()
    for job, ends in enumerate([(16, 32), (48, 64), (80, 96), (112, 128)]):
        save(events, request, job, *ends)
        events.ended({job: 1}, ())
        assert sum(map(len, events._told.by_group())) <= 4
    events.take()
    events.lost([key_of(request, 16), key_of(request, 128)])
    assert [len(event.block_hashes) for event in events.take()] == [1], "the first is forgotten"
    events.reset(is_empty=True)
    assert [type(event) for event in events.take()] == [AllBlocksCleared]
    save(events, request, 9, 16)
    events.ended({9: 1}, ())
    events.take()
    events.reset(is_empty=True)
    assert [type(event) for event in events.take()] == [BlockRemoved]


def test_up_to_the_bound_nothing_is_forgotten(make, make_request):
    events, request = make(max_told=4), make_request()
    for job, end in enumerate([16, 32, 48, 64]):
        save(events, request, job, end)
        events.ended({job: 1}, ())
    events.take()
    events.reset(is_empty=True)
    (removed,) = events.take()
    assert len(removed.block_hashes) == 4


def test_block_told_of_again_is_removed_once(make, make_request):
    events, request = make(max_told=4), make_request()
    for job, end in enumerate([16, 32, 48, 16]):
        save(events, request, job, end)
        events.ended({job: 1}, ())
    events.take()
    for _ in range(2):
        events.lost([key_of(request, 16)])
    assert len(events.take()) == 1
    events.reset(is_empty=True)
    (removed,) = events.take()
    assert len(removed.block_hashes) == 2
