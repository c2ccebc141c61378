# SPDX-License-Identifier: Apache-2.0
"""Streams, events and copies of one GPU, as far as staging needs them.

`Queues` is the face; tests put a model of a GPU behind it that runs what is queued in any order
that streams and events allow. `TorchQueues` is the GPU.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from kvxfer.blocks import cuda_kernels, plan
from kvxfer.blocks.cuda import CudaCopies, QuotaName
from kvxfer.blocks.cuda_dma import CopyEngine
from kvxfer.blocks.cuda_fragments import Copies, Fragments
from kvxfer.blocks.layout import BlockLayout
from kvxfer.blocks.staging import StagingPool
from kvxfer.errors import UnsupportedError


class Queues(Protocol):
    """What a GPU does in the background. Nothing here waits, but `synchronize`.

    A stream runs its work in order and knows nothing of other streams, but for `wait`. An event
    has passed when everything that its stream held at `record` has ended. Memory is what `empty`
    and `pin` return: sliced by bytes.
    """

    fragments: Fragments
    """Of the layout whose blocks are copied."""

    def use_device(self) -> None:
        """Make the GPU the calling thread's own: a new thread begins with the first one."""
        ...

    def new_stream(self, *, urgent: bool) -> Any:
        """Return a stream; an ``urgent`` one is served before the others."""
        ...

    def new_event(self, stream: Any) -> Any:
        """Return an event to `record`, on ``stream`` only; it has passed."""
        ...

    def empty(self, num_bytes: int, stream: Any) -> tuple[Any, int] | None:
        """Return device memory for use on ``stream``, and its address; None: there is too little.

        Its content is anything.
        """
        ...

    def pin(self, staging: StagingPool) -> Any:
        """Let the GPU reach the pool's memory; return it."""
        ...

    def unpin(self, staging: StagingPool) -> None:
        """Undo `pin`."""
        ...

    def mark(self) -> Any:
        """Return a new event behind what the calling thread's current stream holds."""
        ...

    def record(self, event: Any, stream: Any) -> None:
        """Set the event behind what ``stream`` holds now."""
        ...

    def wait(self, stream: Any, event: Any) -> None:
        """Let what is queued on ``stream`` from now on run after the event."""
        ...

    def synchronize(self, event: Any) -> None:
        """Return when the event has passed, without the GIL."""
        ...

    def drain(self, stream: Any) -> None:
        """Return when all that the stream holds has ended."""
        ...

    def copy(self, target: Any, source: Any, stream: Any) -> None:
        """Queue a copy of equally long memory, by the copy engine."""
        ...

    def copy_batch(self, copies: Copies, stream: Any) -> None:
        """Queue copies between blocks and pinned memory, by the copy engine, in an open order.

        ``copies`` has been read on return.
        """
        ...

    def gather(self, items: plan.Table, values: Any, stream: Any, quota: QuotaName) -> None:
        """Queue the copy of blocks into ``values``; see `cuda.CudaCopies`."""
        ...

    def scatter(self, items: plan.Table, values: Any, stream: Any, quota: QuotaName) -> None:
        """Queue the copy of ``values`` into blocks; see `cuda.CudaCopies`."""
        ...


class TorchQueues:
    """The GPU that a layout's tensors are on, through torch's streams and CuPy's launches."""

    def __init__(self, layout: BlockLayout) -> None:
        """Load the kernels; ``UnsupportedError`` names what to install."""
        import torch  # noqa: PLC0415 - with the first CUDA tensor

        self._torch: Any = torch
        self._copies = CudaCopies(layout)
        self._engine = CopyEngine(layout.device)
        self._device = layout.device
        self.fragments = Fragments(layout)

    def use_device(self) -> None:
        """Set the device in torch's CUDA runtime and in CuPy's, which has its own.

        Without, what torch and CuPy restore after a call is device 0, and every rank of a host
        would open a context there.
        """
        self._torch.cuda.set_device(self._device)
        cuda_kernels.use_device(self._device)

    def new_stream(self, *, urgent: bool) -> Any:
        """Return a torch stream of the device."""
        return self._torch.cuda.Stream(device=self._device, priority=-1 if urgent else 0)

    def new_event(self, stream: Any) -> Any:
        """Return a torch event whose `synchronize` sleeps instead of spinning."""
        event = self._torch.cuda.Event(blocking=True)
        event.record(stream)  # torch makes it now, so that no later call can fail for want of it
        return event

    def empty(self, num_bytes: int, stream: Any) -> tuple[Any, int] | None:
        """Return a uint8 tensor on the device; see `Queues`."""
        try:
            with self._torch.cuda.stream(stream), self._torch.inference_mode(False):
                memory = self._torch.empty(num_bytes, dtype=self._torch.uint8, device=self._device)
        except self._torch.cuda.OutOfMemoryError:
            return None
        return memory, int(memory.data_ptr())

    def pin(self, staging: StagingPool) -> Any:
        """Lock the pool's pages; return it as a tensor. ``UnsupportedError`` where that fails."""
        size = staging.buffer.nbytes
        result = self._torch.cuda.cudart().cudaHostRegister(staging.ptr, size, 0)
        if int(result) != 0:
            raise UnsupportedError(
                f"{size} bytes of staging cannot be pinned for {self._device} ({result}); lower "
                "staging_bytes, or raise the limit of locked memory (ulimit -l)"
            )
        with self._torch.inference_mode(False):  # other threads could not write to it
            return self._torch.from_numpy(np.frombuffer(staging.buffer, dtype=np.uint8))

    def unpin(self, staging: StagingPool) -> None:
        """Unlock the pool's pages."""
        self._torch.cuda.cudart().cudaHostUnregister(staging.ptr)

    def mark(self) -> Any:
        """See `Queues`."""
        return self.new_event(self._torch.cuda.current_stream(self._device))

    def record(self, event: Any, stream: Any) -> None:
        """See `Queues`."""
        event.record(stream)

    def wait(self, stream: Any, event: Any) -> None:
        """See `Queues`."""
        stream.wait_event(event)

    def synchronize(self, event: Any) -> None:
        """See `Queues`."""
        event.synchronize()

    def drain(self, stream: Any) -> None:
        """See `Queues`."""
        stream.synchronize()

    def copy(self, target: Any, source: Any, stream: Any) -> None:
        """See `Queues`."""
        with self._torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def copy_batch(self, copies: Copies, stream: Any) -> None:
        """See `Queues`; `cuda_dma.CopyEngineError` where the driver refuses."""
        self._engine.copy(copies, stream)

    def gather(self, items: plan.Table, values: Any, stream: Any, quota: QuotaName) -> None:
        """See `Queues`."""
        self._copies.gather_items(items, values, stream=stream, quota=quota)

    def scatter(self, items: plan.Table, values: Any, stream: Any, quota: QuotaName) -> None:
        """See `Queues`."""
        self._copies.scatter_items(items, values, stream=stream, quota=quota)
