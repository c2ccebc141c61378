# SPDX-License-Identifier: Apache-2.0
from unittest.mock import create_autospec

import pytest

import kvxfer.stores
from kvxfer.cli.store_tap import TappedStore, halves_exchanged, tap_open_store
from kvxfer.stores.base import Outcome, Store, StoreStats
from kvxfer.stores.parts import TransferMode

VALUE = memoryview(b"value")
CALLS = {
    "register": (VALUE,),
    "watch_evictions": (print,),
    "exists": ([b"key"],),
    "get_into": ([b"key"], [VALUE]),
    "put_from": ([b"key"], [VALUE]),
    "remove": ([b"key"],),
    "remove_prefix": (b"k",),
    "scan": (b"k",),
    "stats": (),
    "close": (),
}
NOT_OFFERED = {"transfer_mode", "most_parts", "get_parts", "put_parts"}
"""What the tap has not: values pass packed."""


class DictStore(Store):
    """A store in a dict, for what passes through the tap."""

    def __init__(self):
        self.values, self.registered, self.closed = {}, [], False

    def register(self, buffer):
        self.registered.append(buffer)

    def exists(self, keys):
        return bytearray(key in self.values for key in keys)

    def get_into(self, keys, targets):
        for key, target in zip(keys, targets, strict=True):
            if key in self.values:
                target[:] = self.values[key]
        return [Outcome.OK if key in self.values else Outcome.MISSING for key in keys]

    def put_from(self, keys, sources):
        outcomes = [Outcome.EXISTS if key in self.values else Outcome.OK for key in keys]
        for key, source in zip(keys, sources, strict=True):
            self.values.setdefault(key, bytes(source))
        return outcomes

    def remove(self, keys):
        return sum(self.values.pop(key, None) is not None for key in keys)

    def remove_prefix(self, prefix):
        doomed = [key for key in self.values if key.startswith(prefix)]
        return len([self.values.pop(key) for key in doomed])

    def stats(self):
        return StoreStats(len(self.values), 0, 0, {})

    def close(self):
        self.closed = True


@pytest.fixture
def inner():
    return DictStore()


def test_tap_knows_everything_that_a_store_offers():
    offered = {name for name in vars(Store) if not name.startswith("_")}
    assert offered == set(CALLS) | NOT_OFFERED, "forward it, and say here with which arguments"
    assert set(CALLS) <= set(vars(TappedStore))


@pytest.mark.parametrize("name", CALLS)
def test_tap_passes_each_call_on_and_returns_the_answer(name):
    store = create_autospec(Store, instance=True)
    answer = [Outcome.OK] if name in ("get_into", "put_from") else object()
    getattr(store, name).return_value = answer
    found = getattr(TappedStore(store), name)(*CALLS[name])
    getattr(store, name).assert_called_once_with(*CALLS[name])
    assert found is (None if name in ("register", "watch_evictions", "close") else answer)


def test_tap_has_values_handed_over_packed():
    offers = {"transfer_mode": TransferMode.DIRECT, "most_parts": 9}
    tap = TappedStore(create_autospec(Store, instance=True, **offers))
    assert (tap.transfer_mode, tap.most_parts) == (TransferMode.PACKED, 0)


def test_tap_works_as_the_store_does(inner):
    tap, target = TappedStore(inner), bytearray(4)
    tap.register(memoryview(target))
    assert tap.put_from([b"a1"], [memoryview(b"abcd")]) == [Outcome.OK]
    assert tap.exists([b"a1", b"a2"]) == bytearray([1, 0])
    assert tap.get_into([b"a1"], [memoryview(target)]) == [Outcome.OK]
    assert target == b"abcd"
    assert tap.stats().num_values == 1
    assert tap.remove([b"other"]) == 0
    assert tap.remove_prefix(b"a") == 1
    tap.close()
    assert inner.registered == [memoryview(target)]
    assert inner.closed


def test_tap_counts_only_what_moved(inner):
    tap = TappedStore(inner)
    tap.put_from([b"a", b"b"], [memoryview(b"abcd"), memoryview(b"ef")])
    tap.put_from([b"a"], [memoryview(b"abcd")])
    tap.get_into([b"b", b"c"], [memoryview(bytearray(2)), memoryview(bytearray(2))])
    assert (tap.puts.num_values, tap.puts.num_bytes) == (2, 6)
    assert (tap.gets.num_values, tap.gets.num_bytes) == (1, 2)
    assert tap.puts.seconds > 0
    assert tap.gets.seconds > 0


def test_corrupting_tap_stores_other_bytes_of_the_same_size_and_leaves_the_source(inner):
    tap, source = TappedStore(inner, corrupt=True), bytearray(b"abcdefg")
    assert tap.put_from([b"a"], [memoryview(source)]) == [Outcome.OK]
    assert inner.values[b"a"] == b"defgabc"
    assert source == b"abcdefg"


@pytest.mark.parametrize("value", [b"", b"a", b"ab", b"abc"], ids=len)
def test_halves_exchanged_keeps_every_byte(value):
    damaged = bytes(halves_exchanged(memoryview(value)))
    assert sorted(damaged) == sorted(value)
    assert (damaged == value) == (len(value) < 2)


def test_tap_open_store_taps_each_store_that_is_opened(inner, monkeypatch):
    monkeypatch.setattr(kvxfer.stores, "open_store", lambda uri: inner)
    taps = tap_open_store(corrupt=True)
    store = kvxfer.stores.open_store("lmdb://")
    assert taps == [store]
    store.put_from([b"a"], [memoryview(b"ab")])
    assert inner.values == {b"a": b"ba"}
