# SPDX-License-Identifier: Apache-2.0
"""The lookup channel between processes: servers that die, hang and come back."""

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from kvxfer.errors import ConfigError
from kvxfer.lookup import Endpoint, LookupClient, LookupReply, LookupServer, PackedHashes, Status

WAIT_S = 30
REPOSITORY = Path(__file__).parents[2]
MISS_TIMED_OUT = LookupReply(Status.TIMED_OUT)
MISS_UNSENT = LookupReply(Status.UNSENT)


def serve(engine_id, folder):
    """Serve as a worker process does, until stdin ends; say "ready" first.

    The answer shows from which bytes it was computed, and, as a tail boundary, by which process.
    """

    def on_lookup(num_tokens, hashes):
        return expected_hit(num_tokens, hashes.buffer), [(0, os.getpid())]

    endpoint = Endpoint.for_engine(engine_id, folder=folder)
    with LookupServer(endpoint, on_lookup, lambda *_: True):
        print("ready", flush=True)
        sys.stdin.read()


def expected_hit(num_tokens, buffer):
    digest = hashlib.sha256(buffer).digest()
    return int.from_bytes(digest[:4], "little") % num_tokens


class ServerProcess:
    """A server in a process of its own, which a test may kill, stop and continue."""

    def __init__(self, folder, engine_id="engine"):
        self.process = subprocess.Popen(
            [sys.executable, __file__, engine_id, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path])},
        )
        self.pid = self.process.pid
        assert self.process.stdout.readline() == b"ready\n"

    def kill(self):
        self.process.kill()
        self.close()

    def stop(self):
        """Suspend the process; it has stopped on return."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED)

    def go_on(self):
        self.process.send_signal(signal.SIGCONT)

    def close(self):
        """End it in good order, unless it is dead already."""
        self.go_on()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait(WAIT_S)
        self.process.stdout.close()


@pytest.fixture
def folder():
    path = Path(tempfile.mkdtemp(prefix="kvx"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def endpoint(folder):
    return Endpoint.for_engine("engine", folder=folder)


@pytest.fixture
def closing():
    with contextlib.ExitStack() as stack:
        yield lambda thing: stack.enter_context(contextlib.closing(thing))


@pytest.fixture
def start_server(folder, closing):
    return lambda engine_id="engine": closing(ServerProcess(folder, engine_id))


@pytest.fixture
def client(endpoint, closing):
    return closing(LookupClient(endpoint, timeout_s=WAIT_S))


def wait_until(holds, what):
    deadline_s = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline_s, f"never came: {what}"
        time.sleep(0.001)


def server_that_answers(client, key="who"):
    """Return the process id of the server that answers the next lookup."""
    reply = client.lookup(key, 64, [b"hash"], blocking=True)
    assert reply.status is Status.OK
    return reply.tail_boundaries[0][1]


def notices_absence(client):
    """Whether a lookup cannot be sent any more; one sent to a dying server is taken back."""
    client.discard("absent?")
    return client.lookup("absent?", 64, [b"hash"]) == MISS_UNSENT


def test_long_prompt_crosses_the_process_boundary_intact(start_server, client):
    start_server()
    hashes = PackedHashes(os.urandom(8192 * 32), 32)
    reply = client.lookup("long", 131072, hashes, blocking=True)
    assert (reply.status, reply.hit_length) == (Status.OK, expected_hit(131072, hashes.buffer))


def test_asynchronous_lookups_of_many_requests_get_their_own_answers(start_server, client):
    start_server()
    assert client.ping(WAIT_S)
    prompts = {str(number): [os.urandom(32) for _ in range(64)] for number in range(500)}
    answers = {}

    def step():
        for key, hashes in prompts.items():
            if key not in answers and (reply := client.lookup(key, 1024, hashes)) is not None:
                answers[key] = (reply.status, reply.hit_length)
        return len(answers) == len(prompts)

    wait_until(step, "all answers")
    assert client.counters.sent == 501  # with the ping: nothing was sent twice, nothing missed
    assert answers == {
        key: (Status.OK, expected_hit(1024, b"".join(hashes))) for key, hashes in prompts.items()
    }
    assert (client.num_open, client.num_in_flight) == (0, 0)


def test_killed_server_is_replaced_at_the_same_endpoint(start_server, client, endpoint):
    first = start_server()
    assert server_that_answers(client) == first.pid
    first.kill()
    assert endpoint.path.is_socket()  # nobody removed it
    wait_until(lambda: notices_absence(client), "the server's absence")
    second = start_server()
    assert server_that_answers(client) == second.pid
    second.close()
    assert not endpoint.path.exists()


def test_questions_to_a_killed_server_are_misses_and_not_answered_by_its_successor(
    start_server, endpoint, closing
):
    first = start_server()
    client = closing(LookupClient(endpoint, timeout_s=1.0))
    assert client.ping(WAIT_S)
    first.stop()
    keys = [str(number) for number in range(20)]
    assert {client.lookup(key, 64, [b"hash"]) for key in keys} == {None}
    first.kill()
    second = start_server()
    assert client.ping(WAIT_S)
    wait_until(lambda: client.lookup("0", 64, [b"hash"]) is not None, "the deadline")
    assert {client.lookup(key, 64, [b"hash"]) for key in keys[1:]} == {MISS_TIMED_OUT}
    assert server_that_answers(client) == second.pid
    assert client.counters.late_dropped == 0


def test_hung_server_costs_misses_and_is_used_again_when_it_goes_on(
    start_server, endpoint, closing
):
    server = start_server()
    client = closing(LookupClient(endpoint, timeout_s=0.2))
    assert client.ping(WAIT_S)
    server.stop()
    assert client.lookup("a", 64, [b"hash"], blocking=True) == MISS_TIMED_OUT
    assert client.ping(0.05) is False
    server.go_on()
    assert client.ping(WAIT_S)
    assert client.counters.late_dropped == 2  # they came, and answered nothing
    assert server_that_answers(client) == server.pid


def test_server_restarted_many_times_serves_one_client(start_server, client):
    for _ in range(4):
        server = start_server()
        assert client.ping(WAIT_S)
        assert server_that_answers(client) == server.pid
        server.kill()
        wait_until(lambda: notices_absence(client), "its absence")


def test_two_engines_on_one_host_get_answers_of_their_own(start_server, folder, closing):
    servers = {name: start_server(name) for name in ("a", "b")}
    clients = {
        name: closing(LookupClient(Endpoint.for_engine(name, folder=folder), timeout_s=WAIT_S))
        for name in servers
    }
    for name, server in servers.items():
        assert server_that_answers(clients[name]) == server.pid


def test_engine_with_an_id_in_use_is_refused(start_server, client, endpoint):
    first = start_server()
    with pytest.raises(ConfigError, match="own engine_id"):
        LookupServer(endpoint, lambda *_: (0, []), lambda *_: True)
    assert server_that_answers(client) == first.pid


def test_restarted_client_is_served(start_server, client, endpoint):
    server = start_server()
    assert server_that_answers(client) == server.pid
    client.close()
    with LookupClient(endpoint, timeout_s=WAIT_S) as second:
        assert server_that_answers(second) == server.pid


if __name__ == "__main__":
    serve(*sys.argv[1:])
