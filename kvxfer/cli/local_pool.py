# SPDX-License-Identifier: Apache-2.0
"""A Mooncake pool of this host alone, for the length of one command: a master and some memory."""

from __future__ import annotations

import importlib.util
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kvxfer.errors import StoreError

HOST = "127.0.0.1"
START_TIMEOUT_S = 30.0
END_TIMEOUT_S = 10.0
LONGEST_LIFE_S = 3600
"""A server that its command could not end, being killed itself, ends by itself then."""
PAUSE_S = 0.02
_BOUNDED = (
    "import os, signal, sys; signal.alarm(int(sys.argv[1])); os.execv(sys.argv[2], sys.argv[2:])"
)
"""Becomes another program that an alarm, which outlasts that, ends."""


@contextmanager
def local_pool(folder: Path, segment_bytes: int) -> Iterator[str]:
    """Start both servers, yield the URI for engines, end the servers.

    Logs go to ``folder``. ``StoreError`` where the client is not installed or a server does not
    come up in time.
    """
    port, metrics_port = _free_ports(2)
    master = f"{HOST}:{port}"
    with ExitStack() as stack:
        command = [
            *(str(_master_program()), f"--rpc_port={port}", f"--rpc_address={HOST}"),
            *(f"--metrics_port={metrics_port}", f"--metrics_host={HOST}"),
        ]
        log = folder / "mooncake-master.log"
        process = stack.enter_context(_server(command, log))
        _wait(process, log, lambda: _accepts(port) and _accepts(metrics_port))
        uri = f"mooncake://{master}?protocol=tcp&hostname={HOST}&metrics_port={metrics_port}"
        owner = [sys.executable, "-m", "kvxfer.stores.mooncake_owner"]
        log = folder / "mooncake-owner.log"
        command = [*owner, f"{uri}&segment={segment_bytes}"]
        process = stack.enter_context(_server(command, log))
        _wait(process, log, lambda: b"are mounted" in log.read_bytes())
        yield f"{uri}&segment=0"


@contextmanager
def _server(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program during the block; its life is bounded whatever becomes of this process."""
    with log.open("wb") as log_file:
        process = subprocess.Popen(
            [sys.executable, "-c", _BOUNDED, str(LONGEST_LIFE_S), *command],
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=log_file,
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[bytes], log: Path, is_up: Callable[[], bool]) -> None:
    """Wait until a server is up; ``StoreError`` with the end of its log where it is not."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while not is_up():
        if process.poll() is not None or time.monotonic() > deadline:
            words = log.read_text(errors="replace").strip().splitlines()[-1:]
            raise StoreError(f"a server of Mooncake did not start: {''.join(words)} ({log})")
        time.sleep(PAUSE_S)


def _master_program() -> Path:
    """Return the master that the client's package brings, made executable where pip forgot."""
    spec = importlib.util.find_spec("mooncake")
    folders = spec.submodule_search_locations if spec is not None else None
    path = Path((folders or [""])[0]) / "mooncake_master"
    if not folders or not path.exists():
        raise StoreError(
            "--store mooncake starts a master, and the Mooncake client is not installed: "
            "pip install mooncake-transfer-engine-non-cuda (or another build of it)"
        )
    mode = path.stat().st_mode
    if not mode & stat.S_IXUSR:
        path.chmod(mode | stat.S_IXUSR)
    return path


def _free_ports(count: int) -> list[int]:
    """Return ports that nobody has now, all different."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind((HOST, 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def _accepts(port: int) -> bool:
    try:
        socket.create_connection((HOST, port), 1).close()
    except OSError:
        return False
    return True
