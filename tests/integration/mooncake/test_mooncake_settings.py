# SPDX-License-Identifier: Apache-2.0
"""Settings that only a real master can show to be honoured: place, copies, tenant, metadata."""

from __future__ import annotations

import json
import urllib.request

import pytest
from mooncake_servers import HOST, MIB, free_port

from kvxfer.errors import StoreError
from kvxfer.stores import Outcome

KEYS = [b"kvx1/m/h%d/ff" % number for number in range(8)]
VALUES = [memoryview(b"value")] * len(KEYS)


def segments(pool):
    """Return the endpoint of each segment, by name."""
    url = f"http://{HOST}:{pool.master.metrics_port}/get_segments_detail"
    with urllib.request.urlopen(url, timeout=10) as answer:
        found = json.load(answer)["segments"]
    return {segment["segment_name"]: segment["te_endpoint"] for segment in found}


def places(store, keys):
    """Return the endpoints at which each value lies."""
    with store._link.call() as client:
        found = client._native.batch_get_replica_desc([key.decode() for key in keys])
    return [
        {
            copy.get_memory_descriptor().buffer_descriptor.transport_endpoint
            for copy in found[key.decode()]
        }
        for key in keys
    ]


def test_values_lie_in_the_preferred_segment_and_are_loaded_from_there(start, open_on):
    """With groups and a soft pin, which leave no trace that a client could see."""
    pool = start(16 * MIB)
    pool.add_owner(16 * MIB)
    for name, endpoint in segments(pool).items():
        store = open_on(pool, preferred_segment=name, groups="yes", soft_pin="yes")
        assert store.put_from(KEYS, VALUES) == [Outcome.OK] * len(KEYS)
        assert places(store, KEYS) == [{endpoint}] * len(KEYS)
        targets = [bytearray(5) for _ in KEYS]
        assert store.get_into(KEYS, list(map(memoryview, targets))) == [Outcome.OK] * len(KEYS)
        assert targets == [b"value"] * len(KEYS)
        store.remove(KEYS)


def test_each_value_has_as_many_copies_as_are_asked_for(start, open_on):
    pool = start(16 * MIB)
    pool.add_owner(16 * MIB)
    store = open_on(pool, replicas=2)
    assert store.put_from(KEYS, VALUES) == [Outcome.OK] * len(KEYS)
    assert places(store, KEYS) == [set(segments(pool).values())] * len(KEYS)


@pytest.fixture
def pool_of_tenants(start, tmp_path):
    policy = tmp_path / "tenants.json"
    tenants = [{"name": name, "quota": 8 * MIB} for name in ("red", "blue")]
    policy.write_text(json.dumps({"version": 1, "tenants": tenants}))
    return start(
        flags=["--enable_multi_tenants=true", f"--tenant_quota_connector_uri={policy}"],
    )


def test_tenants_of_one_master_do_not_meet(pool_of_tenants, open_on):
    red, blue = (open_on(pool_of_tenants, tenant=name) for name in ("red", "blue"))
    assert red.put_from([b"k"], [memoryview(b"red")]) == [Outcome.OK]
    assert blue.exists([b"k"]) == b"\0"
    assert blue.put_from([b"k"], [memoryview(b"blue")]) == [Outcome.OK]
    assert blue.remove_prefix(b"") == 1
    target = bytearray(3)
    assert red.get_into([b"k"], [memoryview(target)]) == [Outcome.OK]
    assert target == b"red"


def test_a_tenant_that_the_master_does_not_know_is_told(pool_of_tenants, open_on):
    with pytest.raises(StoreError, match="has no tenant 'green': set tenant"):
        open_on(pool_of_tenants, tenant="green")


def test_a_store_finds_its_peers_by_a_metadata_server(start, open_on):
    port = free_port()
    pool = start(
        0,
        flags=[
            "--enable_http_metadata_server=true",
            f"--http_metadata_server_port={port}",
            f"--http_metadata_server_host={HOST}",
        ],
    )
    metadata = f"http://{HOST}:{port}/metadata"
    owner = open_on(pool, metadata=metadata, segment="16MiB", hostname=HOST)
    reader = open_on(pool, metadata=metadata)
    assert owner.put_from([b"k"], [memoryview(b"value")]) == [Outcome.OK]
    target = bytearray(5)
    assert reader.get_into([b"k"], [memoryview(target)]) == [Outcome.OK]
    assert target == b"value"


def test_a_buffer_that_overlaps_a_registered_one_is_refused_and_a_part_of_one_is_not(
    start, open_on
):
    store = open_on(start())
    buffer = memoryview(bytearray(4 * MIB))
    store.register(buffer[: 2 * MIB])
    store.register(buffer[MIB : 2 * MIB])
    with pytest.raises(StoreError, match="it may overlap one that is registered"):
        store.register(buffer[MIB : 3 * MIB])
    store.register(buffer[2 * MIB :])
