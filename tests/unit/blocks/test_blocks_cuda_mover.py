# SPDX-License-Identifier: Apache-2.0
"""The mover of a GPU on torch and CuPy without a GPU; its order is ``test_gpu_staging.py``'s."""

import itertools
import threading

import cuda_fakes
import numpy as np
import pytest

from kvxfer.blocks import ITEM_DTYPE, BlockLayout, StagingPool
from kvxfer.blocks.cuda_calibration import UNMEASURED_BYTES, calibrate, choose
from kvxfer.blocks.cuda_mover import NEVER_BYTES, CudaMover
from kvxfer.blocks.cuda_queues import TorchQueues
from kvxfer.errors import UnsupportedError

NUM_BLOCKS, BLOCK_BYTES = 600, 4096
SLOT_BYTES = 1 << 20


@pytest.fixture
def gpu(monkeypatch):
    torch, torch.cupy = cuda_fakes.install(monkeypatch)
    return torch


@pytest.fixture
def content():
    rng = np.random.default_rng(3)
    return rng.integers(0, 256, (NUM_BLOCKS, BLOCK_BYTES), dtype=np.uint8)


class Rank:
    """A cache on the fake GPU, and a mover over it."""

    def __init__(self, content, *, staged_from=0, device_bytes=4 * SLOT_BYTES):
        memory = cuda_fakes.aligned(content.nbytes).reshape(content.shape)
        memory[...] = content
        self.cache = cuda_fakes.FakeTensor(memory)
        self.layout = BlockLayout.from_tensors([self.cache])
        self.staging = StagingPool(3, SLOT_BYTES)
        self.queues = TorchQueues(self.layout)
        self.mover = CudaMover(
            self.queues,
            self.staging,
            num_pack_lanes=1,
            num_unpack_lanes=2,
            device_bytes=device_bytes,
            staged_from_bytes=staged_from,
        )

    @staticmethod
    def items(blocks, slot):
        items = np.zeros(len(blocks), dtype=ITEM_DTYPE)
        items["block_id"] = blocks
        items["value_ptr"] = slot.ptr + np.arange(len(blocks), dtype=np.uint64) * BLOCK_BYTES
        return items


@pytest.mark.parametrize("staged_from", [0, NEVER_BYTES], ids=["through", "straight"])
def test_blocks_come_back_through_a_slot(gpu, content, staged_from):
    rank = Rank(content, staged_from=staged_from)
    source, target = [5, 3, 599], [0, 1, 2]
    with rank.staging.acquire(0) as slot:
        num_bytes = 3 * BLOCK_BYTES
        rank.mover.pack(rank.items(source, slot), slot, num_bytes, rank.mover.mark()).wait()
        packed = np.frombuffer(slot.buffer, np.uint8)[:num_bytes].reshape(3, BLOCK_BYTES)
        assert np.array_equal(packed, content[source])
        rank.mover.unpack(rank.items(target, slot), slot, num_bytes, rank.mover.mark())
    assert np.array_equal(rank.cache.array[target], content[source])
    assert np.array_equal(rank.cache.array[3:], content[3:])


def test_loads_are_urgent_and_wait_for_the_engines_current_stream(gpu, content):
    rank = Rank(content)
    after = rank.mover.mark()
    assert after.stream is gpu.current
    assert after.blocking  # a thread that waits sleeps
    streams = [rank.mover._unpack_lanes.get().stream for _ in range(2)]
    assert {stream.priority for stream in streams} == {-1}
    assert rank.mover._pack_lanes.get().stream.priority == 0


def test_lanes_share_the_device_memory_and_need_no_more_than_a_slot(gpu, content):
    rank = Rank(content, device_bytes=3 << 18)
    lane = rank.mover._pack_lanes.get()
    assert lane.num_bytes == 1 << 18
    rank = Rank(content, device_bytes=1 << 30)
    assert rank.mover._pack_lanes.get().num_bytes == SLOT_BYTES


def test_lanes_have_memory_streams_and_events_of_their_own(gpu, content):
    rank = Rank(content)
    lanes = [rank.mover._pack_lanes.get(), *(rank.mover._unpack_lanes.get() for _ in range(2))]
    starts = sorted(lane.ptr for lane in lanes)
    assert all(b - a >= lanes[0].num_bytes for a, b in itertools.pairwise(starts))
    assert len({lane.stream for lane in lanes}) == 3
    assert len({event for lane in lanes for event in (lane.read, lane.done)}) == 6
    assert all(event.blocking for lane in lanes for event in (lane.read, lane.done))


def test_threads_make_the_device_their_own_in_torch_and_in_cupy(gpu, content):
    rank = Rank(content)
    found = []

    def run():
        rank.mover.attach_thread()
        found.append((gpu.of_thread.device, gpu.cupy.used[-1]))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [(cuda_fakes.DEVICE, (thread.ident, 0))]


def test_too_little_memory_on_the_gpu_is_told_and_costs_speed_only(gpu, content, caplog):
    gpu.free_bytes = SLOT_BYTES - 1
    rank = Rank(content)
    assert "no 1048576 bytes of GPU memory are left" in caplog.text
    with rank.staging.acquire(0) as slot:
        rank.mover.pack(rank.items([7], slot), slot, BLOCK_BYTES, rank.mover.mark()).wait()
        assert bytes(slot.buffer[:BLOCK_BYTES]) == content[7].tobytes()


def test_staging_that_cannot_be_pinned_is_refused_with_the_setting(gpu, content):
    gpu.runtime.result = 2
    with pytest.raises(UnsupportedError, match="lower staging_bytes"):
        Rank(content)


def test_close_unpins_once(gpu, content):
    rank = Rank(content)
    assert gpu.runtime.registered == {rank.staging.ptr: rank.staging.buffer.nbytes}
    rank.mover.close()
    rank.mover.close()
    assert gpu.runtime.registered == {}


def test_lane_of_a_pack_that_failed_is_used_again(gpu, content):
    rank = Rank(content)
    with rank.staging.acquire(0) as slot:
        bad = rank.items([NUM_BLOCKS], slot)
        for _ in range(3):
            with pytest.raises(IndexError):
                rank.mover.pack(bad, slot, BLOCK_BYTES, None)
            with pytest.raises(IndexError):
                rank.mover.unpack(bad, slot, BLOCK_BYTES, None)
        rank.mover.pack(rank.items([1], slot), slot, BLOCK_BYTES, None).wait()


# Calibration


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([(1, 2), (2, 2), (4, 3)], 20),
        ([(1, 2), (2, 3), (4, 5)], 31),
        ([(2, 1), (2, 1), (2, 1)], 10),
        ([(2, 1), (1, 2), (2, 1)], 30),
        ([(1, 2), (100, 119), (1, 1)], 20),
    ],
    ids=["crosses", "beyond the largest", "always", "the last crossing counts", "by a margin"],
)
def test_straight_is_chosen_below_the_size_where_its_lead_ends(times, expected):
    assert choose([10, 20, 30], times) == expected


class SlowPinned:
    """A clock by which copies of more than some bytes are slower straight than through."""

    def __init__(self, mover):
        self.mover, self.now, self.calls = mover, 0.0, 0

    def __call__(self):
        self.calls += 1
        if self.calls % 2 == 0:
            self.now += 1.0 if self.mover.staged_from_bytes == 0 else self.straight_s()
        return self.now

    def straight_s(self):
        return 0.5 if self.calls <= 2 * 4 * 2 else 2.0  # the first size, then larger ones


def test_calibration_measures_both_ways_and_writes_no_block(gpu, content, caplog):
    rank = Rank(content)
    with caplog.at_level("INFO"):
        calibrate(rank.mover, rank.layout, rank.staging, SlowPinned(rank.mover))
    assert rank.mover.staged_from_bytes == 4 * (64 << 10)
    assert "from 262144 bytes on" in caplog.text
    assert np.array_equal(rank.cache.array, content)
    assert rank.staging.num_free == 3


def test_cache_too_small_to_measure_on_takes_what_is_usual(gpu, content):
    rank = Rank(content[:3])
    calibrate(rank.mover, rank.layout, rank.staging)
    assert rank.mover.staged_from_bytes == UNMEASURED_BYTES
