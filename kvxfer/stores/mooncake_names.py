# SPDX-License-Identifier: Apache-2.0
"""How keys are called in Mooncake: as they are where they are plain text, else percent-encoded.

A name is printable ASCII, so that every tool that lists the master's keys can print it, and the
name of a key's prefix is a prefix of its name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import quote_from_bytes

_SAFE = "!#$&'()*+,-./:;=?@[]^_`{|}~"
_PLAIN = re.compile(rb"[0-9A-Za-z\n" + re.escape(_SAFE).encode() + rb"]*")
_SPECIAL = re.compile(r"([\^$\\.*+?()\[\]{}|/])")


def names_of(keys: Sequence[bytes]) -> list[str]:
    """Return the names of keys; those of this package are plain, and cost one check for all."""
    joined = b"\n".join(keys)
    if joined.count(b"\n") == len(keys) - 1 and _PLAIN.fullmatch(joined):
        return joined.decode("ascii").split("\n")
    return [quote_from_bytes(key, safe=_SAFE) for key in keys]


def prefix_pattern(prefix: bytes) -> str:
    """Return the regular expression (ECMAScript, searched) of names under ``prefix``."""
    return "^" + _SPECIAL.sub(r"\\\1", quote_from_bytes(prefix, safe=_SAFE))


def group_of(name: str) -> str:
    """Return the life-cycle group of a name: all values of one chunk, which go together.

    The last part of a key is the hash of its chunk; layers, stages and heads are told before it.
    """
    return "kvxfer:" + name.rpartition("/")[2]
