# SPDX-License-Identifier: Apache-2.0
"""``kvxfer explain`` says, without an engine, what a real engine's lookup then finds."""

import contextlib
import json
import os
import subprocess
import sys

import pytest
from engine_families import FAMILIES, write_family
from engine_models import BLOCK_TOKENS, write_tiny_drafter

from kvxfer.stores import open_store

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
EXPLAINED = ("sliding_and_full", "hits_below_the_block")
NGRAM = (("method", "ngram"), ("num_speculative_tokens", 3), ("prompt_lookup_max", 3))
TARGET_BYTES = 4 * 2 * 2 * BLOCK_TOKENS * 32 * 4
"""A block of the tiny model: layers, K and V, heads, tokens, head size, bytes of a float32."""


def explain(settings, tokens, folder):
    """Run the command on the engine's own arguments, as a file, and return its answer."""
    config, ids = folder / "engine.json", folder / "ids.json"
    arguments = settings.arguments()
    arguments["kv_transfer_config"]["kv_connector_module_path"] = "kvxfer.connector"
    config.write_text(json.dumps(arguments))
    ids.write_text(json.dumps(tokens))
    command = ["explain", "--config", str(config), "--token-ids", str(ids), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "kvxfer.cli", *command],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def agree(engine, store, settings, prompts, folder):
    """Check a stored prompt, one that shares its start, and one that was never seen."""
    stored = prompts.draw(321)
    engine.generate([stored])
    store.settle()
    branch = stored[:200] + prompts.draw(100)
    for tokens in (stored, branch, prompts.draw(100)):
        answer = explain(settings, tokens, folder)
        engine.reset_local_cache()
        hits = engine.generate([tokens]).external_hits
        assert answer["hit_tokens"] == hits
        yield answer


def test_explain_agrees_with_an_engine_of_one_group(engine, settings, store, prompts, tmp_path):
    whole, branch, unknown = agree(engine, store, settings, prompts, tmp_path)
    assert (whole["hit_tokens"], whole["cut"]) == (320, "alignment")
    (group,) = whole["groups"]
    assert (group["stored"], group["needed"]) == ([True] * 10, [True] * 10)
    assert (branch["hit_tokens"], branch["cut"]) == (192, "missing")
    assert unknown["groups"][0]["stored"] == [False] * 3


def test_explain_of_drafts_without_a_model_finds_what_an_engine_without_drafts_stored(
    engine, settings, store, prompts, tmp_path
):
    """They have neither layers nor a block to give back."""
    prompt = prompts.draw(129)
    engine.generate([prompt])
    store.settle()
    drafting = settings.but(besides=(("speculative_config", NGRAM),))
    answer = explain(drafting, prompt, tmp_path)
    engine.reset_local_cache()
    assert answer["hit_tokens"] == engine.generate([prompt]).external_hits == 4 * BLOCK_TOKENS
    assert answer["groups"][0]["eagle_tokens"] == 0


@pytest.mark.parametrize("name", EXPLAINED)
def test_explain_agrees_with_an_engine_of_several_groups(
    engine_pool, settings, new_store, prompts, tmp_path, name
):
    family, store = FAMILIES[name], new_store()
    (folder := tmp_path / "model").mkdir()
    model = write_family(folder, family)
    own = settings.but(model=model, store=store.uri, besides=family.arguments)
    whole, *_ = agree(engine_pool.get(own), store, own, prompts, tmp_path)
    assert len(whole["groups"]) > 1
    assert whole["hit_tokens"] > 0


def test_explain_agrees_with_an_engine_of_two_ranks(
    engine_pool, settings, new_store, prompts, tmp_path
):
    store = new_store()
    own = settings.but(store=store.uri, tensor_parallel=2)
    whole, *_ = agree(engine_pool.get(own), store, own, prompts, tmp_path)
    assert whole["hit_tokens"] == 320


def agree_without(engine, store, settings, prompts, folder, is_lost):
    """Store a prompt, lose a value of its later half that ``is_lost`` picks, and check the hit.

    Return the answer and the token at which the block without the value begins.
    """
    prompt = prompts.draw(321)
    with contextlib.closing(open_store(store.uri)) as opened:
        before = stored_values(engine, store, opened, prompt[:161])
        later = stored_values(engine, store, opened, prompt) - before
        opened.remove([next(value.key for value in sorted(later) if is_lost(value))])
    answer = explain(settings, prompt, folder)
    engine.reset_local_cache()
    assert answer["hit_tokens"] == engine.generate([prompt]).external_hits
    (group,) = answer["groups"]
    assert group["stored"].count(False) == 1
    lost_block = group["stored"].index(False)
    assert lost_block >= 161 // BLOCK_TOKENS
    return answer, lost_block * BLOCK_TOKENS


def stored_values(engine, store, opened, prompt):
    """Compute a prompt and return what is then stored."""
    engine.generate([prompt])
    store.settle()
    return set(opened.scan(b""))


def test_explain_agrees_with_an_engine_of_two_stages(
    engine_pool, settings, new_store, prompts, tmp_path
):
    """A chunk whose part of the second stage is lost is not stored."""
    store = new_store()
    own = settings.but(store=store.uri, pipeline_parallel=2, core_process=True)
    answer, lost_token = agree_without(
        engine_pool.get(own), store, own, prompts, tmp_path, lambda value: b"/p1/" in value.key
    )
    assert (answer["hit_tokens"], answer["cut"]) == (lost_token, "missing")


@pytest.fixture(scope="module")
def drafting_store(new_store):
    return new_store()


@pytest.fixture(scope="module")
def drafting(settings, drafting_store, tiny_llama, tmp_path_factory):
    """Return the settings of an engine with an EAGLE drafter."""
    drafter = write_tiny_drafter(tmp_path_factory.mktemp("eagle"), tiny_llama)
    config = (("method", "eagle"), ("model", str(drafter)), ("num_speculative_tokens", 2))
    return settings.but(store=drafting_store.uri, besides=(("speculative_config", config),))


def test_explain_agrees_with_an_engine_that_gives_back_a_block(
    engine_pool, drafting, drafting_store, prompts, tmp_path
):
    engine, prompt = engine_pool.get(drafting), prompts.draw(321)
    engine.generate([prompt])
    drafting_store.settle()
    answer = explain(drafting, prompt, tmp_path)
    engine.reset_local_cache()
    assert answer["hit_tokens"] == engine.generate([prompt]).external_hits == 9 * BLOCK_TOKENS
    assert (answer["cut"], answer["groups"][0]["eagle_tokens"]) == ("eagle", BLOCK_TOKENS)


def test_explain_agrees_with_an_engine_that_lacks_a_value_of_its_drafter(
    engine_pool, drafting, drafting_store, prompts, tmp_path
):
    """The drafter has one layer, its target four."""
    answer, lost_token = agree_without(
        engine_pool.get(drafting),
        drafting_store,
        drafting,
        prompts,
        tmp_path,
        lambda value: value.num_bytes < TARGET_BYTES,
    )
    assert (answer["hit_tokens"], answer["cut"]) == (lost_token - BLOCK_TOKENS, "missing")
