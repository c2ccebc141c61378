# SPDX-License-Identifier: Apache-2.0
"""Staging memory on a GPU, for stores that read and write it there (GPUDirect RDMA)."""

from __future__ import annotations

import ctypes
import mmap

from kvxfer.blocks.staging import StagingMemory


def allocate(device: str, num_bytes: int) -> StagingMemory | None:
    """Return ``num_bytes`` of a GPU's memory, on a page; None where so much is not left.

    ``device``: as `BlockLayout.device`. The memory is torch's, and goes with the last view of
    ``buffer``.
    """
    import torch  # noqa: PLC0415 - with the first CUDA tensor

    try:
        with torch.inference_mode(False):
            tensor = torch.empty(num_bytes + mmap.PAGESIZE, dtype=torch.uint8, device=device)
    except torch.cuda.OutOfMemoryError:
        return None
    skipped = -tensor.data_ptr() % mmap.PAGESIZE
    tensor = tensor[skipped : skipped + num_bytes]
    address = tensor.data_ptr()
    place = (ctypes.c_ubyte * num_bytes).from_address(address)
    place.owner = tensor  # type: ignore[attr-defined]  # keeps the memory
    return StagingMemory(memoryview(place).cast("B"), address, tensor)
