# SPDX-License-Identifier: Apache-2.0
"""The two lookup channels of the benchmarks: a client here, its server in a process of its own.

A server gives the same answer to everything (``fixed``), or has its side's own lookup behind it, on
a stub store (``lookup_sides.CASES``): the whole way from the scheduler's question to its answer.
Run as a program, this file is the server.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from config import SIZES
from lookup_sides import side_of

from kvxfer.lookup import Endpoint, LookupClient, LookupServer

FIXED = "fixed"
FIXED_HIT_LENGTH = 512
WAIT_S = 60


class KvxferChannel:
    """Our client, under the names that the benchmarks use for both."""

    def __init__(self, folder):
        self.client = LookupClient(Endpoint.for_engine("bench", folder=folder), timeout_s=WAIT_S)
        self.discard, self.close = self.client.discard, self.client.close

    def ask(self, key, num_tokens, hashes):
        return self.client.lookup(key, num_tokens, hashes)

    def look_up(self, key, num_tokens, hashes):
        return self.client.lookup(key, num_tokens, hashes, blocking=True).hit_length


class UpstreamChannel:
    """The in-tree connector's client."""

    def __init__(self, folder):
        self.client = upstream(folder).LookupKeyClient(upstream_config())
        self.discard, self.close = self.client.discard, self.client.close

    def ask(self, key, num_tokens, hashes):
        return self.client.lookup(key, num_tokens, hashes, non_block=True)

    def look_up(self, key, num_tokens, hashes):
        return self.client.lookup(key, num_tokens, hashes).hit_length


CHANNELS = {"kvxfer": KvxferChannel, "upstream": UpstreamChannel}


def upstream(folder):
    """Return the in-tree module, its sockets going to ``folder``."""
    os.environ["VLLM_RPC_BASE_PATH"] = str(folder)
    return pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker")


def upstream_config():
    """Return what the in-tree pair reads of a VllmConfig."""
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}),
        parallel_config=SimpleNamespace(data_parallel_index=0),
    )


@contextlib.contextmanager
def open_channel(impl, answers):
    """Yield a side's client, its server started; ``server_pid`` is the process of the latter."""
    folder = Path(tempfile.mkdtemp(prefix="kvx"))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        if impl == "upstream":
            upstream(folder)  # skips, where there is no vLLM, before a server is started
        process = stack.enter_context(_server_process(impl, folder, answers))
        client = stack.enter_context(contextlib.closing(CHANNELS[impl](folder)))
        client.server_pid = process.pid
        yield client


@contextlib.contextmanager
def _server_process(impl, folder, answers):
    """Run a server in a process of its own."""
    process = subprocess.Popen(
        [sys.executable, __file__, impl, str(folder), answers],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        while (line := process.stdout.readline()) != b"ready\n":  # vLLM prints, too
            assert line, f"the {impl} server did not start"
        yield process
    finally:
        process.kill()
        process.wait(WAIT_S)
        process.stdin.close()
        process.stdout.close()


def serve(impl, folder, answers):
    """Answer every lookup until stdin ends; say "ready" first."""
    server = {"kvxfer": _kvxfer_server, "upstream": _upstream_server}[impl](folder, answers)
    print("ready", flush=True)
    sys.stdin.read()
    server.close()


def _kvxfer_server(folder, answers):
    if answers == FIXED:
        on_lookup = lambda *_: (FIXED_HIT_LENGTH, [])  # noqa: E731
    else:
        side = side_of("kvxfer", answers)

        def on_lookup(num_tokens, hashes):
            answer = side.look_up(num_tokens, hashes)
            return answer.hit_length, answer.tail_boundaries

    return LookupServer(Endpoint.for_engine("bench", folder=folder), on_lookup, lambda *_: True)


def _upstream_server(folder, answers):
    module = upstream(folder)
    if answers == FIXED:
        answer = module.MooncakeLookupResult(FIXED_HIT_LENGTH)
        worker = SimpleNamespace(lookup=lambda *_: answer)
    else:
        worker = side_of("upstream", answers).worker
    return module.LookupKeyServer(worker, upstream_config())


def random_hashes(num_tokens):
    """Return the block hashes of a prompt, as vLLM keeps them: a list of bytes."""
    return [os.urandom(SIZES.hash_bytes) for _ in range(num_tokens // SIZES.block_tokens)]


if __name__ == "__main__":
    serve(*sys.argv[1:])
