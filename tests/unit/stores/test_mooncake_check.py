# SPDX-License-Identifier: Apache-2.0
"""The start-up check's verdicts that no real server gives at will."""

from __future__ import annotations

import pytest
from mooncake_fakes import FakeNative, fake_module

from kvxfer.errors import StoreError
from kvxfer.stores.mooncake_check import PROBE_BYTES, check_round_trip
from kvxfer.stores.mooncake_client import Client
from kvxfer.stores.mooncake_memory import Memory
from kvxfer.stores.mooncake_metrics import Occupancy
from kvxfer.stores.mooncake_native import Replication
from kvxfer.stores.mooncake_options import MooncakeOptions

OPTIONS = MooncakeOptions("m:1")


@pytest.fixture
def native(monkeypatch):
    monkeypatch.setattr("kvxfer.stores.mooncake_check.ROOM_PAUSE_S", 0.0)
    return FakeNative()


def check(native, occupancy=None):
    client = Client(native, Replication.probe(fake_module(native), OPTIONS))
    memory = Memory()
    memory.attach(client)
    check_round_trip(client, memory, OPTIONS, occupancy)


def test_check_leaves_nothing_behind(native):
    check(native)
    ((_, _, sizes),) = native.calls["get"]
    assert sizes == [(PROBE_BYTES,)]
    assert native.values == {}


def test_check_of_a_pool_that_makes_room_asks_again(native):
    answers = [[-200], [-200], ...]
    native.scripts["put"] = lambda *_: answers.pop(0)
    check(native)
    assert len(native.calls["get"]) == 1


@pytest.mark.parametrize("occupancy", [None, Occupancy(9, 100, 100)], ids=["unknown", "full"])
def test_check_of_a_full_pool_warns(native, caplog, occupancy):
    native.scripts["put"] = lambda *_: [-200]
    check(native, occupancy)
    assert "takes no value now" in caplog.text


def test_check_of_a_lease_that_is_too_short_warns(native, caplog):
    native.scripts["get"] = lambda *_: [-707]
    check(native)
    assert "--default_kv_lease_ttl" in caplog.text


@pytest.mark.parametrize("call", ["put", "get"])
def test_check_of_a_transfer_that_fails_raises_and_names_protocol_and_host(native, call):
    native.scripts[call] = lambda *_: [-800]
    with pytest.raises(StoreError, match=r"transfer \(-800\).*one protocol \(here tcp\)"):
        check(native)
    assert native.values == {}


def test_check_of_a_tenant_that_is_not_known_names_it(native):
    native.scripts["put"] = lambda *_: [-1701]
    with pytest.raises(StoreError, match="has no tenant 'default': set tenant"):
        check(native)


@pytest.mark.parametrize(
    ("builds", "message"),
    [
        (["mooncake-a 1", "mooncake-b 2"], "2 builds of it are installed over each other: .*b 2"),
        (["mooncake-a 1"], r"\(mooncake-a 1\) did not start: refused \(-600\).* same version"),
        ([], r"\(of unknown build\) did not start"),
    ],
    ids=["two", "one", "none"],
)
def test_a_client_that_does_not_start_names_its_builds(monkeypatch, native, builds, message):
    native.setup_codes.append(-600)
    monkeypatch.setattr("kvxfer.stores.mooncake_client.import_client", lambda: fake_module(native))
    monkeypatch.setattr("kvxfer.stores.mooncake_client.installed_builds", lambda: builds)
    with pytest.raises(StoreError, match=message):
        Client.connect(OPTIONS)
