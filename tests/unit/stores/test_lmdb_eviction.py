# SPDX-License-Identifier: Apache-2.0
"""Which values leave a full LMDB store, and which never do."""

from __future__ import annotations

import random
import time
from collections import Counter

import pytest

from kvxfer.stores import Outcome, open_store

SIZE = 50_000
FIT = 16
"""Values of SIZE bytes that a store of 1 MiB holds."""


@pytest.fixture
def open_small(tmp_path):
    """Open stores of 1 MiB, with the URI options given."""
    opened = []

    def open_one(options="lease_s=0", capacity="1MiB"):
        opened.append(open_store(f"lmdb://{tmp_path}/store?capacity={capacity}&{options}"))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


def names(*numbers):
    return [b"key/%03d" % number for number in numbers]


def put(store, keys, size=SIZE):
    """Put values that begin with their keys, in one call."""
    return store.put_from(keys, [memoryview(key.ljust(size, b".")) for key in keys])


def put_each(store, keys):
    """Put in one call per key: each is a generation of its own in a store of 1 MiB."""
    for key in keys:
        assert put(store, [key]) == [Outcome.OK]


def held(store, keys):
    """Return the keys that are there, without touching their age or a lease."""
    reader = store._reference.handle().reader
    found, _ = reader._look(keys)
    return [key for key, is_there in zip(keys, found, strict=True) if is_there]


def get(store, key, size=SIZE):
    target = bytearray(size)
    (outcome,) = store.get_into([key], [memoryview(target)])
    assert outcome is Outcome.MISSING or target.startswith(key)
    return outcome


def test_the_oldest_value_leaves_first(open_small):
    store = open_small()
    keys = names(*range(FIT + 3))
    put_each(store, keys)
    assert held(store, keys) == keys[3:]
    assert store.stats().counters["evicted"] == 3
    assert get(store, keys[0]) is Outcome.MISSING
    assert get(store, keys[3]) is Outcome.OK


@pytest.mark.parametrize("use", ["exists", "get", "put"])
def test_a_used_value_counts_as_young(open_small, use):
    store = open_small()
    keys = names(*range(FIT))
    put_each(store, keys)
    if use == "exists":
        assert store.exists(keys[:2]) == b"\1\1"
    elif use == "get":
        assert [get(store, key) for key in keys[:2]] == [Outcome.OK] * 2
    else:
        assert put(store, keys[:2]) == [Outcome.EXISTS] * 2
    put_each(store, names(100, 101))
    assert held(store, keys) == keys[:2] + keys[4:]


def test_a_use_protects_once(open_small):
    store = open_small()
    keys = names(*range(FIT))
    put_each(store, keys)
    store.exists(keys[:1])
    put_each(store, names(*range(100, 100 + FIT)))
    assert held(store, keys) == []


def test_tails_leave_before_heads(open_small):
    store = open_small()
    first, second = names(*range(8)), names(*range(10, 18))
    put(store, first)
    put(store, second)
    assert held(store, first + second) == first + second
    put_each(store, names(100, 101, 102))
    assert held(store, first + second) == first[:5] + second


def test_tails_of_a_prefix_that_was_looked_up_leave_before_its_heads(open_small):
    store = open_small()
    prefix, others = names(*range(6)), names(*range(10, 20))
    put(store, prefix)
    put_each(store, others)
    store.exists(prefix)
    put_each(store, names(*range(100, 110)))
    assert held(store, prefix + others) == prefix
    put_each(store, names(*range(110, 114)))
    remaining = held(store, prefix)
    assert remaining == prefix[: len(remaining)]
    assert len(remaining) < len(prefix)


def test_a_batch_larger_than_the_store_keeps_its_head(open_small):
    store = open_small()
    put(store, names(500, 501))
    keys = names(*range(FIT + 10))
    outcomes = put(store, keys)
    assert outcomes == [Outcome.OK] * FIT + [Outcome.NO_SPACE] * 10
    assert held(store, keys) == keys[:FIT]
    assert held(store, names(500, 501)) == []


def test_a_leased_value_stays(open_small):
    store = open_small("lease_s=1000")
    keys = names(*range(FIT))
    put_each(store, keys)
    assert store.exists([*keys[:4], b"absent"]) == b"\1\1\1\1\0"
    put_each(store, names(*range(100, 100 + 3 * FIT)))
    assert held(store, keys) == keys[:4]


def test_a_lease_ends(open_small, monkeypatch):
    store = open_small("lease_s=30")
    keys = names(*range(FIT))
    put_each(store, keys)
    store.exists(keys)
    assert put(store, names(100)) == [Outcome.NO_SPACE]
    later = time.monotonic() + 31
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert put(store, names(100)) == [Outcome.OK]
    assert len(held(store, keys)) == FIT - 1


def test_a_lease_holds_against_other_stores(open_small):
    store, other = open_small("lease_s=1000"), open_small("lease_s=0")
    keys = names(*range(FIT))
    put_each(store, keys)
    store.exists(keys[:2])
    other.exists(keys[:2])
    put_each(other, names(*range(100, 100 + FIT)))
    assert held(store, keys) == keys[:2]


def test_a_store_under_lease_is_no_space_and_stays_usable(open_small):
    store = open_small("lease_s=1000")
    keys = names(*range(FIT))
    put(store, keys)
    store.exists(keys)
    assert put(store, [b"new", keys[3]]) == [Outcome.NO_SPACE, Outcome.EXISTS]
    assert put(store, [b"small"], size=100) == [Outcome.OK]
    assert held(store, keys) == keys
    assert [get(store, key) for key in keys] == [Outcome.OK] * FIT
    assert store.stats().counters["put_no_space"] == 1
    store.remove_prefix(keys[0])
    assert put(store, [b"new"]) == [Outcome.OK]


def test_a_value_beyond_an_eighth_of_the_limit_evicts_nothing(open_small):
    store = open_small()
    keys = names(*range(FIT))
    put(store, keys)
    limit = int(0.85 * (1 << 20))
    assert put(store, [b"large", b"huge"], size=limit // 8 + 1) == [Outcome.NO_SPACE] * 2
    assert held(store, keys) == keys
    assert put(store, [b"fits"], size=limit // 8 - 8192) == [Outcome.OK]


def test_a_lookup_during_an_eviction_does_not_report_what_leaves(open_small, monkeypatch):
    """The eviction decides before the lease and commits after the lookup's first look."""
    store = open_small("lease_s=1000")
    keys = names(*range(FIT))
    put_each(store, keys)
    reader = store._reference.handle().reader
    look, looks = reader._look, []

    def look_while_evicting(asked):
        looks.append(look(asked))
        if len(looks) == 1:
            with monkeypatch.context() as patch:
                patch.setattr(reader, "_look", look)
                put_each(store, names(100))
        return looks[-1]

    monkeypatch.setattr(reader, "_look", look_while_evicting)
    answer = store.exists(keys)
    assert [bytes(found) for found, _ in looks] == [b"\1" * FIT, b"\0" + b"\1" * (FIT - 1)]
    assert answer == looks[1][0]


def test_a_lookup_after_an_evictor_was_killed_answers_and_mends(open_small):
    store = open_small()
    put(store, names(1))
    uses = store._reference.handle().reader._uses
    killed = uses.evicting()
    killed.__enter__()
    assert store.exists(names(1, 2)) == b"\1\0"
    assert uses.epoch % 2 == 0
    assert store.exists(names(1, 2)) == b"\1\0"


def test_a_working_set_that_is_read_again_keeps_hitting(open_small):
    """Ten times the capacity passes by; a set of half of it is read once per quarter."""
    store = open_small(capacity="8MiB")
    size = 30_000
    num_working = int(0.85 * (8 << 20)) // 2 // (size + 4096)
    working = names(*range(num_working))
    assert put(store, working, size) == [Outcome.OK] * num_working
    num_passing = 10 * (8 << 20) // size
    step = num_passing // 40
    for start in range(0, num_passing, step):
        passing = [b"passing/%06d" % number for number in range(start, start + step)]
        assert put(store, passing, size) == [Outcome.OK] * step
        assert [get(store, key, size) for key in working] == [Outcome.OK] * num_working
    assert store.stats().counters["evicted"] > num_passing - 2 * num_working


@pytest.mark.parametrize(
    "draw_size",
    [
        lambda rng: rng.randint(1, 2000),
        lambda rng: 4096,
        lambda rng: 65_536,
        lambda rng: int(2 ** rng.uniform(0, 18)),
        lambda rng: rng.choice([3000, 800_000]),
    ],
    ids=["tiny", "page", "even", "mixed", "extremes"],
)
def test_ten_times_the_capacity_is_never_refused(open_small, draw_size):
    """Fragments may cause MAP_FULL inside; no put fails for it, and the accounting stays right."""
    store = open_small(capacity="8MiB")
    rng = random.Random(7)
    passed = number = 0
    outcomes = Counter()
    while passed < 10 * (8 << 20) and number < 12_000:
        sizes = [draw_size(rng) for _ in range(4)]
        keys = [b"%d/" % (number + idx) + b"x" * rng.randint(0, 200) for idx in range(4)]
        outcomes.update(store.put_from(keys, [memoryview(bytes(size)) for size in sizes]))
        passed += sum(sizes)
        number += 4
    assert set(outcomes) == {Outcome.OK}
    stats = store.stats()
    assert stats.used_bytes <= 0.85 * stats.capacity_bytes
    assert stats.num_values + stats.counters.get("evicted", 0) == number
    assert store.remove_prefix(b"") == stats.num_values
    assert store.stats().used_bytes == 0


def test_the_largest_values_are_stored_again_and_again(open_small):
    store = open_small(capacity="8MiB")
    size = int(0.85 * (8 << 20)) // 8 - 8192
    outcomes = [put(store, [b"%d" % number], size)[0] for number in range(60)]
    assert set(outcomes) == {Outcome.OK}
