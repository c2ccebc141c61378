# SPDX-License-Identifier: Apache-2.0
"""Block copies between KV cache and values: the host path, and the kernel's loop on the CPU."""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy, memset


cdef extern from *:
    """
    /* Counts the words that the simulated kernel moves to or from addresses a GPU would refuse. */
    static _Thread_local unsigned long long kvx_num_misaligned;
    #define KVX_TOUCH(address, word_log2) \
        (kvx_num_misaligned += ((address) & ((1ull << (word_log2)) - 1)) != 0)
    """
    uint64_t kvx_num_misaligned


cdef extern from "block_copy.h" nogil:
    ctypedef struct kvx_run:
        uint64_t base
        int64_t block_step
        int64_t value_offset
        int64_t outer_page_step
        int64_t outer_value_step
        int64_t inner_page_step
        int64_t inner_value_step
        uint64_t fragment_bytes
        uint32_t outer_count
        uint32_t inner_count
        uint32_t fragment_units
        uint32_t width_log2
        uint32_t units_multiplier
        uint32_t units_shift
        uint32_t inner_multiplier
        uint32_t inner_shift

    ctypedef struct kvx_tile:
        uint32_t run
        uint32_t first_unit
        uint32_t num_units
        uint32_t reserved

    ctypedef struct kvx_item:
        uint64_t value_ptr
        int32_t block_id
        int32_t class_id

    ctypedef struct kvx_span:
        uint32_t first_work
        uint32_t num_work
        uint32_t first_item
        uint32_t first_tile
        uint32_t num_tiles
        uint32_t tiles_multiplier
        uint32_t tiles_shift
        uint32_t reserved

    ctypedef struct kvx_job:
        uint64_t runs_ptr
        uint64_t tiles_ptr
        uint64_t words_ptr
        uint32_t num_spans
        uint32_t num_work

    ctypedef struct kvx_inline_job:
        pass  # a kvx_job, then the words

    enum:
        KVX_WARP_LANES

    uint32_t kvx_divide(uint32_t n, uint32_t multiplier, uint32_t shift)
    uint64_t kvx_page_address(const kvx_run *run, int block_id)
    void kvx_copy_tiles(
        const kvx_job *job, const kvx_span *spans, const kvx_item *items, int to_value,
        uint32_t work, uint32_t num_warps, uint32_t lane,
    )
    void kvx_run_lane(
        const kvx_job *job, const kvx_item *words, int to_value, uint32_t cta, uint32_t num_ctas,
        uint32_t warp, uint32_t warps_per_cta, uint32_t lane,
    )


cdef extern from "host_copy.h" nogil:
    ctypedef struct kvx_copier:
        pass

    int kvx_copy_level()
    void kvx_copier_begin(kvx_copier *copier, int level)
    void kvx_copier_begin_gather(kvx_copier *copier, uint64_t num_bytes)
    void kvx_copier_begin_scatter(kvx_copier *copier)
    void kvx_copier_add(kvx_copier *copier, char *target, const char *source, size_t bytes)
    void kvx_copier_end(kvx_copier *copier)


cdef packed struct copy_class:
    # The host's view of one class; its NumPy dtype is CLASS_DTYPE in kvxfer/blocks/plan.py.
    uint32_t first_run
    uint32_t num_copy_runs  # moved both ways
    uint32_t num_runs       # the rest are zeros between segments, written by a gather only
    uint32_t reserved
    uint64_t value_bytes


cdef enum:
    # What `_check_items` found wrong.
    BAD_BLOCK = 1
    BAD_CLASS = 2
    BAD_VALUE = 3
    OUTSIDE = 4

    WORDS_PER_SPAN = 2


def copy_level():
    """Return the best copy level of this CPU: 0 memcpy, 1 AVX2, 2 AVX-512 streaming stores."""
    return kvx_copy_level()


def copy_items(
    const kvx_run[::1] runs,
    const copy_class[::1] classes,
    const kvx_item[::1] items,
    int32_t num_blocks,
    bint to_value,
    int level,
):
    """Copy every item's block into its value (``to_value``), or the value into the block.

    One call without the GIL; complete, and visible to other threads, on return. All items are
    checked before the first byte moves: IndexError names the first block or class out of range,
    ValueError the first value at address 0. ``level`` is at most ``copy_level()``; -1 lets
    direction and size of the job decide.

    The caller guarantees that the runs' pages and the items' values are mapped memory, and that
    no two items write the same bytes.
    """
    cdef int problem = 0
    cdef Py_ssize_t bad
    cdef kvx_copier copier
    if level > kvx_copy_level():
        raise ValueError(f"level is {level}, this CPU runs up to {kvx_copy_level()}")
    with nogil:
        bad = _check_items(items, num_blocks, classes.shape[0], &problem)
        if bad < 0:
            if level >= 0:
                kvx_copier_begin(&copier, level)
            elif to_value:
                kvx_copier_begin_gather(&copier, _count_bytes(classes, items))
            else:
                kvx_copier_begin_scatter(&copier)
            _add_items(&copier, runs, classes, items, to_value)
            kvx_copier_end(&copier)
    if bad >= 0:
        _raise_bad_item(items, bad, problem, num_blocks, classes.shape[0])


def fill_items(
    const int64_t[::1] block_ids,
    const uint8_t[::1] mask,
    int32_t num_blocks,
    int32_t class_id,
    uint64_t value_ptr,
    int64_t value_step,
    kvx_item[::1] out,
):
    """Write one item per block whose mask byte is not 0, in order, and return how many.

    ``block_ids`` (n,), each in [0, num_blocks); ``mask`` (n,) or None for all; ``out`` at least
    (n,). The value of ``block_ids[i]`` is at ``value_ptr + i * value_step``. Raises IndexError
    for the first wanted id outside the pool; ids that are masked out are not looked at.
    """
    cdef Py_ssize_t bad = -1
    cdef Py_ssize_t num_items
    cdef const uint8_t *wanted = NULL
    if mask is not None:
        if mask.shape[0] != block_ids.shape[0]:
            raise ValueError(
                f"mask has {mask.shape[0]} entries, block_ids has {block_ids.shape[0]}"
            )
        if mask.shape[0] > 0:
            wanted = &mask[0]
    if out.shape[0] < block_ids.shape[0]:
        raise ValueError(f"out has {out.shape[0]} entries, block_ids has {block_ids.shape[0]}")
    with nogil:
        num_items = _fill_until_bad(
            block_ids, wanted, num_blocks, class_id, value_ptr, value_step, out, &bad
        )
    if bad >= 0:
        raise IndexError(
            f"block_ids[{bad}] is {block_ids[bad]}, the layout has {num_blocks} blocks"
        )
    return num_items


def find_repeat(const kvx_item[::1] items, uint8_t[::1] seen):
    """Return the first item whose block an earlier one names, or -1.

    ``seen`` (num_blocks,) zeros, overwritten; the items' block ids lie in [0, num_blocks).
    """
    cdef Py_ssize_t repeat
    with nogil:
        repeat = _find_repeat(items, seen)
    return repeat


def check_items(
    const kvx_item[::1] items,
    const copy_class[::1] classes,
    int32_t num_blocks,
    const uint64_t[:, ::1] ranges,
):
    """Raise what ``copy_items`` would for the first item that cannot be copied.

    ``ranges`` (n, 2) are first and one-past-last addresses of the buffers that values may lie in;
    ValueError names the first item whose value does not lie in one of them as a whole.
    """
    cdef int problem = 0
    cdef Py_ssize_t bad
    if ranges.shape[1] != 2:
        raise ValueError(f"ranges has {ranges.shape[1]} columns, not first and end")
    with nogil:
        bad = _check_items(items, num_blocks, classes.shape[0], &problem)
        if bad < 0:
            bad = _find_outside(items, classes, ranges)
            problem = OUTSIDE
    if bad >= 0:
        if problem == OUTSIDE:
            raise ValueError(
                f"items[{bad}] has its value of {classes[items[bad].class_id].value_bytes} bytes "
                f"at {items[bad].value_ptr:#x}, outside of the buffers given"
            )
        _raise_bad_item(items, bad, problem, num_blocks, classes.shape[0])


def pack_job(
    const kvx_item[::1] items,
    const copy_class[::1] classes,
    const int64_t[::1] first_tile,
    bint to_value,
    int64_t[::1] counts,
    kvx_item[::1] words,
):
    """Write what a launch reads: one span for every class that has work, then all items by class.

    ``items`` checked, in any order, which they keep within a class; ``first_tile`` (num_runs + 1,)
    of the tile table; ``counts`` (num_classes,) zeros, overwritten; ``words`` at least one per
    item and two per class that can have one. Returns (spans, work ids); a launch takes less than
    2**31 of these.
    """
    cdef uint64_t num_work = 0
    cdef uint32_t num_spans
    cdef Py_ssize_t num_words = (
        items.shape[0] + WORDS_PER_SPAN * min(classes.shape[0], items.shape[0])
    )
    if counts.shape[0] != classes.shape[0]:
        raise ValueError(f"counts has {counts.shape[0]} entries for {classes.shape[0]} classes")
    if words.shape[0] < num_words:
        raise ValueError(f"words has {words.shape[0]} entries, {num_words} may be written")
    with nogil:
        num_spans = _write_spans(items, classes, first_tile, to_value, counts, words, &num_work)
        _write_sorted(items, counts, words[WORDS_PER_SPAN * num_spans:])
    return num_spans, num_work


def simulate_copy(
    const kvx_run[::1] runs,
    const kvx_tile[::1] tiles,
    const kvx_span[::1] spans,
    const kvx_item[::1] items,
    bint to_value,
    uint32_t num_warps,
):
    """Copy like ``copy_items``, through the kernel's loop: the lines that the GPU runs.

    ``num_warps`` persistent warps stride over the work ids of ``spans``; one warp copies a tile
    in steps of 32 lanes times four loads, and items with a negative block id are skipped. The
    tests compare it with ``copy_items``; it checks nothing and is slow. Returns how many words
    were not at a multiple of their size, which a GPU would refuse: 0 unless the plan is wrong.
    """
    cdef uint32_t warp, lane
    cdef kvx_job job
    if spans.shape[0] == 0:
        return 0
    job.runs_ptr = <uint64_t><uintptr_t>&runs[0]
    job.tiles_ptr = <uint64_t><uintptr_t>&tiles[0]
    job.num_spans = <uint32_t>spans.shape[0]
    job.num_work = spans[spans.shape[0] - 1].first_work + spans[spans.shape[0] - 1].num_work
    _begin_counting()
    with nogil:
        for warp in range(num_warps):
            for lane in range(<uint32_t>KVX_WARP_LANES):
                kvx_copy_tiles(&job, &spans[0], &items[0], to_value, warp, num_warps, lane)
    return kvx_num_misaligned


def simulate_kernel(
    const uint8_t[::1] parameters, bint to_value, bint inlined, uint32_t num_ctas, uint32_t threads
):
    """Run a launch on the CPU, from the very bytes of the kernel's parameters; see simulate_copy.

    ``parameters`` are a kvx_inline_job where ``inlined``, else a kvx_job; addresses in them are
    host memory. ``num_ctas`` CTAs of ``threads`` threads run one after the other.
    """
    cdef kvx_job job
    cdef const kvx_item *words
    cdef size_t num_bytes = sizeof(kvx_inline_job) if inlined else sizeof(kvx_job)
    if <size_t>parameters.shape[0] != num_bytes or threads % KVX_WARP_LANES:
        raise ValueError(
            f"{parameters.shape[0]} bytes of parameters, {num_bytes} expected; {threads} threads"
        )
    memcpy(&job, &parameters[0], sizeof(kvx_job))
    words = <const kvx_item *><uintptr_t>job.words_ptr
    if inlined:
        words = <const kvx_item *>&parameters[sizeof(kvx_job)]
    _begin_counting()
    with nogil:
        _run_ctas(&job, words, to_value, num_ctas, threads // <uint32_t>KVX_WARP_LANES)
    return kvx_num_misaligned


def divide(uint32_t n, uint32_t multiplier, uint32_t shift):
    """Return ``n`` divided by the divisor that ``multiplier`` and ``shift`` stand for."""
    return kvx_divide(n, multiplier, shift)


def struct_bytes():
    """Return the size of each C struct by name, for comparison with its NumPy dtype."""
    return {
        "run": sizeof(kvx_run),
        "tile": sizeof(kvx_tile),
        "span": sizeof(kvx_span),
        "item": sizeof(kvx_item),
        "class": sizeof(copy_class),
    }


def launch_struct_bytes():
    """Return the size of each struct that a kernel takes by value, as ``struct_bytes``."""
    return {"job": sizeof(kvx_job), "inline_job": sizeof(kvx_inline_job)}


cdef Py_ssize_t _check_items(
    const kvx_item[::1] items, int32_t num_blocks, Py_ssize_t num_classes, int *problem
) noexcept nogil:
    """Return the first item that cannot be copied, and why; -1 if all can."""
    cdef Py_ssize_t idx
    for idx in range(items.shape[0]):
        if not 0 <= items[idx].block_id < num_blocks:
            problem[0] = BAD_BLOCK
            return idx
        if not 0 <= items[idx].class_id < num_classes:
            problem[0] = BAD_CLASS
            return idx
        if items[idx].value_ptr == 0:
            problem[0] = BAD_VALUE
            return idx
    return -1


cdef int _raise_bad_item(
    const kvx_item[::1] items,
    Py_ssize_t idx,
    int problem,
    int32_t num_blocks,
    Py_ssize_t num_classes,
) except -1:
    """Raise what is wrong with ``items[idx]``."""
    if problem == BAD_BLOCK:
        raise IndexError(
            f"items[{idx}].block_id is {items[idx].block_id}, the layout has {num_blocks} blocks"
        )
    if problem == BAD_CLASS:
        raise IndexError(
            f"items[{idx}].class_id is {items[idx].class_id}, the layout has {num_classes} classes"
        )
    raise ValueError(f"items[{idx}].value_ptr is 0, not the address of a value")


cdef uint64_t _count_bytes(
    const copy_class[::1] classes, const kvx_item[::1] items
) noexcept nogil:
    """Return the bytes of all values of a job."""
    cdef Py_ssize_t idx
    cdef uint64_t num_bytes = 0
    for idx in range(items.shape[0]):
        num_bytes += classes[items[idx].class_id].value_bytes
    return num_bytes


cdef void _add_items(
    kvx_copier *copier,
    const kvx_run[::1] runs,
    const copy_class[::1] classes,
    const kvx_item[::1] items,
    bint to_value,
) noexcept nogil:
    """Hand every fragment of every item to the copier, in the order of the value."""
    cdef Py_ssize_t idx
    cdef uint32_t run_idx
    cdef const copy_class *group
    for idx in range(items.shape[0]):
        group = &classes[items[idx].class_id]
        for run_idx in range(group.num_copy_runs):
            _add_run(copier, &runs[group.first_run + run_idx], &items[idx], to_value)
        if to_value:
            for run_idx in range(group.num_copy_runs, group.num_runs):
                _write_zeros(&runs[group.first_run + run_idx], &items[idx])


cdef inline void _add_run(
    kvx_copier *copier, const kvx_run *run, const kvx_item *item, bint to_value
) noexcept nogil:
    """Hand the fragments of one run to the copier."""
    cdef char *page = <char *><uintptr_t>kvx_page_address(run, item.block_id)
    cdef char *value = <char *><uintptr_t>item.value_ptr + run.value_offset
    cdef char *page_at
    cdef char *value_at
    cdef uint32_t _outer, inner
    for _outer in range(run.outer_count):
        for inner in range(run.inner_count):
            page_at = page + inner * run.inner_page_step
            value_at = value + inner * run.inner_value_step
            if to_value:
                kvx_copier_add(copier, value_at, page_at, run.fragment_bytes)
            else:
                kvx_copier_add(copier, page_at, value_at, run.fragment_bytes)
        page += run.outer_page_step
        value += run.outer_value_step


cdef inline void _write_zeros(const kvx_run *run, const kvx_item *item) noexcept nogil:
    """Write the zeros of one run between the segments of a value."""
    cdef char *value = <char *><uintptr_t>item.value_ptr + run.value_offset
    cdef uint32_t _outer, inner
    for _outer in range(run.outer_count):
        for inner in range(run.inner_count):
            memset(value + inner * run.inner_value_step, 0, run.fragment_bytes)
        value += run.outer_value_step


cdef Py_ssize_t _fill_until_bad(
    const int64_t[::1] block_ids,
    const uint8_t *wanted,
    int32_t num_blocks,
    int32_t class_id,
    uint64_t value_ptr,
    int64_t value_step,
    kvx_item[::1] out,
    Py_ssize_t *bad,
) noexcept nogil:
    """Write the wanted items and return their number; stop at the first bad id."""
    cdef Py_ssize_t idx
    cdef Py_ssize_t num_items = 0
    for idx in range(block_ids.shape[0]):
        if wanted != NULL and not wanted[idx]:
            continue
        if not 0 <= block_ids[idx] < num_blocks:
            bad[0] = idx
            break
        out[num_items].value_ptr = value_ptr + <uint64_t>(idx * value_step)
        out[num_items].block_id = <int32_t>block_ids[idx]
        out[num_items].class_id = class_id
        num_items += 1
    return num_items


cdef Py_ssize_t _find_repeat(const kvx_item[::1] items, uint8_t[::1] seen) noexcept nogil:
    """Mark the blocks of the items; return the first item whose block is marked already."""
    cdef Py_ssize_t idx
    for idx in range(items.shape[0]):
        if seen[items[idx].block_id]:
            return idx
        seen[items[idx].block_id] = 1
    return -1


cdef Py_ssize_t _find_outside(
    const kvx_item[::1] items, const copy_class[::1] classes, const uint64_t[:, ::1] ranges
) noexcept nogil:
    """Return the first item whose value lies in none of the ranges; -1 if all do."""
    cdef Py_ssize_t idx, at
    cdef uint64_t first, value_bytes
    for idx in range(items.shape[0]):
        first = items[idx].value_ptr
        value_bytes = classes[items[idx].class_id].value_bytes
        for at in range(ranges.shape[0]):
            if ranges[at, 0] <= first <= ranges[at, 1] and value_bytes <= ranges[at, 1] - first:
                break
        else:
            return idx
    return -1


cdef uint32_t _write_spans(
    const kvx_item[::1] items,
    const copy_class[::1] classes,
    const int64_t[::1] first_tile,
    bint to_value,
    int64_t[::1] counts,
    kvx_item[::1] words,
    uint64_t *num_work,
) noexcept nogil:
    """Write the spans and return their number; ``counts`` becomes each class's first item."""
    cdef Py_ssize_t idx
    cdef int64_t count, num_tiles
    cdef int64_t first_item = 0
    cdef uint32_t num_spans = 0
    cdef kvx_span *span
    cdef const copy_class *group
    for idx in range(items.shape[0]):
        counts[items[idx].class_id] += 1
    for idx in range(classes.shape[0]):
        count = counts[idx]
        counts[idx] = first_item
        group = &classes[idx]
        num_tiles = _count_tiles(group, first_tile, to_value)
        if count > 0 and num_tiles > 0:
            span = <kvx_span *>&words[WORDS_PER_SPAN * num_spans]
            span.first_work = <uint32_t>num_work[0]
            span.num_work = <uint32_t>(count * num_tiles)
            span.first_item = <uint32_t>first_item
            span.first_tile = <uint32_t>first_tile[group.first_run]
            _set_divisor(span, <uint32_t>num_tiles)
            num_work[0] += <uint64_t>(count * num_tiles)
            num_spans += 1
        first_item += count
    return num_spans


cdef int64_t _count_tiles(
    const copy_class *group, const int64_t[::1] first_tile, bint to_value
) noexcept nogil:
    """Return the tiles of a class: a gather's include those that write zeros."""
    cdef uint32_t num_runs = group.num_runs if to_value else group.num_copy_runs
    return first_tile[group.first_run + num_runs] - first_tile[group.first_run]


cdef void _set_divisor(kvx_span *span, uint32_t num_tiles) noexcept nogil:
    """Let the span divide by its number of tiles; the arithmetic is that of ``plan.divisor``."""
    cdef uint32_t shift = 31
    while <uint64_t>1 << (shift - 31) < num_tiles:
        shift += 1
    span.num_tiles = num_tiles
    span.tiles_multiplier = <uint32_t>(((<uint64_t>1 << shift) + num_tiles - 1) // num_tiles)
    span.tiles_shift = shift
    span.reserved = 0


cdef void _write_sorted(
    const kvx_item[::1] items, int64_t[::1] next_item, kvx_item[::1] out
) noexcept nogil:
    """Write the items by class; ``next_item`` is where each class's next one goes."""
    cdef Py_ssize_t idx
    cdef int32_t class_id
    for idx in range(items.shape[0]):
        class_id = items[idx].class_id
        out[next_item[class_id]] = items[idx]
        next_item[class_id] += 1


cdef void _begin_counting() noexcept:
    """Forget the misaligned words that this thread has met."""
    global kvx_num_misaligned
    kvx_num_misaligned = 0


cdef void _run_ctas(
    const kvx_job *job,
    const kvx_item *words,
    bint to_value,
    uint32_t num_ctas,
    uint32_t warps_per_cta,
) noexcept nogil:
    """Run every thread of a launch, one after the other."""
    cdef uint32_t cta, warp, lane
    for cta in range(num_ctas):
        for warp in range(warps_per_cta):
            for lane in range(<uint32_t>KVX_WARP_LANES):
                kvx_run_lane(job, words, to_value, cta, num_ctas, warp, warps_per_cta, lane)
