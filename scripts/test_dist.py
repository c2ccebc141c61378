# SPDX-License-Identifier: Apache-2.0
"""Install the packages that ``make dist`` made, each way a user would, and try what came out.

Every case is a new environment in a temporary folder: the wheel where there is no compiler; the
sdist with a compiler, with and without nvcc, and for every other Python that is supported and on
the PATH; the sdist without a compiler, which has to say what is missing. Neither vLLM nor torch is
installed, so that what is tried is what needs neither.
``python scripts/test_dist.py`` exits 1 where a case does not end as it should.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
PROGRAM = ROOT / "scripts" / "try_install.py"
KERNELS = "kvxfer/blocks/kernels"
COMPILERS = ("cc", "gcc", "clang", "c99", "c89")
"""Hidden by name, with what precedes it by a dash and what follows: x86_64-linux-gnu-gcc-12."""


@dataclass(frozen=True, slots=True)
class Case:
    """One way to install, and how it has to end."""

    name: str
    package: str
    """``wheel`` or ``sdist``."""
    hidden: tuple[str, ...]
    """Programs that are not on the PATH."""
    kernels: bool | None = None
    """Whether the CUDA kernels come compiled; None where that is not decided here."""
    refusal: str = ""
    """What pip's output has to contain where the installation has to fail."""
    python: str = sys.executable


CASES = (
    Case("wheel, no compiler", "wheel", (*COMPILERS, "nvcc")),
    Case("sdist, no nvcc", "sdist", ("nvcc",), kernels=False),
    Case("sdist, nvcc", "sdist", (), kernels=True),
    Case("sdist, no compiler", "sdist", COMPILERS, refusal="needs a C compiler"),
)


PYTHONS = ("python3.11", "python3.12", "python3.13")


class CaseError(Exception):
    """A case did not end as it has to."""


def main() -> int:
    """Check what the packages hold, then run every case; return the exit status."""
    packages = find_packages()
    faults = [*wheel_faults(**packages), *sdist_faults(packages["sdist"])]
    print(f"contents: {', '.join(faults) or 'as they should be'}", flush=True)
    failed = bool(faults)
    for case in (*CASES, *other_pythons()):
        if case.kernels and not shutil.which("nvcc"):
            print(f"{case.name}: SKIPPED, there is no nvcc")
            continue
        started = time.monotonic()
        try:
            verdict = run_case(case, packages[case.package])
        except CaseError as error:
            failed, verdict = True, f"FAILED, {error}"
        print(f"{case.name}: {verdict} ({time.monotonic() - started:.0f} s)", flush=True)
    return int(failed)


def find_packages() -> dict[str, Path]:
    """Return the newest wheel and sdist in ``dist``."""
    found = {"wheel": sorted(DIST.glob("*.whl")), "sdist": sorted(DIST.glob("*.tar.gz"))}
    if not all(found.values()):
        raise SystemExit(f"{DIST} has not both a wheel and an sdist: make dist")
    return {name: max(paths, key=os.path.getmtime) for name, paths in found.items()}


def other_pythons() -> Iterator[Case]:
    """Yield a case for each supported Python that runs here and is not the one running."""
    for name in PYTHONS:
        found = shutil.which(name)
        if found and name != f"python3.{sys.version_info.minor}" and runs(found):
            yield replace(CASES[1], name=f"sdist, {name}", python=found)


def runs(python: str) -> bool:
    """Whether an interpreter is more than a version manager's shim for one that is not there."""
    return subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0


def wheel_faults(wheel: Path, sdist: Path) -> Iterator[str]:
    """Yield what a wheel lacks of the sdist it was made of, and what it should not have."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    wanted = [f"{KERNELS}/block_copy.cu", f"{KERNELS}/block_copy.h"]
    for name in sorted(members(sdist)):
        stem, suffix = Path(name).stem, Path(name).suffix
        native = f"kvxfer/_native/{stem}.cpython-"
        if name.startswith("kvxfer/") and suffix in {".py", ".pyi", ".typed"}:
            wanted.append(name)
        elif suffix == ".pyx" and not any(each.startswith(native) for each in names):
            yield f"the wheel lacks the native module {stem}"
    yield from (f"the wheel lacks {name}" for name in wanted if name not in names)
    if not any(name.endswith(".dist-info/licenses/LICENSE") for name in names):
        yield "the wheel lacks the licence"
    for name in names:
        top = name.partition("/")[0]
        if top != "kvxfer" and not top.endswith(".dist-info"):
            yield f"the wheel has {name}"
        if Path(name).suffix in {".pyx", ".c", ".pyc"}:
            yield f"the wheel has {name}"


def sdist_faults(sdist: Path) -> Iterator[str]:
    """Yield what an sdist lacks of the committed files, and what it has that is built."""
    names = members(sdist)
    listing = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    committed = [name for name in listing.stdout.split() if (ROOT / name).exists()]
    yield from (f"the sdist lacks {name}" for name in committed if name not in names)
    built = {".so", ".pyc", ".fatbin"}
    yield from (f"the sdist has {name}" for name in names if Path(name).suffix in built)


def members(sdist: Path) -> set[str]:
    """Return the names of an sdist's members within its folder."""
    with tarfile.open(sdist) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


def run_case(case: Case, package: Path) -> str:
    """Install in a new environment and try the result; return what is worth telling."""
    with tempfile.TemporaryDirectory(prefix="kvxfer-dist-") as scratch:
        folder = Path(scratch)
        subprocess.run([case.python, "-m", "venv", str(folder / "venv")], check=True)
        environment = os.environ | {"PATH": path_without(case.hidden, folder / "path")}
        environment.pop("CC", None)
        python = str(folder / "venv" / "bin" / "python")
        install = [python, "-m", "pip", "install", "--no-cache-dir", str(package)]
        done = run(install, folder, environment)
        if case.refusal:
            return checked_refusal(case, done)
        if done.returncode != 0:
            raise CaseError(f"pip failed:\n{done.stdout[-4000:]}")
        tried = run([python, str(PROGRAM)], folder, environment)
        if tried.returncode != 0:
            raise CaseError(f"it does not work:\n{tried.stdout[-4000:]}")
        check_kernels(case, folder / "venv")
        return tried.stdout.strip().splitlines()[-1]


def run(
    command: list[str], folder: Path, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a command outside the checkout; standard error goes with the output."""
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,  # the caller judges it
    )


def path_without(hidden: Collection[str], folder: Path) -> str:
    """Fill a folder with links to all programs on the PATH but the hidden ones; return it."""
    folder.mkdir()
    for place in filter(None, os.environ["PATH"].split(os.pathsep)):
        for program in Path(place).glob("*"):
            link = folder / program.name
            is_hidden = any(part in hidden for part in program.name.split("-"))
            if not (is_hidden or link.exists() or link.is_symlink()):
                link.symlink_to(program)
    return str(folder)


def checked_refusal(case: Case, done: subprocess.CompletedProcess[str]) -> str:
    """Return that the installation was refused with the words it has to have."""
    if done.returncode == 0:
        raise CaseError("it was installed")
    lines = [line.strip() for line in done.stdout.splitlines() if case.refusal in line]
    if not lines:
        raise CaseError(f"pip does not say {case.refusal!r}:\n{done.stdout[-4000:]}")
    return f"refused: {lines[0]}"


def check_kernels(case: Case, home: Path) -> None:
    """Raise CaseError where the compiled CUDA kernels are there and should not be, or not."""
    (packages,) = home.glob("lib/python*/site-packages")
    has_kernels = (packages / KERNELS / "block_copy.fatbin").exists()
    if case.kernels is not None and has_kernels != case.kernels:
        raise CaseError(f"the compiled CUDA kernels are {'' if has_kernels else 'not '}in it")


if __name__ == "__main__":
    sys.exit(main())
