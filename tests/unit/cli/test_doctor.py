# SPDX-License-Identifier: Apache-2.0
"""Doctor finds each planted fault by its own check, and nothing on a healthy site."""

import ast
import json
import re
import tempfile
from pathlib import Path

import pytest
from doctor_plants import PLANTS, WARNINGS, Site
from rich.console import Console

import kvxfer
from kvxfer.cli.doctor import run_doctor
from kvxfer.cli.doctor.findings import Check, Status, note, ok, run_checks
from kvxfer.cli.doctor.run import CHECKS
from kvxfer.cli.doctor.surroundings import supported_range

BAD = (Status.FAULT, Status.WARNING)


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Yield a healthy site; engines' folders and variables of this process stay out of it."""
    monkeypatch.delenv("MOONCAKE_CONFIG_PATH", raising=False)
    with tempfile.TemporaryDirectory(dir="/tmp") as runtime:  # short: sockets lie in it
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        yield Site(tmp_path, monkeypatch)


def bad_findings(site):
    return [n for n in run_checks(CHECKS, site.surroundings()) if n.finding.status in BAD]


def test_a_healthy_site_has_nothing_to_change(site):
    assert bad_findings(site) == []


def test_a_healthy_site_with_a_used_store_has_nothing_to_change(site):
    site.make_store()
    found = list(run_checks(CHECKS, site.surroundings()))
    assert [n for n in found if n.finding.status in BAD] == []
    (round_trip,) = (n for n in found if n.check == "lmdb.round_trip")
    assert round_trip.finding.status is Status.OK
    assert "removed" in round_trip.finding.text


def test_enough_faults_are_planted():
    assert len(PLANTS) >= 20


@pytest.mark.parametrize("name", PLANTS)
def test_each_fault_is_found_by_its_check_with_a_way_out(site, name):
    check, words, plant = PLANTS[name]
    plant(site)
    faults = [n for n in bad_findings(site) if n.finding.status is Status.FAULT]
    mine = [n.finding for n in faults if n.check == check]
    assert any(words in found.text for found in mine), faults
    assert all(found.way_out for found in mine)
    assert not any("itself failed" in n.finding.text for n in faults)


@pytest.mark.parametrize("name", WARNINGS)
def test_what_could_be_better_is_a_warning_of_its_check(site, name):
    check, words, plant = WARNINGS[name]
    plant(site)
    mine = [n.finding for n in bad_findings(site) if n.check == check]
    assert any(words in found.text and found.status is Status.WARNING for found in mine), mine
    assert all(found.way_out for found in mine)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", ["none", "warning", "fault"])
def test_exit_code_says_whether_there_is_a_fault(site, name, strict):
    plants = {"warning": WARNINGS["lookups_are_off"], "fault": PLANTS["role_is_unknown"]}
    if name in plants:
        plants[name][2](site)
    status = run_doctor(site.surroundings(), Console(quiet=True), strict=strict)
    assert status == {"none": 0, "warning": int(strict), "fault": 1}[name]


def test_findings_come_as_json(site, capsys):
    PLANTS["option_is_misspelled"][2](site)
    run_doctor(site.surroundings(), Console(), as_json=True)
    rows = json.loads(capsys.readouterr().out)
    assert {"check", "status", "text", "way_out"} == set(rows[0])
    assert "config.options" in [row["check"] for row in rows if row["status"] == "fault"]


def test_findings_are_shown_with_their_way_out(site, capsys):
    PLANTS["failure_policy_is_left_out"][2](site)
    run_doctor(site.surroundings(), Console(width=120))
    shown = capsys.readouterr().out
    assert "✘ config.failure_policy" in shown
    assert '-> set "kv_load_failure_policy": "recompute"' in shown
    assert "1 fault, 0 warnings" in shown


def test_a_check_that_breaks_hides_no_other(site):
    def broken(around):
        yield ok("so far")
        raise RuntimeError("oops")

    checks = [Check("a", broken), Check("b", lambda around: iter([note("here")]))]
    found = list(run_checks(checks, site.surroundings()))
    assert [(n.check, n.finding.status) for n in found] == [
        ("a", Status.OK),
        ("a", Status.FAULT),
        ("b", Status.NOTE),
    ]
    assert "RuntimeError: oops" in found[1].finding.text


def test_checks_have_names_of_their_own():
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)


def test_supported_range_is_that_of_the_connector():
    source = (Path(kvxfer.__file__).parent / "vllm_specs" / "engine.py").read_text()
    (line,) = re.findall(r"^SUPPORTED = (.*)$", source, re.MULTILINE)
    assert supported_range("vllm") == ast.literal_eval(line)


@pytest.mark.parametrize("kind", ["NotDescribedError", "ModuleNotFoundError"])
def test_an_engine_that_cannot_be_described_is_no_fault(site, kind):
    site.model = {"error": "it has pipeline stages", "kind": kind}
    if kind == "ModuleNotFoundError":
        del site.versions["vllm"]
    found = list(run_checks(CHECKS, site.surroundings()))
    (groups,) = [n.finding for n in found if n.check == "model.groups"]
    assert (groups.status, "pipeline stages" in groups.text) == (Status.NOTE, True)
    assert not [n for n in found if n.finding.status is Status.FAULT]
