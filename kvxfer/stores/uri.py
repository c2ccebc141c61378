# SPDX-License-Identifier: Apache-2.0
"""Store URIs: ``scheme://host/path?option=value``, with sizes and durations that carry units."""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from decimal import Decimal
from urllib.parse import parse_qsl, unquote, urlsplit

from kvxfer.errors import ConfigError

SIZE_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
"""Bytes per unit, by lower-case name: powers of ten for KB, of two for KiB."""

LONGEST_S = 86_400
MOST_BYTES = 2**63 - 1
"""What the system's calls take for a size."""

_DROPPED = frozenset("\t\r\n")  # urlsplit would leave them out in silence
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class StoreUri:
    """The parts of a store URI; ``path`` and option values are percent-decoded."""

    text: str
    scheme: str
    host: str
    path: str
    options: dict[str, str]


def parse_uri(text: str) -> StoreUri:
    """Split a store URI; ``ConfigError`` where it is not one or an option comes twice."""
    if not isinstance(text, str) or "://" not in text:
        raise ConfigError(f"store {text!r} is no URI; write e.g. lmdb:///path?capacity=8GiB")
    if not _DROPPED.isdisjoint(text):
        raise ConfigError(f"store {text!r} has a tab or a line break; write it as %09, %0A or %0D")
    try:
        parts = urlsplit(text)
    except ValueError as error:
        raise ConfigError(f"store {text!r} is no URI: {error}") from error
    if parts.fragment:
        raise ConfigError(f"store {text!r} has a fragment; write '#' in a path as %23")
    return StoreUri(
        text=text,
        scheme=parts.scheme,
        host=parts.netloc,
        path=_parse_path(text, parts.path),
        options=_parse_options(text, parts.query),
    )


def check_options(uri: StoreUri, valid: Collection[str]) -> None:
    """Raise ``ConfigError`` for the first option not in ``valid``, naming the nearest one."""
    for name in uri.options:
        if name not in valid:
            nearest = difflib.get_close_matches(name, valid, n=1, cutoff=0.0)[0]
            raise ConfigError(
                f"store {uri.text!r}: unknown option {name!r}, did you mean {nearest!r}? "
                f"Valid: {', '.join(sorted(valid))}"
            )


def parse_size(text: str, name: str) -> int:
    """Return the bytes that ``text`` says: ``8GiB``, ``1.5 GB``, ``64MiB`` or plain bytes.

    At least 1, less than 8 EiB. ``name`` is the option, for the ``ConfigError`` about anything
    else.
    """
    match = _SIZE.fullmatch(text.strip())
    unit = SIZE_UNITS.get(match[2].lower(), 0) if match else 0
    size = int(Decimal(match[1]) * unit) if match else 0
    if not 1 <= size <= MOST_BYTES:
        raise ConfigError(
            f"{name}={text[:99]!r} is no size; "
            "write e.g. 8GiB, 500MB or bytes (B, KB..TB, KiB..TiB)"
        )
    return size


def parse_seconds(text: str, name: str) -> float:
    """Return ``text`` as seconds from 0 to a day; ``ConfigError`` names the option."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= LONGEST_S:
        raise ConfigError(
            f"{name}={text[:99]!r} is no duration; "
            f"write seconds from 0 to {LONGEST_S}, e.g. 30 or 0.5"
        )
    return seconds


def _parse_path(text: str, quoted: str) -> str:
    """Return the decoded path; ``ConfigError`` for one that no file can have."""
    path = unquote(quoted)
    try:
        is_name = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        is_name = False
    if not is_name:
        raise ConfigError(f"store {text!r} has a path that no file can have; check its %-escapes")
    return path


def _parse_options(text: str, query: str) -> dict[str, str]:
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as error:
        raise ConfigError(f"store {text!r}: {error}; write options as name=value&...") from error
    options = dict(pairs)
    if len(options) != len(pairs):
        raise ConfigError(f"store {text!r} gives an option twice")
    return options
