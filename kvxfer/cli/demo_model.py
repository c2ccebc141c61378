# SPDX-License-Identifier: Apache-2.0
"""What the demo has to know of a model: where it lies, its vocabulary, how long prompts may be."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvxfer.cli.checkpoint import DEMO_SHAPE, write_llama
from kvxfer.cli.engine_job import BLOCK_TOKENS, EngineJob, engine_environment
from kvxfer.cli.model_client import ask
from kvxfer.errors import ConfigError

OUTPUT_TOKENS = 16
DEFAULT_PROMPT_TOKENS = 1500
MIN_PROMPT_TOKENS = BLOCK_TOKENS + 1
"""Of any model: one block to load and, as always, one token to compute."""
FIRST_TOKEN = 3
"""Prompts have none of the ids below, which models mostly keep for padding, begin and end."""
MOST_DESCRIBED_TOKENS = 8192
"""Longest sequence of the engine that is described; blocks do not depend on it."""
LENGTH_NAMES = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
    *("model_max_length", "max_sequence_length", "max_seq_length", "seq_len"),
)
"""By which configurations name the longest sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoModel:
    """A checkpoint as the demo sees it.

    ``longest``: tokens of its longest sequence, in whole blocks, which is how engines of the demo
    are sized; None where its configuration names none.
    ``hit_tokens``: hits end at multiples of it. ``groups``: (tokens of a block, bytes of a chunk)
    of each cache group.
    """

    folder: Path
    dtype: str
    vocab_size: int
    longest: int | None
    hit_tokens: int
    groups: Sequence[tuple[int, int]]

    def prompt_tokens(self, asked: int | None) -> int:
        """Return the length of prompts; ``ConfigError`` where none, or not that one, can be.

        By default long enough for two boundaries, as far as the model's length allows.
        """
        least = max(self.hit_tokens + 1, MIN_PROMPT_TOKENS)
        most = None if self.longest is None else self.longest - OUTPUT_TOKENS
        if most is not None and most < least:
            raise ConfigError(
                f"sequences of {self.folder} have {self.longest:,} tokens at most, and its hits "
                f"end every {self.hit_tokens:,}: nothing could be loaded"
            )
        if asked is None:
            wanted = max(DEFAULT_PROMPT_TOKENS, 2 * self.hit_tokens + 1)
            return wanted if most is None else min(wanted, most)
        if asked < least:
            raise ConfigError(
                f"hits of {self.folder} end every {self.hit_tokens:,} tokens: --prompt-tokens "
                f"{asked} is too short, give {least} or more"
            )
        if most is not None and asked > most:
            raise ConfigError(
                f"sequences of {self.folder} have {self.longest:,} tokens at most: --prompt-tokens "
                f"{asked} is too long, {most} leave room for {OUTPUT_TOKENS} of output"
            )
        return asked

    def stored_bytes(self, num_tokens: int) -> int:
        """Return the most bytes that prompts of so many tokens leave in a store."""
        return sum((num_tokens // block + 1) * size for block, size in self.groups)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of the largest chunk."""
        return max(size for _, size in self.groups)


def make_model(folder: Path) -> DemoModel:
    """Write the demo's own model, a small Llama, into ``folder``."""
    write_llama(folder, DEMO_SHAPE)
    return DemoModel(
        folder=folder,
        dtype="float32",
        vocab_size=DEMO_SHAPE.vocab_size,
        longest=DEMO_SHAPE.max_tokens,
        hit_tokens=BLOCK_TOKENS,
        groups=[(BLOCK_TOKENS, BLOCK_TOKENS * DEMO_SHAPE.kv_token_bytes)],
    )


def find_model(name: str) -> Path:
    """Return the folder of a model: the folder itself, or a snapshot in the Hub's cache.

    ``ConfigError`` where there is none; nothing is downloaded.
    """
    folder = Path(name)
    if folder.is_dir():
        return folder.resolve()
    if folder.exists() or folder.is_absolute() or name.startswith((".", "~")):
        raise ConfigError(f"{name} is no folder; --model takes one with a Hugging Face checkpoint")
    try:
        from huggingface_hub import snapshot_download  # noqa: PLC0415  # vLLM brings it

        return Path(snapshot_download(name, local_files_only=True))
    except (ImportError, OSError, ValueError) as error:
        raise ConfigError(
            f"{name} is no folder, and no model of that name lies in the cache of the Hugging Face "
            f"Hub; nothing is downloaded here: hf download {name}"
        ) from error


def read_model(folder: Path, dtype: str) -> DemoModel:
    """Ask vLLM, in a process of its own, how a model is cached.

    ``ConfigError`` where it has no configuration, where vLLM or kvxfer refuses it, and where
    nothing of it is cached by prefix. ``ModelProcessError`` where that process does not answer.
    """
    config = _read_config(folder)
    vocab_size, longest = _vocab_size(folder, config), _longest(config)
    answer = ask(_question(folder, dtype, longest), engine_environment(os.environ))
    if "error" in answer:
        names = ", ".join(config.get("architectures") or ["no architecture named"])
        raise ConfigError(
            f"vLLM does not serve {folder} ({names}) with kvxfer: {answer['kind']}: "
            f"{_sentence(answer['error'])}"
        )
    groups = [group for group in answer["groups"] if group["cacheable"]]
    if not groups:
        kinds = ", ".join(sorted({group["kind"] for group in answer["groups"]})) or "none"
        raise ConfigError(
            f"vLLM caches nothing of {folder} by prefix (cache groups: {kinds}): there is nothing "
            "that another engine could load"
        )
    return DemoModel(
        folder=folder,
        dtype=dtype,
        vocab_size=vocab_size,
        longest=longest,
        hit_tokens=answer["align_tokens"],
        groups=[(group["block_tokens"], sum(group["value_bytes"])) for group in groups],
    )


def _read_config(folder: Path) -> dict[str, Any]:
    """Return the configuration; of a model of text and more with the part about text."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        return {**config, **(config.get("text_config") or {})}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"{path} cannot be read ({error}); --model takes a folder with a Hugging Face "
            "checkpoint (config.json and safetensors)"
        ) from error


def _vocab_size(folder: Path, config: Mapping[str, Any]) -> int:
    found = config.get("vocab_size")
    if not isinstance(found, int) or found <= FIRST_TOKEN:
        raise ConfigError(f"{folder / 'config.json'} has no vocab_size: no prompt can be made")
    return found


def _longest(config: Mapping[str, Any]) -> int | None:
    found = [config[name] for name in LENGTH_NAMES if isinstance(config.get(name), int)]
    return min(found) // BLOCK_TOKENS * BLOCK_TOKENS if found else None


def _question(folder: Path, dtype: str, longest: int | None) -> dict[str, object]:
    num_tokens = min(longest or MOST_DESCRIBED_TOKENS, MOST_DESCRIBED_TOKENS) - OUTPUT_TOKENS
    job = EngineJob(
        model=str(folder),
        dtype=dtype,
        connector_settings={},
        prompts=[[FIRST_TOKEN] * max(num_tokens, 1)],
        output_tokens=OUTPUT_TOKENS,
    )
    return {"task": "model", "arguments": job.engine_arguments}


def _sentence(error: str) -> str:
    """Return what an error says, without what pydantic puts around it and advice at length."""
    text = re.sub(r"^\d+ validation errors? for \w+\n\s*Value error, ", "", error)
    return " ".join(text.partition("\n\n")[0].partition(" [type=")[0].split())
