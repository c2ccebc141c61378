# SPDX-License-Identifier: Apache-2.0
"""Block copies between KV cache and values: the host path, and the kernel's loop on the CPU."""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy, memset


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

    ctypedef struct kvx_place:
        uint32_t item
        uint32_t tile

    ctypedef struct kvx_offsets:
        int64_t page
        int64_t value

    uint32_t kvx_divide(uint32_t n, uint32_t multiplier, uint32_t shift)
    uint32_t kvx_find_span(const kvx_span *spans, uint32_t num_spans, uint32_t work)
    kvx_place kvx_locate(const kvx_span *span, uint32_t work)
    uint64_t kvx_page_address(const kvx_run *run, int block_id)
    kvx_offsets kvx_unit_offsets(const kvx_run *run, uint32_t unit)
    uint32_t kvx_word_log2(uint32_t width_log2, uint64_t value_ptr)


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

    # The simulated warp: 32 lanes, each with four loads under way before their stores.
    NUM_WARP_LANES = 32
    NUM_LOADS = 4
    MAX_UNIT_BYTES = 16


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
    tests compare it with ``copy_items``; it checks nothing and is slow. Returns how many units
    were not at a multiple of their word, which a GPU would refuse: 0 unless the plan is wrong.
    """
    cdef uint32_t warp
    cdef uint32_t num_work = 0
    cdef uint64_t num_misaligned = 0
    if spans.shape[0] > 0:
        num_work = spans[spans.shape[0] - 1].first_work + spans[spans.shape[0] - 1].num_work
    with nogil:
        for warp in range(num_warps):
            num_misaligned += _run_warp(
                runs, tiles, spans, items, to_value, warp, num_warps, num_work
            )
    return num_misaligned


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


cdef uint64_t _run_warp(
    const kvx_run[::1] runs,
    const kvx_tile[::1] tiles,
    const kvx_span[::1] spans,
    const kvx_item[::1] items,
    bint to_value,
    uint32_t warp,
    uint32_t num_warps,
    uint32_t num_work,
) noexcept nogil:
    """Copy the tiles of one persistent warp; return the number of misaligned units."""
    cdef uint32_t work = warp
    cdef const kvx_span *span
    cdef kvx_place place
    cdef uint64_t num_misaligned = 0
    while work < num_work:
        span = &spans[kvx_find_span(&spans[0], <uint32_t>spans.shape[0], work)]
        place = kvx_locate(span, work)
        if items[place.item].block_id >= 0:
            num_misaligned += _copy_tile(
                &runs[tiles[place.tile].run], &tiles[place.tile], &items[place.item], to_value
            )
        work += num_warps
    return num_misaligned


cdef uint64_t _copy_tile(
    const kvx_run *run, const kvx_tile *tile, const kvx_item *item, bint to_value
) noexcept nogil:
    """Copy one tile, as many units at a time as a warp has loads; return misaligned units."""
    cdef uint32_t first = 0
    cdef uint32_t lane
    cdef uint64_t num_misaligned = 0
    while first < tile.num_units:
        for lane in range(<uint32_t>NUM_WARP_LANES):
            num_misaligned += _copy_lane(run, tile, item, to_value, first + lane)
        first += NUM_WARP_LANES * NUM_LOADS
    return num_misaligned


cdef uint64_t _copy_lane(
    const kvx_run *run, const kvx_tile *tile, const kvx_item *item, bint to_value, uint32_t first
) noexcept nogil:
    """Load four units of a tile, ``first`` and every 32nd after it, then store them."""
    cdef uint64_t page = kvx_page_address(run, item.block_id)
    cdef uint32_t word_log2 = kvx_word_log2(run.width_log2, item.value_ptr)
    cdef uint8_t loaded[NUM_LOADS][MAX_UNIT_BYTES]  # stands for registers
    cdef uint64_t targets[NUM_LOADS]
    cdef uint32_t num_loaded = 0
    cdef uint32_t load
    cdef kvx_offsets offsets
    cdef uint64_t page_at, value_at, source
    cdef uint64_t num_misaligned = 0
    while num_loaded < <uint32_t>NUM_LOADS and first + num_loaded * NUM_WARP_LANES < tile.num_units:
        offsets = kvx_unit_offsets(run, tile.first_unit + first + num_loaded * NUM_WARP_LANES)
        page_at = page + <uint64_t>offsets.page
        value_at = item.value_ptr + <uint64_t>offsets.value
        source = page_at if to_value else value_at
        targets[num_loaded] = value_at if to_value else page_at
        num_misaligned += source & ((1 << word_log2) - 1) != 0
        _move_unit(
            <void *>loaded[num_loaded], <const void *><uintptr_t>source, run.width_log2, word_log2
        )
        num_loaded += 1
    for load in range(num_loaded):
        num_misaligned += targets[load] & ((1 << word_log2) - 1) != 0
        _move_unit(<void *><uintptr_t>targets[load], loaded[load], run.width_log2, word_log2)
    return num_misaligned


cdef inline void _move_unit(
    void *target, const void *source, uint32_t width_log2, uint32_t word_log2
) noexcept nogil:
    """Move one unit of ``1 << width_log2`` bytes word by word."""
    cdef size_t word_bytes = <size_t>1 << word_log2
    cdef size_t at = 0
    while at < <size_t>1 << width_log2:
        memcpy(<char *>target + at, <const char *>source + at, word_bytes)
        at += word_bytes
