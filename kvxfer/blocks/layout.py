# SPDX-License-Identifier: Apache-2.0
"""Where the bytes of a block lie in registered tensors, and where they stand in its values."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvxfer.blocks import plan
from kvxfer.blocks.regions import (
    Heads,
    Region,
    ValueOrder,
    check_strides,
    dense_segment,
)
from kvxfer.blocks.runs import Axis, Strided, merge_segments
from kvxfer.blocks.tensors import TensorView, memory_spans, view_of
from kvxfer.errors import LayoutError

__all__ = ["BlockClass", "BlockLayout", "Region", "Segment"]

SEGMENT_ALIGNMENT = 16
MAX_BLOCKS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Segment:
    """One layer's part of a value; the same for every engine that stores this content."""

    layer: str
    value_offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class BlockClass:
    """What one key holds of a block: a cache group's layers, for one range of heads."""

    group: int
    heads: Heads
    """Global KV heads [start, end); None where every rank holds the same bytes."""
    value_bytes: int
    segments: tuple[Segment, ...]
    """In the order of the regions, each at a multiple of 16 bytes, zeros between."""


@dataclass(frozen=True, eq=False)
class BlockLayout:
    """The plan of all block copies between a set of tensors and their values.

    Built once at registration, immutable, usable from any thread. It keeps its tensors alive and
    addresses them directly: a tensor must not be moved or resized while the layout is in use.

    A value has no header: its segments (one per layer) in the order of the regions, each at a
    multiple of 16 bytes, zeros between. Offsets depend on logical content alone, so engines of
    other strides, padding and tensor layouts make the same bytes under the same ``value_order``.
    Place values at multiples of 16: any address works, that is the fast one.
    """

    num_blocks: int
    classes: tuple[BlockClass, ...]
    """Sorted by group and first head; an item's ``class_id`` is the position here."""
    value_order: Literal["token_major", "head_major", "logical"]
    """What ``native`` resolved to; part of a key's digest. ``logical`` for ``from_tensors``."""
    device: str
    """Of all tensors: ``cpu`` or e.g. ``cuda:0``."""
    writable: bool
    """Whether blocks may be written: False with a read-only array among the tensors."""
    runs: plan.Table
    """(num_runs,) RUN_DTYPE; the zeros of a class have ``zeros`` as their page."""
    class_rows: plan.Table
    """(num_classes,) CLASS_DTYPE: where the runs of a class stand in ``runs``."""
    zeros: npt.NDArray[np.uint8]
    owners: tuple[object, ...]
    """The tensors, which the layout keeps alive."""
    memory_spans: tuple[tuple[int, int], ...]
    """Address and bytes of the memory that the tensors lie in, ascending, no byte of it twice."""

    @classmethod
    def from_regions(
        cls,
        regions: Iterable[Region],
        *,
        value_order: Literal["native", "token_major", "head_major"] = "native",
        head_shard: int | Mapping[int, int | None] | None = None,
        num_blocks: int | None = None,
    ) -> BlockLayout:
        """Return the layout of an engine's registered tensors: one class per group and head shard.

        ``value_order`` ``native`` is the order in which the tensors lie, readable afterwards as
        ``layout.value_order``; regions that lie differently need it set. ``head_shard`` is the
        number of global KV heads per shard, for all groups or by group; None leaves each group's
        heads in one. ``num_blocks`` is checked against every region. Raises ``LayoutError``.
        """
        regions = tuple(regions)
        if not regions:
            raise LayoutError("a layout needs at least one region")
        shard_heads = _heads_by_group(regions, head_shard)
        order = _resolve_order(regions, value_order, shard_heads)
        members: dict[tuple[int, Heads], list[Region]] = {}
        for region in regions:
            for heads in region.shards(shard_heads[region.group]):
                members.setdefault((region.group, heads), []).append(region)
        parts = [
            (group, heads, [(r.layer, r.segment(heads, order)) for r in members[group, heads]])
            for group, heads in sorted(members, key=_class_order)
        ]
        blocks = {f"{region.layer} (group {region.group})": region.num_blocks for region in regions}
        return cls._build(parts, [r.view for r in regions], order, _agree(blocks, num_blocks))

    @classmethod
    def from_tensors(cls, tensors: Iterable[Any]) -> BlockLayout:
        """Return the layout of plain tensors whose first dimension counts blocks: one class.

        A value is each tensor's block in the C order of its other dimensions, whatever the
        strides, one after the other, each at a multiple of 16 bytes. Raises ``LayoutError``.
        """
        if hasattr(tensors, "shape"):
            raise LayoutError("tensors is a single tensor; pass a list of tensors")
        views = {f"tensors[{idx}]": view_of(t, f"tensors[{idx}]") for idx, t in enumerate(tensors)}
        if not views:
            raise LayoutError("a layout needs at least one tensor")
        segments = [(name, _plain_segment(view, name)) for name, view in views.items()]
        blocks = {name: view.shape[0] for name, view in views.items()}
        return cls._build([(0, None, segments)], list(views.values()), "logical", _agree(blocks))

    @classmethod
    def _build(
        cls,
        parts: Sequence[tuple[int, Heads, Sequence[tuple[str, Strided]]]],
        views: Sequence[TensorView],
        value_order: Literal["token_major", "head_major", "logical"],
        num_blocks: int,
    ) -> BlockLayout:
        """Place segments in values, and make the tables."""
        devices = sorted({view.device for view in views})
        if len(devices) > 1:
            raise LayoutError(f"tensors are on {' and '.join(devices)}; a layout has one device")
        zeros = np.zeros(SEGMENT_ALIGNMENT, dtype=np.uint8)
        zeros.flags.writeable = False
        classes, class_runs = [], []
        for group, heads, segments in parts:
            placed, value_bytes = _place(segments)
            rows = tuple(
                Segment(name, segment.value_offset, segment.num_bytes)
                for (name, _), segment in zip(segments, placed, strict=True)
            )
            gaps = merge_segments(_gaps(placed, zeros.ctypes.data))
            classes.append(BlockClass(group, heads, value_bytes, rows))
            class_runs.append(plan.ClassRuns(merge_segments(placed), gaps, value_bytes))
        return cls(
            num_blocks=num_blocks,
            classes=tuple(classes),
            value_order=value_order,
            device=devices[0],
            writable=all(view.writable for view in views),
            runs=plan.run_table(class_runs),
            class_rows=plan.class_table(class_runs),
            zeros=zeros,
            owners=tuple(view.owner for view in views),
            memory_spans=memory_spans(views),
        )

    @property
    def value_bytes(self) -> int:
        """Bytes of a value; ``LayoutError`` unless the layout has a single class."""
        if len(self.classes) != 1:
            raise LayoutError(
                f"the layout has {len(self.classes)} classes of values; use items, which name one"
            )
        return self.classes[0].value_bytes

    def class_id(self, group: int, heads: Heads = None) -> int:
        """Return the class of a group's shard; ``LayoutError`` if the layout has none."""
        for idx, block_class in enumerate(self.classes):
            if (block_class.group, block_class.heads) == (group, heads):
                return idx
        raise LayoutError(f"the layout has no class of group {group} and heads {heads}")

    def block_view(self, class_id: int, block_id: int) -> memoryview | None:
        """Return the block's own bytes where they already are its value, so that nothing is copied.

        None where the value is not one run of the block's bytes, or not on the CPU. The view keeps
        the layout, and so the tensor, alive.
        """
        if not 0 <= block_id < self.num_blocks:
            raise IndexError(f"block_id is {block_id}, the layout has {self.num_blocks} blocks")
        row = self.class_rows[class_id]
        run = self.runs[int(row["first_run"])] if int(row["num_runs"]) == 1 else None
        if run is None or self.device != "cpu" or run["fragment_bytes"] != row["value_bytes"]:
            return None
        address = int(run["base"]) + block_id * int(run["block_step"])
        memory = (ctypes.c_ubyte * int(row["value_bytes"])).from_address(address)
        memory.owner = self  # type: ignore[attr-defined]
        view = memoryview(memory).cast("B")
        return view if self.writable else view.toreadonly()

    @cached_property
    def tiles(self) -> tuple[plan.Table, npt.NDArray[np.int64]]:
        """The kernel's tiles, (num_tiles,) TILE_DTYPE, and where each run's begin."""
        return plan.tile_table(self.runs)


def _class_order(key: tuple[int, Heads]) -> tuple[int, tuple[int, int]]:
    group, heads = key
    return group, heads or (-1, -1)


def _heads_by_group(
    regions: Sequence[Region], head_shard: int | Mapping[int, int | None] | None
) -> dict[int, int | None]:
    """Return the heads per shard of each group, whose regions must hold the same heads."""
    ranges: dict[int, tuple[str, Heads]] = {}
    for region in regions:
        layer, heads = ranges.setdefault(region.group, (region.layer, region.heads))
        if heads != region.heads and heads is not None and region.heads is not None:
            raise LayoutError(
                f"group {region.group} holds heads {heads} in {layer} and {region.heads} in "
                f"{region.layer}; layers of one group hold the same heads"
            )
        if heads is None:
            ranges[region.group] = (region.layer, region.heads)
    by_group = head_shard if isinstance(head_shard, Mapping) else dict.fromkeys(ranges, head_shard)
    return {group: by_group.get(group) for group in ranges}


def _resolve_order(
    regions: Sequence[Region],
    setting: Literal["native", "token_major", "head_major"],
    shard_heads: Mapping[int, int | None],
) -> ValueOrder:
    """Return the order of all values: as set, or the one in which all regions lie."""
    if setting in ("token_major", "head_major"):
        return setting
    if setting != "native":
        raise LayoutError(f"value_order is {setting!r}; use native, token_major or head_major")
    orders: dict[ValueOrder, str] = {}
    for region in regions:
        order = region.native_order(shard_heads[region.group])
        if order is not None:
            orders.setdefault(order, region.layer)
    if len(orders) > 1:
        found = " and ".join(f"{order} in {layer}" for order, layer in sorted(orders.items()))
        raise LayoutError(
            f"value_order 'native' is {found}; set value_order to token_major or head_major"
        )
    return next(iter(orders), "token_major")


def _agree(blocks: Mapping[str, int], num_blocks: int | None = None) -> int:
    """Return the number of blocks, which all tensors and the caller must agree on."""
    if num_blocks is None:
        num_blocks = next(iter(blocks.values()))
    for name, count in blocks.items():
        if count != num_blocks:
            raise LayoutError(
                f"{name} has {count} blocks, the layout {num_blocks}; where an engine's kernels "
                "use smaller blocks, kernel_blocks_per_block says so"
            )
    if num_blocks > MAX_BLOCKS:
        raise LayoutError(f"{num_blocks} blocks do not fit block ids of 32 bits")
    return num_blocks


def _plain_segment(view: TensorView, name: str) -> Strided:
    """Return a block of a plain tensor in the C order of its other dimensions."""
    if not view.shape:
        raise LayoutError(f"{name} has no dimensions; the first counts blocks")
    check_strides(view, name)
    axes = [Axis(*dim, 0) for dim in zip(view.shape[1:], view.strides_bytes[1:], strict=True)]
    return dense_segment(view.ptr, view.strides_bytes[0], view.item_bytes, axes)


def _place(segments: Sequence[tuple[str, Strided]]) -> tuple[list[Strided], int]:
    """Return the segments at their value offsets, and the bytes of the value."""
    placed: list[Strided] = []
    end = 0
    for _, segment in segments:
        offset = -(-end // SEGMENT_ALIGNMENT) * SEGMENT_ALIGNMENT
        placed.append(replace(segment, value_offset=offset))
        end = offset + segment.num_bytes
    return placed, end


def _gaps(placed: Sequence[Strided], zeros_ptr: int) -> list[Strided]:
    """Return the bytes between segments, as copies from a page of zeros that all blocks share."""
    gaps = []
    for segment, following in itertools.pairwise(placed):
        end = segment.value_offset + segment.num_bytes
        gaps.append(Strided(zeros_ptr, 0, end, following.value_offset - end, ()))
    return gaps
