# SPDX-License-Identifier: Apache-2.0
"""``kvxfer stats`` on the metrics page of vLLM's own server: the numbers of a scripted run."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request

import pytest
from engine_harness import START_TIMEOUT_S, EngineSettings
from engine_models import BLOCK_TOKENS, TINY
from mooncake_servers import BOUNDED, HOST, free_port, wait_until

pytest.importorskip("vllm")
from kvxfer.cli.engine_job import engine_environment

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

LIFE_S = 600
"""The longest life of the server, whatever becomes of the test."""
BLOCKS = 4
HIT = BLOCKS * BLOCK_TOKENS
LONG = HIT + 1
SHORT = BLOCK_TOKENS - 1
MOST_FLUSHES = 10
TIMES = ("lookup, mean", "loaded, inside store calls", "saved, inside store calls")


class Server:
    """A vLLM server that takes token ids; its core is a process of its own."""

    def __init__(self, settings, folder):
        self.url = f"http://{HOST}:{free_port()}"
        self._log = folder / "server.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-c", BOUNDED, str(LIFE_S)),
                    *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
                    *("--host", HOST, "--port", self.url.rpartition(":")[2], "--tokens-only"),
                    *command_line(settings.arguments()),
                ],
                stdout=log,
                stderr=log,
                env=engine_environment(os.environ)
                | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_SERVER_DEV_MODE": "1"},
                process_group=0,  # not a session: see ``engine_harness.Engine``
            )
        try:
            wait_until(self._answers, START_TIMEOUT_S)
        except AssertionError:
            self.kill()
            raise

    def generate(self, prompt):
        """Compute a prompt, and two tokens."""
        sampling = {"max_tokens": 2, "temperature": 0.0, "ignore_eos": True}
        body = {"token_ids": prompt, "sampling_params": sampling}
        self._post("/inference/v1/generate", body)

    def reset_local_cache(self):
        """Empty vLLM's own prefix cache; the store stays."""
        self._post("/reset_prefix_cache", {})

    def kill(self):
        """End its processes at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _post(self, path, body):
        data = json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert answer.status == 200

    def _answers(self):
        """Whether it has started; fails where it has ended."""
        assert self._process.poll() is None, self._log.read_text(errors="replace")[-4000:]
        try:
            urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
        except OSError:
            return False
        return True


def command_line(arguments):
    """Return arguments of ``vllm.LLM`` as ``vllm serve`` takes them."""
    for name, value in arguments.items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            yield option
        elif value is not False:
            yield from (option, json.dumps(value) if isinstance(value, dict) else str(value))


@pytest.fixture(scope="module")
def store(new_store):
    return new_store()


@pytest.fixture(scope="module")
def server(tiny_llama, store, tmp_path_factory):
    settings = EngineSettings(model=tiny_llama, store=store.uri, connector="kvxfer.connector")
    server = Server(settings, tmp_path_factory.mktemp("server"))
    yield server
    server.kill()


def stats(server, *arguments):
    """Run the command on the server's page and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "kvxfer.cli", "stats", "--url", f"{server.url}/metrics", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"COLUMNS": "100"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def expected(num_flushes):
    """Return every number but times and what the store spends on its books."""
    wanted = 2 * LONG + num_flushes * SHORT
    num_bytes = HIT * TINY.kv_token_bytes
    return {
        "tokens wanted": wanted,
        "tokens hit": HIT,
        "hit rate": HIT / wanted,
        "tokens missed: last_block": 2,
        "tokens missed: not_stored": HIT,
        "tokens missed: too_short": num_flushes * SHORT,
        "lookups: hit": 1,
        "lookups: miss": 1,
        "loaded": num_bytes,
        "saved": num_bytes,
        "loads waiting": 0,
        "saves waiting": 0,
        "in flight": 0,
        "blocks pinned": 0,
        "store, values": BLOCKS,
    }


def test_stats_of_a_live_server_are_those_of_a_scripted_run(server, store, prompts):
    prompt = prompts.draw(LONG)
    server.generate(prompt)
    store.wait_for(BLOCKS)
    server.reset_local_cache()
    server.generate(prompt)
    for num_flushes in range(1, MOST_FLUSHES):  # short prompts: their steps tell of the rest
        server.generate(prompts.draw(SHORT))
        found = json.loads(stats(server, "--json"))
        times = {title: found.pop(title, 0.0) for title in TIMES}
        used, full = found.pop("store, used"), found.pop("store, full")
        if found == expected(num_flushes):
            break
    assert found == expected(num_flushes)
    assert all(number > 0 for number in times.values())
    assert times["lookup, mean"] < 60
    assert HIT * TINY.kv_token_bytes < used < 2 * HIT * TINY.kv_token_bytes
    assert 0 < full < 0.01
    shown = stats(server)
    assert re.search(rf"tokens hit +│ +{HIT} │", shown)
    assert re.search(r"loaded +│ +262\.1 kB │", shown)
    assert "keys of" not in shown  # no failure of a load, a save or a key


def heed_interrupts():
    """Undo what a shell does to programs in its background, the tests' own process among them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_stats_of_a_live_server_watch_until_they_are_interrupted(server):
    command = [sys.executable, "-m", "kvxfer.cli", "stats", "--url", f"{server.url}/metrics"]
    with subprocess.Popen(
        [*command, "--watch", "0.1"],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"COLUMNS": "100", "FORCE_COLOR": "1"},  # as on a terminal: shown at once
        preexec_fn=heed_interrupts,
    ) as process:
        assert process.stdout is not None
        shown = ""
        while "a second" not in shown:  # the second look
            line = process.stdout.readline()
            assert line, shown
            shown += line
        process.send_signal(signal.SIGINT)
        process.stdout.read()
    assert process.returncode == 0
