"""The command line as a config."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path

from megalite.cli.checkpoint_args import model_settings
from megalite.cli.fields import ConfigField, fields_by_flag
from megalite.cli.findings import Findings, Setting
from megalite.cli.help import help_text
from megalite.cli.hints import nearest
from megalite.cli.legacy import REMARKS, Line, legacy_rules
from megalite.cli.report import is_first_rank
from megalite.cli.values import value_of
from megalite.cli.words import Given, split_words
from megalite.cli.yaml import read_yaml
from megalite.config import Config, to_yaml
from megalite.config.idle import idle_options
from megalite.config.problem import one_line
from megalite.config.validate import problems_of
from megalite.errors import ConfigError
from megalite.presets import PRESETS

_HELP = ("--help", "-h")
_OVERRIDE = "--override-flags"
_PROGRAM_FLAGS = ("--config", "--preset", "--print-config", _OVERRIDE, *_HELP)


def parse(argv: Sequence[str], unneeded: Collection[str] = ()) -> tuple[Config, list[str]]:
    """Reads a command line: flags over the YAML file of --config over the model of --preset.

    The config that comes back is not yet checked, since that wants the number of ranks:
    `check_config`.

    Args:
        argv: the arguments, without the program's name.
        unneeded: fields that the caller does without. A mistake elsewhere must not demand them as well.

    Returns:
        The config, and remarks to log once: what was accepted but has no effect, and why.

    Raises:
        ConfigError: with all mistakes: of the command line, and of the config as far as it was understood.
        SystemExit: --help or --print-config was asked for, and has been printed.
    """
    findings = Findings()
    given, stray = split_words(argv)
    given, behind_override = _overridden(given)
    stray += behind_override
    if any(flag.flag in _HELP for flag in given):
        _print_and_exit(help_text(Path(sys.argv[0]).name))
    findings.problems += [f"{word!r} stands before any flag: put a flag before it" for word in stray]
    config = _config(given, findings)
    _apply_legacy_rules(given, config, findings)
    if findings.problems:
        of_config = problems_of(config, _world_size(), findings.doubted.union(unneeded))
        raise ConfigError([one_line(problem) for problem in (*findings.problems, *of_config)])
    if any(flag.flag == "--print-config" for flag in given):
        _print_and_exit(to_yaml(config))
    idle = idle_options(config, config.dry_run.world_size or _world_size())
    return config, [one_line(notice) for notice in (*findings.notices, *idle)]


def _overridden(given: Sequence[Given]) -> tuple[list[Given], list[str]]:
    """Apply --override-flags: flags behind it replace those before it without a notice, under any name.

    Returns:
        The flags that count, and the words directly behind --override-flags, which belong to no flag.
    """
    kept: list[Given] = []
    stray: list[str] = []
    for is_override, group in itertools.groupby(given, lambda flag: flag.flag == _OVERRIDE):
        flags = list(group)
        if is_override:
            stray += [word for flag in flags for word in flag.words]
        else:
            replaced = {_option_of(flag) for flag in flags}
            kept = [flag for flag in kept if _option_of(flag) not in replaced] + flags
    return kept, stray


def _option_of(flag: Given) -> str:
    """Return what a flag sets: the field, or the flag itself where it is none."""
    field = fields_by_flag().get(flag.flag)
    return flag.flag if field is None else field.name


def known_flags() -> list[str]:
    """Return every flag that `parse` knows, with dashes."""
    return [*fields_by_flag(), *legacy_rules(), *_PROGRAM_FLAGS]


def _config(given: Sequence[Given], findings: Findings) -> Config:
    """Preset or checkpoint, YAML file and flags, one over the other."""
    base = _preset(_program_word("--preset", given, findings), findings)
    path = _program_word("--config", given, findings)
    from_file = {} if path is None else read_yaml(path, findings)
    from_flags = findings.unique(_settings(given, findings))
    settings = {**from_file, **from_flags}
    config = _with(base, settings)
    if config.checkpoint.use_checkpoint_args:
        config = _with(base, {**model_settings(config.checkpoint, findings), **settings})
        if any(flag.flag == "--preset" for flag in given):
            findings.problems.append(
                "--preset and --use-checkpoint-args both give the whole model: leave one out"
            )
    return config


def _settings(given: Sequence[Given], findings: Findings) -> Iterator[Setting]:
    """The values of the flags that are fields; says of each other flag that nothing knows it."""
    legacy = legacy_rules()
    for flag in given:
        field = fields_by_flag().get(flag.flag)
        if field is not None:
            yield from _setting(field, flag, findings)
        elif flag.flag not in legacy and flag.flag not in _PROGRAM_FLAGS:
            guess = nearest(flag.flag, known_flags())
            meant = fields_by_flag().get(guess)
            findings.doubt(
                f"unknown flag {flag.name}; nearest is {guess} (--help lists all)",
                *((meant.name,) if meant else ()),
            )


def _setting(field: ConfigField, flag: Given, findings: Findings) -> Iterator[Setting]:
    try:
        if flag.flag in field.flags:
            yield Setting(field, value_of(field, flag.words), flag.name)
        elif not flag.words:
            yield Setting(field, field.sets[flag.flag], flag.name)
        else:
            raise ValueError(f"takes no value, but got {' '.join(flag.words)}")
    except ValueError as error:
        findings.doubt(f"{flag.name} {error}", field.name)


def _program_word(name: str, given: Sequence[Given], findings: Findings) -> str | None:
    """The one value of --config or --preset."""
    words = [word for flag in given if flag.flag == name for word in flag.words]
    if len(words) == 1:
        return words[0]
    if any(flag.flag == name for flag in given):
        findings.problems.append(f"{name} takes one value, but got {' '.join(words) or 'none'}")
    return None


def _preset(name: str | None, findings: Findings) -> Config:
    if name is None:
        return Config()
    if name not in PRESETS:
        findings.doubt(
            f"--preset {name} is not known: choose one of {', '.join(PRESETS)}; "
            f"nearest is {nearest(name, PRESETS)}",
            *(field.name for field in fields(Config().model)),
        )
        return Config()
    return Config(model=PRESETS[name])


def _with(base: Config, settings: Mapping[str, Setting]) -> Config:
    changes: dict[str, dict[str, object]] = {}
    for name, setting in settings.items():
        changes.setdefault(setting.field.group, {})[name] = setting.value
    return replace(
        base, **{group: replace(getattr(base, group), **values) for group, values in changes.items()}
    )


def _apply_legacy_rules(given: Sequence[Given], config: Config, findings: Findings) -> None:
    rules = {**legacy_rules(), **REMARKS}
    line = Line(config, {flag.flag: flag for flag in given}, _world_size())
    for flag in line.flags.values():
        if flag.flag in rules:
            rules[flag.flag](flag, line, findings)


def _world_size() -> int | None:
    """Ranks that were started, where the launcher says it."""
    text = os.environ.get("WORLD_SIZE", "")
    return int(text) if text.isdecimal() else None


def _print_and_exit(text: str) -> None:
    """Prints once, whatever the number of ranks, and ends the program."""
    if is_first_rank():
        sys.stdout.write(text)
    raise SystemExit(0)
