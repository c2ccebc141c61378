# SPDX-License-Identifier: Apache-2.0
"""What the start-up check says of real servers that cannot serve, and the segment of one's own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from mooncake_servers import HOST, MIB, TIMEOUT_S, binary, free_port

from kvxfer.errors import ConfigError, StoreError
from kvxfer.stores import Outcome, open_store


def test_a_master_that_is_not_there_is_named_with_the_line_that_starts_it():
    port = free_port()
    with pytest.raises(StoreError, match=f"mooncake_master --rpc_port={port}"):
        open_store(f"mooncake://{HOST}:{port}?segment=0&hostname={HOST}")


def test_a_metadata_server_that_is_not_there_is_named(start):
    pool = start(0)
    with pytest.raises(StoreError, match=r"metadata server http://127.0.0.1:1/metadata: start it"):
        open_store(pool.master.uri(metadata="http://127.0.0.1:1/metadata"))


def test_a_metadata_string_that_is_none_is_refused_before_anything_starts(start):
    pool = start(0)
    with pytest.raises(ConfigError, match="write P2PHANDSHAKE"):
        open_store(pool.master.uri(metadata="p2phandshake"))


def test_a_pool_without_memory_is_told_from_a_full_one(start):
    pool = start(0)
    with pytest.raises(StoreError, match="no segment is mounted"):
        open_store(pool.master.uri())


def test_a_port_that_is_no_master_is_told(start):
    pool = start(0)
    uri = pool.master.uri().replace(pool.master.address, f"{HOST}:{pool.master.metrics_port}")
    with pytest.raises(StoreError, match="check that it is a mooncake_master of the same version"):
        open_store(uri)


def test_a_master_of_another_version_is_refused(start, tmp_path, monkeypatch, capfd):
    """The client compares versions of the protocol between them, and says which they are."""
    monkeypatch.setattr(
        "mooncake_servers.binary", lambda name: binary_of_version(tmp_path, b"1.9.0")
    )
    pool = start(0)
    with pytest.raises(StoreError, match="check that it is a mooncake_master of the same version"):
        open_store(pool.master.uri())
    assert "Version mismatch: server=1.9.0" in capfd.readouterr().err


def binary_of_version(folder, version):
    """Return a copy of the master that says it has another version; beside it its libraries."""
    original = binary("mooncake_master")
    for libraries in original.parents[1].glob("mooncake*.libs"):
        (folder / libraries.name).symlink_to(libraries)
    copy = folder / "mooncake" / original.name
    copy.parent.mkdir()
    content, own_version = original.read_bytes(), b"\0" + b"2.0.0" + b"\0"
    assert content.count(own_version) == 1
    copy.write_bytes(content.replace(own_version, b"\0" + version + b"\0"))
    copy.chmod(0o755)
    return copy


def test_a_protocol_that_the_build_lacks_is_told(start):
    pool = start(0)
    with pytest.raises(StoreError, match="this build knows protocol=bogus"):
        open_store(pool.master.uri(protocol="bogus"))


def test_a_segment_of_its_own_serves_and_leaves_with_the_store(start, open_on, tmp_path):
    """The whole way of an embedded engine, with the JSON of the in-tree connector."""
    pool = start(0)
    path = tmp_path / "mooncake.json"
    fields = {"metadata_server": "P2PHANDSHAKE", "protocol": "tcp", "mode": "embedded"}
    fields |= {"master_server_address": pool.master.address, "device_name": ""}
    path.write_text(json.dumps(fields | {"global_segment_size": "32MB", "local_buffer_size": MIB}))
    query = f"config={path}&metrics_port={pool.master.metrics_port}&timeout_s={TIMEOUT_S}"
    store = open_store(f"mooncake://?{query}")
    assert store.put_from([b"k"], [memoryview(b"value")]) == [Outcome.OK]
    target = bytearray(5)
    assert store.get_into([b"k"], [memoryview(target)]) == [Outcome.OK]
    assert target == b"value"
    assert store.stats().capacity_bytes == 32 * MIB
    store.close()
    assert store.stats().capacity_bytes == 32 * MIB
    with pytest.raises(StoreError, match="no segment is mounted"):
        open_store(pool.master.uri())


def test_closing_with_a_dead_master_is_bounded(start):
    pool = start()
    store = open_store(pool.master.uri())
    pool.master.kill()
    store.exists([b"k"])
    store.close()
    assert store.exists([b"k"]) == b"\0"
    assert store.put_from([b"k"], [memoryview(b"1")]) == [Outcome.CLOSED]


LIBRARY_PROGRAM = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name == "mooncake.store":
            raise ImportError("libibverbs.so.1: cannot open shared object file: No such file")
sys.meta_path.insert(0, Hidden())
from kvxfer.stores import open_store
open_store(sys.argv[1])
"""


def test_a_missing_library_is_named_with_the_original_error(start):
    pool = start(0)
    found = subprocess.run(
        [sys.executable, "-c", LIBRARY_PROGRAM, pool.master.uri()], capture_output=True, text=True
    )
    assert "libibverbs.so.1: cannot open shared object file" in found.stderr
    assert "apt-get install -y libibverbs1 librdmacm1 libnuma1 libcurl4" in found.stderr
