# SPDX-License-Identifier: Apache-2.0
"""What the copy engine needs of CuPy and torch beyond ``cuda_fakes``: copies are done at once."""

import ctypes
import itertools

import cuda_fakes
from cuda_fakes import FakeStream

from kvxfer.blocks import cuda_dma

STREAM = 0x1000


class RefusedError(RuntimeError):
    """CuPy's ``CUDARuntimeError``."""


class FakeRuntime:
    """CuPy's ``cuda.runtime``, as far as copies go."""

    memcpyDefault = 4  # noqa: N815
    CUDARuntimeError = RefusedError

    def __init__(self):
        self.calls, self.refused = [], None

    def memcpyAsync(self, target, source, size, kind, stream):  # noqa: N802
        if len(self.calls) == self.refused:
            raise RefusedError("cudaErrorInvalidValue: invalid argument")
        self.calls.append((kind, stream))
        ctypes.memmove(target, source, size)


class NumberedStream(FakeStream):
    """A stream that a batch is not refused on."""

    numbers = itertools.count(STREAM)

    def __init__(self, device, priority=0):
        super().__init__(device, next(self.numbers), priority=priority)


def install(monkeypatch):
    """Return a fake torch whose CuPy copies, on a machine whose driver has no batches."""
    torch, torch.cupy = cuda_fakes.install(monkeypatch)
    torch.cupy.cuda.runtime = FakeRuntime()
    monkeypatch.setattr(cuda_dma, "find_batch", lambda: None)
    return torch
