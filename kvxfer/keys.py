# SPDX-License-Identifier: Apache-2.0
"""The names of stored values: what a key says, and how keys of a batch are built.

    kvx1/<cache_prefix>/<model>/<digest>/<group>/<stage>/<heads>/<hash hex>

``kvx1`` is the format of key and value; any change of either changes it. ``cache_prefix`` is the
operator's; a reset removes ``kvx1/<cache_prefix>/<model>/`` and nothing else. ``model`` is for
people: the digest is what tells models apart. ``digest`` covers what the bytes mean and nothing
that depends on one engine's size (see :func:`engine_digest`). ``group`` names the layers by
content, so that engines with another numbering, or with a drafter besides, share the rest.
``stage`` is the pipeline stage, ``heads`` the global KV-head range of the shard (``h0-8``) or
``all`` where every rank holds the same bytes; ``c1`` behind it: the second context rank's share of
the block's tokens. The hash closes the chunk's last token.

Callers: :mod:`kvxfer.worker` makes the key spaces of a rank; saver, loader and lookup build keys.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvxfer._native.keys import build_keys, build_shard_keys

if TYPE_CHECKING:
    from typing_extensions import Buffer

FORMAT = "kvx1"
MAX_NAME_CHARS = 48
MAX_HASH_BYTES = 64
"""Longest block hash: keeps every key within the 511 bytes of LMDB."""

_UNSAFE = re.compile(r"[^A-Za-z0-9._+-]+")


@dataclass(frozen=True, slots=True)
class KeySpace:
    """All keys of one cache group's layers, one pipeline stage and one range of KV heads.

    ``group`` is the index of the cache group in the engine; ``class_id`` the class of
    :class:`kvxfer.blocks.BlockLayout` that copies it, or -1 on a rank that does not hold it.
    A rank that shares the work has every chunk whose hash, modulo ``num_turns``, is ``turn``.
    """

    group: int
    prefix: bytes
    class_id: int = -1
    value_bytes: int = 0
    turn: int = 0
    num_turns: int = 1

    def keys(self, hashes: Buffer, hash_bytes: int, hash_idx: NDArray[np.int32]) -> list[bytes]:
        """Return the key of each hash of ``hash_idx`` (see ``_native.keys.build_keys``)."""
        return build_keys(self.prefix, hashes, hash_bytes, hash_idx)


def shard_keys(
    spaces: Sequence[KeySpace], hashes: Buffer, hash_bytes: int, hash_idx: NDArray[np.int32]
) -> list[bytes]:
    """Return the keys of each hash of ``hash_idx`` in every space, those of a hash together."""
    prefixes = tuple([space.prefix for space in spaces])
    return build_shard_keys(prefixes, hashes, hash_bytes, hash_idx)


def reset_prefix(cache_prefix: str, model: str) -> bytes:
    """Return the start of every key that a reset removes."""
    return f"{FORMAT}/{path_name(cache_prefix)}/{path_name(model)}/".encode()


def key_prefix(
    cache_prefix: str,
    model: str,
    digest: str,
    group: str,
    stage: int,
    heads: tuple[int, int] | None,
    context_rank: int | None = None,
) -> bytes:
    """Return the part of a key before its hash, the final slash included.

    ``heads``: global KV-head range [start, end), None where ranks do not differ by heads.
    ``context_rank``: whose share of the block's tokens, None where the bytes are of all of them.
    """
    shard = "all" if heads is None else f"h{heads[0]}-{heads[1]}"
    if context_rank is not None:
        shard += f"c{context_rank}"
    tail = f"{digest}/{group}/p{stage}/{shard}/"
    return reset_prefix(cache_prefix, model) + tail.encode()


def engine_digest(facts: Mapping[str, object]) -> str:
    """Return 32 hex digits over what the bytes of every group mean.

    ``facts``: JSON values only (ValueError otherwise); their order does not matter.
    """
    return _digest(facts, 32)


def group_digest(facts: Mapping[str, object]) -> str:
    """Return 16 hex digits that name a group by its content."""
    return _digest(facts, 16)


def path_name(name: str) -> str:
    """Return ``name`` fit for one component of a key.

    Plain short names stay as they are; others keep their readable end and get a hash of the
    whole, so that two different names never become the same component.
    """
    plain = _UNSAFE.sub("-", name)
    if plain == name and 0 < len(name) <= MAX_NAME_CHARS:
        return name
    unique = hashlib.sha256(name.encode()).hexdigest()[:12]
    return f"{plain[-MAX_NAME_CHARS + 16 :].strip('-')}~{unique}"


def index_array(indices: Sequence[int]) -> NDArray[np.int32]:
    """Return ``indices`` as the int32 array that key building takes."""
    return np.asarray(indices, dtype=np.int32)


def _digest(facts: Mapping[str, object], num_digits: int) -> str:
    try:
        text = json.dumps(facts, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except TypeError as error:
        raise ValueError(f"a fact of the digest is no JSON value: {error}") from error
    return hashlib.sha256(text.encode()).hexdigest()[:num_digits]
