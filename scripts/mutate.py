# SPDX-License-Identifier: Apache-2.0
"""Break each promise's mechanism, one line at a time, and see that a test notices.

    python scripts/mutate.py                 all of scripts/mutations.py
    python scripts/mutate.py --promise 4     those of one promise of ARCHITECTURE.md

Works on a copy of the tree. Each mutation replaces one piece of text, which has to be there once,
and runs the tests that it names; they have to fail, and to pass without it. Exit status 1 where a
mutation survives, 2 where one could not be judged.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mutations import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[1]
TEST_TIMEOUT_S = 300
PASSED, FAILED = 0, 1
"""pytest's exit codes; any other says that the tests did not run."""


def main() -> int:
    """Judge the chosen mutations and print a line for each; return the exit status."""
    options = _options()
    chosen = [m for m in MUTATIONS if options.promise in (None, m.promise)]
    with tempfile.TemporaryDirectory(prefix="kvxfer-mutate-") as folder:
        copy = _copy_tree(Path(folder))
        tests = sorted({test for mutation in chosen for test in mutation.tests})
        if (code := run_tests(copy, tests)) != PASSED:
            print(f"the tests do not pass without a mutation (pytest's exit code {code})")
            return 2
        verdicts = [_judge(copy, mutation) for mutation in chosen]
    survived, unjudged = verdicts.count("SURVIVED"), verdicts.count("NOT RUN")
    print(f"{len(chosen)} mutations, {survived} survived, {unjudged} could not be judged")
    return 2 if unjudged else int(survived > 0)


def run_tests(copy: Path, tests: Sequence[str]) -> int:
    """Run tests against the package in ``copy``; return pytest's exit code, -1 after the timeout.

    With CI set, Hypothesis draws the same examples each time.
    """
    environment = os.environ | {"PYTHONPATH": str(copy), "CI": "true"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    try:
        return subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, timeout=TEST_TIMEOUT_S
        ).returncode
    except subprocess.TimeoutExpired:
        return FAILED  # a test that hangs has noticed, too


def _judge(copy: Path, mutation: Mutation) -> str:
    path = copy / mutation.file
    before = path.read_text()
    path.write_text(mutation.applied_to(before))
    code = run_tests(copy, mutation.tests)
    path.write_text(before)
    verdict = {PASSED: "SURVIVED", FAILED: "killed"}.get(code, "NOT RUN")
    print(f"{mutation.promise:>2}  {verdict:<8}  {mutation.what}  ({mutation.file})", flush=True)
    return verdict


def _copy_tree(folder: Path) -> Path:
    """Copy the sources as they are now, and the native modules, which no mutation touches."""
    copy = folder / "kvxfer"
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    native = [str(path.relative_to(ROOT)) for path in ROOT.glob("kvxfer/_native/*.so")]
    for name in (*listed.stdout.splitlines(), *native):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    return copy


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--promise", type=int, help="only mutations of this promise")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
