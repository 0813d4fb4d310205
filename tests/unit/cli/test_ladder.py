"""The command line of ladders, from the configs to the fit."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megalite.cli.ladder import main
from megalite.frontends.command_line import parse
from megalite.plan.ladder.sizes import ScalingRules, scaling_parameters
from megalite.utils.errors import ConfigError, UserError
from tests.unit.plan.ladder.test_finished_runs import finish, write_ladder

REFERENCE = "--preset gpt-tiny --vocab-size 256 --mock-data --global-batch-size 16"


def test_a_ladder_is_fitted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    *runs, large = write_ladder(tmp_path, (1, 2, 3, 4, 8))
    for run in runs:
        finish(tmp_path, run, 2.0 + 100 * run.flops**-0.2)
    main(["fit", str(tmp_path), "--predict", str(tmp_path / "depth-8" / "config.yaml")])
    printed = capsys.readouterr()
    assert printed.err == "note: depth-8 is skipped: it has not started\n"
    assert "L(C) = 2.0000 + 100 C^-0.2000 (" in printed.out
    assert printed.out.endswith(f"\n\n{tmp_path / 'ladder.html'}\n{tmp_path / 'ladder.json'}\n")
    record = json.loads((tmp_path / "ladder.json").read_text())
    assert record["notes"] == ["depth-8 is skipped: it has not started"]
    (prediction,) = record["predictions"]
    assert prediction["by_compute"]["value"] == pytest.approx(2.0 + 100 * large.flops**-0.2)
    assert "L(C) = " in (tmp_path / "ladder.html").read_text()


def test_the_exponents_are_passed_on(tmp_path: Path) -> None:
    words = ["--widths", "32,64", "--output", str(tmp_path), "--batch-exponent", "0", "--lr-exponent", "-1"]
    main(["write", *words, *REFERENCE.split()])
    text = (tmp_path / "width-32" / "config.yaml").read_text()
    found = re.search(r"global_batch_size: (\d+)", text), re.search(r"  lr: (\S+)", text)
    assert found[0] and found[1] and found[0][1] == "16" and float(found[1][1]) > 6e-4
    assert ScalingRules("width").lr_exponent > -1


@pytest.mark.parametrize(("words", "exponent"), [("--mup-base-width 64", 0.0), ("", -1 / 3)])
def test_mup_keeps_the_learning_rate(words: str, exponent: float, tmp_path: Path) -> None:
    main(
        [
            "write",
            "--widths",
            "64,128",
            "--output",
            str(tmp_path),
            "--lr",
            "1e-3",
            *words.split(),
            *REFERENCE.split(),
        ]
    )
    wide, _ = parse(["--config", str(tmp_path / "width-128" / "config.yaml")])
    narrow, _ = parse(["--config", str(tmp_path / "width-64" / "config.yaml")])
    growth = scaling_parameters(wide.model, 1) / scaling_parameters(narrow.model, 1)
    assert wide.optimizer.lr == pytest.approx(1e-3 * growth**exponent)
    assert wide.model.mup_base_width == narrow.model.mup_base_width == (64 if words else None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", r"pass the sizes with one of --depths and --widths"),
        ("--depths 2 --widths 64", r"pass the sizes with one of --depths and --widths"),
        ("--depths 2,x", r"--depths: '2,x' is not a list of whole numbers above 0"),
        ("--depths 2 --lr-exponent nan", r"--lr-exponent: 'nan' is not a number from -2 to 2"),
        ("--depths 2 --tokens-per-parameter 0", r"--tokens-per-parameter: '0' is not a number above 0"),
        ("--depths 3 --pp 2", r"^depth-3: --num-layers 3 "),
    ],
)
def test_mistakes_in_sizes_and_rules_are_one_line(words: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message) as caught:
        main(["write", "--output", str(tmp_path), *words.split(), *REFERENCE.split()])
    assert len(str(caught.value).splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_the_page_and_its_json_have_two_names(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"fit.json is the name of the JSON file beside the page"):
        main(["fit", str(tmp_path), "-o", str(tmp_path / "fit.json")])


def test_the_first_word_is_the_step() -> None:
    with pytest.raises(ConfigError, match="invalid choice: 'draw'"):
        main(["draw"])
