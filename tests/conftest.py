# SPDX-License-Identifier: Apache-2.0
"""What holds for every test: Hypothesis profiles, and no test lost to a missing install.

``make test`` installs everything, so it sets ``KVXFER_REQUIRE_ALL=1``: a test that would skip
itself because a package is missing then fails. Tests that need a GPU may skip anywhere; those that
lack a system library, which not everybody may install, anywhere but in CI.
"""

import os
import re
from pathlib import Path

import hypothesis
import pytest

import kvxfer

hypothesis.settings.register_profile("default", deadline=None, print_blob=True)
hypothesis.settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True)
hypothesis.settings.register_profile("thorough", deadline=None, print_blob=True, max_examples=5000)
hypothesis.settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "default")
)

PACKAGE = Path(kvxfer.__file__).parent
REQUIRE_ALL = os.environ.get("KVXFER_REQUIRE_ALL", "") == "1"
MISSING_LIBRARY = "cannot open shared object file"
MISSING_INSTALL = re.compile(r"could not import|not installed|No module named")


def pytest_report_header():
    return f"kvxfer: {PACKAGE}"


def pytest_sessionstart():
    if os.environ.get("KVXFER_DEBUG", "") == "1" and "debug" not in PACKAGE.parts:
        raise pytest.UsageError(f"KVXFER_DEBUG=1, but the tests would run on {PACKAGE}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    return refuse_missing_install((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report():
    return refuse_missing_install((yield))


def refuse_missing_install(report):
    """Turn a skip for a missing package into a failure, where all packages must be there."""
    if REQUIRE_ALL and report.skipped and not needs_gpu(report):
        reason = str(report.longrepr[2])
        excused = MISSING_LIBRARY in reason and not os.environ.get("CI")
        if MISSING_INSTALL.search(reason) and not excused:
            report.outcome = "failed"
            report.longrepr = (
                f"{report.nodeid}: {reason} (KVXFER_REQUIRE_ALL=1 allows no such skip)"
            )
    return report


def needs_gpu(report):
    """Whether a report is about a test with the gpu marker, or about a file of them."""
    return "gpu" in getattr(report, "keywords", ()) or report.nodeid.startswith("tests/gpu")
