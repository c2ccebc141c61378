# SPDX-License-Identifier: Apache-2.0
"""Store URIs, and which store they open."""

from __future__ import annotations

import pytest

from kvxfer.errors import ConfigError, KvxferError, StoreError
from kvxfer.stores import open_store
from kvxfer.stores.lmdb import LmdbStore
from kvxfer.stores.uri import check_options, parse_seconds, parse_size, parse_uri


def test_parse_uri_splits_and_decodes():
    uri = parse_uri("lmdb:///var/my%20cache%23?capacity=8GiB&lease_s=5")
    assert (uri.scheme, uri.host, uri.path) == ("lmdb", "", "/var/my cache#")
    assert uri.options == {"capacity": "8GiB", "lease_s": "5"}
    assert parse_uri("mooncake://host:50051").host == "host:50051"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("/var/cache", "is no URI"),
        (None, "is no URI"),
        ("lmdb://[x", "is no URI"),
        ("lmdb:///x?capacity", "write options as name=value"),
        ("lmdb:///x?capacity=1&capacity=2", "gives an option twice"),
        ("lmdb:///x#y", "fragment"),
    ],
    ids=["path", "none", "bracket", "no_value", "twice", "fragment"],
)
def test_parse_uri_refuses_what_is_none(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_uri(text)


def test_check_options_names_the_nearest_valid_one():
    uri = parse_uri("lmdb:///x?capacty=8GiB")
    with pytest.raises(ConfigError, match="unknown option 'capacty', did you mean 'capacity'"):
        check_options(uri, ("capacity", "lease_s"))
    check_options(parse_uri("lmdb:///x?lease_s=1"), ("capacity", "lease_s"))


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("1", 1),
        ("4096", 4096),
        ("10B", 10),
        ("8GiB", 8 << 30),
        ("500MB", 500_000_000),
        ("1.5KiB", 1536),
        ("2 tib", 2 << 40),
        ("9007199254740993", 2**53 + 1),
    ],
)
def test_parse_size_knows_units(text, num_bytes):
    assert parse_size(text, "capacity") == num_bytes


@pytest.mark.parametrize("text", ["", "8G", "8XiB", "-1", "0", "0.1", "GiB", "1e9", "8 GiB x", "٣"])
def test_parse_size_refuses_the_rest(text):
    with pytest.raises(ConfigError, match=r"capacity=.* is no size"):
        parse_size(text, "capacity")


def test_parse_seconds_takes_0_to_a_day():
    assert parse_seconds("0", "lease_s") == 0
    assert parse_seconds("0.25", "lease_s") == 0.25
    for text in ("-1", "nan", "inf", "86401", "soon", ""):
        with pytest.raises(ConfigError, match=r"lease_s=.* is no duration"):
            parse_seconds(text, "lease_s")


def test_open_store_opens_lmdb(tmp_path):
    store = open_store(f"lmdb://{tmp_path}/store?capacity=2MiB")
    assert isinstance(store, LmdbStore)
    assert store.stats().capacity_bytes == 2 << 20
    store.close()


def test_open_store_without_a_path_takes_the_default_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("KVXFER_STORE_DIR", str(tmp_path / "chosen"))
    open_store("lmdb://?capacity=1MiB").close()
    assert (tmp_path / "chosen" / "data.mdb").stat().st_size == 1 << 20


@pytest.mark.parametrize(
    ("uri", "error", "message"),
    [
        ("mooncake://127.0.0.1:1?hostname=x", StoreError, "mooncake_master --rpc_port=1"),
        ("redis://host", ConfigError, "scheme 'redis'"),
        ("lmdb://tmp/x", ConfigError, "names host 'tmp'.*lmdb:///tmp/x"),
        ("lmdb:///x?capacity=100", ConfigError, "at least 1048576"),
        ("lmdb:///x?lease=3", ConfigError, "did you mean 'lease_s'"),
    ],
    ids=["mooncake", "scheme", "host", "small", "option"],
)
def test_open_store_refuses_what_it_cannot_open(uri, error, message):
    with pytest.raises(error, match=message) as caught:
        open_store(uri)
    assert isinstance(caught.value, KvxferError)
