"""Test when the program chooses the layout, and how --print-config writes a layout that is not chosen yet."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalite.config.config import LAYOUT_FIELDS, LAYOUT_OPTIONS, layout_source
from megalite.config.fields import config_fields
from megalite.config.validate import problems_in_any_layout
from megalite.frontends.command_line import parse_run
from megalite.observe.verify.layouts import layouts_named
from megalite.observe.verify.verification import verify_layouts
from megalite.utils.errors import UserError

RUN = "--preset gpt-tiny --vocab-size 512 --mock-data --train-iters 2 --lr 1e-3 --global-batch-size 8"


def source(flags: str) -> str:
    parsed = parse_run(f"{RUN} {flags}".split())
    return layout_source(parsed.config, parsed.set_fields)


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ("", "auto"),
        ("--bf16 --ddp-bucket-size 1000 --seed 3", "auto"),
        ("--layout auto --tp 2", "auto"),
        ("--layout manual", "manual"),
        ("--tp 1", "manual"),
        ("--micro-batch-size 1", "manual"),
        ("--use-distributed-optimizer", "manual"),
        ("--recompute-activations", "manual"),
        ("--dp 2", "manual"),
        ("--bf16 --fp8", "auto"),
        ("--bf16 --fp8 --emulate", "manual"),
    ],
)
def test_the_program_chooses_if_no_option_of_the_layout_is_set(flags: str, found: str) -> None:
    assert source(flags) == found


def test_a_file_sets_options_too(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    for text, found in (("seed: 3", "auto"), ("tp: 1", "manual"), ("pipeline_layers: null", "auto")):
        file.write_text(text)
        assert source(f"--config {file}") == found
    file.write_text("layout: auto\ntp: 2")
    assert source(f"--config {file}") == "auto"


def test_the_options_are_fields() -> None:
    assert {field.name for field in config_fields()} >= {*LAYOUT_OPTIONS, *LAYOUT_FIELDS}


@pytest.mark.parametrize("flags", ["", "--layout auto --tp 2", "--layout manual", "--pp 2"])
def test_a_printed_config_leaves_the_same_options_open(
    flags: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = f"{RUN} {flags}".split()
    with pytest.raises(SystemExit):
        parse_run([*argv, "--print-config"])
    file = tmp_path / "printed.yaml"
    file.write_text(capsys.readouterr().out)
    before, after = parse_run(argv), parse_run(["--config", str(file)])
    assert after.config == before.config
    assert layout_source(after.config, after.set_fields) == layout_source(before.config, before.set_fields)
    if layout_source(before.config, before.set_fields) == "auto":
        assert after.set_fields & LAYOUT_OPTIONS == before.set_fields & LAYOUT_OPTIONS


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "--layout auto without --global-batch-size"),
        ("--global-batch-size 8 --fp8 --bf16 --emulate", "--layout auto with --emulate"),
        ("--global-batch-size 8 --dry-run", "--layout auto with --dry-run"),
        ("--global-batch-size 8 --verify-layouts all", "--layout auto with --verify-layouts all"),
        ("--global-batch-size 8 --micro-batch-size 0", "--micro-batch-size 0 is out of range"),
        ("--global-batch-size 8 --lr 0 --min-lr 1", "--min-lr 1.0 is above --lr 0.0"),
    ],
)
def test_mistakes_that_no_layout_mends(flags: str, message: str) -> None:
    run = RUN.removesuffix(" --global-batch-size 8")
    config = parse_run(f"{run} --override-flags --layout auto {flags}".split()).config
    problems = problems_in_any_layout(config)
    assert len(problems) == 1
    assert message in problems[0]


def test_a_comparison_of_layouts_chooses_none() -> None:
    config = parse_run(f"{RUN} --layout auto".split()).config
    with pytest.raises(UserError, match="--layout auto chooses no layout here"):
        verify_layouts(config, layouts_named("tp2", config))


def test_mistakes_of_a_default_that_is_not_used_are_none() -> None:
    config = parse_run(f"{RUN} --layout auto --pp 3".split()).config
    assert problems_in_any_layout(config) == []
