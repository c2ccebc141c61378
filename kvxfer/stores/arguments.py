# SPDX-License-Identifier: Apache-2.0
"""Argument checks that every backend makes: the only exceptions that a batch raises."""

from __future__ import annotations

import operator
from collections.abc import Sequence

MOST_KEY_BYTES = 511

_KIND = operator.attrgetter("format", "ndim", "c_contiguous", "readonly")
_WRITABLE_BYTES = {("B", 1, True, False)}
_BYTES = {*_WRITABLE_BYTES, ("B", 1, True, True)}
"""What nothing has to be done about, told for all buffers of a batch in half of the time."""


def check_keys(keys: Sequence[bytes], most_bytes: int = MOST_KEY_BYTES) -> None:
    """Raise ``ValueError`` for the first key that is not bytes or not 1 to ``most_bytes``."""
    lengths = set(map(len, keys)) if set(map(type, keys)) <= {bytes} else {0}
    if lengths and not 1 <= min(lengths) <= max(lengths) <= most_bytes:
        raise ValueError(_first_bad_key(keys, most_bytes))


def check_prefix(prefix: bytes) -> None:
    """Raise ``ValueError`` for a prefix that is not bytes."""
    if not isinstance(prefix, bytes):
        raise ValueError(f"prefix is {type(prefix).__name__}, not bytes")


def byte_views(
    buffers: Sequence[memoryview], name: str, num_keys: int, *, writable: bool
) -> list[memoryview]:
    """Return the buffers as one-dimensional byte views; ``ValueError`` names the first bad one."""
    check_count(buffers, name, num_keys)
    if set(map(type, buffers)) == {memoryview}:
        kinds = set(map(_KIND, buffers))
        if kinds <= _WRITABLE_BYTES or (not writable and kinds <= _BYTES):
            return list(buffers)
    return [
        byte_view(buffer, f"{name}[{idx}]", writable=writable) for idx, buffer in enumerate(buffers)
    ]


def check_count(buffers: Sequence[object], name: str, num_keys: int) -> None:
    """Raise ``ValueError`` where there is not one buffer for each key."""
    if len(buffers) != num_keys:
        raise ValueError(f"{num_keys} keys, but {len(buffers)} {name}")


def byte_view(buffer: memoryview, name: str, *, writable: bool) -> memoryview:
    """Return the buffer as a one-dimensional byte view, writable where that is asked for."""
    try:
        view = memoryview(buffer)
    except TypeError:
        raise ValueError(f"{name} is {type(buffer).__name__}, not a buffer") from None
    if not view.c_contiguous:
        raise ValueError(f"{name} is not contiguous")
    if writable and view.readonly:
        raise ValueError(f"{name} is read-only")
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def _first_bad_key(keys: Sequence[bytes], most_bytes: int) -> str:
    for idx, key in enumerate(keys):
        if type(key) is not bytes:
            return f"keys[{idx}] is {type(key).__name__}, not bytes"
        if not 1 <= len(key) <= most_bytes:
            return f"keys[{idx}] has {len(key)} bytes, not 1 to {most_bytes}"
    raise AssertionError("every key is in order")
