# SPDX-License-Identifier: Apache-2.0
"""What a block copy needs to know of a tensor: address, shape and byte strides, no library."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvxfer.errors import LayoutError


@dataclass(frozen=True, eq=False, slots=True)
class TensorView:
    """A strided view of memory that ``owner`` keeps alive."""

    owner: object
    ptr: int
    """Address of element (0, ..., 0)."""
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    """May be padded, permuted or negative; never inferred from the shape."""
    item_bytes: int
    dtype_name: str
    """As the library spells it, without its name: ``uint8``, ``bfloat16``."""
    device: str
    """``cpu`` or the library's device name, e.g. ``cuda:0``."""
    writable: bool

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie back to back in C order."""
        expected = self.item_bytes
        for size, stride in zip(reversed(self.shape), reversed(self.strides_bytes), strict=True):
            if size != 1 and stride != expected:
                return 0 in self.shape
            expected *= size
        return True


def memory_spans(views: Iterable[TensorView]) -> tuple[tuple[int, int], ...]:
    """Return address and bytes of the memory that tensors lie in, ascending, no byte of it twice.

    Tensors that interleave, as the layers of one allocation do, give one span.
    """
    ends = []
    for view in views:
        if 0 in view.shape:
            continue
        pairs = zip(view.shape, view.strides_bytes, strict=True)
        reach = [(size - 1) * stride for size, stride in pairs]
        start = view.ptr + sum(step for step in reach if step < 0)
        ends.append((start, view.ptr + sum(step for step in reach if step > 0) + view.item_bytes))
    spans: list[tuple[int, int]] = []
    for start, stop in sorted(ends):
        if spans and start < spans[-1][1]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], stop))
        else:
            spans.append((start, stop))
    return tuple((start, stop - start) for start, stop in spans)


def view_of(tensor: Any, name: str) -> TensorView:
    """Describe a torch tensor or a NumPy array; ``LayoutError`` naming ``name`` for anything else.

    Recognised by their attributes, so that neither library has to be imported.
    """
    if hasattr(tensor, "data_ptr"):
        return _view_of_torch(tensor)
    if hasattr(tensor, "__array_interface__") and hasattr(tensor, "strides"):
        return _view_of_numpy(tensor, name)
    raise LayoutError(f"{name} is a {type(tensor).__name__}; pass a torch tensor or a NumPy array")


def _view_of_torch(tensor: Any) -> TensorView:
    item_bytes = int(tensor.element_size())
    return TensorView(
        owner=tensor,
        ptr=int(tensor.data_ptr()),
        shape=tuple(int(size) for size in tensor.shape),
        strides_bytes=tuple(int(stride) * item_bytes for stride in tensor.stride()),
        item_bytes=item_bytes,
        dtype_name=str(tensor.dtype).removeprefix("torch."),
        device=str(tensor.device),
        writable=True,
    )


def _view_of_numpy(array: Any, name: str) -> TensorView:
    if array.dtype.hasobject:
        raise LayoutError(f"{name} holds Python objects; pass an array of plain numbers")
    return TensorView(
        owner=array,
        ptr=int(array.__array_interface__["data"][0]),
        shape=tuple(array.shape),
        strides_bytes=tuple(array.strides),
        item_bytes=int(array.itemsize),
        dtype_name=str(array.dtype),
        device="cpu",
        writable=bool(array.flags.writeable),
    )
