# SPDX-License-Identifier: Apache-2.0
"""The tables that native code reads, and the kernel's loop over them."""

import numpy as np
import pytest

from kvxfer._native import block_copy
from kvxfer.blocks import ITEM_DTYPE, BlockLayout, Region, plan, simulator
from kvxfer.errors import LayoutError

PATTERN = 0xA5


def test_plan_dtypes_have_the_sizes_of_the_structs():
    dtypes = {
        "run": plan.RUN_DTYPE,
        "tile": plan.TILE_DTYPE,
        "span": plan.SPAN_DTYPE,
        "item": plan.ITEM_DTYPE,
        "class": plan.CLASS_DTYPE,
    }
    assert {name: dtype.itemsize for name, dtype in dtypes.items()} == block_copy.struct_bytes()


def test_plan_tables_cannot_be_changed():
    layout = BlockLayout.from_tensors([np.zeros((4, 8), dtype=np.uint8)])
    tables = (layout.runs, layout.class_rows, layout.zeros, layout.tiles[0])
    assert not any(table.flags.writeable for table in tables)


@pytest.mark.parametrize(
    ("shape", "take", "width"),
    [
        ((4, 64), np.s_[:], 16),
        ((4, 72), np.s_[:], 8),
        ((4, 64), np.s_[:, :12], 4),
        ((4, 64), np.s_[:, 2:10], 2),
        ((4, 64), np.s_[:, 1:17], 1),
        ((4, 66), np.s_[:, :64], 2),
    ],
)
def test_plan_width_is_what_every_address_is_a_multiple_of(shape, take, width):
    memory = np.zeros(np.prod(shape) + 16, dtype=np.uint8)
    start = -memory.ctypes.data % 16
    tensor = memory[start : start + np.prod(shape)].reshape(shape)[take]
    assert 1 << int(BlockLayout.from_tensors([tensor]).runs[0]["width_log2"]) == width


@pytest.mark.parametrize(
    ("row_bytes", "units"),
    [(4096, [4096]), (4097, [4096, 1]), (8192, [4096, 4096]), (16, [16]), (0, [])],
)
def test_plan_tiles_cover_a_run_in_pieces_of_4_kib(row_bytes, units):
    memory = np.zeros(5 * 8193 + 1, dtype=np.uint8)[1:]  # at an odd step: units of one byte
    tensor = memory[: 5 * 8193].reshape(5, 8193)[:, :row_bytes]
    tiles, first_tile = BlockLayout.from_tensors([tensor]).tiles
    width = 1 << int(BlockLayout.from_tensors([tensor]).runs[0]["width_log2"]) if units else 1
    assert [int(tile["num_units"]) * width for tile in tiles] == units
    assert [int(tile["first_unit"]) * width for tile in tiles] == list(
        np.cumsum([0, *units])[: len(units)]
    )
    assert first_tile[-1] == len(tiles)


def test_plan_refuses_items_that_are_not_sorted_by_class():
    regions = [
        Region(np.zeros((4, 8), np.uint8), g, "a", axes=("block", "content")) for g in (0, 1)
    ]
    layout = BlockLayout.from_regions(regions)
    items = np.zeros(2, dtype=ITEM_DTYPE)
    items["class_id"] = [1, 0]
    with pytest.raises(LayoutError, match="not sorted by class_id"):
        plan.span_table(items, layout.class_rows, layout.tiles[1], to_value=True)


def test_plan_refuses_a_job_of_more_work_than_ids():
    classes = np.zeros(1, dtype=plan.CLASS_DTYPE)
    classes["num_copy_runs"] = classes["num_runs"] = 1
    items = np.zeros(3, dtype=ITEM_DTYPE)
    with pytest.raises(LayoutError, match=r"3 items make 3221225472 tiles"):
        plan.span_table(items, classes, np.array([0, 1 << 30]), to_value=True)


def test_plan_refuses_a_run_of_more_units_than_ids():
    run = plan.Strided(1, 1, 0, 2**31, ())
    with pytest.raises(LayoutError, match="one block of 2147483648 bytes in words of 1"):
        plan.run_table([plan.ClassRuns([run], [], 2**31)])


class SmallJob:
    """Two classes with gaps, three items of each, values in one buffer of pattern."""

    def __init__(self):
        rng = np.random.default_rng(4)
        self.caches = [rng.integers(0, 256, (5, 3, 17), np.uint8) for _ in range(4)]
        regions = [
            Region(cache, idx // 2, f"layer{idx}", axes=("block", "token", "content"))
            for idx, cache in enumerate(self.caches)
        ]
        self.layout = BlockLayout.from_regions(regions)
        self.value_bytes = self.layout.classes[0].value_bytes
        self.values = np.full((6, self.value_bytes), PATTERN, dtype=np.uint8)
        self.items = np.zeros(6, dtype=ITEM_DTYPE)
        self.items["value_ptr"] = self.values.ctypes.data + np.arange(6) * self.value_bytes
        self.items["block_id"] = [4, 0, 2, 1, 1, 3]
        self.items["class_id"] = [0, 1, 0, 1, 0, 1]

    def expected(self, row):
        first = 2 * int(self.items["class_id"][row])
        block = int(self.items["block_id"][row])
        parts = [self.caches[first + idx][block].tobytes() for idx in range(2)]
        return parts[0] + b"\0" * 13 + parts[1]


@pytest.mark.parametrize("num_warps", [1, 3, 64], ids="warps={}".format)
def test_simulator_copies_every_item_with_any_number_of_warps(num_warps, monkeypatch):
    monkeypatch.setattr(simulator, "NUM_WARPS", num_warps)
    job = SmallJob()
    assert simulator.gather_items(job.layout, job.items) == 0
    assert [row.tobytes() for row in job.values] == [job.expected(row) for row in range(6)]


@pytest.mark.parametrize("to_value", [True, False], ids=["gather", "scatter"])
def test_simulator_skips_negative_block_ids(to_value):
    job = SmallJob()
    before = [cache.copy() for cache in job.caches]
    job.items["block_id"][:] = -1
    (simulator.gather_items if to_value else simulator.scatter_items)(job.layout, job.items)
    assert (job.values == PATTERN).all()
    assert all(np.array_equal(*pair) for pair in zip(job.caches, before, strict=True))


def test_simulator_of_no_items_does_nothing():
    job = SmallJob()
    assert simulator.gather_items(job.layout, job.items[:0]) == 0


def test_simulator_counts_what_a_gpu_would_refuse():
    job = SmallJob()
    runs = job.layout.runs.copy()
    runs["width_log2"] += 1  # a plan that lies about its alignment
    tiles, first_tile = job.layout.tiles
    items = np.sort(job.items, order="class_id")
    items["block_id"] = 0  # the unit read too far still lies in the pool
    items["value_ptr"] = job.values.ctypes.data - job.values.ctypes.data % 16 + 16
    spans = plan.span_table(items[:1], job.layout.class_rows, first_tile, to_value=True)
    half = tiles.copy()
    half["num_units"] //= 2
    half["first_unit"] //= 2
    assert block_copy.simulate_copy(runs, half, spans, items[:1], True, 1) > 0
