# SPDX-License-Identifier: Apache-2.0
"""Preflight: every missing piece is named at once, with the way to get it."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_locks import load_script

ROOT = Path(__file__).resolve().parents[2]
PREFLIGHT = ROOT / "scripts" / "preflight.py"
FIND_PYTHON = ROOT / "scripts" / "find_python.sh"


@pytest.fixture
def preflight(monkeypatch):
    module = load_script("preflight")
    monkeypatch.setattr(module.shutil, "which", lambda name: name == "apt-get" and "/bin/apt-get")
    monkeypatch.setattr(module.os, "geteuid", lambda: 1000)
    return module


def test_preflight_names_all_that_is_missing_at_once():
    environment = os.environ | {"CC": "no-such-cc", "CXX": "no-such-cxx"}
    done = subprocess.run(
        [sys.executable, PREFLIGHT], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "a C compiler that works (no-such-cc)" in done.stderr
    assert "a C++ compiler that works (no-such-cxx)" in done.stderr


def test_preflight_passes_on_a_machine_that_runs_these_tests():
    done = subprocess.run([sys.executable, PREFLIGHT], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("preflight: ok")


def test_preflight_refuses_another_python(preflight, monkeypatch):
    monkeypatch.setattr(preflight.sys, "version_info", (3, 10, 12))
    monkeypatch.setattr(preflight, "apt_knows", lambda package: "3.12" in package)
    [piece] = preflight.check_python()
    assert piece.what.startswith("Python 3.11, 3.12 or 3.13")
    assert piece.remedy == "sudo apt-get install -y python3.12 python3.12-venv python3.12-dev"


def test_preflight_names_venv_and_headers(preflight, monkeypatch):
    monkeypatch.setattr(preflight.sys, "version_info", (3, 12, 1))
    monkeypatch.setattr(preflight, "can_import", lambda *names: False)
    monkeypatch.setattr(preflight.sysconfig, "get_paths", lambda: {"include": "/nowhere"})
    venv, headers = preflight.check_python()
    assert venv.remedy == "sudo apt-get install -y python3.12-venv"
    assert headers.remedy == "sudo apt-get install -y python3.12-dev"


@pytest.mark.parametrize(
    ("machine", "flags", "expected"),
    [
        ("x86_64", "sse2 avx avx2", []),
        ("x86_64", "sse2 avx", ["AVX2"]),
        ("aarch64", "", []),
        ("ppc64le", "", ["an x86-64 or aarch64 CPU"]),
    ],
)
def test_preflight_cpu(preflight, monkeypatch, machine, flags, expected):
    monkeypatch.setattr(preflight.platform, "machine", lambda: machine)
    monkeypatch.setattr(preflight, "read", lambda path: f"flags : {flags}")
    pieces = list(preflight.check_cpu())
    assert len(pieces) == len(expected)
    assert all(start in piece.what for piece, start in zip(pieces, expected, strict=True))


def test_preflight_counts_the_memory_of_the_container(preflight, monkeypatch):
    files = {"/proc/meminfo": "MemTotal: 16777216 kB", "/sys/fs/cgroup/memory.max": "2147483648\n"}
    monkeypatch.setattr(preflight, "read", lambda path: files.get(path, ""))
    [piece] = preflight.check_memory()
    assert "has 2.0" in piece.what
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert not list(preflight.check_memory())


def test_preflight_counts_the_disk(preflight, monkeypatch):
    monkeypatch.setattr(preflight, "free_bytes", lambda folder: preflight.GIB // 2)
    assert len(list(preflight.check_disk())) == 2


def test_preflight_accepts_glibc_of_the_wheels_only(preflight, monkeypatch):
    monkeypatch.setattr(preflight, "glibc_version", lambda: (2, 28))
    assert [piece.what for piece in preflight.check_system()] == [
        "glibc 2.31 or later (this is glibc 2.28)"
    ]
    monkeypatch.setattr(preflight, "glibc_version", lambda: None)
    assert len(list(preflight.check_system())) == 1


def test_preflight_is_written_for_python_3_8():
    ast.parse(PREFLIGHT.read_text(), feature_version=(3, 8))  # SyntaxError names the line


def fake_python(folder, name, version):
    """Make an executable that answers like a Python of a version."""
    path = folder / name
    path.write_text(f"#!/bin/sh\nexit {0 if version >= (3, 8) else 1}\n")
    path.chmod(0o755)
    return path


def find_python(folder, **environment):
    return subprocess.run(
        ["/bin/sh", FIND_PYTHON],
        env={"PATH": str(folder), **environment},
        capture_output=True,
        text=True,
    )


def test_find_python_prefers_the_named_one_then_the_oldest_supported(tmp_path):
    fake_python(tmp_path, "python3", (3, 14))
    fake_python(tmp_path, "python3.13", (3, 13))
    fake_python(tmp_path, "python3.12", (3, 12))
    other = fake_python(tmp_path, "snake", (3, 11))
    assert find_python(tmp_path).stdout.strip().endswith("python3.12")
    assert find_python(tmp_path, PYTHON="snake").stdout.strip() == str(other)


def test_find_python_passes_over_what_does_not_run(tmp_path):
    broken = tmp_path / "python3.11"
    broken.write_text("#!/bin/sh\nexit 127\n")
    broken.chmod(0o755)
    fake_python(tmp_path, "python3", (3, 9))
    assert find_python(tmp_path).stdout.strip().endswith("python3")


def test_find_python_says_how_to_get_one(tmp_path):
    done = find_python(tmp_path)
    assert done.returncode == 1
    assert "apt-get install -y python3 python3-venv python3-dev build-essential" in done.stderr
    assert find_python(tmp_path, PYTHON="nothing").returncode == 1
