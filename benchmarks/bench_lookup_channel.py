# SPDX-License-Identifier: Apache-2.0
"""The lookup channel beside the in-tree connector's: same stub answer, servers in own processes.

``bench_round_trip`` is a whole lookup, question to answer. ``bench_ask`` is what the scheduler's
step pays for asking without waiting, beside the floor that nobody can avoid: joining the hashes.
``bench_poll`` is what each later step pays while there is no answer.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from config import SIZES

from kvxfer.lookup import Endpoint, LookupClient, LookupServer

HIT_LENGTH = 512
WAIT_S = 60
PROMPTS = sorted({1_024, SIZES.prompt_tokens})


class KvxferChannel:
    """Our client, under the names that this file uses for both."""

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


# The in-tree pair leaves its contexts to the garbage collector, which warns whoever runs then.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*unclosed.*:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
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


def serve(impl, folder):
    """Answer every lookup with ``HIT_LENGTH`` until stdin ends; say "ready" first."""
    if impl == "kvxfer":
        endpoint = Endpoint.for_engine("bench", folder=folder)
        server = LookupServer(endpoint, lambda *_: (HIT_LENGTH, []), lambda *_: True)
    else:
        module = upstream(folder)
        answer = module.MooncakeLookupResult(HIT_LENGTH)
        stub = SimpleNamespace(lookup=lambda *_: answer)
        server = module.LookupKeyServer(stub, upstream_config())
    print("ready", flush=True)
    sys.stdin.read()
    server.close()


@contextlib.contextmanager
def server_process(impl, folder):
    """Run a server in a process of its own."""
    process = subprocess.Popen(
        [sys.executable, __file__, impl, str(folder)],
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


@pytest.fixture(scope="module", params=CHANNELS, ids="impl={}".format)
def impl(request):
    return request.param


@pytest.fixture(scope="module")
def channel(impl):
    """A client of the implementation and its server, warmed up by one lookup."""
    folder = Path(tempfile.mkdtemp(prefix="kvx"))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        if impl == "upstream":
            upstream(folder)  # skips, where there is no vLLM, before a server is started
        process = stack.enter_context(server_process(impl, folder))
        client = stack.enter_context(contextlib.closing(CHANNELS[impl](folder)))
        assert client.look_up("warm-up", 1_024, hashes_of(1_024)) == HIT_LENGTH
        client.server_pid = process.pid
        yield client


def hashes_of(num_tokens):
    """Return the block hashes of a prompt, as vLLM keeps them: a list of bytes."""
    return [os.urandom(SIZES.hash_bytes) for _ in range(num_tokens // SIZES.block_tokens)]


@pytest.mark.benchmark(group="lookup.round_trip", min_rounds=SIZES.min_rounds)
@pytest.mark.parametrize("num_tokens", PROMPTS, ids="tokens={}".format)
def bench_round_trip(benchmark, channel, impl, num_tokens):
    hashes = hashes_of(num_tokens)
    benchmark.extra_info.update(bytes_moved=len(hashes) * SIZES.hash_bytes)
    assert benchmark(channel.look_up, "request", num_tokens, hashes) == HIT_LENGTH


@pytest.mark.benchmark(group="lookup.ask")
@pytest.mark.parametrize("num_tokens", PROMPTS, ids="tokens={}".format)
def bench_ask(benchmark, channel, impl, num_tokens):
    hashes = hashes_of(num_tokens)

    def settle():
        assert channel.look_up("asked", num_tokens, hashes) == HIT_LENGTH

    asked = benchmark.pedantic(
        channel.ask,
        args=("asked", num_tokens, hashes),
        setup=settle,
        rounds=SIZES.min_rounds * 20,
    )
    assert asked is None
    settle()


@pytest.mark.benchmark(group="lookup.ask")
@pytest.mark.parametrize("num_tokens", PROMPTS, ids="tokens={}".format)
def bench_ask_floor(benchmark, num_tokens):
    hashes = hashes_of(num_tokens)
    assert len(benchmark(b"".join, hashes)) == len(hashes) * SIZES.hash_bytes


@pytest.mark.benchmark(group="lookup.poll")
def bench_poll(benchmark, channel, impl):
    hashes = hashes_of(1_024)
    os.kill(channel.server_pid, signal.SIGSTOP)
    os.waitpid(channel.server_pid, os.WUNTRACED)  # until it has stopped
    try:
        assert channel.ask("polled", 1_024, hashes) is None
        assert benchmark(channel.ask, "polled", 1_024, hashes) is None
    finally:
        os.kill(channel.server_pid, signal.SIGCONT)
        channel.look_up("polled", 1_024, hashes)


if __name__ == "__main__":
    serve(*sys.argv[1:])
