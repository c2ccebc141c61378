# SPDX-License-Identifier: Apache-2.0
"""What every store must do, whatever lies behind it: a backend's tests subclass ``StoreContract``.

A subclass overrides ``make_store``; the store must hold 32 MiB, and single values of 1 MiB, without
evicting. Nothing here reaches behind the interface.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from kvxfer.stores import Outcome, Store

PATTERN = 0xA5
GUARD_BYTES = 64
SIZES = [1, 2, 3, 2000, 4079, 4080, 4081, 4096, 65_536, 65_537, 1 << 20]


def value_of(key: bytes, size: int) -> bytes:
    """Return bytes that only this key and size have."""
    seed = int.from_bytes(key[-8:], "little") ^ size
    return np.random.default_rng(seed).bytes(size)


def view(data: bytes) -> memoryview:
    return memoryview(data)


def put_one(store: Store, key: bytes, data: bytes) -> Outcome:
    (outcome,) = store.put_from([key], [view(data)])
    return outcome


def get_one(store: Store, key: bytes, size: int) -> tuple[Outcome, bytes]:
    """Return the outcome and the target's bytes, which were the pattern before."""
    target = bytearray([PATTERN]) * size
    (outcome,) = store.get_into([key], [memoryview(target)])
    return outcome, bytes(target)


def pattern(size: int) -> bytes:
    return bytes([PATTERN]) * size


class StoreContract:
    """One test per sentence of ``kvxfer.stores.base``."""

    most_key_bytes = 511
    entries_per_value = 1
    """More where a wrapper stores something beside it, which removals and ``stats`` count too."""

    def make_store(self, folder: Path) -> Store:
        raise NotImplementedError

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        store = self.make_store(tmp_path)
        yield store
        store.close()

    # Values

    @pytest.mark.parametrize("size", SIZES, ids="size={}".format)
    def test_get_returns_what_was_put_and_touches_nothing_else(self, store, size):
        data = value_of(b"key", size)
        source = bytearray(data)
        assert store.put_from([b"key"], [memoryview(source)]) == [Outcome.OK]
        assert source == data
        padded = bytearray([PATTERN]) * (size + 2 * GUARD_BYTES)
        target = memoryview(padded)[GUARD_BYTES : GUARD_BYTES + size]
        assert store.get_into([b"key"], [target]) == [Outcome.OK]
        assert bytes(padded) == pattern(GUARD_BYTES) + data + pattern(GUARD_BYTES)

    def test_put_copies_so_that_the_source_is_free_on_return(self, store):
        source = bytearray(value_of(b"k", 5000))
        before = bytes(source)
        store.put_from([b"k"], [memoryview(source)])
        source[:] = bytes(5000)
        assert get_one(store, b"k", 5000) == (Outcome.OK, before)

    def test_put_leaves_a_present_key_as_it_was(self, store):
        put_one(store, b"k", b"first")
        assert put_one(store, b"k", b"other") is Outcome.EXISTS
        assert get_one(store, b"k", 5) == (Outcome.OK, b"first")

    def test_put_stores_the_first_of_two_equal_keys_in_a_batch(self, store):
        outcomes = store.put_from([b"k", b"k"], [view(b"first"), view(b"other")])
        assert outcomes == [Outcome.OK, Outcome.EXISTS]
        assert get_one(store, b"k", 5) == (Outcome.OK, b"first")

    def test_get_of_a_missing_key_leaves_its_target_untouched(self, store):
        assert get_one(store, b"absent", 100) == (Outcome.MISSING, pattern(100))

    @pytest.mark.parametrize("size", [1, 4999, 5001, 70_000], ids="target={}".format)
    def test_get_into_another_size_leaves_its_target_untouched(self, store, size):
        put_one(store, b"k", value_of(b"k", 5000))
        assert get_one(store, b"k", size) == (Outcome.WRONG_SIZE, pattern(size))

    def test_batches_answer_by_position_and_a_bad_key_costs_that_key_only(self, store):
        data = value_of(b"a", 3000)
        put_one(store, b"a", data)
        put_one(store, b"b", b"b")
        targets = [bytearray([PATTERN]) * size for size in (3000, 10, 10, 1, 3000)]
        outcomes = store.get_into(
            [b"a", b"absent", b"b", b"b", b"a"], [memoryview(target) for target in targets]
        )
        assert outcomes == [
            Outcome.OK,
            Outcome.MISSING,
            Outcome.WRONG_SIZE,
            Outcome.OK,
            Outcome.OK,
        ]
        assert targets == [data, pattern(10), pattern(10), b"b", data]

    def test_buffers_may_have_any_shape_and_type(self, store):
        source = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
        target = np.zeros((24,), dtype=np.int32)
        assert store.put_from([b"k"], [source.data]) == [Outcome.OK]
        assert store.get_into([b"k"], [target.data]) == [Outcome.OK]
        assert target.tobytes() == source.tobytes()

    # Keys

    @pytest.mark.parametrize(
        "key",
        [b"k", b"\0", b"\xff" * 511, b"\0" * 511, bytes(range(256)), b"a\0b/c"],
        ids=["one", "nul", "longest", "nuls", "every_byte", "mixed"],
    )
    def test_keys_are_any_bytes(self, store, key):
        key = key[: self.most_key_bytes]
        assert put_one(store, key, b"value") is Outcome.OK
        assert store.exists([key, key[:-1] + b"!" if len(key) > 1 else b"!"]) == b"\1\0"
        assert get_one(store, key, 5) == (Outcome.OK, b"value")

    def test_exists_answers_each_position(self, store):
        store.put_from([b"a", b"c"], [view(b"1"), view(b"2")])
        answer = store.exists([b"a", b"b", b"c", b"a", b"d"])
        assert isinstance(answer, bytearray)
        assert answer == b"\1\0\1\1\0"

    def test_empty_batches_have_empty_answers(self, store):
        assert store.exists([]) == bytearray()
        assert store.get_into([], []) == []
        assert store.put_from([], []) == []

    # Wrong arguments

    @pytest.mark.parametrize(
        "key", [b"", b"k" * 512, "text", None, bytearray(b"k")], ids=lambda key: repr(key)[:12]
    )
    def test_a_wrong_key_raises_before_anything_is_done(self, store, key):
        message = r"keys\[1\]"
        target = bytearray(pattern(1))
        with pytest.raises(ValueError, match=message):
            store.exists([b"good", key])
        with pytest.raises(ValueError, match=message):
            store.put_from([b"good", key], [view(b"1"), view(b"2")])
        assert store.exists([b"good"]) == b"\0"
        put_one(store, b"good", b"1")
        with pytest.raises(ValueError, match=message):
            store.get_into([b"good", key], [memoryview(target), memoryview(bytearray(1))])
        assert target == pattern(1)

    def test_a_wrong_number_of_buffers_raises(self, store):
        with pytest.raises(ValueError, match="2 keys, but 1 sources"):
            store.put_from([b"a", b"b"], [view(b"1")])
        with pytest.raises(ValueError, match="1 keys, but 2 targets"):
            store.get_into([b"a"], [memoryview(bytearray(1))] * 2)
        assert store.exists([b"a", b"b"]) == b"\0\0"

    @pytest.mark.parametrize(
        ("target", "message"),
        [
            (memoryview(b"12"), r"targets\[0\] is read-only"),
            (memoryview(bytearray(4))[::2], r"targets\[0\] is not contiguous"),
            ("text", r"targets\[0\] is str, not a buffer"),
        ],
        ids=["read_only", "strided", "text"],
    )
    def test_a_wrong_target_raises(self, store, target, message):
        put_one(store, b"k", b"ab")
        with pytest.raises(ValueError, match=message):
            store.get_into([b"k"], [target])

    def test_a_wrong_source_raises(self, store):
        with pytest.raises(ValueError, match=r"sources\[0\] is not contiguous"):
            store.put_from([b"k"], [memoryview(b"1234")[::2]])
        with pytest.raises(ValueError, match=r"sources\[0\] is int, not a buffer"):
            store.put_from([b"k"], [4])
        assert store.exists([b"k"]) == b"\0"

    def test_register_takes_buffers_only(self, store):
        buffer = bytearray(8192)
        store.register(memoryview(buffer))
        assert put_one(store, b"k", b"12") is Outcome.OK
        assert store.get_into([b"k"], [memoryview(buffer)[10:12]]) == [Outcome.OK]
        assert buffer[9:13] == b"\0" + b"12" + b"\0"
        with pytest.raises(ValueError, match="buffer is str"):
            store.register("text")

    # Removal

    def test_remove_removes_those_keys_only(self, store):
        keys = [b"a", b"ab", b"b", b"c"]
        store.put_from(keys, [view(key) for key in keys])
        assert store.remove([b"a", b"c", b"missing", b"a"]) == 2
        assert store.exists(keys) == b"\0\1\1\0"
        assert put_one(store, b"a", b"newer") is Outcome.OK
        assert get_one(store, b"a", 5) == (Outcome.OK, b"newer")

    def test_remove_of_no_keys_removes_nothing(self, store):
        put_one(store, b"a", b"1")
        assert store.remove([]) == 0
        assert store.exists([b"a"]) == b"\1"

    def test_remove_prefix_removes_that_prefix_only(self, store):
        gone = [b"p/", b"p/a", b"p/b", b"p/\xff\xff", b"p/" + b"z" * (self.most_key_bytes - 2)]
        kept = [b"p", b"o/a", b"p.a", b"p0", b"q/a", b"\xff", b"pp/"]
        store.put_from(gone + kept, [view(key) for key in gone + kept])
        assert store.remove_prefix(b"p/") == len(gone) * self.entries_per_value
        assert store.exists(gone + kept) == bytes(len(gone)) + b"\1" * len(kept)
        assert [get_one(store, key, len(key)) for key in kept] == [
            (Outcome.OK, key) for key in kept
        ]

    def test_remove_prefix_of_nothing_removes_nothing(self, store):
        put_one(store, b"a", b"1")
        assert store.remove_prefix(b"b") == 0
        assert store.remove_prefix(b"aa") == 0
        assert store.exists([b"a"]) == b"\1"

    def test_remove_prefix_of_xff_bytes_ends_at_the_last_key(self, store):
        store.put_from([b"\xfe\xff", b"\xff", b"\xff\xff\1"], [view(b"1")] * 3)
        assert store.remove_prefix(b"\xff") == 2 * self.entries_per_value
        assert store.exists([b"\xfe\xff", b"\xff", b"\xff\xff\1"]) == b"\1\0\0"

    def test_a_removed_key_can_be_put_again(self, store):
        put_one(store, b"k", b"old")
        store.remove_prefix(b"k")
        assert put_one(store, b"k", b"newer") is Outcome.OK
        assert get_one(store, b"k", 5) == (Outcome.OK, b"newer")

    def test_remove_prefix_wants_bytes(self, store):
        with pytest.raises(ValueError, match="prefix is str"):
            store.remove_prefix("p")

    # Counters

    def test_stats_say_what_is_held(self, store):
        empty = store.stats()
        store.put_from([b"a", b"b"], [view(bytes(100_000))] * 2)
        held = store.stats()
        assert held.num_values - empty.num_values == 2 * self.entries_per_value
        assert 200_000 <= held.used_bytes - empty.used_bytes <= 300_000
        assert held.used_bytes <= held.capacity_bytes
        store.remove_prefix(b"a")
        assert store.stats().num_values - empty.num_values == self.entries_per_value
        assert store.stats().used_bytes < held.used_bytes

    def test_stats_count_operations_by_outcome(self, store):
        put_one(store, b"a", b"12")
        put_one(store, b"a", b"12")
        get_one(store, b"a", 2)
        get_one(store, b"a", 3)
        get_one(store, b"b", 3)
        store.exists([b"a", b"b", b"c"])
        store.remove_prefix(b"a")
        expected = {
            "put_ok": 1,
            "put_exists": 1,
            "get_ok": 1,
            "get_wrong_size": 1,
            "get_missing": 1,
            "exists_found": 1,
            "exists_missing": 2,
            "removed": 1,
        }
        counters = store.stats().counters
        assert {name: counters[name] for name in expected} == expected
        assert all(counters.values())

    # Threads

    def test_threads_may_call_at_once(self, store):
        num_threads, num_keys, size = 6, 24, 30_000
        keys = [b"shared/%d" % idx for idx in range(num_keys)]
        data = [value_of(key, size) for key in keys]
        won: list[int] = []
        barrier = threading.Barrier(num_threads)

        def work() -> None:
            barrier.wait()
            for idx, key in enumerate(keys):
                won.append(put_one(store, key, data[idx]) is Outcome.OK)
                assert get_one(store, key, size) == (Outcome.OK, data[idx])
                assert store.exists([key]) == b"\1"

        run_threads([work] * num_threads)
        assert sum(won) == num_keys
        assert len(won) == num_keys * num_threads

    # The end

    def test_close_is_idempotent(self, store):
        store.close()
        store.close()

    def test_a_closed_store_answers_absent_or_closed(self, store):
        put_one(store, b"k", b"value")
        store.close()
        assert store.exists([b"k", b"j"]) == b"\0\0"
        assert get_one(store, b"k", 5) == (Outcome.CLOSED, pattern(5))
        assert put_one(store, b"new", b"1") is Outcome.CLOSED
        assert store.remove_prefix(b"k") == 0
        assert store.stats().counters["put_ok"] == self.entries_per_value

    def test_close_ends_calls_of_other_threads_without_harm(self, store):
        keys = [b"%d" % idx for idx in range(16)]
        data = [value_of(key, 1 << 20) for key in keys]
        store.put_from(keys, [view(item) for item in data])
        is_reading = threading.Barrier(3)
        outcomes: list[Outcome] = []

        def read() -> None:
            targets = [bytearray(1 << 20) for _ in keys]
            views = [memoryview(target) for target in targets]
            is_reading.wait()
            while True:
                answers = store.get_into(keys, views)
                outcomes.extend(answers)
                if Outcome.CLOSED in answers:
                    return
                assert targets == data

        def close() -> None:
            is_reading.wait()
            store.close()

        run_threads([read, read, close])
        assert set(outcomes) <= {Outcome.OK, Outcome.CLOSED}
        assert outcomes.count(Outcome.CLOSED) >= 2 * len(keys)

    # Everything at once

    def test_store_behaves_as_a_dict(self, store):
        run_state_machine_as_test(
            lambda: DictMachine(store, self.entries_per_value),
            settings=settings(
                max_examples=25,
                stateful_step_count=25,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )


def run_threads(functions: list[Callable[[], None]]) -> None:
    """Run the functions at once; raise what the first of them raised."""
    errors: list[BaseException] = []

    def run(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


PREFIXES = [b"", b"a", b"a/", b"a/b", b"b", b"\xff"]
KEYS = st.builds(
    bytes.__add__, st.sampled_from(PREFIXES[1:]), st.sampled_from([b"", b"0", b"1", b"\0", b"\xff"])
)
BATCHES = st.lists(KEYS, max_size=6)
VALUE_SIZES = st.sampled_from([1, 7, 100, 2038, 4080, 4097, 20_000])


class DictMachine(RuleBasedStateMachine):
    """Compares a store with a dict, under the prefix that all of its keys begin with."""

    ROOT = b"machine/"

    def __init__(self, store: Store, entries_per_value: int) -> None:
        super().__init__()
        self.store, self.entries = store, entries_per_value
        self.model: dict[bytes, bytes] = {}

    @initialize()
    def start_empty(self) -> None:
        self.store.remove_prefix(self.ROOT)

    @rule(keys=BATCHES, data=st.data())
    def put(self, keys: list[bytes], data: st.DataObject) -> None:
        keys = [self.ROOT + key for key in keys]
        values = [value_of(key, data.draw(VALUE_SIZES)) for key in keys]
        expected = []
        for key, value in zip(keys, values, strict=True):
            expected.append(Outcome.EXISTS if key in self.model else Outcome.OK)
            self.model.setdefault(key, value)
        assert self.store.put_from(keys, [view(value) for value in values]) == expected

    @rule(keys=BATCHES, data=st.data())
    def get(self, keys: list[bytes], data: st.DataObject) -> None:
        keys = [self.ROOT + key for key in keys]
        sizes = [
            len(self.model.get(key, b"x")) + data.draw(st.sampled_from([0, 0, 1])) for key in keys
        ]
        targets = [bytearray(pattern(size)) for size in sizes]
        outcomes = self.store.get_into(keys, [memoryview(target) for target in targets])
        for key, target, outcome in zip(keys, targets, outcomes, strict=True):
            stored = self.model.get(key)
            if stored is None:
                assert (outcome, target) == (Outcome.MISSING, pattern(len(target)))
            elif len(stored) != len(target):
                assert (outcome, target) == (Outcome.WRONG_SIZE, pattern(len(target)))
            else:
                assert (outcome, target) == (Outcome.OK, stored)

    @rule(prefix=st.sampled_from(PREFIXES))
    def remove(self, prefix: bytes) -> None:
        gone = [key for key in self.model if key.startswith(self.ROOT + prefix)]
        assert self.store.remove_prefix(self.ROOT + prefix) == len(gone) * self.entries
        for key in gone:
            del self.model[key]

    @rule(keys=BATCHES)
    def look(self, keys: list[bytes]) -> None:
        keys = [self.ROOT + key for key in keys]
        assert self.store.exists(keys) == bytes(key in self.model for key in keys)

    @invariant()
    def holds_as_many_values(self) -> None:
        assert self.store.stats().num_values == len(self.model) * self.entries
