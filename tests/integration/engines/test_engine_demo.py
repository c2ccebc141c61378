# SPDX-License-Identifier: Apache-2.0
"""``kvxfer demo`` as a user runs it, and its control, without which it proves nothing."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from engine_families import FAMILIES, write_family

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


def test_demo_of_a_users_model_fits_its_groups_and_its_length(tmp_path):
    (folder := tmp_path / "user").mkdir()
    model = write_family(folder, FAMILIES["sliding_and_full"])
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 256}))
    result = run_demo(tmp_path, "--model", str(model), "--dtype", "bfloat16", "--prompts", "2")
    assert result.returncode == 0, result.stdout + result.stderr
    assert cell(result.stdout, "prompt tokens") == "480"  # 2 of 240, and 16 of output
    assert cell(result.stdout, "external hit tokens") == "448"
    assert cell(result.stdout, "compared with") == "vLLM's own cache"
    assert cell(result.stdout, "outputs identical") == "yes"
    assert cell(result.stdout, "largest logprob difference") == "0.0e+00"
    assert list(tmp_path.glob("kvxfer-demo-*")) == []


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"architectures": ["Foo"], "model_type": "foo"}, r"\(Foo\).*model type `foo`"),
        ({"max_position_embeddings": 47}, r"have 32 tokens at most.*nothing could be loaded"),
        ({"vocab_size": None}, r"has no vocab_size"),
    ],
    ids=["unknown_to_vllm", "too_short_to_hit", "no_vocabulary"],
)
def test_demo_of_a_model_that_cannot_be_used_says_why(tmp_path, tiny_llama, config, words):
    (folder := tmp_path / "user").mkdir()
    usable = json.loads((tiny_llama / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(usable | config))
    (folder / "model.safetensors").write_bytes((tiny_llama / "model.safetensors").read_bytes())
    result = run_demo(tmp_path, "--model", str(folder))
    assert result.returncode == 1, result.stdout + result.stderr
    assert re.search(rf"FAILED: .*{words}", result.stdout), result.stdout
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
    assert "FAILED: an engine ended with 1 before its job was done: RuntimeError" in result.stdout
    log = re.search(r"log of vLLM: (\S+)", result.stdout)[1]
    assert "Cannot find any model weights" in Path(log).read_text()


def cell(table, name):
    """Return the value of the row ``name`` of the demo's table."""
    return re.search(rf"│ {re.escape(name)} +│ +(.*?) +│", table)[1]
