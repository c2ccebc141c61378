# SPDX-License-Identifier: Apache-2.0
"""The lookup channel as the scheduler side sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvxfer.lookup import LookupReply


class Lookups(Protocol):
    """The part of ``lookup.LookupClient`` that the scheduler side uses."""

    def lookup(
        self, key: str, num_tokens: int, block_hashes: Sequence[bytes], *, blocking: bool = False
    ) -> LookupReply | None:
        """Return the answer, or None while there is none."""
        ...

    def discard(self, key: str) -> None:
        """Forget the question."""
        ...

    def send_key_spaces(self, payload: bytes, timeout_s: float) -> bool:
        """Return whether the server took them."""
        ...

    def ping(self, timeout_s: float) -> bool:
        """Return whether the server answers."""
        ...

    def close(self) -> None:
        """Close the channel."""
        ...
