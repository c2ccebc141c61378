# SPDX-License-Identifier: Apache-2.0
"""The kernels of ``csrc/block_copy.cu`` on one device, loaded and launched through CuPy 13 or 14.

From the binary that was made at build where nvcc was there and it belongs to these sources; else
compiled by NVRTC (half a second, then in CuPy's cache on disk). Torch has the memory and the
streams; CuPy only loads and launches. CuPy links a CUDA runtime of its own, so the device is set
for every call.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from kvxfer.blocks import cuda_sources
from kvxfer.errors import UnsupportedError

logger = logging.getLogger(__name__)

KERNEL_NAMES = ("kvx_gather", "kvx_scatter", "kvx_gather_inline", "kvx_scatter_inline")
NVRTC_OPTIONS = ("-std=c++17",)

_loaded: dict[int, Kernels] = {}  # guarded by _loading
_loading = threading.Lock()


class Kernels:
    """The kernels, ready to launch on one device; kept for the life of the process.

    Checks nothing: `cuda.CudaCopies` does.
    """

    def __init__(self, cupy: Any, device_idx: int, functions: dict[str, Any], origin: str) -> None:
        self._cupy = cupy
        self._device_idx = device_idx
        self._functions = functions
        self.origin = origin
        """``binary`` or ``nvrtc``."""

    def launch(
        self, name: str, num_ctas: int, threads: int, parameters: npt.NDArray[np.void], stream: Any
    ) -> None:
        """Put one launch into the queue of ``stream``, a torch stream of this device.

        ``parameters`` is an array of one structure, which is copied before this returns.
        """
        with self._cupy.cuda.Device(self._device_idx), self._wrap(stream):
            self._functions[name]((num_ctas,), (threads,), (parameters,))

    def _wrap(self, stream: Any) -> Any:
        """Return a torch stream as one of CuPy's; releases before 14 know the pointer only."""
        if hasattr(self._cupy.cuda.Stream, "from_external"):
            return self._cupy.cuda.Stream.from_external(_StreamHandle(stream))
        return self._cupy.cuda.ExternalStream(stream.cuda_stream, self._device_idx)


class _StreamHandle:
    """A torch stream under the CUDA stream protocol, which not every torch release speaks."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream  # kept alive with the handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, int(self._stream.cuda_stream)


def load(device_idx: int) -> Kernels:
    """Return the kernels of a device, loaded at the first call.

    ``UnsupportedError`` says what to install where CuPy is missing, or neither binary nor NVRTC
    can be used.
    """
    with _loading:
        if device_idx not in _loaded:
            _loaded[device_idx] = _load(import_cupy(), device_idx)
        return _loaded[device_idx]


def use_device(device: str) -> None:
    """Make a device (``cuda:1``) the calling thread's own in CuPy."""
    import_cupy().cuda.Device(int(device.partition(":")[2])).use()


def import_cupy() -> Any:
    """Return the module ``cupy``; ``UnsupportedError`` names the extra that brings it."""
    try:
        import cupy  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise UnsupportedError(
            "copies of CUDA tensors need CuPy, which cannot be imported here "
            f"({error}): pip install 'kvxfer[{_extra()}]'"
        ) from error
    return cupy


def _extra() -> str:
    """Return the extra whose CuPy belongs to the installed torch."""
    import torch  # noqa: PLC0415 - with the first CUDA tensor

    return "cuda12x" if str(torch.version.cuda).startswith("12.") else "cuda13x"


def _load(cupy: Any, device_idx: int) -> Kernels:
    source = cuda_sources.read_source(cuda_sources.source_folder())
    binary = cuda_sources.find_binary(cuda_sources.binary_folder(), source)
    # CuPy's own errors; a library that is missing is a RuntimeError or an OSError
    errors = (RuntimeError, OSError, cupy.cuda.compiler.CompileException)
    if binary is not None:
        try:
            return _compiled(cupy, device_idx, "binary", path=str(binary))
        except errors as error:
            logger.warning("%s cannot be loaded (%s); compiling with NVRTC", binary, error)
    try:
        return _compiled(cupy, device_idx, "nvrtc", code=source, options=NVRTC_OPTIONS)
    except errors as error:
        raise UnsupportedError(
            "the kernels were not compiled at build (no nvcc, or for another version of them), and "
            f"NVRTC cannot compile them now: {error}. Install CUDA 12.1 or newer for CuPy, e.g. "
            f"pip install 'cupy-{_extra()}[ctk]', or build kvxfer where nvcc is on the PATH"
        ) from error


def _compiled(cupy: Any, device_idx: int, origin: str, **module: Any) -> Kernels:
    """Return the kernels of one CuPy module, after the device has taken each of them."""
    with cupy.cuda.Device(device_idx):
        raw_module = cupy.RawModule(**module)
        functions = {name: raw_module.get_function(name) for name in KERNEL_NAMES}
        for function in functions.values():
            function.compile()
    logger.info("block copy kernels of cuda:%d come from %s", device_idx, origin)
    return Kernels(cupy, device_idx, functions, origin)
