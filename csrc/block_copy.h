/* SPDX-License-Identifier: Apache-2.0 */
/* A block copy as one lane of a warp sees it: index arithmetic, and the loop over work ids and tiles.
 *
 *   work id -> span (class) -> item and tile -> unit of the tile's run -> page offset, value offset
 *
 * The same lines run under gcc (host simulator, tests), nvcc and NVRTC (kernels): C99, C++17 and
 * CUDA, no includes, no size_t, no 128-bit integers. `kvxfer/blocks/plan.py` and
 * `kvxfer/blocks/cuda_job.py` fill these structs; their NumPy dtypes stand there and a test
 * compares the sizes.
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

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define KVX_UNROLL _Pragma("unroll")
#else
#define KVX_UNROLL
#endif

/* The simulator counts here which words a GPU would refuse; nothing elsewhere. */
#ifndef KVX_TOUCH
#define KVX_TOUCH(address, word_log2) ((void)0)
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

/* One launch. The words are the spans, two words each, then the items, sorted by class. */
typedef struct kvx_job {
    unsigned long long runs_ptr;  /* kvx_run[], of the layout */
    unsigned long long tiles_ptr; /* kvx_tile[], of the layout */
    unsigned long long words_ptr; /* kvx_item[]; not read by a kernel that has the words inline */
    unsigned int num_spans;
    unsigned int num_work;
} kvx_job;

/* Kernel parameters are 32,764 bytes at most, on compute capability 7.0 and CUDA 12.1 or newer. */
enum { KVX_INLINE_WORDS = 2045 };

/* A launch whose words travel with the kernel's parameters, so that nothing is uploaded. */
typedef struct kvx_inline_job {
    kvx_job job;
    kvx_item words[KVX_INLINE_WORDS];
} kvx_inline_job;

typedef struct kvx_place {
    unsigned int item;
    unsigned int tile;
} kvx_place;

typedef struct kvx_offsets {
    long long page;  /* from the run's base in this block */
    long long value; /* from the value's first byte */
} kvx_offsets;

/* Up to 16 bytes on their way from source to target; narrower words use the low end. */
typedef struct kvx_word {
    unsigned long long low;
    unsigned long long high;
} kvx_word;

enum {
    KVX_WARP_LANES = 32,
    KVX_NUM_LOADS = 4, /* under way before the first store; 63 registers a lane on sm_90 */
};

KVX_STATIC_ASSERT(unsigned_is_4_bytes, sizeof(unsigned int) == 4);
KVX_STATIC_ASSERT(long_long_is_8_bytes, sizeof(unsigned long long) == 8);
KVX_STATIC_ASSERT(run_is_96_bytes, sizeof(kvx_run) == 96);
KVX_STATIC_ASSERT(tile_is_16_bytes, sizeof(kvx_tile) == 16);
KVX_STATIC_ASSERT(item_is_16_bytes, sizeof(kvx_item) == 16);
KVX_STATIC_ASSERT(span_is_32_bytes, sizeof(kvx_span) == 32);
KVX_STATIC_ASSERT(job_is_32_bytes, sizeof(kvx_job) == 32);
KVX_STATIC_ASSERT(inline_job_fits_the_parameters, sizeof(kvx_inline_job) <= 32764);

/* Return n / d for shift = 31 + ceil(log2 d), multiplier = ceil(2^shift / d): exact below 2^31.
 *
 * With e = multiplier * d - 2^shift in [0, d) the error n * e / (d * 2^shift) stays below 1 / d,
 * because n < 2^31 and e < d <= 2^(shift - 31). The multiplier fits 32 bits, the product 63.
 */
KVX_FUNCTION unsigned int kvx_divide(unsigned int n, unsigned int multiplier, unsigned int shift) {
    return (unsigned int)(((unsigned long long)n * multiplier) >> shift);
}

/* Return the index of the span that holds `work`, which lies in span `idx` or in a later one. */
KVX_FUNCTION unsigned int kvx_next_span(const kvx_span *spans, unsigned int num_spans,
                                        unsigned int idx, unsigned int work) {
    while (idx + 1 < num_spans && work >= spans[idx + 1].first_work) ++idx;
    return idx;
}

/* Return the index of the span that holds `work`; spans are ascending and cover it. */
KVX_FUNCTION unsigned int kvx_find_span(const kvx_span *spans, unsigned int num_spans,
                                        unsigned int work) {
    return kvx_next_span(spans, num_spans, 0, work);
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

/* Return both byte offsets of word `word` of a tile; a unit is `1 << split_log2` words. */
KVX_FUNCTION kvx_offsets kvx_word_offsets(const kvx_run *run, const kvx_tile *tile,
                                          unsigned int split_log2, unsigned int word) {
    unsigned int word_log2 = run->width_log2 - split_log2;
    kvx_offsets offsets = kvx_unit_offsets(run, tile->first_unit + (word >> split_log2));
    long long within = (long long)(word & ((1u << split_log2) - 1)) << word_log2;
    offsets.page += within;
    offsets.value += within;
    return offsets;
}

/* ---- memory: words of 1, 2, 4, 8 or 16 bytes, at multiples of their size ---- */

#if defined(__CUDA_ARCH__)

/* Read once and written once: __ldcs and __stcs mark lines as the first to leave the caches, which
 * keep runs, tiles and whatever else the GPU is computing on. */
KVX_FUNCTION kvx_word kvx_load_word(unsigned long long address, unsigned int word_log2) {
    kvx_word word = {0, 0};
    if (word_log2 == 4) {
        ulonglong2 both = __ldcs((const ulonglong2 *)address);
        word.low = both.x;
        word.high = both.y;
    } else if (word_log2 == 3) {
        word.low = __ldcs((const unsigned long long *)address);
    } else if (word_log2 == 2) {
        word.low = __ldcs((const unsigned int *)address);
    } else if (word_log2 == 1) {
        word.low = __ldcs((const unsigned short *)address);
    } else {
        word.low = __ldcs((const unsigned char *)address);
    }
    return word;
}

KVX_FUNCTION void kvx_store_word(unsigned long long address, unsigned int word_log2,
                                 kvx_word word) {
    if (word_log2 == 4)
        __stcs((ulonglong2 *)address, make_ulonglong2(word.low, word.high));
    else if (word_log2 == 3)
        __stcs((unsigned long long *)address, word.low);
    else if (word_log2 == 2)
        __stcs((unsigned int *)address, (unsigned int)word.low);
    else if (word_log2 == 1)
        __stcs((unsigned short *)address, (unsigned short)word.low);
    else
        __stcs((unsigned char *)address, (unsigned char)word.low);
}

#define KVX_POINTER(type, address) ((type)(address))

#elif !defined(__CUDACC_RTC__)

#define KVX_POINTER(type, address) ((type)(__UINTPTR_TYPE__)(address))

KVX_FUNCTION kvx_word kvx_load_word(unsigned long long address, unsigned int word_log2) {
    kvx_word word = {0, 0};
    KVX_TOUCH(address, word_log2);
    __builtin_memcpy(&word, KVX_POINTER(const void *, address), 1ul << word_log2);
    return word;
}

KVX_FUNCTION void kvx_store_word(unsigned long long address, unsigned int word_log2,
                                 kvx_word word) {
    KVX_TOUCH(address, word_log2);
    __builtin_memcpy(KVX_POINTER(void *, address), &word, 1ul << word_log2);
}

#endif

/* ---- the loop of one lane, as the kernels and the simulator run it ---- */

/* Copy this lane's words of one tile: KVX_NUM_LOADS loads, then their stores, until the tile ends.
 *
 * Word `first + 32 i` of a step belongs to lane `first`: the lanes of a warp touch neighbours. The
 * addresses of a whole step are computed without a branch, also past the end of the tile, where
 * nothing is touched: so the loads of a step follow each other closely.
 */
KVX_FUNCTION void kvx_copy_words(const kvx_run *run, const kvx_tile *tile, const kvx_item *item,
                                 int to_value, unsigned int word_log2, unsigned int lane) {
    unsigned long long page = kvx_page_address(run, item->block_id);
    unsigned int split_log2 = run->width_log2 - word_log2;
    unsigned int num_words = tile->num_units << split_log2;
    unsigned int first, load;
    for (first = lane; first < num_words; first += KVX_WARP_LANES * KVX_NUM_LOADS) {
        unsigned long long sources[KVX_NUM_LOADS], targets[KVX_NUM_LOADS];
        kvx_word words[KVX_NUM_LOADS];
        KVX_UNROLL
        for (load = 0; load < KVX_NUM_LOADS; ++load) {
            unsigned int word = first + load * KVX_WARP_LANES;
            kvx_offsets at = kvx_word_offsets(run, tile, split_log2, word);
            unsigned long long page_at = page + (unsigned long long)at.page;
            unsigned long long value_at = item->value_ptr + (unsigned long long)at.value;
            sources[load] = to_value ? page_at : value_at;
            targets[load] = to_value ? value_at : page_at;
        }
        KVX_UNROLL
        for (load = 0; load < KVX_NUM_LOADS; ++load)
            if (first + load * KVX_WARP_LANES < num_words)
                words[load] = kvx_load_word(sources[load], word_log2);
        KVX_UNROLL
        for (load = 0; load < KVX_NUM_LOADS; ++load)
            if (first + load * KVX_WARP_LANES < num_words)
                kvx_store_word(targets[load], word_log2, words[load]);
    }
}

/* Copy this lane's part of one tile in the widest words; all lanes of a warp take one branch. */
KVX_FUNCTION void kvx_copy_tile(const kvx_run *run, const kvx_tile *tile, const kvx_item *item,
                                int to_value, unsigned int lane) {
    switch (kvx_word_log2(run->width_log2, item->value_ptr)) {
        case 4: kvx_copy_words(run, tile, item, to_value, 4, lane); break;
        case 3: kvx_copy_words(run, tile, item, to_value, 3, lane); break;
        case 2: kvx_copy_words(run, tile, item, to_value, 2, lane); break;
        case 1: kvx_copy_words(run, tile, item, to_value, 1, lane); break;
        default: kvx_copy_words(run, tile, item, to_value, 0, lane); break;
    }
}

/* Return the first work id of a warp. Neighbouring ids go to different CTAs, so that a job of few
 * tiles is spread over the multiprocessors; each warp goes on by the number of all warps. */
KVX_FUNCTION unsigned int kvx_first_work(unsigned int cta, unsigned int num_ctas,
                                         unsigned int warp) {
    return warp * num_ctas + cta;
}

/* Copy this lane's part of every tile of its warp: work ids `work`, `work + num_warps`, ... */
KVX_FUNCTION void kvx_copy_tiles(const kvx_job *job, const kvx_span *spans, const kvx_item *items,
                                 int to_value, unsigned int work, unsigned int num_warps,
                                 unsigned int lane) {
    const kvx_run *runs = KVX_POINTER(const kvx_run *, job->runs_ptr);
    const kvx_tile *tiles = KVX_POINTER(const kvx_tile *, job->tiles_ptr);
    unsigned int span = kvx_find_span(spans, job->num_spans, work);
    for (; work < job->num_work; work += num_warps) {
        span = kvx_next_span(spans, job->num_spans, span, work);
        kvx_place place = kvx_locate(&spans[span], work);
        kvx_item item = items[place.item];
        if (item.block_id < 0) continue;
        kvx_tile tile = tiles[place.tile];
        kvx_run run = runs[tile.run]; /* in registers: read once a tile, not once a word */
        kvx_copy_tile(&run, &tile, &item, to_value, lane);
    }
}

/* Copy this lane's part of a launch: what thread `lane` of warp `warp` of a CTA does. */
KVX_FUNCTION void kvx_run_lane(const kvx_job *job, const kvx_item *words, int to_value,
                               unsigned int cta, unsigned int num_ctas, unsigned int warp,
                               unsigned int warps_per_cta, unsigned int lane) {
    kvx_copy_tiles(job, (const kvx_span *)(const void *)words, words + 2 * job->num_spans, to_value,
                   kvx_first_work(cta, num_ctas, warp), num_ctas * warps_per_cta, lane);
}

#endif
