# SPDX-License-Identifier: Apache-2.0
"""``kvxfer explain`` says, without an engine, what a real engine's lookup then finds."""

import json
import os
import subprocess
import sys

import pytest
from engine_families import FAMILIES, write_family

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
EXPLAINED = ("sliding_and_full", "hits_below_the_block")


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
