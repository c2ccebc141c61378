# SPDX-License-Identifier: Apache-2.0
"""Faults in the store of a running engine: set, counted, and answers compared all the same."""

import contextlib
import json
import os
from collections import Counter

from faulty_store import FAULTS_OF, Fault, log_file

TIMEOUTS = (
    ("load_timeout_s", 0.5),
    ("save_timeout_s", 1.0),
    ("lookup_timeout_s", 0.5),
    ("close_timeout_s", 2.0),
)
"""Settings with which late calls are late soon."""
LATE_S = 1.2
"""More than a load, a lookup or a save has."""
ALL_FAULTS = tuple(f"{call}.{fault}" for call, faults in FAULTS_OF.items() for fault in faults)


def one_thread_each():
    """Return the environment in which engines share a busy machine.

    Threads of one engine that wait for a core wait for each other: with two each and a load of 8
    on two cores the soak answered a tenth of the requests.
    """
    return {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


@contextlib.contextmanager
def injected(engine, rates, *, seed=0):
    """Inject faults while the block runs; yields a counter that is filled at its end."""
    counts = Counter()
    before = count_faults(engine)
    inject(engine, rates, seed=seed)
    try:
        yield counts
    finally:
        inject(engine, {})
        counts.update(count_faults(engine) - before)


def inject(engine, rates, *, seed=0):
    """Set the faults of an engine from its next store call on; no rates, no faults."""
    plan = {"rates": rates, "seed": seed, "delay_s": 0.05, "late_s": LATE_S} if rates else {}
    made = engine.faults_file.with_suffix(".new")
    made.write_text(json.dumps(plan) if plan else "")
    os.replace(made, engine.faults_file)  # the engine never reads half of it


def count_faults(engine):
    """Return how often each fault was injected since the engine's start."""
    log = log_file(engine.faults_file)
    return Counter(log.read_text().splitlines() if log.exists() else ())


def mixed_rates(rate, *, without=()):
    """Return every fault at ``rate`` per call, late calls at a tenth of it: they take long."""
    return {
        name: rate / 10 if name.endswith(Fault.LATE) else rate
        for name in ALL_FAULTS
        if name.partition(".")[2] not in without
    }
