# SPDX-License-Identifier: Apache-2.0
"""``kvxfer store`` beside a process that uses the store, and over a real Mooncake master."""

import json
import subprocess
import sys

import pytest
from mooncake_servers import MIB, require_client, servers

from kvxfer.keys import key_prefix
from kvxfer.stores import open_store

KEYS = [
    key_prefix("default", model, "d" * 32, "9" * 16, 0, None) + b"%064x" % idx
    for model in ("llama+x", "qwen")
    for idx in range(70)
]
VALUE_BYTES = 1000


def run(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", "kvxfer.cli", "store", *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=60,
    )
    return done.returncode, done.stdout, done.stderr


def fill(store):
    outcomes = store.put_from(KEYS, [memoryview(bytes(VALUE_BYTES)) for _ in KEYS])
    assert all(outcome.stored for outcome in outcomes)


def counts(stdout):
    return {row["model"]: (row["values"], row["bytes"]) for row in json.loads(stdout)}


def test_store_commands_work_beside_a_process_that_has_the_store_open(tmp_path):
    uri = f"lmdb://{tmp_path}/store?capacity=16MiB"
    store = open_store(uri)
    fill(store)
    status, stdout, stderr = run("list", "--store", uri, "--json")
    assert status == 0, stderr
    assert {model: num for model, (num, _) in counts(stdout).items()} == {"llama+x": 70, "qwen": 70}
    status, stdout, stderr = run("purge", "--store", uri, "--prefix", "default/qwen", "--yes")
    assert status == 0, stderr
    assert list(store.exists(KEYS)) == [1] * 70 + [0] * 70
    fill(store)  # and it goes on
    store.close()


@pytest.fixture
def pool(tmp_path):
    """Return the URI of a filled pool, as a user writes it: without a word about segments."""
    require_client()
    with servers(tmp_path, 64 * MIB) as started:
        master = started.master
        store = open_store(master.uri())
        fill(store)
        store.close()
        yield f"mooncake://{master.address}?metrics_port={master.metrics_port}"


def test_store_commands_work_on_a_mooncake_pool(pool):
    status, stdout, stderr = run("list", "--store", pool, "--json")
    assert status == 0, stderr
    expected = (70, 70 * VALUE_BYTES)
    assert counts(stdout) == {"llama+x": expected, "qwen": expected}
    status, stdout, _ = run("size", "--store", pool, "--json", "--prefix", "default/qwen")
    assert status == 0
    numbers = json.loads(stdout)
    assert (numbers["values"], numbers["prefix"]["values"]) == (140, 70)
    assert numbers["capacity_bytes"] == 64 * MIB  # no segment of the command's own
    status, stdout, stderr = run("purge", "--store", pool, "--prefix", "default/qwen", "--yes")
    assert status == 0, stderr
    status, stdout, _ = run("list", "--store", pool, "--json")
    assert counts(stdout) == {"llama+x": expected}


def test_store_commands_say_where_a_master_does_not_list():
    status, _, stderr = run("list", "--store", "mooncake://127.0.0.1:1?metrics_port=1")
    assert status == 1
    assert "does not list its keys at 127.0.0.1:1" in stderr
    assert "Traceback" not in stderr
