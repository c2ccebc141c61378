# SPDX-License-Identifier: Apache-2.0
"""The frames of the lookup channel: pure functions between messages and bytes.

A message is one header frame and, where it has one, one body frame. Numbers are little-endian.

    every header     magic "kx", version u8, type u8, request id u64
    LOOKUP           + num_tokens u64, hash width u32           body: the hashes, back to back
    RESET            + epoch u64, timeout in ms u32, remove u8
    PING             nothing more
    KEY_SPACES       nothing more                               body: an opaque payload
    every reply      + status u8, and for LOOKUP_REPLY:
                     + hit length u64, number of tails u32, then (group u32, tokens u64) each

A reply repeats the request id. ``MALFORMED_REPLY`` answers whatever could not be read beyond
its id. Decoders take bytes from anybody: each count has a bound, and anything out of place
raises ``ProtocolError``, nothing else. Hashes and payloads are views of the received frame.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvxfer.errors import ProtocolError
from kvxfer.lookup.hashes import Buffer, PackedHashes

VERSION = 1
MAX_TOKENS = 2**31 - 1  # token positions are int32 in the native modules
MAX_HASHES = 2**22
MAX_HASH_BYTES = 128
MAX_TAILS = 4096
MAX_BODY_BYTES = 64 * 2**20  # 2 Mi hashes of 32 bytes: a prompt of 33 million tokens

_MAGIC = b"kx"
_PREFIX = struct.Struct("<2sBBQ")
_LOOKUP = struct.Struct("<2sBBQQI")
_RESET = struct.Struct("<2sBBQQIB")
_REPLY = struct.Struct("<2sBBQB")
_LOOKUP_REPLY = struct.Struct("<2sBBQBQI")
_TAIL = struct.Struct("<IQ")
_MAX_U32 = 2**32 - 1


class MessageType(enum.IntEnum):
    """What a message is; replies are the numbers from 129 on."""

    LOOKUP = 1
    RESET = 2
    PING = 3
    KEY_SPACES = 4
    LOOKUP_REPLY = 129
    RESET_REPLY = 130
    PING_REPLY = 131
    KEY_SPACES_REPLY = 132
    MALFORMED_REPLY = 255


class Status(enum.IntEnum):
    """How a request fared; for a lookup everything but ``OK`` is a miss."""

    OK = 0
    FAILED = 1
    """The server's handler raised or refused; the reason is in the server's log."""
    MALFORMED = 2
    """One side could not read the other, or did not believe it."""
    NOT_READY = 3
    """The server is resetting."""
    TIMED_OUT = 128
    """No answer within the deadline. Never on the wire, like the next."""
    UNSENT = 129
    """The question could not be sent: no server, or a full queue."""


_WIRE_STATUSES = {status.value: status for status in Status if status < 128}


@dataclass(frozen=True, slots=True)
class LookupRequest:
    """How much of this prefix is stored?"""

    reply_type: ClassVar[MessageType] = MessageType.LOOKUP_REPLY
    request_id: int
    num_tokens: int
    hashes: PackedHashes


@dataclass(frozen=True, slots=True)
class ResetRequest:
    """Drain the saves ordered before ``epoch``; then, with ``remove``, remove our own prefix."""

    reply_type: ClassVar[MessageType] = MessageType.RESET_REPLY
    request_id: int
    epoch: int
    remove: bool
    timeout_s: float
    """How long the client waits for the reply."""


@dataclass(frozen=True, slots=True)
class PingRequest:
    """Answer, to show that the channel works."""

    reply_type: ClassVar[MessageType] = MessageType.PING_REPLY
    request_id: int


@dataclass(frozen=True, slots=True)
class KeySpacesRequest:
    """Take the key prefixes of the other ranks, in the caller's own encoding."""

    reply_type: ClassVar[MessageType] = MessageType.KEY_SPACES_REPLY
    request_id: int
    payload: memoryview


Request = LookupRequest | ResetRequest | PingRequest | KeySpacesRequest


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer; ``hit_length`` and ``tail_boundaries`` are set for a lookup that is ``OK``."""

    message_type: MessageType
    request_id: int
    status: Status
    hit_length: int = 0
    tail_boundaries: tuple[tuple[int, int], ...] = ()
    """(group, tokens) for each group whose tail block is stored under another boundary."""


def encode_lookup(request_id: int, num_tokens: int, hashes: PackedHashes) -> tuple[bytes, Buffer]:
    """Return header and body of a LOOKUP; the body is the hashes' own buffer, not a copy.

    Raises ``ProtocolError`` for a request that the decoder would refuse.
    """
    _check_lookup(num_tokens, hashes.width, hashes.buffer.nbytes)
    header = _LOOKUP.pack(_MAGIC, VERSION, MessageType.LOOKUP, request_id, num_tokens, hashes.width)
    return header, hashes.buffer


def encode_reset(request_id: int, epoch: int, remove: bool, timeout_s: float) -> tuple[bytes]:
    """Return the frame of a RESET whose sender waits for ``timeout_s``."""
    timeout_ms = min(max(0, round(timeout_s * 1000)), _MAX_U32)
    head = (_MAGIC, VERSION, MessageType.RESET, request_id)
    return (_RESET.pack(*head, epoch, timeout_ms, remove),)


def encode_ping(request_id: int) -> tuple[bytes]:
    """Return the frame of a PING."""
    return (_PREFIX.pack(_MAGIC, VERSION, MessageType.PING, request_id),)


def encode_key_spaces(request_id: int, payload: Buffer) -> tuple[bytes, Buffer]:
    """Return header and body of a KEY_SPACES; ``ProtocolError`` for an oversized payload."""
    if len(payload) > MAX_BODY_BYTES:
        raise ProtocolError(f"payload of {len(payload)} bytes, the bound is {MAX_BODY_BYTES}")
    return _PREFIX.pack(_MAGIC, VERSION, MessageType.KEY_SPACES, request_id), payload


def decode_request(frames: Sequence[Buffer]) -> Request:
    """Return the request that the frames hold; ``ProtocolError`` if they hold none.

    Views in the result keep the frames' memory alive.
    """
    header, body = _split(frames)
    message_type, request_id = _read_prefix(header)
    if message_type is MessageType.LOOKUP:
        return _decode_lookup(header, _required(body))
    if message_type is MessageType.KEY_SPACES:
        _check_size(header, _PREFIX)
        return KeySpacesRequest(request_id, _required(body))
    if body is not None:
        raise ProtocolError(f"{message_type.name} has no body, got {body.nbytes} bytes")
    if message_type is MessageType.RESET:
        return _decode_reset(header)
    if message_type is MessageType.PING:
        _check_size(header, _PREFIX)
        return PingRequest(request_id)
    raise ProtocolError(f"{message_type.name} is not a request")


def peek_request_id(frames: Sequence[Buffer]) -> int | None:
    """Return the id of a message of any type and version, or None where there is none to read."""
    if not frames:
        return None
    header = memoryview(frames[0])
    if header.nbytes < _PREFIX.size or header[: len(_MAGIC)] != _MAGIC:
        return None
    return int(_PREFIX.unpack_from(header)[-1])


def encode_reply(reply: Reply) -> bytes:
    """Return the frame of a reply; ``ProtocolError`` for one that the decoder would refuse."""
    head = (_MAGIC, VERSION, reply.message_type, reply.request_id, reply.status)
    if reply.message_type is not MessageType.LOOKUP_REPLY:
        return _REPLY.pack(*head)
    tails = reply.tail_boundaries
    try:
        _check_answer(reply.status, reply.hit_length, tails)
        frame = _LOOKUP_REPLY.pack(*head, reply.hit_length, len(tails))
        return frame + b"".join(_TAIL.pack(group, num_tokens) for group, num_tokens in tails)
    except (struct.error, TypeError, ValueError) as error:
        raise ProtocolError(f"hit {reply.hit_length!r}, tails {tails!r}: {error}") from error


def decode_reply(frames: Sequence[Buffer]) -> Reply:
    """Return the reply that the frames hold; ``ProtocolError`` if they hold none."""
    if len(frames) != 1:
        raise ProtocolError(f"a reply has one frame, got {len(frames)}")
    frame = memoryview(frames[0])
    message_type, request_id = _read_prefix(frame)
    if message_type < MessageType.LOOKUP_REPLY:
        raise ProtocolError(f"{message_type.name} is not a reply")
    if message_type is MessageType.LOOKUP_REPLY:
        return _decode_lookup_reply(frame)
    _check_size(frame, _REPLY)
    return Reply(message_type, request_id, _read_status(_REPLY.unpack(frame)[-1]))


def _decode_lookup(header: memoryview, body: memoryview) -> LookupRequest:
    _check_size(header, _LOOKUP)
    _, _, _, request_id, num_tokens, width = _LOOKUP.unpack(header)
    _check_lookup(num_tokens, width, body.nbytes)
    return LookupRequest(request_id, num_tokens, PackedHashes(body, width))


def _decode_reset(header: memoryview) -> ResetRequest:
    _check_size(header, _RESET)
    _, _, _, request_id, epoch, timeout_ms, remove = _RESET.unpack(header)
    if remove > 1:
        raise ProtocolError(f"remove is {remove}, not 0 or 1")
    return ResetRequest(request_id, epoch, bool(remove), timeout_ms / 1000)


def _decode_lookup_reply(frame: memoryview) -> Reply:
    if frame.nbytes < _LOOKUP_REPLY.size:
        raise ProtocolError(f"a lookup reply of {frame.nbytes} bytes is cut short")
    _, _, kind, request_id, code, hit_length, num_tails = _LOOKUP_REPLY.unpack_from(frame)
    _check_num_tails(num_tails)  # before they are unpacked
    expected = _LOOKUP_REPLY.size + num_tails * _TAIL.size
    if frame.nbytes != expected:
        raise ProtocolError(f"{num_tails} tails take {expected} bytes, got {frame.nbytes}")
    tails = tuple(_TAIL.iter_unpack(frame[_LOOKUP_REPLY.size :]))
    status = _read_status(code)
    _check_answer(status, hit_length, tails)
    return Reply(MessageType(kind), request_id, status, hit_length, tails)


def _split(frames: Sequence[Buffer]) -> tuple[memoryview, memoryview | None]:
    if not 1 <= len(frames) <= 2:
        raise ProtocolError(f"a request has one or two frames, got {len(frames)}")
    header = memoryview(frames[0])
    if len(frames) == 1:
        return header, None
    body = memoryview(frames[1])
    if body.nbytes > MAX_BODY_BYTES:
        raise ProtocolError(f"body of {body.nbytes} bytes, the bound is {MAX_BODY_BYTES}")
    return header, body.toreadonly()


def _required(body: memoryview | None) -> memoryview:
    if body is None:
        raise ProtocolError("the body frame is missing")
    return body


def _read_prefix(header: memoryview) -> tuple[MessageType, int]:
    if header.nbytes < _PREFIX.size:
        raise ProtocolError(f"a header of {header.nbytes} bytes is cut short")
    magic, version, kind, request_id = _PREFIX.unpack_from(header)
    if magic != _MAGIC or version != VERSION:
        raise ProtocolError(f"magic {magic!r} version {version}, expected {_MAGIC!r} {VERSION}")
    try:
        return MessageType(kind), request_id
    except ValueError:
        raise ProtocolError(f"unknown message type {kind}") from None


def _read_status(code: int) -> Status:
    try:
        return _WIRE_STATUSES[code]
    except KeyError:
        raise ProtocolError(f"unknown status {code}") from None


def _check_size(header: memoryview, layout: struct.Struct) -> None:
    if header.nbytes != layout.size:
        raise ProtocolError(f"a header of {header.nbytes} bytes, expected {layout.size}")


def _check_lookup(num_tokens: int, width: int, body_bytes: int) -> None:
    if not 0 <= num_tokens <= MAX_TOKENS:
        raise ProtocolError(f"num_tokens is {num_tokens}, the bound is {MAX_TOKENS}")
    if not 0 <= width <= MAX_HASH_BYTES:
        raise ProtocolError(f"hashes of {width} bytes, the bound is {MAX_HASH_BYTES}")
    if body_bytes > MAX_BODY_BYTES:
        raise ProtocolError(f"hashes take {body_bytes} bytes, the bound is {MAX_BODY_BYTES}")
    if body_bytes % width if width else body_bytes:
        raise ProtocolError(f"{body_bytes} bytes hold no whole number of {width}-byte hashes")
    if width and body_bytes // width > MAX_HASHES:
        raise ProtocolError(f"{body_bytes // width} hashes, the bound is {MAX_HASHES}")


def _check_answer(status: Status, hit_length: int, tails: Sequence[tuple[int, int]]) -> None:
    if status not in _WIRE_STATUSES:
        raise ProtocolError(f"status {status.name} is the client's own")
    _check_num_tails(len(tails))
    for num_tokens in (hit_length, *(tokens for _, tokens in tails)):
        if not 0 <= num_tokens <= MAX_TOKENS:
            raise ProtocolError(f"{num_tokens} tokens in an answer, the bound is {MAX_TOKENS}")
    if status is not Status.OK and (hit_length or tails):
        raise ProtocolError(f"a {status.name} reply carries a hit of {hit_length} tokens")


def _check_num_tails(num_tails: int) -> None:
    if num_tails > MAX_TAILS:
        raise ProtocolError(f"{num_tails} tail boundaries, the bound is {MAX_TAILS}")
