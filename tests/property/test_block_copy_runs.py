# SPDX-License-Identifier: Apache-2.0
"""Merging keeps every byte pair, the native division is exact, spans cover a job once."""

import itertools
from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvxfer._native import block_copy
from kvxfer.blocks import plan
from kvxfer.blocks.runs import MAX_AXES, Axis, Strided, merge_segments

STEPS = st.integers(-40, 40)
BELOW_LIMIT = st.one_of(
    st.integers(0, plan.INDEX_LIMIT - 1),
    st.integers(1, 31).flatmap(lambda bits: st.integers(-2, 2).map(lambda off: (1 << bits) + off)),
).map(lambda number: min(max(number, 0), plan.INDEX_LIMIT - 1))


@st.composite
def segments(draw):
    """Draw segments with any steps, and often with the steps that make axes merge."""
    result = []
    shape = None
    for _ in range(draw(st.integers(1, 4))):
        if shape is None or draw(st.booleans()):
            shape = draw(shapes())
        distance = st.sampled_from([0, 64, 100, 128, 192, 256])
        result.append(
            Strided(1000 + draw(distance), shape[0], draw(distance), shape[1], tuple(shape[2]))
        )
    return result


@st.composite
def shapes(draw):
    fragment = draw(st.integers(1, 5))
    axes = []
    page_step = value_step = fragment
    for _ in range(draw(st.integers(0, 4))):
        size = draw(st.integers(0, 3))
        if draw(st.booleans()):
            page_step, value_step = draw(STEPS), draw(STEPS)
        axes.insert(0, Axis(size, page_step, value_step))
        page_step, value_step = page_step * size, value_step * size
    return draw(STEPS), fragment, axes


def byte_pairs(strided):
    """Return how often each (page byte, value byte, block step) occurs."""
    offsets = [range(axis.size) for axis in strided.axes]
    pairs = Counter()
    for entry in itertools.product(*offsets):
        steps = list(zip(entry, strided.axes, strict=True))
        page = strided.ptr + sum(idx * axis.page_step for idx, axis in steps)
        value = strided.value_offset + sum(idx * axis.value_step for idx, axis in steps)
        for byte in range(strided.fragment_bytes):
            pairs[page + byte, value + byte, strided.block_step] += 1
    return pairs


@given(segments())
def test_block_copy_merging_keeps_every_byte_pair(drawn):
    merged = merge_segments(drawn)
    expected = sum(map(byte_pairs, drawn), Counter())
    assert sum(map(byte_pairs, merged), Counter()) == expected
    assert all(len(run.axes) <= MAX_AXES for run in merged)


@given(BELOW_LIMIT, BELOW_LIMIT.map(lambda number: max(number, 1)))
def test_block_copy_division_is_exact_below_the_limit(number, by):
    multiplier, shift = plan.divisor(by)
    assert multiplier < 2**32
    assert block_copy.divide(number, multiplier, shift) == number // by


@st.composite
def jobs(draw):
    """Draw (tiles per class, items per class): a plan as small as the arithmetic allows."""
    num_classes = draw(st.integers(1, 4))
    counts = st.lists(st.integers(0, 5), min_size=num_classes, max_size=num_classes)
    return draw(counts), draw(counts)


@given(jobs(), st.booleans())
def test_block_copy_spans_cover_every_item_and_tile_once(job, to_value):
    tiles_by_class, items_by_class = job
    classes = np.zeros(len(tiles_by_class), dtype=plan.CLASS_DTYPE)
    classes["first_run"] = np.arange(len(classes)) * 2
    classes["num_copy_runs"] = 1
    classes["num_runs"] = 2  # the second run of each class writes zeros, and has one tile
    runs = np.ravel([(count, 1) for count in tiles_by_class])
    first_tile = np.concatenate([[0], np.cumsum(runs)])
    items = np.zeros(sum(items_by_class), dtype=plan.ITEM_DTYPE)
    items["class_id"] = np.repeat(np.arange(len(classes)), items_by_class)

    spans = plan.span_table(items, classes, first_tile, to_value=to_value)

    expected = Counter()
    for idx, item in enumerate(items):
        first = first_tile[2 * item["class_id"]]
        num_tiles = tiles_by_class[item["class_id"]] + (1 if to_value else 0)
        expected.update((idx, int(tile)) for tile in range(first, first + num_tiles))
    assert Counter(places(spans)) == expected


def places(spans):
    """Yield (item, tile) of every work id, as the spans say, in the order of work ids."""
    next_work = 0
    for span in spans:
        assert span["first_work"] == next_work
        next_work += int(span["num_work"])
        for local in range(int(span["num_work"])):
            item, tile = divmod(local, int(span["num_tiles"]))
            yield int(span["first_item"]) + item, int(span["first_tile"]) + tile
