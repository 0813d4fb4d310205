"""The project's rules, from the syntax trees: imports run down the levels, files and functions are small."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LEVELS = (
    ("errors", "files", "log", "microbatch", "commands", "torch_private", "torch_versions"),
    ("config", "hardware", "kernels"),
    ("distributed",),
    ("tensor_parallel",),
    ("model", "pipeline", "optim", "data"),
    ("checkpoint", "plan"),
    ("train",),
    ("verify", "generate", "report", "dry_run"),
    ("pretraining",),
    ("cli",),
    ("__main__",),
)
"""Packages from the lowest level to the highest; those of one level do not import each other"""
SAME_LEVEL = {("files", "errors"), ("hardware.gpus", "errors")}
LEVEL_OF = {package: level for level, packages in enumerate(LEVELS) for package in packages}
LEVEL_OF_MODULE = {"hardware.gpus": 0, "pipeline.schedules": 0}
"""Tables of facts that every level reads; they do not import the rest of their package"""
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60

SOURCES = sorted((ROOT / "megalite").rglob("*.py"))
PROGRAMS = sorted([*ROOT.glob("pretrain_*.py"), *(ROOT / "tools").glob("*.py")])


def _package(path: Path) -> str:
    return path.relative_to(ROOT / "megalite").parts[0].removesuffix(".py")


def _level(module: str) -> int:
    """Return the level of ``package.module`` below megalite."""
    return LEVEL_OF_MODULE.get(module, LEVEL_OF[module.split(".")[0]])


def _imports(tree: ast.AST) -> Iterator[str]:
    """Yield what a module imports, inside functions too: ``package.module`` below megalite."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "megalite" and len(parts) > 1 and parts[1] in LEVEL_OF:
                yield ".".join(parts[1:3])


def test_every_package_has_a_level() -> None:
    assert {_package(path) for path in SOURCES} - {"__init__"} == set(LEVEL_OF)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_down(path: Path) -> None:
    package = _package(path)
    if package == "__init__":
        return
    own = ".".join(path.relative_to(ROOT / "megalite").with_suffix("").parts[:2])
    for imported in _imports(ast.parse(path.read_text())):
        within = imported.split(".")[0] == package and own not in LEVEL_OF_MODULE
        is_same_level = (own, imported.split(".")[0]) in SAME_LEVEL
        assert within or is_same_level or _level(imported) < _level(own), f"{own} imports {imported}"


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


LIBRARY = [path for path in SOURCES if _package(path) not in ("cli", "__main__")]
MODULES = {_module(path): path for path in SOURCES}


def test_a_class_name_means_one_thing() -> None:
    files: dict[str, list[str]] = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert not {name: paths for name, paths in files.items() if len(paths) > 1}


def _modules_imported(tree: ast.AST) -> Iterator[str]:
    """Modules of megalite that a module imports, inside functions and for types alone too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in MODULES else node.module for name in names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_imports_make_no_circle() -> None:
    """A module can be read after what it imports."""
    graph = {name: set(_modules_imported(ast.parse(path.read_text()))) for name, path in MODULES.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize("path", [*SOURCES, *PROGRAMS], ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_are_small(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < MAX_FUNCTION_LINES, node.name


@pytest.mark.parametrize("path", LIBRARY, ids=lambda path: str(path.relative_to(ROOT)))
def test_library_code_does_not_print(path: Path) -> None:
    calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    assert not [call for call in calls if isinstance(call, ast.Name) and call.id == "print"]
