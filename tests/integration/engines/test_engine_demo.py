# SPDX-License-Identifier: Apache-2.0
"""``kvxfer demo`` as a user runs it, and its control, without which it proves nothing."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvxfer.cli.engine_job import CORRUPT_VARIABLE

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def run_demo(tmp_path, *arguments, **environment):
    """Run the command with its temporary files under ``tmp_path``."""
    environment = os.environ | {"TMPDIR": str(tmp_path), "COLUMNS": "120"} | environment
    return subprocess.run(
        [sys.executable, "-m", "kvxfer.cli", "demo", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=500,
    )


def test_demo_of_the_default_model_hits_with_identical_outputs(tmp_path):
    result = run_demo(tmp_path, "--prompts", "2", "--prompt-tokens", "200")
    assert result.returncode == 0, result.stdout + result.stderr
    assert cell(result.stdout, "external hit tokens") == "384"
    assert cell(result.stdout, "outputs identical") == "yes"
    assert cell(result.stdout, "loaded").startswith("12 values")
    assert list(tmp_path.glob("kvxfer-demo-*")) == []


def test_demo_fails_when_saved_values_are_damaged(tmp_path, tiny_llama):
    arguments = ("--model", str(tiny_llama), "--prompts", "2", "--prompt-tokens", "65")
    result = run_demo(tmp_path, *arguments, **{CORRUPT_VARIABLE: "1"})
    assert result.returncode == 1, result.stdout + result.stderr
    assert "FAILED: outputs differ: prompt 1" in result.stdout
    assert cell(result.stdout, "external hit tokens") == "128"
    assert len(list(tmp_path.rglob("engine-*.log"))) == 2


def test_demo_names_the_log_of_an_engine_that_fails(tmp_path, tiny_llama):
    (broken := tmp_path / "broken").mkdir()
    (broken / "config.json").write_text((tiny_llama / "config.json").read_text())
    (work := tmp_path / "work").mkdir()
    result = run_demo(work, "--model", str(broken), "--prompt-tokens", "65")
    assert result.returncode == 1
    log = re.search(r"log of vLLM: (\S+)", result.stdout)[1]
    assert "Cannot find any model weights" in Path(log).read_text()


def cell(table, name):
    """Return the value of the row ``name`` of the demo's table."""
    return re.search(rf"│ {re.escape(name)} +│ +(.*?) +│", table)[1]
