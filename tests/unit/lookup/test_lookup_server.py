# SPDX-License-Identifier: Apache-2.0
"""The server answers everything, and nothing that a client sends or a handler does ends it."""

import os
import socket
import struct

import pytest

from kvxfer.lookup import LookupReply, LookupServer, PackedHashes, Status, protocol
from kvxfer.lookup.protocol import MessageType, Reply

HASHES = [bytes([number]) * 32 for number in range(4)]
HIT = LookupReply(Status.OK, 16)
WAIT_S = 20


def look_up(client, key="a"):
    return client.lookup(key, 64, HASHES, blocking=True)


def test_server_hands_length_and_hashes_to_the_handler(make_server, make_client, handlers):
    make_server()
    look_up(make_client())
    assert handlers.lookups == [(64, HASHES, 32)]


def test_server_carries_the_tail_boundaries(make_server, make_client, handlers):
    make_server()
    handlers.answer = (48, [(0, 48), (3, 40)])
    assert look_up(make_client()) == LookupReply(Status.OK, 48, ((0, 48), (3, 40)))


def test_lookup_that_raises_is_a_miss_and_the_next_one_is_normal(
    make_server, make_client, handlers, caplog
):
    server = make_server()
    client = make_client()
    handlers.answer = lambda number: [][number] if number == 1 else (16, [])
    assert look_up(client) == LookupReply(Status.FAILED)
    assert look_up(client) == HIT
    assert (server.counters.lookups, server.counters.failed) == (2, 1)
    assert "IndexError" in caplog.text


def test_failures_are_logged_at_a_bounded_rate(make_server, make_client, handlers, caplog):
    make_server()
    client = make_client()
    handlers.answer = lambda number: [][number]
    assert {look_up(client).status for _ in range(20)} == {Status.FAILED}
    assert len([record for record in caplog.records if "failed" in record.message]) == 1


@pytest.mark.parametrize(
    "answer",
    [None, 16, (16,), (-1, []), (2**40, []), ("16", []), (16, None), (16, [(0,)]), (16, [(-1, 0)])],
    ids=repr,
)
def test_answer_that_makes_no_sense_is_a_miss(make_server, make_client, handlers, answer):
    make_server()
    client = make_client()
    handlers.answer = answer
    assert look_up(client) == LookupReply(Status.FAILED)
    handlers.answer = (16, [])
    assert look_up(client) == HIT


def lookup_header(num_tokens=16, width=4, kind=MessageType.LOOKUP, version=protocol.VERSION):
    return struct.pack("<2sBBQQI", b"kx", version, kind, 99, num_tokens, width)


UNREADABLE = {
    "empty_frame": [b""],
    "empty_frames": [b"", b"", b""],
    "cut_short": [b"kx\x01\x01"],
    "garbage": [b"\xff" * 64],
    "pickle": [b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00."],
    "many_frames": [b"x"] * 500,
}
MALFORMED = {
    "no_body": [lookup_header()],
    "three_frames": [lookup_header(), b"abcd", b""],
    "broken_hash": [lookup_header(), b"abcde"],
    "no_width": [lookup_header(width=0), b"abcd"],
    "huge_width": [lookup_header(width=2**32 - 1), b"abcd"],
    "huge_length": [lookup_header(num_tokens=2**64 - 1), b"abcd"],
    "other_version": [lookup_header(version=9), b"abcd"],
    "unknown_type": [lookup_header(kind=77), b"abcd"],
    "reply": [lookup_header(kind=MessageType.LOOKUP_REPLY), b"abcd"],
    "long_header": [lookup_header() + bytes(1000), b"abcd"],
}


@pytest.mark.parametrize("frames", UNREADABLE.values(), ids=UNREADABLE)
def test_unreadable_frames_are_dropped(make_server, make_client, raw_client, frames, handlers):
    server = make_server()
    raw_client.send(*frames)
    assert raw_client.ping(request_id=7).request_id == 7
    assert look_up(make_client()) == HIT
    assert server.counters.malformed == 1


@pytest.mark.parametrize("frames", MALFORMED.values(), ids=MALFORMED)
def test_malformed_request_is_answered_by_its_id(make_server, make_client, raw_client, frames):
    make_server()
    raw_client.send(*frames)
    assert raw_client.receive() == Reply(MessageType.MALFORMED_REPLY, 99, Status.MALFORMED)
    assert raw_client.ping().status is Status.OK
    assert look_up(make_client()) == HIT


def test_oversized_message_costs_its_sender_the_connection_only(
    make_server, make_client, raw_client, monkeypatch, wait_until
):
    monkeypatch.setattr(protocol, "MAX_BODY_BYTES", 2**16)
    server = make_server()
    client = make_client()
    assert look_up(client) == HIT
    raw_client.send(lookup_header(), bytes(2**16 + 4))

    def pinged():  # what is sent before the connection ends is lost
        raw_client.send(*protocol.encode_ping(7))
        return raw_client.socket.poll(50) and raw_client.receive().status is Status.OK

    wait_until(pinged, "a new connection")
    assert look_up(client) == HIT
    assert server.counters.malformed == 0  # never handed to the server at all


def test_foreign_connection_that_speaks_no_zmq_is_ignored(make_server, make_client, endpoint):
    make_server()
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(endpoint.path))
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 20)
        assert look_up(make_client()) == HIT


def test_requests_wait_in_line_and_are_all_answered(make_server, make_client, handlers, make_gate):
    gate = make_gate((16, []))
    handlers.answer = lambda number: gate() if number == 1 else (number, [])
    make_server()
    client = make_client()
    assert client.ping(WAIT_S)
    keys = [str(number) for number in range(1, 51)]
    assert {client.lookup(key, 64, HASHES) for key in keys} == {None}
    gate.released.set()
    assert [look_up(client, key).hit_length for key in keys[1:]] == list(range(2, 51))


def test_ping_is_answered(make_server, make_client):
    make_server()
    assert make_client().ping(WAIT_S) is True


def test_key_spaces_reach_the_handler(make_server, make_client, handlers):
    make_server()
    assert make_client().send_key_spaces(b"\0opaque\xff", WAIT_S) is True
    assert handlers.key_spaces == [b"\0opaque\xff"]


def test_key_spaces_that_are_refused_are_false(make_server, make_client, handlers):
    make_server()
    client = make_client()
    handlers.on_key_spaces = lambda payload: 1 / len(payload)
    assert client.send_key_spaces(b"", WAIT_S) is False
    assert client.send_key_spaces(b"x", WAIT_S) is True


def test_key_spaces_without_a_handler_are_false(endpoint, make_client, handlers, closing):
    closing(LookupServer(endpoint, handlers.on_lookup, handlers.on_reset))
    assert make_client().send_key_spaces(b"x", WAIT_S) is False


def test_reset_passes_its_arguments_and_is_true_when_done(make_server, make_client, handlers):
    make_server()
    seen = []
    handlers.on_reset = lambda *args: seen.append(args) or True
    client = make_client()
    assert client.reset(WAIT_S) is True
    assert client.reset(1.5, epoch=7, remove=False) is True
    assert seen == [(0, True, WAIT_S), (7, False, 1.5)]


@pytest.mark.parametrize("outcome", ["false", "raises"])
def test_reset_that_fails_is_false_and_lookups_go_on(
    make_server, make_client, handlers, caplog, outcome
):
    make_server()
    client = make_client()
    handlers.on_reset = lambda *args: False if outcome == "false" else {}[args]
    assert client.reset(WAIT_S) is False
    assert look_up(client) == HIT
    assert "reset: the handler" in caplog.text


def test_reset_that_takes_too_long_is_false_and_misses_until_it_ends(
    make_server, make_client, handlers, make_gate, wait_until
):
    gate = make_gate(True)
    handlers.on_reset = gate
    server = make_server()
    client = make_client()
    assert client.reset(0.1) is False
    assert gate.entered.wait(WAIT_S)
    assert look_up(client) == LookupReply(Status.NOT_READY)
    assert handlers.lookups == []
    gate.released.set()
    wait_until(lambda: look_up(client) == HIT, "a normal lookup")
    assert server.counters.not_ready >= 1
    assert client.counters.late_dropped == 1  # the reply to the reset


def test_reset_does_not_hold_up_other_clients(
    make_server, make_client, handlers, make_gate, background
):
    gate = make_gate(True)
    handlers.on_reset = gate
    make_server()
    resetting, other = make_client(), make_client()
    join_reset = background(lambda: resetting.reset(WAIT_S))
    assert gate.entered.wait(WAIT_S)
    assert other.ping(WAIT_S) is True
    assert look_up(other) == LookupReply(Status.NOT_READY)
    assert other.send_key_spaces(b"x", WAIT_S) is False
    assert other.reset(WAIT_S) is False
    gate.released.set()
    assert join_reset() is True
    assert look_up(other) == HIT
    assert handlers.key_spaces == []


def test_resets_follow_one_another(make_server, make_client):
    make_server()
    client = make_client()
    assert [client.reset(WAIT_S) for _ in range(20)] == [True] * 20


def test_late_answer_never_answers_the_next_question(
    make_server, make_client, handlers, make_gate, clock
):
    gate = make_gate((64, []))
    handlers.answer = lambda number: gate() if number == 1 else (16, [])
    make_server()
    client = make_client(timeout_s=1.0, clock=clock)
    assert client.ping(WAIT_S)
    assert client.lookup("a", 64, HASHES) is None
    assert gate.entered.wait(WAIT_S)
    clock.now_s += 1
    assert client.lookup("a", 64, HASHES) == LookupReply(Status.TIMED_OUT)
    assert client.lookup("a", 64, HASHES) is None
    gate.released.set()
    assert look_up(client) == HIT
    assert client.counters.late_dropped == 1


def test_server_carries_the_hashes_of_a_long_prompt(make_server, make_client, handlers):
    make_server()
    hashes = PackedHashes(os.urandom(8192 * 32), 32)
    client = make_client()
    assert client.lookup("long", 131072, hashes, blocking=True) == HIT
    assert handlers.lookups == [(131072, list(hashes), 32)]
