# SPDX-License-Identifier: Apache-2.0
"""The child process of ``engine_harness.Engine``: one vLLM engine that is told what to do.

    python engine_runner.py < requests.jsonl > replies.jsonl 2> log

The first line holds the arguments of ``vllm.LLM``; the reply comes when the engine is up. Each
further line is a call, ``{"call": name, ...arguments}``, of a public method of ``Runner``; its
result is the reply. It ends with ``close``, at the end of its input, or by SIGALRM.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

LIFE_S = 1200
"""The longest life of an engine, whatever becomes of the tests that started it."""
PAUSE_S = 0.001
NUM_LOGPROBS = 5
COUNTERS = {
    "external_hits": "vllm:external_prefix_cache_hits",
    "local_hits": "vllm:prefix_cache_hits",
    "preemptions": "vllm:num_preemptions",
}


class Runner:
    def __init__(self, arguments):
        from vllm import LLM, SamplingParams

        _let_recurrent_states_be_cached()
        self._llm = LLM(**arguments)
        self._engine = self._llm.llm_engine
        self._params = lambda max_tokens: SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            logprobs=NUM_LOGPROBS,
            detokenize=False,
        )
        self._steps_itself = os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"
        self._num_requests = 0

    def generate(self, prompts, max_tokens):
        """Compute the prompts together; outputs in their order, and what the counters gained."""
        before = self.counters()
        names = [self.submit(prompt, max_tokens) for prompt in prompts]
        done = {}
        while len(done) < len(names):
            finished = [output for output in self._engine.step() if output.finished]
            done.update((output.request_id, output) for output in finished)
            if not finished:
                time.sleep(PAUSE_S)
        after = self.counters()
        gained = {name: after[name] - before[name] for name in after}
        return {"outputs": [_output(done[name]) for name in names], **gained}

    def submit(self, prompt, max_tokens):
        """Queue one prompt and return its name; ``step_until_exists`` or ``abort`` go on."""
        self._num_requests += 1
        name = f"request-{self._num_requests}"
        self._engine.add_request(name, {"prompt_token_ids": prompt}, self._params(max_tokens))
        return name

    def step_for(self, seconds):
        """Step until requests have finished or the time is over; outputs by name."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            done = {o.request_id: _output(o) for o in self._engine.step() if o.finished}
            if done:
                return done
            time.sleep(PAUSE_S)
        return {}

    def step_until_exists(self, path, timeout_s):
        """Step until a file appears and return whether it did in time."""
        deadline = time.monotonic() + timeout_s
        while not Path(path).exists() and time.monotonic() < deadline:
            self._engine.step()
            time.sleep(PAUSE_S)
        return Path(path).exists()

    def abort(self, name):
        """Abort a submitted request; nothing is stepped."""
        self._engine.abort_request([name])

    def reset_local_cache(self, timeout_s):
        """Empty vLLM's own prefix cache, the store stays; True once no block was in use."""
        deadline = time.monotonic() + timeout_s
        while not self._engine.reset_prefix_cache():
            if time.monotonic() > deadline:
                return False
            if not self._steps_itself:
                self._engine.step()
            time.sleep(PAUSE_S)
        return True

    def reset_store(self):
        """Reset the connector too, once no block is in use; True when it removed its keys."""
        return self._engine.reset_prefix_cache(reset_connector=True)

    def close(self):
        """End the engine; its connector's shutdown waits for the saves."""
        self._engine.engine_core.shutdown()

    def scrape(self):
        """Return the exposition of vLLM's registry, as its server gives it."""
        from prometheus_client import generate_latest
        from vllm.v1.metrics.prometheus import get_prometheus_registry

        return generate_latest(get_prometheus_registry()).decode()

    def counters(self):
        """Return what vLLM has counted since the start, by name."""
        metrics = self._llm.get_metrics()
        return {
            name: sum(int(metric.value) for metric in metrics if metric.name == full_name)
            for name, full_name in COUNTERS.items()
        }


def _let_recurrent_states_be_cached():
    """Undo what keeps Mamba2 layers from prefix caching on a CPU.

    Their own cache spec asks for intermediate states, which the CPU's operator does not give; the
    one of their base class works.
    """
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    if "get_kv_cache_spec" in vars(MambaMixer2):
        del MambaMixer2.get_kv_cache_spec


def _output(request):
    completion = request.outputs[0]
    logprobs = [
        sorted([token, entry.logprob] for token, entry in place.items())
        for place in completion.logprobs or ()
    ]
    return {
        "tokens": list(completion.token_ids),
        "logprobs": logprobs,
        "finish": completion.finish_reason,
    }


def main():
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what vLLM prints goes to the log
    signal.alarm(LIFE_S)
    requests = iter(sys.stdin.readline, "")
    runner = Runner(json.loads(next(requests)))
    print(json.dumps("ready"), file=replies)
    for line in requests:
        request = json.loads(line)
        call = request.pop("call")
        print(json.dumps(getattr(runner, call)(**request)), file=replies)
        if call == "close":
            return
    runner.close()


if __name__ == "__main__":
    main()
