# SPDX-License-Identifier: Apache-2.0
"""What the launcher of CUDA copies gives to CuPy, and what it refuses before it does."""

import gc
import weakref

import cuda_fakes
import numpy as np
import pytest
from cuda_fakes import FakeCupy, FakeDevice, FakeStream, FakeTensor

from kvxfer._native import block_copy
from kvxfer.blocks import ITEM_DTYPE, BlockLayout, Region, cuda, cuda_job, gather, plan, scatter
from kvxfer.errors import LayoutError

PATTERN = 0xA5
NUM_BLOCKS, BLOCK_BYTES = 6, 5000
DEVICE = FakeDevice()


@pytest.fixture
def fakes(monkeypatch):
    return cuda_fakes.install(monkeypatch)


@pytest.fixture
def cupy(fakes):
    return fakes[1]


class Job:
    """Blocks of one tensor, three of which are copied to rows."""

    def __init__(self, block_ids=(5, 0, 2), block_bytes=BLOCK_BYTES):
        rng = np.random.default_rng(1)
        self.content = rng.integers(0, 256, (NUM_BLOCKS, block_bytes), dtype=np.uint8)
        self.cache = DEVICE.rows(DEVICE.upload(self.content), NUM_BLOCKS)
        self.layout = BlockLayout.from_tensors([self.cache])
        self.ids = list(block_ids)
        rows = np.full((len(self.ids), block_bytes), PATTERN, dtype=np.uint8)
        self.rows = DEVICE.rows(DEVICE.upload(rows), len(self.ids))
        self.items = np.zeros(len(self.ids), dtype=ITEM_DTYPE)
        self.items["block_id"] = self.ids
        self.items["value_ptr"] = self.rows.data_ptr() + np.arange(len(self.ids)) * block_bytes

    def gather(self, **changed):
        arguments = {"items": self.items, "values": self.rows, **changed}
        cuda.CudaCopies(self.layout).gather_items(**arguments)


def test_launch_dtypes_have_the_sizes_of_the_structs():
    dtypes = {"job": cuda_job.JOB_DTYPE, "inline_job": cuda_job.INLINE_JOB_DTYPE}
    sizes = {name: dtype.itemsize for name, dtype in dtypes.items()}
    assert sizes == block_copy.launch_struct_bytes()


def test_launch_of_a_small_job_carries_its_words_and_allocates_nothing(fakes):
    torch, cupy = fakes
    job = Job()
    copies = cuda.CudaCopies(job.layout)
    before = len(torch.allocations)
    copies.gather_items(job.items, job.rows)
    (launch,) = cupy.launches
    assert launch.name == "kvx_gather_inline"
    parameters = np.frombuffer(launch.parameters, dtype=cuda_job.INLINE_JOB_DTYPE)[0]
    assert (parameters["job"]["num_spans"], parameters["job"]["num_work"]) == (1, 6)
    assert np.array_equal(parameters["words"][2:5], job.items)
    assert len(torch.allocations) == before


def test_launch_of_a_large_job_uploads_its_words_on_the_stream(fakes):
    torch, cupy = fakes
    job = Job(block_ids=np.arange(3000) % NUM_BLOCKS, block_bytes=16)
    stream = FakeStream(cuda_stream=0x77)
    cuda.CudaCopies(job.layout).scatter_items(job.items, job.rows, stream=stream)
    (launch,) = cupy.launches
    parameters = np.frombuffer(launch.parameters, dtype=cuda_job.JOB_DTYPE)[0]
    words, made_under = torch.allocations[-1]
    assert (launch.name, launch.stream_ptr) == ("kvx_scatter", 0x77)
    assert parameters["words_ptr"] == words.data_ptr()
    assert (words.device, made_under) == (DEVICE.name, stream)
    assert np.array_equal(words.array.view(ITEM_DTYPE)[2:], job.items)


@pytest.mark.parametrize("has_from_external", [True, False], ids=["cupy=14", "cupy=13"])
def test_launch_names_device_and_stream(monkeypatch, has_from_external):
    torch, cupy = cuda_fakes.install(monkeypatch, FakeCupy(has_from_external))
    job, stream = Job(), FakeStream(cuda_stream=0x42)
    job.gather()
    job.gather(stream=stream)
    assert [launch.stream_ptr for launch in cupy.launches] == [torch.current.cuda_stream, 0x42]
    assert [launch.device_idx for launch in cupy.launches] == [0, 0]


@pytest.mark.parametrize(
    ("quota", "grid", "threads"),
    [
        ("full", 6, 512),
        ("background", 8, 512),
        (cuda_job.Quota(3, 96), 3, 96),
        (cuda_job.Quota(500, 32), 24, 32),
    ],
    ids=str,
)
def test_launch_takes_no_more_ctas_than_the_quota_or_the_tiles(cupy, quota, grid, threads):
    job = Job(block_ids=range(6), block_bytes=4 * 4096)  # 24 tiles
    job.gather(quota=quota)
    assert (cupy.launches[0].grid, cupy.launches[0].block) == ((grid,), (threads,))


def test_launch_reads_items_before_it_returns(monkeypatch):
    _, cupy = cuda_fakes.install(monkeypatch, FakeCupy(deferred=True))
    job = Job()
    cuda.CudaCopies(job.layout).gather_items(job.items, job.rows)
    job.items["block_id"] = 1
    assert (job.rows.array == PATTERN).all()  # nothing has run on return
    cupy.run_all()
    assert np.array_equal(job.rows.array, job.content[job.ids])


def test_launch_tells_the_allocator_which_stream_uses_plan_and_values(fakes):
    torch, _ = fakes
    job, stream = Job(), FakeStream()
    job.gather(stream=stream)
    plan_memory, made_under = torch.allocations[0]
    assert plan_memory.streams == [stream]
    assert job.rows.streams == [stream]
    assert made_under.synchronized == 1


def test_launch_reads_zeros_between_segments_from_device_memory(fakes):
    torch, _ = fakes
    tensors = [DEVICE.rows(DEVICE.upload(np.zeros((4, 5), np.uint8)), 4) for _ in range(3)]
    layout = BlockLayout.from_tensors(tensors)
    cuda.CudaCopies(layout)
    memory, _ = torch.allocations[0]
    zeros_end = layout.zeros.nbytes
    runs = memory.array[zeros_end : zeros_end + layout.runs.nbytes].view(plan.RUN_DTYPE)
    num_copies = int(layout.class_rows["num_copy_runs"][0])
    assert not memory.array[:zeros_end].any()
    assert runs["base"][num_copies:].tolist() == [memory.data_ptr()] * (len(runs) - num_copies)
    assert np.array_equal(runs["base"][:num_copies], layout.runs["base"][:num_copies])
    assert len(runs) > num_copies


def test_launch_of_pinned_values_does_not_report_them_as_device_memory(cupy):
    job = Job()
    job.rows.device, job.rows.pinned = "cpu", True
    job.gather()
    assert job.rows.streams == []
    assert np.array_equal(job.rows.array, job.content[job.ids])


def test_launch_sorts_items_by_class_and_keeps_their_order(cupy):
    regions = [
        Region(DEVICE.rows(DEVICE.upload(np.zeros((4, 64), np.uint8)), 4), group, "a", axes)
        for group, axes in enumerate([("block", "content")] * 2)
    ]
    layout = BlockLayout.from_regions(regions)
    values = DEVICE.upload(np.zeros(4 * 64, np.uint8))
    items = np.zeros(4, dtype=ITEM_DTYPE)
    items["class_id"] = [1, 0, 1, 0]
    items["block_id"] = [0, 1, 2, 3]
    items["value_ptr"] = values.data_ptr() + 64 * np.arange(4)
    cuda.CudaCopies(layout).gather_items(items, values)
    words = np.frombuffer(cupy.launches[0].parameters, cuda_job.INLINE_JOB_DTYPE)["words"][0]
    assert words[4:8]["block_id"].tolist() == [1, 3, 0, 2]


@pytest.mark.parametrize("to_value", [True, False], ids=["gather", "scatter"])
def test_launch_packs_the_spans_that_the_plan_says(to_value):
    regions = [
        Region(np.zeros((4, 51), np.uint8), 0, "a", ("block", "content")),
        Region(np.zeros((4, 51), np.uint8), 0, "b", ("block", "content")),
        Region(np.zeros((4, 9000), np.uint8), 1, "c", ("block", "content")),
        Region(np.zeros((4, 0), np.uint8), 2, "d", ("block", "content")),
    ]
    layout = BlockLayout.from_regions(regions)
    items = np.zeros(9, dtype=ITEM_DTYPE)
    items["class_id"] = [2, 0, 1, 1, 2, 0, 0, 1, 1]
    items["value_ptr"] = np.arange(9)
    words = np.zeros(cuda_job.count_words(3, 9), dtype=ITEM_DTYPE)
    num_spans, num_work = cuda_job.pack(
        items, layout.class_rows, layout.tiles[1], words, to_value=to_value
    )
    ordered = items[np.argsort(items["class_id"], kind="stable")]
    expected = plan.span_table(ordered, layout.class_rows, layout.tiles[1], to_value=to_value)
    assert np.array_equal(words[: 2 * num_spans].view(plan.SPAN_DTYPE), expected)
    assert np.array_equal(words[2 * num_spans : 2 * num_spans + 9], ordered)
    assert num_work == int(expected["num_work"].sum())


@pytest.mark.parametrize("num_items", [0, 3], ids="items={}".format)
def test_launch_of_nothing_is_none(cupy, num_items):
    job = Job(block_ids=range(num_items), block_bytes=16 if num_items == 0 else 0)
    job.gather()
    assert cupy.launches == []


def test_launch_refuses_more_tiles_than_ids(cupy):
    classes = np.zeros(1, dtype=plan.CLASS_DTYPE)
    classes["num_copy_runs"] = classes["num_runs"] = 1
    items, words = np.zeros(3, dtype=ITEM_DTYPE), np.zeros(5, dtype=ITEM_DTYPE)
    with pytest.raises(LayoutError, match=r"3 items make 3221225472 tiles; copy fewer than"):
        cuda_job.pack(items, classes, np.array([0, 1 << 30]), words, to_value=True)


@pytest.mark.parametrize(
    ("field", "value", "error", "message"),
    [
        ("block_id", -1, IndexError, r"items\[1\].block_id is -1, the layout has 6 blocks"),
        ("block_id", 6, IndexError, r"items\[1\].block_id is 6, the layout has 6 blocks"),
        ("class_id", 1, IndexError, r"items\[1\].class_id is 1, the layout has 1 classes"),
        ("class_id", -1, IndexError, r"items\[1\].class_id is -1"),
        ("value_ptr", 0, ValueError, r"items\[1\].value_ptr is 0"),
        ("value_ptr", 4096, ValueError, r"items\[1\] has its value of 5000 bytes at 0x1000, out"),
        ("value_ptr", 2**64 - 8, ValueError, r"items\[1\] has its value of 5000 bytes"),
    ],
)
def test_launch_refuses_items_out_of_bounds(cupy, field, value, error, message):
    job = Job()
    job.items[field][1] = value
    with pytest.raises(error, match=message):
        job.gather()
    assert cupy.launches == []


@pytest.mark.parametrize("shift", [-1, 1], ids="shift={}".format)
def test_launch_refuses_a_value_that_is_only_partly_inside(cupy, shift):
    job = Job(block_ids=[1])
    job.items["value_ptr"] += np.uint64(2**64 + shift if shift < 0 else shift)
    with pytest.raises(ValueError, match="outside of the buffers given"):
        job.gather()


def test_launch_refuses_a_value_across_two_buffers(cupy):
    job = Job(block_ids=[1])
    memory = job.rows.array.ravel()
    halves = [FakeTensor(memory[:2500]), FakeTensor(memory[2500:])]
    with pytest.raises(ValueError, match="outside of the buffers given"):
        job.gather(values=halves)
    assert cupy.launches == []


def pageable(rows):
    return FakeTensor(rows.array, "cpu")


def elsewhere(rows):
    return FakeTensor(rows.array, "cuda:1")


def strided(rows):
    return FakeTensor(rows.array[:, ::2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (pageable, r"values\[0\] is on cpu; a copy of cuda:0 needs it there, or in pinned"),
        (elsewhere, r"values\[0\] is on cuda:1; a copy of cuda:0 needs it there"),
        (strided, r"values\[0\] is not C-contiguous"),
        (lambda rows: rows.array, r"values\[0\] is on cpu"),
        (lambda rows: rows.array.tobytes(), r"values\[0\] is a bytes; pass a torch tensor"),
    ],
    ids=["pageable", "another_device", "strided", "numpy", "bytes"],
)
def test_launch_refuses_values_that_a_kernel_cannot_reach(cupy, change, message):
    job = Job()
    with pytest.raises(LayoutError, match=message):
        job.gather(values=change(job.rows))
    assert cupy.launches == []


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"items": np.zeros(2, dtype=np.uint64)}, "items are uint64 of shape"),
        ({"items": np.zeros((1, 1), dtype=ITEM_DTYPE)}, r"of shape \(1, 1\)"),
        ({"items": np.zeros(4, dtype=ITEM_DTYPE)[::2]}, "pass a contiguous 1-D array"),
        ({"quota": "all"}, "quota is 'all'; use background or full"),
        ({"stream": 0}, "stream is a int; pass a torch.cuda.Stream"),
        ({"stream": FakeStream("cuda:1")}, "stream is on cuda:1, the layout's tensors on cuda:0"),
    ],
    ids=["dtype", "shape", "strides", "quota", "stream", "stream_of_another_device"],
)
def test_launch_refuses_arguments_that_do_not_fit(cupy, changed, message):
    job = Job()
    with pytest.raises(LayoutError, match=message):
        job.gather(**changed)
    assert cupy.launches == []


@pytest.mark.parametrize(("num_ctas", "threads"), [(0, 32), (1, 0), (1, 33), (1, 544)])
def test_launch_quota_is_of_whole_warps(num_ctas, threads):
    with pytest.raises(LayoutError, match="take at least 1 CTA of 32 to 512 threads"):
        cuda_job.Quota(num_ctas, threads)


def test_launch_refuses_to_write_read_only_blocks(cupy):
    job = Job()
    object.__setattr__(job.layout, "writable", False)
    with pytest.raises(LayoutError, match="read-only"):
        cuda.CudaCopies(job.layout).scatter_items(job.items, job.rows)
    assert cupy.launches == []


def test_launch_is_for_layouts_on_a_cuda_device(fakes):
    with pytest.raises(LayoutError, match="tensors are on cpu, not on a CUDA device"):
        cuda.CudaCopies(BlockLayout.from_tensors([np.zeros((2, 8))]))


def test_copies_of_a_layout_are_made_once_and_go_with_it(fakes):
    job = Job()
    copies = weakref.ref(cuda.copies_of(job.layout))
    assert cuda.copies_of(job.layout) is copies()
    del job
    gc.collect()
    assert copies() is None


def test_copies_keep_the_tensors_of_a_layout_that_is_gone(fakes):
    job = Job()
    copies, cache = cuda.CudaCopies(job.layout), weakref.ref(job.cache)
    del job
    gc.collect()
    assert cache() is not None
    del copies


def test_gather_and_scatter_send_cuda_tensors_to_the_kernels(cupy):
    job, stream = Job(), FakeStream(cuda_stream=5)
    gather(job.layout, job.ids, job.rows, stream=stream)
    assert np.array_equal(job.rows.array, job.content[job.ids])
    job.rows.array[...] = 255 - job.rows.array
    scatter(job.layout, job.ids, job.rows, stream=stream)
    assert np.array_equal(job.cache.array[job.ids], job.rows.array)
    assert [each.name for each in cupy.launches] == ["kvx_gather_inline", "kvx_scatter_inline"]
    assert [each.stream_ptr for each in cupy.launches] == [5, 5]


@pytest.mark.parametrize("name", ["block_ids", "mask"])
def test_gather_refuses_ids_and_masks_in_device_memory(cupy, name):
    job = Job()
    arguments = {"block_ids": job.ids, "mask": [1, 1, 1]}
    arguments[name] = FakeTensor(np.array([1, 1, 1]))
    with pytest.raises(LayoutError, match=f"{name} is on cuda:0; pass it in host memory"):
        gather(job.layout, out=job.rows, **arguments)


def test_scatter_refuses_two_rows_for_one_block(cupy):
    job = Job(block_ids=[1, 3, 1])
    with pytest.raises(LayoutError, match="names block 1 more than once"):
        scatter(job.layout, job.ids, job.rows)
    assert cupy.launches == []


def test_gather_on_the_cpu_takes_no_stream_and_no_cuda_rows(fakes):
    layout = BlockLayout.from_tensors([np.zeros((2, 8), np.uint8)])
    with pytest.raises(LayoutError, match="stream is for CUDA tensors; the layout's are on cpu"):
        gather(layout, [0], np.zeros((1, 8), np.uint8), stream=FakeStream())
    with pytest.raises(LayoutError, match="out is on cuda:0, the layout's tensors on cpu"):
        gather(layout, [0], FakeTensor(np.zeros((1, 8), np.uint8)))
