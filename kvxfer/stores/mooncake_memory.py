# SPDX-License-Identifier: Apache-2.0
"""Memory that the Mooncake client may read and write: registered buffers, and a bounce buffer."""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import mmap
import operator
import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import StoreError
from kvxfer.stores.arguments import byte_views, check_count
from kvxfer.stores.mooncake_codes import name_of
from kvxfer.stores.parts import Parts

NUM_SLOTS = 4
"""Calls that bounce at once; more wait for a slot."""
SLOT_BYTES = 4 << 20
_NUM_BYTES = operator.attrgetter("nbytes")


class Registrar(Protocol):
    """The part of a client that registers memory; both return a code, 0 for done."""

    def register(self, ptr: int, num_bytes: int) -> int: ...  # noqa: D102
    def unregister(self, ptr: int) -> int: ...  # noqa: D102


class Buffer(NamedTuple):
    """Bytes at an address, kept alive by ``owner``."""

    ptr: int
    num_bytes: int
    owner: object

    @classmethod
    def of(cls, view: memoryview) -> Buffer:
        """Return where a one-dimensional byte view lies, writable or not."""
        if view.readonly or not view.nbytes:
            ptr = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
        else:  # an eighth of the time, for writable views only
            ptr = ctypes.addressof(ctypes.c_char.from_buffer(view))
        return cls(ptr, view.nbytes, view)

    def fill_from(self, source: Buffer) -> None:
        """Copy what another one of this size holds."""
        copy_bytes(self.ptr, source.ptr, self.num_bytes)


@dataclass(frozen=True, slots=True)
class Buffers:
    """Bytes at many addresses, column by column, kept alive by ``owners``."""

    ptrs: Sequence[int]
    sizes: Sequence[int]
    owners: Sequence[object]

    @classmethod
    def of(
        cls, buffers: Sequence[memoryview], name: str, num_keys: int, *, writable: bool
    ) -> Buffers:
        """Return where buffers lie, one for each key; errors and ``name`` as of ``byte_views``."""
        try:
            ptrs = list(map(ctypes.addressof, map(ctypes.c_char.from_buffer, buffers)))
            sizes = list(map(_NUM_BYTES, buffers))
        except (TypeError, ValueError, AttributeError):  # read-only, empty, or none at all
            buffers = byte_views(buffers, name, num_keys, writable=writable)
            ptrs = [Buffer.of(view).ptr for view in buffers]
            sizes = list(map(_NUM_BYTES, buffers))
        check_count(buffers, name, num_keys)
        return cls(ptrs, sizes, buffers)

    @property
    def shapes(self) -> Sequence[int]:
        """What buffers must agree on for one to be filled from another: the size."""
        return self.sizes

    def __getitem__(self, row: int) -> Buffer:
        """Return one of them."""
        return Buffer(self.ptrs[row], self.sizes[row], self.owners[row])


class ScatteredBuffer(NamedTuple):
    """Bytes of one value at several addresses."""

    ptrs: Sequence[int]
    sizes: tuple[int, ...]

    def fill_from(self, source: ScatteredBuffer) -> None:
        """Copy what another one with parts of these sizes holds."""
        for part in zip(self.ptrs, source.ptrs, self.sizes, strict=True):
            copy_bytes(*part)


@dataclass(frozen=True, slots=True)
class ScatteredBuffers:
    """Values of several parts each, which their caller keeps alive."""

    ptrs: Sequence[Sequence[int]]
    shapes: Sequence[tuple[int, ...]]
    """Sizes of the parts of each."""
    sizes: Sequence[int]

    @classmethod
    def of(cls, parts: Parts) -> ScatteredBuffers:
        """Return where the parts of values lie, value by value."""
        return cls(*parts.by_value(), parts.value_bytes().tolist())

    def __getitem__(self, row: int) -> ScatteredBuffer:
        """Return one of them."""
        return ScatteredBuffer(self.ptrs[row], self.shapes[row])


class Memory:
    """What is registered with the client, by address; survives the client, for its successor.

    Buffers stay registered, and alive, until ``close``. A target or source outside of them goes
    through a slot of a bounce buffer that is made and registered when it is first needed, 16 MiB
    in 4 slots; one that no slot holds gets memory of its own for the time of its call.
    """

    def __init__(self, patience_s: float = 30.0) -> None:
        """``patience_s``: longest wait for a bounce slot, which calls in flight hold."""
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._regions: list[Buffer] = []  # sorted by address; guarded by _lock
        self._client: Registrar | None = None  # guarded by _lock
        self._slots: queue.SimpleQueue[Buffer] | None = None  # guarded by _lock

    def attach(self, client: Registrar) -> None:
        """Register everything with a new client; ``StoreError`` where it refuses."""
        with self._lock:
            self._client = client
            for region in self._regions:
                _register(client, region)

    def register(self, view: memoryview) -> None:
        """Register a buffer, once; ``StoreError`` where the client refuses or it overlaps."""
        region = Buffer.of(view)
        if not region.num_bytes or not any(self.outside([region.ptr], [region.num_bytes])):
            return
        with self._lock:
            self._add(region)

    def outside(self, ptrs: Sequence[int], sizes: Sequence[int]) -> list[bool]:
        """Return (n,) whether bytes do not lie in one registered region."""
        with self._lock:
            starts = [region.ptr for region in self._regions]
            stops = [region.ptr + region.num_bytes for region in self._regions]
        ends = list(map(operator.add, ptrs, sizes))
        at = bisect.bisect_right(starts, min(ptrs, default=0)) - 1
        if at >= 0 and max(ends, default=0) <= stops[at]:
            return [False] * len(ends)  # as a transfer's are, which all lie in its slot
        outside = []
        for ptr, end in zip(ptrs, ends, strict=True):
            at = bisect.bisect_right(starts, ptr) - 1
            outside.append(at < 0 or end > stops[at])
        return outside

    def require(self, ptrs: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
        """Raise ``ValueError`` for the first bytes that do not lie in one registered region."""
        with self._lock:
            bounds = [(region.ptr, region.ptr + region.num_bytes) for region in self._regions]
        if len(ptrs):
            lowest, highest = int(ptrs.min()), int((ptrs + sizes).max())
            if any(start <= lowest and highest <= stop for start, stop in bounds):
                return
        starts, stops = np.array([(0, 0), *bounds], np.int64).T
        at = starts.searchsorted(ptrs, side="right") - 1
        outside = np.flatnonzero((at < 1) | (ptrs + sizes > stops[at]))
        if len(outside):
            part = outside[0]
            raise ValueError(
                f"part {part} of {sizes[part]} bytes at {ptrs[part]:#x} is not in a registered "
                "buffer"
            )

    @contextlib.contextmanager
    def borrow(self, num_bytes: int) -> Iterator[Buffer]:
        """Yield ``num_bytes`` or more of registered memory; waits while all slots are in use.

        ``StoreError`` where none came free in time.
        """
        if num_bytes > SLOT_BYTES:
            with self._borrow_large(num_bytes) as buffer:
                yield buffer
            return
        slots = self._bounce_slots()
        try:
            slot = slots.get(timeout=self._patience_s)
        except queue.Empty:
            raise StoreError(f"no bounce slot came free in {self._patience_s} s") from None
        try:
            yield slot
        finally:
            slots.put(slot)

    def close(self) -> None:
        """Let go of all buffers; the client that knew them is closed."""
        with self._lock:
            self._client = None
            self._regions.clear()

    @contextlib.contextmanager
    def _borrow_large(self, num_bytes: int) -> Iterator[Buffer]:
        buffer = Buffer.of(memoryview(mmap.mmap(-1, num_bytes)))
        with self._lock:
            client = self._client
            if client is None:
                raise StoreError("the store is closed")
            _register(client, buffer)
        try:
            yield buffer
        finally:
            client.unregister(buffer.ptr)

    def _bounce_slots(self) -> queue.SimpleQueue[Buffer]:
        with self._lock:
            if self._slots is None:
                view = memoryview(mmap.mmap(-1, NUM_SLOTS * SLOT_BYTES))
                self._add(Buffer.of(view))
                self._slots = queue.SimpleQueue()
                for at in range(0, NUM_SLOTS * SLOT_BYTES, SLOT_BYTES):
                    self._slots.put(Buffer.of(view[at : at + SLOT_BYTES]))
            return self._slots

    def _add(self, region: Buffer) -> None:
        """Register a region with the client and remember it; holds the lock."""
        if self._client is not None:
            _register(self._client, region)
        bisect.insort(self._regions, region, key=_ptr)


def copy_bytes(target_ptr: int, source_ptr: int, num_bytes: int) -> None:
    """Copy between two buffers that the caller keeps alive, without the GIL."""
    ctypes.memmove(target_ptr, source_ptr, num_bytes)


def _register(client: Registrar, region: Buffer) -> None:
    code = client.register(region.ptr, region.num_bytes)
    if code != 0:
        raise StoreError(
            f"Mooncake did not register a buffer of {region.num_bytes} bytes at {region.ptr:#x}: "
            f"{name_of(code)} ({code}); it may overlap one that is registered, or locked memory "
            "may be limited (ulimit -l)"
        )


def _ptr(region: Buffer) -> int:
    return region.ptr
