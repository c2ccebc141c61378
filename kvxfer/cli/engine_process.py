# SPDX-License-Identifier: Apache-2.0
"""The program of one engine process of the demo: compute prompts one after another, then end.

    python -m kvxfer.cli.engine_process < job.json > events.jsonl 2> log

Standard input holds one :class:`EngineJob` as JSON, the environment is ``engine_environment``'s.
Standard output gets one JSON object a line (``event`` names its kind), everything that vLLM
prints goes to standard error:

    ready    the engine is up                    start_s
    prompt   one prompt is done                  tokens, logprobs, first_token_s, hit_tokens,
                                                 local_hit_tokens
    again    it is done once more (``job.again``), the same
    done     the engine has ended, saves too     saved and loaded: num_values, num_bytes, seconds
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from typing import TextIO

from kvxfer.cli.engine_job import BLOCK_TOKENS, CORRUPT_VARIABLE, EngineJob
from kvxfer.cli.store_tap import Meter, TappedStore, tap_open_store

WARM_UP_TOKENS = BLOCK_TOKENS // 2
"""The end of a prompt, below one block: the warm-up request touches no store. Where vLLM takes a
smaller block than it is asked for, what it saves is no prompt's beginning."""
IDLE_STEP_S = 0.001
"""Pause after a step without output, as vLLM's own loop makes while transfers run."""
EXTERNAL_HITS = "vllm:external_prefix_cache_hits"
LOCAL_HITS = "vllm:prefix_cache_hits"

Emit = Callable[[str, dict[str, object]], None]


def main() -> None:
    """Run the job on standard input."""
    emit = _emitter(take_over_stdout())
    job = EngineJob(**json.load(sys.stdin))
    taps = tap_open_store(corrupt=os.environ.get(CORRUPT_VARIABLE) == "1")
    run_job(job, emit)
    emit("done", {"saved": _total(taps, "puts"), "loaded": _total(taps, "gets")})


def run_job(job: EngineJob, emit: Emit) -> None:
    """Start an engine, compute the prompts one after another, end it; saves end before it."""
    started = time.perf_counter()
    engine = _Engine(job)
    try:
        engine.compute(job.prompts[0][-WARM_UP_TOKENS:])
        emit("ready", {"start_s": time.perf_counter() - started})
        for prompt in job.prompts:
            emit("prompt", engine.compute(prompt))
            if job.again:
                emit("again", engine.compute(prompt))
    finally:
        engine.close()


class _Engine:
    """A vLLM engine in this process, stepped by hand so that the first token can be timed."""

    def __init__(self, job: EngineJob) -> None:
        # Not at the top: vLLM prints while it is imported, and the tap comes first.
        from vllm import LLM, SamplingParams  # noqa: PLC0415

        self._llm = LLM(**job.engine_arguments)
        self._params = SamplingParams(
            temperature=0.0,
            max_tokens=job.output_tokens,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
        )
        self._num_requests = 0

    def compute(self, prompt: list[int]) -> dict[str, object]:
        """Return tokens, their logprobs, seconds to the first and hit tokens of one prompt."""
        engine = self._llm.llm_engine
        hits_before, local_before = self._count(EXTERNAL_HITS), self._count(LOCAL_HITS)
        started, first_token_s = time.perf_counter(), 0.0
        self._num_requests += 1
        prompt_input = {"prompt_token_ids": prompt}
        engine.add_request(str(self._num_requests), prompt_input, self._params)
        while True:
            outputs = engine.step()
            if not outputs:
                time.sleep(IDLE_STEP_S)
                continue
            first_token_s = first_token_s or time.perf_counter() - started
            if outputs[0].finished:
                break
        completion = outputs[0].outputs[0]
        tokens = list(completion.token_ids)
        return {
            "tokens": tokens,
            "logprobs": [
                place[token].logprob
                for place, token in zip(completion.logprobs, tokens, strict=True)
            ],
            "first_token_s": first_token_s,
            "hit_tokens": self._count(EXTERNAL_HITS) - hits_before,
            "local_hit_tokens": self._count(LOCAL_HITS) - local_before,
        }

    def close(self) -> None:
        """End the engine: its connector's shutdown waits for the saves."""
        self._llm.llm_engine.engine_core.shutdown()

    def _count(self, name: str) -> int:
        return sum(int(m.value) for m in self._llm.get_metrics() if m.name == name)


def take_over_stdout() -> TextIO:
    """Return the real standard output, and send what others print to standard error."""
    events = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return events


def _emitter(events: TextIO) -> Emit:
    def emit(event: str, fields: dict[str, object]) -> None:
        events.write(json.dumps({"event": event, **fields}) + "\n")

    return emit


def _total(taps: list[TappedStore], side: str) -> dict[str, float]:
    meters: list[Meter] = [getattr(tap, side) for tap in taps]
    names = [f.name for f in dataclasses.fields(Meter) if not f.name.startswith("_")]
    return {name: sum(getattr(meter, name) for meter in meters) for name in names}


if __name__ == "__main__":
    main()
