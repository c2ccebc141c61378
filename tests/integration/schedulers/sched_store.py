# SPDX-License-Identifier: Apache-2.0
"""A real store behind switches: it can hold calls, lose values, fail and lie."""

import threading
from collections import Counter

from kvxfer.stores import Outcome, Store


class SwitchedStore(Store):
    """Passes calls on, unless a switch says otherwise; shared switches are set by the test."""

    def __init__(self, store, switches):
        self._store, self._switches = store, switches

    def register(self, buffer):
        self._store.register(buffer)

    def watch_evictions(self, on_evicted):
        self._store.watch_evictions(on_evicted)

    def exists(self, keys):
        self._switches.calls["exists"] += 1
        return self._store.exists(keys)

    def get_into(self, keys, targets):
        self._switches.calls["get"] += 1
        self._switches.gets.wait_open()
        if self._switches.get_error is not None:
            raise self._switches.get_error
        outcomes = self._store.get_into(keys, targets)
        if self._switches.flips_a_bit:
            targets[0][0] ^= 1
        for idx in self._switches.lost_values:
            if idx < len(outcomes):
                outcomes[idx] = Outcome.MISSING
        return outcomes

    def put_from(self, keys, sources):
        self._switches.calls["put"] += 1
        self._switches.puts.wait_open()
        if self._switches.puts_fail:
            return [Outcome.FAILED] * len(keys)
        return self._store.put_from(keys, sources)

    def remove(self, keys):
        return self._store.remove(keys)

    def remove_prefix(self, prefix):
        return self._store.remove_prefix(prefix)

    def stats(self):
        return self._store.stats()

    def close(self):
        self._store.close()


class Gate:
    """Lets calls through while it is open."""

    def __init__(self):
        self._open = threading.Event()
        self._open.set()

    def shut(self):
        self._open.clear()

    def open(self):
        self._open.set()

    @property
    def is_open(self):
        return self._open.is_set()

    def wait_open(self):
        assert self._open.wait(30), "nobody opened the gate"


class Switches:
    """What a test can do to the stores of one rank."""

    def __init__(self):
        self.gets, self.puts = Gate(), Gate()
        self.get_error = None
        self.lost_values = ()
        """Indices in each batch of gets that answer as missing."""
        self.puts_fail = self.flips_a_bit = False
        self.calls = Counter()

    @property
    def is_open(self):
        """Whether no call waits."""
        return self.gets.is_open and self.puts.is_open

    def mend(self):
        """Undo every switch."""
        self.gets.open()
        self.puts.open()
        self.get_error, self.lost_values = None, ()
        self.puts_fail = self.flips_a_bit = False
