"""Test what becomes of the command lines of Megatron's example scripts, and that all its flags are known."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from docs.make.flag_table import megatron_arguments, outcome
from megalite.config import check_config
from megalite.frontends.command_line import parse
from megalite.utils.errors import ConfigError
from tests.unit.frontends.megatron.lines import Script, example_scripts

_REFUSED = re.compile(r"--(\S+) (?:\((.+?)\) is not supported|only accepts .*? \((.+?)\): )")
SCRIPTS = example_scripts()


def outcome_of(script: Script) -> dict[str, Any]:
    """Parse a command line, and return its outcome as in megatron_scripts.yaml."""
    try:
        config, notices = parse(script.flags, architecture="bert" if "bert" in script.program else "gpt")
        check_config(config)
    except ConfigError as error:
        refused: dict[str, str] = {}
        errors = []
        for problem in error.problems:
            match = _REFUSED.match(problem)
            if match is None:
                errors.append(problem)
            else:
                feature = match[2] or match[3]
                refused[feature] = f"{refused.get(feature, '')} {match[1]}".strip()
        return {**({"refused": refused} if refused else {}), **({"errors": errors} if errors else {})}
    return {"warns": " ".join(notice.split()[0][2:] for notice in notices)} if notices else {}


@pytest.mark.parametrize("name", SCRIPTS)
def test_example_script(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds_config.json").write_text('{"gradient_clipping": "auto"}')  # no default of DeepSpeed's
    assert outcome_of(SCRIPTS[name]) == SCRIPTS[name].outcome


@pytest.mark.parametrize("project", megatron_arguments())
def test_no_argument_of_megatron_is_unknown(project: str) -> None:
    for flag in megatron_arguments()[project]:
        outcome(flag)  # raises for an unknown flag


def test_example_scripts_run_or_are_refused_for_what_is_missing() -> None:
    assert not any(
        "unknown flag" in error for each in SCRIPTS.values() for error in each.outcome.get("errors", ())
    )
    programs = [each for each in SCRIPTS.values() if each.program in ("pretrain_gpt.py", "pretrain_bert.py")]
    assert sum(not {"refused", "errors"} & each.outcome.keys() for each in programs) >= 50
