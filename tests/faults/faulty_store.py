# SPDX-License-Identifier: Apache-2.0
"""A store that fails, lies, forgets, damages and dawdles, by a script or by chance.

``FaultyStore`` stands directly around a real store, inside of whatever the worker puts around it,
so that what it does looks like the backend's own doing. What happens at a call is drawn from
``ScriptedFaults`` (one test's order), ``RandomFaults`` (seeded chance) or ``FileFaults`` (chance
that is set from outside the engine's process while it runs).
"""

import enum
import json
import random
import threading
import time
from collections import Counter, deque
from contextlib import suppress
from pathlib import Path

from kvxfer.stores.base import Outcome, Store

UNKNOWN_CODE = -7
MOST_DAMAGED_BYTES = 256


class Fault(enum.StrEnum):
    """What can go wrong in one call."""

    DELAY = "delay"
    """The call takes ``delay_s`` longer."""
    LATE = "late"
    """The call takes ``late_s`` longer: more than its job has. Then it does what it was asked."""
    RAISE = "raise"
    NO_ANSWER = "no_answer"
    """The call works and answers None."""
    SHORT_ANSWER = "short_answer"
    """The call works and answers for half of the keys only."""
    UNKNOWN_CODE = "unknown_code"
    """The call works and answers some keys with a number that is no ``Outcome``."""
    FAILED = "failed"
    WRONG_SIZE = "wrong_size"
    SHORT_READ = "short_read"
    """Some targets are written in half, and answered ``FAILED``."""
    CORRUPT = "corrupt"
    """Bytes of some values are flipped, in the target or on the way into the store: ``OK``."""
    VANISH = "vanish"
    """Some keys are removed just before they are read."""
    PHANTOM = "phantom"
    """``exists`` says yes for some keys, whatever is stored."""
    FORGET = "forget"
    """``exists`` says no for some keys, whatever is stored."""
    NO_SPACE = "no_space"
    LOST = "lost"
    """A put answers ``OK`` and stores nothing."""


_ANY_CALL = (Fault.DELAY, Fault.LATE, Fault.RAISE, Fault.NO_ANSWER, Fault.SHORT_ANSWER)
FAULTS_OF = {
    "exists": (*_ANY_CALL, Fault.PHANTOM, Fault.FORGET),
    "get": (
        *_ANY_CALL,
        Fault.UNKNOWN_CODE,
        Fault.FAILED,
        Fault.WRONG_SIZE,
        Fault.SHORT_READ,
        Fault.CORRUPT,
        Fault.VANISH,
    ),
    "put": (
        *_ANY_CALL,
        Fault.UNKNOWN_CODE,
        Fault.FAILED,
        Fault.NO_SPACE,
        Fault.LOST,
        Fault.CORRUPT,
    ),
}
"""Call -> the faults that it can have."""


class InjectedError(RuntimeError):
    """What ``Fault.RAISE`` raises: no error that kvxfer knows."""


class ScriptedFaults:
    """One queue of faults per call, each used once; None stands for a call without a fault."""

    def __init__(self, script, *, seed=0):
        self.random = random.Random(seed)
        self.delay_s = 0.01
        self.late_s = 0.0
        self._queues = {call: deque(faults) for call, faults in script.items()}

    def draw(self, call):
        """Return the next fault of a call; None once its queue is empty."""
        with suppress(KeyError, IndexError):
            return self._queues[call].popleft()
        return None


class RandomFaults:
    """Draws faults by chance, the same for the same seed and order of calls.

    ``rates`` maps ``"call.fault"``, or a fault alone for every call that can have it, to the
    chance that a call has it.
    """

    def __init__(self, rates, *, seed=0, delay_s=0.05, late_s=1.0):
        self.random = random.Random(seed)
        self.delay_s, self.late_s = delay_s, late_s
        self._rates = {call: _rates_of(call, rates) for call in FAULTS_OF}
        self._lock = threading.Lock()

    def draw(self, call):
        """Return the fault of a call, or None."""
        with self._lock:
            left = self.random.random()
        for fault, rate in self._rates[call]:
            left -= rate
            if left < 0:
                return fault
        return None


def _rates_of(call, rates):
    """Return (fault, rate) pairs of one call."""
    found = [
        (fault, rates.get(f"{call}.{fault}", rates.get(fault, 0))) for fault in FAULTS_OF[call]
    ]
    return [(fault, rate) for fault, rate in found if rate]


class FileFaults:
    """``RandomFaults`` whose arguments stand, as JSON, in a file that may change at any time.

    An empty file stands for no faults. What was injected is appended to ``log_file(path)``, a line
    each, so that it survives the death of this process.
    """

    def __init__(self, path):
        self._path = Path(path)
        self._log = log_file(self._path).open("a", buffering=1)
        self._lock = threading.Lock()
        self._text = ""  # guarded by _lock
        self._faults = RandomFaults({})  # guarded by _lock

    def draw(self, call):
        """Return the fault of a call, or None, as the file says now."""
        return self._current().draw(call)

    def note(self, name):
        """Append an injected fault to the log."""
        self._log.write(name + "\n")

    def __getattr__(self, name):
        return getattr(self._current(), name)

    def _current(self):
        text = self._path.read_text()
        with self._lock:
            if text != self._text:
                self._text = text
                self._faults = RandomFaults(**json.loads(text or '{"rates": {}}'))
            return self._faults


def log_file(path):
    """Return the file in which the faults of a plan are counted."""
    return path.with_suffix(".log")


class FaultyStore(Store):
    """Passes calls on to ``store`` as ``faults`` lets it; ``counts`` has what was injected.

    Its names are ``"call.fault"``. ``pause`` waits the seconds of a ``DELAY`` or ``LATE``; a test
    that decides itself when a late call goes on passes its own.
    """

    def __init__(self, store, faults, pause=time.sleep):
        self.counts = Counter()
        self._store, self._faults, self._pause = store, faults, pause

    def register(self, buffer):
        self._store.register(buffer)

    def exists(self, keys):
        fault = self._enter("exists")
        found = self._store.exists(keys)
        for fault_kind, answer in ((Fault.PHANTOM, 1), (Fault.FORGET, 0)):
            if fault is fault_kind:
                for idx in self._choose("exists", fault, range(len(keys))):
                    found[idx] = answer
        return self._answer("exists", fault, found)

    def get_into(self, keys, targets):
        fault = self._enter("get")
        if fault is Fault.VANISH:
            self._store.remove([keys[idx] for idx in self._choose("get", fault, range(len(keys)))])
        outcomes = self._store.get_into(keys, targets)
        fine = [idx for idx, outcome in enumerate(outcomes) if outcome is Outcome.OK]
        if fault is Fault.CORRUPT:
            for idx in self._choose("get", fault, fine):
                self._flip(targets[idx].cast("B"))
        elif fault is Fault.SHORT_READ:
            for idx in self._choose("get", fault, fine):
                rest = targets[idx].cast("B")[targets[idx].nbytes // 2 :]
                rest[:] = b"\xee" * len(rest)
                outcomes[idx] = Outcome.FAILED
        elif fault in (Fault.FAILED, Fault.WRONG_SIZE):
            for idx in self._choose("get", fault, fine):
                outcomes[idx] = Outcome[fault.name]
        return self._answer("get", fault, outcomes)

    def put_from(self, keys, sources):
        fault = self._enter("put")
        if fault in (Fault.FAILED, Fault.NO_SPACE, Fault.LOST):
            told = Outcome.OK if fault is Fault.LOST else Outcome[fault.name]
            return self._put_some(keys, sources, fault, told)
        if fault is Fault.CORRUPT:
            chosen = self._choose("put", fault, range(len(keys)))
            sources = [
                self._flip(memoryview(bytearray(source))) if idx in chosen else source
                for idx, source in enumerate(sources)
            ]
        return self._answer("put", fault, self._store.put_from(keys, sources))

    def remove(self, keys):
        return self._store.remove(keys)

    def remove_prefix(self, prefix):
        return self._store.remove_prefix(prefix)

    def stats(self):
        return self._store.stats()

    def close(self):
        self._store.close()

    def _put_some(self, keys, sources, fault, told):
        """Put all but some keys, which are answered with ``told``."""
        chosen = self._choose("put", fault, range(len(keys)))
        kept = [idx for idx in range(len(keys)) if idx not in chosen]
        outcomes = [told] * len(keys)
        if kept:
            stored = self._store.put_from([keys[i] for i in kept], [sources[i] for i in kept])
            for idx, outcome in zip(kept, stored, strict=True):
                outcomes[idx] = outcome
        return outcomes

    def _enter(self, call):
        """Draw the fault of a call; wait or raise where it says so."""
        fault = self._faults.draw(call)
        if fault in (Fault.DELAY, Fault.LATE):
            self._note(call, fault)
            self._pause(getattr(self._faults, f"{fault}_s"))
        if fault is Fault.RAISE:
            self._note(call, fault)
            raise InjectedError(f"{call} broke, as a test asked")
        return fault

    def _answer(self, call, fault, answer):
        """Return the answer, or what a fault makes of it."""
        if fault is Fault.NO_ANSWER:
            self._note(call, fault)
            return None
        if fault is Fault.SHORT_ANSWER:
            self._note(call, fault)
            return answer[: len(answer) // 2]
        if fault is Fault.UNKNOWN_CODE:
            for idx in self._choose(call, fault, range(len(answer))):
                answer[idx] = UNKNOWN_CODE
        return answer

    def _choose(self, call, fault, indices):
        """Choose at least one of ``indices``, where there is one, and count the fault."""
        if not indices:
            return []
        self._note(call, fault)
        dice = self._faults.random
        return sorted(dice.sample(indices, dice.randint(1, len(indices))))

    def _flip(self, value):
        """Flip every bit of a run of bytes, in place, and return the value."""
        dice = self._faults.random
        start = dice.randrange(len(value))
        stop = min(len(value), start + dice.randint(1, MOST_DAMAGED_BYTES))
        value[start:stop] = bytes(byte ^ 0xFF for byte in value[start:stop])
        return value

    def _note(self, call, fault):
        name = f"{call}.{fault}"
        self.counts[name] += 1
        if isinstance(self._faults, FileFaults):
            self._faults.note(name)
