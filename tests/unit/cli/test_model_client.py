# SPDX-License-Identifier: Apache-2.0
"""Whatever becomes of the process that imports vLLM, its client returns or says so."""

import os
import sys

import pytest

from kvxfer.cli.model_client import ModelProcessError, ask


def program(text):
    return (sys.executable, "-c", text)


def test_answer_is_what_the_process_prints():
    echo = program("import json, sys; json.dump(json.load(sys.stdin), sys.stdout)")
    assert ask({"task": "x", "n": 1}, program=echo) == {"task": "x", "n": 1}


def test_environment_reaches_the_process():
    text = "import os, json; print(json.dumps({'seed': os.environ['PYTHONHASHSEED']}))"
    assert ask({}, {**os.environ, "PYTHONHASHSEED": "7"}, program=program(text)) == {"seed": "7"}


def test_a_crash_has_the_end_of_the_log():
    with pytest.raises(ModelProcessError, match=r"ended with 3.*last words") as caught:
        ask(
            {},
            program=program("import sys; sys.stderr.write('x' * 9999 + 'last words'); sys.exit(3)"),
        )
    assert len(str(caught.value)) < 1000


def test_a_process_that_hangs_is_killed():
    with pytest.raises(ModelProcessError, match=r"within 0\.2 s"):
        ask({}, program=program("import time; time.sleep(60)"), timeout_s=0.2)


def test_a_refusal_names_its_class():
    # a task that needs no vLLM to fail
    answer = ask({"task": "no such task"})
    assert answer == {"error": "'no such task'", "kind": "KeyError"}
