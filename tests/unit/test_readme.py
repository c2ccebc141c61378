# SPDX-License-Identifier: Apache-2.0
"""What the README shows works, and every configuration in it recomputes failed loads."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

from kvxfer.config import KVXferConfig

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SHOWN = [ROOT / "README.md", ROOT / "kvxfer" / "connector.py", *ROOT.glob("docs/*.md")]


def test_library_example_moves_blocks(tmp_path):
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names = {}
    exec(example.replace("/tmp/kv-store", f"{tmp_path}/store"), names)
    names["store"].close()
    for cache in names["caches"]:
        np.testing.assert_array_equal(cache[[10, 11]], cache[[3, 7]])


@pytest.mark.parametrize("path", SHOWN, ids=lambda path: path.name)
def test_every_configuration_that_is_shown_recomputes_failed_loads(path):
    shown = re.findall(r"--kv-transfer-config '(\{.*?\})'", path.read_text(), re.DOTALL)
    assert shown or path.name != "README.md"
    for config in shown:
        assert '"kv_load_failure_policy": "recompute"' in config


def test_settings_that_the_readme_lists_are_those_of_the_config():
    listed = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", README, re.MULTILINE)
    named = {name for cell in listed for name in re.findall(r"`(\w+)`", cell)}
    assert len(named) > 10
    assert named <= {field.name for field in dataclasses.fields(KVXferConfig)}
