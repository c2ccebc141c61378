# SPDX-License-Identifier: Apache-2.0
"""Where the staging memory of a rank lies, and what happens where it cannot lie on the GPU."""

import cuda_fakes
import numpy as np
import pytest
from memory_store import MemoryStore

from kvxfer.blocks import ITEM_DTYPE, BlockLayout
from kvxfer.blocks.cuda_mover import CudaMover
from kvxfer.blocks.cuda_queues import TorchQueues
from kvxfer.errors import ConfigError, StoreError
from kvxfer.transfer.slots import make_staging

NUM_BLOCKS, BLOCK_BYTES, PAGE_BYTES = 16, 6000, 4096
NUM_SLOTS, SLOT_BYTES = 3, 4 * PAGE_BYTES


class DeviceStore(MemoryStore):
    """Reaches the memory of the fake GPU, unless it has ``refusal`` to say."""

    def __init__(self, refusal=""):
        super().__init__()
        self.refusal, self.registered = refusal, []

    @property
    def reaches_devices(self):
        return True

    def register(self, buffer):
        if self.refusal and not self.registered:
            self.registered.append(None)
            raise StoreError(self.refusal)
        self.registered.append(np.frombuffer(buffer, np.uint8).ctypes.data)


@pytest.fixture
def gpu(monkeypatch):
    return cuda_fakes.install(monkeypatch)[0]


def layout_on(device):
    memory = cuda_fakes.aligned(NUM_BLOCKS * BLOCK_BYTES).reshape(NUM_BLOCKS, BLOCK_BYTES)
    memory[...] = np.random.default_rng(5).integers(0, 256, memory.shape, np.uint8)
    return BlockLayout.from_tensors([cuda_fakes.FakeTensor(memory, device)]), memory


def make(layout, store, *, host_bytes=NUM_SLOTS * SLOT_BYTES, device_bytes=NUM_SLOTS * SLOT_BYTES):
    sizes = {"host_bytes": host_bytes, "device_bytes": device_bytes}
    return make_staging(layout, store, num_slots=NUM_SLOTS, **sizes)


def test_slots_are_the_hosts_for_a_store_that_reaches_no_gpu(gpu):
    store = MemoryStore()
    staging = make(layout_on(cuda_fakes.DEVICE)[0], store)
    assert not staging.on_device
    assert not gpu.allocations


def test_slots_are_the_hosts_for_blocks_of_the_host(gpu):
    assert not make(layout_on("cpu")[0], DeviceStore()).on_device


def test_slots_on_the_gpu_lie_on_pages_within_what_is_registered(gpu):
    store = DeviceStore()
    staging = make(layout_on(cuda_fakes.DEVICE)[0], store)
    assert staging.on_device
    assert store.registered == [staging.ptr]
    ((tensor, _),) = gpu.allocations
    slots = [staging.acquire(0) for _ in range(NUM_SLOTS)]
    assert sorted(slot.ptr for slot in slots) == [
        staging.ptr + number * SLOT_BYTES for number in range(NUM_SLOTS)
    ]
    assert staging.ptr % PAGE_BYTES == 0
    assert tensor.data_ptr() <= staging.ptr
    assert staging.ptr + NUM_SLOTS * SLOT_BYTES <= tensor.data_ptr() + len(tensor)


def test_a_block_goes_to_a_slot_on_the_gpu_and_back(gpu):
    layout, blocks = layout_on(cuda_fakes.DEVICE)
    staging = make(layout, DeviceStore())
    options = {"num_pack_lanes": 1, "num_unpack_lanes": 1, "device_bytes": 0}
    mover = CudaMover(TorchQueues(layout), staging, **options)
    before = blocks.copy()
    with staging.acquire(0) as slot:
        items = np.zeros(1, dtype=ITEM_DTYPE)
        items["block_id"], items["value_ptr"] = 7, slot.ptr
        mover.pack(items, slot, BLOCK_BYTES, mover.mark()).wait()
        assert bytes(slot.buffer[:BLOCK_BYTES]) == blocks[7].tobytes()
        items["block_id"] = 2
        mover.unpack(items, slot, BLOCK_BYTES, mover.mark())
    before[2] = before[7]
    assert np.array_equal(blocks, before)
    assert not gpu.runtime.registered  # nothing is pinned
    mover.close()


@pytest.mark.parametrize("obstacle", ["too small", "no memory", "refused"])
def test_what_stands_against_slots_on_the_gpu_is_logged_and_the_host_has_them(
    gpu, caplog, obstacle
):
    store = DeviceStore("no nvidia-peermem" if obstacle == "refused" else "")
    gpu.free_bytes = 0 if obstacle == "no memory" else gpu.free_bytes
    device_bytes = PAGE_BYTES if obstacle == "too small" else NUM_SLOTS * SLOT_BYTES
    staging = make(layout_on(cuda_fakes.DEVICE)[0], store, device_bytes=device_bytes)
    assert not staging.on_device
    assert store.registered[-1] == staging.ptr
    way_out = {
        "too small": "device_staging_bytes is 4096",
        "no memory": "lower gpu_memory_utilization",
        "refused": "no nvidia-peermem",
    }
    assert way_out[obstacle] in caplog.text


def test_slots_that_hold_no_value_are_refused_with_what_is_needed(gpu):
    with pytest.raises(
        ConfigError, match=r"staging_bytes is 4096.* set it to (\d+) or more"
    ) as told:
        make(layout_on("cpu")[0], MemoryStore(), host_bytes=4096)
    needed = int(told.value.args[0].split("set it to ")[1].split()[0])
    assert make(layout_on("cpu")[0], MemoryStore(), host_bytes=needed).slot_bytes >= BLOCK_BYTES
