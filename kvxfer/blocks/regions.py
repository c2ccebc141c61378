# SPDX-License-Identifier: Apache-2.0
"""A registered tensor with named axes, and the order in which its bytes stand in a value."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from kvxfer.blocks.runs import Axis, Strided
from kvxfer.blocks.tensors import TensorView, view_of
from kvxfer.errors import LayoutError

ValueOrder = Literal["token_major", "head_major"]
"""``token_major`` is [token][head][content], ``head_major`` [head][token][content]."""

Heads = tuple[int, int] | None
"""Global KV heads [start, end) of a shard; None where every rank holds the same bytes."""


@dataclass(frozen=True, eq=False)
class Region:
    """One layer's tensor of one cache group: which axis is what, and which heads it holds.

    Declared axes and strides decide where bytes lie, shapes never do: pages may be padded, blocks
    further apart than a page, heads outermost, strides negative, the address odd. The tensor
    (torch or NumPy) is kept alive by whoever keeps the region.
    """

    tensor: Any
    group: int
    """Cache group: regions of one group share their block ids."""
    layer: str
    axes: tuple[str, ...] = ("block", "head", "token", "content")
    """One name per dimension, each once. ``block`` is required; names other than head, token and
    content are parts (say K and V) that stand in front, in the order given."""
    kernel_blocks_per_block: int = 1
    """Consecutive entries of the block axis that make one block, each with its share of tokens."""
    heads: Heads = None
    """Global KV heads [start, end) on the head axis; None where all ranks hold the same bytes."""
    view: TensorView = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", tuple(self.axes))
        object.__setattr__(self, "view", view_of(self.tensor, f"the tensor of {self.layer}"))
        self._check_axes()
        self._check_heads()

    @property
    def num_blocks(self) -> int:
        """Blocks of the engine: entries of the block axis, kernel blocks put together."""
        return self._axis("block").size // self.kernel_blocks_per_block

    @property
    def block_step(self) -> int:
        """Bytes from one block to the next."""
        return self._axis("block").page_step * self.kernel_blocks_per_block

    def shards(self, shard_heads: int | None) -> list[Heads]:
        """Return the head ranges of ``shard_heads`` global heads each that this region holds.

        One, of all that it holds, for None and where heads are not declared. ``LayoutError`` if a
        range would begin or end inside a shard.
        """
        if self.heads is None or shard_heads is None:
            return [self.heads]
        start, end = self.heads
        if shard_heads < 1 or start % shard_heads or end % shard_heads:
            raise LayoutError(
                f"{self.layer} holds heads {start} to {end}, which shards of {shard_heads} heads "
                f"do not divide; choose head_shard (store_tp) so that they do"
            )
        shards: list[Heads] = [(at, at + shard_heads) for at in range(start, end, shard_heads)]
        if len(shards) > 1 and "head" not in self.axes:
            raise LayoutError(f"{self.layer} has no head axis to cut into {len(shards)} shards")
        return shards

    def native_order(self, shard_heads: int | None) -> ValueOrder | None:
        """Return the order in which tokens and heads lie, or None where it makes no difference.

        Both orders are the same bytes where a shard has one head or a block one token.
        """
        head, tokens = self._axis("head"), self._token_axes()
        num_heads = min(head.size, shard_heads) if shard_heads and self.heads else head.size
        if num_heads == 1 or math.prod(axis.size for axis in tokens) == 1:
            return None
        token = next(axis for axis in reversed(tokens) if axis.size > 1)
        return "token_major" if abs(token.page_step) > abs(head.page_step) else "head_major"

    def segment(self, heads: Heads, value_order: ValueOrder) -> Strided:
        """Return where the bytes of one shard lie in a block and, densely, in a segment at 0."""
        head = self._axis("head")
        ptr = self.view.ptr
        if heads is not None and "head" in self.axes and self.heads is not None:
            ptr += (heads[0] - self.heads[0]) * head.page_step
            head = head._replace(size=heads[1] - heads[0])
        tokens = self._token_axes()
        inner = [*tokens, head] if value_order == "token_major" else [head, *tokens]
        axes = [*self._part_axes(), *inner, self._axis("content")]
        return dense_segment(ptr, self.block_step, self.view.item_bytes, axes)

    def _axis(self, name: str) -> Axis:
        """Return count and page step of a named axis; one entry where it is not declared."""
        if name not in self.axes:
            return Axis(1, 0, 0)
        dim = self.axes.index(name)
        return Axis(self.view.shape[dim], self.view.strides_bytes[dim], 0)

    def _token_axes(self) -> list[Axis]:
        """Return the tokens of a block: its kernel blocks, then the tokens of each."""
        kernel_blocks = Axis(self.kernel_blocks_per_block, self._axis("block").page_step, 0)
        return [kernel_blocks, self._axis("token")]

    def _part_axes(self) -> list[Axis]:
        known = ("block", "head", "token", "content")
        return [self._axis(name) for name in self.axes if name not in known]

    def _check_axes(self) -> None:
        if len(self.axes) != len(self.view.shape):
            raise LayoutError(
                f"{self.layer} has {len(self.view.shape)} dimensions, axes names {len(self.axes)}: "
                f"{self.axes}"
            )
        if len(set(self.axes)) != len(self.axes) or "block" not in self.axes:
            raise LayoutError(
                f"axes of {self.layer} are {self.axes}; name each once, 'block' among them"
            )
        check_strides(self.view, self.layer)
        ratio, num_entries = self.kernel_blocks_per_block, self._axis("block").size
        if ratio < 1 or num_entries % ratio:
            raise LayoutError(
                f"{self.layer} has {num_entries} kernel blocks, not a multiple of "
                f"kernel_blocks_per_block={ratio}"
            )

    def _check_heads(self) -> None:
        if self.heads is None:
            return
        start, end = self.heads
        if not 0 <= start < end:
            raise LayoutError(f"heads of {self.layer} are {self.heads}; give a range [start, end)")
        if "head" in self.axes and self._axis("head").size != end - start:
            raise LayoutError(
                f"{self.layer} has {self._axis('head').size} entries on its head axis, heads "
                f"{start} to {end} are {end - start}; where an entry is not a head, name the axis "
                "otherwise"
            )


def check_strides(view: TensorView, name: str) -> None:
    """Raise ``LayoutError`` where entries of an axis share their bytes, as in expanded tensors."""
    if 0 in view.shape:
        return
    for dim, (size, stride) in enumerate(zip(view.shape, view.strides_bytes, strict=True)):
        if size > 1 and stride == 0:
            raise LayoutError(f"{name} repeats the same bytes along dimension {dim} (stride 0)")


def dense_segment(ptr: int, block_step: int, item_bytes: int, axes: list[Axis]) -> Strided:
    """Return ``axes`` (outermost first) laid back to back, item after item, in a segment at 0."""
    value_step = item_bytes
    dense: list[Axis] = []
    for axis in reversed(axes):
        dense.append(axis._replace(value_step=value_step))
        value_step *= axis.size
    return Strided(ptr, block_step, 0, item_bytes, tuple(reversed(dense)))
