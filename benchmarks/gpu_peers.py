# SPDX-License-Identifier: Apache-2.0
"""What else moves fragments on a GPU: the driver's batched copies, SGLang's and LMCache's kernels.

Each returns a callable that runs once, or raises `PeerError` saying why it cannot here: a peer
that is not installed, or has another interface, is left out of the table and named below it.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from gpu_cases import DEVICE, GpuCase, Run

INTERFACE_ERRORS = (ImportError, AttributeError, TypeError, ValueError, RuntimeError, OSError)
SOURCE_IN_STREAM_ORDER = 1
LMCACHE_TOKENS = 16


class PeerError(Exception):
    """A peer cannot run here."""


class _CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes: source access order, hints where source and target are, flags."""

    _fields_ = [
        ("source_access_order", ctypes.c_int),
        ("source_location", ctypes.c_int * 2),
        ("target_location", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    ]


def batched_copies(sources: np.ndarray, targets: np.ndarray, fragment: int, stream: Any) -> Run:
    """Return one cuMemcpyBatchAsync between addresses, (n,) uint64 each, on ``stream``."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise PeerError(f"no CUDA driver: {error}") from error
    newer = getattr(driver, "cuMemcpyBatchAsync_v2", None)
    older = getattr(driver, "cuMemcpyBatchAsync", None)
    if newer is None and older is None:
        raise PeerError("the driver has no cuMemcpyBatchAsync (12.8 has)")
    count = ctypes.c_size_t(len(sources))
    sizes = np.full(len(sources), fragment, dtype=np.uint64)
    attributes = _CopyAttributes(SOURCE_IN_STREAM_ORDER)
    first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
    arrays = [ctypes.c_void_p(each.ctypes.data) for each in (targets, sources, sizes)]
    common = [*arrays, count, ctypes.byref(attributes), ctypes.byref(first), ctypes.c_size_t(1)]
    queue = ctypes.c_void_p(stream.cuda_stream)
    call, arguments = (
        (newer, [*common, queue]) if newer else (older, [*common, ctypes.byref(failed), queue])
    )

    def run() -> None:
        status = call(*arguments)
        if status:
            raise PeerError(f"cuMemcpyBatchAsync returned {status}")

    run.keep = (sources, targets, sizes)  # type: ignore[attr-defined]
    return run


def sglang(case: GpuCase, target: Any, num_ctas: int) -> Run:
    """Return SGLang's kernel over the rows, for as many CTAs as ours take."""
    try:
        from sgl_kernel import kvcacheio

        transfer = kvcacheio.transfer_kv_per_layer_mla
    except INTERFACE_ERRORS as error:
        raise PeerError(f"SGLang: {error}") from error
    if case.fragment % 8:
        raise PeerError("SGLang: rows of 8-byte words only")
    target_ids = case.torch.arange(len(case.row_ids), device=DEVICE)

    def run() -> None:
        transfer(case.rows, target, case.row_ids, target_ids, case.fragment, num_ctas, 32)

    return run


def lmcache(case: GpuCase, target: Any) -> Run:
    """Return LMCache's block kernel, which takes each fragment as a latent page of one layer."""
    try:
        from lmcache import device_ops, lmcache_native

        shape = device_ops.PageBufferShapeDesc()
        transfer = device_ops.multi_layer_block_kv_transfer
        pages = lmcache_native.EngineKVFormat.NL_X_NB_BS_HS
        direction = lmcache_native.TransferDirection.D2H
    except INTERFACE_ERRORS as error:
        raise PeerError(f"LMCache: {error}") from error
    shape.kv_size, shape.nl, shape.nb, shape.nh = 1, 1, len(case.rows), 1
    shape.bs, shape.hs = LMCACHE_TOKENS, case.fragment // LMCACHE_TOKENS
    shape.element_size, shape.block_stride_elems = 1, 0
    pointers = case.torch.tensor([case.rows.data_ptr()], dtype=case.torch.int64, device=DEVICE)
    num_tokens = len(case.row_ids) * LMCACHE_TOKENS

    def run() -> None:
        transfer(
            pointers,
            [target.data_ptr()],
            case.row_ids,
            case.torch.device(DEVICE),
            direction,
            shape,
            num_tokens,
            pages,
            0,
        )

    return run
