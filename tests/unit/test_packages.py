# SPDX-License-Identifier: Apache-2.0
"""What is said of packages and versions in several places agrees; what an sdist makes is whole."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import kvxfer

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CIBUILDWHEEL = PROJECT["tool"]["cibuildwheel"]
PYTHONS = ["3.11", "3.12", "3.13"]


def load_script(name):
    spec = importlib.util.spec_from_file_location(
        f"scripts_{name}", ROOT / "scripts" / f"{name}.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def dist_script():
    return load_script("test_dist")


@pytest.fixture(scope="module")
def versions():
    return load_script("test_versions")


def test_version_is_said_in_one_place():
    version = PROJECT["project"]["version"]
    assert kvxfer.__version__ == version
    own = [ROOT / "setup.py", *(ROOT / "kvxfer").rglob("*.py")]
    assert [path for path in own if f'"{version}"' in path.read_text()] == []


def test_wheels_are_built_for_every_python_that_is_supported():
    assert CIBUILDWHEEL["build"] == [f"cp{python.replace('.', '')}-*" for python in PYTHONS]
    classifiers = [f"Programming Language :: Python :: {python}" for python in PYTHONS]
    named = [each for each in PROJECT["project"]["classifiers"] if ":: Python :: 3." in each]
    assert named == classifiers
    assert SpecifierSet(PROJECT["project"]["requires-python"]) == SpecifierSet(f">={PYTHONS[0]}")


def test_wheels_are_built_for_every_cpu_that_is_supported():
    linux = CIBUILDWHEEL["linux"]
    assert linux["archs"] == ["x86_64", "aarch64"]
    images = {linux[f"manylinux-{arch}-image"] for arch in linux["archs"]}
    assert images == {"manylinux_2_28"}
    assert "*-musllinux_*" in CIBUILDWHEEL["skip"]


def test_wheels_are_tested_with_tests_that_are_there():
    named = re.findall(r"\{project\}/(\S+)", CIBUILDWHEEL["test-command"])
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []
    extras = PROJECT["project"]["optional-dependencies"]
    assert set(CIBUILDWHEEL["test-extras"]) <= set(extras)


def test_wheels_are_tested_without_vllm():
    wanted = " ".join(
        requirement
        for extra in CIBUILDWHEEL["test-extras"]
        for requirement in PROJECT["project"]["optional-dependencies"][extra]
    )
    assert "vllm" not in wanted
    for path in re.findall(r"\{project\}/(\S+)", CIBUILDWHEEL["test-command"]):
        place = ROOT / path
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            assert not re.search(r"^(from|import) (vllm|torch)\b", file.read_text(), re.MULTILINE)


def test_vllm_extra_is_what_start_up_takes():
    engine = pytest.importorskip("kvxfer.vllm_specs.engine")
    low, high = (".".join(map(str, bound)) for bound in engine.SUPPORTED)
    assert PROJECT["project"]["optional-dependencies"]["vllm"] == [f"vllm>={low},<{high}"]


def test_releases_tested_cover_the_supported_range(versions):
    (wanted,) = PROJECT["project"]["optional-dependencies"]["vllm"]
    supported = SpecifierSet(wanted.removeprefix("vllm"))
    tested = [Version(release.version) for release in versions.RELEASES]
    assert all(version in supported for version in tested)
    first, last = tested[0].minor, tested[-1].minor
    assert [version.minor for version in tested] == list(range(first, last + 1))
    assert Version(f"0.{first - 1}") not in supported
    assert Version(f"0.{last + 1}") not in supported


def test_parts_of_the_versions_test_are_there(versions):
    paths = [path for part in versions.PARTS.values() for path in part]
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_page_has_a_row_for_each_release(versions):
    text = versions.PAGE.read_text()
    table = text.partition(versions.TABLE_START)[2].partition(versions.TABLE_END)[0]
    rows = [line.split(" | ")[0].strip("| ") for line in table.splitlines()[2:]]
    assert rows == [release.version for release in versions.RELEASES]
    assert len(table.splitlines()[0].split(" | ")) == 2 + len(versions.PARTS)


REPORT = """<testsuites><testsuite>
<testcase name="a"/><testcase name="b"><failure/></testcase><testcase name="c"><error/></testcase>
<testcase name="d"><skipped/></testcase></testsuite></testsuites>"""


def test_report_is_counted(versions, tmp_path):
    (tmp_path / "report.xml").write_text(REPORT)
    outcome = versions.read_report(tmp_path / "report.xml")
    assert str(outcome) == "1 passed, 2 failed, 1 skipped"
    assert not outcome.good


def test_run_without_a_report_is_a_failure(versions, tmp_path):
    assert versions.read_report(tmp_path / "none.xml") == versions.Outcome(failed=1)


def test_part_in_which_nothing_ran_is_not_good(versions):
    assert not versions.Outcome(skipped=3).good
    assert versions.Outcome(passed=1, skipped=3).good


def test_table_replaces_the_one_of_the_page(versions, tmp_path, monkeypatch):
    page = tmp_path / "versions.md"
    page.write_text(f"before\n{versions.TABLE_START}old\n{versions.TABLE_END}after\n")
    monkeypatch.setattr(versions, "PAGE", page)
    versions.write_table(["| new |"])
    expected = f"before\n{versions.TABLE_START}| new |\n{versions.TABLE_END}after\n"
    assert page.read_text() == expected
    page.write_text("a page without a place for it\n")
    with pytest.raises(ValueError, match="lacks the lines"):
        versions.write_table(["| new |"])


def test_version_without_a_release_is_refused(versions, capsys):
    with pytest.raises(SystemExit):
        versions.parse(["0.30.0"])
    assert "no such release here: 0.30.0; there are 0.31.0" in capsys.readouterr().err


def test_hidden_programs_are_not_on_the_path(dist_script, tmp_path, monkeypatch):
    place = tmp_path / "programs"
    place.mkdir()
    for name in ("gcc", "x86_64-linux-gnu-gcc-12", "nvcc", "ls"):
        (place / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(place))
    path = dist_script.path_without(("gcc", "nvcc"), tmp_path / "path")
    assert shutil.which("ls", path=path)
    assert os.listdir(path) == ["ls"]


@pytest.fixture(scope="module")
def packages(dist_script, tmp_path_factory):
    """Return an sdist and the wheel made of it, with one native module and without nvcc."""
    folder = tmp_path_factory.mktemp("packages")
    path = dist_script.path_without(("nvcc",), folder / "path")
    environment = os.environ | {"KVXFER_EXTENSIONS": "keys", "PATH": path}
    options = ["--no-isolation", "--outdir", str(folder / "dist"), str(ROOT)]
    command = [sys.executable, "-m", "build", *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    (wheel,) = (folder / "dist").glob("*.whl")
    return {"sdist": sdist, "wheel": wheel}


@pytest.mark.slow
def test_wheel_has_what_it_needs_and_no_more(packages, dist_script):
    faults = [
        fault
        for fault in dist_script.wheel_faults(**packages)
        if not re.search(r"native module (hits|block_copy)$", fault)
    ]
    assert faults == []


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this is no clone: what is committed?")
def test_sdist_is_the_whole_project(packages, dist_script):
    assert list(dist_script.sdist_faults(packages["sdist"])) == []


@pytest.mark.slow
def test_sdist_without_a_compiler_says_what_is_missing(packages, dist_script, tmp_path):
    with tarfile.open(packages["sdist"]) as archive:
        archive.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.glob("kvxfer-*")
    path = dist_script.path_without(dist_script.COMPILERS, tmp_path / "path")
    environment = {name: value for name, value in os.environ.items() if name != "CC"}
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext"],
        cwd=folder,
        env=environment | {"PATH": path, "KVXFER_EXTENSIONS": "keys"},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "needs a C compiler" in done.stderr
    assert "--only-binary=kvxfer" in done.stderr
