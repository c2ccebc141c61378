# SPDX-License-Identifier: Apache-2.0
"""A sequence of block hashes that lie back to back in one buffer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias, overload

Buffer: TypeAlias = bytes | bytearray | memoryview


class PackedHashes(Sequence[bytes]):
    """Hashes of one width in one buffer; an item is copied out only when it is asked for.

    ``buffer`` is a read-only view of ``len(self) * width`` bytes: key building works on it
    without splitting it. The view keeps its owner alive, a received message for instance, so
    hashes that outlive a lookup hold that memory.
    """

    __slots__ = ("_num_hashes", "buffer", "width")

    def __init__(self, buffer: Buffer, width: int) -> None:
        """View ``buffer``, C-contiguous bytes, as hashes of ``width`` bytes.

        Raises ``ValueError`` unless it holds a whole number of them; a width of 0 is for an
        empty buffer.
        """
        view = memoryview(buffer).toreadonly().cast("B")
        if width < 0 or (view.nbytes % width if width else view.nbytes):
            raise ValueError(f"{view.nbytes} bytes hold no whole number of {width}-byte hashes")
        self.buffer = view
        self.width = width
        self._num_hashes = view.nbytes // width if width else 0

    @classmethod
    def pack(cls, hashes: Sequence[bytes]) -> PackedHashes:
        """Join ``hashes``, all as wide as the first; packed ones are returned as they are.

        Raises ``ValueError`` where the total shows that widths differ. Widths are not compared
        one by one: that would cost more than the join.
        """
        if isinstance(hashes, cls):
            return hashes
        width = len(hashes[0]) if len(hashes) else 0
        joined = b"".join(hashes)
        if len(joined) != width * len(hashes):
            raise ValueError(f"{len(hashes)} hashes of {len(joined)} bytes differ in width")
        return cls(joined, width)

    def __len__(self) -> int:
        return self._num_hashes

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> PackedHashes: ...
    def __getitem__(self, index: int | slice) -> bytes | PackedHashes:
        """Return one hash as bytes, or a slice: a view for a step of 1, else a copy."""
        if isinstance(index, slice):
            return self._slice(index)
        position = index + self._num_hashes if index < 0 else index
        if not 0 <= position < self._num_hashes:
            raise IndexError(f"hash {index} of {self._num_hashes}")
        start = position * self.width
        return self.buffer[start : start + self.width].tobytes()

    def __iter__(self) -> Iterator[bytes]:
        width = self.width
        for start in range(0, self.buffer.nbytes, width or 1):
            yield self.buffer[start : start + width].tobytes()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PackedHashes):
            return NotImplemented
        return len(self) == len(other) and self.buffer == other.buffer

    __hash__ = None  # type: ignore[assignment]  # compares by content, like a list

    def __repr__(self) -> str:
        return f"PackedHashes({self._num_hashes} of {self.width} bytes)"

    def _slice(self, index: slice) -> PackedHashes:
        positions = range(self._num_hashes)[index]
        if positions.step != 1:
            return PackedHashes(b"".join(self[position] for position in positions), self.width)
        start, stop = positions.start * self.width, positions.stop * self.width
        return PackedHashes(self.buffer[start : max(start, stop)], self.width)
