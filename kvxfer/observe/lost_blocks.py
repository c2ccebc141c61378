# SPDX-License-Identifier: Apache-2.0
"""Which blocks have lost a value, for KV events; worker side."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from kvxfer.keys import KeySpace

MAX_BLOCKS = 65_536
"""Blocks that wait to be told; those beyond are not."""


class LostBlocks:
    """Turns keys whose values are gone into blocks, and keeps those for the next report.

    A block that lost one value, of whichever rank, can hit no more. Keys of other models are
    passed over. ``note`` may be called by any thread.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._lock = threading.Lock()
        self._groups: dict[bytes, int] = {}
        self._blocks: set[tuple[int, bytes]] = set()  # guarded by _lock

    def know(self, spaces: Iterable[Sequence[KeySpace]]) -> None:
        """Learn which keys are of which cache group, by all that comes before stage and shard."""
        groups = {_group_part(s.prefix): s.group for each in spaces for s in each}
        self._groups = self._groups | groups

    def note(self, keys: Sequence[bytes]) -> None:
        """Take keys that are gone."""
        blocks = {block for key in keys if (block := self._block(key)) is not None}
        with self._lock:
            if len(self._blocks) + len(blocks) <= self._max_blocks:
                self._blocks |= blocks

    def take(self) -> frozenset[tuple[int, bytes]]:
        """Return and forget (cache group, block hash) of each block."""
        if not self._blocks:
            return frozenset()
        with self._lock:
            blocks, self._blocks = frozenset(self._blocks), set()
        return blocks

    def _block(self, key: bytes) -> tuple[int, bytes] | None:
        prefix, slash, digits = key.rpartition(b"/")
        group = self._groups.get(_group_part(prefix + slash))
        if group is None:
            return None
        try:
            return group, bytes.fromhex(digits.decode())
        except ValueError:  # a digest beside a value, say: the value goes with it or soon
            return None


def _group_part(prefix: bytes) -> bytes:
    """Return a key prefix without the stage and the shard that end it."""
    return prefix.rsplit(b"/", 3)[0]
