# SPDX-License-Identifier: Apache-2.0
"""Real Mooncake servers for tests: a master and owners of segments, each a process of its own.

TCP on loopback, free ports. Every process ends with its ``Servers``; left alone, an owner ends with
this process, whose pipe it reads, and a master by itself after ``LIFE_S``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvxfer.errors import StoreError
from kvxfer.stores.mooncake_native import bound_client, import_client

HOST = "127.0.0.1"
LIFE_S = 600
START_S = 30
TIMEOUT_S = 2
MIB = 1 << 20

BOUNDED = """
import os, signal, sys
signal.alarm(int(sys.argv[1]))  # which outlasts the exec
os.execv(sys.argv[2], sys.argv[2:])
"""

OWNER = """
import signal, sys
signal.alarm(int(sys.argv[3]))
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 1 << 20, "tcp", "", sys.argv[1])
print(code, flush=True)
sys.stdin.read()
store.close()
"""


def require_client() -> None:
    """Skip where the client cannot be imported, with the line that installs what it lacks.

    The first client of a process reads its timeouts, so they are made short here.
    """
    bound_client(TIMEOUT_S)
    try:
        import_client()
    except StoreError as error:
        pytest.skip(f"could not import Mooncake: {error} (or run scripts/install_mooncake.sh)")


OWNER_TRIES = 3


class Master:
    """A ``mooncake_master``; ``start`` again after ``kill`` keeps its ports."""

    def __init__(
        self, folder: Path, *, lease_ms: int = 500, client_ttl_s: int = 3, flags: Sequence[str] = ()
    ) -> None:
        self._folder, self._flags = folder, [f"--default_kv_lease_ttl={lease_ms}", *flags]
        self._flags.append(f"--client_ttl={client_ttl_s}")
        self.port = free_port()
        self.metrics_port = free_port(self.port)
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    def uri(self, **options: object) -> str:
        """Return the URI of a store without a segment of its own, with further options."""
        merged = {"segment": 0, "buffer": "1MiB", "timeout_s": TIMEOUT_S, **options}
        merged["metrics_port"] = self.metrics_port
        query = "&".join(f"{name}={value}" for name, value in merged.items())
        return f"mooncake://{self.address}?{query}"

    def start(self) -> None:
        with open(self._folder / "master.log", "ab") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-c", BOUNDED, str(LIFE_S), str(binary("mooncake_master"))),
                    *(f"--rpc_port={self.port}", f"--rpc_address={HOST}"),
                    *(f"--metrics_port={self.metrics_port}", f"--metrics_host={HOST}"),
                    *self._flags,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        wait_until(lambda: accepts(self.port) and accepts(self.metrics_port))

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(START_S)
            self.process = None


class Owner:
    """A process that owns a segment of a master's pool and uses nothing of it."""

    def __init__(self, master: Master, segment_bytes: int, folder: Path) -> None:
        with open(folder / "owner.log", "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", OWNER, master.address, str(segment_bytes), str(LIFE_S)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        assert self.process.stdout is not None
        self.is_mounted = self.process.stdout.readline() == b"0\n"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(START_S)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


class Servers:
    """A master and its owners, which a test may kill and start again."""

    def __init__(self, folder: Path, **flags: Any) -> None:
        self._folder = folder
        self.master = Master(folder, **flags)
        self.owners: list[Owner] = []

    def add_owner(self, segment_bytes: int) -> Owner:
        """Start an owner; again where the master, which has just come up, breaks its call off."""
        for _ in range(OWNER_TRIES):
            owner = Owner(self.master, segment_bytes, self._folder)
            self.owners.append(owner)
            if owner.is_mounted:
                return owner
            owner.kill()
            self.owners.remove(owner)
        raise AssertionError((self._folder / "owner.log").read_text())

    def kill_all(self) -> None:
        for owner in self.owners:
            owner.kill()
        self.master.kill()


@contextlib.contextmanager
def servers(folder: Path, segment_bytes: int, **flags: Any) -> Iterator[Servers]:
    """Start a master and, unless ``segment_bytes`` is 0, an owner; kill them at the end."""
    started = Servers(folder, **flags)
    try:
        started.master.start()
        if segment_bytes:
            started.add_owner(segment_bytes)
        yield started
    finally:
        started.kill_all()


@contextlib.contextmanager
def own_role(
    master: Master, segment_bytes: int, environ: Mapping[str, str] | None = None, **options: object
) -> Iterator[subprocess.Popen[str]]:
    """Run kvxfer's own owner of a segment, once it says that it has mounted; kill it at the end."""
    uri = master.uri(segment=segment_bytes, hostname=HOST, **options)
    command = [sys.executable, "-m", "kvxfer.stores.mooncake_owner", uri]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, **(environ or {})}
    ) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            assert said == f"{segment_bytes} bytes are mounted at {master.address}\n"
            yield process
        finally:
            process.kill()


def free_port(other_than: int = 0) -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = int(probe.getsockname()[1])
    return port if port != other_than else free_port(other_than)


def accepts(port: int) -> bool:
    try:
        socket.create_connection((HOST, port), 1).close()
    except OSError:
        return False
    return True


def wait_until(is_true, timeout_s: float = START_S) -> float:
    """Wait until a condition of another process holds; return the seconds it took."""
    start = time.monotonic()
    while not is_true():
        assert time.monotonic() < start + timeout_s
        time.sleep(0.02)
    return time.monotonic() - start


def binary(name: str) -> Path:
    """Return a program of the client's package."""
    spec = importlib.util.find_spec("mooncake")
    assert spec is not None
    assert spec.submodule_search_locations
    path = Path(spec.submodule_search_locations[0]) / name
    if not os.access(path, os.X_OK):  # pip keeps no mode of a wheel's data
        path.chmod(0o755)
    return path
