# SPDX-License-Identifier: Apache-2.0
"""A program that answers what only vLLM knows: about this installation, a model, a prompt.

    python -m kvxfer.cli.model_process < question.json > answer.json 2> log

A process of its own, because vLLM takes seconds to import, prints, and may end it. The question
has ``task`` and what it needs; the answer is one JSON object:

    install   -                             torch, GPU, CuPy, kernels, connector: facts or ``error``
    model     arguments                     cache groups, sizes and key prefixes
    explain   arguments, token_ids or text  the hit of a prompt now, and which chunks are stored

Where vLLM or kvxfer refuses, the answer has ``error`` and ``kind``, the exception's class.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from kvxfer.cli.engine_process import take_over_stdout
from kvxfer.cli.opened_store import open_existing
from kvxfer.errors import KvxferError, StoreError
from kvxfer.lookup import PackedHashes
from kvxfer.lookup.presence import StorePresence
from kvxfer.stores.checksums import SUM_SUFFIX

if TYPE_CHECKING:
    from kvxfer.keys import KeySpace
    from kvxfer.stores import Store
    from kvxfer.vllm_specs.offline import OfflineEngine

Json = dict[str, Any]


def main() -> None:
    """Answer the question on standard input."""
    answers = take_over_stdout()
    question = json.load(sys.stdin)
    tasks: dict[str, Callable[[Json], Json]] = {
        "install": _describe_install,
        "model": _describe_model,
        "explain": _explain,
    }
    try:
        answer = tasks[question["task"]](question)
    except Exception as error:  # noqa: BLE001  # whatever vLLM raises is the answer
        if not isinstance(error, KvxferError):
            sys.excepthook(*sys.exc_info())  # to the log
        answer = {"error": str(error), "kind": type(error).__name__}
    json.dump(answer, answers)
    answers.close()


# Installation


def _describe_install(question: Json) -> Json:
    return {
        "torch": _attempt(_describe_torch),
        "connector": _attempt(lambda: {"class": _connector_name()}),
        "cupy": _attempt(_describe_cupy),
        "kernels": _attempt(_load_kernels),
    }


def _attempt(describe: Callable[[], Json]) -> Json:
    try:
        return describe()
    except Exception as error:  # noqa: BLE001  # whatever a broken package raises is the answer
        return {"error": str(error), "kind": type(error).__name__}


def _connector_name() -> str:
    return str(importlib.import_module("kvxfer.connector").KVXferConnector.__name__)


def _describe_torch() -> Json:
    import torch  # noqa: PLC0415

    has_gpu = torch.cuda.is_available()
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        if has_gpu
        else [],
    }


def _describe_cupy() -> Json:
    from kvxfer.blocks.cuda_kernels import import_cupy  # noqa: PLC0415

    cupy = import_cupy()
    runtime = cupy.cuda.runtime
    return {
        "version": cupy.__version__,
        "runtime": runtime.runtimeGetVersion(),
        "driver": runtime.driverGetVersion(),
    }


def _load_kernels() -> Json:
    from kvxfer.blocks import cuda_kernels  # noqa: PLC0415

    return {"origin": cuda_kernels.load(0).origin}


# Model


def _describe_model(question: Json) -> Json:
    from kvxfer.vllm_specs.offline import describe_engine  # noqa: PLC0415

    engine = describe_engine(question["arguments"])
    facts, names = engine.facts, engine.names
    spaces, coordinator = _key_spaces(engine), facts.coordinator()
    return {
        "model": names.model,
        "digest": names.digest,
        "value_order": engine.layout.value_order,
        "block_tokens": facts.block_tokens,
        "hash_tokens": facts.hash_tokens,
        "align_tokens": facts.align_tokens,
        "num_ranks": facts.num_ranks,
        "num_stages": facts.pp_size,
        "staging_bytes": engine.config.staging_bytes,
        "num_slots": engine.config.num_load_threads + engine.config.num_save_threads + 1,
        "groups": [
            {
                "group": idx,
                "kind": group.kind,
                "block_tokens": group.block_tokens,
                "window_tokens": group.window_tokens,
                "cacheable": group.cacheable,
                "eagle_tokens": coordinator.eagle_tokens(idx),
                "layers": _layers(engine, idx),
                "shards": len(spaces.get(idx, ())),
                "value_bytes": [space.value_bytes for space in spaces.get(idx, ())],
            }
            for idx, group in enumerate(facts.groups)
        ],
    }


def _key_spaces(engine: OfflineEngine) -> dict[int, list[KeySpace]]:
    """Return what a chunk of each group consists of: the shards that any rank holds.

    That is what the ranks tell rank 0 at start-up (``KVXferHandshake``), the first rank's first.
    """
    from kvxfer.spaces import RankSpaces  # noqa: PLC0415  # imports vLLM

    spaces: dict[int, dict[bytes, KeySpace]] = {}
    for rank in engine.ranks:
        held = RankSpaces(engine.config.cache_prefix, rank.facts, rank.names, rank.layout).held
        for space in chain.from_iterable(held.values()):
            spaces.setdefault(space.group, {}).setdefault(space.prefix, space)
    return {group: list(by_prefix.values()) for group, by_prefix in spaces.items()}


def _layers(engine: OfflineEngine, group: int) -> list[str]:
    """Return the layers of a group, over all pipeline stages."""
    sets = chain.from_iterable(rank.facts.layer_sets for rank in engine.ranks)
    return list(dict.fromkeys(chain.from_iterable(s.layers for s in sets if s.group == group)))


# Prompt


class StoredKeys:
    """The keys that a store had when it was scanned; answers ``exists`` and leases nothing."""

    def __init__(self, keys: set[bytes], *, checksums: bool) -> None:
        self._keys, self._checksums = keys, checksums

    def exists(self, keys: list[bytes]) -> bytearray:
        """Return 1 for each key that is stored, with its checksum where engines want one."""
        return bytearray(self._holds(key) for key in keys)

    def _holds(self, key: bytes) -> bool:
        return key in self._keys and (not self._checksums or key + SUM_SUFFIX in self._keys)


def _explain(question: Json) -> Json:
    from kvxfer.vllm_specs.offline import describe_engine  # noqa: PLC0415

    arguments = question["arguments"]
    engine = describe_engine(arguments)
    token_ids = question.get("token_ids") or _tokens(arguments, question["text"])
    hashes = PackedHashes.pack(engine.block_hashes(token_ids))
    spaces = _key_spaces(engine)
    keys, trouble = _stored_keys(engine, spaces)
    stored = cast("Store", StoredKeys(keys, checksums=engine.config.checksums))
    presence = StorePresence(stored, spaces, hashes)
    coordinator = engine.facts.coordinator()
    explanation = coordinator.explain(len(token_ids), hashes, presence.exists)
    needed = coordinator.load_mask(explanation.hit_length)
    return {
        "store": engine.config.store,
        "store_trouble": trouble,
        "model": engine.names.model,
        "digest": engine.names.digest,
        "num_tokens": len(token_ids),
        "hit_tokens": explanation.hit_length,
        "cut": explanation.cut.name.lower(),
        "line": explanation.line,
        "groups": [
            {
                "group": idx,
                "kind": group.kind,
                "block_tokens": group.block_tokens,
                "eagle_tokens": coordinator.eagle_tokens(idx),
                "stored": _stored_blocks(engine, presence, idx, len(hashes)),
                "needed": [bool(flag) for flag in needed[idx]],
            }
            for idx, group in enumerate(engine.facts.groups)
            if group.cacheable
        ],
    }


def _stored_keys(
    engine: OfflineEngine, spaces: dict[int, list[KeySpace]]
) -> tuple[set[bytes], str | None]:
    """Return the keys of this model that the store has, and why none could be read."""
    prefixes = {space.prefix for space in chain.from_iterable(spaces.values())}
    try:
        store = open_existing(engine.config.store)
    except StoreError as error:
        return set(), str(error)
    try:
        return {value.key for prefix in sorted(prefixes) for value in store.scan(prefix)}, None
    finally:
        store.close()


def _stored_blocks(
    engine: OfflineEngine, presence: StorePresence, group: int, num_hashes: int
) -> list[bool]:
    """Return for each block of a group whether all of its shards are stored.

    Where hits end below the block: whether they are under any of the boundaries in it.
    """
    facts = engine.facts
    step = facts.groups[group].block_tokens // facts.hash_tokens
    first = 0 if facts.partial_hits else step - 1
    idx = np.arange(first, num_hashes, 1 if facts.partial_hits else step, dtype=np.int32)
    (flags,) = presence.exists([(group, idx)])
    stored = [False] * -(-num_hashes // step) if facts.partial_hits else [False] * len(idx)
    for end, flag in zip(idx, flags, strict=True):
        stored[int(end) // step] |= bool(flag)
    return stored


def _tokens(arguments: Json, text: str) -> list[int]:
    """Return the token ids of a text, as the model's own tokenizer gives them."""
    from transformers import AutoTokenizer  # noqa: PLC0415

    name = arguments.get("tokenizer") or arguments["model"]
    return [int(token) for token in AutoTokenizer.from_pretrained(name)(text)["input_ids"]]


if __name__ == "__main__":
    main()
