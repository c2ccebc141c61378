# SPDX-License-Identifier: Apache-2.0
"""Block-masked copies: between scattered blocks of a KV cache and contiguous values.

    registered tensors                          values in staging or in a caller's array
    layer 0  [b0 b1 b2 b3 ...]    gather   ->   value of b2: layer 0 | layer 1 | ...
    layer 1  [b0 b1 b2 b3 ...]    scatter  <-   value of b3: layer 0 | layer 1 | ...

`layout` turns registered tensors (`Region`) into a plan, once: `regions` says where a layer's
bytes lie and in which order they stand in a value, `runs` merges that into the fewest strided runs,
`plan` packs runs, classes and tiles into the tables that native code reads. A copy is the plan and
items of 16 bytes (value address, block id, class): no list per layer, however many there are.

`copies` is the face for rows of values, on CPU and GPU. `host` copies on the CPU
(``_native.block_copy`` over ``csrc/host_copy.h``). `cuda` launches the kernels of
``csrc/block_copy.cu`` through CuPy: `cuda_sources` finds their text and binary, `cuda_kernels`
loads them, `cuda_job` fills their parameters. `simulator` runs the kernels' loop
(``csrc/block_copy.h``) on the CPU, so that tests without a GPU check the lines that the kernels
run. `staging` hands out the page-aligned buffers in which values wait between KV cache and store;
`movers` is the face of the copies between those and the blocks, `cuda_mover` that face on a GPU:
over streams and events (`cuda_queues`), kernels or batches of the copy engine (`cuda_fragments`
says which copies, `cuda_dma` queues them), and sizes measured at start-up (`cuda_calibration`).

The worker builds one layout at registration; the saver gathers, the loader scatters, each with one
call per job. Nothing here imports vLLM, and torch or CuPy only when CUDA tensors come.
"""

from kvxfer.blocks.copies import gather, scatter
from kvxfer.blocks.host import gather_items, scatter_items
from kvxfer.blocks.layout import BlockClass, BlockLayout, Region, Segment
from kvxfer.blocks.plan import ITEM_DTYPE
from kvxfer.blocks.staging import Slot, StagingPool

__all__ = [
    "ITEM_DTYPE",
    "BlockClass",
    "BlockLayout",
    "Region",
    "Segment",
    "Slot",
    "StagingPool",
    "gather",
    "gather_items",
    "scatter",
    "scatter_items",
]
