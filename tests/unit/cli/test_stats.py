# SPDX-License-Identifier: Apache-2.0
import ast
import http.server
import json
import re
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvxfer.cli import scrape, stats
from kvxfer.cli.app import app
from kvxfer.observe.definitions import METRICS
from kvxfer.stores import open_store

PAGE = """\
# HELP vllm:kvxfer_hit_tokens_total Wanted tokens that were loaded.
vllm:prompt_tokens_total{model_name="m"} 9.0
vllm:kvxfer_wanted_tokens_total{engine="0",model_name="m"} 3000.0
vllm:kvxfer_wanted_tokens_total{engine="1",model_name="m"} 1000.0
vllm:kvxfer_hit_tokens_total{engine="0",model_name="m"} 1000.0
vllm:kvxfer_missed_tokens_total{engine="0",model_name="m",reason="not_stored"} 2000.0
vllm:kvxfer_missed_tokens_total{engine="0",model_name="m",reason="timed_out"} 0.0
vllm:kvxfer_lookups_total{engine="0",model_name="m",outcome="hit"} 7.0
vllm:kvxfer_lookup_seconds_bucket{engine="0",le="0.001",model_name="m"} 7.0
vllm:kvxfer_lookup_seconds_sum{engine="0",model_name="m"} 0.014
vllm:kvxfer_lookup_seconds_count{engine="0",model_name="m"} 7.0
vllm:kvxfer_jobs_total{engine="0",model_name="m",operation="load",outcome="done"} 7.0
vllm:kvxfer_jobs_total{engine="0",model_name="m",operation="load",outcome="expired"} 2.0
vllm:kvxfer_store_bytes_total{engine="0",model_name="m",operation="get"} 4e+09
vllm:kvxfer_store_call_seconds_sum{engine="0",model_name="m",operation="get"} 2.0
vllm:kvxfer_store_keys_total{engine="0",model_name="m",operation="put",outcome="ok"} 5.0
vllm:kvxfer_store_keys_total{engine="0",model_name="m",operation="put",outcome="no_space"} 3.0
vllm:kvxfer_queued_jobs{engine="0",model_name="m",operation="save"} 4.0
vllm:kvxfer_store_values{engine="0",model_name="m"} 40.0
vllm:kvxfer_store_values{engine="1",model_name="m"} 40.0
"""


@pytest.fixture
def page():
    """Yield (the pages that the server gives one after another, its URL)."""
    pages = [PAGE]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write((pages.pop(0) if len(pages) > 1 else pages[0]).encode())

        def log_message(self, *arguments):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield pages, f"http://127.0.0.1:{server.server_port}/metrics"
    server.shutdown()
    thread.join()
    server.server_close()


def run(*arguments):
    return CliRunner().invoke(app, ["stats", *arguments], env={"COLUMNS": "100"})


def numbers(*arguments):
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_stats_add_up_what_ranks_and_engines_tell(page):
    found = numbers("--url", page[1])
    assert (found["tokens wanted"], found["tokens hit"]) == (4000, 1000)
    assert found["hit rate"] == 0.25
    assert found["tokens missed: not_stored"] == 2000
    assert found["lookup, mean"] == 0.002
    assert (found["loaded"], found["loaded, inside store calls"]) == (4e9, 2e9)
    assert found["saves waiting"] == 4
    assert found["store, values"] == 40  # of one store, told twice


def test_stats_name_failures_and_nothing_that_did_not_happen(page):
    found = numbers("--url", page[1])
    assert (found["loads expired"], found["keys of put: no_space"]) == (2, 3)
    assert not {"loads done", "keys of put: ok", "tokens missed: timed_out"} & set(found)


def test_stats_show_a_table(page):
    shown = run("--url", page[1]).stdout
    assert re.search(r"hit rate +│ +25\.0%", shown)
    assert re.search(r"loaded, inside store calls +│ +2\.00 GB/s", shown)


def test_stats_watch_shows_growth_until_it_is_interrupted(page, monkeypatch):
    pages, url = page
    pages.append(re.sub(r"(_hit_tokens_total.*) 1000", r"\1 3000", PAGE))
    pauses = iter([0.01, None])

    def pause(seconds):
        assert seconds == 2
        if next(pauses) is None:
            raise KeyboardInterrupt

    clock = iter([10.0, 14.0])
    monkeypatch.setattr(stats.time, "sleep", pause)
    monkeypatch.setattr(stats, "_now_s", lambda: next(clock))
    result = run("--url", url, "--watch", "2")
    assert result.exit_code == 0
    assert re.search(r"tokens hit +│ +3,000 +│ +500", result.stdout)


def test_stats_of_a_store_need_no_engine(tmp_path):
    uri = f"lmdb://{tmp_path}/store?capacity=16MiB"
    store = open_store(uri)
    store.put_from([b"key"], [memoryview(bytes(5000))])
    store.close()
    found = numbers("--store", uri)
    assert (found["values"], found["capacity"]) == (1, 16 << 20)
    assert found["full"] == found["used"] / found["capacity"]


@pytest.mark.parametrize(
    ("text", "words"),
    [("vllm:x 1\n", "has no metrics of kvxfer"), ("", "--disable-log-stats")],
)
def test_stats_of_an_engine_without_kvxfer_are_a_sentence(page, text, words):
    page[0][:] = [text]
    result = run("--url", page[1])
    assert (result.exit_code, words in result.stderr) == (1, True)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/metrics", "no-url", "http://["])
def test_stats_without_a_server_are_a_sentence(url):
    result = run("--url", url)
    assert (result.exit_code, "does not answer" in result.stderr) == (1, True)


def test_stats_are_of_an_engine_or_of_a_store():
    assert run("--url", "http://x", "--store", "lmdb:///x").exit_code == 2


def test_stats_read_metrics_that_there_are():
    tree = ast.parse(Path(stats.__file__).read_text())
    asked = {
        node.args[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if node.func.attr in ("total", "largest", "by_label")
        if node.args and isinstance(node.args[0], ast.Constant)
    }
    exposed = {name.rpartition("kvxfer_")[2] for m in METRICS for name in m.exposed_names}
    assert len(asked) > 10
    assert asked <= exposed


def test_samples_keep_escaped_labels():
    (sample,) = scrape.read_samples('vllm:kvxfer_x{model_name="a\\"b,c=\\"d\\""} 1e3')
    assert sample.labels == {"model_name": 'a\\"b,c=\\"d\\"'}
    assert sample.value == 1000
