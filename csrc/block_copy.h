/* SPDX-License-Identifier: Apache-2.0 */
/* Index arithmetic of a block copy: from a work id to the two byte offsets of one unit.
 *
 *   work id -> span (class) -> item and tile -> unit of the tile's run -> page offset, value offset
 *
 * The same lines run under gcc (host simulator, tests), nvcc and NVRTC (kernels): C99, C++17 and
 * CUDA, no includes, no size_t, no 128-bit integers. `kvxfer/blocks/plan.py` fills these structs;
 * their NumPy dtypes stand there and a test compares the sizes.
 *
 * A page is one block of one tensor in the KV cache; a value is its stored form. Both are
 * addressed in bytes. Ids and counts of units, tiles and work stay below 2^31.
 */
#ifndef KVXFER_BLOCK_COPY_H
#define KVXFER_BLOCK_COPY_H

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define KVX_FUNCTION static __host__ __device__ __forceinline__
#else
#define KVX_FUNCTION static inline
#endif

/* Fails to compile where `condition` is false; works in C99, C++ and CUDA alike. */
#define KVX_STATIC_ASSERT(name, condition) typedef char kvx_assert_##name[(condition) ? 1 : -1]

/* One strided correspondence between a block and its value: fragments on a grid of two axes. */
typedef struct kvx_run {
    unsigned long long base; /* address of the first fragment of block 0 */
    long long block_step;    /* bytes from one block to the next */
    long long value_offset;  /* bytes from the value's start to the first fragment */
    long long outer_page_step;
    long long outer_value_step;
    long long inner_page_step;
    long long inner_value_step;
    unsigned long long fragment_bytes; /* contiguous on both sides */
    unsigned int outer_count;
    unsigned int inner_count;
    unsigned int fragment_units; /* fragment_bytes >> width_log2 */
    unsigned int width_log2;     /* a unit is 1, 2, 4, 8 or 16 bytes, aligned in the page */
    unsigned int units_multiplier; /* divides by fragment_units */
    unsigned int units_shift;
    unsigned int inner_multiplier; /* divides by inner_count */
    unsigned int inner_shift;
} kvx_run;

/* A piece of one run of one block, about 4 KiB: what one warp copies at a time. */
typedef struct kvx_tile {
    unsigned int run;
    unsigned int first_unit;
    unsigned int num_units;
    unsigned int reserved;
} kvx_tile;

/* One block to copy. A kernel skips a negative block id. */
typedef struct kvx_item {
    unsigned long long value_ptr; /* address of the value's first byte */
    int block_id;
    int class_id;
} kvx_item;

/* The consecutive items of one class: their work ids are items x tiles, tiles fastest. */
typedef struct kvx_span {
    unsigned int first_work;
    unsigned int num_work;
    unsigned int first_item;
    unsigned int first_tile;
    unsigned int num_tiles;
    unsigned int tiles_multiplier; /* divides by num_tiles */
    unsigned int tiles_shift;
    unsigned int reserved;
} kvx_span;

typedef struct kvx_place {
    unsigned int item;
    unsigned int tile;
} kvx_place;

typedef struct kvx_offsets {
    long long page;  /* from the run's base in this block */
    long long value; /* from the value's first byte */
} kvx_offsets;

KVX_STATIC_ASSERT(unsigned_is_4_bytes, sizeof(unsigned int) == 4);
KVX_STATIC_ASSERT(long_long_is_8_bytes, sizeof(unsigned long long) == 8);
KVX_STATIC_ASSERT(run_is_96_bytes, sizeof(kvx_run) == 96);
KVX_STATIC_ASSERT(tile_is_16_bytes, sizeof(kvx_tile) == 16);
KVX_STATIC_ASSERT(item_is_16_bytes, sizeof(kvx_item) == 16);
KVX_STATIC_ASSERT(span_is_32_bytes, sizeof(kvx_span) == 32);

/* Return n / d for shift = 31 + ceil(log2 d), multiplier = ceil(2^shift / d): exact below 2^31.
 *
 * With e = multiplier * d - 2^shift in [0, d) the error n * e / (d * 2^shift) stays below 1 / d,
 * because n < 2^31 and e < d <= 2^(shift - 31). The multiplier fits 32 bits, the product 63.
 */
KVX_FUNCTION unsigned int kvx_divide(unsigned int n, unsigned int multiplier, unsigned int shift) {
    return (unsigned int)(((unsigned long long)n * multiplier) >> shift);
}

/* Return the index of the span that holds `work`; spans are ascending, few, and cover it. */
KVX_FUNCTION unsigned int kvx_find_span(const kvx_span *spans, unsigned int num_spans,
                                        unsigned int work) {
    unsigned int idx = 0;
    while (idx + 1 < num_spans && work >= spans[idx + 1].first_work) ++idx;
    return idx;
}

/* Return which item and which tile `work` of `span` stands for. */
KVX_FUNCTION kvx_place kvx_locate(const kvx_span *span, unsigned int work) {
    kvx_place place;
    unsigned int local = work - span->first_work;
    unsigned int item = kvx_divide(local, span->tiles_multiplier, span->tiles_shift);
    place.item = span->first_item + item;
    place.tile = span->first_tile + (local - item * span->num_tiles);
    return place;
}

/* Return the address of the run's first fragment in block `block_id`. */
KVX_FUNCTION unsigned long long kvx_page_address(const kvx_run *run, int block_id) {
    return run->base + (unsigned long long)(run->block_step * (long long)block_id);
}

/* Return both byte offsets of unit `unit` of a run; consecutive units fill a fragment. */
KVX_FUNCTION kvx_offsets kvx_unit_offsets(const kvx_run *run, unsigned int unit) {
    kvx_offsets offsets;
    unsigned int fragment = kvx_divide(unit, run->units_multiplier, run->units_shift);
    unsigned int outer = kvx_divide(fragment, run->inner_multiplier, run->inner_shift);
    long long inner = (long long)(fragment - outer * run->inner_count);
    long long within = (long long)(unit - fragment * run->fragment_units) << run->width_log2;
    offsets.page = outer * run->outer_page_step + inner * run->inner_page_step + within;
    offsets.value = run->value_offset + outer * run->outer_value_step +
                    inner * run->inner_value_step + within;
    return offsets;
}

/* Return log2 of the widest word that may move a unit to or from a value at `value_ptr`.
 *
 * The plan knows the page's alignment and that of the offsets; the value's address comes with the
 * item. Values at multiples of 16 keep the unit whole; any other address still works.
 */
KVX_FUNCTION unsigned int kvx_word_log2(unsigned int width_log2, unsigned long long value_ptr) {
    while (width_log2 > 0 && (value_ptr & ((1ull << width_log2) - 1))) --width_log2;
    return width_log2;
}

#endif
