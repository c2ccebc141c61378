# SPDX-License-Identifier: Apache-2.0
"""An engine process with kvxfer or the in-tree connector on a Mooncake pool, with a stopwatch.

    python benchmarks/mooncake_engines.py < requests.jsonl > replies.jsonl

Both connectors are watched at the same methods of their scheduler side, which both inherit from
vLLM: what happens between them is each one's own. The first line says which engine, each further
one is a prompt.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from kvxfer.cli.engine_job import engine_environment

BLOCK_TOKENS = 128
CHUNK_TOKENS = 4096
CONNECTORS = {
    "kvxfer": {"kv_connector": "KVXferConnector", "kv_connector_module_path": "kvxfer.connector"},
    "in-tree": {"kv_connector": "MooncakeStoreConnector"},
}


WATCHED = (
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "update_connector_output",
)
ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""Two threads on two cores wait for each other wherever something else runs: a first token after
2,048 loaded ones then took 20 to 240 ms."""


class Engine:
    """One engine process; used in a ``with`` statement, killed at its end."""

    def __init__(self, impl: str, model: str, max_tokens: int, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={
                **engine_environment(os.environ),
                **environment,
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "PYTHONHASHSEED": "0",
                **ONE_THREAD,
            },
        )
        self._ask({"impl": impl, "model": model, "max_tokens": max_tokens})

    def turn(self, prompt: list[int]) -> dict[str, Any]:
        """Compute one token after ``prompt``, with nothing in vLLM's own prefix cache.

        The answer has ``token``, ``hit_tokens``, ``failed`` (whether a load failed) and, in
        seconds, ``first_token``, ``lookup`` (from the first question of the scheduler to the
        answer), ``held`` (of that, what the scheduler waited) and ``load`` (from the allocation to
        the step that learns of the end).
        """
        return self._ask(prompt)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()

    def _ask(self, request: object) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


class Watch:
    """Times the scheduler side of a connector class, from ``reset`` to the end of a request."""

    def __init__(self, connector: type) -> None:
        self.reset()
        for name in WATCHED:
            setattr(connector, name, self._watched(getattr(connector, name), getattr(self, name)))

    def reset(self) -> None:
        self.asked_at = self.allocated_at = 0.0
        self.seconds = {"lookup": 0.0, "held": 0.0, "load": 0.0}
        self.hit_tokens, self.failed = 0, False

    @staticmethod
    def _watched(method: Any, watch: Any) -> Any:
        def call(connector: Any, *arguments: Any) -> Any:
            began = time.perf_counter()
            answer = method(connector, *arguments)
            watch(began, answer, *arguments)
            return answer

        return call

    def get_num_new_matched_tokens(self, began: float, answer: Any, *_: Any) -> None:
        if self.seconds["lookup"]:
            return
        now = time.perf_counter()
        self.asked_at = self.asked_at or began
        self.seconds["held"] += now - began
        if answer[0] is not None:
            self.seconds["lookup"] = now - self.asked_at

    def update_state_after_alloc(self, began: float, _: Any, *arguments: Any) -> None:
        if num_external_tokens := arguments[2]:
            self.allocated_at, self.hit_tokens = began, num_external_tokens

    def update_connector_output(self, began: float, _: Any, output: Any) -> None:
        self.failed |= bool(output.invalid_block_ids)
        if output.finished_recving:
            self.seconds["load"] = began - self.allocated_at


def run_engine() -> None:
    """Be an engine process."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    lines = iter(sys.stdin.readline, "")
    llm, watch = make_engine(**json.loads(next(lines)))
    replies.write("{}\n")
    for line in lines:
        replies.write(json.dumps(run_turn(llm, watch, json.loads(line))) + "\n")


def make_engine(impl: str, model: str, max_tokens: int) -> tuple[Any, Watch]:
    from vllm import LLM

    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        block_size=BLOCK_TOKENS,
        max_model_len=max_tokens,
        max_num_seqs=2,
        max_num_batched_tokens=CHUNK_TOKENS,
        kv_cache_memory_bytes=512 << 20,
        kv_transfer_config={
            **CONNECTORS[impl],
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
        },
    )
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    return llm, Watch(type(scheduler.connector))


def run_turn(llm: Any, watch: Watch, prompt: list[int]) -> dict[str, Any]:
    from vllm import SamplingParams

    engine = llm.llm_engine
    with quiet(engine):
        watch.reset()
        began = time.perf_counter()
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
        engine.add_request(f"{began}", {"prompt_token_ids": prompt}, params)
        while not (outputs := engine.step()):
            time.sleep(0.0001)  # other threads of this process move the values
        first_token_s = time.perf_counter() - began
    return {
        "token": outputs[0].outputs[0].token_ids[0],
        "hit_tokens": watch.hit_tokens,
        "failed": watch.failed,
        "first_token": first_token_s,
        **watch.seconds,
    }


@contextlib.contextmanager
def quiet(engine: Any) -> Iterator[None]:
    """Have nothing in the local cache before, and no block in use by a save after."""
    yield
    while not engine.reset_prefix_cache():
        engine.step()


if __name__ == "__main__":
    run_engine()
