# SPDX-License-Identifier: Apache-2.0
"""Where all packages must be there, a test that skips itself for want of one fails instead."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvxfer

CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"
SKIPPING_TESTS = """
import pytest

@pytest.fixture
def engine():
    pytest.skip("vLLM is not installed")

def test_want_in_test():
    pytest.importorskip("no_such_package")

def test_want_in_fixture(engine):
    pass

def test_other_reason():
    pytest.skip("root may write anywhere")

def test_want_of_a_library():
    pytest.skip("could not import it: libx.so.1: cannot open shared object file")

@pytest.mark.gpu
def test_want_of_gpu():
    pytest.importorskip("no_such_package")
"""
SKIPPING_MODULE = "import pytest; pytest.importorskip('no_such_package')"


def outcomes(folder, require_all, ci=""):
    """Run the tests above under the project's conftest; return its report's last lines."""
    shutil.copy(CONFTEST, folder)
    (folder / "test_skips.py").write_text(SKIPPING_TESTS)
    (folder / "test_module.py").write_text(SKIPPING_MODULE)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs a GPU\n")
    environment = {
        "KVXFER_REQUIRE_ALL": require_all,
        "CI": ci,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": str(Path(kvxfer.__file__).parents[1]),
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rsfE", "--continue-on-collection-errors"],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout.partition("short test summary info")[2]


def test_missing_install_fails_where_all_is_required(tmp_path):
    status, summary = outcomes(tmp_path, require_all="1")
    assert status == pytest.ExitCode.TESTS_FAILED
    assert "FAILED test_skips.py::test_want_in_test" in summary
    assert "ERROR test_skips.py::test_want_in_fixture" in summary
    assert "ERROR test_module.py" in summary
    assert "1 failed, 3 skipped, 2 errors" in summary


def test_missing_system_library_fails_in_ci_alone(tmp_path):
    status, summary = outcomes(tmp_path, require_all="1", ci="true")
    assert status == pytest.ExitCode.TESTS_FAILED
    assert "FAILED test_skips.py::test_want_of_a_library" in summary
    assert "2 failed, 2 skipped, 2 errors" in summary


def test_missing_install_skips_elsewhere(tmp_path):
    status, summary = outcomes(tmp_path, require_all="0")
    assert status == pytest.ExitCode.OK
    assert "6 skipped" in summary
