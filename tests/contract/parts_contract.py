# SPDX-License-Identifier: Apache-2.0
"""What a store must do that takes values in parts: the same bytes under the same keys.

A subclass of ``PartsContract`` has a fixture ``store``, whose values may have nine parts and which
holds 8 MiB.
"""

from __future__ import annotations

import mmap
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_contract import PATTERN, get_one, put_one, value_of

from kvxfer.stores import Outcome
from kvxfer.stores.parts import Parts

CACHE_BYTES = 1 << 20
LINE_BYTES = 4096
"""Between the starts of two parts: most are shorter, so bytes of nobody lie between."""
PART_BYTES = [1, 15, 16, 1000, 4095, LINE_BYTES]


class Cache:
    """Registered memory with room for parts, which lie in any order."""

    def __init__(self, store):
        self.view = memoryview(mmap.mmap(-1, CACHE_BYTES))
        self.bytes = np.frombuffer(self.view, np.uint8)
        self.ptr = self.bytes.ctypes.data
        store.register(self.view)

    def clear(self):
        self.bytes[:] = PATTERN

    def draw(self, sizes_by_value, seed=0):
        """Return parts of these sizes (a list for each value) at lines in any order."""
        sizes = [size for sizes in sizes_by_value for size in sizes]
        lines = np.random.default_rng(seed).permutation(CACHE_BYTES // LINE_BYTES)[: len(sizes)]
        return Parts(
            ptrs=self.ptr + lines.astype(np.int64) * LINE_BYTES,
            sizes=np.array(sizes, np.int64),
            counts=np.array([len(sizes) for sizes in sizes_by_value], np.int64),
        )

    def slots(self, parts):
        """Return where each part lies among the bytes, value by value."""
        starts = (parts.ptrs - self.ptr).tolist()
        slots = [
            slice(at, at + size) for at, size in zip(starts, parts.sizes.tolist(), strict=True)
        ]
        ends = np.append(0, np.cumsum(parts.counts)).tolist()
        return [slots[start:stop] for start, stop in pairwise(ends)]

    def write(self, parts, values):
        for slots, value in zip(self.slots(parts), values, strict=True):
            at = 0
            for slot in slots:
                size = slot.stop - slot.start
                self.bytes[slot] = np.frombuffer(value[at : at + size], np.uint8)
                at += size

    def read(self, parts):
        return [b"".join(self.bytes[slot].tobytes() for slot in s) for s in self.slots(parts)]

    def untouched(self, parts=None):
        """Whether all bytes, but for those of the parts, are still the pattern."""
        others = np.ones(CACHE_BYTES, bool)
        for slots in self.slots(parts) if parts is not None else ():
            for slot in slots:
                others[slot] = False
        return bool((self.bytes[others] == PATTERN).all())


def cut_again(num_bytes, first_bytes):
    """Return sizes of parts of a value: ``first_bytes``, then lines, then what is left."""
    ends = [*range(first_bytes, num_bytes, LINE_BYTES), num_bytes]
    return np.diff(ends, prepend=0).tolist()


@pytest.fixture
def cache(store):
    cache = Cache(store)
    cache.clear()
    return cache


KEYS = [b"a", b"b", b"c"]
SIZES = [[4096, 100, 1], [50], [16, 4096, 16, 4000]]
VALUES = [value_of(key, sum(sizes)) for key, sizes in zip(KEYS, SIZES, strict=True)]


class PartsContract:
    """One test per sentence of ``Store.get_parts`` and ``Store.put_parts``."""

    def test_what_is_put_packed_comes_in_parts_and_nothing_else_is_touched(self, store, cache):
        store.put_from(KEYS, [memoryview(value) for value in VALUES])
        parts = cache.draw(SIZES)
        assert store.get_parts(KEYS, parts) == [Outcome.OK] * 3
        assert cache.read(parts) == VALUES
        assert cache.untouched(parts)

    def test_what_is_put_in_parts_is_the_packed_value(self, store, cache):
        parts = cache.draw(SIZES)
        cache.write(parts, VALUES)
        before = cache.bytes.copy()
        assert store.put_parts(KEYS, parts) == [Outcome.OK] * 3
        assert (cache.bytes == before).all()
        assert store.exists(KEYS) == b"\1\1\1"
        for key, value in zip(KEYS, VALUES, strict=True):
            assert get_one(store, key, len(value)) == (Outcome.OK, value)

    def test_parts_may_be_cut_in_any_way(self, store, cache):
        sizes_by_value = st.lists(
            st.lists(st.sampled_from(PART_BYTES), min_size=1, max_size=8), min_size=1, max_size=8
        )

        @settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
        @given(sizes_by_value, st.integers(0, 99), st.integers(1, LINE_BYTES))
        def check(sizes, seed, first_bytes):
            keys = [b"%d" % idx for idx in range(len(sizes))]
            values = [value_of(key, sum(each)) for key, each in zip(keys, sizes, strict=True)]
            store.remove(keys)
            source = cache.draw(sizes, seed)
            cache.write(source, values)
            assert set(store.put_parts(keys, source)) == {Outcome.OK}
            cache.clear()
            target = cache.draw([cut_again(sum(each), first_bytes) for each in sizes], seed + 1)
            assert set(store.get_parts(keys, target)) == {Outcome.OK}
            assert cache.read(target) == values
            assert cache.untouched(target)

        check()

    @pytest.mark.parametrize(
        "sizes",
        [[100, 99], [100, 101], [100, 100, 1], [100], [199], [4096], [100, 100, 4096]],
        ids=str,
    )
    def test_a_value_of_another_size_touches_no_part(self, store, cache, sizes):
        put_one(store, b"k", value_of(b"k", 200))
        assert store.get_parts([b"k"], cache.draw([sizes])) == [Outcome.WRONG_SIZE]
        assert cache.untouched()

    def test_a_bad_key_costs_that_key_only(self, store, cache):
        put_one(store, b"a", VALUES[0])
        put_one(store, b"c", b"short")
        parts = cache.draw(SIZES)
        outcomes = store.get_parts(KEYS, parts)
        assert outcomes == [Outcome.OK, Outcome.MISSING, Outcome.WRONG_SIZE]
        first = Parts(parts.ptrs[:3], parts.sizes[:3], parts.counts[:1])
        assert cache.read(first) == VALUES[:1]
        assert cache.untouched(first)

    def test_equal_keys_of_one_call_all_come(self, store, cache):
        put_one(store, b"k", value_of(b"k", 200))
        parts = cache.draw([[150, 50], [150, 50], [200]])
        assert store.get_parts([b"k"] * 3, parts) == [Outcome.OK] * 3
        assert cache.read(parts) == [value_of(b"k", 200)] * 3

    def test_a_present_key_stays_as_it_was(self, store, cache):
        put_one(store, b"k", b"first")
        parts = cache.draw([[2, 3]])
        assert store.put_parts([b"k"], parts) == [Outcome.EXISTS]
        assert get_one(store, b"k", 5) == (Outcome.OK, b"first")

    def test_no_values_have_empty_answers(self, store, cache):
        empty = cache.draw([])
        assert store.get_parts([], empty) == store.put_parts([], empty) == []

    @pytest.mark.parametrize("act", ["get_parts", "put_parts"])
    def test_a_part_outside_of_registered_memory_raises_before_anything_is_done(
        self, store, cache, act
    ):
        put_one(store, b"a", VALUES[0])
        parts = cache.draw(SIZES[:2])
        stray = np.zeros(LINE_BYTES, np.uint8)
        parts.ptrs[3] = stray.ctypes.data
        with pytest.raises(ValueError, match=r"part 3 of 50 bytes .* not in a registered buffer"):
            getattr(store, act)(KEYS[:2], parts)
        assert cache.untouched()
        assert not stray.any()
        assert store.exists(KEYS[:2]) == b"\1\0"

    def test_a_part_that_begins_in_registered_memory_and_ends_outside_raises(self, store, cache):
        parts = cache.draw([[100]])
        parts.ptrs[0] = cache.ptr + CACHE_BYTES - 99
        with pytest.raises(ValueError, match="not in a registered buffer"):
            store.get_parts([b"k"], parts)

    @pytest.mark.parametrize(
        ("sizes", "message"),
        [
            ([[1], [1]], "1 keys, but parts of 2 values"),
            ([[1, 0]], "part 1 has 0 bytes"),
            ([[1, -5]], "part 1 has -5 bytes"),
            ([[]], "value 0 has 0 parts"),
        ],
        ids=["number", "empty", "negative", "none"],
    )
    def test_wrong_parts_raise(self, store, cache, sizes, message):
        with pytest.raises(ValueError, match=message):
            store.get_parts([b"k"], cache.draw(sizes))
        with pytest.raises(ValueError, match=message):
            store.put_parts([b"k"], cache.draw(sizes))
        assert store.exists([b"k"]) == b"\0"

    def test_more_parts_than_a_value_may_have_raise(self, store, cache):
        most = store.most_parts
        many = Parts(
            np.full(most + 1, cache.ptr), np.ones(most + 1, np.int64), np.array([most + 1])
        )
        with pytest.raises(ValueError, match=rf"value 0 has {most + 1} parts, not 1 to {most}"):
            store.get_parts([b"k"], many)

    def test_counts_that_do_not_add_up_raise(self, store, cache):
        parts = cache.draw([[1, 2]])
        with pytest.raises(ValueError, match="2 addresses and 2 sizes, their counts say 3"):
            store.put_parts([b"k"], Parts(parts.ptrs, parts.sizes, np.array([3])))

    def test_a_wrong_key_raises(self, store, cache):
        with pytest.raises(ValueError, match=r"keys\[0\]"):
            store.put_parts([b""], cache.draw([[1]]))

    def test_a_closed_store_answers_closed_and_touches_no_part(self, store, cache):
        parts = cache.draw(SIZES)
        store.close()
        cache.clear()
        assert store.put_parts(KEYS, parts) == [Outcome.CLOSED] * 3
        assert store.get_parts(KEYS, parts) == [Outcome.CLOSED] * 3
        assert cache.untouched()
