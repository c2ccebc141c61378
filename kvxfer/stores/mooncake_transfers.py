# SPDX-License-Identifier: Apache-2.0
"""Moving values between memory and a Mooncake pool: batches, bounce buffer, outcomes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

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
from kvxfer.stores.mooncake_flights import Flight, Flights
from kvxfer.stores.mooncake_link import Link, State
from kvxfer.stores.mooncake_memory import (
    SLOT_BYTES,
    Buffers,
    Memory,
    ScatteredBuffers,
    copy_bytes,
)
from kvxfer.stores.mooncake_options import MooncakeOptions
from kvxfer.stores.mooncake_pressure import Pressure
from kvxfer.stores.mooncake_values import Values, without_equal_names
from kvxfer.stores.mooncake_wire import Side, Wire, cut

ALIGN = 64
EXISTS_KEYS = 4096
"""Names of one question: the master answers 4,096 in some milliseconds."""
DISK_ALIGN = 4096
"""An owner of a disk tier stages a value from one multiple of this to another, and one beside."""


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
        self, client: Client, names: Sequence[str], buffers: Buffers | ScatteredBuffers
    ) -> list[Outcome]:
        """Copy values into buffers; one outcome per name. Equal names and shapes travel once."""
        flight = self._gets.claim(list(zip(names, buffers.shapes, strict=True)), buffers)
        with self._landing(flight):
            values = self._within_staging(Values.led_by(flight, names, buffers))
            for part in without_equal_names(values):
                for batch in self._batches(part, self._load_costs, self._options.most_load_bytes):
                    self._run(batch, Side.LOAD, client)
        self._counts.add("get_shared", len(flight.followed))
        return flight.wait(self._options.patience_s)

    def put(
        self, client: Client, names: Sequence[str], buffers: Buffers | ScatteredBuffers
    ) -> list[Outcome]:
        """Store copies of buffers; one outcome per name. The first of equal names is stored."""
        flight = self._puts.claim(names, buffers)
        with self._landing(flight):
            values = self._absent(client, Values.led_by(flight, names, buffers))
            for batch in self._batches(values, list, self._options.batch_bytes):
                if self.pressure.is_on:
                    self._counts.add("put_backed_off", len(batch))
                    batch.land([Outcome.NO_SPACE] * len(batch))
                else:
                    self._run(batch, Side.SAVE, client)
        outcomes = flight.wait(self._options.patience_s)
        for row, _, _ in flight.followed:
            if outcomes[row] is Outcome.OK:
                outcomes[row] = Outcome.EXISTS
        return outcomes

    # Batches

    def _batches(
        self,
        values: Values,
        costs_of: Callable[[Sequence[int]], Sequence[int]],
        most_bytes: int,
    ) -> Iterator[Values]:
        """Yield the values in native calls of bounded keys, segments and bytes."""
        most_keys = self._options.most_keys
        if values.are_scattered:
            segments = list(map(len, values.shapes))
            for places in cut(segments, most_keys, self._options.most_segments):
                part = values.part(places)
                for at in cut(costs_of(part.sizes), most_keys, most_bytes):
                    yield part.part(at)
            return
        for places in cut(costs_of(values.sizes), most_keys, most_bytes):
            yield values.part(places)

    def _run(self, batch: Values, side: Side, client: Client) -> None:
        """Move a batch, in parts that fit the bounce buffer where it is not in our memory."""
        costs = self._bounce_costs(batch)
        move = self._load if side is Side.LOAD else self._save
        for places in cut(costs, len(batch), SLOT_BYTES):
            part = batch.part(places)
            if self._link.state is State.DOWN:  # lost since the call began: no more waiting
                part.land([Outcome.FAILED] * len(part))
                continue
            with self._placed(part, costs[places.start : places.stop], side) as ptrs:
                outcomes = move(client, part, ptrs)
                if side is Side.LOAD and ptrs is not part.ptrs:
                    _copy_loaded(part, ptrs, outcomes)
            part.land(outcomes)

    def _bounce_costs(self, batch: Values) -> Sequence[int]:
        """Return the bytes that each value takes of the bounce buffer; parts never bounce."""
        if batch.are_scattered:
            return [0] * len(batch)
        outside = self._memory.outside(batch.ptrs, batch.sizes)
        if True not in outside:
            return [0] * len(batch)
        aligned = (-(-size // ALIGN) * ALIGN for size in batch.sizes)
        return [cost * out for cost, out in zip(aligned, outside, strict=True)]

    @contextlib.contextmanager
    def _placed(self, part: Values, costs: Sequence[int], side: Side) -> Iterator[Sequence[Any]]:
        """Yield where the client finds each value: ``part.ptrs``, or in a slot if it bounces."""
        total = sum(costs)
        if not total:
            yield part.ptrs
            return
        with self._memory.borrow(total) as slot:
            ends = itertools.accumulate(costs, initial=slot.ptr)
            places = zip(ends, costs, part.ptrs, strict=False)
            ptrs = [end if cost else ptr for end, cost, ptr in places]
            if side is Side.SAVE:
                for at, ptr, size in zip(ptrs, part.ptrs, part.sizes, strict=True):
                    if at != ptr:
                        copy_bytes(at, ptr, size)
            yield ptrs

    def _load(self, client: Client, part: Values, ptrs: Sequence[Any]) -> list[Outcome]:
        get = client.get_parts if part.are_scattered else client.get
        codes = self._call(Side.LOAD, get, part, ptrs)
        if codes == part.sizes:
            return [Outcome.OK] * len(part)
        doubtful = [
            name for name, code in zip(part.names, codes, strict=True) if code in MAYBE_WRONG_SIZE
        ]
        stored = sizes_by_name(client, doubtful) if self._link.state is State.UP else {}
        outcomes = []
        for name, size, code in zip(part.names, part.sizes, codes, strict=True):
            outcome = get_outcome(code, size)
            if outcome is Outcome.FAILED and stored.get(name, size) != size:
                outcome = Outcome.WRONG_SIZE
            if outcome is not Outcome.OK:
                self._note("get", code, outcome)
            outcomes.append(outcome)
        return outcomes

    def _save(self, client: Client, part: Values, ptrs: Sequence[Any]) -> list[Outcome]:
        put = client.put_parts if part.are_scattered else client.put
        codes = self._call(Side.SAVE, put, part, ptrs)
        if not any(codes):
            self.pressure.stored()
            return [Outcome.OK] * len(part)
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
        call: Callable[[Sequence[str], Sequence[Any], Sequence[Any]], list[int]],
        part: Values,
        ptrs: Sequence[Any],
    ) -> list[int]:
        with self._wire.admit(side, part.num_segments, self._options.patience_s) as entered:
            if not entered:
                self._counts.complain("the wire was not free in time", "other calls are stuck")
                return [NO_ANSWER] * len(part)
            codes = call(part.names, ptrs, part.shapes)
        self._link.note(codes)
        return codes

    def _absent(self, client: Client, values: Values) -> Values:
        """Land what is stored already, and what cannot be known; return the rest."""
        codes = self.present(client, values.names)
        if not any(codes):
            return values
        known = [place for place, code in enumerate(codes) if code != 0]
        values.pick(known).land(
            [Outcome.EXISTS if codes[place] == 1 else Outcome.FAILED for place in known]
        )
        return values.pick([place for place, code in enumerate(codes) if code == 0])

    def present(self, client: Client, names: Sequence[str]) -> list[int]:
        """Return 1, 0 or an error code per name, asked in bounded batches."""
        codes: list[int] = []
        for start in range(0, len(names), EXISTS_KEYS):
            if self._link.state is State.DOWN:
                break
            codes += client.exists(names[start : start + EXISTS_KEYS])
            self._link.note(codes)
        return codes + [NO_ANSWER] * (len(names) - len(codes))

    def _load_costs(self, sizes: Sequence[int]) -> Sequence[int]:
        """Return the bytes that loads take, of an owner's staging where there is a disk tier."""
        if self._options.staging_bytes is None:
            return sizes
        return [-(-size // DISK_ALIGN) * DISK_ALIGN + 2 * DISK_ALIGN for size in sizes]

    def _within_staging(self, values: Values) -> Values:
        """Leave out the values that no owner of a disk tier can stage: they fail."""
        budget = self._options.staging_bytes
        if budget is None:
            return values
        costs = self._load_costs(values.sizes)
        fitting = [place for place, cost in enumerate(costs) if cost <= budget]
        if num_oversize := len(values) - len(fitting):
            self._counts.add("get_oversize", num_oversize)
            self._counts.complain(
                "a value is too large for the disk tier's staging",
                f"it holds {budget} bytes (MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES)",
            )
        return values.pick(fitting)

    @contextlib.contextmanager
    def _landing(self, flight: Flight) -> Iterator[None]:
        """Land at the end, as failed, what has not landed, whatever raised meanwhile.

        Among that is all that no memory could be borrowed for.
        """
        try:
            yield
        except OSError as error:  # StoreError is one
            self._counts.complain("no memory to bounce values through", error)
        finally:
            if rows := flight.not_landed:
                flight.land(rows, [Outcome.FAILED] * len(rows))

    def _note(self, act: str, code: int, outcome: Outcome) -> None:
        """Count a failure by its own name, and log it and a lack of room."""
        name = name_of(code)
        if outcome is Outcome.FAILED:
            self._counts.add(f"{act}_failed_{name}")
        if outcome in (Outcome.FAILED, Outcome.NO_SPACE):
            self._counts.complain(f"a {act} failed", f"{name} ({code})")


def _copy_loaded(part: Values, ptrs: Sequence[int], outcomes: Sequence[Outcome]) -> None:
    """Copy what bounced and arrived to where it was asked for."""
    places = zip(part.ptrs, ptrs, part.sizes, outcomes, strict=True)
    for target, source, size, outcome in places:
        if outcome is Outcome.OK and source != target:
            copy_bytes(target, source, size)
