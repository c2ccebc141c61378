# SPDX-License-Identifier: Apache-2.0
"""The transcripts of docs/commands.md are what the commands print."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_commands_page_is_what_commands_print(monkeypatch):
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: pip install 'kvxfer[vllm]'")
    if Path("/proc/driver/nvidia/version").exists():
        pytest.skip("doctor prints other lines where there is a GPU")
    monkeypatch.syspath_prepend(ROOT / "scripts")
    from doc_commands import commands_page

    assert (ROOT / "docs" / "commands.md").read_text() == commands_page(), "run make docs"
