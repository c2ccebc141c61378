# SPDX-License-Identifier: Apache-2.0
"""``kvxfer doctor`` as a user runs it: real vLLM, real stores, a real Mooncake master."""

import http.client
import json
import os
import subprocess
import sys

import pytest
from mooncake_servers import HOST, MIB, require_client, servers

from kvxfer.cli.checkpoint import LlamaShape, write_llama
from kvxfer.cli.deployment import default_transfer
from kvxfer.cli.doctor.pool_memory import allocated_bytes
from kvxfer.stores import Outcome, open_store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    pytest.importorskip("vllm")
    folder = tmp_path_factory.mktemp("model")
    write_llama(folder, LlamaShape(num_kv_heads=4))
    return folder


def config(store, arguments=None, **settings):
    transfer = {**default_transfer(), "kv_connector_extra_config": {"store": store, **settings}}
    return {
        "dtype": "float32",
        "block_size": 32,
        **(arguments or {}),
        "kv_transfer_config": transfer,
    }


def doctor(config, *arguments):
    """Return the exit code, and of what is no OK and no note the checks and texts."""
    command = ["doctor", "--json", "--config", json.dumps(config), *arguments]
    done = subprocess.run(
        [sys.executable, "-m", "kvxfer.cli", *command],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ,
    )
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) <= 2, done.stderr  # of Mooncake's client
    rows = json.loads(done.stdout)
    assert all(row["way_out"] for row in rows if row["status"] in ("fault", "warning"))
    by_check = {}
    for row in rows:
        by_check.setdefault(row["check"], []).append((row["status"], row["text"]))
    bad = {c: found for c, found in by_check.items() if {"fault", "warning"} & set(dict(found))}
    return done.returncode, bad, by_check


def test_doctor_finds_nothing_on_a_healthy_machine(model, tmp_path):
    uri = f"lmdb://{tmp_path}/kv?capacity=64MiB"
    open_store(uri).close()
    status, bad, by_check = doctor(config(uri), "--model", str(model))
    assert (status, bad) == (0, {})
    (group,) = [text for _, text in by_check["model.groups"]]
    assert "full, 4 layers, blocks of 32 tokens; a chunk is 1 value(s) of 131.1 kB" in group
    assert "4.1 MB" in by_check["model.size"][0][1]
    assert "read back, compared and removed" in by_check["lmdb.round_trip"][0][1]


@pytest.mark.parametrize(
    ("check", "words", "arguments", "settings"),
    [
        ("model.store_tp", "cannot be cut", {}, {"store_tp": 3, "value_order": "head_major"}),
        ("model.staging", "cannot hold a value", {}, {"staging_bytes": "128KiB"}),
        ("model.groups", "Error", {"max_model_len": 10**9}, {}),
    ],
    ids=["store_tp", "staging", "vllm_refuses"],
)
def test_doctor_finds_what_a_real_engine_would_refuse(
    model, tmp_path, check, words, arguments, settings
):
    uri = f"lmdb://{tmp_path}/kv?capacity=64MiB"
    status, bad, _ = doctor(config(uri, arguments, **settings), "--model", str(model))
    assert status == 1
    assert set(bad) == {check}
    assert words in bad[check][0][1]


def test_doctor_tries_a_value_in_a_pool(tmp_path):
    require_client()
    with servers(tmp_path, 64 * MIB) as started:
        master = started.master
        uri = f"mooncake://{master.address}?metrics_port={master.metrics_port}&segment=0"
        status, bad, by_check = doctor(config(uri))
        assert (status, bad) == (0, {})
        assert "read back, compared and removed" in by_check["mooncake.round_trip"][0][1]
        started.owners.pop().kill()
    status, bad, _ = doctor(config(uri))
    assert status == 1
    assert set(bad) == {"mooncake.master"}


def test_doctor_finds_a_pool_without_memory(tmp_path):
    require_client()
    with servers(tmp_path, 0) as started:
        master = started.master
        uri = f"mooncake://{master.address}?metrics_port={master.metrics_port}&segment=0"
        status, bad, _ = doctor(config(uri))
    assert status == 1
    assert set(bad) == {"mooncake.segment"}


@pytest.mark.parametrize("num_bytes", [17, 65_537, 131_088, 155_648, 163_840])
def test_values_take_of_a_pool_what_doctor_expects(tmp_path, num_bytes):
    require_client()
    keys = [f"value-{number}".encode() for number in range(3)]
    with servers(tmp_path, 16 * MIB) as started:
        store = open_store(started.master.uri())
        sources = [memoryview(bytes(num_bytes)) for _ in keys]
        assert store.put_from(keys, sources) == [Outcome.OK] * 3
        first, second, third = sorted(addresses(started.master, keys))
        store.close()
    assert (second - first, third - second) == (allocated_bytes(num_bytes),) * 2


def addresses(master, keys):
    """Return where in their segment a master has put values."""
    connection = http.client.HTTPConnection(HOST, master.metrics_port, timeout=10)
    connection.request("GET", "/batch_query_keys?keys=" + ",".join(map(bytes.decode, keys)))
    answer = json.loads(connection.getresponse().read())
    connection.close()
    return [found["values"][0]["buffer_address_"] for found in answer["data"].values()]
