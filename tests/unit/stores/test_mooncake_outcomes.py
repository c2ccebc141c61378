# SPDX-License-Identifier: Apache-2.0
"""What callers of the Mooncake store see of a client that fails: outcomes by name, no exception."""

from __future__ import annotations

import ctypes
import random
import threading

import pytest
from mooncake_fakes import FakeNative, open_fake

from kvxfer.errors import StoreError
from kvxfer.stores import Outcome

KEYS = [b"a", b"b", b"c"]
PATTERN = bytes([0xA5]) * 8


@pytest.fixture
def native():
    return FakeNative()


@pytest.fixture
def store(monkeypatch, native):
    store = open_fake(monkeypatch, native)
    yield store
    store.close()


def put(store, keys=KEYS, value=b"12345678"):
    return store.put_from(keys, [memoryview(value)] * len(keys))


def get(store, keys=KEYS, size=8):
    targets = [bytearray(PATTERN[:1] * size) for _ in keys]
    return store.get_into(keys, [memoryview(target) for target in targets]), targets


def raise_error(*arguments):
    raise RuntimeError("the client broke")


def counters(store):
    return store.stats().counters


@pytest.mark.parametrize(
    ("code", "outcome", "counter"),
    [
        (-704, Outcome.MISSING, None),
        (-703, Outcome.MISSING, None),
        (-707, Outcome.FAILED, "get_failed_lease_expired"),
        (-800, Outcome.FAILED, "get_failed_transfer"),
        (-801, Outcome.CORRUPT, None),
        (-1102, Outcome.FAILED, "get_failed_disk_read"),
        (-900, Outcome.FAILED, "get_failed_master_lost"),
        (-901, Outcome.FAILED, "get_failed_timed_out"),
        (-12345, Outcome.FAILED, "get_failed_code_12345"),
        (0, Outcome.FAILED, "get_failed_code_0"),
        (7, Outcome.FAILED, "get_failed_code_7"),
    ],
)
def test_get_tells_codes_by_name(store, native, code, outcome, counter):
    put(store)
    native.scripts["get"] = lambda names, ptrs, sizes: [8, code, 8]
    outcomes, _ = get(store)
    assert outcomes == [Outcome.OK, outcome, Outcome.OK]
    assert counters(store)[f"get_{outcome.name.lower()}"] == 1
    if counter:
        assert counters(store)[counter] == 1


@pytest.mark.parametrize(
    ("code", "outcome", "counter"),
    [
        (-705, Outcome.EXISTS, "put_exists"),
        (-200, Outcome.NO_SPACE, "put_no_space"),
        (-1700, Outcome.NO_SPACE, "put_no_space"),
        (-800, Outcome.FAILED, "put_failed_transfer"),
        (-901, Outcome.FAILED, "put_failed_timed_out"),
    ],
)
def test_put_tells_codes_by_name(store, native, code, outcome, counter):
    native.scripts["put"] = lambda names, ptrs, sizes: [0, code, 0]
    assert put(store) == [Outcome.OK, outcome, Outcome.OK]
    assert counters(store)[counter] == 1


@pytest.mark.parametrize("call", ["get", "put"])
@pytest.mark.parametrize(
    "answer",
    [lambda *_: None, lambda *_: [], lambda *_: [None] * 3, lambda *_: ["x"] * 3, raise_error],
    ids=["none", "empty", "nones", "text", "exception"],
)
def test_an_answer_that_is_none_is_a_failure(store, native, call, answer):
    put(store)
    native.values.clear()
    native.scripts[call] = answer
    outcomes = get(store)[0] if call == "get" else put(store)
    assert outcomes == [Outcome.FAILED] * 3
    assert counters(store)[f"{call}_failed_no_answer"] == 3


def test_an_answer_that_is_short_fails_what_it_leaves_out(store, native):
    put(store)
    native.scripts["get"] = lambda names, ptrs, sizes: [8]
    assert get(store)[0] == [Outcome.OK, Outcome.FAILED, Outcome.FAILED]


@pytest.mark.parametrize("answer", [lambda *_: None, lambda *_: [-900] * 3, raise_error])
def test_exists_answers_absent_where_the_client_fails(store, native, answer):
    put(store)
    native.scripts["exists"] = answer
    assert store.exists(KEYS) == b"\0\0\0"
    assert counters(store)["exists_failed"] == 3


def test_exists_asks_in_bounded_batches(store, native):
    assert store.exists([b"%d" % number for number in range(10_000)]) == bytes(10_000)
    sizes = [len(names) for (names,) in native.calls["exists"]]
    assert sum(sizes) == 10_000
    assert max(sizes) == 4096


def test_put_fails_where_it_cannot_know_what_is_there(store, native):
    native.scripts["exists"] = lambda names: [1, -1, 0]
    assert put(store) == [Outcome.EXISTS, Outcome.FAILED, Outcome.OK]


def test_a_value_of_another_size_is_told_from_a_failed_transfer(store, native):
    put(store)
    native.values["b"] = b"longer than eight"
    native.scripts["get"] = lambda names, ptrs, sizes: [-800] * len(names)
    outcomes, targets = get(store)
    assert outcomes == [Outcome.FAILED, Outcome.WRONG_SIZE, Outcome.FAILED]
    assert targets == [PATTERN] * 3


def test_equal_keys_of_one_call_never_meet_in_a_native_call(store, native):
    native.values.update(a=b"12345678", b=b"1")
    keys = [b"a", b"b", b"a", b"b", b"b"]
    targets = [bytearray(PATTERN[:size]) for size in (8, 8, 8, 1, 2)]
    outcomes = store.get_into(keys, [memoryview(target) for target in targets])
    wrong, ok = Outcome.WRONG_SIZE, Outcome.OK
    assert outcomes == [ok, wrong, ok, ok, wrong]
    assert targets == [b"12345678", PATTERN, b"12345678", b"1", PATTERN[:2]]


def test_of_equal_keys_of_one_put_the_first_is_stored(store, native):
    values = [memoryview(value) for value in (b"1", b"2", b"3")]
    assert store.put_from([b"k", b"j", b"k"], values) == [Outcome.OK, Outcome.OK, Outcome.EXISTS]
    assert native.values == {"k": b"1", "j": b"2"}


def test_remove_names_each_key_once(store, native):
    put(store)
    assert store.remove([b"a", b"b", b"a"]) == 2
    assert native.calls["remove"] == [(["a", "b"],)]


def test_a_buffer_that_leaves_its_region_bounces(store, native):
    buffer = memoryview(bytearray(range(64)))
    store.register(buffer[:32])
    assert store.put_from(KEYS[:2], [buffer[24:32], buffer[28:36]]) == [Outcome.OK] * 2
    assert native.values == {"a": bytes(range(24, 32)), "b": bytes(range(28, 36))}
    assert len(native.regions) == 2


def test_remove_counts_what_went(store, native):
    put(store)
    native.scripts["remove"] = lambda names: [0, -706, -704]
    assert store.remove(KEYS) == 1
    native.scripts["remove"] = raise_error
    assert store.remove(KEYS) == 0


@pytest.mark.parametrize("answer", [lambda *_: -901, lambda *_: None, raise_error])
def test_remove_prefix_that_may_have_failed_raises(store, native, answer):
    native.scripts["regex"] = answer
    with pytest.raises(StoreError, match="may be removed in part"):
        store.remove_prefix(b"a")


def test_register_that_is_refused_raises_and_says_why(store, native):
    native.scripts["register"] = lambda ptr, size: -600
    with pytest.raises(StoreError, match=r"did not register a buffer of 64 bytes.*ulimit -l"):
        store.register(memoryview(bytearray(64)))
    assert put(store) == [Outcome.FAILED] * 3  # nor is there a bounce buffer


def test_register_takes_a_part_of_a_registered_buffer_as_registered(store, native):
    buffer = memoryview(bytearray(4096))
    store.register(buffer)
    store.register(buffer[:100])
    store.register(buffer)
    assert len(native.calls["register"]) == 1


def test_values_in_registered_memory_are_not_copied(store, native):
    buffer = memoryview(bytearray(4096))
    store.register(buffer)
    buffer[:8] = b"12345678"
    start = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    assert store.put_from([b"k"], [buffer[:8]]) == [Outcome.OK]
    assert store.get_into([b"k"], [buffer[100:108]]) == [Outcome.OK]
    assert native.calls["put"][0][1] == [start]
    assert native.calls["get"][0][1] == [(start + 100,)]
    assert buffer[100:108] == b"12345678"


def test_values_of_one_call_in_two_regions_are_not_copied(store, native):
    buffers = [memoryview(bytearray(b"%d" % number) * 64) for number in range(2)]
    for buffer in buffers:
        store.register(buffer)
    assert store.put_from(KEYS[:2], buffers) == [Outcome.OK] * 2
    assert native.values == {"a": b"0" * 64, "b": b"1" * 64}
    assert len(native.regions) == 2


def test_a_value_larger_than_the_bounce_buffer_has_memory_for_its_call(store, native):
    value = bytes(5 << 20)
    assert store.put_from([b"k"], [memoryview(value)]) == [Outcome.OK]
    target = bytearray(b"x") * len(value)
    assert store.get_into([b"k"], [memoryview(target)]) == [Outcome.OK]
    assert target == value
    assert sum(native.regions.values()) == 0


def test_bounced_values_are_moved_in_parts_that_fit(store, native):
    values = [bytes([number]) * (3 << 20) for number in range(3)]
    assert store.put_from(KEYS, [memoryview(value) for value in values]) == [Outcome.OK] * 3
    outcomes, targets = get(store, size=3 << 20)
    assert outcomes == [Outcome.OK] * 3
    assert targets == values
    assert [len(names) for names, *_ in native.calls["get"]] == [1, 1, 1]


def test_native_calls_are_bounded_in_keys_and_bytes(monkeypatch, native):
    store = open_fake(monkeypatch, native, "batch_keys=4&batch_bytes=32")
    keys = [b"%d" % number for number in range(10)]
    put(store, keys)
    assert get(store, keys)[0] == [Outcome.OK] * 10
    assert [len(names) for names, *_ in native.calls["put"]] == [4, 4, 2]
    put(store, KEYS, b"x" * 20)
    assert [len(names) for names, *_ in native.calls["put"]][3:] == [1, 1, 1]
    store.close()


def test_no_native_call_takes_more_than_half_of_the_wire(monkeypatch, native):
    store = open_fake(monkeypatch, native, "in_flight=6&batch_keys=100")
    keys = [b"%d" % number for number in range(7)]
    assert put(store, keys) == [Outcome.OK] * 7
    assert [len(names) for names, *_ in native.calls["put"]] == [3, 3, 1]
    store.close()


def test_a_value_above_the_staging_of_a_disk_tier_fails_alone(monkeypatch, native):
    monkeypatch.setenv("MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES", "40000")
    store = open_fake(monkeypatch, native, "offload=yes")
    native.values.update(a=bytes(8), b=bytes(40_000), c=bytes(8))
    targets = [memoryview(bytearray(size)) for size in (8, 40_000, 8)]
    assert store.get_into(KEYS, targets) == [Outcome.OK, Outcome.FAILED, Outcome.OK]
    assert counters(store)["get_oversize"] == 1
    keys = [b"%d" % number for number in range(6)]
    put(store, keys)
    assert get(store, keys)[0] == [Outcome.OK] * 6
    most = max(len(names) for names, *_ in native.calls["get"])
    assert most == 2  # 12,288 bytes of staging each, 36,000 of which are usable
    store.close()


def test_a_full_pool_is_left_alone_until_a_put_succeeds(store, native, monkeypatch):
    now = 100.0
    monkeypatch.setattr(store._transfers.pressure, "_clock", lambda: now)
    native.scripts["put"] = lambda names, ptrs, sizes: [-200] * len(names)
    assert put(store) == [Outcome.NO_SPACE] * 3
    assert put(store) == [Outcome.NO_SPACE] * 3
    assert len(native.calls["put"]) == 1
    assert counters(store)["put_backed_off"] == 3
    assert counters(store)["put_backoffs"] == 1
    now += 0.3
    assert put(store) == [Outcome.NO_SPACE] * 3
    assert len(native.calls["put"]) == 2
    now += 0.3
    assert put(store) == [Outcome.NO_SPACE] * 3
    assert len(native.calls["put"]) == 2  # the pause has doubled
    del native.scripts["put"]
    now += 0.3
    assert put(store) == [Outcome.OK] * 3
    native.scripts["put"] = lambda names, ptrs, sizes: [-200] * len(names)
    put(store, [b"d"])
    now += 0.3  # the first pause again, not the next
    del native.scripts["put"]
    assert put(store, [b"d"]) == [Outcome.OK]


def test_gets_of_one_key_at_once_travel_once(store, native):
    put(store, [b"k"])
    is_in, may_go = threading.Event(), threading.Event()

    def wait(*arguments):
        is_in.set()
        assert may_go.wait(10)
        return ...

    native.scripts["get"] = wait
    answers = {}
    threads = [
        threading.Thread(target=lambda n=n: answers.update({n: get(store, [b"k"])}))
        for n in range(3)
    ]
    threads[0].start()
    assert is_in.wait(10)
    for thread in threads[1:]:
        thread.start()
    while sum(map(len, flights(store)[0].followers.values())) < 2:
        assert threads[1].is_alive()
    may_go.set()
    for thread in threads:
        thread.join(10)
    assert answers == {n: ([Outcome.OK], [bytearray(b"12345678")]) for n in range(3)}
    assert len(native.calls["get"]) == 1
    assert counters(store)["get_shared"] == 2


def test_calls_that_share_some_keys_at_once_all_end_with_the_right_bytes(store):
    keys = [b"k%d" % number for number in range(12)]
    values = [memoryview(key * 100) for key in keys]
    put_outcomes, wrong = [], []

    def work(seed):
        dice = random.Random(seed)
        for _ in range(150):
            chosen = dice.choices(range(len(keys)), k=6)  # some twice
            put_outcomes.extend(
                store.put_from([keys[at] for at in chosen], [values[at] for at in chosen])
            )
            targets = [bytearray(len(values[at])) for at in chosen]
            outcomes = store.get_into([keys[at] for at in chosen], list(map(memoryview, targets)))
            wrong.extend(outcome for outcome in outcomes if outcome is not Outcome.OK)
            wrong.extend(
                at for at, found in zip(chosen, targets, strict=True) if values[at] != found
            )

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert len(put_outcomes) == 4 * 150 * 6
    assert put_outcomes.count(Outcome.OK) == len(keys)
    assert set(put_outcomes) == {Outcome.OK, Outcome.EXISTS}
    assert flights(store) == []


def flights(store):
    return list(store._transfers._gets._under_way.values())


def test_a_put_names_copies_place_life_and_group(monkeypatch, native):
    query = "replicas=2&preferred_segment=s:1&groups=yes&soft_pin=yes"
    features = {"group_ids": [], "preferred_segment": "", "soft_pin_action": None}
    store = open_fake(monkeypatch, native, query, **features)
    put(store, [b"m/g0/ff01", b"m/g1/ff01"])
    (config,) = native.configs
    assert (config.replica_num, config.preferred_segment) == (2, "s:1")
    assert (config.group_ids, config.soft_pin_action) == (["kvxfer:ff01"] * 2, "enable")
    store.close()


def test_what_a_build_lacks_is_said_once_and_left_out(monkeypatch, native, caplog):
    with caplog.at_level("INFO"):
        store = open_fake(monkeypatch, native, "groups=yes&soft_pin=yes", with_soft_pin=False)
        put(store)
        put(store, [b"d"])
    assert [config.with_soft_pin for config in native.configs] == [True, True]
    assert not hasattr(native.configs[0], "group_ids")
    assert caplog.text.count("has no groups: it is ignored") == 1
    assert "group ids no, preferred segment no, soft pin yes" in caplog.text
    store.close()


def test_set_up_gets_every_setting(monkeypatch, native):
    query = "protocol=rdma&device=mlx5_0&tenant=t&ssd_offload_path=/ssd&client_http_port=9301"
    store = open_fake(monkeypatch, native, f"{query}&buffer=1MiB&hostname=me")
    (arguments, further), *_ = native.calls["setup"]
    assert arguments == ("me", "P2PHANDSHAKE", 0, 1 << 20, "rdma", "mlx5_0", "127.0.0.1:1")
    assert further == {
        "tenant_id": "t",
        "enable_ssd_offload": True,
        "ssd_offload_path": "/ssd",
        "enable_client_http_server": True,
        "client_http_port": 9301,
    }
    store.close()
