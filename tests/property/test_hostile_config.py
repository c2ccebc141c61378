# SPDX-License-Identifier: Apache-2.0
"""Settings and store URIs from anybody: a valid configuration or ``ConfigError``, nothing else."""

import dataclasses
import math
import typing
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvxfer.config import KVXferConfig
from kvxfer.errors import ConfigError, KvxferError
from kvxfer.keys import key_prefix
from kvxfer.stores import open_store
from kvxfer.stores.lmdb_options import LmdbOptions
from kvxfer.stores.uri import LONGEST_S, parse_uri

FIELDS = [field.name for field in dataclasses.fields(KVXferConfig)]
TYPES = typing.get_type_hints(KVXferConfig)

texts = st.text() | st.sampled_from(
    ["", "\0", "\ud800", "a\nb", "lmdb://", "native", "1e9GiB", "9" * 5000 + "TiB", "nan", "-1"]
)
numbers = (
    st.integers()
    | st.floats()
    | st.sampled_from([2**31, 2**63, 2**64, 10**400, -(10**400), 1e308, 5e-324, math.inf, math.nan])
)
scalars = st.none() | st.booleans() | numbers | texts
json_values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3)
)


def assert_usable(config):
    """Check what the engine relies on: types, ranges, and text that fits into keys."""
    for name in FIELDS:
        value = getattr(config, name)
        kinds = typing.get_args(TYPES[name]) or (TYPES[name],)
        assert value in kinds or type(value) in kinds, name
        if type(value) in (int, float):
            assert 0 < value <= 2**47, name
        if name.endswith("_s") and not name.endswith("_per_s"):
            assert value <= LONGEST_S, name
    prefix = key_prefix(config.cache_prefix, config.model_id or "m", "d" * 32, "g" * 16, 0, None)
    assert len(prefix) < 300
    config.store.encode()


def read(extra):
    """Return the configuration, or the message of the ``ConfigError``."""
    try:
        return KVXferConfig.from_extra(extra, {})
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize("name", FIELDS)
@settings(max_examples=40)
@given(value=json_values)
@example(value=10**400)
@example(value=math.nan)
@example(value=math.inf)
@example(value=[])
@example(value="\ud800")
@example(value="\0")
@example(value="9" * 5000 + "TiB")
def test_any_json_value_of_a_setting_is_taken_or_refused_by_name(name, value):
    config = read({name: value})
    if isinstance(config, str):
        assert name in config
        assert len(config) < 2000
    else:
        assert_usable(config)


@given(st.dictionaries(st.sampled_from(FIELDS) | texts, json_values, max_size=6))
def test_any_json_object_is_taken_or_refused(extra):
    config = read(extra)
    if not isinstance(config, str):
        assert set(extra) <= set(FIELDS)
        assert_usable(config)


parts = st.text(max_size=12) | st.sampled_from(
    [
        *("capacity=", "lease_s=", "timeout_s=", "=", "&", "?", "#", "[", "]", "%00", "%ff", "\0"),
        *(
            "\ud800",
            "8GiB",
            "1e400",
            "9" * 400,
            "99999999999TiB",
            "nan",
            "-0",
            "..",
            "/",
            "a" * 300,
        ),
        "\N{ARABIC-INDIC DIGIT THREE}",
    ]
)
store_uris = st.text() | st.builds(
    lambda scheme, rest: f"{scheme}://{''.join(rest)}",
    st.sampled_from(["lmdb", "LMDB", "mooncake", "", "file", "lmdb+x"]),
    st.lists(parts, max_size=6),
)


@given(store_uris)
@example("lmdb:///a%00b")
@example("lmdb:///\ud800")
@example("lmdb:///x?capacity=99999999999999999999TiB")
@example("lmdb:///x?capacity=" + "9" * 5000)
@example("lmdb:///x?lease_s=" + "9" * 5000)
@example("lmdb://[")
def test_any_text_is_a_store_uri_or_refused(text):
    try:
        uri = parse_uri(text)
        options = LmdbOptions.from_uri(uri) if uri.scheme == "lmdb" else None
    except ConfigError:
        return
    if options is not None:
        assert options.capacity_bytes is None or 1 << 20 <= options.capacity_bytes < 2**63
        assert 0 <= options.lease_s <= LONGEST_S
        assert 0 <= options.timeout_s <= LONGEST_S
        assert b"\0" not in bytes(options.folder)


@pytest.mark.parametrize(
    "path",
    [
        "/proc/none",
        "/dev/null/x",
        "/" + "a" * 300,
        "/" + "a/" * 3000,
        "/dev/null",
        "/proc/self/mem",
    ],
    ids=lambda path: path[:16],
)
def test_a_folder_that_cannot_be_is_an_error_of_ours(path):
    with pytest.raises(KvxferError):
        open_store(f"lmdb://{path}?capacity=1MiB")


def test_a_capacity_beyond_any_disk_is_an_error_of_ours(tmp_path):
    with pytest.raises(KvxferError, match=r"8191PiB.* is no size"):
        open_store(f"lmdb://{tmp_path}/store?capacity=8191PiB")
    with pytest.raises(KvxferError, match="could be made"):
        open_store(f"lmdb://{tmp_path}/store?capacity=4000000TiB")
    assert not (Path(tmp_path) / "store" / "data.mdb").exists()
