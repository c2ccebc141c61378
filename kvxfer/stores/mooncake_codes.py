# SPDX-License-Identifier: Apache-2.0
"""What the Mooncake client's return codes mean: a name for the counters, an outcome for callers."""

from __future__ import annotations

from collections.abc import Iterable

from kvxfer.stores.base import Outcome

OK = 0
NO_ANSWER = -1
"""Ours too: for a call that raised, or an answer that was None or too short."""
NO_SPACE = -200
BAD_SIZE = -600
NOT_READY = -703
MISSING = -704
EXISTS = -705
LEASE_EXPIRED = -707
TRANSFER_FAILED = -800
CHECKSUM = -801
DISK_READ = -1102
MASTER_LOST = -900
MASTER_SILENT = -901
QUOTA = -1700
TENANT_UNKNOWN = -1701

NAMES = {
    NO_ANSWER: "no_answer",
    -101: "no_segment",
    NO_SPACE: "no_space",
    BAD_SIZE: "refused",
    NOT_READY: "not_ready",
    MISSING: "missing",
    EXISTS: "exists",
    -706: "leased",
    LEASE_EXPIRED: "lease_expired",
    TRANSFER_FAILED: "transfer",
    CHECKSUM: "checksum_mismatch",
    MASTER_LOST: "master_lost",
    MASTER_SILENT: "timed_out",
    -1100: "disk_missing",
    DISK_READ: "disk_read",
    QUOTA: "quota",
    TENANT_UNKNOWN: "tenant_unknown",
}
"""By code; the client's header has more, none of which needs an answer of its own."""

MAYBE_WRONG_SIZE = frozenset({BAD_SIZE, TRANSFER_FAILED, DISK_READ})
"""A get answers a target of another size with one of these, before it touches the target."""
LOST_MASTER = frozenset({MASTER_LOST, MASTER_SILENT})
LACKS_ROOM = frozenset({NO_SPACE, QUOTA})

# What is in neither table has failed, and no store tries again: a lease that is over means that the
# transfer took longer than all of it, and would again, while the request could be computing.
_GETS = {
    MISSING: Outcome.MISSING,
    NOT_READY: Outcome.MISSING,  # another's put is under way
    CHECKSUM: Outcome.CORRUPT,
}
_PUTS = {
    OK: Outcome.OK,
    EXISTS: Outcome.EXISTS,
    NO_SPACE: Outcome.NO_SPACE,
    QUOTA: Outcome.NO_SPACE,
}


def name_of(code: int) -> str:
    """Return the code's name, for logs and counters; ``code_703`` for one without."""
    return NAMES.get(code, f"code_{abs(code)}")


def get_outcome(code: int, num_bytes: int) -> Outcome:
    """Return the outcome of a get of ``num_bytes``; ``code`` is what arrived, or an error.

    Another number of bytes than asked for is a failure, zero included.
    """
    if code == num_bytes:
        return Outcome.OK
    return _GETS.get(code, Outcome.FAILED)


def put_outcome(code: int) -> Outcome:
    """Return the outcome of a put."""
    return _PUTS.get(code, Outcome.FAILED)


def has_lost_master(codes: Iterable[int]) -> bool:
    """Whether any of the codes says that the master did not answer."""
    return not LOST_MASTER.isdisjoint(codes)
