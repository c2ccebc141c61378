# SPDX-License-Identifier: Apache-2.0
"""A store's answer about existence as an array that is safe to compute with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import StoreError
from kvxfer.stores.base import Store


def presence_flags(store: Store, keys: Sequence[bytes]) -> NDArray[np.uint8]:
    """Return (n,) uint8, 1 where a key is stored; no keys, no call.

    Raises StoreError for an answer of another length than ``keys``: it belongs to no key.
    """
    if not keys:
        return np.zeros(0, dtype=np.uint8)
    answer = store.exists(keys)
    if len(answer) != len(keys):
        raise StoreError(f"the store answered {len(answer)} of {len(keys)} keys")
    return np.frombuffer(answer, dtype=np.uint8)
