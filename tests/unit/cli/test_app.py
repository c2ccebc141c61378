# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import kvxfer.cli.app as cli


@pytest.fixture
def demo_options(monkeypatch):
    """Return the list that the options of each ``kvxfer demo`` go to; the demo returns 1."""
    seen = []
    monkeypatch.setattr(cli, "run_demo", lambda options, console: seen.append(options) or 1)
    return seen


def test_demo_help_offers_model_store_length_and_count():
    result = CliRunner().invoke(cli.app, ["demo", "--help"], env={"COLUMNS": "120"})
    assert result.exit_code == 0
    for option in ("--model", "--store", "--prompt-tokens", "--prompts", "--keep"):
        assert option in result.output


def test_demo_passes_its_options_and_exit_code(demo_options, tmp_path):
    arguments = ["--model", str(tmp_path), "--store", "lmdb:///s", "--prompt-tokens", "40"]
    arguments += ["--dtype", "bfloat16", "--prompts", "2", "--keep"]
    result = CliRunner().invoke(cli.app, ["demo", *arguments])
    assert result.exit_code == 1
    (options,) = demo_options
    assert (options.model, options.store) == (tmp_path.resolve(), "lmdb:///s")
    assert options.dtype == "bfloat16"
    assert (options.prompt_tokens, options.num_prompts, options.keep) == (40, 2, True)


def test_demo_leaves_length_and_type_to_the_model_by_default(demo_options):
    CliRunner().invoke(cli.app, ["demo"])
    assert (demo_options[0].prompt_tokens, demo_options[0].dtype) == (None, None)


@pytest.mark.parametrize(
    "arguments",
    [["--prompt-tokens", "32"], ["--prompts", "0"], ["--model", "/no/such/folder"]],
    ids=["below_one_block", "no_prompt", "no_model"],
)
def test_demo_refuses_what_could_not_hit(demo_options, arguments):
    assert CliRunner().invoke(cli.app, ["demo", *arguments]).exit_code == 2
    assert demo_options == []


def test_command_line_names_the_extra_that_is_missing():
    program = "import sys; sys.modules['typer'] = None; from kvxfer.cli.main import main; main()"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 1
    assert "pip install 'kvxfer[cli]'" in result.stderr
    assert "typer" in result.stderr


def test_command_line_imports_neither_vllm_nor_torch():
    program = "import sys, kvxfer.cli.app; print({'vllm', 'torch'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout == "set()\n", result.stderr
