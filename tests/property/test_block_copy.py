# SPDX-License-Identifier: Apache-2.0
"""Gather and scatter, by the fast host path and by the kernel's loop, against the oracle."""

import numpy as np
import pytest
from block_copy_oracle import PATTERN, expected_value, models, place, placements, random_content
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.blocks import ITEM_DTYPE, BlockLayout, host, simulator

NUM_BLOCKS = 3
ORDERS = st.sampled_from(["token_major", "head_major"])
SEEDS = st.integers(0, 99)
BLOCKS = st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True)
ALIGNMENTS = st.sampled_from([0, 1, 2, 8])
IMPLS = {"host": host, "simulator": simulator}


class Values:
    """Room for every class of every wanted block, in shuffled order, patterned all around."""

    def __init__(self, layout, blocks, alignment, seed):
        wanted = [(b, c) for b in blocks for c in range(len(layout.classes))]
        np.random.default_rng(seed).shuffle(wanted)
        self.places = {}
        end = alignment
        for block, class_id in map(tuple, wanted):
            self.places[block, class_id] = slice(end, end + layout.classes[class_id].value_bytes)
            end = -(-(self.places[block, class_id].stop + 1) // 16) * 16 + alignment
        self.memory = np.full(end + 64, PATTERN, dtype=np.uint8)
        self.start = -self.memory.ctypes.data % 16  # so that `alignment` is the values' own
        base = self.memory.ctypes.data + self.start
        self.items = np.array(
            [(base + at.start, block, class_id) for (block, class_id), at in self.places.items()],
            dtype=ITEM_DTYPE,
        )

    def __getitem__(self, key):
        return self.memory[self.start :][self.places[key]]

    def outside(self):
        """Return a copy of everything, with the values blanked."""
        copy = self.memory.copy()
        for at in self.places.values():
            copy[self.start :][at] = 0
        return copy


def layout_of(engine, value_order, shard_heads):
    regions = [layer.region(f"layer{idx}") for idx, layer in enumerate(engine)]
    return BlockLayout.from_regions(
        regions, value_order=value_order, head_shard=shard_heads, num_blocks=NUM_BLOCKS
    )


def draw_engine(data, layers):
    return [place(layer, data.draw(placements(layer)), NUM_BLOCKS) for layer in layers]


def write(engine, contents, blocks=range(NUM_BLOCKS)):
    for layer, content in zip(engine, contents, strict=True):
        layer.write(content, blocks)


def memories(engine):
    return [layer.memory.tobytes() for layer in engine]


def expected_values(layout, layers, contents, blocks, value_order):
    return {
        (block, class_id): expected_value(
            layers, contents, block, row.group, row.heads, value_order
        )
        for block in blocks
        for class_id, row in enumerate(layout.classes)
    }


@pytest.mark.parametrize("impl", IMPLS, ids="impl={}".format)
@given(st.data(), models(), ORDERS, BLOCKS, ALIGNMENTS, SEEDS)
def test_block_copy_gather_writes_the_values_and_nothing_else(
    impl, data, model, value_order, blocks, alignment, seed
):
    layers, shard_heads = model
    contents = random_content(layers, NUM_BLOCKS, seed)
    engine = draw_engine(data, layers)
    write(engine, contents)
    sources = memories(engine)
    layout = layout_of(engine, value_order, shard_heads)
    values = Values(layout, blocks, alignment, seed)
    outside = values.outside()

    misaligned = IMPLS[impl].gather_items(layout, values.items)

    for key, expected in expected_values(layout, layers, contents, blocks, value_order).items():
        assert values[key].tobytes() == expected
    assert np.array_equal(values.outside(), outside)
    assert memories(engine) == sources
    assert not misaligned


@pytest.mark.parametrize("impl", IMPLS, ids="impl={}".format)
@given(st.data(), models(), ORDERS, BLOCKS, ALIGNMENTS, SEEDS)
def test_block_copy_scatter_writes_the_blocks_and_nothing_else(
    impl, data, model, value_order, blocks, alignment, seed
):
    layers, shard_heads = model
    contents = random_content(layers, NUM_BLOCKS, seed)
    drawn = [(layer, data.draw(placements(layer))) for layer in layers]
    engine, expected = ([place(layer, how, NUM_BLOCKS) for layer, how in drawn] for _ in range(2))
    write(expected, contents, blocks)
    layout = layout_of(engine, value_order, shard_heads)
    values = Values(layout, blocks, alignment, seed)
    for key, value in expected_values(layout, layers, contents, blocks, value_order).items():
        values[key][:] = np.frombuffer(value, dtype=np.uint8)
    source = values.memory.copy()

    misaligned = IMPLS[impl].scatter_items(layout, values.items)

    assert memories(engine) == memories(expected)
    assert np.array_equal(values.memory, source)
    assert not misaligned


@given(st.data(), models(), ORDERS, SEEDS)
def test_block_copy_engines_of_any_layout_share_values(data, model, value_order, seed):
    layers, shard_heads = model
    contents = random_content(layers, NUM_BLOCKS, seed)
    saver, loader = draw_engine(data, layers), draw_engine(data, layers)
    write(saver, contents)
    saving = layout_of(saver, value_order, shard_heads)
    loading = layout_of(loader, value_order, shard_heads)
    values = Values(saving, range(NUM_BLOCKS), 0, seed)

    host.gather_items(saving, values.items)
    host.scatter_items(loading, values.items)

    assert saving.classes == loading.classes
    for layer, content in zip(loader, contents, strict=True):
        assert layer.read(NUM_BLOCKS).tobytes() == content.tobytes()


@given(st.data(), models(), SEEDS)
def test_block_copy_native_values_are_those_of_the_order_it_names(data, model, seed):
    layers, shard_heads = model
    how = data.draw(placements(layers[0]))
    contents = random_content(layers, NUM_BLOCKS, seed)
    engine = [place(layer, how, NUM_BLOCKS) for layer in layers]
    write(engine, contents)
    layout = layout_of(engine, "native", shard_heads)
    values = Values(layout, range(NUM_BLOCKS), 0, seed)

    host.gather_items(layout, values.items)

    order = layout.value_order
    expected = expected_values(layout, layers, contents, range(NUM_BLOCKS), order)
    assert {key: values[key].tobytes() for key in expected} == expected
