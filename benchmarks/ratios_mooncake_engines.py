# SPDX-License-Identifier: Apache-2.0
"""Print lookup, load and first-token times of engines with kvxfer and the in-tree connector.

    python benchmarks/ratios_mooncake_engines.py

Two engine processes of one model, one with each connector, on one real Mooncake master whose
segment another process owns (TCP on loopback). Each saves a prompt once and then loads it again
and again, in turns with the other; the local cache is empty each time, and every first token is
the cold one. The model is small (4 layers, 4 KiB of cache a token, blocks of 128 tokens), so that
a CPU computes the longest prompt: the times of loads say something of the connectors, those of
cold prompts nothing of real models.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from config import IS_SMOKE
from mooncake_engines import BLOCK_TOKENS, CONNECTORS, Engine
from mooncake_sides import MIB, TIMEOUT_S, servers

from kvxfer.cli.checkpoint import LlamaShape, write_llama
from kvxfer.errors import StoreError
from kvxfer.stores.mooncake_metrics import read_occupancy
from kvxfer.stores.mooncake_native import bound_client, import_client

PAIRS = {256: 2} if IS_SMOKE else {2048: 11, 8192: 7, 32768: 5}
"""Tokens that are loaded, and how often each engine loads them. One token more is computed."""
HOST = "127.0.0.1"
SHAPE = LlamaShape(num_kv_heads=4, max_tokens=max(PAIRS) + BLOCK_TOKENS)
SEGMENT_BYTES = 3 * sum(PAIRS) * SHAPE.kv_token_bytes + 64 * MIB
QUIET_S = 1.0


def main() -> None:
    try:
        import_client()
    except StoreError as error:
        print(f"left out: {error}")
        return
    bound_client(TIMEOUT_S)
    with tempfile.TemporaryDirectory(prefix="kvxfer-bench-") as folder:
        model = Path(folder, "model")
        write_llama(model, SHAPE)
        with (
            servers(Path(folder), SEGMENT_BYTES, lease_ms=10_000) as pool,
            engines(folder, str(model), HOST, pool.master.port) as both,
        ):
            print(f"{'tokens':>7}{'pairs':>6}  {'':9}{'kvxfer ms':>26}{'in-tree ms':>26}  ratio")
            for num_tokens, num_pairs in PAIRS.items():
                print_length(both, pool.master.metrics_port, num_tokens, num_pairs)


@contextlib.contextmanager
def engines(folder: str, model: str, host: str, port: int) -> Iterator[dict[str, Engine]]:
    """Yield an engine of each connector, both with the in-tree connector's own settings file."""
    settings = Path(folder, "mooncake.json")
    fields = {"metadata_server": "P2PHANDSHAKE", "protocol": "tcp", "device_name": ""}
    fields |= {"mode": "standalone-store", "master_server_address": f"{host}:{port}"}
    sizes = {"global_segment_size": 0, "local_buffer_size": 64 * MIB}
    settings.write_text(json.dumps(fields | sizes))
    environment = {
        "MOONCAKE_CONFIG_PATH": str(settings),
        "MOONCAKE_REQUESTER_LOCAL_HOSTNAME": host,
    }
    with contextlib.ExitStack() as stack:
        yield {
            impl: stack.enter_context(Engine(impl, model, SHAPE.max_tokens, environment))
            for impl in CONNECTORS
        }


def print_length(
    both: dict[str, Engine], metrics_port: int, num_tokens: int, num_pairs: int
) -> None:
    """Save a prompt with both, load it in turns, print medians and the ratios of pairs."""
    random = np.random.default_rng(num_tokens)
    prompt = random.integers(3, SHAPE.vocab_size, num_tokens + 1).tolist()
    cold = {impl: engine.turn(prompt) for impl, engine in both.items()}
    settle(metrics_port)
    turns: dict[str, list[dict[str, Any]]] = {impl: [] for impl in both}
    for pair in range(num_pairs):
        for impl in sorted(both, reverse=pair % 2 == 1):
            turn = both[impl].turn(prompt)
            assert turn["token"] == cold[impl]["token"] == cold["kvxfer"]["token"]
            turns[impl].append(turn)
    for name in ("lookup", "held", "load", "first_token"):
        columns = [[turn[name] * 1e3 for turn in turns[impl]] for impl in CONNECTORS]
        ratios = [theirs / ours if ours else 0.0 for ours, theirs in zip(*columns, strict=True)]
        cells = "".join(f"{spread(column):>26}" for column in columns)
        print(f"{num_tokens + 1:>7}{num_pairs:>6}  {name:11}{cells}  {spread(ratios)}", flush=True)
    for impl in both:
        loaded = [turn["hit_tokens"] for turn in turns[impl] if not turn["failed"]]
        print(
            f"{'':15}{impl}: cold {cold[impl]['first_token'] * 1e3:.0f} ms, "
            f"{loaded.count(num_tokens)} of {num_pairs} loaded all {num_tokens} tokens",
            flush=True,
        )


def settle(metrics_port: int) -> None:
    """Wait until no value has come for a while: saves go on after the first token."""
    found, since = -1, time.monotonic()
    while time.monotonic() < since + QUIET_S:
        if (now := read_occupancy(HOST, metrics_port).num_values) != found:
            found, since = now, time.monotonic()
        time.sleep(0.02)


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} [{min(values):.2f}, {max(values):.2f}]"


if __name__ == "__main__":
    main()
