# SPDX-License-Identifier: Apache-2.0
"""Soak: an engine over a faulty store, under random traffic, against an engine without connector.

    python scripts/soak.py --minutes 10 --store lmdb
    python scripts/soak.py --minutes 10 --store mooncake

Two models in turn, one of full attention and one hybrid. Traffic comes in waves: new and continued
conversations over shared prefixes, repeated prompts, aborts, a cache so small that requests are
preempted, now and then an emptied local cache or a reset of the store. Each wave has its own mix
of faults. Every answer is compared with the plain engine's. Exit status 1 for a wrong answer, a
request without one, blocks that stay in use, or an engine that died. With ``mooncake`` each turn
of a model has a master and the owner of a segment of its own.
"""

import argparse
import contextlib
import os
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from engine_families import FAMILIES, write_family
from engine_faults import ALL_FAULTS, TIMEOUTS, count_faults, inject, one_thread_each
from engine_harness import Engine, EngineFailedError, EngineSettings
from engine_models import TINY, write_tiny_llama
from mooncake_servers import MIB, servers

MODELS = ("full_attention", "hybrid")
SEGMENT_S = 300.0
"""Longest turn of one model: engines of the harness live for 20 minutes."""
NUM_BLOCKS = 32
"""Of 32 tokens: two prompts of the longest kind, with what they make."""
MAX_PROMPT_TOKENS = 440
ANSWER_TOKENS = (2, 12, 40)
STUCK_AFTER_S = 60.0
STORE_TIMEOUT_S = 10
"""Of a Mooncake client; the jobs over it end before, by their own deadlines."""
LOGPROB_TOLERANCE = 0.001
"""Kernels round by the shape of the whole batch; two tokens this close may change places."""


@dataclass
class Tally:
    """What a soak did and met, by name."""

    counts: Counter = field(default_factory=Counter)
    faults: Counter = field(default_factory=Counter)
    errors: list = field(default_factory=list)
    largest_difference: float = 0.0

    @property
    def failed(self):
        return bool(self.errors or self.counts["wrong"] or self.counts["stuck"])


class Traffic:
    """Prompts of conversations: each has the plain engine's answers in it, so all are greedy."""

    def __init__(self, plain, dice):
        self._plain, self._dice = plain, dice
        self._prefixes = [self._tokens(dice.choice((64, 100, 160))) for _ in range(4)]
        self._known = {}
        """Prompt -> the plain engine's output, with as many tokens as are asked for."""

    def wave(self):
        """Return 4 to 14 prompts, each with its expected output."""
        prompts = [self._next() for _ in range(self._dice.randint(4, 14))]
        for num_tokens in ANSWER_TOKENS:
            new = [p for p in dict.fromkeys(prompts) if self._missing(p, num_tokens)]
            if new:
                outputs = self._plain.generate(list(map(list, new)), max_tokens=num_tokens).outputs
                self._known.update(zip(new, outputs, strict=True))
        return [(prompt, self._known[prompt]) for prompt in prompts]

    def _missing(self, prompt, num_tokens):
        return prompt not in self._known and num_tokens == ANSWER_TOKENS[hash(prompt) % 3]

    def _next(self):
        kind = self._dice.random()
        if self._known and kind < 0.35:
            return self._dice.choice(list(self._known))
        if self._known and kind < 0.75:
            prompt = self._dice.choice(list(self._known))
            longer = prompt + tuple(self._known[prompt].tokens) + self._tokens_between(5, 90)
            if len(longer) <= MAX_PROMPT_TOKENS:
                return longer
        return self._dice.choice([*self._prefixes, ()]) + self._tokens_between(20, 200)

    def _tokens_between(self, least, most):
        return self._tokens(self._dice.randint(least, most))

    def _tokens(self, number):
        return tuple(self._dice.randrange(3, TINY.vocab_size) for _ in range(number))


class Soak:
    """One model's turn: a plain engine that knows the answers, and one over a faulty store."""

    def __init__(self, plain, engine, dice, tally):
        self._engine, self._dice, self._tally = engine, dice, tally
        self._traffic = Traffic(plain, dice)

    def run(self, seconds):
        """Run waves until the time is over or something failed."""
        deadline = time.monotonic() + seconds
        before = self._engine.counters()
        while time.monotonic() < deadline and not self._tally.failed:
            inject(self._engine, self._mix(), seed=self._dice.randrange(1 << 30))
            self._wave(self._traffic.wave())
            self._empty_caches()
        for name, value in self._engine.counters().items():
            self._tally.counts[name] += value - before[name]
        self._tally.faults += count_faults(self._engine)

    def _mix(self):
        """Return rates of faults: mostly a few kinds, sometimes all, sometimes none."""
        chance = self._dice.random()
        if chance < 0.15:
            return {}
        chosen = ALL_FAULTS if chance < 0.4 else self._dice.sample(ALL_FAULTS, 4)
        most = 1.2 / len(chosen)
        return {
            name: self._dice.uniform(0, most) / (4 if name.endswith("late") else 1)
            for name in chosen
        }

    def _wave(self, wave):
        """Submit a wave in two parts, abort some requests, compare what comes back."""
        waiting = {}
        started = time.monotonic()
        for part in (wave[::2], wave[1::2]):
            for prompt, expected in part:
                name = self._engine.submit(list(prompt), max_tokens=len(expected.tokens))
                waiting[name] = (prompt, expected)
            self._take_answers(waiting, self._dice.uniform(0.0, 0.2))
            self._abort_some(waiting)
        while waiting and time.monotonic() < started + STUCK_AFTER_S:
            self._take_answers(waiting, 1.0)
        self._tally.counts["stuck"] += len(waiting)

    def _take_answers(self, waiting, seconds):
        for name, output in self._engine.step_for(seconds).items():
            prompt, expected = waiting.pop(name)
            self._tally.counts["requests"] += 1
            self._tally.counts["prompt_tokens"] += len(prompt)
            self._compare(prompt, expected, output)

    def _abort_some(self, waiting):
        for name in list(waiting):
            if self._dice.random() < 0.08:
                self._engine.abort(name)
                del waiting[name]
                self._tally.counts["aborted"] += 1

    def _compare(self, prompt, expected, output):
        verdict, difference = compare(expected, output)
        self._tally.largest_difference = max(self._tally.largest_difference, difference)
        self._tally.counts[verdict] += 1
        if verdict == "wrong":
            print(f"wrong after {len(prompt)} tokens: {output.tokens}, not {expected.tokens}")

    def _empty_caches(self):
        """Empty the local cache often, the store seldom: both need every block back."""
        chance = self._dice.random()
        if chance < 0.03:
            inject(self._engine, {})  # a reset that meets faults may fail
            self._engine.reset_store()
            self._tally.counts["resets"] += 1
        elif chance < 0.5:
            self._engine.reset_local_cache()


def compare(expected, output):
    """Return ("right", "tied" or "wrong", largest difference of a logprob).

    Tied: the answers part at two tokens whose logprobs are closer than the tolerance.
    """
    largest = 0.0
    if output.finish != "length" or len(output.tokens) != len(expected.tokens):
        return "wrong", largest
    for idx, (right, token) in enumerate(zip(expected.tokens, output.tokens, strict=True)):
        known = dict(map(tuple, expected.logprobs[idx]))
        found = dict(map(tuple, output.logprobs[idx]))
        if right not in found or token not in known:
            return "wrong", largest
        difference = abs(known[right] - found[right])
        largest = max(largest, difference)
        if difference > LOGPROB_TOLERANCE:
            return "wrong", largest
        if token != right:
            tied = known[right] - known[token] <= LOGPROB_TOLERANCE
            return ("tied" if tied else "wrong"), largest
    return "right", largest


def run_turn(model, store_uri, folder, seconds, dice, tally, *, checksums):
    """Start a model's two engines, soak for some seconds, end them."""
    settings = EngineSettings(model=write_model(model, folder))
    if model == "hybrid":
        settings = settings.but(besides=FAMILIES["recurrent_and_full"].arguments)
    faulty = settings.but(
        store=store_uri,
        connector="faulty_connector",
        extra=(("checksums", checksums), *TIMEOUTS),
        num_blocks=NUM_BLOCKS,
    )
    with contextlib.ExitStack() as stack:
        engines = []
        for name, each in (("plain", settings), ("faulty", faulty)):
            (folder / name).mkdir()
            engines.append(Engine(each, folder / name))
            stack.callback(engines[-1].kill)
        Soak(*engines, dice, tally).run(seconds)
        engines[1].close()


def write_model(model, folder):
    """Write the checkpoint of a model and return its folder."""
    (folder / "model").mkdir()
    if model == "hybrid":
        return write_family(folder / "model", FAMILIES["recurrent_and_full"])
    return write_tiny_llama(folder / "model")


def soak(minutes, store, seed, folder, *, checksums=True):
    """Soak the models in turn; return a tally for each."""
    tallies = {}
    num_turns = max(1, round(minutes * 60 / len(MODELS) / SEGMENT_S + 0.499))
    for turn in range(num_turns):
        for model in MODELS:
            tally = tallies.setdefault(model, Tally())
            place = folder / f"{model}-{turn}"
            place.mkdir()
            dice = random.Random(f"{seed}/{model}/{turn}")
            seconds = minutes * 60 / len(MODELS) / num_turns
            try:
                with store_uri(store, place) as uri:
                    run_turn(model, uri, place, seconds, dice, tally, checksums=checksums)
            except (EngineFailedError, AssertionError) as error:
                tally.errors.append(str(error))
            if tally.failed:
                return tallies
    return tallies


@contextlib.contextmanager
def store_uri(store, folder):
    """Yield the URI of a new store of 64 MiB, with what serves it, or the one that is given."""
    if store == "mooncake":
        with servers(folder, 64 * MIB, lease_ms=2000) as pool:
            yield pool.master.uri(buffer="8MiB", timeout_s=STORE_TIMEOUT_S)
    else:
        yield f"lmdb://{folder}/store?capacity=64MiB" if store == "lmdb" else store


def report(tallies):
    """Print what was done and met; return whether all went well."""
    for model, tally in tallies.items():
        counts = tally.counts
        print(
            f"{model}: requests {counts['requests']} ({counts['prompt_tokens']} tokens), "
            f"aborted {counts['aborted']}, preempted {counts['preemptions']}, "
            f"loaded {counts['external_hits']} tokens, local hits {counts['local_hits']} tokens, "
            f"resets {counts['resets']}"
        )
        print(f"  faults {sum(tally.faults.values())}:")
        for name, number in sorted(tally.faults.items()):
            print(f"    {name:22} {number}")
        print(
            f"  right {counts['right']}, tied {counts['tied']} (largest difference of a logprob "
            f"{tally.largest_difference:.2g}), wrong {counts['wrong']}, stuck {counts['stuck']}"
        )
        for error in tally.errors:
            print(f"  error: {error}")
    return not any(tally.failed for tally in tallies.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--store", default="lmdb", help="lmdb, mooncake, or the URI of a store")
    parser.add_argument("--seed", default=str(time.time_ns()))
    parser.add_argument(
        "--checksums",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="without them damaged values reach the engine: the control, which must fail",
    )
    arguments = parser.parse_args()
    os.environ.update(one_thread_each(), TQDM_DISABLE="1")
    print(f"soak: {arguments.minutes:g} minutes, store {arguments.store}, seed {arguments.seed}")
    with tempfile.TemporaryDirectory() as folder:
        tallies = soak(
            arguments.minutes,
            arguments.store,
            arguments.seed,
            Path(folder),
            checksums=arguments.checksums,
        )
    sys.exit(0 if report(tallies) else 1)


if __name__ == "__main__":
    main()
