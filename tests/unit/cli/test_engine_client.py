# SPDX-License-Identifier: Apache-2.0
"""The client of an engine process, with small programs in the place of the engine."""

import sys
import textwrap

import pytest

from kvxfer.cli.engine_client import EngineProcessError, Moved, PromptResult, run_engine
from kvxfer.cli.engine_job import EngineJob

JOB = EngineJob(
    model="model", connector_settings={"store": "s"}, prompts=[[3, 4], [5]], output_tokens=1
)
GOOD = """
    import json, os, sys
    job = json.load(sys.stdin)
    print("noise of the engine", os.environ["HF_HUB_OFFLINE"], file=sys.stderr)
    print(json.dumps({"event": "ready", "start_s": 1.0}), flush=True)
    for prompt in job["prompts"]:
        print(json.dumps({
            "event": "prompt", "tokens": prompt, "logprobs": [-1.0] * len(prompt),
            "first_token_s": 0.5, "hit_tokens": len(prompt), "local_hit_tokens": 7,
        }), flush=True)
    moved = {"num_values": 2, "num_bytes": 4000, "seconds": 0.5}
    print(json.dumps({"event": "done", "saved": moved, "loaded": moved}))
"""


def run(program, tmp_path, events=None, timeout_s=60.0):
    command = (sys.executable, "-c", textwrap.dedent(program))
    on_event = (events if events is not None else []).append
    return run_engine(JOB, tmp_path / "engine.log", on_event, command, timeout_s)


def test_run_engine_returns_the_report_of_every_prompt(tmp_path):
    events = []
    report = run(GOOD, tmp_path, events)
    assert report.prompts == [
        PromptResult([3, 4], [-1.0, -1.0], 0.5, 2, 7),
        PromptResult([5], [-1.0], 0.5, 1, 7),
    ]
    assert report.again == []
    assert report.saved == report.loaded == Moved(2, 4000, 0.5)
    assert events == ["ready", "prompt", "prompt", "done"]


def test_run_engine_keeps_what_was_computed_again_apart(tmp_path):
    once_more = """
    for prompt in job["prompts"]:
        print(json.dumps({
            "event": "again", "tokens": [8], "logprobs": [-2.0],
            "first_token_s": 0.25, "hit_tokens": 0, "local_hit_tokens": 32,
        }), flush=True)
    """
    head, tail = GOOD.split("    moved =")
    report = run(head + once_more + "moved =" + tail, tmp_path)
    assert len(report.prompts) == 2
    assert report.again == [PromptResult([8], [-2.0], 0.25, 0, 32)] * 2


@pytest.mark.parametrize(
    "before", ["", "[rank0]: ", "torch.cuda."], ids=["plain", "rank", "module"]
)
def test_run_engine_says_the_last_error_of_the_log(tmp_path, before):
    program = f"""
        import sys
        sys.stdin.read()
        print("ValueError: first", "[rank0]: Traceback", file=sys.stderr, sep="\\n")
        sys.exit("{before}RuntimeError: no weights here")
    """
    with pytest.raises(
        EngineProcessError, match=r"before its job was done: RuntimeError: no weights here; see"
    ):
        run(program, tmp_path)


def test_run_engine_sends_noise_to_the_log_and_sets_the_environment(tmp_path):
    run(GOOD, tmp_path)
    assert (tmp_path / "engine.log").read_text() == "noise of the engine 1\n"


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("import sys; sys.exit(3)", 3),
        ("import sys; sys.stdin.read(); sys.exit(4)", 4),
        (GOOD + "    sys.exit(5)", 5),
        ("import sys; sys.stdin.read()", 0),
    ],
    ids=["unread_job", "read_job", "after_done", "no_events"],
)
def test_run_engine_names_status_and_log_of_a_failed_process(tmp_path, program, status):
    with pytest.raises(EngineProcessError, match=rf"ended with {status} .*see engine.log"):
        run(program, tmp_path)


def test_run_engine_kills_a_process_that_takes_too_long(tmp_path):
    program = """
        import os, sys, time
        print(os.getpid(), file=sys.stderr, flush=True)
        time.sleep(600)
    """
    with pytest.raises(EngineProcessError, match=r"was killed after 2 s"):
        run(program, tmp_path, timeout_s=2.0)


def test_run_engine_ends_the_process_when_the_caller_is_interrupted(tmp_path):
    started = []

    def interrupt(event):
        started.append(event)
        raise KeyboardInterrupt

    program = 'print(\'{"event": "ready"}\', flush=True)\nimport time\ntime.sleep(600)'
    with pytest.raises(KeyboardInterrupt):
        run_engine(JOB, tmp_path / "log", interrupt, (sys.executable, "-c", program), 60.0)
    assert started == ["ready"]


def test_rate_of_nothing_moved_is_zero():
    assert Moved(0, 0, 0.0).rate_gb_s == 0.0
    assert Moved(1, 3_000_000_000, 2.0).rate_gb_s == 1.5
