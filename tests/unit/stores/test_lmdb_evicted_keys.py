# SPDX-License-Identifier: Apache-2.0
"""Which keys a store says that its puts have evicted."""

import pytest

from kvxfer.stores import Outcome, open_store
from kvxfer.stores.checksums import ChecksummedStore

VALUE = memoryview(bytes(32 << 10))
KEYS = [b"key-%02d" % i for i in range(40)]


@pytest.fixture
def store(tmp_path):
    store = open_store(f"lmdb://{tmp_path}/small?capacity=1MiB&lease_s=0")
    yield store
    store.close()


def put_all(store):
    return [store.put_from([key], [VALUE])[0] for key in KEYS]


def gone(store):
    return [key for key, found in zip(KEYS, store.exists(KEYS), strict=True) if not found]


def test_evicted_keys_are_told_in_the_order_in_which_they_leave(store):
    evicted = []
    store.watch_evictions(evicted.extend)
    assert set(put_all(store)) == {Outcome.OK}
    assert len(evicted) > 10
    assert evicted == gone(store)
    assert store.stats().counters["evicted"] == len(evicted)


def test_store_with_checksums_tells_of_values(store):
    summed, evicted = ChecksummedStore(store), []
    summed.watch_evictions(evicted.extend)
    put_all(summed)
    assert len(evicted) > 10
    assert set(gone(store)) <= set(evicted)


def test_put_that_evicts_nothing_tells_nothing(store):
    evicted = []
    store.watch_evictions(evicted.append)
    store.put_from(KEYS[:1], [VALUE])
    assert evicted == []
