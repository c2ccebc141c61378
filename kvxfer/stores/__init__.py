# SPDX-License-Identifier: Apache-2.0
"""Stores: batched maps from key bytes to value bytes, behind one contract.

``open_store`` turns a URI into a ``Store``. ``base`` is the contract that every backend keeps and
that ``tests/contract`` checks; ``checksums`` wraps any of them; ``uri`` parses; ``lmdb`` is the
embedded backend:

    LmdbStore (lmdb)            arguments, outcomes, counters: what callers see
      Handle (lmdb_handle)      one open LMDB environment per process and folder, counted
        StoreFolder             the folder, shared between processes by FileLocks (lmdb_locks); its
          (lmdb_files)          data file is made, grown, checked or set aside (lmdb_data, with
                                lmdb_check as a child process), as its Marker (lmdb_marker) says
        Reader (lmdb_reader)    exists and get: short read transactions
        Writer (lmdb_writer)    put and remove: short write transactions, one at a time per host
          Ledger (lmdb_ledger)  what the values cost and in which order they leave
        UseTable (lmdb_uses)    leases and last uses, shared by all processes, written without a
                                transaction

``mooncake`` is the distributed backend, over the Mooncake client:

    MooncakeStore (mooncake)    arguments, counters: what callers see; settings in mooncake_options
      Transfers                 gets and puts: bounded batches, in turns (mooncake_wire), each key
        (mooncake_transfers)    once at a time (mooncake_flights), with back-off (mooncake_pressure)
      Memory (mooncake_memory)  registered buffers, and the bounce buffer for all others
      Link (mooncake_link)      whether the master answers; comes back by itself
        Client                  one native client (mooncake_native imports and bounds it); its codes
          (mooncake_client)     in words are mooncake_codes, its keys' names mooncake_names

``python -m kvxfer.stores.mooncake_owner`` lends memory to a pool without an engine.

Callers are ``lookup`` (exists), ``transfer`` (get, put) and ``worker`` (open, remove, close). A
store knows nothing of blocks or engines; ``keys`` gives the key bytes their meaning.
"""

from __future__ import annotations

from kvxfer.errors import ConfigError
from kvxfer.stores.base import Outcome, Store, StoreStats
from kvxfer.stores.uri import parse_uri

__all__ = ["Outcome", "Store", "StoreStats", "open_store"]


def open_store(uri: str) -> Store:
    """Open the store that ``uri`` names, e.g. ``lmdb:///var/cache/kvxfer?capacity=8GiB``.

    ``lmdb://`` alone takes the default folder and a capacity that fits its disk;
    ``mooncake://host:port`` the pool of that master, ``mooncake://`` alone the one that
    ``MOONCAKE_CONFIG_PATH`` describes. ``ConfigError`` for a malformed URI or an unknown option,
    ``StoreError`` where the backend cannot be opened.
    """
    parsed = parse_uri(uri)
    if parsed.scheme == "lmdb":
        from kvxfer.stores.lmdb import LmdbStore  # noqa: PLC0415  # only users of it need LMDB

        return LmdbStore.open(parsed)
    if parsed.scheme == "mooncake":
        from kvxfer.stores.mooncake import MooncakeStore  # noqa: PLC0415  # nor Mooncake

        return MooncakeStore.open(parsed)
    raise ConfigError(
        f"store {uri!r} has scheme {parsed.scheme!r}; write lmdb:///path?capacity=8GiB or "
        "mooncake://host:port?protocol=tcp"
    )
