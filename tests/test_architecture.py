"""The house's rules, from the syntax trees: imports run down the levels, files and functions are small."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LEVELS = (
    (
        *(
            "agreement",
            "errors",
            "folders",
            "gpu",
            "log",
            "host",
            "meeting",
            "network",
            "observer",
            "parsing",
        ),
        "config",
    ),
    ("cli", "presets", "topology", "kernels"),
    ("local_ranks", "parallel"),
    ("model", "pipeline", "optim", "data"),
    ("checkpoint", "plan"),
    ("train", "convert", "launching", "tuning"),
    ("verify", "generation", "inspection", "reporting", "dryrun"),
)
"""Rooms of the package, ground floor first; those of a level import none of it, but for SAME_LEVEL."""
SAME_LEVEL = {
    ("agreement", "errors"),
    ("config", "errors"),
    ("folders", "errors"),
    ("network", "log"),
    ("cli", "presets"),
}
LEVEL_OF = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

SOURCES = sorted((ROOT / "megalite").rglob("*.py"))
PROGRAMS = sorted([ROOT / "pretrain_gpt.py", *(ROOT / "tools").glob("*.py")])


def _room(path: Path) -> str:
    return path.relative_to(ROOT / "megalite").parts[0].removesuffix(".py")


def _imports(tree: ast.AST) -> Iterator[str]:
    """Rooms of megalite that a module imports, inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] if node.module != "megalite" else [f"megalite.{a.name}" for a in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "megalite" and len(parts) > 1 and parts[1] in LEVEL_OF:
                yield parts[1]


def test_every_room_has_a_level() -> None:
    assert {_room(path) for path in SOURCES} - {"__init__"} == set(LEVEL_OF)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_down(path: Path) -> None:
    room = _room(path)
    if room == "__init__":
        return
    for imported in _imports(ast.parse(path.read_text())):
        downward = LEVEL_OF[imported] < LEVEL_OF[room]
        assert imported == room or downward or (room, imported) in SAME_LEVEL, f"{room} imports {imported}"


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {_module(path): path for path in SOURCES}


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


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_library_code_does_not_print(path: Path) -> None:
    calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    assert not [call for call in calls if isinstance(call, ast.Name) and call.id == "print"]
