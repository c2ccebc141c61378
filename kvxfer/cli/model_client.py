# SPDX-License-Identifier: Apache-2.0
"""Asks ``model_process`` and returns its answer, whatever becomes of that process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from kvxfer.errors import KvxferError

TIMEOUT_S = 300.0
"""A cold import of torch and vLLM from a slow disk takes a minute."""
PROGRAM = (sys.executable, "-m", "kvxfer.cli.model_process")
LAST_WORDS_CHARS = 400
_QUIET = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "ERROR"}


class ModelProcessError(KvxferError, RuntimeError):
    """The process ended without an answer."""


def ask(
    question: Mapping[str, object],
    environ: Mapping[str, str] = os.environ,
    *,
    program: Sequence[str] = PROGRAM,
    timeout_s: float = TIMEOUT_S,
) -> dict[str, Any]:
    """Return the answer to a question of ``model_process``, ``error`` among it where it refuses.

    ``ModelProcessError`` with the end of its log where it crashed or took longer.
    """
    with tempfile.TemporaryFile() as log:
        try:
            done = subprocess.run(
                program,
                input=json.dumps(question).encode(),
                stdout=subprocess.PIPE,
                stderr=log,
                env={**environ, **_QUIET},
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ModelProcessError(f"vLLM did not answer within {timeout_s:g} s") from error
        try:
            answer: dict[str, Any] = json.loads(done.stdout)
        except ValueError as error:
            log.seek(0)
            words = log.read().decode(errors="replace").strip()[-LAST_WORDS_CHARS:]
            raise ModelProcessError(
                f"the process that asks vLLM ended with {done.returncode}: {words}"
            ) from error
    return answer
