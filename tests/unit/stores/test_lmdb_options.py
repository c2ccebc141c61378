# SPDX-License-Identifier: Apache-2.0
"""Default folder and default capacity of the LMDB store."""

from __future__ import annotations

import os
import shutil
import tempfile
from types import SimpleNamespace

import pytest

from kvxfer.errors import StoreError
from kvxfer.stores.lmdb_options import LmdbOptions, default_capacity_bytes, default_folder
from kvxfer.stores.uri import parse_uri


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    for name in ("KVXFER_STORE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)


def test_default_folder_is_the_one_that_is_set(tmp_path, monkeypatch):
    monkeypatch.setenv("KVXFER_STORE_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert default_folder() == tmp_path


def test_default_folder_is_in_the_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_folder() == tmp_path / ".cache" / "kvxfer" / "lmdb"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert default_folder() == tmp_path / "cache" / "kvxfer" / "lmdb"


def test_default_folder_without_a_writable_home_is_a_private_temporary_one(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temp"))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert default_folder() == tmp_path / "temp" / f"kvxfer-lmdb-{os.geteuid()}"


@pytest.mark.parametrize(
    ("free", "capacity"), [(1 << 40, 8 << 30), (4 << 30, 1 << 30), (256 << 20, 64 << 20)]
)
def test_default_capacity_is_8_gib_or_a_quarter_of_the_free_space(free, capacity, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    assert default_capacity_bytes("/") == capacity


def test_default_capacity_of_a_small_disk_is_an_error_with_a_way_out(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=64 << 20))
    with pytest.raises(StoreError, match=r"67108864 bytes free.*KVXFER_STORE_DIR"):
        default_capacity_bytes("/")


def test_options_come_from_the_uri():
    options = LmdbOptions.from_uri(parse_uri("lmdb:///a/b?capacity=1GB&lease_s=2&timeout_s=0.5"))
    assert str(options.folder) == "/a/b"
    assert (options.capacity_bytes, options.lease_s, options.timeout_s) == (10**9, 2.0, 0.5)
    options = LmdbOptions.from_uri(parse_uri("lmdb:///a/b"))
    assert (options.capacity_bytes, options.lease_s, options.timeout_s) == (None, 30.0, 10.0)
