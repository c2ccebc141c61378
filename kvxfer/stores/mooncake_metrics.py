# SPDX-License-Identifier: Apache-2.0
"""What a pool holds, from the HTTP metrics of its master: clients have no call for it."""

from __future__ import annotations

import http.client
import re
from dataclasses import dataclass

TIMEOUT_S = 1.0
MOST_BYTES = 4 << 20
"""Of an answer; a master's metrics are some 100 KB."""

_GAUGES = re.compile(
    rb"^master_(key_count|allocated_bytes|total_capacity_bytes) (\d+)$", re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class Occupancy:
    """All values of all users of a master, and the segments that are mounted."""

    num_values: int
    used_bytes: int
    capacity_bytes: int


def read_occupancy(host: str, port: int) -> Occupancy:
    """Ask the master's metrics port; ``OSError`` where it does not answer as one does."""
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read(MOST_BYTES)
    except http.client.HTTPException as error:
        raise OSError(f"no HTTP answer: {error}") from error
    finally:
        connection.close()
    gauges = {name: int(value) for name, value in _GAUGES.findall(text)}
    try:
        return Occupancy(
            gauges[b"key_count"], gauges[b"allocated_bytes"], gauges[b"total_capacity_bytes"]
        )
    except KeyError as error:
        raise OSError(f"the answer has no gauge master_{error.args[0].decode()}") from error
