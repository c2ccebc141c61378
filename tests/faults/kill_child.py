# SPDX-License-Identifier: Apache-2.0
"""A process that saves and loads for ever, to be killed: ``python kill_child.py <uri> <seed>``.

It makes the calls of a worker, over chunks whose bytes follow from their numbers. First it loads
all that is stored whole and says ``hits <number>``; then it keeps saves and loads in flight and
says ``<job> ordered`` and ``<job> ended``, a line each.
"""

import functools
import logging
import os
import random
import sys

from known_rank import LAYERS, KnownRank

from kvxfer.stores import open_store
from kvxfer.transfer import JobResult

NUM_CHUNKS = 120
"""More than the stores of the kill loop hold: the killed also evict."""
CHUNKS_A_JOB = 6
MOST_IN_FLIGHT = 4
CONTENT = 4096
"""Makes 32 KiB of a value of the first group, 20 KiB of one of the second."""


def make_rank(store):
    """Return the rank whose chunks child and parent know."""
    num_blocks = 1 + CHUNKS_A_JOB * MOST_IN_FLIGHT
    rank = KnownRank(store, num_blocks=num_blocks, content=CONTENT, slot_bytes=1 << 20)
    rank.known = functools.cache(rank.known)
    return rank


def load_all(rank):
    """Load every chunk that is stored and check every byte; return how many were whole."""
    num_whole = 0
    for job_id in range(NUM_CHUNKS * len(LAYERS)):
        number, group = divmod(job_id, len(LAYERS))
        if not all(rank.store.exists(rank.keys(group, number))):
            continue
        rank.load(job_id, {group: ([1], [number])})
        whole = rank.result(job_id) is JobResult.DONE  # not if it was evicted meanwhile
        assert rank.holds(group, 1, number) or not whole, f"chunk {number} has wrong bytes"
        num_whole += whole
    return num_whole


def save_and_load(rank, dice):
    """Keep jobs in flight until killed; each has blocks of its own, and a load is checked."""
    free = [1 + CHUNKS_A_JOB * place for place in range(MOST_IN_FLIGHT)]
    in_flight = {}
    for job_id in range(NUM_CHUNKS * len(LAYERS), sys.maxsize):
        rank.wait(lambda: free or in_flight.keys() & rank.results.keys())
        for ended in in_flight.keys() & rank.results.keys():
            kind, first, numbers = in_flight.pop(ended)
            if kind == "load":
                assert_valid(rank, first, numbers, rank.valid[ended])
            free.append(first)
            say(ended, "ended")
        first, kind = free.pop(), dice.choice(["save", "load"])
        start = dice.randrange(NUM_CHUNKS - CHUNKS_A_JOB)
        numbers = list(range(start, start + CHUNKS_A_JOB))
        blocks = list(range(first, first + CHUNKS_A_JOB))
        getattr(rank, kind)(job_id, dict.fromkeys(LAYERS, (blocks, numbers)))
        in_flight[job_id] = (kind, first, numbers)
        say(job_id, "ordered")


def assert_valid(rank, first, numbers, num_valid):
    """Check the leading chunks that a load says are whole."""
    order = [(group, first + i, n) for group in LAYERS for i, n in enumerate(numbers)]
    assert all(rank.holds(*chunk) for chunk in order[:num_valid])


def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def main(uri, seed):
    logging.getLogger("kvxfer").setLevel(logging.ERROR)  # evicted chunks are many
    rank = make_rank(open_store(uri))
    say("hits", load_all(rank))
    save_and_load(rank, random.Random(int(seed)))


if __name__ == "__main__":
    main(*sys.argv[1:])
