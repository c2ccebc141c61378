# SPDX-License-Identifier: Apache-2.0
"""Keep and share KV cache outside the accelerator.

vLLM loads ``kvxfer.connector``. This module is the face for direct import, and needs neither
vLLM nor torch:

    open_store(uri)                  a store: batched exists, get_into, put_from
    BlockLayout, Region              where blocks lie in tensors, and in values
    gather, scatter                  masked copies between blocks and contiguous values; on a GPU
                                     they are queued on a stream, on a CPU complete on return
    Coordinator, CacheGroup          how much of a prompt a store can serve
"""

from importlib.metadata import version

from kvxfer.blocks import BlockLayout, Region, gather, scatter
from kvxfer.errors import (
    ConfigError,
    KvxferError,
    LayoutError,
    ProtocolError,
    StoreError,
    UnsupportedError,
)
from kvxfer.hits import CacheGroup, Coordinator
from kvxfer.stores import Outcome, Store, open_store

__version__ = version("kvxfer")

__all__ = [
    "BlockLayout",
    "CacheGroup",
    "ConfigError",
    "Coordinator",
    "KvxferError",
    "LayoutError",
    "Outcome",
    "ProtocolError",
    "Region",
    "Store",
    "StoreError",
    "UnsupportedError",
    "gather",
    "open_store",
    "scatter",
]
