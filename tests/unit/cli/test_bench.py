# SPDX-License-Identifier: Apache-2.0
import json
import re
import sys
from xml.etree import ElementTree

import numpy as np
import pytest
from typer.testing import CliRunner

from kvxfer.cli import bench, bench_cases
from kvxfer.cli.app import app
from kvxfer.cli.bench_cases import OURS, BenchSizes, Measured, measure_all
from kvxfer.cli.bench_rivals import in_tree_search, torch_copies

SMALL = BenchSizes(
    rounds=1,
    num_layers=2,
    fragment_bytes=1024,
    num_blocks=4,
    num_values=2,
    value_bytes=1 << 20,
    prompt_tokens=4096,
)
FOUND = [
    Measured("gather <blocks>", "GB/s", True, {OURS: 4.0, "one memcpy": 2.0}),
    Measured("lookup", "ms", False, {OURS: 0.5}),
]


@pytest.fixture
def measured(monkeypatch):
    monkeypatch.setattr(bench, "measure_all", lambda sizes: iter(FOUND))


def run(*arguments):
    return CliRunner().invoke(app, ["bench", *arguments], env={"COLUMNS": "120"})


def test_every_case_is_measured_with_its_rivals():
    found = list(measure_all(SMALL))
    assert len({each.title for each in found}) == len(found) == 7
    assert all(median > 0 for each in found for median in each.medians.values())
    gather = found[0]
    assert set(gather.medians) - {"torch"} == {OURS, "NumPy", "one memcpy"}
    assert set(found[-1].medians) - {"vLLM in-tree"} == {OURS}
    assert gather.more_is_better
    assert not found[-1].more_is_better


def test_torch_copies_what_ours_does():
    pytest.importorskip("torch")
    caches = [np.arange(layer, layer + 24, dtype=np.uint8).reshape(6, 4) for layer in (0, 100)]
    ids = np.array([4, 1])
    rows = np.zeros((2, 2, 4), np.uint8)  # value, layer, bytes
    gather, scatter = torch_copies(caches, ids, [rows[:, layer] for layer in range(2)])
    gather["torch"]()
    assert np.array_equal(rows, np.stack([cache[ids] for cache in caches], axis=1))
    rows[...] = 7
    scatter["torch"]()
    assert all((cache == 7).all(axis=1).tolist() == [0, 1, 0, 0, 1, 0] for cache in caches)


@pytest.mark.parametrize(("flags", "hit_tokens"), [([1, 1, 1], 48), ([1, 0, 1], 16), ([0] * 3, 0)])
def test_vllms_search_answers_the_hit(flags, hit_tokens):
    pytest.importorskip("vllm")
    hashes = [bytes([number]) * 32 for number in range(3)]
    (search,) = in_tree_search(48, 16, hashes, flags).values()
    assert search() == hit_tokens


def test_rivals_that_are_not_installed_are_left_out(monkeypatch):
    for name in ("torch", "vllm"):
        monkeypatch.setitem(sys.modules, name, None)
    assert torch_copies([], np.zeros(0, np.int64), []) == ({}, {})
    assert in_tree_search(16, 16, [bytes(32)], [1]) == {}


def test_medians_leave_the_warm_up_out_and_take_turns(monkeypatch):
    clock = iter([0, 9, 9, 18, 18, 19, 19, 21, 21, 24, 24, 26])
    monkeypatch.setattr(bench_cases.time, "perf_counter", lambda: next(clock))
    order = []
    runs = {name: (lambda name=name: order.append(name)) for name in "ab"}
    assert bench_cases._medians(runs, rounds=2) == {"a": 2.0, "b": 2.0}
    assert order == list("ababab")


def test_bench_shows_a_table_with_bars(measured):
    shown = run().stdout
    assert re.search(r"gather <blocks> +│ kvxfer +│ █{20} +│ +4 GB/s", shown)
    assert re.search(r"one memcpy +│ █{10} +│ +2 GB/s", shown)


def test_bench_prints_json(measured):
    found = json.loads(run("--json").stdout)
    assert [each["title"] for each in found["results"]] == ["gather <blocks>", "lookup"]
    assert "CPUs" in found["machine"]


def test_bench_writes_a_page_that_fetches_nothing(measured, tmp_path):
    path = tmp_path / "bench.html"
    assert run("--plot", str(path)).exit_code == 0
    text = path.read_text()
    assert "gather &lt;blocks&gt;" in text
    assert "http" not in text
    charts = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text)]
    assert [len(chart.findall("rect")) for chart in charts] == [2, 1]
    widths = [int(rect.get("width")) for rect in charts[0].findall("rect")]
    assert widths[0] == 2 * widths[1]


def test_bench_draws_a_png(measured, monkeypatch, tmp_path):
    image = pytest.importorskip("matplotlib.image")
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path))
    path = tmp_path / "bench.png"
    assert run("--plot", str(path)).exit_code == 0
    pixels = np.rint(255 * image.imread(path)[:, :, :3]).astype(int)
    first, second = np.split(pixels, 2)  # an axis each
    ours, other = (widest(first, color) for color in (bench.COLORS[OURS], bench.OTHER_COLOR))
    assert ours == pytest.approx(2 * other, rel=0.02)  # as 4 GB/s to 2
    assert widest(second, bench.COLORS[OURS]) > 500
    assert not widest(second, bench.OTHER_COLOR)


def widest(pixels, color):
    """Return the most pixels of a color in one row."""
    rgb = [int(color[at : at + 2], 16) for at in (1, 3, 5)]
    return int((pixels == rgb).all(axis=2).sum(axis=1).max())


@pytest.mark.parametrize(
    ("name", "words"), [("bench.svg", ".html or .png"), ("no/bench.html", "no such folder")]
)
def test_bench_refuses_a_picture_before_it_measures(monkeypatch, tmp_path, name, words):
    monkeypatch.setattr(bench, "measure_all", pytest.fail)
    result = run("--plot", str(tmp_path / name))
    assert (result.exit_code, words in result.stderr) == (1, True)


def test_bench_without_matplotlib_names_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run("--plot", str(tmp_path / "bench.png"))
    assert (result.exit_code, "pip install matplotlib" in result.stderr) == (1, True)
