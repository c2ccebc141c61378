# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the engine tests; engines and one store are shared by the whole session."""

import importlib.util
import zlib

import pytest
from engine_checks import watched_stores
from engine_harness import EnginePool, EngineSettings
from engine_models import Prompts, write_tiny_llama


@pytest.fixture(scope="session")
def engine_pool(tmp_path_factory):
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: pip install 'kvxfer[vllm]'")
    pool = EnginePool(tmp_path_factory.mktemp("engines"))
    yield pool
    pool.kill_all()


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def new_store(tmp_path_factory):
    """Return a function that makes an empty store."""
    yield from watched_stores(tmp_path_factory)


@pytest.fixture(scope="session")
def store(new_store):
    """Return the store that the tests share; their prompts differ."""
    return new_store()


@pytest.fixture(scope="session")
def settings(tiny_llama, store):
    """Return the settings from which tests make theirs: one rank, on the shared store."""
    return EngineSettings(model=tiny_llama, store=store.uri)


@pytest.fixture
def engine(engine_pool, settings):
    return engine_pool.get(settings)


@pytest.fixture
def prompts(request):
    """Return a source of prompts that no other test draws."""
    return Prompts(zlib.crc32(request.node.nodeid.encode()))
