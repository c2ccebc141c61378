# SPDX-License-Identifier: Apache-2.0
"""Checks of a model under its engine's arguments: groups, shards, sizes of values."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from kvxfer.cli.doctor.findings import Check, Finding, fault, note, ok, warning
from kvxfer.cli.doctor.pool_memory import (
    EVICTS_AT,
    allocated_bytes,
    full_share,
    watermark_below,
)
from kvxfer.cli.doctor.surroundings import Surroundings
from kvxfer.errors import ConfigError
from kvxfer.keys import MAX_HASH_BYTES, key_prefix
from kvxfer.stores.lmdb_ledger import LIMIT_SHARE, cost_bytes
from kvxfer.stores.lmdb_options import DEFAULT_CAPACITY_BYTES, LmdbOptions
from kvxfer.stores.lmdb_writer import LARGEST_VALUE_SHARE
from kvxfer.transfer.pieces import VALUE_ALIGN

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
WORST_WASTE = 0.25
PAGE_BYTES = 4096
KEY_BYTES = len(key_prefix("default", "m" * 32, "d" * 32, "g" * 16, 0, (0, 8))) + MAX_HASH_BYTES
"""Of a usual key: a hash of 32 bytes is 64 characters."""
NOT_DESCRIBED = "NotDescribedError"
"""Of ``vllm_specs.offline``, as the process that asks vLLM names it."""
_BY_SETTING = ("store_tp", "value_order", "staging_bytes")


def _folder(around: Surroundings) -> Iterator[Finding]:
    model = around.deployment.model
    if model is None or not Path(model).is_dir():
        return  # a name, which vLLM resolves
    folder = Path(model)
    try:
        json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        yield fault(
            f"{folder} has no config.json that can be read: {error}",
            "give the folder of a Hugging Face checkpoint, a snapshot's for one in the hub's cache",
        )
        return
    if not any(file.suffix in WEIGHT_SUFFIXES for file in folder.iterdir()):
        yield fault(
            f"{folder} has a config.json and no weights: keys name the content of the weights",
            'copy them there, or set "model_id" to a name that is the same in all engines',
        )
    else:
        yield ok(f"{folder} has a configuration and weights")


def _groups(around: Surroundings) -> Iterator[Finding]:
    answer = around.model
    if answer is None:
        yield note("no --model: nothing is said about cache groups and sizes")
    elif "error" not in answer:
        for group in _cached(answer):
            window = f", window {group['window_tokens']}" if group["window_tokens"] else ""
            yield ok(
                f"group {group['group']}: {group['kind']}, {len(group['layers'])} layers, blocks "
                f"of {group['block_tokens']} tokens{window}; a chunk is {group['shards']} value(s) "
                f"of {decimal(max(group['value_bytes']))}"
            )
    elif around.vllm_version is None or answer["kind"] == NOT_DESCRIBED:
        yield note(f"cache groups and sizes are not known: {answer['error']}")
    elif not _setting_of(answer):
        yield fault(
            f"an engine with these arguments does not start: {answer['kind']}: {answer['error']}",
            "change what the message names; docs/troubleshooting.md has the refusals",
        )


def _store_tp(around: Surroundings) -> Iterator[Finding]:
    yield from _refused(around, "store_tp")


def _value_order(around: Surroundings) -> Iterator[Finding]:
    yield from _refused(around, "value_order")
    if (answer := _described(around)) is not None:
        orders = {config.value_order for config in around.configs()}
        if "native" in orders:
            yield note(
                f"value_order native is {answer['value_order']} here; engines with another layout "
                "share only where all set the same value_order"
            )


def _staging(around: Surroundings) -> Iterator[Finding]:
    yield from _refused(around, "staging_bytes")
    if (answer := _described(around)) is None:
        return
    largest = max(_values(answer))
    for config in around.configs():
        num_slots = config.num_load_threads + config.num_save_threads + 1
        slot_bytes = config.staging_bytes // num_slots // PAGE_BYTES * PAGE_BYTES
        if slot_bytes < largest + VALUE_ALIGN:
            needed = (largest + VALUE_ALIGN + PAGE_BYTES) * num_slots
            yield fault(
                f"staging_bytes is {config.staging_bytes:,}: {num_slots} slots of {slot_bytes:,} "
                f"bytes cannot hold a value of {largest:,}",
                f'set "staging_bytes" to {needed} or more',
            )
        else:
            yield ok(f"{num_slots} staging slots of {decimal(slot_bytes)}")


def _size(around: Surroundings) -> Iterator[Finding]:
    if (answer := _described(around)) is None:
        return
    every = [group for group in _cached(answer) if group["kind"] == "full"]
    kept = [group for group in _cached(answer) if group["kind"] != "full"]
    if every:
        total = sum(1000 * sum(g["value_bytes"]) / g["block_tokens"] for g in every)
        yield ok(f"1,000 tokens of full attention are {decimal(int(total))} in the store")
    for group in kept:
        blocks = -(-(group["window_tokens"] or 0) // group["block_tokens"]) or 1
        total = blocks * sum(group["value_bytes"])
        yield ok(
            f"group {group['group']} ({group['kind']}) adds {decimal(total)} at each boundary that "
            "is kept, whatever the length"
        )


def _waste(around: Surroundings) -> Iterator[Finding]:
    if (answer := _described(around)) is None:
        return
    values = _values(answer)
    for uri in around.stores():
        if uri.scheme == "lmdb":
            yield _pages(values)
            yield from _largest_value(uri.text, _capacity(around, uri.text), max(values))
        elif uri.scheme == "mooncake":
            yield _rounding(values)


def _pages(values: Sequence[int]) -> Finding:
    """Return what an embedded store adds to the values."""
    spent = sum(cost_bytes(PAGE_BYTES, KEY_BYTES, size) for size in values)
    share = spent / sum(values) - 1
    text = f"whole pages and books add {share:.1%} to the values in the embedded store"
    if share > WORST_WASTE:
        return warning(text, "use larger blocks (--block-size), or fewer shards (store_tp)")
    return ok(text)


def _rounding(values: Sequence[int]) -> Finding:
    """Return what Mooncake's allocator adds to the values, and whether the master sees it."""
    share = full_share(values)
    largest = max(values)
    text = (
        f"Mooncake's allocator adds {1 / share - 1:.1%} to the values (one of {largest:,} bytes "
        f"takes {allocated_bytes(largest):,}): the pool is full when its master counts {share:.1%}"
    )
    if share >= EVICTS_AT:
        return ok(text)
    return warning(
        f"{text}, and evicts from {EVICTS_AT:.0%} by default: puts fail before it does",
        f"start mooncake_master with --eviction_high_watermark_ratio={watermark_below(share):g}, "
        "or use another --block-size",
    )


def _largest_value(text: str, capacity: int, largest: int) -> Iterator[Finding]:
    most = int(LIMIT_SHARE * capacity) // LARGEST_VALUE_SHARE
    if largest > most:
        yield fault(
            f"a value has {largest:,} bytes, {text} takes {most:,} at most: every save is refused",
            f"set capacity to {int(largest * LARGEST_VALUE_SHARE / LIMIT_SHARE) + 1} or more, "
            "better a hundred times that",
        )


def _capacity(around: Surroundings, text: str) -> int:
    """Return the capacity that a URI names, else the largest default."""
    for uri in around.stores():
        if uri.text == text:
            try:
                return LmdbOptions.from_uri(uri).capacity_bytes or DEFAULT_CAPACITY_BYTES
            except ConfigError:
                break  # the check of the URI says so
    return DEFAULT_CAPACITY_BYTES


def _described(around: Surroundings) -> dict[str, Any] | None:
    answer = around.model
    return None if answer is None or "error" in answer else answer


def _cached(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return [group for group in answer["groups"] if group["cacheable"]]


def _values(answer: dict[str, Any]) -> Sequence[int]:
    """Return the bytes of each value of one chunk of each group."""
    return [size for group in _cached(answer) for size in group["value_bytes"]]


def _setting_of(answer: dict[str, Any]) -> str | None:
    """Return which of our settings a refusal is about, by its first word."""
    first = answer["error"].partition(" ")[0]
    return first if first in _BY_SETTING else None


def _refused(around: Surroundings, setting: str) -> Iterator[Finding]:
    """Yield the refusal of the engine, where it is about ``setting``."""
    answer = around.model
    if answer is not None and "error" in answer and _setting_of(answer) == setting:
        text, _, way_out = answer["error"].rpartition("; ")
        yield fault(text or way_out, way_out if text else f"change {setting}")


CHECKS = (
    Check("model.folder", _folder),
    Check("model.groups", _groups),
    Check("model.store_tp", _store_tp),
    Check("model.value_order", _value_order),
    Check("model.staging", _staging),
    Check("model.size", _size),
    Check("model.waste", _waste),
)
