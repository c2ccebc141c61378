# SPDX-License-Identifier: Apache-2.0
"""Endpoints, a clock to turn by hand, and the two ends of the channel as bare sockets."""

import contextlib
import shutil
import tempfile
import threading
import time
from pathlib import Path

import pytest
import zmq

from kvxfer.lookup import Endpoint, LookupClient, LookupCounters, LookupServer, protocol
from kvxfer.lookup.protocol import Reply, Status

WAIT_MS = 20_000  # how long a test waits for what must come; never reached when all is well


class Clock:
    """Stands still until a test moves it."""

    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s


class RawServer:
    """A ROUTER that answers what a test tells it to, when it tells it to."""

    def __init__(self, endpoint):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.RCVHWM, 4)
        self.socket.bind(endpoint.url)

    def receive(self):
        """Return (sender, request) of the next request."""
        assert self.socket.poll(WAIT_MS), "no request came"
        sender, *frames = self.socket.recv_multipart()
        return sender, protocol.decode_request(frames)

    def pending(self):
        """Return whether a request is waiting; one that is on its way has time to arrive."""
        return bool(self.socket.poll(50))

    def send(self, sender, *frames):
        self.socket.send_multipart([sender, *frames])

    def reply(self, sender, request, hit_length=0, status=Status.OK, kind=None, tails=()):
        kind = request.reply_type if kind is None else kind
        reply = Reply(kind, request.request_id, status, hit_length, tails)
        self.send(sender, protocol.encode_reply(reply))

    def close(self):
        self.socket.close(linger=0)
        self.context.term()


class RawClient:
    """A DEALER that sends any frames whatever and shows the replies."""

    def __init__(self, endpoint):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.connect(endpoint.url)

    def send(self, *frames):
        self.socket.send_multipart(frames)

    def receive(self):
        assert self.socket.poll(WAIT_MS), "no reply came"
        return protocol.decode_reply(self.socket.recv_multipart())

    def ping(self, request_id=7):
        """Return the reply to a ping: whatever was answered before it has arrived then."""
        self.send(*protocol.encode_ping(request_id))
        return self.receive()

    def close(self):
        self.socket.close(linger=0)
        self.context.term()


class Handlers:
    """A stub worker: answers ``answer``, or calls it with the request's number, and remembers."""

    def __init__(self):
        self.answer = (16, [])
        self.lookups = []
        self.key_spaces = []
        self.on_reset = lambda epoch, remove, timeout_s: True
        self.on_key_spaces = self.key_spaces.append

    def on_lookup(self, num_tokens, hashes):
        self.lookups.append((num_tokens, list(hashes), hashes.width))
        return self.answer(len(self.lookups)) if callable(self.answer) else self.answer


class Gate:
    """A handler that reports its entry and stays inside until it is let go."""

    def __init__(self, answer):
        self.answer = answer
        self.entered = threading.Event()
        self.released = threading.Event()

    def __call__(self, *_):
        self.entered.set()
        assert self.released.wait(WAIT_MS / 1000)
        return self.answer


def wait_until(holds, what):
    """Look again and again until ``holds()``: for states that nothing announces."""
    deadline_s = time.monotonic() + WAIT_MS / 1000
    while not holds():
        assert time.monotonic() < deadline_s, f"never came: {what}"
        time.sleep(0.001)


@pytest.fixture(name="wait_until")
def fixture_wait_until():
    return wait_until


@pytest.fixture
def folder():
    """A private folder with a short path: pytest's own may leave no room for a socket."""
    path = Path(tempfile.mkdtemp(prefix="kvx"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def endpoint(folder):
    return Endpoint.for_engine("engine", folder=folder)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def closing():
    """Closes what a test hands to it, last first."""
    with contextlib.ExitStack() as stack:
        yield lambda thing: stack.enter_context(contextlib.closing(thing))


@pytest.fixture
def raw_server(endpoint, closing):
    return closing(RawServer(endpoint))


@pytest.fixture
def raw_client(endpoint, closing):
    return closing(RawClient(endpoint))


@pytest.fixture
def handlers():
    return Handlers()


@pytest.fixture
def make_server(endpoint, handlers, closing):
    def make(at=endpoint, **options):
        return closing(
            LookupServer(
                at,
                handlers.on_lookup,
                lambda *args: handlers.on_reset(*args),
                lambda payload: handlers.on_key_spaces(payload),
                **options,
            )
        )

    return make


@pytest.fixture
def make_client(endpoint, closing):
    """Make clients that give up after a time that no test reaches, unless it says otherwise."""

    def make(at=endpoint, timeout_s=WAIT_MS / 1000, **options):
        return closing(LookupClient(at, timeout_s=timeout_s, **options))

    return make


@pytest.fixture
def connected(make_client, raw_server, clock):
    """Make clients on the hand-turned clock whose connection to the raw server stands."""

    def make(timeout_s=1.0, **options):
        client = make_client(timeout_s=timeout_s, clock=clock, **options)
        wait_until(lambda: client.lookup("connect", 1, []) is None, "the connection")
        client.discard("connect")
        raw_server.receive()
        client.counters = LookupCounters()
        return client

    return make


@pytest.fixture
def make_gate():
    """Make gates; all are open when the test ends, so that every thread can end."""
    gates = []

    def make(answer):
        gates.append(Gate(answer))
        return gates[-1]

    yield make
    for gate in gates:
        gate.released.set()


@pytest.fixture
def background():
    """Run ``act`` in a thread; return a function that joins it and gives its result."""

    def start(act):
        results = []
        thread = threading.Thread(target=lambda: results.append(act()))
        thread.start()

        def join():
            thread.join(WAIT_MS / 1000)
            return results[0]

        return join

    return start
