# SPDX-License-Identifier: Apache-2.0
"""The script that installs the Mooncake client: libraries where it may, else the line that does."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "install_mooncake.sh"

PYTHON = """#!/bin/sh
echo "$@" >> {folder}/calls
[ "$1" = -c ] && [ ! -e {folder}/installed ] && {{ echo "{error}"; exit 1; }}
exit 0
"""
LIBRARY = "ImportError: libibverbs.so.1: cannot open shared object file: No such file"


@pytest.fixture
def install(tmp_path):
    """Return a function that runs the script among programs that only pretend."""

    def install(*, user_id=1000, error=LIBRARY, apt_get="exit 1", installed=False):
        programs = {
            "python": PYTHON.format(folder=tmp_path, error=error),
            "id": f"#!/bin/sh\necho {user_id}\n",
            "apt-get": f'#!/bin/sh\necho apt-get "$@" >> {tmp_path}/calls\n{apt_get}\n',
        }
        for name, text in programs.items():
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)
        if installed:
            (tmp_path / "installed").touch()
        path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["sh", str(SCRIPT), str(tmp_path / "python")],
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stderr, (tmp_path / "calls").read_text()

    return install


def test_install_with_all_libraries_asks_for_nothing(install):
    status, stderr, calls = install(installed=True)
    assert (status, stderr) == (0, "")
    assert "--no-deps -r" in calls
    assert "apt-get" not in calls


def test_install_by_root_adds_the_libraries(install, tmp_path):
    status, stderr, calls = install(user_id=0, apt_get=f"touch {tmp_path}/installed")
    assert (status, stderr) == (0, "")
    assert "libibverbs1 librdmacm1 libnuma1 libcurl4" in calls


@pytest.mark.parametrize("user_id", [0, 1000], ids=["root_without_a_network", "user"])
def test_install_that_may_not_prints_the_line_and_goes_on(install, user_id):
    status, stderr, calls = install(user_id=user_id)
    assert status == 0
    assert "apt-get install -y libibverbs1 librdmacm1 libnuma1 libcurl4" in stderr
    assert ("apt-get" in calls) == (user_id == 0)


def test_install_of_a_client_that_is_broken_otherwise_fails_with_its_error(install):
    status, stderr, _ = install(error="ImportError: undefined symbol: x")
    assert status == 1
    assert "undefined symbol: x" in stderr
