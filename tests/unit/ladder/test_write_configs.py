"""The configs that a ladder writes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from megalite.cli.ladder import main
from megalite.errors import UserError
from megalite.frontends.command_line import parse, parse_run
from megalite.ladder.sizes import ScalingRules
from megalite.ladder.write_configs import ladder_lines, ladder_runs, write_configs

ROOT = Path(__file__).parents[3]
WORDS = "--preset llama-tiny --vocab-size 256 --mock-data --global-batch-size 16 --tp 1"


def test_a_file_is_read_back_as_its_run(tmp_path: Path) -> None:
    config, _, set_fields = parse_run(WORDS.split(), ("train_iters",))
    runs = ladder_runs(config, ScalingRules("width"), [64, 96], [5.0, 20.0])
    names = ["width-64-tokens-5", "width-64-tokens-20", "width-96-tokens-5", "width-96-tokens-20"]
    assert [run.name for run in runs] == names
    for run, file in zip(runs, write_configs(runs, tmp_path, set_fields), strict=True):
        read, _ = parse(["--config", str(file)])
        assert (read.model, read.training, read.optimizer) == (
            *(run.config.model, run.config.training, run.config.optimizer),
        )
        text = file.read_text()
        assert text.startswith(f"# {run.name}: {run.parameters:,} parameters")
        # A field that is set to its default stays set: then the run chooses no layout.
        assert "tensor_model_parallel_size: 1\n" in text and "recompute" not in text


def test_the_table_has_a_line_for_each_run() -> None:
    config, *_ = parse_run(WORDS.split(), ("train_iters",))
    heads, *lines = ladder_lines(ladder_runs(config, ScalingRules("depth"), [2, 4], [20.0]))
    assert heads.split()[:3] == ["run", "layers", "hidden"] and len({*map(len, (heads, *lines))}) == 1
    assert [line.split()[:4] for line in lines] == [["depth-2", "2", "32", "2"], ["depth-4", "4", "64", "4"]]


def test_ties_are_refused() -> None:
    config, *_ = parse_run(WORDS.split(), ("train_iters",))
    with pytest.raises(UserError, match=r"^--depths has 4 twice: remove one$"):
        ladder_runs(config, ScalingRules("depth"), [2, 4, 4], [20.0])
    with pytest.raises(UserError, match=r"^--tokens-per-parameter has 20 twice: remove one$"):
        ladder_runs(config, ScalingRules("depth"), [2, 4], [20.0, 5.0, 20.0])


def test_the_documentation_shows_the_table_of_its_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "ladder.md").read_text()
    (command,) = re.findall(r"^python tools/ladder.py (write .*?[^\\])$", page, re.MULTILINE | re.DOTALL)
    main([*shlex.split(command.replace("\\\n", " ")), "--output", str(tmp_path)])
    table, _, files = capsys.readouterr().out.partition("\n\n")
    assert "".join(f"    {line}\n" for line in table.splitlines()) in page
    assert files.splitlines() == [str(file) for file in sorted(tmp_path.glob("*/config.yaml"))]
