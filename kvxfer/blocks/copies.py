# SPDX-License-Identifier: Apache-2.0
"""`gather` and `scatter`: copies between blocks and rows of values, wherever the tensors are.

For layouts with a single class. `host.gather_items` and `cuda.CudaCopies` serve any layout.
"""

from __future__ import annotations

from typing import Any

from kvxfer.blocks import cuda, host, plan, rows
from kvxfer.blocks.layout import BlockLayout
from kvxfer.blocks.tensors import TensorView
from kvxfer.errors import LayoutError


def gather(
    layout: BlockLayout, block_ids: Any, out: Any, mask: Any = None, *, stream: Any = None
) -> None:
    """Copy blocks into rows: ``out[i]`` becomes the value of block ``block_ids[i]``.

    ``block_ids`` (n,) integers in [0, num_blocks), repeats allowed; ``out`` (n, value_bytes)
    uint8, C-contiguous; ``mask`` (n,) bool or 0/1, where rows that it leaves out stay as they are
    and their ids are not looked at. Ids and mask are in host memory. Raises ``LayoutError`` for
    what does not fit, ``IndexError`` for an id outside the pool, before any byte moves.

    Tensors on the CPU: ``out`` is NumPy or torch, and complete on return.

    Tensors on a GPU: ``out`` is a torch tensor on the same device, or in pinned host memory. On
    return the copy is in the queue of ``stream`` (a ``torch.cuda.Stream`` of that device; None for
    torch's current one), behind what was there, and may not have run. ``block_ids`` and ``mask``
    may be changed at once; the layout, and an ``out`` in pinned memory, have to be kept until the
    stream has passed the copy. Raises ``UnsupportedError`` where CuPy is not installed.
    """
    items, view = rows.items_of_rows(layout, block_ids, out, mask, "out")
    if not view.writable:
        raise LayoutError("out is read-only")
    _copy(layout, items, view, "out", True, stream)


def scatter(
    layout: BlockLayout, block_ids: Any, source: Any, mask: Any = None, *, stream: Any = None
) -> None:
    """Copy rows into blocks: block ``block_ids[i]`` gets the value ``source[i]``.

    The reverse of `gather`, with the same arguments; complete on return on the CPU, in the queue
    of ``stream`` on a GPU. Nothing but the blocks' own bytes is written: not the padding of a
    page, not what else lies between blocks. Two kept rows for one block are a ``LayoutError``,
    since their order would decide.
    """
    items, view = rows.items_of_rows(layout, block_ids, source, mask, "source")
    rows.check_distinct(items, layout.num_blocks)
    rows.check_writable(layout)
    _copy(layout, items, view, "source", False, stream)


def _copy(
    layout: BlockLayout,
    items: plan.Table,
    view: TensorView,
    name: str,
    to_value: bool,
    stream: Any,
) -> None:
    """Send the job where the layout's tensors are."""
    if layout.device.startswith("cuda"):
        copies = cuda.copies_of(layout)
        run = copies.gather_items if to_value else copies.scatter_items
        run(items, view.owner, stream=stream)
        return
    if stream is not None:
        raise LayoutError(f"stream is for CUDA tensors; the layout's are on {layout.device}")
    if view.device != "cpu":
        raise LayoutError(f"{name} is on {view.device}, the layout's tensors on {layout.device}")
    (host.gather_items if to_value else host.scatter_items)(layout, items)
