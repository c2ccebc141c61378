# SPDX-License-Identifier: Apache-2.0
"""The start-up check: what keeps a Mooncake store from working, and the way out."""

from __future__ import annotations

import logging
import socket
import time
import uuid
from urllib.parse import urlsplit

from kvxfer.errors import StoreError
from kvxfer.stores.mooncake_client import Client
from kvxfer.stores.mooncake_codes import LACKS_ROOM, LEASE_EXPIRED, OK, TENANT_UNKNOWN, name_of
from kvxfer.stores.mooncake_memory import Memory
from kvxfer.stores.mooncake_metrics import Occupancy
from kvxfer.stores.mooncake_options import PEER_TO_PEER, MooncakeOptions, master_address

logger = logging.getLogger(__name__)

CONNECT_S = 2.0
PROBE_BYTES = 4096
ROOM_TRIES = 5
"""A full pool makes room a moment after it has refused."""
ROOM_PAUSE_S = 0.2


def check_reachable(options: MooncakeOptions) -> None:
    """Raise ``StoreError`` where the master or the metadata server takes no connection."""
    if address := master_address(options.master):
        _connect(
            *address,
            f"Mooncake's master {options.master}: start one (mooncake_master --rpc_port="
            f"{address[1]}) or correct master_server_address, mooncake://host:port",
        )
    if options.metadata == PEER_TO_PEER:
        return
    parts = urlsplit(options.metadata if "://" in options.metadata else f"//{options.metadata}")
    if parts.hostname and parts.port:
        _connect(
            parts.hostname,
            parts.port,
            f"Mooncake's metadata server {options.metadata}: start it, or write "
            f"metadata={PEER_TO_PEER} where all clients do",
        )


def is_reachable(master: str) -> bool:
    """Whether the master takes a connection; True where its address is not known."""
    address = master_address(master)
    if address is None:
        return True
    try:
        socket.create_connection(address, CONNECT_S).close()
    except OSError:
        return False
    return True


def check_round_trip(
    client: Client, memory: Memory, options: MooncakeOptions, occupancy: Occupancy | None
) -> None:
    """Put, get and remove a value of 4 KiB; ``StoreError`` says what does not work.

    A pool that is full is no error: it makes room when it is used. ``occupancy`` is what the
    master's metrics say, None where they cannot be had.
    """
    name = f"kvxfer-check/{uuid.uuid4().hex}"
    with memory.borrow(PROBE_BYTES) as buffer:
        code = _put(client, name, buffer.ptr)
        if code in LACKS_ROOM:
            _check_capacity(options, occupancy)
            return
        if code == OK:
            (code,) = client.get([name], [buffer.ptr], [PROBE_BYTES])
        client.remove([name])
    if code == TENANT_UNKNOWN:
        raise StoreError(
            f"Mooncake at {options.master} has no tenant {options.tenant!r}: set tenant "
            "(tenant_id) to one of those in the master's quota policy, or add it there"
        )
    if code == LEASE_EXPIRED:
        logger.warning(
            "Mooncake's lease at %s is over before 4 KiB are read: loads will fail; give the "
            "master a longer one (--default_kv_lease_ttl, 10 s by default)",
            options.master,
        )
    elif code != PROBE_BYTES:
        raise StoreError(
            f"Mooncake at {options.master} answers, but a value of {PROBE_BYTES} bytes could not "
            f"be stored and read back: {name_of(code)} ({code}). Owners of segments and this "
            f"client must use one protocol (here {options.protocol}) and reach each other "
            f"(this host is {options.hostname}: set MOONCAKE_REQUESTER_LOCAL_HOSTNAME)"
        )


def _put(client: Client, name: str, ptr: int) -> int:
    for attempt in range(ROOM_TRIES):
        if attempt:
            time.sleep(ROOM_PAUSE_S)
        (code,) = client.put([name], [ptr], [PROBE_BYTES])
        if code not in LACKS_ROOM:
            break
    return code


def _check_capacity(options: MooncakeOptions, occupancy: Occupancy | None) -> None:
    if occupancy is not None and occupancy.capacity_bytes == 0:
        raise StoreError(
            f"Mooncake at {options.master} has no memory: no segment is mounted. Give this store "
            "one (segment=4GiB, mode embedded) or start an owner (mooncake_client) first"
        )
    logger.warning(
        "Mooncake at %s takes no value now: it is full, or no segment is mounted. Saves back off "
        "until there is room",
        options.master,
    )


def _connect(host: str, port: int, what: str) -> None:
    try:
        socket.create_connection((host, port), CONNECT_S).close()
    except OSError as error:
        raise StoreError(f"no connection ({error}) to {what}") from error
