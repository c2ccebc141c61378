# SPDX-License-Identifier: Apache-2.0
import json

import pytest
from typer.testing import CliRunner

from kvxfer.cli.app import app
from kvxfer.cli.store_contents import GroupName, read_contents, whole_prefix
from kvxfer.keys import key_prefix
from kvxfer.stores import open_store
from kvxfer.stores.base import StoredValue

DIGEST, GROUP = "d" * 32, "9" * 16


def keys_of(model, num_values, *, cache_prefix="default", heads=(0, 8)):
    start = key_prefix(cache_prefix, model, DIGEST, GROUP, 0, heads)
    return [start + b"%064x" % idx for idx in range(num_values)]


@pytest.fixture
def uri(tmp_path):
    """Return the URI of a store with two models, a second prefix, and a key of somebody else."""
    uri = f"lmdb://{tmp_path}/store?capacity=16MiB"
    store = open_store(uri)
    keys = [
        *keys_of("llama", 3),
        *keys_of("llama", 3, heads=(8, 16)),
        *keys_of("qwen", 2),
        *keys_of("llama", 1, cache_prefix="default2"),
        b"foreign",
    ]
    store.put_from(keys, [memoryview(bytes(10_000)) for _ in keys])
    store.close()
    return uri


def run(*arguments, answer=None):
    return CliRunner().invoke(app, ["store", *arguments], input=answer, env={"COLUMNS": "140"})


def listed(uri, *arguments):
    result = run("list", "--store", uri, "--json", *arguments)
    assert result.exit_code == 0, result.output
    return {(row["cache_prefix"], row["model"]): row for row in json.loads(result.stdout)}


def test_list_counts_values_and_bytes_by_group(uri):
    rows = listed(uri)
    assert set(rows) == {("default", "llama"), ("default", "qwen"), ("default2", "llama")}
    llama = rows["default", "llama"]
    assert (llama["digest"], llama["group"]) == (DIGEST, GROUP)
    assert (llama["values"], llama["shards"]) == (6, ["p0/h0-8", "p0/h8-16"])
    assert 60_000 < llama["bytes"] < 90_000


def test_list_shows_a_table(uri):
    result = run("list", "--store", uri)
    assert result.exit_code == 0
    for word in ("cache prefix", "llama", "qwen", DIGEST[:12]):
        assert word in result.stdout


@pytest.mark.parametrize("prefix", ["default", "default/", "kvx1/default", "/default/"])
def test_list_takes_whole_parts_of_a_prefix(uri, prefix):
    assert set(listed(uri, "--prefix", prefix)) == {("default", "llama"), ("default", "qwen")}


def test_list_says_where_nothing_is_stored(uri):
    result = run("list", "--store", uri, "--prefix", "other")
    assert (result.exit_code, result.stdout) == (0, "nothing is stored under other\n")


def test_size_says_how_full_the_store_is(uri):
    numbers = json.loads(run("size", "--store", uri, "--json", "--prefix", "default/qwen").stdout)
    assert (numbers["values"], numbers["capacity_bytes"]) == (10, 16 << 20)
    assert 100_000 < numbers["used_bytes"] < 150_000
    assert numbers["prefix"]["values"] == 2
    shown = run("size", "--store", uri, "--prefix", "default/qwen").stdout
    assert "10 values" in shown
    assert "under default/qwen: 2 values" in shown


@pytest.mark.parametrize("answer", ["n\n", "\n", ""], ids=["no", "default", "no_terminal"])
def test_purge_that_is_not_confirmed_removes_nothing(uri, answer):
    result = run("purge", "--store", uri, "--prefix", "default/qwen", answer=answer)
    assert result.exit_code == 1
    assert "Remove 2 values" in result.stdout
    assert len(listed(uri)) == 3


def test_purge_removes_what_it_showed_and_nothing_else(uri):
    result = run("purge", "--store", uri, "--prefix", "default/llama", answer="y\n")
    assert result.exit_code == 0
    assert "6 entries removed" in result.stdout
    assert set(listed(uri)) == {("default", "qwen"), ("default2", "llama")}


def test_purge_of_everything_leaves_keys_that_are_not_ours(uri):
    result = run("purge", "--store", uri, "--prefix", "", "--yes", "--json")
    assert json.loads(result.stdout) == {"prefix": "kvx1/", "removed": 9}
    store = open_store(uri)
    assert store.exists([b"foreign"]) == bytearray([1])
    store.close()


def test_purge_for_programs_wants_a_yes(uri):
    assert run("purge", "--store", uri, "--prefix", "default", "--json").exit_code == 2
    assert len(listed(uri)) == 3


def test_purge_of_nothing_asks_nothing(uri):
    result = run("purge", "--store", uri, "--prefix", "other", answer="")
    assert (result.exit_code, result.stdout) == (0, "nothing is stored under kvx1/other/\n")


@pytest.mark.parametrize("command", [["list"], ["size"], ["purge", "--prefix", "", "--yes"]])
def test_a_command_that_meets_no_store_makes_none(tmp_path, command):
    result = run(*command, "--store", f"lmdb://{tmp_path}/none?capacity=1MiB")
    assert result.exit_code == 1
    assert f"there is no store in {tmp_path}/none" in result.stderr
    assert not (tmp_path / "none").exists()


def test_a_command_leaves_the_capacity_as_it_is(uri):
    run("size", "--store", uri.replace("16MiB", "32MiB"))
    assert json.loads(run("size", "--store", uri, "--json").stdout)["capacity_bytes"] == 16 << 20


def test_a_store_of_another_format_is_left_alone(uri, tmp_path):
    marker = tmp_path / "store" / "kvxfer.json"
    marker.write_text(marker.read_text().replace('"format": 1', '"format": 7'))
    before = sorted((tmp_path / "store").iterdir())
    result = run("list", "--store", uri)
    assert result.exit_code == 1
    assert "has format 7" in result.stderr
    assert sorted((tmp_path / "store").iterdir()) == before


@pytest.mark.parametrize("text", ["ftp://x", "no-uri", "lmdb:///s?capacty=1GiB"])
def test_a_wrong_uri_is_a_sentence_and_no_traceback(text):
    result = run("list", "--store", text)
    assert result.exit_code == 1
    assert result.stderr.startswith("FAILED: store ")
    assert "Traceback" not in result.output


def test_contents_count_a_checksum_as_bytes_and_not_as_a_value():
    (key,) = keys_of("llama", 1)
    contents = read_contents([StoredValue(key, 100), StoredValue(key + b"#", 10)])
    (held,) = contents.values()
    assert (held.num_values, held.num_bytes) == (1, 110)


def test_contents_put_foreign_keys_aside():
    assert set(read_contents([StoredValue(b"kvx1/odd", 1)])) == {GroupName("", "", "", "")}


def test_an_empty_prefix_is_all_of_ours():
    assert whole_prefix("") == whole_prefix("kvx1") == b"kvx1/"
