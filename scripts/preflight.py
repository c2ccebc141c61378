# SPDX-License-Identifier: Apache-2.0
"""Name every piece that this machine lacks for kvxfer, each with the line that installs it.

Run by the Python that kvxfer is to be set up with; exits 0 where nothing is missing, else 1.
Uses the standard library only and runs on any Python from 3.8 on, so that it can say that the
Python is the wrong one.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Iterator, NamedTuple  # noqa: UP035 - Python 3.8

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = [(3, 11), (3, 12), (3, 13)]
GIB = 1 << 30
MEMORY_GIB = 6.0  # two engines of 2.4 GiB at once, and the tests themselves
AVAILABLE_GIB = 5.0
VENV_GIB = 4.0  # the environment takes 2.6 GiB with vLLM in it, pip's downloads the rest
WORK_GIB = 1.0  # what is built and tested once the environment stands
GLIBC = (2, 31)  # the newest that a locked wheel asks for (llguidance: manylinux_2_31)

# What to install per package manager; {v} is the version of Python, {vv} the same without its dot.
PACKAGES = {
    "apt-get": {
        "python": "python{v} python{v}-venv python{v}-dev",
        "venv": "python{v}-venv",
        "headers": "python{v}-dev",
        "c": "gcc libc6-dev",
        "c++": "g++",
    },
    "dnf": {
        "python": "python{v} python{v}-devel",
        "venv": "python{v}",
        "headers": "python{v}-devel",
        "c": "gcc glibc-devel",
        "c++": "gcc-c++",
    },
    "zypper": {
        "python": "python{vv} python{vv}-devel",
        "venv": "python{vv}",
        "headers": "python{vv}-devel",
        "c": "gcc glibc-devel",
        "c++": "gcc-c++",
    },
}


class Missing(NamedTuple):
    """One missing piece and the way to get it."""

    what: str
    remedy: str


def main() -> int:
    """Print what is missing, all of it at once; return the exit status."""
    missing = [piece for check in CHECKS for piece in check()]
    if missing:
        print(f"preflight: {len(missing)} missing on this machine:", file=sys.stderr)
        for piece in missing:
            print(f"  - {piece.what}\n      {piece.remedy}", file=sys.stderr)
        return 1
    print(
        f"preflight: ok (Python {platform.python_version()}, {platform.machine()}, "
        f"{memory_bytes() / GIB:.0f} GiB memory, {free_bytes(ROOT) / GIB:.0f} GiB disk free)"
    )
    available = meminfo_bytes("MemAvailable")
    if available < AVAILABLE_GIB * GIB:
        print(
            f"preflight: note: only {available / GIB:.1f} GiB of memory are free now; "
            f"engine tests use up to {AVAILABLE_GIB:.0f}, so close what you can"
        )
    return 0


def check_system() -> Iterator[Missing]:
    """Linux with a C library that the binary wheels accept."""
    if not sys.platform.startswith("linux"):
        yield Missing(f"Linux (this is {sys.platform})", "use a Linux machine, container or WSL 2")
        return
    version = glibc_version()
    if version is None or version < GLIBC:
        found = "another C library" if version is None else "glibc {}.{}".format(*version)
        yield Missing(
            "glibc {}.{} or later (this is {})".format(*GLIBC, found),
            "use a newer or glibc-based distribution, for instance Debian 12 or Ubuntu 24.04",
        )


def check_python() -> Iterator[Missing]:
    """A Python of a supported version that can make environments and build extensions."""
    if sys.version_info[:2] not in PYTHONS:
        yield Missing(
            f"Python 3.11, 3.12 or 3.13 with venv and headers (found {platform.python_version()} "
            f"at {sys.executable})",
            python_remedy(),
        )
        return
    version = "{}.{}".format(*sys.version_info[:2])
    if not can_import("venv", "ensurepip"):
        yield Missing(f"the venv module of Python {version}", install("venv", version))
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        yield Missing(f"the headers of Python {version} ({header})", install("headers", version))


def check_compilers() -> Iterator[Missing]:
    """Compilers that build a program: C for kvxfer's modules, C++ for what vLLM compiles."""
    c_compiler = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    if not compiles(c_compiler, "c", "#include <stdlib.h>\nint main(void) { return 0; }\n"):
        yield Missing(f"a C compiler that works ({c_compiler})", install("c"))
    cxx_compiler = os.environ.get("CXX") or "g++"
    if not compiles(cxx_compiler, "cpp", "#include <vector>\nint main() { return 0; }\n"):
        yield Missing(f"a C++ compiler that works ({cxx_compiler})", install("c++"))


def check_cpu() -> Iterator[Missing]:
    """x86-64 with AVX2, or aarch64: what vLLM's CPU build is made for."""
    machine = platform.machine()
    if machine in ("aarch64", "arm64"):
        return
    if machine not in ("x86_64", "AMD64"):
        yield Missing(f"an x86-64 or aarch64 CPU (this is {machine})", "use another machine")
    elif "avx2" not in read("/proc/cpuinfo").split():
        yield Missing(
            "AVX2, which vLLM's CPU build needs and this CPU does not offer",
            "use an x86-64 CPU of 2013 or later; in a virtual machine pass the host's CPU through",
        )


def check_memory() -> Iterator[Missing]:
    """Memory for the two engines that the tests run at once."""
    have = memory_bytes()
    if have < MEMORY_GIB * GIB:
        yield Missing(
            f"memory: {MEMORY_GIB:.0f} GiB (this machine or container has {have / GIB:.1f})",
            "give the container or virtual machine more, for docker: --memory=8g",
        )


def check_disk() -> Iterator[Missing]:
    """Disk for the environment where it is not there yet, and for what is built in it."""
    need = WORK_GIB if (ROOT / ".venv" / "stamps" / "engine").exists() else VENV_GIB + WORK_GIB
    for folder, gib in ((ROOT, need), (Path(tempfile.gettempdir()), WORK_GIB)):
        free = free_bytes(folder)
        if free < gib * GIB:
            yield Missing(
                f"disk: {gib:.0f} GiB free under {folder} (it has {free / GIB:.1f})",
                "free some, or set TMPDIR to a folder with more"
                if folder != ROOT
                else "free some, or clone where there is more",
            )


CHECKS = [check_system, check_python, check_compilers, check_cpu, check_memory, check_disk]


def install(piece: str, version: str = "") -> str:
    """Return the line that installs a piece with this machine's package manager."""
    for manager, packages in PACKAGES.items():
        if shutil.which(manager):
            names = packages[piece].format(v=version, vv=version.replace(".", ""))
            sudo = "" if os.geteuid() == 0 else "sudo "
            return f"{sudo}{manager} install -y {names}"
    wanted = {"c": "gcc and the C library's headers", "c++": "g++"}
    return (
        f"install {wanted.get(piece, f'Python {version} with {piece}')} with your package manager"
    )


def python_remedy() -> str:
    """Return the line that installs a supported Python: on Debian the oldest that apt offers."""
    if not shutil.which("apt-get"):
        return install("python", "3.12")
    for version in map("{0[0]}.{0[1]}".format, PYTHONS):
        if apt_knows(f"python{version}-venv"):
            return install("python", version)
    if "ubuntu" in read("/etc/os-release"):
        ppa = "sudo add-apt-repository -y ppa:deadsnakes/ppa"
        return f"{ppa} && {install('python', '3.12')}"
    return (
        "apt-get update, then run this again; if your release has none of the three, "
        "'pyenv install 3.12' or 'conda create -n kvxfer python=3.12', then set PYTHON to it"
    )


def apt_knows(package: str) -> bool:
    """Whether apt's lists offer a package."""
    return succeeds(["apt-cache", "show", "--no-all-versions", package])


def can_import(*modules: str) -> bool:
    """Whether this Python imports the modules; Debian ships venv without ensurepip."""
    return succeeds([sys.executable, "-c", "import " + ", ".join(modules)])


def compiles(compiler: str, suffix: str, program: str) -> bool:
    """Whether a compiler builds the program; one without the C library's headers does not."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / f"probe.{suffix}"
        source.write_text(program)
        command = [*shlex.split(compiler), str(source), "-o", str(source.with_suffix(".out"))]
        return succeeds(command)


def succeeds(command: list[str]) -> bool:
    """Whether a command is there and exits with 0."""
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


def glibc_version() -> tuple[int, int] | None:
    """Return glibc's version, None for another C library."""
    try:
        name, version = os.confstr("CS_GNU_LIBC_VERSION").split()  # type: ignore[union-attr]
        major, minor = version.split(".")[:2]
        return (int(major), int(minor)) if name == "glibc" else None
    except (AttributeError, OSError, ValueError):
        return None


def memory_bytes() -> int:
    """Return the memory of the machine, or of the container where that has less."""
    sizes = [meminfo_bytes("MemTotal")]
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = read(limit).strip()
        if text.isdigit():
            sizes.append(int(text))
    return min(sizes)


def meminfo_bytes(field: str) -> int:
    """Return one field of /proc/meminfo; 0 where there is none."""
    for line in read("/proc/meminfo").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0


def free_bytes(folder: Path) -> int:
    """Return what a user may still write under a folder."""
    return shutil.disk_usage(str(folder)).free


def read(path: str) -> str:
    """Return a file's text, nothing where it is not there."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


if __name__ == "__main__":
    sys.exit(main())
