# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest

pytest.importorskip("vllm")

from engine_fakes import (
    FakeLookups,
    FakeManager,
    FakePool,
    FakeRequest,
    allocated,
    blocks_by_request,
    make_config,
    make_facts,
    step,
    worker_output,
)

from kvxfer.errors import UnsupportedError
from kvxfer.lookup import Endpoint
from kvxfer.lookup.key_spaces import KeySpacesPayload
from kvxfer.messages import KVXferHandshake, KVXferWorkerMetadata
from kvxfer.scheduler import KVXferScheduler


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def handshake_of(rank, host, key_prefixes=()):
    return KVXferHandshake(
        str(Endpoint.for_engine("engine", rank=rank).path), host, tuple(key_prefixes)
    )


@pytest.fixture
def lookups():
    return FakeLookups()


@pytest.fixture
def pool():
    return FakePool()


@pytest.fixture
def make(lookups, pool):
    def make(clock=None, facts=None, **settings):
        scheduler = KVXferScheduler(
            make_config(**settings), facts or make_facts(), lookups, clock or Clock()
        )
        scheduler.bind_gpu_block_pool(pool)
        return scheduler

    return make


# What is asked and promised


def test_lookup_is_asked_with_the_raw_number_of_tokens(make, lookups):
    make().get_num_new_matched_tokens(FakeRequest("a", 67), 0)
    assert lookups.asked == [("a", 67)]


def test_request_below_one_block_is_not_looked_up(make, lookups):
    assert make().get_num_new_matched_tokens(FakeRequest("a", 15), 0) == (0, False)
    assert lookups.asked == []


def test_local_hit_that_cannot_be_exceeded_is_not_looked_up(make, lookups):
    assert make().get_num_new_matched_tokens(FakeRequest("a", 64), 48) == (0, False)
    assert lookups.asked == []


def test_lookup_in_flight_is_none_and_asked_again(make, lookups):
    scheduler, request = make(), FakeRequest("a", 64)
    lookups.answer("a", None, None, 48)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (48, True)


def test_answer_is_kept_while_the_request_waits_for_blocks(make, lookups):
    scheduler, request = make(), FakeRequest("a", 64)
    lookups.answer("a", 48)
    for _ in range(5):
        assert scheduler.get_num_new_matched_tokens(request, 16) == (32, True)
    assert len(lookups.asked) == 1


def test_answer_is_asked_anew_once_it_is_old(make, lookups):
    clock = Clock()
    scheduler, request = make(clock, answer_max_age_s=10), FakeRequest("a", 64)
    lookups.answer("a", 48, 16)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (48, True)
    clock.now = 10.5
    assert scheduler.get_num_new_matched_tokens(request, 0) == (16, True)


def test_answer_is_asked_anew_for_a_longer_request(make, lookups):
    scheduler, request = make(), FakeRequest("a", 64)
    lookups.answer("a", 48, 64)
    scheduler.get_num_new_matched_tokens(request, 0)
    request.num_tokens = 80
    assert scheduler.get_num_new_matched_tokens(request, 0) == (64, True)


@pytest.mark.parametrize("answer", [64, 65, 10**9, 17, -16], ids="{}".format)
def test_answer_that_cannot_be_is_no_hit(make, lookups, answer):
    scheduler = make()
    lookups.answer("a", answer)
    assert scheduler.get_num_new_matched_tokens(FakeRequest("a", 64), 0) == (0, False)
    assert scheduler.counts["answers_refused"] == 1


def test_request_that_must_not_read_the_cache_is_not_looked_up(make, lookups):
    request = FakeRequest("a", 64, skip_reading_prefix_cache=True)
    assert make().get_num_new_matched_tokens(request, 0) == (0, False)
    assert lookups.asked == []


def test_lookup_can_be_turned_off(make, lookups):
    scheduler = make(enable_lookup=False)
    assert scheduler.get_num_new_matched_tokens(FakeRequest("a", 64), 0) == (0, False)
    assert lookups.asked == []


@pytest.mark.parametrize("is_async", [True, False])
def test_lookup_blocks_only_where_asked_to(make, lookups, is_async):
    make(lookup_async=is_async).get_num_new_matched_tokens(FakeRequest("a", 64), 0)
    assert lookups.blocking == [not is_async]


# Loads


def test_external_hit_of_48_with_16_local_loads_16_to_48(make, lookups):
    scheduler, request = make(), FakeRequest("a", 49)
    lookups.answer("a", 48)
    assert scheduler.get_num_new_matched_tokens(request, 16) == (32, True)
    scheduler.update_state_after_alloc(request, allocated(7, 8, 9, 10), 32)
    (load,) = scheduler.build_connector_meta(step()).loads
    assert (load.local_tokens, load.hit_tokens) == (16, 48)
    (chunks,) = load.chunks
    assert chunks.block_ids.tolist() == [8, 9]
    assert chunks.hashes == b"".join(request.block_hashes[1:3])


def test_full_hit_of_a_48_token_prompt_loads_16_and_records_16_and_32(make, lookups):
    scheduler, request = make(), FakeRequest("a", 48)
    lookups.answer("a", 32)
    assert scheduler.get_num_new_matched_tokens(request, 16) == (16, True)
    scheduler.update_state_after_alloc(request, allocated(1, 2, 3), 16)
    (load,) = scheduler.build_connector_meta(step()).loads
    assert (load.local_tokens, load.hit_tokens) == (16, 32)
    assert load.chunks[0].block_ids.tolist() == [2]


def test_full_local_hit_leaves_no_load(make, lookups):
    scheduler, request = make(), FakeRequest("a", 80)
    lookups.answer("a", 48)
    assert scheduler.get_num_new_matched_tokens(request, 48) == (0, False)
    scheduler.update_state_after_alloc(request, allocated(1, 2, 3), 0)
    assert scheduler.build_connector_meta(step()).loads == ()


def test_less_may_be_allocated_than_was_promised(make, lookups):
    scheduler, request = make(), FakeRequest("a", 80)
    lookups.answer("a", 64)
    scheduler.get_num_new_matched_tokens(request, 0)
    scheduler.update_state_after_alloc(request, allocated(1, 2), 32)
    (load,) = scheduler.build_connector_meta(step()).loads
    assert load.hit_tokens == 32
    assert load.chunks[0].block_ids.tolist() == [1, 2]


def test_load_that_cannot_be_complete_is_ordered_as_such(make, lookups):
    scheduler, request = make(), FakeRequest("a", 80)
    lookups.answer("a", 64)
    scheduler.get_num_new_matched_tokens(request, 0)
    scheduler.update_state_after_alloc(request, allocated(1, 2), 40)
    (load,) = scheduler.build_connector_meta(step()).loads
    assert not load.is_whole
    assert load.chunks == ()


def test_embedded_store_over_several_hosts_is_refused(make):
    ranks = [handshake_of(rank, host) for rank, host in enumerate(("one", "two"))]
    with pytest.raises(UnsupportedError, match="the ranks are on one, two"):
        make(facts=make_facts(num_ranks=2)).set_handshakes(ranks)


def test_handshake_of_another_connector_is_not_taken_for_its_own(make, lookups):
    other = Endpoint.for_engine("another engine")
    make().set_handshakes([KVXferHandshake(str(other.path), "host", ((0, b"other"),))])
    assert lookups.told == []


def test_handshakes_of_its_own_ranks_are_told_to_rank_0(make, lookups):
    make().set_handshakes([handshake_of(0, "host", key_prefixes=((0, b"own"),))])
    (payload,) = lookups.told
    assert KeySpacesPayload.decode(payload).key_prefixes == ((0, b"own"),)


@pytest.mark.parametrize("stages", [1, 2])
def test_pipeline_stages_without_handshakes_are_told_of_as_an_error(make, caplog, stages):
    make(facts=replace(make_facts(num_ranks=stages), pp_size=stages)).set_handshakes([])
    assert ("list KVXferConnector first" in caplog.text) == (stages > 1)


def test_reset_without_handshakes_reaches_every_rank(make, monkeypatch):
    reached = []
    monkeypatch.setattr(
        "kvxfer.scheduler.side.reset_ranks",
        lambda endpoints, epoch, timeout_s: reached.extend(endpoints) or True,
    )
    make(facts=make_facts(num_ranks=2)).reset()
    assert reached == [Endpoint.for_engine("engine", rank=rank) for rank in range(2)]


def test_reset_reaches_ranks_whose_handshake_vllm_lost(make, monkeypatch):
    """So with prefill context parallelism alone: vLLM keeps one handshake of each tensor rank."""
    reached = []
    monkeypatch.setattr(
        "kvxfer.scheduler.side.reset_ranks",
        lambda endpoints, epoch, timeout_s: reached.extend(endpoints) or True,
    )
    scheduler = make(facts=make_facts(num_ranks=2))
    scheduler.set_handshakes([handshake_of(1, "host", key_prefixes=((0, b"own"),))])
    scheduler.reset()
    assert [endpoint.path.name for endpoint in reached] == [
        Endpoint.for_engine("engine", rank=rank).path.name for rank in range(2)
    ]


def test_offer_that_another_connector_won_loads_nothing(make, lookups):
    scheduler, request = make(), FakeRequest("a", 80)
    lookups.answer("a", 64)
    scheduler.get_num_new_matched_tokens(request, 0)
    scheduler.update_state_after_alloc(request, allocated(1, 2, 3, 4, 5), 0)
    assert scheduler.build_connector_meta(step()).loads == ()


def test_load_is_ordered_once_although_alloc_is_told_twice(make, lookups):
    scheduler, request = make(), FakeRequest("a", 80)
    lookups.answer("a", 64)
    scheduler.get_num_new_matched_tokens(request, 0)
    scheduler.update_state_after_alloc(request, allocated(1, 2, 3, 4), 64)
    assert len(scheduler.build_connector_meta(step()).loads) == 1
    scheduler.update_state_after_alloc(request, allocated(1, 2, 3, 4, 5), 0)
    assert scheduler.build_connector_meta(step()).loads == ()


def test_request_whose_load_failed_is_offered_nothing_again(make, lookups):
    scheduler, request = make(), FakeRequest("a", 80)
    lookups.answer("a", 64, 64)
    scheduler.get_num_new_matched_tokens(request, 0)
    scheduler.update_state_after_alloc(request, allocated(1, 2, 3, 4), 64)
    scheduler.build_connector_meta(step())
    scheduler.update_connector_output(
        worker_output(KVXferWorkerMetadata(failed_loads=frozenset({"a"})))
    )
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    assert len(lookups.asked) == 1


# Saves


def saves_of(scheduler, *args, **kwargs):
    return list(
        blocks_by_request(scheduler.build_connector_meta(step(*args, **kwargs)).saves).items()
    )


def started(scheduler, request, local=0):
    scheduler.get_num_new_matched_tokens(request, local)
    scheduler.update_state_after_alloc(request, allocated(), 0)
    return request


def test_save_takes_whole_hashed_blocks_once(make):
    scheduler = make()
    started(scheduler, FakeRequest("a", 70))
    tables = {"a": [3, 4, 5, 6, 7]}
    assert saves_of(scheduler, new=[("a", 0, 40)], tables=tables) == [("a", [3, 4])]
    assert saves_of(scheduler, cached=[("a", 40, 30)], tables=tables) == [("a", [5, 6])]
    assert saves_of(scheduler, cached=[("a", 70, 1)], tables=tables) == []


@pytest.mark.parametrize("in_flight", [1, 2])
def test_nothing_is_saved_while_a_synchronous_load_of_another_connector_is_undecided(
    make, in_flight
):
    """A failed one is reported with the results of its step; vLLM then computes again."""
    scheduler = make(facts=replace(make_facts(), max_steps_in_flight=in_flight))
    started(scheduler, FakeRequest("a", 200))
    tables = {"a": list(range(1, 14))}
    loading = step(new=[("a", 64, 16)], tables=tables)
    loading.has_sync_kv_loads = True
    assert scheduler.build_connector_meta(loading).saves == ()
    for idx in range(1, in_flight):
        assert saves_of(scheduler, cached=[("a", 64 + 16 * idx, 16)], tables=tables) == []
    rolled_back = saves_of(scheduler, cached=[("a", 0, 80)], tables=tables)
    assert rolled_back == [("a", [1, 2, 3, 4, 5])]


def test_save_carries_the_hash_at_the_end_of_each_block(make):
    scheduler, request = make(), FakeRequest("a", 64)
    started(scheduler, request)
    (save,) = scheduler.build_connector_meta(
        step(new=[("a", 0, 64)], tables={"a": [1, 2, 3, 4]})
    ).saves
    assert save.chunks[0].hashes == b"".join(request.block_hashes)


def test_save_does_not_repeat_what_the_lookup_saw_stored(make, lookups):
    scheduler = make()
    lookups.answer("a", 32)
    started(scheduler, FakeRequest("a", 64))
    tables = {"a": [1, 2, 3, 4]}
    assert saves_of(scheduler, new=[("a", 0, 64)], tables=tables) == [("a", [3, 4])]


def test_tokens_without_hashes_are_saved_later_once(make):
    scheduler, request = make(save_decode_cache=True), FakeRequest("a", 30, num_prompt_tokens=30)
    started(scheduler, request)
    tables = {"a": [1, 2, 3]}
    assert saves_of(scheduler, new=[("a", 0, 36)], tables=tables) == [("a", [1])]
    request.num_tokens = 33
    assert saves_of(scheduler, cached=[("a", 32, 1)], tables=tables) == [("a", [2])]
    assert saves_of(scheduler, cached=[("a", 33, 1)], tables=tables) == []


@pytest.mark.parametrize(("decode", "expected"), [(False, [1]), (True, [1, 2])])
def test_generated_tokens_are_saved_only_where_asked(make, decode, expected):
    scheduler, request = make(save_decode_cache=decode), FakeRequest("a", 20, num_prompt_tokens=20)
    started(scheduler, request)
    request.num_tokens = 40
    saved = saves_of(scheduler, cached=[("a", 39, 1)], tables={"a": [1, 2, 3]})
    assert saved == [("a", expected)]


@pytest.mark.parametrize(
    ("role", "decode", "expected"),
    [
        ("kv_producer", False, [("a", [1, 2])]),
        ("kv_consumer", False, []),
        ("kv_consumer", True, [("a", [3])]),
        ("kv_both", True, [("a", [1, 2, 3])]),
    ],
)
def test_role_decides_what_is_saved(make, role, decode, expected):
    scheduler = make(facts=make_facts(role=role), save_decode_cache=decode)
    request = started(scheduler, FakeRequest("a", 48, num_prompt_tokens=32))
    assert request.num_tokens == 48
    assert saves_of(scheduler, new=[("a", 0, 48)], tables={"a": [1, 2, 3]}) == expected


def test_null_block_is_never_saved(make):
    scheduler = make()
    started(scheduler, FakeRequest("a", 48))
    assert saves_of(scheduler, new=[("a", 0, 48)], tables={"a": [0, 2, 3]}) == [("a", [2, 3])]


def test_request_without_a_block_table_in_the_step_is_saved_later(make):
    scheduler = make()
    started(scheduler, FakeRequest("a", 48))
    assert saves_of(scheduler, new=[("a", 0, 48)]) == []
    assert saves_of(scheduler, cached=[("a", 48, 1)], tables={"a": [1, 2, 3]}) == [("a", [1, 2, 3])]


# Pins


def test_saved_blocks_are_pinned_until_every_rank_has_packed(make, pool):
    scheduler = make(facts=make_facts(num_ranks=2))
    started(scheduler, FakeRequest("a", 32))
    (save,) = scheduler.build_connector_meta(step(new=[("a", 0, 32)], tables={"a": [5, 6]})).saves
    assert pool.pinned == {5, 6}
    assert scheduler.has_pending_push_work()
    one_rank = worker_output(KVXferWorkerMetadata(blocks_free={save.job_id: 1}))
    scheduler.update_connector_output(one_rank)
    assert pool.pinned == {5, 6}
    scheduler.update_connector_output(one_rank)
    assert pool.pinned == set()
    assert not scheduler.has_pending_push_work()


def test_finished_request_leaves_its_pins_to_the_save(make, pool):
    scheduler, request = make(), FakeRequest("a", 32)
    started(scheduler, request)
    (save,) = scheduler.build_connector_meta(step(new=[("a", 0, 32)], tables={"a": [5, 6]})).saves
    assert scheduler.request_finished(request) is False
    assert pool.pinned == {5, 6}
    scheduler.update_connector_output(
        worker_output(KVXferWorkerMetadata(blocks_free={save.job_id: 1}, ended={save.job_id: 1}))
    )
    assert pool.pinned == set()


def test_pins_are_bounded_and_the_rest_is_saved_when_there_is_room(make, pool):
    scheduler = make(max_pinned_blocks=2)
    started(scheduler, FakeRequest("a", 64))
    tables = {"a": [1, 2, 3, 4]}
    (save,) = scheduler.build_connector_meta(step(new=[("a", 0, 64)], tables=tables)).saves
    assert save.chunks[0].block_ids.tolist() == [1, 2]
    assert saves_of(scheduler, cached=[("a", 64, 1)], tables=tables) == []
    assert scheduler._saves.counts["saves_put_off"] == 1
    scheduler.update_connector_output(
        worker_output(KVXferWorkerMetadata(blocks_free={save.job_id: 1}))
    )
    assert saves_of(scheduler, cached=[("a", 65, 1)], tables=tables) == [("a", [3, 4])]


def test_job_ids_are_never_reused(make, lookups):
    scheduler = make()
    ids = []
    for number in range(6):
        request = FakeRequest(f"r{number}", 48)
        lookups.answer(request.request_id, 32)
        scheduler.get_num_new_matched_tokens(request, 0)
        scheduler.update_state_after_alloc(request, allocated(1, 2), 32)
        meta = scheduler.build_connector_meta(
            step(new=[(request.request_id, 32, 16)], tables={request.request_id: [1, 2, 3]})
        )
        ids += [job.job_id for job in (*meta.loads, *meta.saves)]
    assert len(ids) == len(set(ids)) == 12


# Ends


def test_finish_forgets_the_request_and_its_lookup(make, lookups):
    scheduler, request = make(), FakeRequest("a", 64)
    lookups.answer("a", None)
    scheduler.get_num_new_matched_tokens(request, 0)
    scheduler.request_finished(request)
    scheduler.request_finished(request)
    assert lookups.discarded == ["a"]
    assert scheduler.num_requests == 0


def test_request_id_reused_starts_afresh(make, lookups):
    scheduler = make()
    lookups.answer("a", 48, 16)
    assert scheduler.get_num_new_matched_tokens(FakeRequest("a", 64), 0) == (48, True)
    assert scheduler.get_num_new_matched_tokens(FakeRequest("a", 64), 0) == (16, True)


def test_unknown_job_and_foreign_metadata_are_passed_over(make):
    scheduler = make()
    scheduler.update_connector_output(worker_output(None))
    scheduler.update_connector_output(worker_output(KVXferWorkerMetadata(blocks_free={99: 1})))


def test_thousand_aborted_lookups_leave_nothing(make, lookups):
    scheduler = make()
    for number in range(1000):
        request = FakeRequest(f"r{number}", 64)
        lookups.answer(request.request_id, None)
        scheduler.get_num_new_matched_tokens(request, 0)
        scheduler.request_finished(request)
    assert scheduler.num_requests == 0
    assert len(lookups.discarded) == 1000


def test_reset_makes_saves_of_a_new_epoch_and_stops_those_of_living_requests(make, monkeypatch):
    monkeypatch.setattr(
        "kvxfer.scheduler.side.reset_ranks", lambda endpoints, epoch, timeout_s: True
    )
    scheduler = make()
    started(scheduler, FakeRequest("old", 32))
    assert scheduler.reset() is True
    assert saves_of(scheduler, new=[("old", 0, 32)], tables={"old": [1, 2]}) == []
    started(scheduler, FakeRequest("new", 32))
    (save,) = scheduler.build_connector_meta(
        step(new=[("new", 0, 32)], tables={"new": [3, 4]})
    ).saves
    assert save.epoch == 1


# When a request is looked at


def test_tables_are_read_only_when_a_block_is_complete(make):
    scheduler, request = make(save_decode_cache=True), FakeRequest("a", 40)
    admit(scheduler, request, [1, 2, 3])
    asked = []
    for computed in range(38, 64):
        request.num_tokens = computed + 1
        output = step(cached=[("a", computed, 1)], tables={"a": [1, 2, 3, 4]})
        resolve = output.kv_connector_block_state.get_block_ids
        output.kv_connector_block_state.get_block_ids = lambda name, c=computed, r=resolve: (
            asked.append(c) or r(name)
        )
        scheduler.build_connector_meta(output)
    assert asked == [38, 47, 63]


def test_turn_of_a_session_that_makes_the_prompt_longer_is_saved(make):
    scheduler, request = make(), FakeRequest("a", 33)
    admit(scheduler, request, [1, 2, 3])
    first = scheduler.build_connector_meta(step(new=[("a", 0, 33)], tables={"a": [1, 2, 3]}))
    assert num_saved(first) == 2
    request.num_tokens = request.num_prompt_tokens = 64
    admit(scheduler, request, [1, 2, 3, 4])
    later = scheduler.build_connector_meta(step(new=[("a", 33, 31)], tables={"a": [1, 2, 3, 4]}))
    assert num_saved(later) == 2


def test_saves_go_on_once_there_is_room_for_pins(make):
    scheduler, request = make(max_pinned_blocks=2), FakeRequest("a", 65)
    admit(scheduler, request, [1, 2, 3, 4, 5])
    tables = {"a": [1, 2, 3, 4, 5]}
    first = scheduler.build_connector_meta(step(new=[("a", 0, 65)], tables=tables))
    assert num_saved(first) == 2
    assert scheduler.build_connector_meta(step(cached=[("a", 65, 1)], tables=tables)).saves == ()
    packed = KVXferWorkerMetadata({first.saves[0].job_id: 1})
    scheduler.update_connector_output(worker_output(packed))
    later = scheduler.build_connector_meta(step(cached=[("a", 66, 1)], tables=tables))
    assert num_saved(later) == 2


def test_tables_of_vllms_manager_are_read_where_they_lie(make):
    scheduler, request = make(), FakeRequest("a", 33)
    manager = FakeManager(FakePool(), {"a": ([4, 9, 6],)})
    scheduler.bind_kv_cache_manager(manager)
    admit(scheduler, request, [4, 9, 6])
    (save,) = scheduler.build_connector_meta(step(new=[("a", 0, 33)])).saves
    assert save.chunks[0].block_ids.tolist() == [4, 9]
    assert manager.block_pool.pinned == {4, 9}


def admit(scheduler, request, blocks):
    scheduler.get_num_new_matched_tokens(request, 0)
    scheduler.update_state_after_alloc(request, allocated(*blocks), 0)


def num_saved(metadata):
    return sum(len(chunks) for save in metadata.saves for chunks in save.chunks)
