"""The program `megalite` and the scripts of a checkout: the same commands, each named as it was started."""

from __future__ import annotations

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import megalite
from megalite import __main__ as program
from megalite.__main__ import run_command
from megalite.frontends.command_line import TRAINED_BY
from megalite.plan.plan_report import answer
from megalite.utils.commands import (
    COMMANDS,
    command_lines,
    command_name,
    main_of,
    torchrun_arguments,
    with_command_names,
)

ROOT = Path(__file__).parents[3]
SCRIPTS = {path.relative_to(ROOT).as_posix() for path in [*ROOT.glob("*.py"), *ROOT.glob("tools/*.py")]}


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "megalite", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=600
    )


def _help(name: str, program: str, capsys: pytest.CaptureFixture[str], monkeypatch) -> str:
    monkeypatch.setattr(sys, "argv", [program, "--help"])
    with pytest.raises(SystemExit) as end:
        main_of(name)(["--help"])
    assert end.value.code in (None, 0)
    return capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_a_terminal_of_80_columns(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, _, text = _help(name, "megalite", capsys, monkeypatch).partition("\n\n")  # without the usage
    assert text and max(map(len, text.splitlines())) <= 80
    commands = text.replace(" \\\n   ", "")
    assert "\\\n" not in commands and not re.search(r"\w-\n", text)


def test_commands_are_broken_between_flags() -> None:
    command = "megalite plan --preset llama3-8b --input 'a b/*.gz' --tp 2"
    lines = command_lines(command, width=36)
    assert lines == ["megalite plan --preset llama3-8b \\", "    --input 'a b/*.gz' --tp 2"]
    assert max(map(len, lines)) <= 36
    assert "\n".join(lines).replace(" \\\n   ", "") == command


def test_every_script_and_module_is_a_command() -> None:
    assert {command.script for command in COMMANDS.values()} == SCRIPTS - {"setup.py"}
    modules = {path.stem for path in (ROOT / "megalite" / "cli").glob("*.py")} - {"__init__"}
    assert {main_of(name).__module__.rpartition(".")[2] for name in COMMANDS} == modules


def test_the_documentation_lists_the_commands() -> None:
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    rows = [f"| `megalite {name}` | `{each.script}` | {each.summary} |" for name, each in COMMANDS.items()]
    assert "\n".join(["|---|---|---|", *rows, ""]) in page


TRAIN = ("--preset", "gpt-tiny", "--mock-data", "--vocab-size", "256", "--train-iters", "1")


@pytest.mark.parametrize("program", [("pretrain_gpt.py",), ("-m", "megalite", "train")], ids=" ".join)
def test_a_folder_that_is_not_compiled_says_what_to_type(program: tuple[str, ...], tmp_path: Path) -> None:
    """A folder hides the installed package of the same name, whichever way a program is started in it."""
    shutil.copytree(ROOT / "megalite", tmp_path / "megalite", ignore=shutil.ignore_patterns("*.so"))
    shutil.copy(ROOT / "pretrain_gpt.py", tmp_path)
    ended = subprocess.run(
        [sys.executable, *program, *TRAIN], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert ended.returncode == 1
    first, line = ended.stderr.splitlines()
    assert first == "importing PyTorch"
    assert line.startswith(f"error: {tmp_path}/megalite is not compiled: run `pip install {tmp_path}`")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_script_only_runs_its_command(name: str) -> None:
    tree = ast.parse((ROOT / COMMANDS[name].script).read_text())
    imported = {
        (node.module, alias.name)
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert isinstance(tree.body[-1], ast.If)
    if name in TRAINED_BY.values():  # a program over the public API
        assert imported == {("megalite", "pretrain")}
        architecture = "" if name == "train" else "architecture='bert'"
        assert f"pretrain({architecture})" in ast.unparse(tree.body[-1])
        return
    assert imported == {("megalite.__main__", "run_command")}
    assert len(tree.body) == 3
    assert ast.unparse(tree.body[-1]).endswith(f"run_command('{name}')")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_the_entry_point_of_its_kind(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    for runner in ("run_rank", "run_main"):
        monkeypatch.setattr(program, runner, lambda *_, runner=runner: called.append(runner))
    run_command(name)
    assert called == ["run_rank" if COMMANDS[name].is_rank else "run_main"]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_names_commands_as_they_were_started(name: str, capsys, monkeypatch) -> None:
    text = _help(name, f"megalite {name}", capsys, monkeypatch)
    assert text.startswith(f"usage: megalite {name} ")
    assert "pretrain_gpt.py" not in text and "tools/" not in text
    script = COMMANDS[name].script
    text = _help(name, f"/somewhere/{script}", capsys, monkeypatch)
    assert text.startswith(f"usage: {Path(script).name} ")
    assert not [other for other in COMMANDS if f"megalite {other} " in text]


def test_examples_in_a_help_text_can_be_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "megalite plan --tp 2\ntorchrun -m megalite train --tp 2\n\nSee megalite inspect-dataset."
    monkeypatch.setattr(sys, "argv", ["tools/plan.py"])
    assert with_command_names(text) == (
        "python tools/plan.py --tp 2\ntorchrun pretrain_gpt.py --tp 2\n\nSee tools/inspect_dataset.py."
    )
    monkeypatch.setattr(sys, "argv", ["megalite plan"])
    assert with_command_names(text) == text


@pytest.mark.parametrize(
    ("program", "plan", "train"),
    [
        ("/bin/pytest", "megalite plan", "-m megalite train"),
        ("../tools/where.py", "tools/plan.py", "pretrain_gpt.py"),
    ],
)
def test_messages_name_commands_as_this_process_was_started(
    program: str, plan: str, train: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [program])
    assert (command_name("plan"), torchrun_arguments("train")) == (plan, train)
    flags = "--preset gpt-tiny --gpu h100 --world-size 2 --global-batch-size 8 --vocab-size 256 --search"
    assert f"torchrun --nproc-per-node 2 {train} --preset" in "\n".join(answer(flags.split()))


def test_the_program_lists_its_commands_without_importing_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "megalite"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0
    for name, command in COMMANDS.items():
        assert sum(line.split() == [name, *command.summary.split()] for line in done.stdout.splitlines()) == 1
    assert "megalite.utils.commands" in done.stderr
    assert "torch" not in done.stderr and "megalite.config" not in done.stderr


@pytest.mark.parametrize(
    ("program", "flags", "last"),
    [
        ("pretrain_gpt.py", (), "error: no flag is passed: try --preset gpt-tiny --mock-data "),
        ("pretrain_bert.py", (), "error: no flag is passed: try --preset bert-tiny --mock-data "),
        (
            "pretrain_gpt.py",
            ("--tp", "3", *TRAIN),
            "error: world size 1 is not a multiple of --tp 3",
        ),
        ("pretrain_gpt.py", ("--num-layer", "3", *TRAIN), "error: unknown flag --num-layer; nearest is "),
    ],
)
def test_mistakes_in_flags_are_reported_without_torch(
    program: str, flags: tuple[str, ...], last: str
) -> None:
    command = [sys.executable, "-X", "importtime", program, *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    printed = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert done.returncode == 1 and printed[-1].startswith(last), printed
    assert not re.search(r"^import time:.* torch$", done.stderr, re.MULTILINE)
    assert [line for line in printed if not line.startswith("error: ")] == []


@pytest.mark.parametrize(
    ("program", "flags", "printed"),
    [
        ("pretrain_gpt.py", TRAIN, "importing PyTorch\nerror: interrupted\n"),
        ("tools/generate.py", ("--help",), "error: interrupted\n"),
        ("tools/report.py", ("--help",), "error: interrupted\n"),
    ],
)
def test_an_import_is_interrupted_in_one_line(
    program: str, flags: tuple[str, ...], printed: str, tmp_path: Path
) -> None:
    """Test Ctrl-C while torch is imported, which takes seconds."""
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    done = subprocess.run(
        [sys.executable, program, *flags],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=600,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", printed)


def test_the_version_is_the_package_s() -> None:
    done = _run("--version")
    assert (done.returncode, done.stdout) == (0, f"megalite {megalite.__version__}\n")


def test_an_unknown_command_names_the_nearest() -> None:
    done = _run("evalate", "--load", "x")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: unknown command evalate; nearest is evaluate (see megalite --help)\n"


def test_a_command_runs_with_its_arguments() -> None:
    done = _run("show-schedule", "--stages", "2", "--microbatches", "3")
    assert done.returncode == 0 and "rank 0 |F0F1....B0==" in done.stdout
    done = _run("show-schedule", "--chunks", "3")
    assert done.returncode == 1 and done.stderr.startswith("error: --chunks 3")
