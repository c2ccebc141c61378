# SPDX-License-Identifier: Apache-2.0
"""Rivals that ``kvxfer bench`` measures where they are installed: torch's copies, vLLM's search."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Run = Callable[[], object]
Bytes = NDArray[np.uint8]

logger = logging.getLogger(__name__)


def torch_copies(
    caches: Sequence[Bytes], block_ids: NDArray[np.int64], rows: Sequence[Bytes]
) -> tuple[dict[str, Run], dict[str, Run]]:
    """Return torch's gather and scatter by name, a call a layer on one thread; empty without torch.

    ``caches`` (blocks, fragment_bytes) and ``rows`` (n, fragment_bytes) of each layer;
    ``block_ids`` (n,).
    """
    try:
        import torch  # noqa: PLC0415  # only to measure it
    except ImportError:
        return {}, {}
    layers = [(torch.from_numpy(a), torch.from_numpy(b)) for a, b in zip(caches, rows, strict=True)]
    ids = torch.from_numpy(block_ids)

    def gather() -> None:
        torch.set_num_threads(1)
        for cache, values in layers:
            torch.index_select(cache, 0, ids, out=values)

    def scatter() -> None:
        torch.set_num_threads(1)
        for cache, values in layers:
            cache.index_copy_(0, ids, values)

    return {"torch": gather}, {"torch": scatter}


def in_tree_search(
    num_tokens: int, block_tokens: int, hashes: Sequence[bytes], flags: Sequence[int]
) -> dict[str, Run]:
    """Return the search of vLLM's in-tree MooncakeStoreConnector by name; empty without vLLM.

    One group of full attention. As in its lookup, the set of what is stored is made of the store's
    answers, ``flags`` (n,) with 1 for what is there; keys are neither made nor asked for.
    """
    try:
        search = _in_tree_search(block_tokens, hashes, flags)
        search(block_tokens)
    except (ImportError, AttributeError, TypeError) as error:  # no vLLM, or one of other insides
        logger.info("vLLM's in-tree connector is left out: %s", error)
        return {}
    return {"vLLM in-tree": lambda: search(num_tokens)}


def _in_tree_search(
    block_tokens: int, hashes: Sequence[bytes], flags: Sequence[int]
) -> Callable[[int], object]:
    import torch  # noqa: PLC0415
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import (  # noqa: PLC0415
        coordinator as in_tree,
    )
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec  # noqa: PLC0415

    spec = FullAttentionSpec(
        block_size=block_tokens, num_kv_heads=1, head_size=128, dtype=torch.bfloat16
    )
    groups = [KVCacheGroupSpec(["layer"], spec)]
    coordinator: Any = in_tree.MooncakeStoreCoordinator(groups, block_tokens, block_tokens)

    def search(num_tokens: int) -> object:
        stored = {(0, each) for each, flag in zip(hashes, flags, strict=True) if flag}
        pool = in_tree.ExternalCachedBlockPool(block_tokens, stored)
        return coordinator.find_longest_cache_hit(hashes, num_tokens, pool)[1]

    return search
