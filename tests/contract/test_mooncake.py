# SPDX-License-Identifier: Apache-2.0
"""The Mooncake store keeps the contract, over a real master and a segment in another process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from mooncake_servers import MIB, Servers, require_client, servers
from parts_contract import PartsContract, cache
from store_contract import StoreContract

from kvxfer.stores import Store, open_store

SEGMENT_BYTES = 96 * MIB


@pytest.fixture(scope="module")
def pool(tmp_path_factory) -> Iterator[Servers]:
    require_client()
    with servers(tmp_path_factory.mktemp("mooncake"), SEGMENT_BYTES) as started:
        yield started


@pytest.fixture(scope="module")
def shared_store(pool: Servers) -> Iterator[Store]:
    store = open_store(pool.master.uri())
    yield store
    store.close()


__all__ = ["cache"]


class TestMooncakeStore(PartsContract, StoreContract):
    NEED_THEIR_OWN = ("close", "stats_count")
    """Tests that end a store or count from 0; the others share one, since to end one takes 1 s."""

    @pytest.fixture
    def store(self, request, pool: Servers, shared_store: Store) -> Iterator[Store]:
        shared_store.remove_prefix(b"")
        if not any(word in request.node.name for word in self.NEED_THEIR_OWN):
            yield shared_store
            return
        store = open_store(pool.master.uri())
        yield store
        store.close()
