# SPDX-License-Identifier: Apache-2.0
"""Print the throughput of an engine that saves and never hits, as a ratio to one without kvxfer.

    python benchmarks/ratios_engine.py

Two engine processes of the same model take turns at the same prompts, which neither has met; the
other one waits meanwhile. Time runs from the first request to the last output. What is still
being saved then ends before the next turn, so a turn is long beside it: its share is printed too.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from config import IS_SMOKE, SIZES

from kvxfer.cli.checkpoint import DEMO_SHAPE, LlamaShape, write_llama
from kvxfer.cli.engine_job import BLOCK_TOKENS, engine_environment

NUM_PAIRS = SIZES.min_rounds
SHAPE = LlamaShape() if IS_SMOKE else DEMO_SHAPE
NUM_PROMPTS, PROMPT_TOKENS, OUTPUT_TOKENS = (2, 65, 2) if IS_SMOKE else (8, 512, 64)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="kvxfer-bench-") as folder:
        model = Path(folder, "model")
        write_llama(model, SHAPE)
        store = {"store": f"lmdb://{folder}/store?capacity=4GiB", "save_decode_cache": True}
        with Engine(model, None) as plain, Engine(model, store) as saving:
            plain.turn(0)
            saving.turn(0)
            ratios, tails = [], []
            for pair in range(1, NUM_PAIRS + 1):
                turns = {}
                for engine in (plain, saving) if pair % 2 else (saving, plain):
                    turns[engine] = engine.turn(pair)
                assert turns[saving]["hit_tokens"] == 0
                assert turns[saving]["tokens"] == turns[plain]["tokens"]
                ratios.append(turns[plain]["seconds"] / turns[saving]["seconds"])
                tails.append(turns[saving]["saving_s"] / turns[saving]["seconds"])
    tokens = NUM_PROMPTS * (PROMPT_TOKENS + OUTPUT_TOKENS)
    print(f"throughput with kvxfer / without, {tokens} tokens a turn, {NUM_PAIRS} pairs")
    print(f"{statistics.median(ratios):.3f} [{min(ratios):.3f}, {max(ratios):.3f}]")
    print(f"time to end the saves after a turn, as a share of it: {statistics.median(tails):.3f}")


class Engine:
    """One engine process; ``turn`` computes the prompts of a number and says how long it took."""

    def __init__(self, model: Path, settings: dict[str, object] | None) -> None:
        environment = engine_environment(os.environ)
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--engine"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self._ask({"model": str(model), "settings": settings})

    def turn(self, number: int) -> dict[str, object]:
        return self._ask(number)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()

    def _ask(self, request: object) -> dict[str, object]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


def run_engine() -> None:
    """Be an engine process: the first line says which, each further one is the number of a turn."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    lines = iter(sys.stdin.readline, "")
    job = json.loads(next(lines))
    engine = make_engine(job["model"], job["settings"])
    replies.write("{}\n")
    for line in lines:
        replies.write(json.dumps(run_turn(engine, int(line))) + "\n")


def make_engine(model, settings):
    from vllm import LLM

    arguments = {}
    if settings is not None:
        arguments["kv_transfer_config"] = {
            "kv_connector": "KVXferConnector",
            "kv_connector_module_path": "kvxfer.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": settings,
        }
    return LLM(
        model=model,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        block_size=BLOCK_TOKENS,
        max_model_len=1024,
        max_num_seqs=NUM_PROMPTS,
        disable_log_stats=False,
        **arguments,
    )


def run_turn(llm, number):
    from vllm import SamplingParams

    random = np.random.default_rng(number)
    prompts = random.integers(3, SHAPE.vocab_size, (NUM_PROMPTS, PROMPT_TOKENS)).tolist()
    params = SamplingParams(
        temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenize=False
    )
    hits_before = external_hits(llm)
    started = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    seconds = time.perf_counter() - started
    while not llm.llm_engine.reset_prefix_cache():  # blocks stay in use while saves read them
        llm.llm_engine.step()
    return {
        "seconds": seconds,
        "saving_s": time.perf_counter() - started - seconds,
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "hit_tokens": external_hits(llm) - hits_before,
    }


def external_hits(llm):
    name = "vllm:external_prefix_cache_hits"
    return sum(int(metric.value) for metric in llm.get_metrics() if metric.name == name)


if __name__ == "__main__":
    if sys.argv[1:] == ["--engine"]:
        run_engine()
    else:
        main()
