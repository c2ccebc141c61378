# SPDX-License-Identifier: Apache-2.0
"""Staging: who may have a buffer, when it comes back, and that memory outlives the pool."""

import gc
import mmap
import threading
import time

import numpy as np
import pytest

from kvxfer.blocks import StagingPool

LONG_S = 30.0


@pytest.fixture
def pool():
    pool = StagingPool(num_slots=2, slot_bytes=5000)
    yield pool
    pool.close()


def address_of(buffer):
    return np.frombuffer(buffer, dtype=np.uint8).ctypes.data


def in_thread(target, *args):
    """Start a thread that keeps its result; returns a function that joins and returns it."""
    results = []
    thread = threading.Thread(target=lambda: results.append(target(*args)), name="test-acquire")
    thread.start()

    def join():
        thread.join(LONG_S)
        assert not thread.is_alive()
        return results[0]

    return join


def test_staging_slots_are_page_aligned_and_apart(pool):
    slots = [pool.acquire(0), pool.acquire(0)]
    assert [slot.ptr % mmap.PAGESIZE for slot in slots] == [0, 0]
    assert [len(slot.buffer) for slot in slots] == [5000, 5000]
    assert [address_of(slot.buffer) for slot in slots] == [slot.ptr for slot in slots]
    assert abs(slots[0].ptr - slots[1].ptr) >= 5000


def test_staging_slots_lie_in_the_pool_buffer(pool):
    slot = pool.acquire(0)
    start = slot.ptr - pool.ptr
    slot.buffer[:] = b"\7" * 5000
    assert pool.ptr == address_of(pool.buffer)
    assert pool.buffer[start : start + 5000] == slot.buffer
    assert not pool.buffer.readonly


def test_staging_hands_out_each_buffer_once(pool):
    first, second = pool.acquire(0), pool.acquire(0)
    assert first.ptr != second.ptr
    assert pool.acquire(0) is None
    assert pool.num_free == 0
    first.release()
    assert pool.num_free == 1
    assert pool.acquire(0).ptr == first.ptr


def test_staging_waits_no_longer_than_asked(pool):
    held = [pool.acquire(0), pool.acquire(0)]
    start = time.monotonic()
    assert pool.acquire(0.02) is None
    assert 0.02 <= time.monotonic() - start < LONG_S
    assert len(held) == 2


def test_staging_wakes_who_waits_for_a_slot(pool):
    first = pool.acquire(0)
    pool.acquire(0)
    join = in_thread(pool.acquire, LONG_S)
    first.release()
    assert join().ptr == first.ptr


def test_staging_close_wakes_who_waits(pool):
    held = [pool.acquire(0), pool.acquire(0)]
    joins = [in_thread(pool.acquire, LONG_S) for _ in range(3)]
    pool.close()
    assert [join() for join in joins] == [None] * 3
    assert len(held) == 2


def test_staging_hands_out_nothing_after_close(pool):
    slot = pool.acquire(0)
    assert not pool.closed
    pool.close()
    pool.close()
    assert pool.closed
    slot.release()
    assert pool.acquire(0) is None


def test_staging_release_twice_frees_once(pool):
    slot = pool.acquire(0)
    slot.release()
    again = pool.acquire(0)
    slot.release()  # of a lease that ended: must not touch the new one
    assert again.ptr == slot.ptr
    assert pool.num_free == 1


def test_staging_quarantined_slot_waits_for_its_release(pool):
    slot, other = pool.acquire(0), pool.acquire(0)
    assert pool.quarantine(slot)
    other.release()
    assert (pool.num_free, pool.num_quarantined) == (1, 1)
    assert pool.acquire(0).ptr == other.ptr
    assert pool.acquire(0) is None
    slot.release()
    assert (pool.num_free, pool.num_quarantined) == (1, 0)
    assert pool.acquire(0).ptr == slot.ptr


def test_staging_quarantine_counts_a_slot_once(pool):
    slot = pool.acquire(0)
    assert pool.quarantine(slot)
    assert pool.quarantine(slot)
    assert pool.num_quarantined == 1


def test_staging_quarantine_after_the_release_changes_nothing(pool):
    slot = pool.acquire(0)
    slot.release()
    assert not pool.quarantine(slot)
    assert (pool.num_free, pool.num_quarantined) == (2, 0)


def test_staging_context_releases_a_held_slot_even_on_errors(pool):
    def fail():
        with pool.acquire(0):
            raise KeyError("copy")

    with pytest.raises(KeyError, match="copy"):
        fail()
    assert pool.num_free == 2


def test_staging_context_leaves_a_quarantined_slot_to_its_late_return(pool):
    with pool.acquire(0) as slot:
        pool.quarantine(slot)
    assert (pool.num_free, pool.num_quarantined) == (1, 1)
    slot.release()
    assert (pool.num_free, pool.num_quarantined) == (2, 0)


def test_staging_memory_outlives_the_pool_while_a_slot_is_used():
    pool = StagingPool(1, 4096)
    slot = pool.acquire(0)
    pool.close()
    del pool
    gc.collect()
    slot.buffer[:] = b"\5" * 4096
    assert bytes(slot.buffer) == b"\5" * 4096
    slot.release()


def test_staging_slots_are_never_shared_between_threads():
    pool = StagingPool(3, 64)
    clashes = []

    def work(number):
        for _ in range(200):
            with pool.acquire(LONG_S) as slot:
                slot.buffer[:8] = number.to_bytes(8, "little")
                if slot.buffer[:8] != number.to_bytes(8, "little"):
                    clashes.append(number)
        return number

    joins = [in_thread(work, number) for number in range(6)]
    assert [join() for join in joins] == list(range(6))
    assert clashes == []
    assert pool.num_free == 3


@pytest.mark.parametrize(("num_slots", "slot_bytes"), [(0, 4096), (1, 0), (-1, 4096)])
def test_staging_refuses_an_empty_pool(num_slots, slot_bytes):
    with pytest.raises(ValueError, match=f"num_slots is {num_slots}, slot_bytes is {slot_bytes}"):
        StagingPool(num_slots, slot_bytes)
