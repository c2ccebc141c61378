# SPDX-License-Identifier: Apache-2.0
"""Servers of a test's own, since these tests kill them."""

from __future__ import annotations

import contextlib

import pytest
from mooncake_servers import MIB, require_client, servers

from kvxfer.stores import open_store


@pytest.fixture(autouse=True, scope="session")
def bounded_client():
    require_client()


@pytest.fixture
def start(tmp_path):
    """Return a function that starts servers: ``start(segment_bytes=..., lease_ms=...)``."""
    with contextlib.ExitStack() as stack:
        yield lambda segment_bytes=96 * MIB, **flags: stack.enter_context(
            servers(tmp_path, segment_bytes, **flags)
        )


@pytest.fixture
def open_on():
    """Return a function that opens a store on a pool; all are closed at the end."""
    with contextlib.ExitStack() as stack:

        def open_on(pool, **options):
            store = open_store(pool.master.uri(**options))
            stack.callback(store.close)
            return store

        yield open_on
