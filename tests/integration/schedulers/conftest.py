# SPDX-License-Identifier: Apache-2.0
"""Engines without a model, closed after each test."""

import numpy as np
import pytest

pytest.importorskip("vllm")
pytest.importorskip("torch")

from sched_engine import Engine
from sched_model import VOCABULARY


@pytest.fixture
def store_uri(tmp_path):
    return f"lmdb://{tmp_path}/store?capacity=64MiB"


@pytest.fixture
def make(store_uri):
    engines = []

    def make(uri=store_uri, **options):
        engines.append(Engine(uri, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def prompt():
    """Return prompts of different tokens."""
    random = np.random.default_rng(7)
    return lambda num_tokens: [int(t) for t in random.integers(2, VOCABULARY, num_tokens)]
