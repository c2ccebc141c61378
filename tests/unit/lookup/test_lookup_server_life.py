# SPDX-License-Identifier: Apache-2.0
"""How a server begins and ends: restarts, claims, abandoned handlers, forks, and no leftovers."""

import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from kvxfer.errors import ConfigError
from kvxfer.lookup import Endpoint, LookupReply, LookupServer, Status

HASHES = [bytes([number]) * 32 for number in range(4)]
HIT = LookupReply(Status.OK, 16)
WAIT_S = 20


def look_up(client, key="a"):
    return client.lookup(key, 64, HASHES, blocking=True)


def test_server_gone_and_back_serves_the_same_client(make_server, make_client, wait_until):
    server = make_server()
    client = make_client()
    assert look_up(client) == HIT
    server.close()

    def noticed():  # a question sent before that is taken back
        client.discard("b")
        return client.lookup("b", 64, HASHES) == LookupReply(Status.UNSENT)

    wait_until(noticed, "its absence")
    make_server()
    assert look_up(client) == HIT


def test_question_in_flight_when_the_server_goes_is_a_miss_by_its_deadline(
    make_server, connected, raw_server, clock, handlers
):
    client = connected(timeout_s=2.0)
    assert client.lookup("a", 64, HASHES) is None
    raw_server.receive()
    raw_server.close()
    server = make_server()
    assert look_up(client, "b") == HIT
    assert client.lookup("a", 64, HASHES) is None
    clock.now_s += 2
    assert client.lookup("a", 64, HASHES) == LookupReply(Status.TIMED_OUT)
    assert server.counters.lookups == 1  # the old question did not reach the new server


def test_two_engines_on_one_host_do_not_meet(make_client, handlers, folder, closing):
    clients = []
    for hit_length, name in enumerate(["a", "b"]):
        endpoint = Endpoint.for_engine(name, folder=folder)
        answer = (hit_length, [])
        closing(LookupServer(endpoint, lambda *_, a=answer: a, lambda *_: True))
        clients.append(make_client(endpoint))
    assert [look_up(client).hit_length for client in clients] == [0, 1]


def test_second_server_of_an_endpoint_is_refused_and_the_first_goes_on(make_server, make_client):
    make_server()
    client = make_client()
    with pytest.raises(ConfigError, match="own engine_id"):
        make_server()
    assert look_up(client) == HIT


def test_server_replaces_the_file_of_a_dead_one(make_server, make_client, endpoint):
    endpoint.listen().listening.close()
    make_server()
    assert look_up(make_client()) == HIT


def test_close_removes_the_file_and_may_be_repeated(make_server, endpoint):
    server = make_server()
    assert endpoint.path.is_socket()
    server.close()
    server.close()
    assert not endpoint.path.exists()
    assert server.counters.abandoned == 0


def test_server_closes_as_a_context_manager(endpoint, handlers):
    with LookupServer(endpoint, handlers.on_lookup, handlers.on_reset, handlers.on_key_spaces):
        assert endpoint.path.is_socket()
    assert not endpoint.path.exists()


@pytest.mark.parametrize("kind", ["lookup", "reset"])
def test_close_abandons_a_handler_that_does_not_return(
    make_server, make_client, handlers, make_gate, caplog, endpoint, kind, wait_until
):
    gate = make_gate((16, []) if kind == "lookup" else True)
    handlers.answer, handlers.on_reset = (lambda number: gate()), gate
    stuck = make_server()
    client = make_client(timeout_s=0.05)
    assert not (look_up(client).hit_length if kind == "lookup" else client.reset(0.05))
    assert gate.entered.wait(WAIT_S)

    stuck.close(timeout_s=0.05)
    assert stuck.counters.abandoned == 1
    assert "is still in a handler" in caplog.text

    handlers.answer = (16, [])
    make_server()
    assert look_up(make_client()) == HIT
    gate.released.set()
    wait_until(lambda: len(lookup_threads()) == 1, "the end of the abandoned thread")
    assert endpoint.path.is_socket()
    assert look_up(make_client()) == HIT


def test_close_waits_for_a_handler_that_is_about_to_return(
    make_server, make_client, handlers, make_gate, background
):
    gate = make_gate((16, []))
    handlers.answer = lambda number: gate()
    server = make_server()
    client = make_client()
    assert client.ping(WAIT_S)
    assert client.lookup("a", 64, HASHES) is None
    assert gate.entered.wait(WAIT_S)
    join_close = background(lambda: server.close(WAIT_S))
    gate.released.set()
    join_close()
    assert server.counters.abandoned == 0


def lookup_threads():
    return [thread for thread in threading.enumerate() if "kvxfer-lookup" in thread.name]


def resources():
    """Return how many descriptors and threads this process has.

    A thread that was joined may be counted a moment longer: compare with "at most".
    """
    return [len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task")]


def at_most(limits):
    return all(now <= limit for now, limit in zip(resources(), limits, strict=True))


def test_nothing_is_left_behind_by_servers_and_clients(
    endpoint, folder, handlers, wait_until, make_client
):
    def cycle():
        with (
            LookupServer(endpoint, handlers.on_lookup, handlers.on_reset) as server,
            make_client() as client,
        ):
            assert look_up(client) == HIT
            assert client.reset(WAIT_S)
            assert server.counters.lookups == 1

    cycle()
    before = resources()
    for _ in range(20):
        cycle()
    wait_until(lambda: at_most(before), "the descriptors and threads of before")
    assert list(folder.iterdir()) == []
    assert lookup_threads() == []


def test_refused_server_leaves_nothing_behind(make_server, wait_until):
    make_server()
    before = resources()
    for _ in range(20):
        with pytest.raises(ConfigError):
            make_server()
    wait_until(lambda: at_most(before), "the descriptors and threads of before")


def test_forked_child_leaves_the_parent_s_channel_alone(folder):
    script = f"""
        import os
        from kvxfer.lookup import Endpoint, LookupClient, LookupServer

        endpoint = Endpoint.for_engine("engine", folder={str(folder)!r})
        with (
            LookupServer(endpoint, lambda *_: (16, []), lambda *_: True) as server,
            LookupClient(endpoint, timeout_s={WAIT_S}) as client,
        ):
            assert client.lookup("a", 64, [b"hash"], blocking=True).hit_length == 16
            child = os.fork()
            if child == 0:
                server.close()
                client.close()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            assert endpoint.path.is_socket()
            assert client.lookup("b", 64, [b"hash"], blocking=True).hit_length == 16
    """
    subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", textwrap.dedent(script)],
        check=True,
        timeout=60,
        cwd=Path(__file__).parents[3],
    )
