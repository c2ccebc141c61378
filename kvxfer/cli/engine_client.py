# SPDX-License-Identifier: Apache-2.0
"""Runs one engine process of the demo and collects what it reports."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvxfer.cli.engine_job import EngineJob, engine_environment
from kvxfer.errors import KvxferError

ENGINE_TIMEOUT_S = 900.0
PROGRAM = (sys.executable, "-m", "kvxfer.cli.engine_process")
LAST_WORDS_CHARS = 400
_ERROR = re.compile(r"^(?:\[\w+\]: )?(?:\w+\.)*(\w+(?:Error|Exception): .+)$", re.MULTILINE)
"""The last line of a traceback; vLLM puts the rank before it."""


class EngineProcessError(KvxferError, RuntimeError):
    """An engine process ended before its job was done; its log says why."""


@dataclass(frozen=True, slots=True)
class Moved:
    """What moved between an engine and its store, one way."""

    num_values: int
    num_bytes: int
    seconds: float

    @property
    def rate_gb_s(self) -> float:
        """GB/s of one thread in the store's calls; 0 where nothing moved."""
        return self.num_bytes / self.seconds / 1e9 if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class PromptResult:
    """One prompt: greedy tokens with their logprobs, and how it was computed."""

    tokens: list[int]
    logprobs: list[float]
    first_token_s: float
    hit_tokens: int
    """Of the store."""
    local_hit_tokens: int = 0
    """Of vLLM's own cache."""


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What one engine process did, prompts in the order of the job.

    ``again``: each prompt computed once more, where the job asks for it, else empty.
    """

    prompts: list[PromptResult]
    saved: Moved
    loaded: Moved
    again: list[PromptResult] = field(default_factory=list)


def run_engine(
    job: EngineJob,
    log: Path,
    on_event: Callable[[str], None],
    program: Sequence[str] = PROGRAM,
    timeout_s: float = ENGINE_TIMEOUT_S,
) -> EngineReport:
    """Run ``job`` in a process of its own and return its report once the process has ended.

    vLLM's output goes to ``log``. ``on_event`` is called with the name of each event. Raises
    EngineProcessError where the process fails, or is killed after ``timeout_s``. The process
    has ended when this returns or raises, KeyboardInterrupt included.
    """
    process = _start(program, log)
    expired = threading.Event()

    def expire() -> None:
        expired.set()
        process.kill()

    killer = threading.Timer(timeout_s, expire)
    killer.start()
    try:
        events = _converse(process, job, on_event)
        status = process.wait()
    finally:
        killer.cancel()
        process.kill()
        process.wait()
    if status != 0 or not events or events[-1]["event"] != "done":
        ended = f"was killed after {timeout_s:g} s" if expired.is_set() else f"ended with {status}"
        words = "" if expired.is_set() else _last_error(log)
        raise EngineProcessError(
            f"an engine {ended} before its job was done{words}; see {log.name}"
        )
    return _report(events)


def _start(program: Sequence[str], log: Path) -> subprocess.Popen[str]:
    with log.open("wb") as log_file:
        return subprocess.Popen(
            program,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log_file,
            text=True,
            env=engine_environment(os.environ),
        )


def _converse(
    process: subprocess.Popen[str], job: EngineJob, on_event: Callable[[str], None]
) -> list[dict[str, Any]]:
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdout:
        try:
            with process.stdin:
                json.dump(dataclasses.asdict(job), process.stdin)
        except BrokenPipeError:
            return []  # it ended before it read its job; its status and log say why
        events = []
        for line in process.stdout:
            events.append(json.loads(line))
            on_event(events[-1]["event"])
        return events


def _last_error(log: Path) -> str:
    """Return the last exception that a log names, after a colon; empty where there is none."""
    found = _ERROR.findall(log.read_text(errors="replace"))
    return f": {found[-1].strip()[:LAST_WORDS_CHARS]}" if found else ""


def _report(events: list[dict[str, Any]]) -> EngineReport:
    def results(kind: str) -> list[PromptResult]:
        fields = [f.name for f in dataclasses.fields(PromptResult)]
        found = [event for event in events if event["event"] == kind]
        return [PromptResult(**{name: event[name] for name in fields}) for event in found]

    saved, loaded = Moved(**events[-1]["saved"]), Moved(**events[-1]["loaded"])
    return EngineReport(results("prompt"), saved, loaded, results("again"))
