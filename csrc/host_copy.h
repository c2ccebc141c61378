/* SPDX-License-Identifier: Apache-2.0 */
/* Copy loops for the CPU: many fragments of any size and address, from cold memory.
 *
 * A copier collects fragments in a queue and copies them when it is full, because the time of a
 * single fragment goes into waiting: a core reads one cold fragment after another at a third of
 * the rate at which it reads eight of them side by side. Two loops, by fragment size:
 *
 *   rows   fragments below 4 KiB, one after the other, with the lines of those to come
 *          prefetched about 8 KiB ahead
 *   lanes  larger ones, eight at a time in steps of 256 bytes, each prefetched 4 KiB ahead and
 *          into the fragment that its lane copies next
 *
 * Both write with streaming stores where `kvx_copy_level` allows, else through memcpy. Prefetches go
 * to the second level cache: on the machine below that was worth 1.2x over the first level, whose few
 * miss buffers fill up. Measured on one core of an EPYC 9004 (Zen 4), 4 KiB pages, 512 MiB of
 * fragments in random order, as a ratio to one memcpy over the same bytes; `benchmarks/ratios_blocks.py`
 * prints the ratios of the machine it runs on.
 *
 *   fragment               256 B   1 KiB   2 KiB   4 KiB   8 KiB   16 KiB   1 MiB
 *   memcpy per fragment    0.4     0.3     0.3     0.5     0.7     0.8      1.0
 *   rows, AVX-512          1.0     0.9     0.9     0.8     1.0     1.1      1.6
 *   rows, AVX2             0.9     0.9     0.8     0.9     1.0     1.1      1.6
 *   lanes, AVX-512         0.3     0.5     0.6     1.1     1.4     1.5      1.7
 *   lanes, AVX2            0.3     0.5     0.8     1.3     1.5     1.6      1.7
 *
 * Hence rows below 4 KiB and lanes from there on, and AVX2 in the lanes even where AVX-512 is at hand.
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

#if defined(__GNUC__)
#define KVX_PREFETCH(address) __builtin_prefetch((address), 0, 2)
#else
#define KVX_PREFETCH(address) ((void)(address))
#endif

enum {
    KVX_COPY_PLAIN = 0,
    KVX_COPY_AVX2 = 1,
    KVX_COPY_AVX512 = 2,
};

enum {
    KVX_LINE_BYTES = 64,
    KVX_STEP_BYTES = 256,       /* fastest of 256, 512, 1024 in the lanes */
    KVX_NUM_LANES = 8,          /* fastest of 4, 6, 8, 12, 16 */
    KVX_LANE_AHEAD_BYTES = 4096, /* within noise of 2 and 8 KiB at 16 KiB, 1.1x at 4 KiB */
    KVX_LANE_MIN_BYTES = 4096,
    KVX_ROW_AHEAD_BYTES = 8192, /* 4 to 32 KiB are within noise of each other */
    KVX_ROW_AHEAD_MAX = 64,     /* fragments */
    KVX_STREAM_MIN_BYTES = 1 << 20,
    KVX_QUEUE_LENGTH = 1024,
};

typedef struct kvx_fragment {
    char *target;
    const char *source;
    size_t bytes;
} kvx_fragment;

/* Collects fragments of one kind (rows or lanes) and copies them when full or flushed. */
typedef struct kvx_copier {
    int level;
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

/* Return the level for a job that moves `num_bytes`. */
static inline int kvx_level_for(uint64_t num_bytes) {
    return num_bytes < KVX_STREAM_MIN_BYTES ? KVX_COPY_PLAIN : kvx_copy_level();
}

static inline void kvx_prefetch_bytes(const char *source, size_t bytes) {
    for (size_t at = 0; at < bytes; at += KVX_LINE_BYTES) KVX_PREFETCH(source + at);
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

/* Prefetch the fragment that comes about KVX_ROW_AHEAD_BYTES after `fragment`, if there is one. */
static inline void kvx_prefetch_row(const kvx_fragment *fragment, const kvx_fragment *end) {
    size_t ahead = KVX_ROW_AHEAD_BYTES / (fragment->bytes + 1) + 1;
    const kvx_fragment *coming = fragment + kvx_min(ahead, KVX_ROW_AHEAD_MAX);
    if (coming < end) kvx_prefetch_bytes(coming->source, coming->bytes);
}

/* Copy `count` fragments; up to `end` more may be looked at. */
static void kvx_rows_plain(const kvx_fragment *fragment, size_t count, const kvx_fragment *end) {
    for (const kvx_fragment *stop = fragment + count; fragment < stop; ++fragment) {
        kvx_prefetch_row(fragment, end);
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

__attribute__((target("avx2"))) static void kvx_rows_avx2(const kvx_fragment *fragment, size_t count,
                                                          const kvx_fragment *end) {
    for (const kvx_fragment *stop = fragment + count; fragment < stop; ++fragment) {
        kvx_prefetch_row(fragment, end);
        size_t at = kvx_min(kvx_bytes_to_line(fragment->target), fragment->bytes);
        kvx_copy_rest(fragment->target, fragment->source, at);
        for (; at + KVX_LINE_BYTES <= fragment->bytes; at += KVX_LINE_BYTES)
            kvx_stream_line_avx2(fragment->target + at, fragment->source + at);
        kvx_copy_rest(fragment->target + at, fragment->source + at, fragment->bytes - at);
    }
}

__attribute__((target("avx512f"))) static void kvx_rows_avx512(const kvx_fragment *fragment,
                                                               size_t count,
                                                               const kvx_fragment *end) {
    for (const kvx_fragment *stop = fragment + count; fragment < stop; ++fragment) {
        kvx_prefetch_row(fragment, end);
        size_t at = kvx_min(kvx_bytes_to_line(fragment->target), fragment->bytes);
        kvx_copy_rest(fragment->target, fragment->source, at);
        for (; at + KVX_LINE_BYTES <= fragment->bytes; at += KVX_LINE_BYTES)
            kvx_stream_line_avx512(fragment->target + at, fragment->source + at);
        kvx_copy_rest(fragment->target + at, fragment->source + at, fragment->bytes - at);
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
static inline void kvx_lane_prefetch(const kvx_lane *lane) {
    size_t left = lane->left.bytes;
    if (left > KVX_LANE_AHEAD_BYTES)
        kvx_prefetch_bytes(lane->left.source + KVX_LANE_AHEAD_BYTES, KVX_STEP_BYTES);
    else if (lane->next)
        kvx_prefetch_bytes(lane->next->source + KVX_LANE_AHEAD_BYTES - left, KVX_STEP_BYTES);
}

__attribute__((target("avx2"))) static inline void kvx_lane_step(kvx_lane *lane) {
    kvx_lane_prefetch(lane);
    for (size_t at = 0; at < KVX_STEP_BYTES; at += KVX_LINE_BYTES)
        kvx_stream_line_avx2(lane->left.target + at, lane->left.source + at);
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
    copier->level = level;
    copier->lanes = 0;
    copier->length = 0;
}

/* Copy all but the last `keep` rows of the queue; those see more rows to prefetch next time. */
static void kvx_copy_rows(kvx_copier *copier, size_t keep) {
    size_t count = copier->length - kvx_min(keep, copier->length);
    const kvx_fragment *end = copier->queue + copier->length;
#if KVX_STREAMING
    if (copier->level == KVX_COPY_AVX512)
        kvx_rows_avx512(copier->queue, count, end);
    else if (copier->level == KVX_COPY_AVX2)
        kvx_rows_avx2(copier->queue, count, end);
    else
#endif
        kvx_rows_plain(copier->queue, count, end);
    copier->length -= count;
    memmove(copier->queue, copier->queue + count, copier->length * sizeof(kvx_fragment));
}

/* Copy everything that is in the queue. */
static void kvx_copier_flush(kvx_copier *copier) {
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
    int lanes = copier->level != KVX_COPY_PLAIN && bytes >= KVX_LANE_MIN_BYTES;
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
    if (copier->level != KVX_COPY_PLAIN) _mm_sfence();
#endif
}

#endif
