# SPDX-License-Identifier: Apache-2.0
"""torch and CuPy without a GPU: device memory is host memory, and a launch runs the simulator.

What a launch gets is checked as a GPU would see it: the simulated kernel reads plan and words from
the very bytes of its parameters, so a launcher that passes a wrong address or size copies wrongly.
"""

import contextlib
import threading
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np

from kvxfer._native import block_copy
from kvxfer.blocks import cuda_kernels

DEVICE = "cuda:0"
ALIGNMENT = 256  # of torch's device memory, at least
NUM_MULTIPROCESSORS = 3


def aligned(num_bytes):
    """Return uint8 memory at a multiple of ALIGNMENT."""
    memory = np.empty(num_bytes + ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + num_bytes]


class FakeTensor:
    """As much of a torch tensor as kvxfer looks at."""

    def __init__(self, array, device=DEVICE, pinned=False):
        self.array = array
        self.device = device
        self.pinned = pinned
        self.streams = []

    shape = property(lambda self: self.array.shape)
    dtype = property(lambda self: f"torch.{self.array.dtype}")

    def data_ptr(self):
        return self.array.ctypes.data

    def element_size(self):
        return self.array.itemsize

    def stride(self):
        return tuple(stride // self.array.itemsize for stride in self.array.strides)

    def is_pinned(self):
        return self.pinned

    def numpy(self):
        if self.device != "cpu":
            raise TypeError(f"can't convert {self.device} device type tensor to numpy")
        return self.array

    def copy_(self, source, non_blocking=False):
        for side in (self, source):
            if non_blocking and side.device == "cpu" and not side.pinned:
                raise AssertionError("an asynchronous copy of pageable memory is none")
        self.array[...] = source.array

    def record_stream(self, stream):
        self.streams.append(stream)

    def __getitem__(self, part):
        return FakeTensor(self.array[part], self.device, self.pinned)

    def __len__(self):
        return len(self.array)


@dataclass(eq=False)
class FakeStream:
    """A torch stream; what is queued has run as soon as it is queued."""

    device: str = DEVICE
    cuda_stream: int = 0
    synchronized: int = 0
    priority: int = 0
    waited: list = field(default_factory=list)

    def synchronize(self):
        self.synchronized += 1

    def wait_event(self, event):
        self.waited.append(event)


@dataclass(eq=False)
class FakeEvent:
    """A torch event, which has passed as soon as it is recorded."""

    blocking: bool = False
    stream: FakeStream | None = None
    synchronized: int = 0

    def record(self, stream):
        self.stream = stream

    def synchronize(self):
        assert self.stream is not None, "an event that was not recorded"
        self.synchronized += 1


class FakeCudart:
    """The CUDA runtime's calls for pinned memory; ``result`` is what they return."""

    def __init__(self):
        self.registered = {}
        self.result = 0

    def cudaHostRegister(self, ptr, num_bytes, flags):  # noqa: N802
        if self.result == 0:
            self.registered[ptr] = num_bytes
        return self.result

    def cudaHostUnregister(self, ptr):  # noqa: N802
        del self.registered[ptr]
        return self.result


@dataclass
class Launch:
    """One call of a kernel, and what was current then."""

    name: str
    grid: tuple
    block: tuple
    parameters: bytes
    device_idx: int
    stream_ptr: int

    def run(self):
        """Run the simulator on the launch's parameters; no word may be misaligned."""
        misaligned = block_copy.simulate_kernel(
            np.frombuffer(self.parameters, dtype=np.uint8),
            "gather" in self.name,
            "inline" in self.name,
            *self.grid,
            *self.block,
        )
        assert misaligned == 0


class FakeOutOfMemoryError(Exception):
    """``torch.cuda.OutOfMemoryError``."""


class FakeTorch:
    """The module torch, of one process with one device."""

    def __init__(self):
        self.uint8 = "uint8"
        self.version = SimpleNamespace(cuda="13.0")
        self.current = FakeStream(cuda_stream=0x1000)
        self.allocations = []  # (tensor, stream it was made under)
        self.free_bytes = 1 << 30
        self.of_thread = threading.local()
        """``device``, as the calling thread has set it."""
        self.inference_mode = lambda _: contextlib.nullcontext()
        self.runtime = FakeCudart()
        self.cuda = SimpleNamespace(
            Stream=FakeStream,
            Event=FakeEvent,
            OutOfMemoryError=FakeOutOfMemoryError,
            set_device=lambda device: setattr(self.of_thread, "device", device),
            cudart=lambda: self.runtime,
            stream=self._use,
            current_stream=lambda _: self.current,
            get_device_properties=lambda _: SimpleNamespace(
                multi_processor_count=NUM_MULTIPROCESSORS, major=9
            ),
        )

    def empty(self, num_bytes, dtype, device="cpu", pin_memory=False):
        assert dtype == "uint8"
        if num_bytes > self.free_bytes:
            raise FakeOutOfMemoryError
        tensor = FakeTensor(aligned(num_bytes), device, pin_memory)
        self.allocations.append((tensor, self.current))
        return tensor

    def from_numpy(self, array):
        is_pinned = array.ctypes.data in self.runtime.registered
        return FakeTensor(array, "cpu", is_pinned)

    @contextlib.contextmanager
    def _use(self, stream):
        self.current, before = stream, self.current
        yield
        self.current = before


@dataclass
class FakeCupy:
    """The module cupy. ``deferred`` launches wait for `run_all`, as on a busy GPU."""

    has_from_external: bool = True
    failing: dict = field(default_factory=dict)
    """Error by how a module is made: ``path`` or ``code``."""
    deferred: bool = False
    launches: list = field(default_factory=list)
    modules: list = field(default_factory=list)

    def __post_init__(self):
        self._devices, self._streams = [], []
        self.used = []  # (thread, device that it made its own)
        stream_face = SimpleNamespace()
        if self.has_from_external:
            stream_face.from_external = lambda handle: self._stream(handle.__cuda_stream__()[1])
        self.cuda = SimpleNamespace(
            Device=self._device,
            Stream=stream_face,
            ExternalStream=lambda ptr, device_idx: self._stream(ptr),
            compiler=SimpleNamespace(CompileException=type("CompileException", (Exception,), {})),
        )

    def RawModule(self, **kwargs):  # noqa: N802
        """Return a module with any function, as CuPy makes one from text or from a file."""
        how = "path" if "path" in kwargs else "code"
        self.modules.append(kwargs)
        return SimpleNamespace(get_function=lambda name: FakeKernel(self, name, how))

    def run_all(self):
        for launch in self.launches:
            launch.run()

    def current_device(self):
        return self._devices[-1]

    def current_stream(self):
        return self._streams[-1]

    def _device(self, idx):
        device = self._entered(self._devices, idx)
        device.use = lambda: self.used.append((threading.get_ident(), idx))
        return device

    def _stream(self, ptr):
        return self._entered(self._streams, ptr)

    @contextlib.contextmanager
    def _entered(self, stack, value):
        stack.append(value)
        yield
        stack.pop()


@dataclass
class FakeKernel:
    """A kernel of a FakeCupy."""

    cupy: FakeCupy
    name: str
    how: str

    def compile(self):
        self.cupy.current_device()  # IndexError where none was set
        if self.how in self.cupy.failing:
            raise self.cupy.failing[self.how]

    def __call__(self, grid, block, args):
        (parameters,) = args
        assert parameters.shape == ()  # CuPy takes one structure by value, and no array of them
        launch = Launch(
            self.name,
            grid,
            block,
            parameters.tobytes(),
            self.cupy.current_device(),
            self.cupy.current_stream(),
        )
        self.cupy.launches.append(launch)
        if not self.cupy.deferred:
            launch.run()


def install(monkeypatch, cupy=None, torch=None):
    """Let kvxfer find these instead of the real modules; return (torch, cupy)."""
    torch, cupy = torch or FakeTorch(), cupy or FakeCupy()
    monkeypatch.setitem(__import__("sys").modules, "torch", torch)
    monkeypatch.setitem(__import__("sys").modules, "cupy", cupy)
    monkeypatch.setattr(cuda_kernels, "_loaded", {})
    return torch, cupy


class FakeDevice:
    """The face of a device that the contract's tests use."""

    name = DEVICE

    def upload(self, array):
        memory = aligned(array.nbytes)
        memory[...] = array.view(np.uint8).ravel()
        return FakeTensor(memory)

    def upload_pinned(self, array):
        tensor = self.upload(array)
        tensor.device, tensor.pinned = "cpu", True
        return tensor

    def download(self, tensor):
        return tensor.array.copy()

    def empty(self, num_bytes):
        return FakeTensor(aligned(num_bytes))

    def rows(self, tensor, num_rows):
        """Return a tensor's memory as (num_rows, bytes)."""
        shape = (num_rows, tensor.array.size // max(num_rows, 1))
        return FakeTensor(tensor.array.reshape(shape), tensor.device, tensor.pinned)
