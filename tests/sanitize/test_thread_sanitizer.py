# SPDX-License-Identifier: Apache-2.0
"""The C copy loops under ThreadSanitizer: threads that share a source share nothing else.

Python itself cannot run under it without a build of its own, so a small C program does what
several threads do in ``copy_items`` at once.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("copy_threads.c")
CSRC = SOURCE.parents[2] / "csrc"
RACE_STATUS = 66

compiler = shutil.which(os.environ.get("CC", "gcc"))
if compiler is None:
    pytest.skip("no C compiler here", allow_module_level=True)


def run(tmp_path, *flags):
    """Build the program with ``flags`` and run it; return its status and what it said."""
    program = tmp_path / "copy_threads"
    environ = {name: text for name, text in os.environ.items() if name != "LD_PRELOAD"}
    environ["TSAN_OPTIONS"] = f"halt_on_error=1:exitcode={RACE_STATUS}"
    build = [compiler, "-std=gnu11", "-O1", "-g", "-fsanitize=thread", f"-I{CSRC}", *flags]
    subprocess.run(
        [*build, SOURCE, "-o", program, "-lpthread"], check=True, timeout=120, env=environ
    )
    fixed_addresses = ["setarch", "-R"] if shutil.which("setarch") else []
    child = subprocess.run(
        [*fixed_addresses, program],
        capture_output=True,
        text=True,
        timeout=120,
        env=environ,
        check=False,
    )
    said = child.stdout + child.stderr
    if "unexpected memory mapping" in said or "personality" in said:
        pytest.skip(f"ThreadSanitizer does not start on this kernel: {said[:200]}")
    return child.returncode, said


def test_copies_of_many_threads_from_one_source_do_not_race(tmp_path):
    assert run(tmp_path) == (0, "0 of 4 threads copied wrongly\n")


def test_copies_of_many_threads_to_one_target_are_reported(tmp_path):
    """The control: a race is seen."""
    status, said = run(tmp_path, "-DSHARED_TARGET")
    assert status == RACE_STATUS
    assert "ThreadSanitizer: data race" in said
