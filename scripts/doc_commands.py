# SPDX-License-Identifier: Apache-2.0
"""The page of all commands: each tried as a new user would, on a made-up machine, as it printed.

Commands run in a home of their own; what differs between two machines or two runs (paths, free
space, digests, Python's version) is replaced by words.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvxfer.cli.checkpoint import LlamaShape, write_llama
from kvxfer.cli.deployment import EXTRA, TRANSFER, default_transfer
from kvxfer.keys import key_prefix
from kvxfer.stores import open_store

HOME = "/home/you"
WIDTH = 100
TIMEOUT_S = 300.0
PROMPT_TOKENS = 300
STORED_BLOCKS = 6
SCRIPTS = Path(__file__).resolve().parent

INTRODUCTION = (SCRIPTS / "doc_commands_intro.md").read_text(encoding="utf-8")
SECTIONS: dict[str, tuple[str, ...]] = {
    "On an empty machine": (
        "kvxfer --help",
        "kvxfer doctor",
        "kvxfer store list",
    ),
    "With something wrong": (
        "kvxfer doctor --config wrong.json",
        "kvxfer demo --prompts 0",
        "kvxfer demo --model org/name",
        "kvxfer explain --prompt hello",
        "kvxfer store list --store lmdb:///tmp/kv?capacty=8GiB",
        "kvxfer stats --url http://127.0.0.1:1/metrics",
        "kvxfer store list --store mooncake://127.0.0.1:1?metrics_port=1",
    ),
    "A model and its engine": (
        "cat engine.json",
        "kvxfer doctor --config engine.json --model model",
        "kvxfer explain --config engine.json --model model --token-ids prompt.json",
    ),
    "A store": (
        "kvxfer store list --store lmdb://$HOME/kv",
        "kvxfer stats --store lmdb://$HOME/kv",
        "kvxfer store size --store lmdb://$HOME/kv --prefix default/Qwen3-8B",
        "kvxfer store purge --store lmdb://$HOME/kv --prefix default/Qwen3-8B",
        "kvxfer store purge --store lmdb://$HOME/kv --prefix default/Qwen3-8B --yes",
    ),
}

_REPLACED = (
    (re.compile(r"\b[0-9a-f]{32}\b"), "<digest>"),
    (re.compile(r"Python 3\.1\d"), "Python 3.x"),
    (re.compile(r"takes [\d,]+ of [\d,]+ bytes free"), "takes <n> of <n> bytes free"),
    (re.compile(r"[\d,]+ are free"), "<n> are free"),
    (re.compile(r"/\S+/kvxfer(?=\n)"), "<runtime folder>"),
)


def commands_page() -> str:
    """Run every command and return the page."""
    with tempfile.TemporaryDirectory(prefix="kvx-", dir="/tmp") as folder:  # short: sockets
        home = Path(folder)
        environ = _environment(home)
        _furnish(home, environ)
        return INTRODUCTION + "".join(_sections(home, environ))


def _sections(home: Path, environ: Mapping[str, str]) -> Iterator[str]:
    for title, commands in SECTIONS.items():
        yield f"\n## {title}\n"
        for command in commands:
            yield f"\n```\n$ {command}\n{_run(command, home, environ)}```\n"


def _run(command: str, home: Path, environ: Mapping[str, str]) -> str:
    """Return what a command printed, with its exit code where that is not 0."""
    words = [word.replace("$HOME", str(home)) for word in shlex.split(command)]
    if words[0] == "kvxfer":
        words[:1] = [sys.executable, "-m", "kvxfer.cli"]
    done = subprocess.run(
        words,
        cwd=home,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=TIMEOUT_S,
        text=True,
        check=False,
    )
    output = _plain(done.stdout, home)
    return output + (f"(exit code {done.returncode})\n" if done.returncode else "")


def _plain(text: str, home: Path) -> str:
    text = text.replace(str(home), HOME).replace("python -m kvxfer.cli", "kvxfer")
    for pattern, words in _REPLACED:
        text = pattern.sub(words, text)
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


def _environment(home: Path) -> dict[str, str]:
    """Return the environment of the commands: nothing of this user's, and a terminal's width."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MOONCAKE_", "KVXFER_", "XDG_", "FORCE_COLOR", "GITHUB_"))
    }
    own = {"HOME": str(home), "XDG_RUNTIME_DIR": str(home), "COLUMNS": f"{WIDTH}"}
    quiet = {"NO_COLOR": "1", "TERM": "dumb", "TERMINAL_WIDTH": f"{WIDTH}", "CI": ""}
    return {**kept, **own, **quiet, "HF_HUB_OFFLINE": "1", "VLLM_HOST_IP": "127.0.0.1"}


def _furnish(home: Path, environ: Mapping[str, str]) -> None:
    """Put into the home: a model, its engine's configuration, a prompt, two stores."""
    write_llama(home / "model", LlamaShape())
    transfer = default_transfer()
    transfer[EXTRA] = {"store": f"lmdb://{home}/engine-kv?capacity=64MiB", "model_id": "tiny"}
    engine = {"dtype": "float32", "block_size": 32, TRANSFER: transfer}
    (home / "engine.json").write_text(json.dumps(engine, indent=1))
    (home / "prompt.json").write_text(json.dumps(list(range(3, 3 + PROMPT_TOKENS))))
    wrong = {**default_transfer(), EXTRA: {"store_pt": 2, "store": "lmdb:///dev/null/kv"}}
    del wrong["kv_load_failure_policy"]
    (home / "wrong.json").write_text(json.dumps(wrong))
    _fill_store(f"lmdb://{home}/kv?capacity=64MiB")
    subprocess.run(
        [sys.executable, str(SCRIPTS / "doc_prompt.py"), str(STORED_BLOCKS)],
        cwd=home,
        env=environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=TIMEOUT_S,
        check=True,
    )


def _fill_store(uri: str) -> None:
    """Store what two models might have left."""
    store = open_store(uri)
    for model, num_values in (("Llama-3.1-8B", 24), ("Qwen3-8B", 8)):
        for heads in ((0, 4), (4, 8)):
            start = key_prefix("default", model, "5" * 32, "a" * 16, 0, heads)
            keys = [start + b"%064x" % idx for idx in range(num_values)]
            store.put_from(keys, [memoryview(bytes(1 << 16)) for _ in keys])
    store.close()
