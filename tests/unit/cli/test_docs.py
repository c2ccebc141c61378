# SPDX-License-Identifier: Apache-2.0
"""What the documents show is valid: configurations, commands, links, options, the example."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from kvxfer.cli.app import app
from kvxfer.cli.deployment import EXTRA, POLICY, TRANSFER, children, is_ours
from kvxfer.config import KVXferConfig, Role
from kvxfer.stores.lmdb_options import VALID_OPTIONS
from kvxfer.stores.mooncake_options import URI_OPTIONS
from kvxfer.stores.uri import check_options, parse_uri

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
URI_OPTIONS_OF = {"lmdb": VALID_OPTIONS, "mooncake": URI_OPTIONS}
SHOWN_BY_COMMANDS = "commands.md"
"""Shows wrong ones on purpose, and is compared with what commands print."""


def configurations(path):
    """Return every JSON object of a page that names a connector, the outermost ones."""
    decoder, found, text, start = json.JSONDecoder(), [], path.read_text(), 0
    while (start := text.find("{", start)) >= 0:
        try:
            value, start = decoder.raw_decode(text, start)
        except ValueError:
            start += 1
            continue
        value = value.get(TRANSFER, value)
        if "kv_connector" in value:
            found.append(value)
    return found


SHOWN = [(path, config) for path in PAGES for config in configurations(path)]


def shown_ids():
    return [f"{path.name}-{idx}" for idx, (path, _) in enumerate(SHOWN)]


def test_enough_configurations_are_shown():
    names = {path.name for path, _ in SHOWN}
    deploy = {"quick-start.md", "deploy-one-host.md", "deploy-cluster.md", "prefill-decode.md"}
    assert deploy | {"README.md", "from-mooncake-connector.md"} <= names
    shown = sum(path.read_text().count('"kv_connector":') for path in PAGES)
    read = sum(1 + len(children(config)) for _, config in SHOWN)
    # what is read, and the one sentence in troubleshooting.md and commands.md that quotes a name
    assert read >= shown - 3


@pytest.mark.parametrize(("path", "config"), SHOWN, ids=shown_ids())
def test_shown_configuration_recomputes_failed_loads(path, config):
    for each in (config, *children(config)):
        assert each.get(POLICY) == "recompute", each
        assert each["kv_role"] in list(Role)


@pytest.mark.parametrize(("path", "config"), SHOWN, ids=shown_ids())
def test_shown_configuration_is_accepted(path, config):
    for each in (config, *children(config)):
        if is_ours(each):
            assert each["kv_connector"] == "KVXferConnector"
            assert each["kv_connector_module_path"] == "kvxfer.connector"
            settings = KVXferConfig.from_extra(each.get(EXTRA, {}), environ={})
            uri = parse_uri(settings.store)
            check_options(uri, URI_OPTIONS_OF[uri.scheme])


def shown_commands():
    """Return (page, command line) of each ``kvxfer`` line in a block of code."""
    for path in PAGES:
        if path.name == SHOWN_BY_COMMANDS:
            continue
        for block in re.findall(r"```\w*\n(.*?)```", path.read_text(), re.DOTALL):
            for line in block.splitlines():
                if line.strip().startswith("kvxfer "):
                    yield path.name, line.strip()


@pytest.mark.parametrize(("page", "line"), list(shown_commands()))
def test_shown_command_exists_with_its_options(page, line):
    _, *words = shlex.split(line, comments=True)
    command = typer.main.get_command(app)
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_of_a_page_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), target


def quoted_messages():
    """Yield each part of a message that a table of troubleshooting.md quotes, `...` left out."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    for table in re.findall(r"^\| message \|.*\n\|---.*\n((?:\|.*\n)+)", text, re.MULTILINE):
        for cell in re.findall(r"^\| (.*?) \|", table, re.MULTILINE):
            for quoted in re.findall(r"`([^`]+)`", cell):
                yield from (part.strip() for part in quoted.split("...") if len(part.strip()) > 3)


def test_messages_that_troubleshooting_quotes_are_those_of_the_code():
    sources = (path.read_text() for path in (ROOT / "kvxfer").rglob("*.py"))
    joined = re.sub(r'"\s*f?"', "", " ".join(sources))  # strings that run over several lines
    quoted = set(quoted_messages())
    assert len(quoted) > 20
    assert {part for part in quoted if part not in joined} == set()


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")


def test_options_page_is_what_the_code_says(scripts):
    from doc_options import options_page

    assert (ROOT / "docs" / "options.md").read_text() == options_page(), "run make docs"


def test_example_of_direct_import_loads_what_it_saved(tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            ROOT / "examples" / "direct_import.py",
            f"lmdb://{tmp_path}/store?capacity=64MiB",
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "second engine: 192 of 204 tokens loaded" in done.stdout
    assert "every byte" in done.stdout


def test_example_needs_neither_vllm_nor_torch(tmp_path):
    program = (
        "import sys, runpy; sys.modules.update(vllm=None, torch=None); "
        f"sys.argv[1:] = ['lmdb://{tmp_path}/store?capacity=64MiB']; "
        f"runpy.run_path({str(ROOT / 'examples' / 'direct_import.py')!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
