"""Each command in the tables of docs/guides.md parses: its program exists, and knows its flags."""

from __future__ import annotations

import re
import shlex

import pytest

from megalite.config.fields import normalised
from megalite.plan.plan_request import read_request
from tests.unit.docs.parsing import OPTIONS_OF_BOTH, ROOT, TORCHRUN, check_command, stop_after_parsing

TEXT = (ROOT / "docs" / "guides.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (?!in )(\S.*?) \| (.+) \| (\[.+\)) \|$", TEXT, re.MULTILINE)
(RUN,) = re.findall(r'^    RUN="(.+)"$', TEXT, re.MULTILINE)
OTHER_PROGRAMS = ("az", "nsys", "pip", "sbatch", "tensorboard")
PROGRAMS = ("python", "torchrun", *OTHER_PROGRAMS)


def is_command(code: str) -> bool:
    words = [word for word in code.split() if not re.match(r"[A-Z_]+=", word)]
    return len(words) > 1 and (words[0] in PROGRAMS or words[0].lstrip("./").startswith("scripts/"))


COMMAND_LINES = [
    code
    for _, here, _ in ROWS
    for code in re.findall(r"`([^`]+)`", here)
    if is_command(code) or code.startswith("./")
]


@pytest.fixture(autouse=True)
def _parse_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    stop_after_parsing(monkeypatch)


@pytest.mark.parametrize("line", COMMAND_LINES)
def test_a_command_parses(line: str) -> None:
    if command := re.search(r"\b(?:python|torchrun) .*", line):
        check_command(command[0].replace("$RUN", RUN))
        return
    program, *words = shlex.split(line)
    flags = [word for word in words if word.startswith("--")]
    code = "" if program in OTHER_PROGRAMS else (ROOT / program).read_text(encoding="utf-8")
    assert program in OTHER_PROGRAMS or all(flag in code for flag in flags)
    assert all((ROOT / word).is_file() for word in words if word.startswith("scripts/"))


def test_flags_outside_of_commands_are_known() -> None:
    codes = [code for row in ROWS for code in re.findall(r"`([^`]+)`", f"{row[0]} {row[1]}")]
    flags = {normalised(code.split()[0]) for code in codes if code.startswith("--")}
    torchrun = {option for action in TORCHRUN._actions for option in action.option_strings}
    assert len(flags) > 8
    assert flags <= OPTIONS_OF_BOTH | torchrun


def test_plans_are_of_possible_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.chdir(ROOT)
    plans = [shlex.split(line)[2:] for line in COMMAND_LINES if line.startswith("python tools/plan.py")]
    assert len(plans) > 5
    for plan in plans:
        read_request(plan)


def test_every_row_is_read() -> None:
    num_tables = TEXT.count("\n## ")
    assert num_tables == 4
    assert len(ROWS) == TEXT.count("\n|") - 2 * num_tables
    assert len(COMMAND_LINES) > 70
