/* SPDX-License-Identifier: Apache-2.0 */
/* Gather and scatter kernels: block_copy.h's loop, one thread per lane.
 *
 * nvcc and NVRTC compile this file as C++17 (NVRTC with the header's text in place of the include).
 * `kvxfer/blocks/cuda.py` checks and launches; nothing here checks anything.
 *
 * What each kernel computes, for every item i of the job, every unit u of every run of its class:
 *
 *   gather    value(i)[value_offset(u)] = page(i)[page_offset(u)]
 *   scatter   page(i)[page_offset(u)] = value(i)[value_offset(u)]
 *
 * Grid: persistent; any number of CTAs of any number of whole warps, up to KVX_MAX_THREADS. Warp w
 * of CTA b begins at work id w * gridDim.x + b and goes on by the number of all warps. A work id is
 * a tile of an item, about 4 KiB. Lane l moves words l, l + 32, l + 64 and l + 96 of each step of
 * 128 words: four independent loads, then four stores, each warp-wide over consecutive words of a
 * fragment.
 *
 * Alignment: a word is as wide as page, value and all offsets are multiples of, at most 16 bytes.
 * The plan guarantees it for the pages and offsets (`width_log2`), `kvx_word_log2` looks at the
 * value's address. All lanes of a warp work on one tile, so the choice does not diverge.
 */
#include "block_copy.h"

#define KVX_MAX_THREADS 512

/* CTAs that a multiprocessor can hold. Two leave 64 registers a thread, which does from sm_80 to
 * sm_90; on sm_100 and sm_120 ptxas takes up to 116 and spills 116 bytes at 64, 44 at 80 (nvcc
 * 13.0). `cuda_job.py` counts on these numbers, and a test compares them with ptxas' report. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
#define KVX_CTAS_PER_MULTIPROCESSOR 1
#else
#define KVX_CTAS_PER_MULTIPROCESSOR 2
#endif

#define KVX_KERNEL \
    extern "C" __global__ void __launch_bounds__(KVX_MAX_THREADS, KVX_CTAS_PER_MULTIPROCESSOR)


/* Run the job's loop as lane threadIdx.x % 32 of the thread's warp. */
static __device__ __forceinline__ void kvx_run_thread(const kvx_job &job, const kvx_item *words,
                                                      int to_value) {
    kvx_run_lane(&job, words, to_value, blockIdx.x, gridDim.x, threadIdx.x / KVX_WARP_LANES,
                 blockDim.x / KVX_WARP_LANES, threadIdx.x % KVX_WARP_LANES);
}

/* Blocks to values; spans and items in device memory, or in host memory that the GPU can read. */
KVX_KERNEL kvx_gather(const __grid_constant__ kvx_job job) {
    kvx_run_thread(job, (const kvx_item *)job.words_ptr, 1);
}

/* Values to blocks; spans and items as in kvx_gather. */
KVX_KERNEL kvx_scatter(const __grid_constant__ kvx_job job) {
    kvx_run_thread(job, (const kvx_item *)job.words_ptr, 0);
}

/* Blocks to values; spans and items in the kernel's parameters (constant memory): a job of up to
 * KVX_INLINE_WORDS words uploads nothing. */
KVX_KERNEL kvx_gather_inline(const __grid_constant__ kvx_inline_job inlined) {
    kvx_run_thread(inlined.job, inlined.words, 1);
}

/* Values to blocks; spans and items as in kvx_gather_inline. */
KVX_KERNEL kvx_scatter_inline(const __grid_constant__ kvx_inline_job inlined) {
    kvx_run_thread(inlined.job, inlined.words, 0);
}
