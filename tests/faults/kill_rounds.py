# SPDX-License-Identifier: Apache-2.0
"""Kill -9 in the middle of saves and loads, over and over, on one store.

    python scripts/kill_loop.py --rounds 50 --engine-every 10

A light round kills a process that makes a worker's calls on known bytes (``kill_child``); an engine
round kills a vLLM engine. After each kill the store must open and answer, every value in it must be
whole, and the next process must hit what is there: with the right bytes, or the right tokens.
"""

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

from engine_faults import one_thread_each
from engine_harness import Engine, EngineFailedError, EngineSettings
from engine_models import Prompts, write_tiny_llama
from kill_child import load_all, make_rank

from kvxfer.stores import Outcome, open_store

CHILD = Path(__file__).with_name("kill_child.py")
LONGEST_LIFE_S = 0.5
WAIT_S = 60.0


class LightRounds:
    """Rounds of ``kill_child`` on one store, smaller than what the children save."""

    def __init__(self, folder, dice):
        self._uri = f"lmdb://{folder}/store?capacity=8MiB&lease_s=0"
        self._dice = dice
        self.counts = Counter()

    def run(self):
        """Start a child, kill it in the middle of its jobs, and check what it leaves."""
        whole_before = self._num_whole()
        with self._child() as child:
            assert child.stdout.readline() == f"hits {whole_before}\n"
            time.sleep(self._dice.uniform(0.0, LONGEST_LIFE_S))
            os.kill(child.pid, signal.SIGKILL)
            lines = Counter(line.split()[1] for line in child.stdout if line.endswith("d\n"))
            assert child.wait(WAIT_S) == -signal.SIGKILL, "the child found wrong bytes"
        self.counts["light rounds"] += 1
        self.counts["jobs ended"] += lines["ended"]
        self.counts["jobs in flight when killed"] += lines["ordered"] - lines["ended"]
        self.counts["chunks hit by the next"] += self._num_whole()

    def _num_whole(self):
        """Open the store, check every byte of every whole chunk, return how many there are."""
        store = open_store(self._uri)
        rank = make_rank(store)
        try:
            return load_all(rank)
        finally:
            rank.close()
            store.close()

    @contextlib.contextmanager
    def _child(self):
        seed = str(self._dice.randrange(1 << 30))
        child = subprocess.Popen(
            [sys.executable, str(CHILD), self._uri, seed],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        watchdog = threading.Timer(WAIT_S, child.kill)
        watchdog.start()
        try:
            yield child
        finally:
            watchdog.cancel()
            child.kill()
            child.wait()
            child.stdout.close()


class EngineRounds:
    """Rounds of real engines on one store, compared with an engine that nobody kills.

    That one has a store of its own, which tells the right bytes of every value as well.
    """

    def __init__(self, folder, dice):
        self._folder, self._dice = folder, dice
        (folder / "model").mkdir()
        self._model = write_tiny_llama(folder / "model")
        self._uris = [f"lmdb://{folder}/{name}?capacity=512MiB" for name in ("right", "killed")]
        self._num_started = 0
        self._draw = Prompts(dice.randrange(1 << 30)).draw
        self._known = {}
        self.counts = Counter()
        self._reference = self._start(self._uris[0])

    def run(self):
        """Let an engine hit what the killed ones left, kill it in the middle of more."""
        self._add_prompts()
        engine = self._start(self._uris[1])
        try:
            self._check_survivors(engine)
            new = [prompt for prompt in self._known if not self._known[prompt][1]]
            old = [prompt for prompt in self._known if self._known[prompt][1]][-3:]
            kill_while_busy(engine, [*old, *new], self._dice.uniform(0.0, LONGEST_LIFE_S))
        finally:
            engine.kill()
        self._known = {prompt: (output, True) for prompt, (output, _) in self._known.items()}
        self.counts["engine rounds"] += 1
        self.counts["values whole after the kill"] += self._check_bytes()

    def check_last(self):
        """Let one more engine hit what the last kill left."""
        engine = self._start(self._uris[1])
        try:
            self._check_survivors(engine)
        finally:
            engine.kill()

    def close(self):
        self._reference.kill()

    def _add_prompts(self):
        prompts = [tuple(self._draw(self._dice.randint(100, 450))) for _ in range(4)]
        outputs = self._reference.generate(list(map(list, prompts))).outputs
        self._known.update((p, (output, False)) for p, output in zip(prompts, outputs, strict=True))

    def _check_survivors(self, engine):
        """Compute every prompt of earlier rounds: the right tokens, and hits if it is stored."""
        prompts = [prompt for prompt, (_, seen) in self._known.items() if seen]
        if not prompts:
            return
        found = engine.generate(list(map(list, prompts)))
        assert found.outputs == [self._known[prompt][0] for prompt in prompts]
        self.counts["tokens hit by the next engine"] += found.external_hits
        self.counts["requests answered right"] += len(prompts)
        engine.reset_local_cache()

    def _check_bytes(self):
        """Compare every value that the killed left with the right one; return how many."""
        right, killed = (open_store(uri) for uri in self._uris)
        try:
            keys = all_keys(killed)
            for key, size in keys.items():
                values = [bytearray(size), bytearray(size)]
                for store, value in zip((right, killed), values, strict=True):
                    (outcome,) = store.get_into([key], [memoryview(value)])
                    assert outcome is Outcome.OK, f"{key!r}: {outcome.name}"
                assert values[0] == values[1], f"{key!r} has wrong bytes"
            return len(keys)
        finally:
            right.close()
            killed.close()

    def _start(self, uri):
        self._num_started += 1
        folder = self._folder / f"engine-{self._num_started}"
        folder.mkdir()
        return Engine(EngineSettings(model=self._model, store=uri), folder)


def kill_while_busy(engine, prompts, delay_s):
    """Submit prompts and kill the engine in the middle of their loads and saves."""
    for prompt in prompts:
        engine.submit(list(prompt))
    killer = threading.Timer(delay_s, os.killpg, (engine.pid, signal.SIGKILL))
    killer.start()
    deadline = time.monotonic() + WAIT_S
    try:
        while time.monotonic() < deadline:
            engine.step_for(WAIT_S)
    except EngineFailedError:
        return
    finally:
        killer.join()
    raise AssertionError("the engine outlived its kill")


def all_keys(store):
    """Return the size of the value of every key of an LMDB store."""
    reader = store._reference.handle().reader
    with reader._snapshot() as txn:
        cursor = txn.cursor(db=reader._tables.values)
        return {bytes(key): value.nbytes for key, value in cursor}


def kill_loop(rounds, engine_every, dice, folder):
    """Run the rounds and return what they counted; AssertionError for what does not hold."""
    for name in ("light", "engines"):
        (folder / name).mkdir()
    light = LightRounds(folder / "light", dice)
    engines = EngineRounds(folder / "engines", dice) if engine_every else None
    try:
        for number in range(1, rounds + 1):
            (engines if engines and number % engine_every == 0 else light).run()
        if engines:
            engines.check_last()
    finally:
        if engines:
            engines.close()
    return light.counts + (engines.counts if engines else Counter())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--engine-every", type=int, default=10, help="0: no engine rounds")
    parser.add_argument("--seed", default=str(time.time_ns()))
    arguments = parser.parse_args()
    os.environ.update(one_thread_each())
    print(f"kill loop: {arguments.rounds} rounds, seed {arguments.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        dice = random.Random(arguments.seed)
        counts = kill_loop(arguments.rounds, arguments.engine_every, dice, Path(folder))
    for name, number in counts.items():
        print(f"  {name:32} {number}")
    print("  every value whole, every answer right")


if __name__ == "__main__":
    main()
