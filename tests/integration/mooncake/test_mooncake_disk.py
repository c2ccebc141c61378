# SPDX-License-Identifier: Apache-2.0
"""A pool with a disk tier: values that have left memory are loaded from the owner's disk."""

from __future__ import annotations

import numpy as np
import pytest
from mooncake_servers import MIB, own_role, servers, wait_until

from kvxfer.stores import Outcome, open_store
from kvxfer.stores.parts import Parts

SEGMENT_BYTES = 16 * MIB
STAGING_BYTES = 4 * MIB
LARGE_BYTES = STAGING_BYTES + 1
NUM_VALUES = 24
"""Of 1 MiB: a third of them is on disk only."""
KEYS = [b"disk/%d" % number for number in range(NUM_VALUES)]
PATTERN = b"\xa5"
OWNER = {
    "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES": str(STAGING_BYTES),
    "MOONCAKE_OFFLOAD_STORAGE_BACKEND_DESCRIPTOR": "file_per_key_storage_backend",
    "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1",
}


def value_of(key, num_bytes=MIB):
    return np.random.default_rng(list(key)).bytes(num_bytes)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mooncake-disk")
    (folder / "disk").mkdir()
    with (
        pytest.MonkeyPatch.context() as patch,
        servers(folder, 0, flags=["--enable_offload=true"]) as pool,
        own_role(pool.master, SEGMENT_BYTES, OWNER, ssd_offload_path=folder / "disk"),
    ):
        patch.setenv("MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES", str(STAGING_BYTES))
        store = open_store(pool.master.uri(offload="yes"))
        put_with_patience(store, b"large", value_of(b"large", LARGE_BYTES))
        for key in KEYS:
            put_with_patience(store, key, value_of(key))
        wait_until(lambda: store.exists(KEYS) == b"\1" * NUM_VALUES)
        assert store.stats().used_bytes <= SEGMENT_BYTES < NUM_VALUES * MIB
        yield store
        store.close()


def put_with_patience(store, key, value):
    """Put a value once the tier has made room for it."""
    wait_until(lambda: store.put_from([key], [memoryview(value)])[0].stored)


def get(store, keys, num_bytes):
    targets = [bytearray(PATTERN * size) for size in num_bytes]
    return store.get_into(keys, [memoryview(target) for target in targets]), targets


def test_values_come_from_disk_and_from_memory_in_one_call(store):
    """Of more bytes than the owner can stage at once."""
    outcomes, targets = get(store, KEYS, [MIB] * NUM_VALUES)
    assert outcomes == [Outcome.OK] * NUM_VALUES
    assert targets == list(map(value_of, KEYS))


@pytest.mark.parametrize("num_bytes", [4096, MIB - 1, MIB + 1, 2 * MIB])
def test_a_value_of_another_size_is_told_and_touches_nothing(store, num_bytes):
    outcomes, targets = get(store, KEYS, [num_bytes] * NUM_VALUES)
    assert outcomes == [Outcome.WRONG_SIZE] * NUM_VALUES
    assert targets == [PATTERN * num_bytes] * NUM_VALUES


def test_values_come_from_disk_in_parts(store):
    cache = np.zeros(NUM_VALUES * MIB, np.uint8)
    store.register(cache.data)
    sizes = [1000, MIB - 1000]
    ends = cache.ctypes.data + MIB * np.arange(NUM_VALUES)[:, None] + [MIB - 1000, 0]
    parts = Parts(ends.ravel(), np.tile(sizes, NUM_VALUES), np.full(NUM_VALUES, 2))
    assert store.get_parts(KEYS, parts) == [Outcome.OK] * NUM_VALUES
    for key, found in zip(KEYS, cache.reshape(NUM_VALUES, MIB), strict=True):
        assert found[-1000:].tobytes() + found[:-1000].tobytes() == value_of(key)


def test_a_value_above_the_staging_fails_alone(store):
    outcomes, targets = get(store, [KEYS[0], b"large", KEYS[1]], [MIB, LARGE_BYTES, MIB])
    assert outcomes == [Outcome.OK, Outcome.FAILED, Outcome.OK]
    assert targets == [value_of(KEYS[0]), PATTERN * LARGE_BYTES, value_of(KEYS[1])]
    assert store.stats().counters["get_oversize"] == 1


def test_a_removed_prefix_leaves_the_disk_too(store):
    assert store.remove_prefix(b"disk/") == NUM_VALUES
    assert store.exists(KEYS) == bytes(NUM_VALUES)
    assert get(store, KEYS[:1], [MIB])[0] == [Outcome.MISSING]
