# SPDX-License-Identifier: Apache-2.0
"""Coverage-guided fuzzing of everything that reads a frame of the lookup channel (atheris).

    python tests/fuzz/fuzz_frames.py build/fuzz/frames -max_total_time=60

The folder holds what has been found interesting so far and is made with good messages in it where
it is missing; the flags are libFuzzer's. Exit status 0: no input made a decoder raise anything but
``ProtocolError``, disagree with the encoder, or believe what is out of bounds. An input that did
is written to ``crash-*``. atheris has wheels for x86-64 only, so it is no requirement:
``pip install atheris``.

An input: one byte that chooses the decoder, two bytes that say where the first frame ends
(little-endian), then the frames.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

try:
    import atheris
except ImportError:
    atheris = None

if atheris is not None:
    with atheris.instrument_imports(include=["kvxfer.lookup.protocol", "kvxfer.lookup.hashes"]):
        from kvxfer.lookup import protocol
        from kvxfer.lookup.hashes import PackedHashes
        from kvxfer.lookup.key_spaces import KeySpacesPayload
else:
    from kvxfer.lookup import protocol
    from kvxfer.lookup.hashes import PackedHashes
    from kvxfer.lookup.key_spaces import KeySpacesPayload

from kvxfer.errors import ProtocolError

PLANTED = os.environ.get("KVXFER_FUZZ_PLANT", "") == "1"
"""Have a message raise that is no seed: shows that a run can fail."""

MAX_INPUT_BYTES = 4096


def main(arguments: list[str]) -> None:
    """Fuzz until a flag of libFuzzer ends it."""
    if atheris is None:
        sys.exit("fuzz_frames.py needs atheris: pip install atheris (wheels for x86-64 only)")
    folders = [Path(argument) for argument in arguments[1:] if not argument.startswith("-")]
    for folder in folders[:1]:
        write_seeds(folder)
    limits = [f"-max_len={MAX_INPUT_BYTES}", "-rss_limit_mb=1024", "-timeout=5"]
    atheris.Setup([*arguments[:1], *limits, *arguments[1:]], check)
    atheris.Fuzz()


def check(data: bytes) -> None:
    """Read ``data`` as one message; raises for what no decoder may do."""
    if len(data) < 3:
        return
    kind, first_end = data[0] % 3, 3 + int.from_bytes(data[1:3], "little")
    frames = [data[3:first_end]] + ([data[first_end:]] if len(data) > first_end else [])
    (check_request, check_reply, check_key_spaces)[kind](frames)


def check_request(frames: list[bytes]) -> None:
    """A request that is read comes out of the encoder as it went in."""
    request_id = protocol.peek_request_id(frames)
    try:
        request = protocol.decode_request(frames)
    except ProtocolError:
        return
    assert request.request_id == request_id
    if PLANTED and isinstance(request, protocol.ResetRequest) and not request.remove:
        raise RuntimeError("the planted fault")
    assert [bytes(frame) for frame in encode(request)] == frames


def encode(request: protocol.Request) -> tuple[bytes | memoryview, ...]:
    """Return the frames of a request that was read."""
    if isinstance(request, protocol.LookupRequest):
        assert 0 <= request.num_tokens <= protocol.MAX_TOKENS
        assert len(request.hashes) <= protocol.MAX_HASHES
        hashes = PackedHashes.pack(list(request.hashes)) if len(request.hashes) else request.hashes
        return protocol.encode_lookup(request.request_id, request.num_tokens, hashes)
    if isinstance(request, protocol.ResetRequest):
        assert 0 <= request.timeout_s < 2**32 / 1000
        return protocol.encode_reset(
            request.request_id, request.epoch, request.remove, request.timeout_s
        )
    if isinstance(request, protocol.KeySpacesRequest):
        return protocol.encode_key_spaces(request.request_id, request.payload)
    return protocol.encode_ping(request.request_id)


def check_reply(frames: list[bytes]) -> None:
    """A reply that is read comes out of the encoder as it went in."""
    try:
        reply = protocol.decode_reply(frames)
    except ProtocolError:
        return
    assert reply.hit_length <= protocol.MAX_TOKENS
    assert len(reply.tail_boundaries) <= protocol.MAX_TAILS
    assert [protocol.encode_reply(reply)] == frames


def check_key_spaces(frames: list[bytes]) -> None:
    """Key spaces that are read survive another trip."""
    try:
        told = KeySpacesPayload.decode(b"".join(frames))
    except ProtocolError:
        return
    assert KeySpacesPayload.decode(told.encode()) == told


def seeds() -> list[bytes]:
    """Return a good message of every type, as inputs."""
    hashes = PackedHashes.pack([bytes([i]) * 8 for i in range(3)])
    spaces = KeySpacesPayload(((0, b"kvx1/a/"), (1, b"kvx1/b/")), (1,)).encode()
    ok, failed = protocol.Status.OK, protocol.Status.FAILED
    types = protocol.MessageType
    replies = [
        protocol.Reply(types.LOOKUP_REPLY, 7, ok, 48, ((0, 48), (1, 32))),
        protocol.Reply(types.RESET_REPLY, 7, failed),
        protocol.Reply(types.MALFORMED_REPLY, 7, protocol.Status.MALFORMED),
    ]
    return [
        message(0, *protocol.encode_lookup(7, 49, hashes)),
        message(0, *protocol.encode_reset(7, 0x13, True, 1.5)),
        message(0, *protocol.encode_ping(7)),
        message(0, *protocol.encode_key_spaces(7, spaces)),
        *(message(1, protocol.encode_reply(reply)) for reply in replies),
        message(2, spaces),
    ]


def message(kind: int, *frames: bytes | memoryview) -> bytes:
    """Return the input that stands for ``frames``."""
    return bytes([kind]) + len(frames[0]).to_bytes(2, "little") + b"".join(map(bytes, frames))


def write_seeds(folder: Path) -> None:
    """Put the good messages into a corpus that has none yet."""
    folder.mkdir(parents=True, exist_ok=True)
    if not any(folder.iterdir()):
        for number, seed in enumerate(seeds()):
            (folder / f"seed-{number}").write_bytes(seed)


if __name__ == "__main__":
    main(sys.argv)
