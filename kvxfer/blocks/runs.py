# SPDX-License-Identifier: Apache-2.0
"""Strided correspondences between a block and its value, merged into as few runs as strides allow.

A `Strided` says that bytes lie on a grid of any number of axes, with one step per axis in the page
and one in the value. Merging keeps the set of byte pairs and shrinks the grid:

* an axis of one entry goes away;
* the innermost axis joins the fragment where its steps equal the fragment on both sides (64 rows
  of 132 bytes become one fragment of 8,448);
* two neighbouring axes become one where the outer steps over exactly what the inner covers;
* segments of one shape at constant distances on both sides become one grid with an axis more (the
  layers of one allocation).

What has more than two axes after that is split along its shortest ones: a `kvx_run` has two.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

MAX_AXES = 2


class Axis(NamedTuple):
    """One axis of a grid of fragments: entries, and bytes from one to the next on either side."""

    size: int
    page_step: int
    value_step: int


@dataclass(frozen=True, slots=True)
class Strided:
    """Fragments on a grid; ``axes`` from the outermost in, in the order of the value."""

    ptr: int
    """Address of the first fragment of block 0."""
    block_step: int
    value_offset: int
    fragment_bytes: int
    axes: tuple[Axis, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes that one block moves."""
        total = self.fragment_bytes
        for axis in self.axes:
            total *= axis.size
        return total


def merge_segments(segments: Iterable[Strided]) -> list[Strided]:
    """Return runs of at most two axes that move the same byte pairs, in the order of the value."""
    merged = [merge_axes(segment) for segment in segments if segment.num_bytes > 0]
    joined = itertools.chain.from_iterable(_join_group(group) for group in _groups(merged))
    return [run for strided in joined for run in _split_axes(strided)]


def merge_axes(strided: Strided) -> Strided:
    """Return the same byte pairs with the longest fragment and the fewest axes."""
    fragment_bytes = strided.fragment_bytes
    axes: list[Axis] = []
    for axis in reversed(strided.axes):
        if axis.size == 1:
            continue
        if not axes and axis.page_step == axis.value_step == fragment_bytes:
            fragment_bytes *= axis.size
        elif axes and _continues(axis, axes[-1]):
            inner = axes.pop()
            axes.append(inner._replace(size=axis.size * inner.size))
        else:
            axes.append(axis)
    return replace(strided, fragment_bytes=fragment_bytes, axes=tuple(reversed(axes)))


def _continues(outer: Axis, inner: Axis) -> bool:
    """Whether one step of ``outer`` equals one more step past the end of ``inner``."""
    return (
        outer.page_step == inner.size * inner.page_step
        and outer.value_step == inner.size * inner.value_step
    )


def _groups(segments: Sequence[Strided]) -> Iterator[list[Strided]]:
    """Cut the sequence where shape or distance changes."""
    group: list[Strided] = []
    for segment in segments:
        if group and not _extends(group, segment):
            yield group
            group = []
        group.append(segment)
    if group:
        yield group


def _extends(group: Sequence[Strided], segment: Strided) -> bool:
    """Whether ``segment`` has the group's shape and follows at the group's distance."""
    last = group[-1]
    if _shape(last) != _shape(segment):
        return False
    return len(group) == 1 or _distance(group[0], group[1]) == _distance(last, segment)


def _shape(strided: Strided) -> tuple[int, int, tuple[Axis, ...]]:
    return strided.block_step, strided.fragment_bytes, strided.axes


def _distance(first: Strided, second: Strided) -> tuple[int, int]:
    return second.ptr - first.ptr, second.value_offset - first.value_offset


def _join_group(group: list[Strided]) -> list[Strided]:
    """Return the group as one grid with an axis more, or as it was if that takes too many axes."""
    if len(group) == 1:
        return group
    outer = Axis(len(group), *_distance(group[0], group[1]))
    joined = merge_axes(replace(group[0], axes=(outer, *group[0].axes)))
    return [joined] if len(joined.axes) <= max(MAX_AXES, len(group[0].axes)) else group


def _split_axes(strided: Strided) -> list[Strided]:
    """Return the grid as grids of at most two axes, cut along the shortest axis first."""
    if len(strided.axes) <= MAX_AXES:
        return [strided]
    shortest = min(range(len(strided.axes)), key=lambda idx: strided.axes[idx].size)
    axis = strided.axes[shortest]
    rest = strided.axes[:shortest] + strided.axes[shortest + 1 :]
    return [
        piece
        for entry in range(axis.size)
        for piece in _split_axes(
            replace(
                strided,
                ptr=strided.ptr + entry * axis.page_step,
                value_offset=strided.value_offset + entry * axis.value_step,
                axes=rest,
            )
        )
    ]
