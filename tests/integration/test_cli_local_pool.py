# SPDX-License-Identifier: Apache-2.0
"""The pool that ``kvxfer demo --store mooncake`` makes: it works, and nothing is left of it."""

import subprocess

import pytest
from mooncake_servers import MIB, require_client

from kvxfer.cli import local_pool as pools
from kvxfer.cli.local_pool import local_pool
from kvxfer.errors import StoreError
from kvxfer.stores import Outcome, open_store


@pytest.fixture
def started(monkeypatch):
    """Return the list of server processes that are started."""
    require_client()
    processes, popen = [], subprocess.Popen

    def start(*arguments, **options):
        processes.append(popen(*arguments, **options))
        return processes[-1]

    monkeypatch.setattr(pools.subprocess, "Popen", start)
    return processes


def test_local_pool_keeps_values_until_it_ends(started, tmp_path):
    with local_pool(tmp_path, 32 * MIB) as uri:
        store = open_store(f"{uri}&timeout_s=2")
        assert store.put_from([b"key"], [memoryview(b"value")]) == [Outcome.OK]
        assert store.stats().capacity_bytes == 32 * MIB
        store.close()
        assert [process.poll() for process in started] == [None, None]
    assert None not in [process.returncode for process in started]


def test_local_pool_ends_its_servers_whatever_raises(started, tmp_path):
    with pytest.raises(RuntimeError, match="oops"), local_pool(tmp_path, 32 * MIB):
        raise RuntimeError("oops")
    assert None not in [process.returncode for process in started]


def test_local_pool_says_why_a_server_does_not_start(started, tmp_path):
    with pytest.raises(StoreError, match="did not start"), local_pool(tmp_path, 0):
        pass  # an owner of no memory ends with an error
    assert None not in [process.returncode for process in started]


def test_local_pool_names_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(pools.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(StoreError, match="pip install mooncake"), local_pool(tmp_path, MIB):
        pass
