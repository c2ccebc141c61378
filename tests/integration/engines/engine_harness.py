# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines for tests: child processes that are shared, scripted and bounded in life.

``EnginePool`` keeps the engines that were used last, because a start costs ten to thirty
seconds; a test asks it for the engine of some ``EngineSettings`` and calls ``Engine``.
"""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import tamper_modes
from engine_models import BLOCK_TOKENS

import kvxfer
from kvxfer.cli.engine_job import engine_environment

START_TIMEOUT_S = 240.0
CALL_TIMEOUT_S = 120.0
RESET_TIMEOUT_S = 30.0
HERE = Path(__file__).parent
FAULTS = HERE.parents[1] / "faults"
PACKAGE = Path(kvxfer.__file__).parents[1]


class EngineFailedError(AssertionError):
    """An engine ended or did not answer in time; the message has the end of its log."""


@dataclass(frozen=True)
class EngineSettings:
    """What tells two engines apart; engines of equal settings are one engine."""

    model: Path
    store: str | None = None
    extra: tuple[tuple[str, object], ...] = ()
    connector: str = "tampered_connector"
    """The module that has the connector: this one, or ``faulty_connector`` of the fault tests."""
    failure_policy: str = "recompute"
    role: str = "kv_both"
    prefix_caching: bool = True
    max_batched_tokens: int = 1024
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    besides: tuple[tuple[str, object], ...] = ()
    """Further arguments of ``vllm.LLM``, which replace the common ones; pairs stand for a dict."""
    num_blocks: int | None = None
    environment: tuple[tuple[str, str], ...] = ()
    """Further variables of the engine's environment."""
    core_process: bool = False
    """Whether vLLM's core steps itself in a process of its own, as under ``vllm serve``; else it
    is stepped by calls, so that tests decide what happens between two steps."""

    def but(self, **changes):
        """Return these settings with some changed."""
        return dataclasses.replace(self, **changes)

    def arguments(self):
        """Return the arguments of ``vllm.LLM``; without a store there is no connector."""
        arguments = {
            "model": str(self.model),
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "seed": 0,
            "enforce_eager": True,
            "block_size": BLOCK_TOKENS,
            "max_model_len": 512,
            "max_num_seqs": 8,
            "max_num_batched_tokens": self.max_batched_tokens,
            "kv_cache_memory_bytes": 64 << 20,
            "enable_prefix_caching": self.prefix_caching,
            "tensor_parallel_size": self.tensor_parallel,
            "disable_log_stats": False,
        }
        if self.pipeline_parallel > 1:
            arguments["pipeline_parallel_size"] = self.pipeline_parallel
            arguments["enforce_eager"] = False
        for name, value in self.besides:
            arguments[name] = dict(value) if isinstance(value, tuple) else value
        if self.num_blocks is not None:
            arguments["num_gpu_blocks_override"] = self.num_blocks
        if self.store is not None:
            arguments["kv_transfer_config"] = {
                "kv_connector": "KVXferConnector",
                "kv_connector_module_path": self.connector,
                "kv_role": self.role,
                "kv_load_failure_policy": self.failure_policy,
                "kv_connector_extra_config": {"store": self.store, **dict(self.extra)},
            }
        return arguments


@dataclass(frozen=True)
class Output:
    """Greedy tokens of one prompt, and for each the likeliest tokens with their logprobs."""

    tokens: list[int]
    logprobs: list[list[list[float]]]
    finish: str = "length"
    """Why vLLM ended it: ``length``, or ``error`` for a load that failed under policy fail."""

    def token_logprobs(self):
        """Return the logprob of each token of the output."""
        return [
            dict(map(tuple, place))[token]
            for token, place in zip(self.tokens, self.logprobs, strict=True)
        ]


@dataclass(frozen=True)
class Generation:
    """Outputs in the order of the prompts, and what vLLM counted meanwhile (tokens)."""

    outputs: list[Output]
    external_hits: int
    local_hits: int
    preemptions: int


class Engine:
    """One engine process. Not thread-safe; different engines may be called at the same time.

    It has a process group, not a session, of its own: Linux 6.18 shares the cores out between
    sessions (autogroup) and has kept whole sessions from running for 14 s while ranks of another
    one waited for each other busily. Requests to Mooncake then timed out.
    """

    def __init__(self, settings, folder):
        self.settings = settings
        self._log = folder / "engine.log"
        self._tamper_file = folder / "tamper"
        self._tamper_file.write_text("")
        self.faults_file = folder / "faults"
        """What ``faulty_connector`` injects, as JSON; empty for nothing."""
        self.faults_file.write_text("")
        environment = engine_environment(os.environ) | {
            "KVXFER_TEST_TAMPER_FILE": str(self._tamper_file),
            "KVXFER_TEST_FAULTS_FILE": str(self.faults_file),
            "PYTHONPATH": os.pathsep.join([str(HERE), str(FAULTS), str(PACKAGE)]),
        }
        environment.pop("VLLM_CPU_KVCACHE_SPACE")  # the argument in bytes counts
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(settings.core_process))
        if settings.pipeline_parallel > 1:
            environment.pop("TORCHDYNAMO_DISABLE", None)  # stages run only when compiled
        num_ranks = settings.tensor_parallel * settings.pipeline_parallel
        if num_ranks > 1:
            threads = [str(i % (os.cpu_count() or 1)) for i in range(num_ranks)]
            environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(threads)
        environment.update(settings.environment)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "engine_runner.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
                process_group=0,  # in the session of the tests: see Engine
            )
        self._exchange(settings.arguments(), START_TIMEOUT_S)

    @property
    def alive(self):
        return self._process.poll() is None

    @property
    def pid(self):
        """The process, and its group."""
        return self._process.pid

    def generate(self, prompts, max_tokens=8):
        """Compute prompts together, greedily."""
        reply = self._call("generate", prompts=prompts, max_tokens=max_tokens)
        return Generation(**reply | {"outputs": [Output(**output) for output in reply["outputs"]]})

    def submit(self, prompt, max_tokens=8):
        """Queue a prompt and return its name; it moves with ``step_until_load_is_held``."""
        return self._call("submit", prompt=prompt, max_tokens=max_tokens)

    def step_for(self, seconds):
        """Step until submitted prompts are answered or the time is over; outputs by name."""
        done = self._call("step_for", seconds=seconds)
        return {name: Output(**output) for name, output in done.items()}

    def counters(self):
        """Return what vLLM has counted since the start (tokens, preemptions), by name."""
        return self._call("counters")

    def scrape(self):
        """Return what a Prometheus server would scrape now, as text."""
        return self._call("scrape")

    def step_until_load_is_held(self):
        """Step until a load waits in the store (tamper mode ``HOLD``)."""
        held = str(tamper_modes.held_file(self._tamper_file))
        assert self._call("step_until_exists", path=held, timeout_s=30.0), "no load began"

    def abort(self, name):
        """Abort a submitted request, without a step."""
        self._call("abort", name=name)

    def reset_local_cache(self):
        """Empty vLLM's own prefix cache, not the store; fails if a block stays in use."""
        emptied = self._call("reset_local_cache", timeout_s=RESET_TIMEOUT_S)
        assert emptied, "blocks are still in use although no request is left"

    def reset_store(self):
        """Empty vLLM's own prefix cache and what this model stored; fails where either refuses."""
        self.reset_local_cache()
        assert self._call("reset_store"), "the connector was not reset"

    @contextlib.contextmanager
    def tamper(self, mode):
        """Damage, exchange or hold loads while the block runs (see ``tamper_modes``)."""
        tamper_modes.held_file(self._tamper_file).unlink(missing_ok=True)
        self._tamper_file.write_text(mode)
        try:
            yield
        finally:
            self._tamper_file.write_text("")

    def close(self):
        """End the engine in order: saves are complete when this returns."""
        self._call("close")
        self._process.wait(timeout=CALL_TIMEOUT_S)
        self.kill()

    def kill(self):
        """End the processes of this engine at once, as a crash would; idempotent."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def _call(self, call, **arguments):
        return self._exchange({"call": call, **arguments}, CALL_TIMEOUT_S)

    def _exchange(self, request, timeout_s):
        """Send one line and return the reply; an engine that fails to answer is killed."""
        killer = threading.Timer(timeout_s, os.killpg, (self._process.pid, signal.SIGKILL))
        killer.start()
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            reply = self._process.stdout.readline()
        except BrokenPipeError:
            reply = ""
        finally:
            killer.cancel()
        if not reply:
            self.kill()
            tail = self._log.read_text(errors="replace")[-4000:]
            raise EngineFailedError(f"no reply to {str(request)[:200]}\n{tail}")
        return json.loads(reply)


class EnginePool:
    """Engines by their settings, at most ``max_alive``: the least recently used one is closed."""

    def __init__(self, folder, max_alive=2):
        self._folder = folder
        self._max_alive = max_alive
        self._engines = {}
        self._num_started = 0

    def get(self, settings):
        """Return the engine of these settings, idle, its own prefix cache empty."""
        engine = self._engines.pop(settings, None)
        if engine is None or not engine.alive:
            while len(self._engines) >= self._max_alive:
                self.retire(next(iter(self._engines)))
            engine = self._start(settings)
        self._engines[settings] = engine
        engine.reset_local_cache()
        return engine

    def retire(self, settings):
        """Close the engine of these settings, if there is one."""
        engine = self._engines.pop(settings, None)
        if engine is not None and engine.alive:
            engine.close()

    def kill_all(self):
        """End every engine at once."""
        for engine in self._engines.values():
            engine.kill()
        self._engines.clear()

    def _start(self, settings):
        self._num_started += 1
        folder = self._folder / f"engine-{self._num_started}"
        folder.mkdir()
        return Engine(settings, folder)
