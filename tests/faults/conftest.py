# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the fault tests: an LMDB store, and real engines over faulty ones.

Engines are driven with the harness of the engine tests.
"""

import importlib.util
import sys
from pathlib import Path

import pytest

ENGINES = Path(__file__).parents[1] / "integration" / "engines"
sys.path.insert(0, str(ENGINES))

from engine_checks import watched_stores
from engine_faults import one_thread_each
from engine_harness import EnginePool

from kvxfer.stores import open_store


@pytest.fixture
def lmdb_store(tmp_path):
    store = open_store(f"lmdb://{tmp_path}/store?capacity=16MiB")
    yield store
    store.close()


@pytest.fixture(scope="module")
def engine_pool(tmp_path_factory):
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: pip install 'kvxfer[vllm]'")
    pool = EnginePool(tmp_path_factory.mktemp("engines"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in one_thread_each().items():
            patch.setenv(name, value)
        yield pool
    pool.kill_all()


@pytest.fixture(scope="module")
def new_store(tmp_path_factory):
    """Return a function that makes an empty store for engines."""
    yield from watched_stores(tmp_path_factory)
