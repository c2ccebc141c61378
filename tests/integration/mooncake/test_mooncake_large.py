# SPDX-License-Identifier: Apache-2.0
"""The load that overflows the transport where each layer is a segment: 64 values of 80 layers.

As scatter lists in one native call it fails (``benchmarks/ratios_mooncake.py``).
"""

from __future__ import annotations

import mmap

import numpy as np
import pytest
from mooncake_servers import MIB

from kvxfer.stores import Outcome
from kvxfer.stores.parts import Parts

NUM_VALUES, NUM_LAYERS, SEGMENT_BYTES = 64, 80, 16 * 1024
VALUE_BYTES = NUM_LAYERS * SEGMENT_BYTES
TOTAL_BYTES = NUM_VALUES * VALUE_BYTES
NUM_LOADS = 20
NUM_LOADS_IN_PARTS = 5
KEYS = [b"large/%d" % number for number in range(NUM_VALUES)]
ALL_OK = [Outcome.OK] * NUM_VALUES


@pytest.fixture
def store(start, open_on):
    return open_on(start(2 * TOTAL_BYTES, lease_ms=10_000), timeout_s=10)


@pytest.fixture
def content():
    shape = (NUM_VALUES, NUM_LAYERS, SEGMENT_BYTES)
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


def new_memory(store, *shape):
    """Return registered bytes of a shape."""
    memory = np.frombuffer(mmap.mmap(-1, int(np.prod(shape))), np.uint8)
    store.register(memory.data)
    return memory.reshape(shape)


def test_packed_values_load_twenty_times_without_a_failure(store, content):
    staging = new_memory(store, NUM_VALUES, VALUE_BYTES)
    staging[:] = content.reshape(NUM_VALUES, VALUE_BYTES)
    views = [memoryview(value) for value in staging]
    assert store.put_from(KEYS, views) == ALL_OK
    for _ in range(NUM_LOADS):
        staging[:] = 0
        assert store.get_into(KEYS, views) == ALL_OK
        assert (staging == content.reshape(NUM_VALUES, VALUE_BYTES)).all()
    assert TOTAL_BYTES > 64 * MIB  # more than one native call takes


def test_values_in_parts_load_again_and_again_without_a_failure(store, content):
    """5,120 segments in one call: what the wire takes at once is bounded."""
    cache = new_memory(store, NUM_LAYERS, NUM_VALUES, SEGMENT_BYTES)
    cache[:] = content.transpose(1, 0, 2)
    layers = cache.ctypes.data + NUM_VALUES * SEGMENT_BYTES * np.arange(NUM_LAYERS)
    ptrs = SEGMENT_BYTES * np.arange(NUM_VALUES)[:, None] + layers
    num_segments = NUM_VALUES * NUM_LAYERS
    sizes, counts = np.full(num_segments, SEGMENT_BYTES), np.full(NUM_VALUES, NUM_LAYERS)
    parts = Parts(ptrs.ravel(), sizes, counts)
    assert store.put_parts(KEYS, parts) == ALL_OK
    for _ in range(NUM_LOADS_IN_PARTS):
        cache[:] = 0
        assert store.get_parts(KEYS, parts) == ALL_OK
        assert (cache == content.transpose(1, 0, 2)).all()
    assert store._transfers._wire.peak_segments <= 512
    packed = bytearray(VALUE_BYTES)
    assert store.get_into(KEYS[:1], [memoryview(packed)]) == [Outcome.OK]
    assert packed == content[0].tobytes()
