# SPDX-License-Identifier: Apache-2.0
"""Block copies on a GPU: a layout's plan in device memory, and launches over it.

A job of any number of layers, groups and shards is one launch. What changes from job to job, 16
bytes per block and shard, travels with the kernel's parameters up to about 2,000 items; a larger
job uploads it first, from pinned memory and on the same stream. Nothing here waits for the GPU,
except once per layout while its plan is uploaded.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvxfer._native import block_copy
from kvxfer.blocks import cuda_job, cuda_kernels, plan, rows
from kvxfer.blocks.cuda_job import Quota
from kvxfer.blocks.layout import BlockLayout
from kvxfer.blocks.tensors import TensorView, view_of
from kvxfer.errors import LayoutError

QuotaName = Literal["full", "background"]

_copies: weakref.WeakKeyDictionary[BlockLayout, CudaCopies] = weakref.WeakKeyDictionary()
_making = threading.Lock()  # guards _copies


def copies_of(layout: BlockLayout) -> CudaCopies:
    """Return the copies of a layout, made at the first call and kept as long as the layout."""
    with _making:
        if layout not in _copies:
            _copies[layout] = CudaCopies(layout)
        return _copies[layout]


class CudaCopies:
    """Copies between the blocks of one layout, on one GPU, and their values.

    Made once at registration; usable from any thread. It owns the plan in device memory and keeps
    the layout's tensors alive. Every argument is checked before a launch, and a refused job
    launches nothing. After a launch, what was given has to be kept until the stream has passed the
    copy: tensors in device memory are reported to torch's allocator (``record_stream``) and may be
    dropped at once, pinned memory may not.
    """

    def __init__(self, layout: BlockLayout) -> None:
        """Load the kernels and upload the plan; returns when it is there.

        ``LayoutError`` unless the layout is on a GPU, ``UnsupportedError`` naming what to install.
        """
        self.device = layout.device
        self._device_idx = _device_idx(layout.device)
        self._kernels = cuda_kernels.load(self._device_idx)
        self._classes = layout.class_rows
        self._num_blocks = layout.num_blocks
        self._writable = layout.writable
        self._owners = layout.owners
        self._first_tile = layout.tiles[1]
        self._plan = _DevicePlan(layout)
        self._quotas = {
            "background": cuda_job.background_quota(),
            "full": _full_quota(self._device_idx),
        }

    def gather_items(
        self,
        items: plan.Table,
        values: Any,
        *,
        stream: Any = None,
        quota: QuotaName | Quota = "full",
    ) -> None:
        """Queue one launch that copies every item's block into its value.

        ``items`` (n,) ITEM_DTYPE in host memory, in any order, read before this returns.
        ``values`` is the tensor, or a sequence of tensors, that all values lie in: contiguous, on
        the layout's device or in pinned host memory. ``stream`` is a ``torch.cuda.Stream`` of the
        device, None for torch's current one: the copy sees what was queued there before, and has
        not run on return. ``quota`` bounds the part of the GPU that it may take. The caller
        guarantees that values do not overlap.

        Raises ``IndexError`` for a block or class out of range, ``ValueError`` for a value that
        does not lie in ``values``, ``LayoutError`` for the rest.
        """
        self._copy(items, values, True, stream, quota)

    def scatter_items(
        self,
        items: plan.Table,
        values: Any,
        *,
        stream: Any = None,
        quota: QuotaName | Quota = "full",
    ) -> None:
        """Queue one launch that copies every item's value into its block; as `gather_items`.

        No two items may name the same bytes: the same block and class, or blocks of groups that
        overlay each other.
        """
        if not self._writable:
            raise LayoutError("a tensor of the layout is read-only; blocks cannot be written")
        self._copy(items, values, False, stream, quota)

    def _copy(
        self,
        items: plan.Table,
        values: Any,
        to_value: bool,
        stream: Any,
        quota: QuotaName | Quota,
    ) -> None:
        views = self._value_views(values)
        self._check_items(items, views)
        chosen = self._quota(quota)
        queue = self._stream(stream)
        if len(items) == 0:
            return
        if cuda_job.count_words(len(self._classes), len(items)) <= cuda_job.INLINE_WORDS:
            launched = self._launch_inline(items, to_value, queue, chosen)
        else:
            launched = self._launch_uploaded(items, to_value, queue, chosen)
        if launched:
            self._report_use(views, queue)

    def _launch_inline(self, items: plan.Table, to_value: bool, queue: Any, quota: Quota) -> bool:
        """Launch with the words in the parameters; False if there is nothing to copy."""
        parameters = np.empty((), dtype=cuda_job.INLINE_JOB_DTYPE)
        num_spans, num_work = self._pack(items, parameters["words"], to_value)
        parameters["job"] = self._job(0, num_spans, num_work)
        return self._launch(_INLINE_NAMES[to_value], parameters, num_work, queue, quota)

    def _launch_uploaded(self, items: plan.Table, to_value: bool, queue: Any, quota: Quota) -> bool:
        """Launch with the words in device memory; False if there is nothing to copy."""
        torch = _torch()
        num_words = cuda_job.count_words(len(self._classes), len(items))
        num_bytes = num_words * plan.ITEM_DTYPE.itemsize
        pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        num_spans, num_work = self._pack(items, pinned.numpy().view(plan.ITEM_DTYPE), to_value)
        # Allocated and freed under the queue's own stream, so torch gives the memory to nobody
        # else before the kernel has ended; it tracks the pinned source of a copy by itself.
        with torch.cuda.stream(queue):
            words = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
            words.copy_(pinned, non_blocking=True)
        parameters = self._job(words.data_ptr(), num_spans, num_work)
        return self._launch(_UPLOADED_NAMES[to_value], parameters, num_work, queue, quota)

    def _pack(self, items: plan.Table, words: plan.Table, to_value: bool) -> tuple[int, int]:
        return cuda_job.pack(items, self._classes, self._first_tile, words, to_value=to_value)

    def _job(self, words_ptr: int, num_spans: int, num_work: int) -> npt.NDArray[np.void]:
        return cuda_job.job_parameters(
            runs_ptr=self._plan.runs_ptr,
            tiles_ptr=self._plan.tiles_ptr,
            words_ptr=words_ptr,
            num_spans=num_spans,
            num_work=num_work,
        )

    def _launch(
        self, name: str, parameters: npt.NDArray[np.void], num_work: int, queue: Any, quota: Quota
    ) -> bool:
        if num_work == 0:
            return False
        self._kernels.launch(name, quota.grid(num_work), quota.threads, parameters, queue)
        return True

    def _report_use(self, views: Sequence[TensorView], queue: Any) -> None:
        """Tell torch's allocator which memory the queue still reads or writes."""
        self._plan.memory.record_stream(queue)
        for view in views:
            if view.device == self.device:
                view.owner.record_stream(queue)  # type: ignore[attr-defined]

    def _value_views(self, values: Any) -> list[TensorView]:
        """Describe the tensors that values lie in, after checking that a kernel can reach them."""
        tensors = values if isinstance(values, list | tuple) else [values]
        views = [view_of(tensor, f"values[{idx}]") for idx, tensor in enumerate(tensors)]
        for idx, view in enumerate(views):
            if not view.is_contiguous:
                raise LayoutError(
                    f"values[{idx}] is not C-contiguous: its strides are {view.strides_bytes}"
                )
            if view.device != self.device and not _is_pinned(view):
                raise LayoutError(
                    f"values[{idx}] is on {view.device}; a copy of {self.device} needs it there, "
                    "or in pinned host memory (pin_memory=True)"
                )
        return views

    def _check_items(self, items: plan.Table, views: Sequence[TensorView]) -> None:
        """Raise what is wrong with the items: a bad address would end the whole CUDA context."""
        rows.check_items_table(items)
        ranges = np.array([_byte_range(view) for view in views], dtype=np.uint64).reshape(-1, 2)
        block_copy.check_items(items, self._classes, self._num_blocks, ranges)

    def _quota(self, quota: QuotaName | Quota) -> Quota:
        if isinstance(quota, Quota):
            return quota
        if quota not in self._quotas:
            raise LayoutError(f"quota is {quota!r}; use {' or '.join(sorted(self._quotas))}")
        return self._quotas[quota]

    def _stream(self, stream: Any) -> Any:
        """Return the torch stream to use, after checking that it belongs to the device."""
        torch = _torch()
        if stream is None:
            return torch.cuda.current_stream(self._device_idx)
        if not isinstance(stream, torch.cuda.Stream):
            raise LayoutError(
                f"stream is a {type(stream).__name__}; pass a torch.cuda.Stream, or wrap another "
                "library's in torch.cuda.ExternalStream"
            )
        if str(stream.device) != self.device:
            raise LayoutError(
                f"stream is on {stream.device}, the layout's tensors on {self.device}"
            )
        return stream


_INLINE_NAMES = {True: "kvx_gather_inline", False: "kvx_scatter_inline"}
_UPLOADED_NAMES = {True: "kvx_gather", False: "kvx_scatter"}


class _DevicePlan:
    """The runs and tiles of a layout in device memory, with zeros of their own.

    One allocation: the zeros that stand between segments, the runs, the tiles. A layout's own
    zeros are in host memory, so the runs that write them are pointed here.
    """

    def __init__(self, layout: BlockLayout) -> None:
        tiles, _ = layout.tiles
        num_bytes = layout.zeros.nbytes + layout.runs.nbytes + tiles.nbytes
        torch = _torch()
        stream = torch.cuda.Stream(device=layout.device)
        with torch.cuda.stream(stream):
            self.memory = torch.empty(num_bytes, dtype=torch.uint8, device=layout.device)
            zeros_ptr = int(self.memory.data_ptr())
            tables = (layout.zeros, _with_zeros_at(layout, zeros_ptr), tiles)
            table = np.concatenate([np.ascontiguousarray(each).view(np.uint8) for each in tables])
            self.memory.copy_(torch.from_numpy(table))
        stream.synchronize()
        self.runs_ptr = zeros_ptr + layout.zeros.nbytes
        self.tiles_ptr = self.runs_ptr + layout.runs.nbytes


def _with_zeros_at(layout: BlockLayout, zeros_ptr: int) -> plan.Table:
    """Return the runs with those that write zeros reading them at another address."""
    runs = layout.runs.copy()
    for row in layout.class_rows:
        first = int(row["first_run"])
        runs["base"][first + int(row["num_copy_runs"]) : first + int(row["num_runs"])] = zeros_ptr
    return runs


def _torch() -> Any:
    import torch  # noqa: PLC0415 - with the first CUDA tensor

    return torch


def _device_idx(device: str) -> int:
    kind, _, idx = device.partition(":")
    if kind != "cuda" or not idx.isdecimal():
        raise LayoutError(f"the layout's tensors are on {device}, not on a CUDA device")
    return int(idx)


def _full_quota(device_idx: int) -> Quota:
    properties = _torch().cuda.get_device_properties(device_idx)
    return cuda_job.full_quota(properties.multi_processor_count, properties.major)


def _is_pinned(view: TensorView) -> bool:
    is_pinned = getattr(view.owner, "is_pinned", None)
    return view.device == "cpu" and is_pinned is not None and bool(is_pinned())


def _byte_range(view: TensorView) -> tuple[int, int]:
    """Return first and one-past-last address of a contiguous tensor."""
    return view.ptr, view.ptr + math.prod(view.shape) * view.item_bytes
