# SPDX-License-Identifier: Apache-2.0
"""The page and the dashboard name every metric, and no other."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvxfer.observe.definitions import METRICS, PREFIX, Kind

DOCS = Path(__file__).resolve().parents[3] / "docs"
NAME = re.compile(rf"{PREFIX}[a-z_]+")
OURS = re.compile(rf"({PREFIX}[a-z_]+)(?:\{{([^}}]*)\}})?")
LABELS_OF_VLLM = {"model_name", "engine"}


@pytest.fixture(scope="module")
def page():
    return (DOCS / "metrics.md").read_text()


@pytest.fixture(scope="module")
def dashboard():
    return json.loads((DOCS / "grafana.json").read_text())


def panel_queries(dashboard):
    return [target["expr"] for p in dashboard["panels"] for target in p.get("targets", ())]


def queries(dashboard):
    """Return the queries of all panels and variables."""
    variables = dashboard["templating"]["list"]
    return panel_queries(dashboard) + [v["query"] for v in variables if v["type"] == "query"]


def documented_name(metric):
    """Return how the page calls a metric: a histogram by what its samples share."""
    return metric.full_name + ("_total" if metric.kind is Kind.COUNTER else "")


def test_metrics_can_be_listed_without_vllm():
    program = "import sys, kvxfer.observe.definitions; print('vllm' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.stdout.strip() == "False", found.stderr


def test_page_describes_every_metric_and_no_other(page):
    described = set(NAME.findall(page))
    assert described == {documented_name(metric) for metric in METRICS}


def test_page_names_the_labels_of_every_metric(page):
    labels = {name: found for name, found in OURS.findall(page) if found}
    assert labels == {documented_name(m): ",".join(m.labels) for m in METRICS if m.labels}


def test_page_says_what_every_label_value_means(page):
    values = {value for metric in METRICS for series in metric.series for value in series}
    assert {value for value in values if f"`{value}`" not in page} == set()


def test_dashboard_shows_every_metric_and_no_other(dashboard):
    shown = {name for query in queries(dashboard) for name in NAME.findall(query)}
    exposed = {name for metric in METRICS for name in metric.exposed_names}
    assert shown <= exposed
    assert {m.name for m in METRICS if not shown & set(m.exposed_names)} == set()


def test_panels_select_by_the_variables_and_group_by_labels_that_there_are(dashboard):
    variables = {each["name"] for each in dashboard["templating"]["list"]} - {"datasource"}
    assert variables == LABELS_OF_VLLM
    for query in panel_queries(dashboard):
        names = [name for name, _ in OURS.findall(query)]
        labels = {la for m in METRICS if {*names} & {*m.exposed_names} for la in m.labels}
        groups = re.findall(r"by \(([^)]*)\)", query)
        assert {la.strip() for group in groups for la in group.split(",")} <= labels | {"le"}
        for _, selected in OURS.findall(query):
            assert dict(re.findall(r'(\w+)=~"\$(\w+)"', selected)) == {v: v for v in variables}


def test_dashboard_has_no_two_panels_in_one_place(dashboard):
    taken = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
