"""Parse the command lines that pages show: the program exists, and knows the flags."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from megalite.config import check_config
from megalite.config.fields import normalised
from megalite.frontends.command_line import known_flags, parse
from megalite.frontends.tool_parser import ToolParser
from megalite.plan.plan_request import planning_flags
from megalite.utils.commands import COMMANDS, main_of

ROOT = Path(__file__).parents[3]
OPTIONS_OF_BOTH = {*known_flags(), *planning_flags()}
TORCHRUN = get_args_parser()
_TRAINING = {"train": "gpt", "train-bert": "bert"}
_NAMES = {command.script: name for name, command in COMMANDS.items()}


class _Parsed(Exception):
    """Raised in place of what a program does after it has parsed its command line."""


def stop_after_parsing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tools end when they have parsed a command line, as `check_command` needs it."""
    find_problems, parse_known = ToolParser.find_problems, ToolParser.parse_known_args

    def parse_own(parser: ToolParser, *arguments: Any) -> argparse.Namespace:
        assert find_problems(parser, *arguments)[1] == []
        raise _Parsed

    def parse_both(parser: ToolParser, *arguments: Any) -> tuple[argparse.Namespace, list[str]]:
        _, rest = parse_known(parser, *arguments)
        flags = {normalised(word.partition("=")[0]) for word in rest if word.startswith("--")}
        assert flags <= OPTIONS_OF_BOTH
        raise _Parsed

    monkeypatch.setattr(ToolParser, "parse_args", parse_own)
    monkeypatch.setattr(ToolParser, "find_problems", parse_own)
    monkeypatch.setattr(ToolParser, "parse_known_args", parse_both)


def check_command(line: str, is_whole: bool = True) -> None:
    """Parse a line that starts with python, torchrun or megalite.

    Args:
        is_whole: whether a config that lacks something is a mistake.
    """
    words = shlex.split(line, comments=True)
    world_size = 1
    if words[0] == "torchrun":
        launch = TORCHRUN.parse_args(words[1:])
        world_size = int(launch.nnodes.split(":")[-1]) * int(launch.nproc_per_node)
        start = ["megalite"] if launch.module else ["python", launch.training_script]
        words = [*start, *launch.training_script_args]
    name = _name_of(words[1]) if words[0] == "python" else words[1]
    _check_arguments(name, words[2:], world_size if is_whole else None)


def _name_of(script: str) -> str:
    """Return the command that a script is; an example takes the flags of training."""
    is_example = script.startswith("examples/") and (ROOT / script).is_file()
    return "train" if is_example else _NAMES[script]


def _check_arguments(name: str, arguments: Sequence[str], world_size: int | None) -> None:
    if name not in _TRAINING:
        with pytest.raises(_Parsed):
            main_of(name)(arguments)
        return
    config, _ = parse(arguments, architecture=_TRAINING[name])
    if world_size is not None:
        check_config(config, config.dry_run.world_size or world_size)
