# SPDX-License-Identifier: Apache-2.0
"""Moving values between memory and a Mooncake pool: batches, bounce buffer, outcomes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvxfer.stores.base import Outcome
from kvxfer.stores.mooncake_client import Client, sizes_by_name
from kvxfer.stores.mooncake_codes import (
    LACKS_ROOM,
    MAYBE_WRONG_SIZE,
    NO_ANSWER,
    TRANSFER_FAILED,
    get_outcome,
    name_of,
    put_outcome,
)
from kvxfer.stores.mooncake_counts import Counts
from kvxfer.stores.mooncake_flights import Flight, Flights, Placed, copy_bytes
from kvxfer.stores.mooncake_link import Link, State
from kvxfer.stores.mooncake_memory import SLOT_BYTES, Buffer, Memory
from kvxfer.stores.mooncake_options import MooncakeOptions
from kvxfer.stores.mooncake_pressure import Pressure
from kvxfer.stores.mooncake_wire import Side, Wire, cut

ALIGN = 64
EXISTS_KEYS = 4096
"""Names of one question: the master answers 4,096 in some milliseconds."""
DISK_ALIGN = 4096
"""An owner of a disk tier stages a value from one multiple of this to another, and one beside."""


@dataclass(slots=True)
class Piece:
    """One value of a batch; ``at`` is where the client reads or writes it."""

    name: str
    buffer: Buffer
    flight: Flight
    at: int = 0


class Transfers:
    """Runs the gets and puts of one store; any thread, all bounded by the client's timeouts.

    A native call cannot be cancelled and its buffer is in use until it returns: these calls
    return after it. Callers that must answer earlier hold the buffer, as a transfer's slot is.
    """

    def __init__(
        self, options: MooncakeOptions, link: Link, memory: Memory, counts: Counts
    ) -> None:
        self._options, self._link, self._memory, self._counts = options, link, memory, counts
        self._wire = Wire(options.in_flight)
        self._gets = Flights(copies=True)
        self._puts = Flights(copies=False)
        self.pressure = Pressure()

    def get(
        self, client: Client, names: Sequence[str], views: Sequence[memoryview]
    ) -> list[Outcome]:
        """Copy values into views; one outcome per name. Equal names and sizes travel once."""
        buffers = [Buffer.of(view) for view in views]
        keys = [(name, buffer.num_bytes) for name, buffer in zip(names, buffers, strict=True)]
        led, followed = self._gets.claim(keys, buffers)
        pieces = [Piece(names[idx], buffers[idx], flight) for idx, flight in led]
        with self._landing(self._gets, led, followed) as outcomes:
            for part in _without_equal_names(self._within_staging(pieces)):
                sizes = [self._load_cost(piece) for piece in part]
                for rows in cut(sizes, self._options.most_keys, self._options.most_load_bytes):
                    self._run(part[rows.start : rows.stop], Side.LOAD, client)
        self._counts.add("get_shared", len(followed))
        return outcomes

    def put(
        self, client: Client, names: Sequence[str], views: Sequence[memoryview]
    ) -> list[Outcome]:
        """Store copies of views; one outcome per name. The first of equal names is stored."""
        buffers = [Buffer.of(view) for view in views]
        led, followed = self._puts.claim(names, buffers)
        pieces = [Piece(names[idx], buffers[idx], flight) for idx, flight in led]
        with self._landing(self._puts, led, followed) as outcomes:
            pieces = self._absent(client, pieces)
            sizes = [piece.buffer.num_bytes for piece in pieces]
            for rows in cut(sizes, self._options.most_keys, self._options.batch_bytes):
                batch = pieces[rows.start : rows.stop]
                if self.pressure.is_on:
                    self._counts.add("put_backed_off", len(batch))
                    self._land(self._puts, batch, [Outcome.NO_SPACE] * len(batch))
                else:
                    self._run(batch, Side.SAVE, client)
        for idx, _ in followed:
            if outcomes[idx] is Outcome.OK:
                outcomes[idx] = Outcome.EXISTS
        return outcomes

    # Batches

    def _run(self, batch: Sequence[Piece], side: Side, client: Client) -> None:
        """Place a batch in registered memory, in parts that fit the bounce buffer, and move it."""
        outside = self._memory.outside([piece.buffer for piece in batch])
        costs = [
            -(-piece.buffer.num_bytes // ALIGN) * ALIGN if out else 0
            for piece, out in zip(batch, outside, strict=True)
        ]
        for rows in cut(costs, len(batch), SLOT_BYTES):
            part = batch[rows.start : rows.stop]
            flights = self._gets if side is Side.LOAD else self._puts
            if self._link.state is State.DOWN:  # lost since the call began: no more waiting
                self._land(flights, part, [Outcome.FAILED] * len(part))
                continue
            move = self._load if side is Side.LOAD else self._save
            with self._placed(part, costs[rows.start : rows.stop], side) as bounced:
                outcomes = move(client, part)
                if side is Side.LOAD:
                    for piece, outcome in zip(part, outcomes, strict=True):
                        if outcome is Outcome.OK and piece.at in bounced:
                            copy_bytes(piece.buffer.ptr, piece.at, piece.buffer.num_bytes)
            self._land(flights, part, outcomes)

    @contextlib.contextmanager
    def _placed(self, part: Sequence[Piece], costs: Sequence[int], side: Side) -> Iterator[range]:
        """Say of each piece where the client finds it; yield the addresses that bounce."""
        total = sum(costs)
        if not total:
            for piece in part:
                piece.at = piece.buffer.ptr
            yield range(0)
            return
        with self._memory.borrow(total) as slot:
            at = slot.ptr
            for piece, cost in zip(part, costs, strict=True):
                piece.at = at if cost else piece.buffer.ptr
                if cost and side is Side.SAVE:
                    copy_bytes(at, piece.buffer.ptr, piece.buffer.num_bytes)
                at += cost
            yield range(slot.ptr, slot.ptr + total)

    def _load(self, client: Client, part: Sequence[Piece]) -> list[Outcome]:
        names = [piece.name for piece in part]
        codes = self._call(Side.LOAD, client.get, part)
        doubtful = [
            name for name, code in zip(names, codes, strict=True) if code in MAYBE_WRONG_SIZE
        ]
        stored = sizes_by_name(client, doubtful) if self._link.state is State.UP else {}
        outcomes = []
        for piece, code in zip(part, codes, strict=True):
            size = piece.buffer.num_bytes
            outcome = get_outcome(code, size)
            if outcome is Outcome.FAILED and stored.get(piece.name, size) != size:
                outcome = Outcome.WRONG_SIZE
            if outcome is not Outcome.OK:
                self._note("get", code, outcome)
            outcomes.append(outcome)
        return outcomes

    def _save(self, client: Client, part: Sequence[Piece]) -> list[Outcome]:
        codes = self._call(Side.SAVE, client.put, part)
        outcomes = [put_outcome(code) for code in codes]
        for code, outcome in zip(codes, outcomes, strict=True):
            if not outcome.stored:
                self._note("put", code, outcome)
        if not LACKS_ROOM.isdisjoint(codes) or TRANSFER_FAILED in codes:
            self.pressure.refused()
        elif any(outcome.stored for outcome in outcomes):
            self.pressure.stored()
        return outcomes

    def _call(
        self,
        side: Side,
        call: Callable[[Sequence[str], Sequence[int], Sequence[int]], list[int]],
        part: Sequence[Piece],
    ) -> list[int]:
        with self._wire.admit(side, len(part)):
            codes = call(
                [piece.name for piece in part],
                [piece.at for piece in part],
                [piece.buffer.num_bytes for piece in part],
            )
        self._link.note(codes)
        return codes

    def _absent(self, client: Client, pieces: Sequence[Piece]) -> list[Piece]:
        """Land what is stored already, and what cannot be known; return the rest."""
        present = self.present(client, [piece.name for piece in pieces])
        absent = []
        for piece, code in zip(pieces, present, strict=True):
            if code == 0:
                absent.append(piece)
            else:
                self._puts.land([piece.flight], [Outcome.EXISTS if code == 1 else Outcome.FAILED])
        return absent

    def present(self, client: Client, names: Sequence[str]) -> list[int]:
        """Return 1, 0 or an error code per name, asked in bounded batches."""
        codes: list[int] = []
        for start in range(0, len(names), EXISTS_KEYS):
            if self._link.state is State.DOWN:
                break
            codes += client.exists(names[start : start + EXISTS_KEYS])
            self._link.note(codes)
        return codes + [NO_ANSWER] * (len(names) - len(codes))

    def _load_cost(self, piece: Piece) -> int:
        """Return the bytes that a load takes, of an owner's staging where there is a disk tier."""
        size = piece.buffer.num_bytes
        if self._options.staging_bytes is None:
            return size
        return -(-size // DISK_ALIGN) * DISK_ALIGN + 2 * DISK_ALIGN

    def _within_staging(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Fail the values that no owner of a disk tier can stage; return the others."""
        budget = self._options.staging_bytes
        if budget is None:
            return list(pieces)
        fitting = [piece for piece in pieces if self._load_cost(piece) <= budget]
        if len(fitting) < len(pieces):
            self._counts.add("get_oversize", len(pieces) - len(fitting))
            self._counts.complain(
                "a value is too large for the disk tier's staging",
                f"it holds {budget} bytes (MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES)",
            )
        return fitting

    def _land(self, flights: Flights, part: Sequence[Piece], outcomes: Sequence[Outcome]) -> None:
        flights.land([piece.flight for piece in part], outcomes)

    @contextlib.contextmanager
    def _landing(
        self,
        flights: Flights,
        led: Sequence[Placed],
        followed: Sequence[Placed],
    ) -> Iterator[list[Outcome]]:
        """Yield the list of outcomes, filled at the end: first of what is led, then the rest.

        What was not landed by then failed; so did all that no memory could be borrowed for.
        """
        outcomes = [Outcome.FAILED] * (len(led) + len(followed))
        try:
            yield outcomes
        except OSError as error:  # StoreError is one
            self._counts.complain("no memory to bounce values through", error)
        finally:
            flights.land((flight for _, flight in led), itertools.repeat(Outcome.FAILED))
        for idx, flight in (*led, *followed):
            outcomes[idx] = flights.wait(flight)

    def _note(self, act: str, code: int, outcome: Outcome) -> None:
        """Count a failure by its own name, and log it and a lack of room."""
        name = name_of(code)
        if outcome is Outcome.FAILED:
            self._counts.add(f"{act}_failed_{name}")
        if outcome in (Outcome.FAILED, Outcome.NO_SPACE):
            self._counts.complain(f"a {act} failed", f"{name} ({code})")


def _without_equal_names(pieces: list[Piece]) -> Iterator[list[Piece]]:
    """Yield the pieces in lists of different names: a native get mixes up equal ones."""
    seen: set[str] = set()
    now: list[Piece] = []
    later: list[Piece] = []
    for piece in pieces:
        (later if piece.name in seen else now).append(piece)
        seen.add(piece.name)
    yield now
    if later:
        yield from _without_equal_names(later)
