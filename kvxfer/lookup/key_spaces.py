# SPDX-License-Identifier: Apache-2.0
"""What rank 0 has to know of the other ranks to tell whether a chunk is whole."""

from __future__ import annotations

import msgspec

from kvxfer.errors import ProtocolError


class KeySpacesPayload(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The body of a KEY_SPACES message, sent once at start-up by the scheduler side."""

    key_prefixes: tuple[tuple[int, bytes], ...]
    """(cache group, key prefix) of every shard on any rank, rank 0's first."""
    eagle_groups: tuple[int, ...] = ()
    """Groups with a drafter's layers on some rank."""

    def encode(self) -> bytes:
        """Return the bytes of the body."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, payload: bytes) -> KeySpacesPayload:
        """Read a body; ProtocolError for anything else."""
        try:
            return msgspec.msgpack.decode(payload, type=cls)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"malformed key spaces: {error}") from error
