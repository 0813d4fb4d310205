"""Each command in the tables of docs/guides.md parses: its program exists, and knows its flags."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from megalite.commands import COMMANDS
from megalite.config import check_config
from megalite.config.command_line import known_flags, parse
from megalite.config.fields import normalised
from megalite.config.tool_parser import ToolParser
from megalite.plan.plan_request import planning_flags, read_request

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "guides.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (?!in )(\S.*?) \| (.+) \| (\[.+\)) \|$", TEXT, re.MULTILINE)
(RUN,) = re.findall(r'^    RUN="(.+)"$', TEXT, re.MULTILINE)
OTHER_PROGRAMS = ("az", "nsys", "pip", "sbatch", "tensorboard")
PROGRAMS = ("python", "torchrun", *OTHER_PROGRAMS)
TRAINING = {"train": "gpt", "train-bert": "bert"}
OPTIONS_OF_BOTH = {*known_flags(), *planning_flags()}


def is_command(code: str) -> bool:
    words = [word for word in code.split() if not re.match(r"[A-Z_]+=", word)]
    return len(words) > 1 and (words[0] in PROGRAMS or words[0].lstrip("./").startswith("scripts/"))


COMMAND_LINES = [
    code
    for _, here, _ in ROWS
    for code in re.findall(r"`([^`]+)`", here)
    if is_command(code) or code.startswith("./")
]


class Parsed(Exception):
    """Raised in place of what a program does after it has parsed its command line."""


@pytest.fixture(autouse=True)
def stop_after_parsing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    find_problems, parse_known = ToolParser.find_problems, ToolParser.parse_known_args

    def parse_own(parser: ToolParser, *arguments: Any) -> argparse.Namespace:
        assert find_problems(parser, *arguments)[1] == []
        raise Parsed

    def parse_both(parser: ToolParser, *arguments: Any) -> tuple[argparse.Namespace, list[str]]:
        _, rest = parse_known(parser, *arguments)
        flags = {normalised(word.partition("=")[0]) for word in rest if word.startswith("--")}
        assert flags <= OPTIONS_OF_BOTH
        raise Parsed

    monkeypatch.setattr(ToolParser, "parse_args", parse_own)
    monkeypatch.setattr(ToolParser, "find_problems", parse_own)
    monkeypatch.setattr(ToolParser, "parse_known_args", parse_both)


def check_script(script: str, arguments: list[str], world_size: int) -> None:
    is_example = script.startswith("examples/") and (ROOT / script).is_file()
    scripts = {command.script: name for name, command in COMMANDS.items()}
    name = "train" if is_example else scripts[script]
    if name in TRAINING:
        config, _ = parse(arguments, architecture=TRAINING[name])
        check_config(config, config.dry_run.world_size or world_size)
        return
    with pytest.raises(Parsed):
        importlib.import_module(f"megalite.cli.{name.replace('-', '_')}").main(arguments)


@pytest.mark.parametrize("line", COMMAND_LINES)
def test_a_command_parses(line: str) -> None:
    words = [word for word in shlex.split(line.replace("$RUN", RUN)) if not re.match(r"[A-Z_]+=", word)]
    if "torchrun" in words:
        launch = get_args_parser().parse_args(words[words.index("torchrun") + 1 :])
        nodes = int(launch.nnodes.split(":")[-1])
        world_size = nodes * int(launch.nproc_per_node)
        check_script(launch.training_script, launch.training_script_args, world_size)
    elif words[0] == "python":
        check_script(words[1], words[2:], 1)
    else:
        script = words[0].removeprefix("./")
        flags = [word for word in words if word.startswith("--")]
        assert words[0] in OTHER_PROGRAMS or all(flag in (ROOT / script).read_text() for flag in flags)
        assert all((ROOT / word).is_file() for word in words if word.startswith("scripts/"))


def test_flags_outside_of_commands_are_known() -> None:
    codes = [code for row in ROWS for code in re.findall(r"`([^`]+)`", f"{row[0]} {row[1]}")]
    flags = {normalised(code.split()[0]) for code in codes if code.startswith("--")}
    torchrun = {option for action in get_args_parser()._actions for option in action.option_strings}
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
