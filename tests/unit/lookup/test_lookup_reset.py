# SPDX-License-Identifier: Apache-2.0
"""A reset drains every rank before the first one removes anything."""

import threading

import pytest

from kvxfer.lookup import Endpoint, LookupServer, reset_ranks

WAIT_S = 20
EPOCH = 3


@pytest.fixture
def start_ranks(folder, closing):
    """Start one server a rank, each with its reset handler; return their endpoints."""

    def start(*handlers):
        endpoints = []
        for rank, on_reset in enumerate(handlers):
            endpoint = Endpoint.for_engine("engine", folder=folder, rank=rank)
            closing(LookupServer(endpoint, lambda *_: (0, []), on_reset))
            endpoints.append(endpoint)
        return endpoints

    return start


def test_reset_drains_all_ranks_and_then_removes_once(start_ranks):
    calls = []

    def handler(rank):
        return lambda epoch, remove, timeout_s: calls.append((rank, epoch, remove)) or True

    assert reset_ranks(start_ranks(*map(handler, range(3))), EPOCH, WAIT_S) is True
    assert sorted(calls[:3]) == [(0, EPOCH, False), (1, EPOCH, False), (2, EPOCH, False)]
    assert calls[3:] == [(0, EPOCH, True)]


def test_ranks_drain_at_the_same_time(start_ranks):
    together = threading.Barrier(3)

    def drain_or_remove(epoch, remove, timeout_s):
        return remove or together.wait(WAIT_S) >= 0

    assert reset_ranks(start_ranks(*[drain_or_remove] * 3), EPOCH, WAIT_S) is True


def raise_error(*_):
    raise OSError("store gone")


@pytest.mark.parametrize("on_reset", [lambda *_: False, raise_error], ids=["false", "raises"])
def test_nothing_is_removed_unless_every_rank_drained(start_ranks, on_reset, caplog):
    calls = []
    endpoints = start_ranks(lambda *args: calls.append(args[1]) or True, on_reset)
    assert reset_ranks(endpoints, EPOCH, WAIT_S) is False
    assert calls == [False]
    assert str(endpoints[1].path) in caplog.text


def test_reset_with_a_rank_that_is_not_there_is_false_in_time(start_ranks, folder):
    calls = []
    endpoints = start_ranks(lambda *args: calls.append(args[1]) or True)
    missing = Endpoint.for_engine("engine", folder=folder, rank=9)
    assert reset_ranks([*endpoints, missing], EPOCH, 0.1) is False
    assert calls == [False]


def test_reset_with_a_rank_of_another_host_is_false(start_ranks, folder, caplog):
    elsewhere = Endpoint(folder / "not" / "here" / "lookup.sock")
    endpoints = start_ranks(lambda *_: True)
    assert reset_ranks([*endpoints, elsewhere], EPOCH, WAIT_S) is False
    assert "cannot be reached" in caplog.text


def test_reset_whose_removal_fails_is_false(start_ranks, caplog):
    endpoints = start_ranks(lambda epoch, remove, timeout_s: not remove)
    assert reset_ranks(endpoints, EPOCH, WAIT_S) is False
    assert "did not remove the keys" in caplog.text


def test_reset_without_ranks_is_false(caplog):
    assert reset_ranks([], EPOCH, WAIT_S) is False
    assert "no ranks" in caplog.text
