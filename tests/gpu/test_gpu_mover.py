# SPDX-License-Identifier: Apache-2.0
"""Blocks on a GPU to pinned slots and back, beside an engine that is slow."""

import numpy as np
import pytest

from kvxfer.blocks import ITEM_DTYPE, BlockLayout, StagingPool
from kvxfer.blocks.cuda_calibration import calibrate
from kvxfer.blocks.cuda_mover import NEVER_BYTES, CudaMover
from kvxfer.blocks.cuda_queues import TorchQueues

pytestmark = pytest.mark.gpu

SLEEP_CYCLES = 200_000_000  # about a tenth of a second
NUM_BLOCKS, BLOCK_BYTES = 256, 64 << 10
SLOT_BYTES = 4 << 20
BLOCKS = [7, 3, 200, 255, 64]
WAYS = {
    "through": {"staged_from_bytes": 0},
    "straight": {"staged_from_bytes": NEVER_BYTES},
    "engine": {"dma_from_bytes": BLOCK_BYTES},
}
EACH_WAY = pytest.mark.parametrize("way", WAYS)


class Rank:
    """A cache on the GPU, its content, and a mover."""

    def __init__(self, device, **thresholds):
        self.torch = device.torch
        rng = np.random.default_rng(7)
        self.content = rng.integers(0, 256, (NUM_BLOCKS, BLOCK_BYTES), dtype=np.uint8)
        self.cache = device.upload(self.content).view(NUM_BLOCKS, BLOCK_BYTES)
        self.layout = BlockLayout.from_tensors([self.cache])
        self.staging = StagingPool(2, SLOT_BYTES)
        self.mover = CudaMover(
            TorchQueues(self.layout),
            self.staging,
            num_pack_lanes=1,
            num_unpack_lanes=1,
            device_bytes=2 * SLOT_BYTES,
            **thresholds,
        )
        self.torch.cuda.synchronize()

    @staticmethod
    def job(blocks, slot):
        items = np.zeros(len(blocks), dtype=ITEM_DTYPE)
        items["block_id"] = blocks
        items["value_ptr"] = slot.ptr + np.arange(len(blocks), dtype=np.uint64) * BLOCK_BYTES
        return items, slot, len(blocks) * BLOCK_BYTES

    @staticmethod
    def rows(slot, num_rows):
        values = np.frombuffer(slot.buffer, np.uint8)[: num_rows * BLOCK_BYTES]
        return values.reshape(num_rows, BLOCK_BYTES)


@pytest.fixture
def make_rank(device):
    ranks = []

    def make(**options):
        ranks.append(Rank(device, **options))
        return ranks[-1]

    yield make
    device.torch.cuda.synchronize()
    for rank in ranks:
        rank.mover.close()


@EACH_WAY
def test_gpu_pack_waits_for_the_forward_pass_and_is_over_when_blocks_are_reused(make_rank, way):
    rank = make_rank(**WAYS[way])
    rank.torch.cuda._sleep(SLEEP_CYCLES)
    rank.cache.bitwise_not_()  # the forward pass, not run yet
    with rank.staging.acquire(1) as slot:
        after = rank.mover.mark()
        assert not after.query()
        packed = rank.mover.pack(*rank.job(BLOCKS, slot), after)
        rank.cache.zero_()  # the next step
        packed.wait()
        assert np.array_equal(rank.rows(slot, 5), 255 - rank.content[BLOCKS])


@EACH_WAY
def test_gpu_unpack_waits_for_the_step_before_and_is_seen_by_the_next(make_rank, way):
    rank = make_rank(**WAYS[way])
    index = rank.torch.tensor(BLOCKS, device=rank.cache.device)
    rank.torch.cuda.synchronize()
    with rank.staging.acquire(1) as slot:
        rank.rows(slot, 5)[...] = 255 - rank.content[:5]
        rank.torch.cuda._sleep(SLEEP_CYCLES)
        rank.cache.index_fill_(0, index, 0)  # the step before
        before = rank.cache.clone()
        after = rank.mover.mark()
        assert not after.query()  # not run yet
        rank.mover.unpack(*rank.job(BLOCKS, slot), after)
        rank.rows(slot, 5)[...] = 1  # the slot's next use
    seen = rank.cache.clone().cpu().numpy()
    assert not before.index_select(0, index).any()
    expected = rank.content.copy()
    expected[BLOCKS] = 255 - rank.content[:5]
    assert np.array_equal(seen, expected)


def test_gpu_many_jobs_through_the_same_lanes_stay_apart(make_rank):
    rank = make_rank(staged_from_bytes=1 << 20)
    for number in range(40):
        rank.mover.dma_from_bytes = NEVER_BYTES if number % 3 else 1
        blocks = np.random.default_rng(number).permutation(NUM_BLOCKS)[: 1 + number % 60]
        with rank.staging.acquire(1) as slot:
            job = rank.job(blocks, slot)
            rank.mover.pack(*job, rank.mover.mark()).wait()
            assert np.array_equal(rank.rows(slot, len(blocks)), rank.content[blocks])
            rank.rows(slot, len(blocks))[...] = rank.content[blocks[::-1]]
            rank.mover.unpack(*job, rank.mover.mark())
        rank.content[blocks] = rank.content[blocks[::-1]]
    assert np.array_equal(rank.cache.cpu().numpy(), rank.content)


def test_gpu_calibration_chooses_and_leaves_blocks_alone(make_rank):
    rank = make_rank()
    calibrate(rank.mover, rank.layout, rank.staging)
    assert rank.mover.staged_from_bytes > 0
    assert rank.mover.dma_from_bytes in (BLOCK_BYTES, BLOCK_BYTES + 1)
    assert np.array_equal(rank.cache.cpu().numpy(), rank.content)
