# SPDX-License-Identifier: Apache-2.0
"""The lookup channel among hostile neighbours: frames, payloads and locks from anybody.

A decoder raises ``ProtocolError`` and nothing else and takes no more memory than the frame it was
given; a server or client that was sent anything whatever still serves the next good message.
"""

import contextlib
import fcntl
import os
import shutil
import struct
import tempfile
import threading
import time
import tracemalloc
from pathlib import Path

import pytest
import zmq
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvxfer.errors import ConfigError, ProtocolError
from kvxfer.lookup import Endpoint, LookupClient, LookupServer, endpoint, protocol
from kvxfer.lookup.hashes import PackedHashes
from kvxfer.lookup.key_spaces import KeySpacesPayload
from kvxfer.lookup.protocol import MessageType, Reply, Status

WAIT_S = 20
OVERHEAD_BYTES = 64 << 10
"""What a decoder may take besides the frame: objects, the message of an error."""
HASHES = PackedHashes.pack([bytes([i]) * 32 for i in range(4)])

GOOD_REQUESTS = [
    protocol.encode_lookup(7, 64, HASHES),
    protocol.encode_reset(7, 3, True, 1.5),
    protocol.encode_ping(7),
    protocol.encode_key_spaces(7, KeySpacesPayload(((0, b"kvx1/"), (1, b"k")), (0,)).encode()),
]
GOOD_REPLIES = [
    (protocol.encode_reply(Reply(MessageType.LOOKUP_REPLY, 7, Status.OK, 64, ((0, 48), (1, 64)))),),
    (protocol.encode_reply(Reply(MessageType.RESET_REPLY, 7, Status.FAILED)),),
    (protocol.encode_reply(Reply(MessageType.MALFORMED_REPLY, 7, Status.MALFORMED)),),
]


@st.composite
def damaged(draw, good):
    """Draw the frames of a good message with bytes changed, cut, added, frames repeated or lost."""
    frames = [bytearray(frame) for frame in draw(st.sampled_from(good))]
    for _ in range(draw(st.integers(0, 4))):
        frame = draw(st.sampled_from(frames))
        act = draw(st.sampled_from(["flip", "cut", "grow", "word"]))
        at = draw(st.integers(0, len(frame)))
        if act == "flip" and at < len(frame):
            frame[at] ^= 1 << draw(st.integers(0, 7))
        elif act == "cut":
            del frame[at:]
        elif act == "grow":
            frame[at:at] = draw(st.binary(max_size=40))
        else:
            frame[at : at + 8] = struct.pack("<Q", draw(st.sampled_from([0, 2**31, 2**64 - 1])))
    frames += draw(st.lists(st.binary(max_size=8).map(bytearray), max_size=2))
    return [bytes(frame) for frame in frames[draw(st.integers(0, 1)) :]]


any_frames = st.lists(st.binary(max_size=60), max_size=4)


def peak_bytes(act):
    """Return how much memory ``act`` took at most, beyond what was there."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        with contextlib.suppress(ProtocolError):
            act()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


@given(damaged(GOOD_REQUESTS) | any_frames)
def test_damaged_requests_are_read_or_refused_in_bounded_memory(frames):
    budget = OVERHEAD_BYTES + 4 * sum(map(len, frames))
    assert peak_bytes(lambda: protocol.decode_request(frames)) <= budget


@given(damaged(GOOD_REPLIES) | any_frames)
def test_damaged_replies_are_read_or_refused_in_bounded_memory(frames):
    budget = OVERHEAD_BYTES + 4 * sum(map(len, frames))
    assert peak_bytes(lambda: protocol.decode_reply(frames)) <= budget


@pytest.mark.parametrize("num_tails", [protocol.MAX_TAILS + 1, 500_000, 2**32 - 1])
def test_a_reply_of_too_many_tails_is_refused_before_they_are_read(num_tails):
    head = protocol._LOOKUP_REPLY.pack(b"kx", 1, MessageType.LOOKUP_REPLY, 7, 0, 64, num_tails)
    frame = head + bytes(12 * min(num_tails, 500_000))
    with pytest.raises(ProtocolError, match="tail"):
        protocol.decode_reply([frame])
    assert peak_bytes(lambda: protocol.decode_reply([frame])) <= OVERHEAD_BYTES


SMALL_KEY_SPACES = KeySpacesPayload(((0, b"kvx1/a"), (3, b"kvx1/b")), (0,)).encode()


@given(st.binary(max_size=200) | damaged([(SMALL_KEY_SPACES,)]).map(b"".join))
@example(b"\x91\xdd\xff\xff\xff\xff")  # an array of 2**32 - 1 entries, none of them there
@example(b"\x91" * 10_000)
@example(b"\x91\x91\x92\x01\xc6\xff\xff\xff\xff")
@example(b"\x92\x90\xdd\x10\x00\x00\x00")
def test_key_spaces_of_any_bytes_are_read_or_refused_in_bounded_memory(payload):
    assert peak_bytes(lambda: KeySpacesPayload.decode(payload)) <= OVERHEAD_BYTES + 64 * len(
        payload
    )
    with contextlib.suppress(ProtocolError):
        told = KeySpacesPayload.decode(payload)
        assert KeySpacesPayload.decode(told.encode()) == told


# Over the socket


@pytest.fixture(scope="module")
def at():
    """An endpoint in a private folder with a short path, which a socket's name needs."""
    folder = Path(tempfile.mkdtemp(prefix="kvx"))
    yield Endpoint.for_engine("engine", folder=folder)
    shutil.rmtree(folder)


class Server:
    """A server with handlers that believe everything, and a raw peer beside its client."""

    def __init__(self, at):
        self.server = LookupServer(
            at, self.on_lookup, lambda *_: True, lambda payload: KeySpacesPayload.decode(payload)
        )
        self.client = LookupClient(at, timeout_s=WAIT_S)
        self.context = zmq.Context()
        self.raw = self.context.socket(zmq.DEALER)
        self.raw.setsockopt(zmq.LINGER, 0)
        self.raw.connect(at.url)

    def on_lookup(self, num_tokens, hashes):
        return min(num_tokens, 16 * len(hashes)), []

    def close(self):
        self.raw.close()
        self.context.term()
        self.client.close()
        self.server.close()


@pytest.fixture(scope="module")
def served(at):
    with contextlib.closing(Server(at)) as server:
        yield server


@settings(max_examples=150)
@given(frames=damaged(GOOD_REQUESTS) | any_frames)
@example(frames=[b"x"] * 5000)
def test_a_server_sent_anything_answers_the_next_good_question(served, frames):
    if frames:
        served.raw.send_multipart(frames)
    served.raw.send_multipart(protocol.encode_ping(99))  # in order: the frames were handled
    while True:
        assert served.raw.poll(WAIT_S * 1000), "the server no longer answers"
        reply = protocol.decode_reply(served.raw.recv_multipart())
        if reply.message_type is MessageType.PING_REPLY and reply.request_id == 99:
            break
    deadline_s = time.monotonic() + WAIT_S
    while (answer := ask(served.client)).status is Status.NOT_READY:  # it was a good reset
        assert time.monotonic() < deadline_s
    assert (answer.status, answer.hit_length) == (Status.OK, 64)


def ask(client):
    return client.lookup("good", 64, HASHES, blocking=True)


class RawServer:
    """A peer that sends a client whatever it is told to, and a client that trusts nobody."""

    def __init__(self, at):
        self.context = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self.router.setsockopt(zmq.LINGER, 0)
        self.router.bind(at.url)
        self.client = LookupClient(at, timeout_s=WAIT_S)

    def exchange(self, frames):
        """Answer one question with ``frames`` and then truly; return what the client made of it."""
        while self.client.num_in_flight == 0:  # until its connection stands
            answer = self.client.lookup("good", 64, HASHES)
            assert answer is None or answer.status is Status.UNSENT
        assert self.router.poll(WAIT_S * 1000)
        sender, *request = self.router.recv_multipart()
        request_id = protocol.peek_request_id(request)
        if frames:
            self.router.send_multipart([sender, *frames])
        true = Reply(MessageType.LOOKUP_REPLY, request_id, Status.OK, 64)
        self.router.send_multipart([sender, protocol.encode_reply(true)])
        return ask(self.client)

    def close(self):
        self.client.close()
        self.router.close()
        self.context.term()


@pytest.fixture(scope="module")
def lied_to():
    folder = Path(tempfile.mkdtemp(prefix="kvx"))
    at = Endpoint.for_engine("liar", folder=folder)
    with contextlib.closing(RawServer(at)) as server:
        yield server
    shutil.rmtree(folder)


@settings(max_examples=150)
@given(frames=damaged(GOOD_REPLIES) | any_frames)
@example(frames=[])
@example(frames=[b""] * 5000)
def test_a_client_sent_anything_takes_the_next_good_answer(lied_to, frames):
    """The ids of the damaged replies are 7: no question of a client has that one."""
    answer = lied_to.exchange(frames)
    assert (answer.status, answer.hit_length) == (Status.OK, 64)
    assert lied_to.client.num_open == lied_to.client.num_in_flight == 0


def test_a_flood_of_replies_does_not_keep_a_client_from_returning(lied_to):
    """A call takes in a bounded number of replies, however fast more of them come."""
    lied_to.exchange([])
    lied_to.client.lookup("flooded", 64, HASHES)
    assert lied_to.router.poll(WAIT_S * 1000)
    sender = lied_to.router.recv_multipart()[0]
    foreign = protocol.encode_reply(Reply(MessageType.LOOKUP_REPLY, 7, Status.OK, 64))
    received = 0

    class EndlessSocket:
        """The client's socket, with a foreign reply always waiting."""

        closed = False

        def getsockopt(self, option):
            return zmq.POLLIN

        def recv_multipart(self, *_, **__):
            nonlocal received
            received += 1
            assert received < 100_000, "the client never came back"
            return [foreign]

    true, lied_to.client._socket = lied_to.client._socket, EndlessSocket()
    try:
        assert lied_to.client.lookup("flooded", 64, HASHES) is None
    finally:
        lied_to.client._socket = true
    assert received > 0
    lied_to.client.discard("flooded")
    assert sender


# Locks


@contextlib.contextmanager
def holding(folder):
    """Hold the lock of an endpoint's folder, as a process that was stopped there does."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(descriptor)


def in_time(act, timeout_s=WAIT_S):
    """Run ``act`` in a thread; return its result or exception, or fail if it does not return."""
    results = []

    def run():
        try:
            results.append(act())
        except ConfigError as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout_s)
    assert results, "it did not return"
    return results[0]


def test_a_folder_that_is_locked_for_ever_is_refused_in_time(at, monkeypatch):
    monkeypatch.setattr(endpoint, "LOCK_TIMEOUT_S", 0.1)
    at.ensure_private_folder()
    with holding(at.path.parent):
        error = in_time(lambda: Endpoint.for_engine("locked", folder=at.path.parent).listen())
    assert isinstance(error, ConfigError)
    assert "locked by another process" in str(error)


def test_a_server_closes_in_time_while_its_folder_is_locked(tmp_path_factory, monkeypatch, caplog):
    monkeypatch.setattr(endpoint, "LOCK_TIMEOUT_S", 0.1)
    folder = Path(tempfile.mkdtemp(prefix="kvx"))
    at = Endpoint.for_engine("closing", folder=folder)
    server = LookupServer(at, lambda *_: (0, []), lambda *_: True)
    with holding(folder):
        assert in_time(server.close) is None
    assert "is left behind" in caplog.text
    with LookupServer(at, lambda *_: (16, []), lambda *_: True), LookupClient(at) as client:
        assert client.ping(WAIT_S)
    shutil.rmtree(folder)
