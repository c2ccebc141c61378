# SPDX-License-Identifier: Apache-2.0
"""A scan lists what an embedded store holds, and leaves all of it as it was."""

import pytest

from kvxfer.errors import StoreError
from kvxfer.stores import lmdb as lmdb_store
from kvxfer.stores import open_store


@pytest.fixture
def store(tmp_path):
    store = open_store(f"lmdb://{tmp_path}/store?capacity=16MiB")
    yield store
    store.close()


def put(store, keys, size):
    outcomes = store.put_from(keys, [memoryview(bytes(size)) for _ in keys])
    assert all(outcome.stored for outcome in outcomes)


def test_scan_yields_each_value_under_the_prefix_and_what_it_costs(store):
    put(store, [b"a/1", b"a/2", b"b/1"], 5000)
    found = dict(store.scan(b"a/"))
    assert set(found) == {b"a/1", b"a/2"}
    assert all(5000 <= num_bytes <= 16_384 for num_bytes in found.values())
    assert sum(num for _, num in store.scan(b"")) == store.stats().used_bytes


def test_scan_goes_on_over_many_transactions(store, monkeypatch):
    monkeypatch.setattr(lmdb_store, "SCAN_ROWS", 3)
    keys = [b"k%03d" % idx for idx in range(20)]
    put(store, keys, 10)
    assert sorted(value.key for value in store.scan(b"")) == keys


def test_scan_leases_nothing_and_marks_nothing_as_used(store):
    put(store, [b"first"], 1 << 20)
    uses = store._reference.handle().writer._uses
    slot = uses.slot(b"first")
    before = uses.last_use(slot), uses.is_leased(slot, 0.0)
    assert [value.key for value in store.scan(b"")] == [b"first"]
    assert (uses.last_use(slot), uses.is_leased(slot, 0.0)) == before == (0, False)


def test_scan_of_a_closed_store_is_empty(store):
    put(store, [b"key"], 10)
    store.close()
    assert list(store.scan(b"")) == []


def test_scan_says_where_it_could_not_read_to_the_end(store, monkeypatch):
    put(store, [b"key"], 10)

    def fail(rank, most):
        raise OSError("no")

    monkeypatch.setattr(store._reference.handle().reader, "rows_after", fail)
    with pytest.raises(StoreError, match="cannot be read"):
        list(store.scan(b""))


def test_scan_wants_bytes(store):
    with pytest.raises(ValueError, match="prefix"):
        list(store.scan("text"))
