# SPDX-License-Identifier: Apache-2.0
"""The staging memory of a rank: how much of it, where it lies, and that the store knows it."""

from __future__ import annotations

import logging

from kvxfer.blocks import BlockLayout, StagingPool, device_memory
from kvxfer.errors import ConfigError, StoreError
from kvxfer.stores import Store
from kvxfer.transfer.pieces import PAGE_BYTES, VALUE_ALIGN

logger = logging.getLogger(__name__)


def make_staging(
    layout: BlockLayout, store: Store, *, num_slots: int, host_bytes: int, device_bytes: int
) -> StagingPool:
    """Return slots for the values of ``layout``, registered with ``store``.

    On the GPU of the blocks, out of ``device_bytes``, where the store reaches such memory and takes
    it; what stands against it is logged, and slots on the host, out of ``host_bytes``, are as
    right. ``ConfigError`` where a value does not fit those.
    """
    if layout.device != "cpu" and store.reaches_devices:
        try:
            return _on_device(layout, store, num_slots, device_bytes)
        except StoreError as error:
            logger.warning("values pass through pinned memory, not a GPU's own: %s", error)
    slot_bytes = _slot_bytes(layout, num_slots, host_bytes)
    if not slot_bytes:
        largest, needed = _largest_value(layout), _bytes_needed(layout, num_slots)
        raise ConfigError(
            f"staging_bytes is {host_bytes}: {num_slots} slots cannot hold a value of {largest} "
            f"bytes each; set it to {needed} or more"
        )
    staging = StagingPool(num_slots, slot_bytes)
    store.register(staging.buffer)
    return staging


def _on_device(layout: BlockLayout, store: Store, num_slots: int, device_bytes: int) -> StagingPool:
    """Return registered slots on the GPU; ``StoreError`` for what stands against them."""
    slot_bytes = _slot_bytes(layout, num_slots, device_bytes)
    if not slot_bytes:
        needed = _bytes_needed(layout, num_slots)
        raise StoreError(f"device_staging_bytes is {device_bytes}; {needed} or more are needed")
    size = StagingPool.bytes_needed(num_slots, slot_bytes)
    memory = device_memory.allocate(layout.device, size)
    if memory is None:
        raise StoreError(
            f"{layout.device} has no {size} bytes left; lower gpu_memory_utilization a little"
        )
    store.register(memory.buffer)
    return StagingPool(num_slots, slot_bytes, memory)


def _slot_bytes(layout: BlockLayout, num_slots: int, num_bytes: int) -> int:
    """Return the bytes of each slot, whole pages; 0 where it would not hold every value."""
    slot_bytes = num_bytes // num_slots // PAGE_BYTES * PAGE_BYTES
    return slot_bytes if slot_bytes >= _largest_value(layout) + VALUE_ALIGN else 0


def _bytes_needed(layout: BlockLayout, num_slots: int) -> int:
    return (_largest_value(layout) + VALUE_ALIGN + PAGE_BYTES) * num_slots


def _largest_value(layout: BlockLayout) -> int:
    return max(each.value_bytes for each in layout.classes)
