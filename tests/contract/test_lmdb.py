# SPDX-License-Identifier: Apache-2.0
"""The LMDB store keeps the contract."""

from __future__ import annotations

from pathlib import Path

from store_contract import StoreContract

from kvxfer.stores import Store, open_store


class TestLmdbStore(StoreContract):
    def make_store(self, folder: Path) -> Store:
        return open_store(f"lmdb://{folder}/store?capacity=48MiB")
