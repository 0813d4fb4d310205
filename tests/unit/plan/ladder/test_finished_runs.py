"""The runs of a ladder as they lie on disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from megalite.checkpoint.manifest import CONFIG
from megalite.cli.ladder import main
from megalite.frontends.command_line import parse_run
from megalite.plan.ladder.finished_runs import METRICS_FILE, TooFewRuns, read_planned_run, read_runs
from megalite.plan.ladder.sizes import LadderRun, ScalingRules, ladder_runs, write_configs
from megalite.utils.errors import UserError
from tests.checkpoint_folder import reseal, write_checkpoint
from tests.run_folder import evaluation, iteration, write_metrics

WORDS = "--preset gpt-tiny --vocab-size 256 --mock-data --global-batch-size 16 --lr 1e-3"


def write_ladder(folder: Path, depths: Sequence[int] = (1, 2, 3, 4), words: str = WORDS) -> list[LadderRun]:
    """Write the configs of a ladder."""
    config, _, set_fields = parse_run(words.split(), ("train_iters",))
    runs = ladder_runs(config, ScalingRules("depth"), depths, [1.0])
    assert len(list(write_configs(runs, folder, set_fields))) == len(runs)
    return runs


def finish(folder: Path, run: LadderRun, loss: Any, name: str = "") -> None:
    """Write what the run leaves: metrics, and a checkpoint with its config."""
    length = run.config.training.train_iters
    assert length is not None
    last = iteration(length, 0.0, 1.0, consumed_tokens=run.tokens, train_iters=length)
    validation = evaluation(length, 0.0, 2.0, loss)
    validation["validation"] |= {"name": name} if name else {}
    write_metrics(folder / run.name / METRICS_FILE, [last, validation])
    model = asdict(run.config.model) | {"vocab_size": run.vocab_size}
    saved = write_checkpoint(folder / run.name, length, description={"model": model, "layout": {"tp": 1}})
    (saved / CONFIG).write_text((folder / run.name / "config.yaml").read_text())
    reseal(saved, CONFIG)


def test_the_runs_of_a_folder_are_read(tmp_path: Path) -> None:
    runs = write_ladder(tmp_path)
    for run, loss in zip(runs, (4.0, 3.5, 3.2, 3.0), strict=True):
        finish(tmp_path, run, loss)
    found, notes = read_runs([tmp_path], None)
    assert [(each.name, each.loss) for each in found] == [
        *(("depth-1", 4.0), ("depth-2", 3.5), ("depth-3", 3.2), ("depth-4", 3.0)),
    ]
    counts = [(each.run.parameters, each.run.tokens, each.run.flops) for each in found]
    assert counts == [(run.parameters, run.tokens, run.flops) for run in runs]
    assert notes == []
    again, _ = read_runs([tmp_path / "depth-1", tmp_path, tmp_path / "depth-1"], None)
    assert again == found


def test_a_written_config_is_the_planned_run(tmp_path: Path) -> None:
    for run in write_ladder(tmp_path):
        planned = read_planned_run(tmp_path / run.name / "config.yaml")
        assert (planned.name, planned.tokens, planned.flops) == (run.name, run.tokens, run.flops)
        assert planned.config.checkpoint.save == planned.config.checkpoint.load == str(tmp_path / run.name)


def test_a_planned_run_needs_a_length(tmp_path: Path) -> None:
    file = tmp_path / "large.yaml"
    file.write_text("vocab_size: 256\n")
    with pytest.raises(UserError, match=r"large.yaml has no length of the run: add train_iters to it$"):
        read_planned_run(file)


def test_runs_that_do_not_count_are_named(tmp_path: Path) -> None:
    runs = write_ladder(tmp_path, (1, 2, 3, 4, 5, 6, 7, 8))
    for run, loss in zip(runs, (4.0, 3.5, 3.2, "NaN", 3.0, 2.9, 2.8), strict=False):
        finish(tmp_path, run, loss)
    lengths = [run.config.training.train_iters for run in runs]
    short = iteration(10, 0.0, 1.0, train_iters=lengths[4])
    write_metrics(tmp_path / "depth-5" / METRICS_FILE, [short])
    last = iteration(lengths[5] or 0, 0.0, 1.0, train_iters=lengths[5])
    write_metrics(tmp_path / "depth-6" / METRICS_FILE, [last])
    for file in (tmp_path / "depth-7").rglob("run.json"):
        file.unlink()
    found, notes = read_runs([tmp_path], None)
    assert [each.name for each in found] == ["depth-1", "depth-2", "depth-3"]
    assert notes == [
        "depth-4 is skipped: its validation loss is nan",
        f"depth-5 is skipped: it has not finished: iteration 10 of {lengths[4]:,}",
        "depth-6 is skipped: it was not evaluated at its end",
        "depth-7 is skipped: it has no checkpoint, which has its config",
        "depth-8 is skipped: it has not started",
    ]


def test_fewer_than_three_sizes_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = write_ladder(tmp_path, (1, 2))
    other = write_ladder(tmp_path / "again", (2,))
    for folder, run in ((tmp_path, runs[0]), (tmp_path, runs[1]), (tmp_path / "again", other[0])):
        finish(folder, run, 3.0)
    with pytest.raises(UserError, match=r"^a fit needs runs of 3 sizes or more, and there are 2$"):
        read_runs([tmp_path, tmp_path / "again"], None)
    with pytest.raises(UserError):
        main(["fit", str(tmp_path), str(tmp_path / "again")])
    assert (
        capsys.readouterr().err == "note: depth-2 and depth-2 have the same compute: they count as one size\n"
    )


@pytest.mark.parametrize("has_folder", [True, False])
def test_a_folder_without_metrics_is_refused(tmp_path: Path, has_folder: bool) -> None:
    path = tmp_path if has_folder else tmp_path / "missing"
    with pytest.raises(UserError, match="holds no metrics.jsonl" if has_folder else "is not a folder"):
        read_runs([path], None)


def test_other_vocabularies_are_refused(tmp_path: Path) -> None:
    for run in write_ladder(tmp_path, (1, 2, 3)):
        finish(tmp_path, run, 3.0)
    (other,) = write_ladder(tmp_path, (4,), WORDS.replace("256", "300"))
    finish(tmp_path, other, 3.0)
    with pytest.raises(UserError, match=r"^depth-3 has a vocabulary of 256 tokens and depth-4 of 300: "):
        read_runs([tmp_path], None)


def test_one_of_several_validation_sets(tmp_path: Path) -> None:
    for run in write_ladder(tmp_path):
        finish(tmp_path, run, 3.0, name="web")
    with pytest.raises(TooFewRuns) as caught:
        read_runs([tmp_path], None)
    assert "not evaluated at its end: pass --dataset with one of web" in caught.value.notes[0]
    assert len(read_runs([tmp_path], "web")[0]) == 4


def test_a_config_of_another_ladder_is_not_replaced(tmp_path: Path) -> None:
    write_ladder(tmp_path)
    write_ladder(tmp_path)
    with pytest.raises(
        UserError, match=r"depth-1/config.yaml is of another ladder: remove .*depth-1, or pass"
    ):
        write_ladder(tmp_path, words=WORDS.replace("1e-3", "2e-3"))
