# SPDX-License-Identifier: Apache-2.0
"""The project's own rules: which way imports point, what a stub says, what a file may name."""

import ast
import graphlib
import importlib
import inspect
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "kvxfer"
STUBS = sorted(path.stem for path in PACKAGE.glob("_native/*.pyi"))

# Which way imports point: a module may import from its own layer and from those above it here.
LAYERS = [
    {"errors"},
    {"_native"},
    {"blocks", "stores", "keys", "config", "checkpoint_identity"},
    {"hits", "lookup", "transfer"},
    {"messages", "vllm_specs", "observe", "spaces"},
    {"scheduler", "worker"},
    {"connector"},
    {"__init__", "cli"},
]
RANK = {part: rank for rank, parts in enumerate(LAYERS) for part in parts}
FACADE = {"connector", "scheduler", "worker", "messages", "vllm_specs", "observe"}
# A program that the command line starts as a user would, to make a vLLM engine, and what
# `kvxfer bench` measures of vLLM's own.
USERS_OF_VLLM = {"kvxfer/cli/engine_process.py", "kvxfer/cli/bench_rivals.py"}

GENERATED_FOLDERS = {"build", "dist", "__pycache__"}
GENERATED_SUFFIXES = {".so", ".pyc", ".c"}
HIDDEN_SOURCES = {".ci", ".gitignore"}
WITHOUT_SPDX = {".md", ".json", ".typed", ""}
NAMED_SPDX = {"Makefile", ".gitignore", "run"}


@cache
def source_files():
    """Return every file of the project that is, or may be, committed."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if (ROOT / ".git").exists() and listing.returncode == 0:
        paths = [ROOT / line for line in listing.stdout.splitlines()]
    else:
        paths = walk(ROOT)
    return sorted(path for path in paths if path.is_file())


def walk(folder):
    """Yield the files under a folder, generated ones left out."""
    for path in folder.iterdir():
        if not is_generated(path):
            yield from walk(path) if path.is_dir() else [path]


def is_generated(path):
    hidden = path.name.startswith(".") and path.name not in HIDDEN_SOURCES
    folder = path.name in GENERATED_FOLDERS or path.suffix == ".egg-info"
    return hidden or folder or path.suffix in GENERATED_SUFFIXES


def relative(path):
    return path.relative_to(ROOT).as_posix()


@cache
def text_of(path):
    return path.read_bytes().decode(errors="replace")


def first_line(path):
    """Return the first line after the interpreter's."""
    lines = text_of(path).splitlines() or [""]
    return lines[1] if lines[0].startswith("#!") and lines[1:] else lines[0]


def modules():
    return sorted(path for path in PACKAGE.rglob("*.py"))


def part_of(path):
    """Return the layer's name that a file belongs to: its package, or itself."""
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


@cache
def imports_of(path):
    """Return (absolute module name, imported at module level) of each import in a file."""
    tree = ast.parse(text_of(path))
    return [
        (name, node in module_level)
        for module_level in [set(module_level_imports(tree.body))]
        for node in ast.walk(tree)
        for name in imported_names(node, path)
    ]


def module_level_imports(body):
    """Yield the imports that run when the module is imported; not those for type checkers only."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from module_level_imports(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for field in ("body", "orelse", "finalbody", "handlers"):
                yield from module_level_imports(getattr(node, field, []))


def imported_names(node, path):
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = node.module or ""
    if node.level:
        package = path.relative_to(ROOT).parts[: -node.level]
        base = ".".join([*package, base]).strip(".")
    # `from kvxfer import keys` imports kvxfer.keys: name what is imported as well
    return [base, *(f"{base}.{alias.name}" for alias in node.names)] if base else []


def own_parts(path):
    """Return the parts of kvxfer that a file imports."""
    parts = set()
    for name, _ in imports_of(path):
        head, _, rest = name.partition(".")
        part = rest.partition(".")[0]
        if head == "kvxfer" and part in RANK:
            parts.add(part)
    return parts


def outside_the_facade():
    return [
        path
        for path in modules()
        if part_of(path) not in FACADE and relative(path) not in USERS_OF_VLLM
    ]


def uses(path, package, *, at_module_level=False):
    return any(
        name.partition(".")[0] == package and (module_level or not at_module_level)
        for name, module_level in imports_of(path)
    )


def test_project_every_module_has_a_layer():
    assert {part_of(path) for path in modules()} <= set(RANK)


def test_project_imports_point_one_way():
    wrong = {
        relative(path): part
        for path in modules()
        for part in own_parts(path)
        if RANK[part] > RANK[part_of(path)]
    }
    assert wrong == {}


def test_project_parts_import_each_other_in_no_circle():
    graph = {}
    for path in modules():
        part = part_of(path)
        graph.setdefault(part, set()).update(own_parts(path) - {part})
    list(graphlib.TopologicalSorter(graph).static_order())  # CycleError names the circle


def test_project_only_the_facade_imports_vllm():
    assert [relative(path) for path in outside_the_facade() if uses(path, "vllm")] == []


def test_project_only_the_facade_imports_torch_with_the_module():
    users = [path for path in outside_the_facade() if uses(path, "torch", at_module_level=True)]
    assert [relative(path) for path in users] == []


LIGHT = ["kvxfer", *(f"kvxfer.{part}" for part in ("hits", "blocks", "stores", "keys", "lookup"))]


@pytest.mark.parametrize("module", [*LIGHT, "kvxfer.transfer", "kvxfer.config", "kvxfer.cli.main"])
def test_project_imports_without_vllm_and_torch(module):
    program = f"import sys, {module}; print(sorted({{'vllm', 'torch'}} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.stdout.strip() == "[]", found.stderr


@pytest.mark.slow
def test_project_imports_vllm_without_what_is_left_out_of_the_locks():
    pytest.importorskip("vllm")
    program = (
        "import importlib.util as u, vllm; "
        "print([n for n in ('torchvision', 'torchaudio', 'torchcodec') if u.find_spec(n)])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.stdout.splitlines()[-1:] == ["[]"], found.stderr


def test_project_every_native_module_has_a_stub():
    assert sorted(path.stem for path in PACKAGE.glob("_native/*.pyx")) == STUBS


@pytest.mark.parametrize("name", STUBS)
def test_project_stub_names_what_the_native_module_offers(name):
    module = importlib.import_module(f"kvxfer._native.{name}")
    offered = {each for each, value in vars(module).items() if is_public(each, value, module)}
    stub = stub_of(name)
    assert offered == {
        each.name for each in stub if isinstance(each, ast.FunctionDef | ast.ClassDef)
    }
    assert not [each for each in stub_constants(stub) if not hasattr(module, each)]


@pytest.mark.parametrize("name", STUBS)
def test_project_stub_has_the_parameters_of_the_native_module(name):
    module = importlib.import_module(f"kvxfer._native.{name}")
    for node in stub_of(name):
        if isinstance(node, ast.FunctionDef):
            assert native_parameters(getattr(module, node.name)) == stub_parameters(node), node.name
        elif isinstance(node, ast.ClassDef):
            for method in methods_of(node):
                native = getattr(getattr(module, node.name), method.name)
                assert native_parameters(native) == stub_parameters(method), method.name


def is_public(name, value, module):
    own = getattr(value, "__module__", None) == module.__name__
    return own and not name.startswith("_") and callable(value)


def stub_of(name):
    return ast.parse((PACKAGE / "_native" / f"{name}.pyi").read_text()).body


def stub_constants(stub):
    return [each.target.id for each in stub if isinstance(each, ast.AnnAssign)]


def methods_of(node):
    """Return the methods of a stub's class whose parameters the native class can tell."""
    return [
        each
        for each in node.body
        if isinstance(each, ast.FunctionDef) and not each.name.startswith("__")
        if not each.decorator_list
    ]


def native_parameters(function):
    """Return (name, has a default) of each parameter."""
    parameters = inspect.signature(function).parameters.values()
    return [(each.name, each.default is not each.empty) for each in parameters]


def stub_parameters(node):
    """Return (name, has a default) of each parameter."""
    positional = [*node.args.posonlyargs, *node.args.args]
    first_default = len(positional) - len(node.args.defaults)
    keyword = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    return [
        *((each.arg, idx >= first_default) for idx, each in enumerate(positional)),
        *((each.arg, default is not None) for each, default in keyword),
    ]


def test_project_files_name_no_machine_and_no_registry():
    # put together here, so that this file does not name them either
    forbidden = ["/" + place for place in ("work/", "root/", "tmp/v/", "opt/wheels", "opt/pypi")]
    forbidden += [
        ".".join(host)
        for host in (("pypi", "org"), ("pythonhosted", "org"), ("debian", "org"), ("npmjs", "org"))
    ]
    found = [
        (relative(path), each)
        for path in source_files()
        for each in forbidden
        if each in text_of(path)
    ]
    assert found == []


def test_project_set_up_names_one_index_and_only_to_install_torch():
    users = [relative(path) for path in source_files() if "--extra-" + "index-url" in text_of(path)]
    assert users == ["scripts/install_torch.sh"]
    assert (ROOT / users[0]).read_text().count("https://") == 1


def test_project_sources_start_with_their_licence():
    without = [
        relative(path)
        for path in source_files()
        if path.suffix not in WITHOUT_SPDX or path.name in NAMED_SPDX
        if "SPDX-License-Identifier: Apache-2.0" not in first_line(path)
    ]
    assert without == []


def test_project_licence_is_the_whole_text():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_project_changelog_has_an_unreleased_section():
    headings = [
        line.strip("#[] ").lower()
        for line in (ROOT / "CHANGELOG.md").read_text().splitlines()
        if line.startswith("## ")
    ]
    assert headings[0] == "unreleased"
