# SPDX-License-Identifier: Apache-2.0
"""The demo around its engines: prompts, stores, exit codes, what stays on disk."""

import io
import json

import pytest
from rich.console import Console

import kvxfer.cli.demo as demo
from kvxfer.cli.engine_client import EngineProcessError, EngineReport, Moved, PromptResult
from kvxfer.cli.engine_job import CORRUPT_VARIABLE
from kvxfer.errors import ConfigError


class FakeEngines:
    """Stands for ``run_engine``: the first engine of a store computes, the others hit."""

    def __init__(self, warm_token=9, warm_hits=64, fail=False):
        self.jobs, self.logs = [], []
        self._warm_token, self._warm_hits, self._fail = warm_token, warm_hits, fail

    def __call__(self, job, log, on_event):
        self.jobs.append(job)
        self.logs.append(log)
        log.write_text("what vLLM printed")
        if self._fail:
            raise EngineProcessError("an engine ended with 1")
        cold = len(self.jobs) == 1
        token, hits = (9, 0) if cold else (self._warm_token, self._warm_hits)
        results = [PromptResult([token], [-1.0], 0.1, hits) for _ in job.prompts]
        return EngineReport(results, Moved(1, 8, 0.1), Moved(1, 8, 0.1))


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": 300}))
    return folder


def run(monkeypatch, tmp_path, engines, **options):
    """Run the demo in ``tmp_path/work`` and return its exit code and what it printed."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.setattr(demo.tempfile, "tempdir", str(work))
    monkeypatch.setattr(demo, "run_engine", engines)
    printed = io.StringIO()
    status = demo.run_demo(demo.DemoOptions(**options), Console(file=printed, width=200))
    return status, printed.getvalue()


def files_left(tmp_path):
    return sorted(path.name for path in (tmp_path / "work").rglob("*") if path.is_file())


def test_demo_succeeds_and_leaves_nothing_behind(monkeypatch, tmp_path, model):
    engines = FakeEngines()
    status, printed = run(monkeypatch, tmp_path, engines, model=model, num_prompts=3)
    assert status == 0
    assert "outputs identical" in printed
    assert list((tmp_path / "work").iterdir()) == []


def test_demo_gives_both_engines_the_same_job(monkeypatch, tmp_path, model):
    engines = FakeEngines()
    run(monkeypatch, tmp_path, engines, model=model, prompt_tokens=40, num_prompts=3)
    cold, warm = engines.jobs
    assert cold == warm
    assert [len(prompt) for prompt in cold.prompts] == [40, 40, 40]
    assert cold.model == str(model)


@pytest.mark.parametrize(
    ("engines", "reason"),
    [
        (FakeEngines(warm_token=8), "outputs differ: prompt 1, output token 1"),
        (FakeEngines(warm_hits=0), "nothing hit"),
        (FakeEngines(fail=True), "an engine ended with 1"),
    ],
    ids=["differ", "no_hit", "engine_failed"],
)
def test_failed_demo_says_why_and_keeps_only_the_logs(
    monkeypatch, tmp_path, model, engines, reason
):
    status, printed = run(monkeypatch, tmp_path, engines, model=model)
    assert status == 1
    assert f"FAILED: {reason}" in printed
    assert files_left(tmp_path) == [log.name for log in engines.logs]
    assert all(f"log of vLLM: {log}" in printed for log in engines.logs)


def test_demo_makes_its_own_model_and_keeps_it_if_asked(monkeypatch, tmp_path):
    made = []
    monkeypatch.setattr(demo, "write_llama", lambda folder, shape: made.append(write(folder)))
    status, _ = run(monkeypatch, tmp_path, FakeEngines(), keep=True)
    assert status == 0
    assert len(made) == 1
    assert "config.json" in files_left(tmp_path)


def write(folder):
    folder.mkdir()
    (folder / "config.json").write_text('{"vocab_size": 300}')


def test_demo_says_that_values_are_damaged(monkeypatch, tmp_path, model):
    monkeypatch.setenv(CORRUPT_VARIABLE, "1")
    _, printed = run(monkeypatch, tmp_path, FakeEngines(), model=model)
    assert f"{CORRUPT_VARIABLE}=1" in printed


class RecordedStore:
    def __init__(self):
        self.removed, self.closed = [], False

    def remove_prefix(self, prefix):
        self.removed.append(prefix)

    def close(self):
        self.closed = True


@pytest.mark.parametrize("keep", [False, True], ids="keep={}".format)
def test_demo_removes_its_values_from_the_callers_store(monkeypatch, tmp_path, model, keep):
    store, engines = RecordedStore(), FakeEngines()
    monkeypatch.setattr(demo.kvxfer.stores, "open_store", lambda uri: store)
    run(monkeypatch, tmp_path, engines, model=model, store="lmdb:///given", keep=keep)
    settings = engines.jobs[0].connector_settings
    assert settings["store"] == "lmdb:///given"
    expected = [] if keep else [f"kvx1/{settings['cache_prefix']}/".encode()]
    assert store.removed == expected
    assert store.closed is not keep


def test_demo_never_shares_keys_with_another_run(monkeypatch, tmp_path, model):
    prefixes = set()
    for number in range(2):
        engines = FakeEngines()
        (tmp_path / str(number)).mkdir()
        run(monkeypatch, tmp_path / str(number), engines, model=model)
        prefixes.add(engines.jobs[0].connector_settings["cache_prefix"])
    assert len(prefixes) == 2


def test_own_store_holds_every_prompt(monkeypatch, tmp_path, model):
    engines = FakeEngines()
    run(monkeypatch, tmp_path, engines, model=model, prompt_tokens=9000, num_prompts=10)
    capacity = int(engines.jobs[0].connector_settings["store"].partition("capacity=")[2])
    assert capacity > 9000 * 10 * demo.DEMO_SHAPE.kv_token_bytes


def test_prompts_are_random_and_repeatable():
    first, second = (demo.random_prompts(2, 400, 300) for _ in range(2))
    assert first == second
    assert first[0] != first[1]
    assert min(map(min, first)) >= 3
    assert max(map(max, first)) < 300


@pytest.mark.parametrize(
    "config", [{"vocab_size": 300}, {"text_config": {"vocab_size": 300}}], ids=["flat", "nested"]
)
def test_vocab_size_is_read_from_the_checkpoint(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert demo.vocab_size_of(tmp_path) == 300


@pytest.mark.parametrize("text", [None, "{", "{}"], ids=["missing", "malformed", "no_size"])
def test_a_folder_without_checkpoint_is_refused_with_its_path(tmp_path, text):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"no vocab_size in .*config\.json"):
        demo.vocab_size_of(tmp_path)
