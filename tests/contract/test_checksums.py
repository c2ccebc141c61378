# SPDX-License-Identifier: Apache-2.0
"""A store with checksums keeps the contract, and damage beneath it is told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from store_contract import StoreContract, get_one, put_one, view

from kvxfer.stores import Outcome, Store, open_store
from kvxfer.stores.checksums import SUM_SUFFIX, ChecksummedStore


class TestChecksummedStore(StoreContract):
    most_key_bytes = 510
    entries_per_value = 2

    def make_store(self, folder: Path) -> Store:
        return ChecksummedStore(open_store(f"lmdb://{folder}/store?capacity=48MiB"))

    def test_stats_count_operations_by_outcome(self, store):
        """Both entries of a value count, in one call each."""
        put_one(store, b"a", b"12")
        get_one(store, b"a", 2)
        store.exists([b"a", b"b"])
        expected = {"put_ok": 2, "get_ok": 2, "exists_found": 2, "exists_missing": 2}
        assert store.stats().counters == expected


class TestDamage:
    @pytest.fixture
    def inner(self, tmp_path: Path) -> Iterator[Store]:
        store = open_store(f"lmdb://{tmp_path}/store?capacity=8MiB")
        yield store
        store.close()

    @pytest.fixture
    def store(self, inner: Store) -> Store:
        return ChecksummedStore(inner)

    def test_a_value_with_one_bit_changed_is_corrupt(self, store, inner):
        put_one(store, b"k", b"value")
        inner.remove([b"k"])
        put_one(inner, b"k", b"valud")
        assert get_one(store, b"k", 5)[0] is Outcome.CORRUPT

    def test_a_value_under_another_key_is_corrupt(self, store, inner):
        store.put_from([b"a", b"b"], [view(b"one"), view(b"two")])
        inner.remove([b"a", b"a" + SUM_SUFFIX])
        _, value = get_one(inner, b"b", 3)
        _, digest = get_one(inner, b"b" + SUM_SUFFIX, 16)
        inner.put_from([b"a", b"a" + SUM_SUFFIX], [view(value), view(digest)])
        assert get_one(store, b"a", 3)[0] is Outcome.CORRUPT
        assert get_one(store, b"b", 3) == (Outcome.OK, b"two")

    def test_a_digest_of_another_size_is_corrupt(self, store, inner):
        put_one(inner, b"k", b"value")
        put_one(inner, b"k" + SUM_SUFFIX, b"short")
        assert get_one(store, b"k", 5)[0] is Outcome.CORRUPT

    def test_a_value_without_a_digest_is_not_stored(self, store, inner):
        put_one(inner, b"k", b"value")
        assert store.exists([b"k"]) == b"\0"
        assert get_one(store, b"k", 5)[0] is Outcome.MISSING

    def test_a_value_without_a_digest_is_replaced_by_one_that_differs(self, store, inner):
        """Computed again, KV need not be equal bit by bit: its digest would not fit the old one."""
        put_one(inner, b"k", b"value")
        assert put_one(store, b"k", b"valuf") is Outcome.OK
        assert get_one(store, b"k", 5) == (Outcome.OK, b"valuf")

    def test_a_digest_without_its_value_is_replaced(self, store, inner):
        put_one(store, b"k", b"value")
        inner.remove([b"k"])
        assert put_one(store, b"k", b"valuf") is Outcome.OK
        assert get_one(store, b"k", 5) == (Outcome.OK, b"valuf")

    def test_a_removed_corrupt_value_is_replaced_by_the_next_put(self, store, inner):
        put_one(store, b"k", b"value")
        inner.remove([b"k"])
        put_one(inner, b"k", b"wrong")
        assert store.remove([b"k"]) == 1
        assert put_one(store, b"k", b"value") is Outcome.OK
        assert get_one(store, b"k", 5) == (Outcome.OK, b"value")
