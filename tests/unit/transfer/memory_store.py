# SPDX-License-Identifier: Apache-2.0
"""A store in a dict that can be made to wait, to fail and to lie."""

import ctypes
import threading

import numpy as np

from kvxfer.stores import Outcome, Store
from kvxfer.stores.base import StoreStats
from kvxfer.stores.parts import TransferMode


class Gate:
    """Holds a call until it is opened; ``reached`` tells that a call has arrived."""

    def __init__(self):
        self.reached = threading.Event()
        self._open = threading.Event()

    def pass_through(self):
        self.reached.set()
        assert self._open.wait(20), "nobody opened the gate"

    def open(self):
        self._open.set()


class MemoryStore(Store):
    def __init__(self):
        self.values = {}
        self.gates = {}
        self.answers = {}
        self.calls = []
        self.registered = []

    def _enter(self, name, keys):
        self.calls.append((name, len(keys)))
        if name in self.gates:
            self.gates[name].pass_through()
        answer = self.answers.get(name)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def exists(self, keys):
        answer = self._enter("exists", keys)
        if answer is not None:
            return answer(keys)
        return bytearray(key in self.values for key in keys)

    def get_into(self, keys, targets):
        answer = self._enter("get", keys)
        if answer is not None:
            return answer(keys)
        return [self._get(key, target) for key, target in zip(keys, targets, strict=True)]

    def _get(self, key, target):
        if key not in self.values:
            return Outcome.MISSING
        if len(self.values[key]) != len(target):
            return Outcome.WRONG_SIZE
        target[:] = self.values[key]
        return Outcome.OK

    def put_from(self, keys, sources):
        answer = self._enter("put", keys)
        if answer is not None:
            return answer(keys)
        outcomes = []
        for key, source in zip(keys, sources, strict=True):
            outcomes.append(Outcome.EXISTS if key in self.values else Outcome.OK)
            self.values.setdefault(key, bytes(source))
        return outcomes

    # Values in parts, where ``mode`` says so

    mode = TransferMode.PACKED
    most_parts = 64

    @property
    def transfer_mode(self):
        return self.mode

    def register(self, buffer):
        self.registered.append(buffer)

    def get_parts(self, keys, parts):
        answer = self._enter("get_parts", keys)
        if answer is not None:
            return answer(keys)
        outcomes = []
        for key, places in zip(keys, self._places(parts), strict=True):
            value = self.values.get(key)
            if value is None or len(value) != sum(map(len, places)):
                outcomes.append(Outcome.MISSING if value is None else Outcome.WRONG_SIZE)
                continue
            at = 0
            for place in places:
                place[:] = value[at : at + len(place)]
                at += len(place)
            outcomes.append(Outcome.OK)
        return outcomes

    def put_parts(self, keys, parts):
        values = [b"".join(map(bytes, places)) for places in self._places(parts)]
        answer = self._enter("put_parts", keys)
        if answer is not None:
            return answer(keys)
        outcomes = [Outcome.EXISTS if key in self.values else Outcome.OK for key in keys]
        self.values = dict(zip(keys, values, strict=True)) | self.values
        return outcomes

    def _places(self, parts):
        """Return the memory of the parts of each value, which has to be registered."""
        parts.check(len(parts.counts), self.most_parts)
        places = [
            memoryview((ctypes.c_ubyte * size).from_address(ptr)).cast("B")
            for ptr, size in zip(parts.ptrs.tolist(), parts.sizes.tolist(), strict=True)
        ]
        spans = [(np.frombuffer(b, np.uint8).ctypes.data, len(b)) for b in self.registered]
        for ptr, size in zip(parts.ptrs.tolist(), parts.sizes.tolist(), strict=True):
            assert any(at <= ptr and ptr + size <= at + num for at, num in spans)
        ends = np.cumsum(parts.counts).tolist()
        return [
            places[end - num : end] for end, num in zip(ends, parts.counts.tolist(), strict=True)
        ]

    def remove(self, keys):
        return sum(self.values.pop(key, None) is not None for key in keys)

    def remove_prefix(self, prefix):
        doomed = [key for key in self.values if key.startswith(prefix)]
        for key in doomed:
            del self.values[key]
        return len(doomed)

    def stats(self):
        used = sum(map(len, self.values.values()))
        return StoreStats(len(self.values), used, 1 << 40, {})

    def close(self):
        pass
