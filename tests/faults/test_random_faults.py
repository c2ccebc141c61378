# SPDX-License-Identifier: Apache-2.0
"""Random jobs over random faults: whatever comes together, no wrong byte and one report each."""

import itertools

from faulty_store import FAULTS_OF, FaultyStore, ScriptedFaults
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from known_rank import LAYERS, PREFIX, KnownRank

from kvxfer.stores.checksums import ChecksummedStore
from kvxfer.transfer import JobResult

NUM_BLOCKS = 32
NUM_CHUNKS = 6
PAUSE_S = 0.02
"""Of a late call; the jobs of some examples have less than that."""


@st.composite
def chunk_sets(draw):
    """Draw numbers of chunks per group, as a prefix has them: a job's content."""
    wanted = {
        group: draw(st.lists(st.integers(0, NUM_CHUNKS - 1), max_size=3, unique=True))
        for group in LAYERS
    }
    return {group: numbers for group, numbers in wanted.items() if numbers} or {0: [0]}


JOBS = st.lists(st.tuples(st.sampled_from(["save", "load"]), chunk_sets()), max_size=8)
SCRIPTS = st.fixed_dictionaries(
    {
        call: st.lists(st.none() | st.sampled_from(faults), max_size=6)
        for call, faults in FAULTS_OF.items()
    }
)


def in_blocks(jobs):
    """Give every chunk of every job a block of its own: ``{group: (blocks, numbers)}`` per job."""
    free = {group: itertools.count(1) for group in LAYERS}
    return [
        (kind, {group: ([next(free[group]) for _ in n], n) for group, n in content.items()})
        for kind, content in jobs
    ]


def chunks_of(parts):
    """Yield (group, block, number) in the order of the job."""
    for group, part in parts.items():
        for block, number in zip(*part, strict=True):
            yield group, block, number


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    jobs=JOBS,
    script=SCRIPTS,
    seed=st.integers(0, 2**16),
    slot_bytes=st.sampled_from([256, 1024, 1 << 16]),
    num_threads=st.integers(1, 2),
    timeout_s=st.sampled_from([PAUSE_S / 2, 20.0]),
)
def test_random_jobs_over_random_faults(
    lmdb_store, jobs, script, seed, slot_bytes, num_threads, timeout_s
):
    lmdb_store.remove_prefix(PREFIX)
    faults = ScriptedFaults(script, seed=seed)
    faults.delay_s, faults.late_s = PAUSE_S / 10, PAUSE_S
    rank = KnownRank(
        ChecksummedStore(FaultyStore(lmdb_store, faults)),
        num_blocks=NUM_BLOCKS,
        slot_bytes=slot_bytes,
        num_threads=num_threads,
        timeout_s=timeout_s,
    )
    ordered = in_blocks(jobs)
    for job_id, (kind, parts) in enumerate(ordered):
        getattr(rank, kind)(job_id, parts)
    rank.wait(lambda: len(rank.ended) == len(ordered))
    at_report = rank.snapshot()
    rank.close()
    assert rank.equals(at_report), "a block was written after its job had been reported"
    assert rank.ended == rank.free == dict.fromkeys(range(len(ordered)), 1)
    used = {group: {0} for group in LAYERS}
    for job_id, (kind, parts) in enumerate(ordered):
        num_valid = NUM_BLOCKS if kind == "save" else rank.valid[job_id]
        for place, (group, block, number) in enumerate(chunks_of(parts)):
            used[group].add(block)
            check = rank.holds if place < num_valid else rank.holds_nothing_else
            assert check(group, block, number)
        if kind == "load" and rank.results[job_id] is JobResult.DONE:
            assert num_valid == sum(len(numbers) for _, numbers in parts.values())
    for group, blocks in used.items():
        others = set(range(NUM_BLOCKS)) - (blocks - {0})
        assert all(rank.is_untouched(group, block) for block in others)
    assert_what_is_stored_is_right(lmdb_store)


def assert_what_is_stored_is_right(store):
    """Load every chunk without faults: what loads is right."""
    rank = KnownRank(ChecksummedStore(store), num_blocks=NUM_BLOCKS)
    for number in range(NUM_CHUNKS):
        for group in LAYERS:
            job_id = 2 * number + group
            rank.load(job_id, {group: ([1 + number], [number])})
            done = rank.result(job_id) is JobResult.DONE
            check = rank.holds if done else rank.is_untouched
            assert check(group, 1 + number, *([number] if done else []))
    rank.close()
