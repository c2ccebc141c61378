# SPDX-License-Identifier: Apache-2.0
"""Messages survive the wire; bytes that are no message raise ProtocolError and nothing else."""

import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvxfer.errors import ProtocolError
from kvxfer.lookup import PackedHashes, Status, protocol
from kvxfer.lookup.protocol import (
    KeySpacesRequest,
    LookupRequest,
    MessageType,
    PingRequest,
    Reply,
    ResetRequest,
)

request_ids = st.integers(0, 2**64 - 1)
epochs = st.integers(0, 2**64 - 1)
token_counts = st.integers(0, protocol.MAX_TOKENS)
tails = st.lists(st.tuples(st.integers(0, 2**32 - 1), token_counts), max_size=8).map(tuple)
replies = st.one_of(
    st.builds(
        Reply,
        st.just(MessageType.LOOKUP_REPLY),
        request_ids,
        st.just(Status.OK),
        token_counts,
        tails,
    ),
    st.builds(
        Reply,
        st.sampled_from([kind for kind in MessageType if kind > 128]),
        request_ids,
        st.sampled_from([Status.FAILED, Status.MALFORMED, Status.NOT_READY]),
    ),
)


@st.composite
def packed_hashes(draw):
    width = draw(st.integers(1, protocol.MAX_HASH_BYTES))
    return PackedHashes(
        draw(st.binary(max_size=600).map(lambda b: b[: len(b) // width * width])), width
    )


@st.composite
def valid_requests(draw):
    request_id = draw(request_ids)
    kind = draw(st.sampled_from(["lookup", "reset", "ping", "key_spaces"]))
    if kind == "lookup":
        return protocol.encode_lookup(request_id, draw(token_counts), draw(packed_hashes()))
    if kind == "reset":
        return protocol.encode_reset(
            request_id, draw(epochs), draw(st.booleans()), draw(st.floats(0, 1e6))
        )
    if kind == "ping":
        return protocol.encode_ping(request_id)
    return protocol.encode_key_spaces(request_id, draw(st.binary(max_size=100)))


@st.composite
def damaged(draw, frames):
    """Valid frames with bytes changed, cut off, added, or with frames lost or doubled."""
    frames = [bytearray(frame) for frame in draw(frames)]
    for _ in range(draw(st.integers(1, 4))):
        frame = draw(st.sampled_from(frames)) if frames else bytearray()
        action = draw(st.sampled_from(["change", "cut", "grow", "drop", "double"]))
        if action == "change" and frame:
            frame[draw(st.integers(0, len(frame) - 1))] = draw(st.integers(0, 255))
        elif action == "cut":
            del frame[draw(st.integers(0, len(frame))) :]
        elif action == "grow":
            frame += draw(st.binary(max_size=20))
        elif action == "drop" and frames:
            frames.pop(draw(st.integers(0, len(frames) - 1)))
        elif action == "double" and len(frames) < 4:
            frames.append(bytearray(frame))
    return [bytes(frame) for frame in frames]


any_frames = st.lists(st.binary(max_size=80), max_size=4)
prefixed_frames = st.tuples(
    st.sampled_from(list(MessageType)), request_ids, st.binary(max_size=40), any_frames
).map(lambda t: [struct.pack("<2sBBQ", b"kx", protocol.VERSION, t[0], t[1]) + t[2], *t[3]])


@given(request_ids, token_counts, packed_hashes())
def test_lookup_survives_the_wire(request_id, num_tokens, hashes):
    frames = protocol.encode_lookup(request_id, num_tokens, hashes)
    assert protocol.decode_request(frames) == LookupRequest(request_id, num_tokens, hashes)


def test_lookup_without_hashes_survives_the_wire():
    request = protocol.decode_request(protocol.encode_lookup(1, 15, PackedHashes.pack([])))
    assert (request.num_tokens, len(request.hashes)) == (15, 0)


def test_lookup_carries_the_hashes_without_a_copy():
    owner = bytearray(b"aabb")
    header, body = protocol.encode_lookup(1, 2, PackedHashes(owner, 2))
    request = protocol.decode_request([header, body])
    owner[0] = ord("z")
    assert request.hashes[0] == b"za"


@given(request_ids, epochs, st.booleans(), st.floats(0, 1e6))
def test_reset_survives_the_wire(request_id, epoch, remove, timeout_s):
    request = protocol.decode_request(protocol.encode_reset(request_id, epoch, remove, timeout_s))
    assert request == ResetRequest(request_id, epoch, remove, pytest.approx(timeout_s, abs=0.0005))


@pytest.mark.parametrize(("timeout_s", "carried_s"), [(-1, 0), (1e9, (2**32 - 1) / 1000)])
def test_reset_keeps_its_timeout_within_the_field(timeout_s, carried_s):
    request = protocol.decode_request(protocol.encode_reset(1, 2, True, timeout_s))
    assert request.timeout_s == carried_s


@given(request_ids)
def test_ping_survives_the_wire(request_id):
    assert protocol.decode_request(protocol.encode_ping(request_id)) == PingRequest(request_id)


@given(request_ids, st.binary())
def test_key_spaces_survive_the_wire(request_id, payload):
    request = protocol.decode_request(protocol.encode_key_spaces(request_id, payload))
    assert request == KeySpacesRequest(request_id, memoryview(payload))


@given(replies)
def test_reply_survives_the_wire(reply):
    assert protocol.decode_reply([protocol.encode_reply(reply)]) == reply


def decode_fails_only_with_protocol_error(decode, frames):
    try:
        return decode(frames)
    except ProtocolError:
        return None


@given(any_frames | prefixed_frames | damaged(valid_requests()))
@example([])
@example([b""])
@example([b"kx"])
def test_decode_request_raises_nothing_but_protocol_error(frames):
    decode_fails_only_with_protocol_error(protocol.decode_request, frames)


@given(any_frames | prefixed_frames | damaged(replies.map(lambda r: [protocol.encode_reply(r)])))
@example([])
@example([b""])
def test_decode_reply_raises_nothing_but_protocol_error(frames):
    decode_fails_only_with_protocol_error(protocol.decode_reply, frames)


@given(any_frames | prefixed_frames | damaged(valid_requests()))
def test_peek_request_id_never_raises_and_agrees_with_the_decoder(frames):
    peeked = protocol.peek_request_id(frames)
    request = decode_fails_only_with_protocol_error(protocol.decode_request, frames)
    if request is not None:
        assert peeked == request.request_id


def header(kind=MessageType.LOOKUP, magic=b"kx", version=protocol.VERSION, rest=b""):
    return struct.pack("<2sBBQ", magic, version, kind, 5) + rest


def lookup_frames(num_tokens=16, width=4, body=b"abcd"):
    return [header(rest=struct.pack("<QI", num_tokens, width)), body]


MALFORMED_REQUESTS = {
    "no_frame": ([], "one or two frames"),
    "three_frames": ([b"", b"", b""], "one or two frames"),
    "cut_short": ([header()[:-1]], "cut short"),
    "foreign_magic": ([header(magic=b"xx")], "magic"),
    "future_version": ([header(version=2)], "version 2"),
    "unknown_type": ([header(kind=9)], "unknown message type 9"),
    "reply_as_request": ([header(kind=MessageType.PING_REPLY)], "not a request"),
    "lookup_without_body": (lookup_frames()[:1], "missing"),
    "lookup_with_more_header": ([lookup_frames()[0] + b"\0", b"abcd"], "expected 24"),
    "too_many_tokens": (lookup_frames(num_tokens=2**31), "num_tokens"),
    "too_wide": (lookup_frames(width=129, body=bytes(129)), "of 129 bytes"),
    "broken_hash": (lookup_frames(body=b"abcde"), "no whole number"),
    "hashes_of_no_width": (lookup_frames(width=0), "no whole number"),
    "too_many_hashes": (lookup_frames(width=1, body=bytes(2**22 + 1)), "4194305 hashes"),
    "ping_with_body": ([header(MessageType.PING), b""], "no body"),
    "ping_with_more": ([header(MessageType.PING, rest=b"\0")], "expected 12"),
    "reset_without_timeout": ([header(MessageType.RESET)], "expected 25"),
    "reset_that_half_removes": ([header(MessageType.RESET, rest=bytes(12) + b"\2")], "remove is 2"),
    "key_spaces_without_body": ([header(MessageType.KEY_SPACES)], "missing"),
}


@pytest.mark.parametrize(("frames", "message"), MALFORMED_REQUESTS.values(), ids=MALFORMED_REQUESTS)
def test_decode_request_says_what_is_wrong(frames, message):
    with pytest.raises(ProtocolError, match=message):
        protocol.decode_request(frames)


def test_decode_request_bounds_the_body(monkeypatch):
    monkeypatch.setattr(protocol, "MAX_BODY_BYTES", 8)
    with pytest.raises(ProtocolError, match="bound is 8"):
        protocol.decode_request(lookup_frames(body=bytes(12)))


def test_encoders_refuse_what_the_decoder_would(monkeypatch):
    monkeypatch.setattr(protocol, "MAX_BODY_BYTES", 8)
    with pytest.raises(ProtocolError, match="bound is 8"):
        protocol.encode_key_spaces(1, bytes(9))
    with pytest.raises(ProtocolError, match="bound is 8"):
        protocol.encode_lookup(1, 1, PackedHashes(bytes(12), 4))
    with pytest.raises(ProtocolError, match="num_tokens is -1"):
        protocol.encode_lookup(1, -1, PackedHashes(b"", 4))


def lookup_reply(status=0, hit_length=16, num_tails=0, rest=b""):
    return [
        header(
            MessageType.LOOKUP_REPLY, rest=struct.pack("<BQI", status, hit_length, num_tails) + rest
        )
    ]


MALFORMED_REPLIES = {
    "no_frame": ([], "one frame"),
    "two_frames": ([b"", b""], "one frame"),
    "request_as_reply": ([header(MessageType.PING)], "not a reply"),
    "cut_short": ([header(MessageType.LOOKUP_REPLY)], "cut short"),
    "unknown_status": (lookup_reply(status=77), "unknown status"),
    "status_of_the_client": (lookup_reply(status=Status.TIMED_OUT), "unknown status"),
    "hit_too_long": (lookup_reply(hit_length=2**31), "bound"),
    "hit_of_a_failure": (lookup_reply(status=1), "carries a hit"),
    "tail_missing": (lookup_reply(num_tails=1), "1 tails take"),
    "tail_too_many": (lookup_reply(rest=bytes(12)), "0 tails take"),
    "tail_too_long": (lookup_reply(num_tails=1, rest=struct.pack("<IQ", 0, 2**31)), "bound"),
    "tails_past_the_bound": (lookup_reply(num_tails=4097, rest=bytes(4097 * 12)), "4097 tail"),
    "ping_reply_with_more": ([header(MessageType.PING_REPLY, rest=b"\0\0")], "expected 13"),
}


@pytest.mark.parametrize(("frames", "message"), MALFORMED_REPLIES.values(), ids=MALFORMED_REPLIES)
def test_decode_reply_says_what_is_wrong(frames, message):
    with pytest.raises(ProtocolError, match=message):
        protocol.decode_reply(frames)


@pytest.mark.parametrize(
    ("status", "hit_length", "tails"),
    [
        (Status.OK, -1, ()),
        (Status.OK, 2**31, ()),
        (Status.OK, None, ()),
        (Status.OK, 16, ((0,),)),
        (Status.OK, 16, ((-1, 16),)),
        (Status.OK, 16, ((0, 2**31),)),
        (Status.OK, 16, (("group", 16),)),
        (Status.OK, 16, ((0, 16),) * 4097),
        (Status.FAILED, 16, ()),
        (Status.UNSENT, 0, ()),
    ],
)
def test_encode_reply_refuses_an_impossible_answer(status, hit_length, tails):
    with pytest.raises(ProtocolError):
        protocol.encode_reply(Reply(MessageType.LOOKUP_REPLY, 1, status, hit_length, tails))
