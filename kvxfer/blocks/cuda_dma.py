# SPDX-License-Identifier: Apache-2.0
"""Batches of copies between a GPU and pinned memory by its copy engines, on a stream.

The driver takes a batch in one call from 12.8 on (``cuMemcpyBatchAsync``; 13.0 has a second form of
it, without the index of the copy that failed, under a name of its own). An older driver, and a
stream that the call refuses, get one ``cudaMemcpyAsync`` a copy, through CuPy.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from typing import Any

from kvxfer.blocks import cuda_kernels
from kvxfer.blocks.cuda_fragments import Copies
from kvxfer.errors import KvxferError

logger = logging.getLogger(__name__)

DRIVER_NAME = "libcuda.so.1"
SUCCESS = 0
SOURCE_IN_STREAM_ORDER = 1
"""CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: no source is read before what the stream held."""
OVERLAP_WITH_COMPUTE = 1
"""CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE, a hint: leave the multiprocessors to the engine."""
REFUSED_STREAMS = (0, 1)
"""The legacy default stream and its handle; a batch on it is CUDA_ERROR_INVALID_VALUE."""


class CopyEngineError(KvxferError, RuntimeError):
    """The driver refused a batch; some of its copies may have been queued."""


class CopyEngine:
    """Queues batches of copies on the streams of one device; usable from any thread.

    Checks nothing: `cuda_fragments.Fragments` does.
    """

    def __init__(self, device: str) -> None:
        """``device`` is e.g. ``cuda:0``; ``UnsupportedError`` names what to install."""
        self._device = device
        self._device_idx = int(device.partition(":")[2])
        self._cupy = cuda_kernels.import_cupy()
        self._batch = find_batch()
        logger.info(
            "the copy engine of %s takes copies by %s",
            device,
            "cudaMemcpyAsync, one by one" if self._batch is None else self._batch.name,
        )

    def copy(self, copies: Copies, stream: Any) -> None:
        """Queue the copies, none before what ``stream``, a torch stream of the device, holds.

        None of them has to have run on return, but what is in ``copies`` has been read. Raises
        `CopyEngineError`.
        """
        if len(copies) == 0:
            return
        queue = int(stream.cuda_stream)
        with self._cupy.cuda.Device(self._device_idx):
            if self._batch is None or queue in REFUSED_STREAMS:
                self._copy_each(copies, queue)
            else:
                self._batch.copy(copies, queue)

    def _copy_each(self, copies: Copies, queue: int) -> None:
        runtime = self._cupy.cuda.runtime
        columns = (copies.targets.tolist(), copies.sources.tolist(), copies.sizes.tolist())
        for idx, (target, source, size) in enumerate(zip(*columns, strict=True)):
            try:
                runtime.memcpyAsync(target, source, size, runtime.memcpyDefault, queue)
            except runtime.CUDARuntimeError as error:
                raise CopyEngineError(
                    f"copy {idx} of {len(copies)}, {size} bytes, was refused on {self._device}: "
                    f"{error}"
                ) from error


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes, which hold for all copies of a batch."""

    _fields_ = [
        ("source_access_order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),  # of managed memory only
        ("target_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    ]


class DriverBatch:
    """``cuMemcpyBatchAsync`` of a driver, in the form that has a second version's arguments or not.

    The calls release the GIL.
    """

    def __init__(self, driver: ctypes.CDLL, name: str) -> None:
        """``name`` is that of a function that the driver has, with or without ``_v2``."""
        self.name = name
        self._driver = driver
        self._tells_failed = not name.endswith("_v2")
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        failed = [pointer] if self._tells_failed else []
        self._call: Any = getattr(driver, name)
        self._call.argtypes = [*[pointer] * 3, size, pointer, pointer, size, *failed, pointer]
        self._call.restype = ctypes.c_int
        self._attributes = _Attributes(SOURCE_IN_STREAM_ORDER, flags=OVERLAP_WITH_COMPUTE)

    def copy(self, copies: Copies, queue: int) -> None:
        """Queue the copies, at least one, on the stream at address ``queue``; see `CopyEngine`.

        The stream's context is the calling thread's current one. The driver has read all arrays
        when it returns: ``copies`` lives as long as the caller's frame, the others as long as ours.
        """
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(len(copies))
        status = self._call(
            *(each.ctypes.data for each in (copies.targets, copies.sources, copies.sizes)),
            len(copies),
            ctypes.addressof(self._attributes),
            ctypes.addressof(first),
            1,
            *([ctypes.addressof(failed)] if self._tells_failed else []),
            queue,
        )
        if status != SUCCESS:
            raise CopyEngineError(self._describe(status, copies, failed.value))

    def _describe(self, status: int, copies: Copies, failed: int) -> str:
        """Return what the driver refused, as far as it says."""
        at = f", copy {failed} at fault" if failed < len(copies) else ""
        return (
            f"{self.name} of {len(copies)} copies, {int(copies.sizes.sum())} bytes{at}, returned "
            f"{status} ({self._error_name(status)})"
        )

    def _error_name(self, status: int) -> str:
        text = ctypes.c_char_p()
        found = self._driver.cuGetErrorName(status, ctypes.byref(text))
        return text.value.decode() if found == SUCCESS and text.value else "an unknown error"


@cache
def find_batch(driver_name: str = DRIVER_NAME) -> DriverBatch | None:
    """Return the newest form of the batched copy that a driver has; None, logged, without."""
    try:
        driver = ctypes.CDLL(driver_name)
    except OSError as error:
        logger.info("no batched copies: %s cannot be loaded (%s)", driver_name, error)
        return None
    for name in ("cuMemcpyBatchAsync_v2", "cuMemcpyBatchAsync"):
        if hasattr(driver, name):
            return DriverBatch(driver, name)
    logger.info("no batched copies: this driver is older than CUDA 12.8")
    return None
