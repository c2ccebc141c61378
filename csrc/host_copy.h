/* SPDX-License-Identifier: Apache-2.0 */
/* Copy loops for the CPU: many fragments of any size and address, from cold memory.
 *
 * A copier collects fragments in a queue and copies them when it is full, because the time of a
 * fragment goes into waiting: alone, it reaches a third to three quarters of the rate that many
 * reach side by side. Two loops, by fragment size:
 *
 *   rows   fragments below 4 KiB, one after the other, with the lines of those to come prefetched
 *          about 8 KiB ahead
 *   lanes  larger ones, eight at a time in steps of 256 bytes, each prefetched 4 KiB ahead and into
 *          the fragment that its lane copies next
 *
 * Both write with streaming stores where the CPU has them and the job is large enough; else all
 * are rows that go through memcpy. Prefetches go to the second level cache, whose miss buffers are
 * many: to the first level rows of 256 bytes reach 7.7 instead of 12.2 GB/s.
 *
 * Measured on one core of an EPYC (Zen 4), source on 4 KiB pages, target on huge ones, 512 MiB of
 * fragments in random order; ratio to one memcpy over the same bytes (12 GB/s), median of 9:
 *
 *   fragment              256 B   512 B   1 KiB   2 KiB   4 KiB   8 KiB   16 KiB   64 KiB   1 MiB
 *   memcpy by fragment    0.37    0.35    0.35    0.34    0.61    0.65    0.77     0.93     0.92
 *   rows, memcpy          0.62    0.56    0.54    0.50    0.67    0.67    0.75     0.83     0.83
 *   rows, AVX2            0.51    0.57    0.62    0.81    0.77    0.75    0.80     0.84     1.10
 *   rows, AVX-512         0.61    0.58    0.78    0.95    0.75    0.75    0.80     0.84     1.05
 *   lanes, AVX2           0.31    0.36    0.59    0.85    1.44    1.53    1.68     1.79     1.81
 *
 * AVX-512 in the lanes gained nothing (1.44 against 1.50 at 16 KiB), so they are written once.
 * `benchmarks/ratios_blocks.py` prints the ratios of whole gathers and scatters on any machine.
 */
#ifndef KVXFER_HOST_COPY_H
#define KVXFER_HOST_COPY_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define KVX_STREAMING 1
#include <immintrin.h>
#else
#define KVX_STREAMING 0
#endif

/* gcc takes a function that only prefetches for one without effect, and drops calls that were not
 * inlined before: rows of 256 bytes fell from 9.9 to 6.7 GB/s. */
#if defined(__GNUC__)
#define KVX_PREFETCH(address) __builtin_prefetch((address), 0, 2)
#define KVX_ALWAYS_INLINE static inline __attribute__((always_inline))
#else
#define KVX_PREFETCH(address) ((void)(address))
#define KVX_ALWAYS_INLINE static inline
#endif

enum {
    KVX_COPY_PLAIN = 0,
    KVX_COPY_AVX2 = 1,
    KVX_COPY_AVX512 = 2,
};

enum {
    KVX_LINE_BYTES = 64,
    KVX_STEP_BYTES = 256,        /* fastest of 256, 512, 1024 in the lanes */
    KVX_NUM_LANES = 8,           /* as fast as 6 and 12 at 16 KiB, faster than 4 and 16 */
    KVX_LANE_AHEAD_BYTES = 4096, /* 2 and 8 KiB: the same at 16 KiB, 0.9 of it at 4 KiB */
    KVX_LANE_MIN_BYTES = 4096,
    KVX_ROW_AHEAD_BYTES = 8192,  /* 4 to 32 KiB are within noise of each other */
    KVX_ROW_AHEAD_MAX = 64,      /* fragments */
    KVX_ROW_ANY_ADDRESS_BYTES = 1024,
    KVX_QUEUE_LENGTH = 512,
};

/* A gather's target is small, warm and read next, by a store's put: streaming stores pay from these
 * sizes of a job on. Gather and that read together, GB/s, memcpy and streaming stores:
 *
 *   lanes of 16 KiB    256 KiB: 6.8, 6.9    1 MiB: 9.4, 10.5    8 MiB: 7.2, 9.2    32 MiB: 5.7, 8.1
 *   rows of 1 KiB        1 MiB: 8.3, 6.9    4 MiB: 8.5, 7.0     8 MiB: 6.9, 6.8    16 MiB: 5.2, 6.3
 *
 * A scatter's targets are blocks all over the cache, which ordinary stores would read first:
 *
 *   lanes of 16 KiB     64 KiB: 5.3, 8.1    1 MiB: 11.0, 22.3
 *   rows of 1 KiB       64 KiB: 4.5, 6.5    1 MiB: 7.1, 17.1
 *   rows of 256 bytes   64 KiB: 4.1, 5.4    1 MiB: 5.8, 11.8
 */
enum {
    KVX_STREAM_LANES_BYTES = 256 << 10,
    KVX_STREAM_ROWS_BYTES = 8 << 20,
};

typedef struct kvx_fragment {
    char *target;
    const char *source;
    size_t bytes;
} kvx_fragment;

/* Collects fragments of one kind (rows or lanes) and copies them when full or flushed. */
typedef struct kvx_copier {
    int lanes_level;
    int rows_level;
    int lanes; /* the kind of fragments now in the queue */
    size_t length;
    kvx_fragment queue[KVX_QUEUE_LENGTH];
} kvx_copier;

/* Return the best level that this CPU and operating system run. */
static inline int kvx_copy_level(void) {
#if KVX_STREAMING
    if (__builtin_cpu_supports("avx512f")) return KVX_COPY_AVX512;
    if (__builtin_cpu_supports("avx2")) return KVX_COPY_AVX2;
#endif
    return KVX_COPY_PLAIN;
}

/* Prefetch every line that `bytes` from `source` on touch. */
KVX_ALWAYS_INLINE void kvx_prefetch_bytes(const char *source, size_t bytes) {
    const char *line = source - ((uintptr_t)source & (KVX_LINE_BYTES - 1));
    for (; line + 3 * KVX_LINE_BYTES < source + bytes; line += 4 * KVX_LINE_BYTES) {
        KVX_PREFETCH(line);
        KVX_PREFETCH(line + KVX_LINE_BYTES);
        KVX_PREFETCH(line + 2 * KVX_LINE_BYTES);
        KVX_PREFETCH(line + 3 * KVX_LINE_BYTES);
    }
    for (; line < source + bytes; line += KVX_LINE_BYTES) KVX_PREFETCH(line);
}

static inline size_t kvx_min(size_t a, size_t b) { return a < b ? a : b; }

/* Bytes up to the target's next line: what is written before streaming stores can begin. */
static inline size_t kvx_bytes_to_line(const char *target) {
    return (size_t)(-(uintptr_t)target & (KVX_LINE_BYTES - 1));
}

/* memcpy for the few bytes around streamed lines, mostly none: saves the call. */
static inline void kvx_copy_rest(char *target, const char *source, size_t bytes) {
    if (bytes) memcpy(target, source, bytes);
}

/* ---- rows ---- */

/* Return how many rows further on to prefetch, for rows about as long as `fragment`. */
static inline size_t kvx_rows_ahead(const kvx_fragment *fragment) {
    return kvx_min(KVX_ROW_AHEAD_BYTES / (fragment->bytes + 1) + 1, KVX_ROW_AHEAD_MAX);
}

/* Prefetch all of `fragment` if it comes before `end`. */
KVX_ALWAYS_INLINE void kvx_prefetch_row(const kvx_fragment *fragment, const kvx_fragment *end) {
    if (fragment < end) kvx_prefetch_bytes(fragment->source, fragment->bytes);
}

/* Whether streaming stores pay for a row: whole lines, or lines enough to outweigh the parts.
 *
 * A line that is written in part has to be read first, and streaming past it keeps the hardware
 * from fetching the next in time: 5.5 against 7.4 GB/s for plain rows of 256 bytes at 16 past a
 * line, 7.0 against 9.1 at 512, but 9.4 against 6.9 at 1 KiB.
 */
static inline int kvx_row_streams(const kvx_fragment *fragment) {
    return fragment->bytes >= KVX_ROW_ANY_ADDRESS_BYTES ||
           (((uintptr_t)fragment->target | fragment->bytes) & (KVX_LINE_BYTES - 1)) == 0;
}

/* Copy `count` fragments; up to `end` more may be looked at. */
static void kvx_rows_plain(const kvx_fragment *fragment, size_t count, const kvx_fragment *end) {
    const kvx_fragment *stop = fragment + count;
    size_t ahead = kvx_rows_ahead(fragment);
    for (; fragment < stop; ++fragment) {
        kvx_prefetch_row(fragment + ahead, end);
        memcpy(fragment->target, fragment->source, fragment->bytes);
    }
}

#if KVX_STREAMING

__attribute__((target("avx2"))) static inline void kvx_stream_line_avx2(char *target,
                                                                        const char *source) {
    __m256i low = _mm256_loadu_si256((const __m256i *)source);
    __m256i high = _mm256_loadu_si256((const __m256i *)(source + 32));
    _mm256_stream_si256((__m256i *)target, low);
    _mm256_stream_si256((__m256i *)(target + 32), high);
}

__attribute__((target("avx512f"))) static inline void kvx_stream_line_avx512(char *target,
                                                                             const char *source) {
    _mm512_stream_si512((__m512i *)target, _mm512_loadu_si512(source));
}

/* Write KVX_STEP_BYTES past the cache, in the order of addresses. Spelled out: gcc -O3 unrolls a
 * loop with its stores in another order, and rows of 256 bytes fell from 11.9 to 5.9 GB/s. */
__attribute__((target("avx2"))) static inline void kvx_stream_step_avx2(char *target,
                                                                        const char *source) {
    kvx_stream_line_avx2(target, source);
    kvx_stream_line_avx2(target + 64, source + 64);
    kvx_stream_line_avx2(target + 128, source + 128);
    kvx_stream_line_avx2(target + 192, source + 192);
}

__attribute__((target("avx512f"))) static inline void kvx_stream_step_avx512(char *target,
                                                                             const char *source) {
    kvx_stream_line_avx512(target, source);
    kvx_stream_line_avx512(target + 64, source + 64);
    kvx_stream_line_avx512(target + 128, source + 128);
    kvx_stream_line_avx512(target + 192, source + 192);
}

/* Copy the bytes of a row up to a line and return their number: there streaming begins. */
static inline size_t kvx_row_begin(const kvx_fragment *row) {
    size_t head = kvx_min(kvx_bytes_to_line(row->target), row->bytes);
    kvx_copy_rest(row->target, row->source, head);
    return head;
}

static inline void kvx_row_end(const kvx_fragment *row, size_t at) {
    kvx_copy_rest(row->target + at, row->source + at, row->bytes - at);
}

__attribute__((target("avx2"))) static void kvx_rows_avx2(const kvx_fragment *row, size_t count,
                                                          const kvx_fragment *end) {
    const kvx_fragment *stop = row + count;
    size_t ahead = kvx_rows_ahead(row);
    for (; row < stop; ++row) {
        kvx_prefetch_row(row + ahead, end);
        size_t at = 0;
        if (kvx_row_streams(row))
            for (at = kvx_row_begin(row); at + KVX_STEP_BYTES <= row->bytes; at += KVX_STEP_BYTES)
                kvx_stream_step_avx2(row->target + at, row->source + at);
        kvx_row_end(row, at);
    }
}

__attribute__((target("avx512f"))) static void kvx_rows_avx512(const kvx_fragment *row,
                                                               size_t count,
                                                               const kvx_fragment *end) {
    const kvx_fragment *stop = row + count;
    size_t ahead = kvx_rows_ahead(row);
    for (; row < stop; ++row) {
        kvx_prefetch_row(row + ahead, end);
        size_t at = 0;
        if (kvx_row_streams(row))
            for (at = kvx_row_begin(row); at + KVX_STEP_BYTES <= row->bytes; at += KVX_STEP_BYTES)
                kvx_stream_step_avx512(row->target + at, row->source + at);
        kvx_row_end(row, at);
    }
}

/* ---- lanes ---- */

/* A fragment under way; `next` is the one that follows in the same lane, or NULL. */
typedef struct kvx_lane {
    kvx_fragment left;
    const kvx_fragment *next;
} kvx_lane;

/* Let the lane begin `fragment`: its target now starts on a line. */
static inline void kvx_lane_begin(kvx_lane *lane, const kvx_fragment *fragment) {
    size_t head = kvx_bytes_to_line(fragment->target);
    kvx_copy_rest(fragment->target, fragment->source, head);
    lane->left.target = fragment->target + head;
    lane->left.source = fragment->source + head;
    lane->left.bytes = fragment->bytes - head;
}

/* Prefetch the step KVX_LANE_AHEAD_BYTES on, in this fragment or at the start of the next. */
KVX_ALWAYS_INLINE void kvx_lane_prefetch(const kvx_lane *lane) {
    size_t left = lane->left.bytes;
    if (left > KVX_LANE_AHEAD_BYTES)
        kvx_prefetch_bytes(lane->left.source + KVX_LANE_AHEAD_BYTES, KVX_STEP_BYTES);
    else if (lane->next)
        kvx_prefetch_bytes(lane->next->source + KVX_LANE_AHEAD_BYTES - left, KVX_STEP_BYTES);
}

__attribute__((target("avx2"))) static inline void kvx_lane_step(kvx_lane *lane) {
    kvx_lane_prefetch(lane);
    kvx_stream_step_avx2(lane->left.target, lane->left.source);
    lane->left.target += KVX_STEP_BYTES;
    lane->left.source += KVX_STEP_BYTES;
    lane->left.bytes -= KVX_STEP_BYTES;
}

/* Copy `count` fragments of at least KVX_LANE_MIN_BYTES, KVX_NUM_LANES at a time. */
__attribute__((target("avx2"))) static void kvx_lanes_avx2(const kvx_fragment *fragment,
                                                           size_t count) {
    const kvx_fragment *end = fragment + count;
    kvx_lane lanes[KVX_NUM_LANES];
    size_t live = kvx_min(count, KVX_NUM_LANES);
    for (size_t idx = 0; idx < live; ++idx) kvx_lane_begin(&lanes[idx], fragment++);
    for (size_t idx = 0; idx < live; ++idx) lanes[idx].next = fragment < end ? fragment++ : NULL;
    while (live > 0) {
        for (size_t idx = 0; idx < live; ++idx) {
            kvx_lane *lane = &lanes[idx];
            if (lane->left.bytes >= KVX_STEP_BYTES) {
                kvx_lane_step(lane);
                continue;
            }
            kvx_copy_rest(lane->left.target, lane->left.source, lane->left.bytes);
            if (lane->next) {
                kvx_lane_begin(lane, lane->next);
                lane->next = fragment < end ? fragment++ : NULL;
            } else {
                *lane = lanes[--live];
            }
        }
    }
}

#endif /* KVX_STREAMING */

/* ---- copier ---- */

/* Begin a copy at `level`, which the CPU must run. */
static inline void kvx_copier_begin(kvx_copier *copier, int level) {
    copier->lanes_level = level;
    copier->rows_level = level;
    copier->lanes = 0;
    copier->length = 0;
}

/* Begin a gather of `num_bytes` in all, at the level that pays for so many. */
static inline void kvx_copier_begin_gather(kvx_copier *copier, uint64_t num_bytes) {
    kvx_copier_begin(copier, KVX_COPY_PLAIN);
    if (num_bytes >= KVX_STREAM_LANES_BYTES) copier->lanes_level = kvx_copy_level();
    if (num_bytes >= KVX_STREAM_ROWS_BYTES) copier->rows_level = kvx_copy_level();
}

/* Begin a scatter of any size, at the level that pays for it. */
static inline void kvx_copier_begin_scatter(kvx_copier *copier) {
    kvx_copier_begin(copier, kvx_copy_level());
}

/* Copy all but the last `keep` rows of the queue; those see more rows to prefetch next time. */
static void kvx_copy_rows(kvx_copier *copier, size_t keep) {
    size_t count = copier->length - kvx_min(keep, copier->length);
    const kvx_fragment *end = copier->queue + copier->length;
#if KVX_STREAMING
    if (copier->rows_level == KVX_COPY_AVX512)
        kvx_rows_avx512(copier->queue, count, end);
    else if (copier->rows_level == KVX_COPY_AVX2)
        kvx_rows_avx2(copier->queue, count, end);
    else
#endif
        kvx_rows_plain(copier->queue, count, end);
    copier->length -= count;
    memmove(copier->queue, copier->queue + count, copier->length * sizeof(kvx_fragment));
}

/* Copy everything that is in the queue. */
static void kvx_copier_flush(kvx_copier *copier) {
    if (copier->length == 0) return;
#if KVX_STREAMING
    if (copier->lanes) {
        kvx_lanes_avx2(copier->queue, copier->length);
        copier->length = 0;
        return;
    }
#endif
    kvx_copy_rows(copier, 0);
}

/* Take a fragment in; it is copied by the end of `kvx_copier_end` at the latest. */
static inline void kvx_copier_add(kvx_copier *copier, char *target, const char *source,
                                  size_t bytes) {
    int lanes = copier->lanes_level != KVX_COPY_PLAIN && bytes >= KVX_LANE_MIN_BYTES;
    if (lanes != copier->lanes) {
        kvx_copier_flush(copier);
        copier->lanes = lanes;
    } else if (copier->length == KVX_QUEUE_LENGTH) {
        if (lanes)
            kvx_copier_flush(copier);
        else
            kvx_copy_rows(copier, KVX_ROW_AHEAD_MAX);
    }
    kvx_fragment fragment = {target, source, bytes};
    copier->queue[copier->length++] = fragment;
}

/* Finish: everything is copied, and visible to whom the caller hands the target. */
static inline void kvx_copier_end(kvx_copier *copier) {
    kvx_copier_flush(copier);
#if KVX_STREAMING
    _mm_sfence();
#endif
}

#endif
