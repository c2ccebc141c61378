# SPDX-License-Identifier: Apache-2.0
"""A store in a dict that can be made to wait, to fail and to lie."""

import threading

from kvxfer.stores import Outcome, Store
from kvxfer.stores.base import StoreStats


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

    def _enter(self, name, keys):
        self.calls.append((name, len(keys)))
        if name in self.gates:
            self.gates[name].pass_through()
        answer = self.answers.get(name)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def register(self, buffer):
        pass

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
