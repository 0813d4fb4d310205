"""The project's rules, from the syntax trees: imports run down the levels, files and functions are small."""

from __future__ import annotations

import ast
import functools
import graphlib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEVELS = (
    ("utils",),
    ("config", "kernels", "utils.hardware"),
    ("distributed", "frontends"),
    ("tensor_parallel",),
    ("attention",),
    ("model", "pipeline", "data"),
    ("optim", "checkpoint"),
    ("observe",),
    ("train", "plan"),
    ("generate", "observe.report", "observe.verify", "plan.dry_run"),
    ("plan.ladder", "observe.judge"),
    ("cli",),
    ("__main__",),
    ("experiments",),
)
"""Packages, and those below them that have a level of their own, from the lowest to the highest; those of one
level do not import each other"""
SAME_LEVEL = {
    ("data.microbatch", "data.document_assignment"),
    ("distributed.axes", "utils.errors"),
    ("train.rank_training", "train.layout_changes"),
}
LEVEL_OF = {package: level for level, packages in enumerate(LEVELS) for package in packages}
LEVEL_OF_MODULE = {
    **dict.fromkeys(
        ("data.document_assignment", "data.microbatch", "distributed.axes", "pipeline.schedules"), 0
    ),
    **dict.fromkeys(("train.rank_training", "train.layout_changes"), LEVEL_OF["plan.ladder"]),
}
"""Modules with a level of their own: tables of facts and values that every level reads, which do not import
the rest of their package, and the run of a training and its layouts, which start the programs that read it"""
READING = {"plan", "plan.dry_run", "plan.ladder", "observe.report"}
"""Packages that read megalite and its results. Training works without them"""
READERS_STARTED_BY = {
    "train.rank_training": {"plan.dry_run", "plan.rank_plan"},
    "train.layout_changes": {"plan.rank_plan"},
}
"""Modules of these packages that others import, besides the commands"""
FOLDERS_OF_NO_PACKAGE = {"benchmarks", "docs", "scripts"}
"""Their tests are in folders of these names"""
TESTS_OF_NO_MODULE = {
    "the example configs": ("config/test_examples",),
    "datasets against megatron-core's": ("data/test_data_against_megatron",),
    "levels of instructions of all CPU kernels": ("kernels/test_capability",),
    "builds of all kernels: setup.py, sanitizers, machine code, Triton, g++ in place of nvcc": (
        *("kernels/test_cuda_build", "kernels/test_cuda_on_cpu", "kernels/test_cuda_toolkit"),
        *("kernels/test_machine_code", "kernels/test_run_time", "kernels/test_sanitizers"),
        *("kernels/test_triton_compiles", "kernels/test_triton_interpreter"),
    ),
    "whole models": (
        *("model/test_against_transformers", "model/test_documents", "model/test_half_precision"),
        *("model/test_loss_chunks", "model/test_switches"),
    ),
    "job files of Slurm and Kubernetes": ("plan/test_hostile_values",),
    "planned parameters and communication": ("plan/test_parameters", "plan/test_tp_overlap"),
    "all parallel layers": ("tensor_parallel/test_layers",),
    "judged packages": (*("observe/judge/test_megatron_core", "observe/judge/test_torchtitan"),),
    "an axis through the whole package": ("train/test_trial_axis",),
    "Dockerfiles, scripts, workflows": ("test_containers", "test_parent_packages", "test_project_files"),
    "tests/conftest.py and its modules": ("test_changes", "test_cost", "test_scheduling"),
    "tests/stream_checker.py": ("test_stream_checker", "test_stream_order"),
}
"""Test files that are not named after a module, below tests/unit or tests/ranks, by what they test"""
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
NO_VERBS = {
    *("A", "An", "The", "This", "These", "One", "All", "Each", "What", "Whether", "How", "From", "First"),
    *("Bytes", "Elements", "Numbers", "Parameters", "Rows", "Seconds", "Sizes", "Statistics", "Terms"),
}
"""Words that do not begin a docstring of a function"""
CLASS_VERBS = {
    *("Adds", "Appends", "Applies", "Builds", "Changes", "Checks", "Collects", "Computes", "Contains"),
    *("Copies", "Counts", "Cuts", "Declares", "Defines", "Describes", "Divides", "Draws", "Encodes"),
    *("Exchanges", "Finds", "Gathers", "Generates", "Gives", "Hides", "Holds", "Identifies"),
    *("Implements", "Is", "Lists", "Loads", "Locates", "Looks", "Makes", "Manages", "Maps", "Measures"),
    *("Multiplies", "Names", "Observes", "Owns", "Packs", "Parses", "Plans", "Prints", "Reads"),
    *("Records", "Renders", "Repeats", "Reports", "Represents", "Returns", "Runs", "Saves", "Scales"),
    *("Selects", "Sends", "Splits", "Starts", "Stores", "Sums", "Updates", "Wraps", "Writes"),
}
"""Verbs that do not begin the docstring of a class, a noun phrase such as "Options of BERT samples"."""
CLASSES_WITH_VERBS = {"attention", "frontends", "model"}
"""Packages whose classes still begin so"""

SOURCES = sorted((ROOT / "megalite").rglob("*.py"))
PROGRAMS = sorted([*ROOT.glob("pretrain_*.py"), *(ROOT / "tools").glob("*.py")])


@functools.cache
def _nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a file's syntax tree."""
    return tuple(ast.walk(ast.parse(path.read_text())))


def _package(path: Path) -> str:
    return path.relative_to(ROOT / "megalite").parts[0].removesuffix(".py")


def _home(module: str) -> str:
    """Return what gives ``package.module`` below megalite its level: itself, or its package."""
    return module if module in LEVEL_OF | LEVEL_OF_MODULE else module.split(".")[0]


def _level(module: str) -> int:
    return (LEVEL_OF | LEVEL_OF_MODULE)[_home(module)]


def _imports(path: Path) -> Iterator[str]:
    """Yield the full names that a module imports, inside functions and for types alone too."""
    for node in _nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_every_package_has_a_level() -> None:
    assert {_package(path) for path in SOURCES} - {"__init__"} == {name.split(".")[0] for name in LEVEL_OF}


def _runs_down(own: str, imported: str) -> bool:
    """Return whether one ``package.module`` below megalite may import another."""
    within = _home(own) == _home(imported)
    return within or (own, imported) in SAME_LEVEL or _level(imported) < _level(own)


def _name(path: Path) -> str:
    """Return ``package.module`` below megalite."""
    return ".".join(path.relative_to(ROOT / "megalite").with_suffix("").parts[:2])


def test_imports_run_down() -> None:
    imports = [
        (_name(path), ".".join(parts[1:3]))
        for path in SOURCES
        for parts in (name.split(".") for name in _imports(path))
        if _package(path) != "__init__" and parts[0] == "megalite" and parts[1:2] and parts[1] in LEVEL_OF
    ]
    assert not [f"{own} imports {imported}" for own, imported in imports if not _runs_down(own, imported)]


def test_training_does_not_import_what_reads_it() -> None:
    found: dict[str, set[str]] = {}
    for path in SOURCES:
        if (name := _home(_name(path))) not in READING | {"cli", "__main__"}:
            parts = (name.split(".") for name in _imports(path))
            imported = {".".join(each[1:3]) for each in parts if each[0] == "megalite" and each[1:2]}
            read = {each for each in imported if _home(each) in READING}
            found[name] = found.get(name, set()) | read
    assert {name: read for name, read in found.items() if read} == READERS_STARTED_BY


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_a_test_file_is_named_after_its_module() -> None:
    """Check that megalite/data/blend.py has its tests in data/test_blend.py, or data/test_blend_WHAT.py."""
    homes = {name.replace(".", "/") for name in MODULES}
    homeless = set()
    for path in (*ROOT.glob("tests/unit/**/test_*.py"), *ROOT.glob("tests/ranks/**/test_*.py")):
        *folders, file = path.relative_to(ROOT / "tests").with_suffix("").parts[1:]
        words = file.split("_")[1:]
        names = ("/".join(("megalite", *folders, "_".join(words[:end]))) for end in range(1, len(words) + 1))
        if homes.isdisjoint(names) and not FOLDERS_OF_NO_PACKAGE.intersection(folders):
            homeless.add("/".join((*folders, file)))
    assert homeless == {name for names in TESTS_OF_NO_MODULE.values() for name in names}


LIBRARY = [path for path in SOURCES if _package(path) not in ("cli", "__main__")]
MODULES = {_module(path): path for path in SOURCES}


def test_a_class_name_means_one_thing() -> None:
    files: dict[str, list[str]] = {}
    for path in SOURCES:
        for node in _nodes(path):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert not {name: paths for name, paths in files.items() if len(paths) > 1}


def test_imports_make_no_circle() -> None:
    """A module can be read after what it imports."""
    graph = {
        module: {name if name in MODULES else name.rpartition(".")[0] for name in _imports(path)}
        for module, path in MODULES.items()
    }
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_files_and_functions_are_small() -> None:
    large = []
    for path in (*SOURCES, *PROGRAMS):
        name, num_lines = str(path.relative_to(ROOT)), len(path.read_text().splitlines())
        if num_lines > MAX_FILE_LINES:
            large.append(f"{name}: {num_lines} lines")
        for node in _nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                if node.end_lineno - node.lineno >= MAX_FUNCTION_LINES:
                    large.append(f"{name}: {node.name}")
    assert not large


def _docstrings(kind: type[ast.ClassDef | ast.FunctionDef]) -> Iterator[tuple[Path, str, str]]:
    """Yield a file, a line with its number, and the first word of each docstring of classes or functions."""
    for path in SOURCES:
        for node in _nodes(path):
            if isinstance(node, kind) and (text := ast.get_docstring(node)):
                first = text.splitlines()[0]
                yield path, f"{path.relative_to(ROOT)}:{node.lineno}: {first}", first.split()[0].strip(".,:")


def test_docstrings_of_functions_begin_with_a_verb() -> None:
    words = {line: word for _, line, word in _docstrings(ast.FunctionDef)}
    ends_in_s = {word for word in words.values() if word.endswith("s") and not word.endswith("ss")}
    assert [line for line, word in words.items() if word in NO_VERBS | ends_in_s] == []


def _is_noun_phrase(line: str, verb: str) -> bool:
    return verb not in CLASS_VERBS or f": {verb} of " in line  # "Copies of …", "Names of …"


def test_docstrings_of_classes_are_noun_phrases() -> None:
    assert not _is_noun_phrase("megalite/a.py:1: Holds the options.", "Holds")
    assert not _is_noun_phrase("megalite/a.py:1: Names the corpora.", "Names")
    assert _is_noun_phrase("megalite/a.py:1: Names of the corpora.", "Names")
    described = [
        (line, word)
        for path, line, word in _docstrings(ast.ClassDef)
        if CLASSES_WITH_VERBS.isdisjoint(path.relative_to(ROOT / "megalite").parts)
    ]
    assert [line for line, word in described if not _is_noun_phrase(line, word)] == []


def test_library_code_does_not_print() -> None:
    calls = [(path, node.func) for path in LIBRARY for node in _nodes(path) if isinstance(node, ast.Call)]
    printing = {path for path, call in calls if isinstance(call, ast.Name) and call.id == "print"}
    assert not printing
