# SPDX-License-Identifier: Apache-2.0
"""The capacity-only role: a process without an engine that mounts a segment and moves nothing."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from mooncake_servers import HOST, MIB, START_S, free_port, own_role, wait_until

from kvxfer.stores import Outcome, open_store
from kvxfer.stores.mooncake_metrics import read_occupancy

COMMAND = (sys.executable, "-m", "kvxfer.stores.mooncake_owner")


def capacity_bytes(pool):
    return read_occupancy(HOST, pool.master.metrics_port).capacity_bytes


def put_and_get(store, key):
    """Return the outcome of a put, after a look at what a get brings back."""
    (stored,) = store.put_from([key], [memoryview(key * 100)])
    if stored is Outcome.OK:
        target = bytearray(len(key) * 100)
        assert store.get_into([key], [memoryview(target)]) == [Outcome.OK]
        assert target == key * 100
    return stored


def test_an_owner_serves_stores_and_gives_its_segment_back(start, open_on):
    pool = start(0)
    with own_role(pool.master, 32 * MIB) as process:
        assert capacity_bytes(pool) == 32 * MIB
        writer, reader = open_on(pool), open_on(pool)
        assert put_and_get(writer, b"key") is Outcome.OK
        writer.close()
        assert reader.exists([b"key"]) == b"\1"
        process.send_signal(signal.SIGTERM)
        assert process.wait(START_S) == 0
    wait_until(lambda: capacity_bytes(pool) == 0)
    assert reader.exists([b"key"]) == b"\0"


def test_an_owner_mounts_again_when_its_master_is_back(start, open_on):
    pool = start(0)
    with own_role(pool.master, 32 * MIB):
        store = open_on(pool)
        assert put_and_get(store, b"before") is Outcome.OK
        pool.master.kill()
        pool.master.start()
        numbers = iter(range(10_000))
        wait_until(lambda: put_and_get(store, b"%d" % next(numbers)) is Outcome.OK, 60)
        assert capacity_bytes(pool) == 32 * MIB


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("mooncake://127.0.0.1:{port}?segment=0&hostname=h", "an owner of no memory adds nothing"),
        ("mooncake://127.0.0.1:{port}?segment=1MiB&hostname=h", "mooncake_master --rpc_port="),
        ("lmdb:///tmp", "mooncake://"),
    ],
    ids=["nothing", "no_master", "other_store"],
)
def test_an_owner_that_cannot_start_says_why(uri, said):
    found = subprocess.run(
        [*COMMAND, uri.format(port=free_port())], capture_output=True, text=True, timeout=START_S
    )
    assert found.returncode == 1
    assert said in found.stderr
    assert "Traceback" not in found.stderr


def test_stores_of_a_pool_that_its_owner_left_take_nothing(start):
    pool = start(0)
    with own_role(pool.master, 32 * MIB):
        store = open_store(pool.master.uri())
    try:
        wait_until(lambda: capacity_bytes(pool) == 0, 60)
        assert put_and_get(store, b"key") is Outcome.NO_SPACE
    finally:
        store.close()
