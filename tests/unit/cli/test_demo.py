# SPDX-License-Identifier: Apache-2.0
"""The demo around its engines: prompts, stores, exit codes, what stays on disk."""

import dataclasses
import io

import pytest
from rich.console import Console

import kvxfer.cli.demo as demo
from kvxfer.cli.checkpoint import DEMO_SHAPE
from kvxfer.cli.demo_model import DemoModel
from kvxfer.cli.engine_client import EngineProcessError, EngineReport, Moved, PromptResult
from kvxfer.cli.engine_job import CORRUPT_VARIABLE
from kvxfer.stores.lmdb_ledger import LIMIT_SHARE
from kvxfer.stores.lmdb_writer import LARGEST_VALUE_SHARE


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
            raise EngineProcessError("an engine ended with 1: [no tag]")
        cold = len(self.jobs) == 1
        token, hits = (9, 0) if cold else (self._warm_token, self._warm_hits)
        results = [PromptResult([token], [-1.0], 0.1, hits) for _ in job.prompts]
        return EngineReport(results, Moved(1, 8, 0.1), Moved(1, 8, 0.1))


TOKEN_BYTES = 1000


@pytest.fixture
def model(monkeypatch, tmp_path):
    """Return the folder of a model of which vLLM says what this fixture does."""

    def read_model(folder, dtype):
        return DemoModel(
            folder=folder,
            dtype=dtype,
            vocab_size=300,
            longest=10_000,
            hit_tokens=16,
            groups=[(16, 16 * TOKEN_BYTES)],
        )

    monkeypatch.setattr(demo, "read_model", read_model)
    return tmp_path / "model"


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
    assert dataclasses.replace(cold, again=False) == warm
    assert [len(prompt) for prompt in cold.prompts] == [40, 40, 40]
    assert cold.model == str(model)


def test_demo_compares_a_users_model_with_its_own_hits(monkeypatch, tmp_path, model):
    engines = FakeEngines()
    run(monkeypatch, tmp_path, engines, model=model)
    assert [(job.again, job.dtype) for job in engines.jobs] == [(True, "auto"), (False, "auto")]


def test_demo_computes_in_the_type_that_is_asked_for(monkeypatch, tmp_path, model):
    engines = FakeEngines()
    run(monkeypatch, tmp_path, engines, model=model, dtype="float32")
    assert engines.jobs[0].dtype == "float32"


def test_demo_that_cannot_begin_leaves_nothing_behind(monkeypatch, tmp_path, model):
    status, printed = run(monkeypatch, tmp_path, FakeEngines(), model=model, prompt_tokens=20_000)
    assert status == 1
    assert "FAILED: sequences of" in printed
    assert list((tmp_path / "work").iterdir()) == []


@pytest.mark.parametrize(
    ("engines", "reason"),
    [
        (FakeEngines(warm_token=8), "outputs differ: prompt 1, output token 1"),
        (FakeEngines(warm_hits=0), "nothing hit"),
        (FakeEngines(fail=True), "an engine ended with 1: [no tag]"),
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

    def write_llama(folder, shape):
        made.append(shape)
        folder.mkdir()
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr("kvxfer.cli.demo_model.write_llama", write_llama)
    engines = FakeEngines()
    status, _ = run(monkeypatch, tmp_path, engines, keep=True)
    assert status == 0
    assert made == [DEMO_SHAPE]
    assert "config.json" in files_left(tmp_path)
    cold, warm = engines.jobs
    assert cold == warm  # in float32 a cold run is reference enough
    assert (cold.dtype, len(cold.prompts[0])) == ("float32", 1500)


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
    assert capacity >= 2 * 9000 * 10 * TOKEN_BYTES


def test_own_store_takes_large_values(monkeypatch, tmp_path):
    large = DemoModel(
        folder=tmp_path,
        dtype="auto",
        vocab_size=300,
        longest=None,
        hit_tokens=16,
        groups=[(16, 1 << 28), (16, 100)],
    )
    monkeypatch.setattr(demo, "read_model", lambda folder, dtype: large)
    engines = FakeEngines()
    options = {"num_prompts": 1, "prompt_tokens": 33}
    run(monkeypatch, tmp_path, engines, model=tmp_path, **options)
    capacity = int(engines.jobs[0].connector_settings["store"].partition("capacity=")[2])
    assert LIMIT_SHARE * capacity > LARGEST_VALUE_SHARE * (1 << 28)


def test_prompts_are_random_and_repeatable():
    first, second = (demo.random_prompts(2, 400, 300) for _ in range(2))
    assert first == second
    assert first[0] != first[1]
    assert min(map(min, first)) >= 3
    assert max(map(max, first)) < 300
