# SPDX-License-Identifier: Apache-2.0
"""The distributed store: a Mooncake pool that many hosts share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from kvxfer.errors import StoreError
from kvxfer.stores.arguments import byte_view, check_keys, check_prefix
from kvxfer.stores.base import Outcome, Store, StoreStats
from kvxfer.stores.mooncake_check import check_reachable, check_round_trip, is_reachable
from kvxfer.stores.mooncake_client import Client
from kvxfer.stores.mooncake_codes import OK, name_of
from kvxfer.stores.mooncake_counts import Counts
from kvxfer.stores.mooncake_link import Link, State
from kvxfer.stores.mooncake_memory import Buffers, Memory, ScatteredBuffers
from kvxfer.stores.mooncake_metrics import Occupancy, read_occupancy
from kvxfer.stores.mooncake_names import names_of, prefix_pattern
from kvxfer.stores.mooncake_native import bound_client
from kvxfer.stores.mooncake_options import MooncakeOptions, master_address
from kvxfer.stores.mooncake_transfers import Transfers
from kvxfer.stores.parts import Parts, TransferMode
from kvxfer.stores.uri import StoreUri

AnyBuffers = TypeVar("AnyBuffers", Buffers, ScatteredBuffers)
Move = Callable[[Client, Sequence[str], AnyBuffers], list[Outcome]]


class MooncakeStore(Store):
    """Values in the memory of the hosts that share a ``mooncake_master``; any number of threads.

    One key is one object in one segment. Buffers given to ``register`` are read and written where
    they lie; others go through a bounce buffer of 16 MiB. Calls are cut into native calls of
    bounded keys and bytes, and all threads together keep below what the transport takes.

    Values live as long as the pool keeps them: least recently used leave first, not within the
    master's lease after ``exists`` or a get (10 s by default, ``--default_kv_lease_ttl``), and
    all of a host that goes. Whether a put is ``OK`` or ``EXISTS`` is told apart within this
    process; of two processes that put one key at once both may answer ``OK``, and one value is
    stored. ``stats`` counts the calls of this store, and what the whole pool holds, all users'
    values included, where the master's metrics can be read (``metrics_port``).

    A master that does not answer fails the calls in flight within ``timeout_s`` (a dead one
    within 5 s); from then on calls fail at once, until it answers again. Puts that find no room
    are not tried again for 0.25 to 8 s. Nothing but wrong arguments raises.
    """

    def __init__(self, options: MooncakeOptions) -> None:
        self._options = options
        self._address = master_address(options.master)
        self._counts = Counts(f"mooncake://{options.master}")
        self._memory = Memory(options.patience_s)
        bound_client(options.timeout_s)
        client = self._connect()
        self._memory.attach(client)
        if options.check:
            self._check(client)
        self._link = Link(
            client,
            self._memory,
            self._counts,
            connect=self._connect,
            is_reachable=lambda: is_reachable(options.master),
            timeout_s=options.timeout_s,
        )
        self._transfers = Transfers(options, self._link, self._memory, self._counts)
        self._last_occupancy = Occupancy(0, 0, 0)

    @classmethod
    def open(cls, uri: StoreUri) -> MooncakeStore:
        """Open the pool of a ``mooncake://`` URI; see ``MooncakeOptions.from_uri``.

        ``ConfigError`` for settings that cannot be; ``StoreError`` where the client cannot be
        imported, the master cannot be reached, or a value cannot be stored and read back.
        """
        return cls(MooncakeOptions.from_uri(uri))

    def register(self, buffer: memoryview) -> None:
        """Have the client read and write this buffer in place, until ``close``."""
        self._memory.register(byte_view(buffer, "buffer", writable=False))

    def exists(self, keys: Sequence[bytes]) -> bytearray:
        """Return which keys are stored; the master leases those."""
        check_keys(keys)
        with self._link.call() as client:
            if client is None or not keys:
                if self._link.state is State.DOWN:
                    self._counts.add("exists_failed", len(keys))
                return bytearray(len(keys))
            codes = self._transfers.present(client, names_of(keys))
        found = bytearray(code == 1 for code in codes)
        num_found = sum(found)
        num_missing = codes.count(0)
        self._counts.add("exists_found", num_found)
        self._counts.add("exists_missing", num_missing)
        self._counts.add("exists_failed", len(keys) - num_found - num_missing)
        return found

    def get_into(self, keys: Sequence[bytes], targets: Sequence[memoryview]) -> list[Outcome]:
        """Copy values into targets; what another thread is fetching already comes with its copy."""
        check_keys(keys)
        buffers = Buffers.of(targets, "targets", len(keys), writable=True)
        return self._move("get", self._transfers.get, keys, buffers)

    def put_from(self, keys: Sequence[bytes], sources: Sequence[memoryview]) -> list[Outcome]:
        """Store copies of sources; asks which keys are there first: the client does not say."""
        check_keys(keys)
        buffers = Buffers.of(sources, "sources", len(keys), writable=False)
        return self._move("put", self._transfers.put, keys, buffers)

    @property
    def transfer_mode(self) -> TransferMode:
        """As the URI's ``transfer`` has it; ``auto`` by default."""
        return self._options.transfer

    @property
    def most_parts(self) -> int:
        """Half of ``in_flight``: each part is a segment on the wire."""
        return self._options.most_segments

    def get_parts(self, keys: Sequence[bytes], parts: Parts) -> list[Outcome]:
        """Copy values into their parts, as scatter lists; shared as by ``get_into``."""
        return self._move_parts("get", self._transfers.get, keys, parts)

    def put_parts(self, keys: Sequence[bytes], parts: Parts) -> list[Outcome]:
        """Store values from their parts, as scatter lists."""
        return self._move_parts("put", self._transfers.put, keys, parts)

    def remove(self, keys: Sequence[bytes]) -> int:
        """Remove values by key, leased ones too."""
        check_keys(keys)
        with self._link.call() as client:
            if client is None or not keys:
                return 0
            codes = client.remove(names_of(list(dict.fromkeys(keys))))
        self._link.note(codes)
        num_removed = codes.count(OK)
        self._counts.add("removed", num_removed)
        return num_removed

    def remove_prefix(self, prefix: bytes) -> int:
        """Remove every key under ``prefix``, leased or not; ``StoreError`` if some may be left."""
        check_prefix(prefix)
        with self._link.call() as client:
            if client is None:
                if self._link.state is State.CLOSED:
                    return 0
                raise StoreError(f"prefix {prefix!r} is not removed: the master does not answer")
            num_removed = client.remove_matching(prefix_pattern(prefix))
        self._link.note([num_removed])
        if num_removed < 0:
            raise StoreError(
                f"prefix {prefix!r} may be removed in part: {name_of(num_removed)} ({num_removed})"
            )
        self._counts.add("removed", num_removed)
        return num_removed

    def stats(self) -> StoreStats:
        """Return this store's counters and the occupancy of the whole pool."""
        if self._link.state is State.UP:
            self._last_occupancy = self._occupancy() or self._last_occupancy
        occupancy, counters = self._last_occupancy, self._counts.snapshot()
        if num_backoffs := self._transfers.pressure.num_backoffs:
            counters["put_backoffs"] = num_backoffs
        return StoreStats(
            occupancy.num_values, occupancy.used_bytes, occupancy.capacity_bytes, counters
        )

    def close(self) -> None:
        """End the client and give its segment back; calls in flight end first, if in time."""
        if self._link.state is State.CLOSED:
            return
        self.stats()  # for those who ask later
        if self._link.close():
            self._memory.close()

    def _move(
        self, act: str, move: Move[AnyBuffers], keys: Sequence[bytes], buffers: AnyBuffers
    ) -> list[Outcome]:
        with self._link.call() as client:
            if client is None:
                is_closed = self._link.state is State.CLOSED
                outcomes = [Outcome.CLOSED if is_closed else Outcome.FAILED] * len(keys)
            else:
                outcomes = move(client, names_of(keys), buffers) if keys else []
        if client is not None or not is_closed:
            self._counts.add_outcomes(act, outcomes)
        return outcomes

    def _move_parts(
        self, act: str, move: Move[ScatteredBuffers], keys: Sequence[bytes], parts: Parts
    ) -> list[Outcome]:
        """Move what lies in registered buffers; the transport checks no address of a part."""
        check_keys(keys)
        parts.check(len(keys), self.most_parts)

        def checked(
            client: Client, names: Sequence[str], buffers: ScatteredBuffers
        ) -> list[Outcome]:
            self._memory.require(parts.ptrs, parts.sizes)
            return move(client, names, buffers)

        return self._move(act, checked, keys, ScatteredBuffers.of(parts))

    def _connect(self) -> Client:
        check_reachable(self._options)
        return Client.connect(self._options)

    def _check(self, client: Client) -> None:
        try:
            check_round_trip(client, self._memory, self._options, self._occupancy())
        except StoreError:
            client.close()
            raise

    def _occupancy(self) -> Occupancy | None:
        if self._address is None:
            return None
        try:
            return read_occupancy(self._address[0], self._options.metrics_port)
        except OSError as error:
            self._counts.complain(
                f"the metrics of the master at port {self._options.metrics_port} cannot be read",
                f"{error}; set metrics_port",
            )
            return None
