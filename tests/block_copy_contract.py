# SPDX-License-Identifier: Apache-2.0
"""What every copy of CUDA tensors must do, on a GPU and on the simulated one.

A subclass of `BlockCopyContract` has a `device` fixture of module scope: where memory goes and how
to look at it (`cuda_fakes.FakeDevice` is the model). Tests are against ``block_copy_oracle``, of
which the folder has to be on the path.
"""

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
from block_copy_oracle import (
    PATTERN,
    Layer,
    PlacedLayer,
    expected_value,
    models,
    place,
    placements,
    random_content,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvxfer.blocks import ITEM_DTYPE, BlockLayout, Region, cuda, gather, scatter
from kvxfer.blocks.cuda_job import INLINE_WORDS, Quota

NUM_BLOCKS = 5
NUM_LAYERS = 3
BLOCKS = [3, 0, 4]
AXES = {"B": 0, "P": 1, "N": 2, "H": 3, "C": 4}
LAYOUTS = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]
GIB = 1 << 30


def layer_of(content, num_tokens=16, num_heads=1, num_parts=1, item_bytes=1, has_heads=False):
    heads = (4, 4 + num_heads) if has_heads else None
    return Layer(0, num_parts, num_tokens, heads, num_heads, content, item_bytes)


KINDS = {
    "bf16_packed": layer_of(2 * 16, num_heads=4, item_bytes=2, has_heads=True),
    "bf16_split": layer_of(16, num_heads=4, num_parts=2, item_bytes=2, has_heads=True),
    "fp8": layer_of(64, num_heads=4, has_heads=True),
    "fp8_mla": layer_of(656),
    "indexer": layer_of(132),
    "odd_row": layer_of(37, num_tokens=6),
    "state": layer_of(49380, num_tokens=1),
}


def place_together(letters, layer, *, kernel_blocks=1, padding=0, offset=0):
    """Return NUM_LAYERS layers in one memory, axes in the order of ``letters`` (L is the layer).

    ``padding`` bytes are left free after each block of all that lies inside one.
    """
    letters = letters.replace("B", "BP")  # so that P is all that lies inside a block
    sizes = dict(zip("BPNHC", (NUM_BLOCKS, *layer.block_shape), strict=True), L=NUM_LAYERS)
    sizes["B"] *= kernel_blocks
    sizes["N"] //= kernel_blocks
    steps, extent = {}, layer.item_bytes
    for letter in reversed(letters):
        steps[letter] = extent
        extent = extent * sizes[letter] + (padding if letter == "P" else 0)
    memory = np.full(offset + extent + 32, PATTERN, dtype=np.uint8)
    shape = tuple(sizes[letter] for letter in AXES)
    strides = tuple(steps[letter] for letter in AXES)
    return [
        PlacedLayer(
            layer,
            memory,
            np.ndarray(shape, layer.dtype, memory, offset + idx * steps["L"], strides),
            kernel_blocks,
        )
        for idx in range(NUM_LAYERS)
    ]


@dataclass
class DeviceEngine:
    """An engine whose memory was taken to a device as it is: with pattern, padding and content."""

    device: object
    memories: list
    regions: list

    @classmethod
    def upload(cls, device, engine):
        memories = {id(layer.memory): layer.memory for layer in engine}
        tensors = {key: device.upload(memory) for key, memory in memories.items()}
        regions = [
            on_device(layer, tensors[id(layer.memory)], device.name, f"layer{idx}")
            for idx, layer in enumerate(engine)
        ]
        return cls(device, list(tensors.values()), regions)

    def layout(self, value_order="token_major", shard_heads=None):
        return BlockLayout.from_regions(
            self.regions, value_order=value_order, head_shard=shard_heads
        )

    def bytes(self):
        return [self.device.download(memory).tobytes() for memory in self.memories]


def on_device(placed, memory, device_name, name):
    """Return the region of a layer whose memory now lies in the tensor ``memory``."""
    region = placed.region(name)
    ptr = memory.data_ptr() + region.view.ptr - placed.memory.ctypes.data
    view = replace(region.view, owner=memory, ptr=ptr, device=device_name)
    object.__setattr__(region, "view", view)
    return region


def host_bytes(engine):
    """Return the bytes of each memory of an engine, as `DeviceEngine.bytes`."""
    return [
        memory.tobytes() for memory in {id(each.memory): each.memory for each in engine}.values()
    ]


class Values:
    """Room for every class of ``blocks`` on a device, in shuffled order, patterned all around."""

    def __init__(self, device, layout, blocks, alignment=0, seed=0):
        wanted = [(block, class_id) for block in blocks for class_id in range(len(layout.classes))]
        np.random.default_rng(seed).shuffle(wanted)
        self.places, end = {}, alignment
        for block, class_id in map(tuple, wanted):
            at = slice(end, end + layout.classes[class_id].value_bytes)
            self.places[block, class_id] = at
            end = -(-(at.stop + 1) // 16) * 16 + alignment
        self.device = device
        self.expected = np.full(end + 64, PATTERN, dtype=np.uint8)

    def upload(self):
        """Take ``expected`` to the device as it is now, and make the items."""
        self.tensor = self.device.upload(self.expected)
        base = self.tensor.data_ptr()
        rows = [(base + at.start, block, c) for (block, c), at in self.places.items()]
        self.items = np.array(rows, dtype=ITEM_DTYPE)

    def fill(self, layout, layers, contents, order):
        """Let ``expected`` hold the values that the oracle says."""
        for (block, class_id), at in self.places.items():
            row = layout.classes[class_id]
            value = expected_value(layers, contents, block, row.group, row.heads, order)
            self.expected[at] = np.frombuffer(value, dtype=np.uint8)

    def download(self):
        return self.device.download(self.tensor)


def write(engine, contents, blocks):
    for layer, content in zip(engine, contents, strict=True):
        layer.write(content, blocks)


def check_gather(device, engine, layers, contents, *, order, shard_heads, blocks, alignment, seed):
    """Gather ``blocks`` and compare every byte on both sides."""
    num_blocks = len(contents[0])
    write(engine, contents, range(num_blocks))
    uploaded = DeviceEngine.upload(device, engine)
    layout = uploaded.layout(order, shard_heads)
    values = Values(device, layout, blocks, alignment, seed)
    values.upload()
    cuda.CudaCopies(layout).gather_items(values.items, values.tensor)
    values.fill(layout, layers, contents, order)
    assert np.array_equal(values.download(), values.expected)
    assert uploaded.bytes() == host_bytes(engine)


def check_scatter(device, pair, layers, contents, *, order, shard_heads, blocks, alignment, seed):
    """Scatter into the first of two like engines; the second is filled on the host."""
    target, expected = pair
    write(expected, contents, blocks)
    uploaded = DeviceEngine.upload(device, target)
    layout = uploaded.layout(order, shard_heads)
    values = Values(device, layout, blocks, alignment, seed)
    values.fill(layout, layers, contents, order)
    values.upload()
    cuda.CudaCopies(layout).scatter_items(values.items, values.tensor)
    assert uploaded.bytes() == host_bytes(expected)
    assert np.array_equal(values.download(), values.expected)


ORDERS = pytest.mark.parametrize("order", ["token_major", "head_major"])
EVERY_LAYOUT = pytest.mark.parametrize("letters", LAYOUTS)
EVERY_KIND = pytest.mark.parametrize("kind", KINDS, ids="kind={}".format)
OFFSETS = pytest.mark.parametrize("offset", [0, 1, 2, 4, 8], ids="offset={}".format)
# one function for every subclass
BY_SUBCLASSES = settings(suppress_health_check=[HealthCheck.differing_executors])


class BlockCopyContract:
    """The tests; see the module."""

    @EVERY_LAYOUT
    @EVERY_KIND
    @ORDERS
    def test_gather_of_every_layout_writes_the_values_and_nothing_else(
        self, device, letters, kind, order
    ):
        layers = [KINDS[kind]] * NUM_LAYERS
        check_gather(
            device,
            place_together(letters, KINDS[kind], padding=48),
            layers,
            random_content(layers, NUM_BLOCKS, seed=1),
            order=order,
            shard_heads=2,
            blocks=BLOCKS,
            alignment=0,
            seed=1,
        )

    @EVERY_LAYOUT
    @EVERY_KIND
    @ORDERS
    def test_scatter_of_every_layout_writes_the_blocks_and_nothing_else(
        self, device, letters, kind, order
    ):
        layers = [KINDS[kind]] * NUM_LAYERS
        check_scatter(
            device,
            [place_together(letters, KINDS[kind], padding=48) for _ in range(2)],
            layers,
            random_content(layers, NUM_BLOCKS, seed=2),
            order=order,
            shard_heads=2,
            blocks=BLOCKS,
            alignment=0,
            seed=2,
        )

    @OFFSETS
    @pytest.mark.parametrize("alignment", [0, 1, 2, 8], ids="value={}".format)
    def test_gather_at_any_address_takes_narrower_words(self, device, offset, alignment):
        layers = [KINDS["indexer"]] * NUM_LAYERS
        check_gather(
            device,
            place_together("LBHNC", KINDS["indexer"], offset=offset),
            layers,
            random_content(layers, NUM_BLOCKS, seed=3),
            order="token_major",
            shard_heads=None,
            blocks=BLOCKS,
            alignment=alignment,
            seed=3,
        )

    @pytest.mark.parametrize("letters", ["LBHNC", "LBNHC"])
    @ORDERS
    def test_kernel_blocks_smaller_than_blocks_give_whole_values(self, device, letters, order):
        layers = [KINDS["bf16_packed"]] * NUM_LAYERS
        check_gather(
            device,
            place_together(letters, KINDS["bf16_packed"], kernel_blocks=4, padding=16),
            layers,
            random_content(layers, NUM_BLOCKS, seed=4),
            order=order,
            shard_heads=1,
            blocks=BLOCKS,
            alignment=0,
            seed=4,
        )

    @pytest.mark.parametrize(
        "pair", list(itertools.permutations(LAYOUTS, 2)), ids=lambda pair: "->".join(pair)
    )
    def test_scatter_of_what_another_layout_gathered_is_the_identity(self, device, pair):
        layers = [KINDS["bf16_split"]] * NUM_LAYERS
        contents = random_content(layers, NUM_BLOCKS, seed=5)
        saver, loader, expected = (
            place_together(letters, layers[0], padding=padding)
            for letters, padding in ((pair[0], 0), (pair[1], 32), (pair[1], 32))
        )
        write(saver, contents, range(NUM_BLOCKS))
        write(expected, contents, BLOCKS)
        saving, loading = (DeviceEngine.upload(device, each) for each in (saver, loader))
        values = Values(device, saving.layout(shard_heads=2), BLOCKS)
        values.upload()
        cuda.CudaCopies(saving.layout(shard_heads=2)).gather_items(values.items, values.tensor)
        cuda.CudaCopies(loading.layout(shard_heads=2)).scatter_items(values.items, values.tensor)
        assert loading.bytes() == host_bytes(expected)

    @EVERY_LAYOUT
    @ORDERS
    def test_ranks_of_another_tensor_parallel_size_share_values(self, device, letters, order):
        whole = KINDS["bf16_split"]
        contents = random_content([whole] * NUM_LAYERS, NUM_BLOCKS, seed=9)
        loader, expected = (place_together(letters, whole, padding=16) for _ in range(2))
        write(expected, contents, BLOCKS)
        loading = DeviceEngine.upload(device, loader)
        layout = loading.layout(order, shard_heads=2)
        tensors, items = [], []
        for heads in [(4, 6), (6, 8)]:  # two ranks save, one loads
            rank = place_together("LBNHC", replace(whole, heads=heads, num_heads=2))
            own = slice(heads[0] - 4, heads[1] - 4)
            write(rank, [content[:, :, :, own] for content in contents], range(NUM_BLOCKS))
            saving = DeviceEngine.upload(device, rank).layout(order, shard_heads=2)
            values = Values(device, saving, BLOCKS)
            values.upload()
            cuda.CudaCopies(saving).gather_items(values.items, values.tensor)
            values.items["class_id"] = layout.class_id(0, heads)
            tensors.append(values.tensor)
            items.append(values.items)
        cuda.CudaCopies(layout).scatter_items(np.concatenate(items), tensors)
        assert loading.bytes() == host_bytes(expected)

    @BY_SUBCLASSES
    @given(
        data=st.data(),
        model=models(),
        order=st.sampled_from(["token_major", "head_major"]),
        blocks=st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True),
        alignment=st.sampled_from([0, 1, 2, 8]),
        seed=st.integers(0, 99),
    )
    def test_copies_of_any_strides_write_their_bytes_and_no_other(
        self, device, data, model, order, blocks, alignment, seed
    ):
        layers, shard_heads = model
        contents = random_content(layers, NUM_BLOCKS, seed)
        drawn = [(layer, data.draw(placements(layer))) for layer in layers]
        engines = [[place(layer, how, NUM_BLOCKS) for layer, how in drawn] for _ in range(3)]
        rest = {"order": order, "shard_heads": shard_heads, "blocks": blocks}
        rest |= {"alignment": alignment, "seed": seed}
        check_gather(device, engines[0], layers, contents, **rest)
        check_scatter(device, engines[1:], layers, contents, **rest)

    @pytest.mark.parametrize("quota", ["full", "background", Quota(1, 32), Quota(7, 96)], ids=str)
    def test_any_quota_copies_everything(self, device, quota):
        job = PlainJob(device, num_blocks=40, block_bytes=9000)
        job.copies.gather_items(job.items, job.values, quota=quota)
        assert np.array_equal(device.download(job.values), job.content[job.ids].ravel())

    @pytest.mark.parametrize(
        "num_items",
        [0, 1, INLINE_WORDS - 2, INLINE_WORDS - 1, 3 * INLINE_WORDS],
        ids="items={}".format,
    )
    def test_jobs_of_any_number_of_items_copy_everything(self, device, num_items):
        job = PlainJob(device, num_blocks=50, block_bytes=24, num_items=num_items)
        job.copies.gather_items(job.items, job.values)
        assert np.array_equal(device.download(job.values), job.content[job.ids].ravel())

    def test_values_may_lie_in_pinned_host_memory(self, device):
        job = PlainJob(device, num_blocks=6, block_bytes=5000)
        pinned = device.upload_pinned(np.full(job.ids.size * 5000, PATTERN, dtype=np.uint8))
        items = job.items_at(pinned.data_ptr())
        job.copies.gather_items(items, pinned)
        assert np.array_equal(device.download(pinned), job.content[job.ids].ravel())

    def test_values_may_lie_in_several_tensors(self, device):
        job = PlainJob(device, num_blocks=6, block_bytes=5000)
        others = [device.upload(np.full(5000, PATTERN, dtype=np.uint8)) for _ in job.ids]
        job.items["value_ptr"] = [other.data_ptr() for other in others]
        job.copies.gather_items(job.items, others)
        for other, block in zip(others, job.ids, strict=True):
            assert np.array_equal(device.download(other), job.content[block])

    def test_rows_that_the_mask_leaves_out_stay_as_they_are(self, device):
        job = PlainJob(device, num_blocks=6, block_bytes=640)
        out = device.rows(device.upload(np.full(3 * 640, PATTERN, dtype=np.uint8)), 3)
        gather(job.layout, [5, 99, 0], out, [True, False, True])
        expected = np.stack([job.content[5], np.full(640, PATTERN, np.uint8), job.content[0]])
        assert np.array_equal(device.download(out), expected)

    def test_blocks_that_no_row_is_for_stay_as_they_are(self, device):
        job = PlainJob(device, num_blocks=6, block_bytes=640)
        source = np.random.default_rng(6).integers(0, 256, (3, 640), dtype=np.uint8)
        scatter(job.layout, [4, 2, 99], device.rows(device.upload(source), 3), [1, 1, 0])
        expected = job.content.copy()
        expected[[4, 2]] = source[:2]
        assert np.array_equal(device.download(job.cache), expected.ravel())

    def test_zeros_between_segments_come_from_the_device(self, device):
        layers = [KINDS["odd_row"]] * NUM_LAYERS
        engine = place_together("LBHNC", KINDS["odd_row"])
        layout = DeviceEngine.upload(device, engine).layout()
        assert layout.class_rows["num_runs"][0] > layout.class_rows["num_copy_runs"][0]
        contents = random_content(layers, NUM_BLOCKS, seed=8)
        rest = {"order": "token_major", "shard_heads": None, "blocks": BLOCKS}
        check_gather(device, engine, layers, contents, **rest, alignment=0, seed=8)

    def test_blocks_further_apart_than_31_bits_are_found(self, device):
        step, row_bytes = 3 * GIB // 2, 4096 + 16
        memory = device.empty(2 * step + row_bytes)
        shell = np.empty((3, row_bytes), dtype=np.uint8)
        region = Region(shell, 0, "far", axes=("block", "content"))
        view = replace(
            region.view,
            owner=memory,
            ptr=memory.data_ptr(),
            strides_bytes=(step, 1),
            device=device.name,
        )
        object.__setattr__(region, "view", view)
        layout = BlockLayout.from_regions([region])
        content = np.random.default_rng(7).integers(0, 256, shell.shape, dtype=np.uint8)
        rows = device.rows(device.upload(content), 3)
        scatter(layout, [2, 0, 1], rows)
        out = device.rows(device.upload(np.full_like(content, PATTERN)), 3)
        gather(layout, [0, 1, 2], out)
        assert np.array_equal(device.download(out), content[[1, 2, 0]])


class PlainJob:
    """Blocks of one tensor, and values back to back."""

    def __init__(self, device, *, num_blocks, block_bytes, num_items=None):
        rng = np.random.default_rng(num_blocks)
        self.content = rng.integers(0, 256, (num_blocks, block_bytes), dtype=np.uint8)
        self.cache = device.upload(self.content)
        self.layout = BlockLayout.from_tensors([device.rows(self.cache, num_blocks)])
        self.copies = cuda.CudaCopies(self.layout)
        self.ids = rng.integers(0, num_blocks, num_blocks if num_items is None else num_items)
        self.values = device.upload(np.full(self.ids.size * block_bytes, PATTERN, dtype=np.uint8))
        self.items = self.items_at(self.values.data_ptr())

    def items_at(self, ptr):
        items = np.zeros(self.ids.size, dtype=ITEM_DTYPE)
        items["block_id"] = self.ids
        items["value_ptr"] = ptr + np.arange(self.ids.size) * self.content.shape[1]
        return items
