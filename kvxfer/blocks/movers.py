# SPDX-License-Identifier: Apache-2.0
"""Between blocks and staging slots: the face of it, and the way on a CPU.

``cuda_mover`` is the way on a GPU. The transfer threads call a mover; the worker makes it.
"""

from __future__ import annotations

from typing import Any, Protocol

from kvxfer.blocks import plan
from kvxfer.blocks.host import gather_items, scatter_items
from kvxfer.blocks.layout import BlockLayout
from kvxfer.blocks.staging import Slot


class Packed(Protocol):
    """A pack that has read its blocks; its values may still be on their way to the slot."""

    def wait(self) -> None:
        """Return once the values lie in the slot. Owed once, before the slot is given back."""
        ...


class Mover(Protocol):
    """Moves values between the blocks of one layout and the slots of one staging pool.

    Any thread may call it, as many at a time as the mover was made for. Items are ITEM_DTYPE with
    addresses in the slot; they and ``num_bytes``, the slot's bytes in use, are read before a call
    returns. ``after`` is a `mark`: what the engine had queued by then comes before the copy.
    """

    def attach_thread(self) -> None:
        """Prepare the calling thread for copies; owed once by every thread, before the first."""
        ...

    def mark(self) -> Any:
        """Return where the engine's queue stands now; called in the engine's own thread."""
        ...

    def pack(self, items: plan.Table, slot: Slot, num_bytes: int, after: Any) -> Packed:
        """Copy blocks into the slot; return once no block is read any more."""
        ...

    def unpack(self, items: plan.Table, slot: Slot, num_bytes: int, after: Any) -> None:
        """Copy the slot into blocks; return once they are written and the slot is read."""
        ...

    def close(self) -> None:
        """Give back what was registered; no call may be under way. Idempotent."""
        ...


class HostMover:
    """Copies on the calling thread, without the GIL; complete on return."""

    def __init__(self, layout: BlockLayout) -> None:
        self._layout = layout

    def attach_thread(self) -> None:
        """Nothing to prepare."""

    def mark(self) -> None:
        """Return None: on a CPU a forward pass has ended when vLLM calls a connector."""

    def pack(self, items: plan.Table, slot: Slot, num_bytes: int, after: Any) -> Packed:
        """Gather; see `Mover`."""
        gather_items(self._layout, items)
        return _IN_SLOT

    def unpack(self, items: plan.Table, slot: Slot, num_bytes: int, after: Any) -> None:
        """Scatter; see `Mover`."""
        scatter_items(self._layout, items)

    def close(self) -> None:
        """Nothing to give back."""


class _InSlot:
    def wait(self) -> None:
        """The values lie in the slot already."""


_IN_SLOT = _InSlot()
