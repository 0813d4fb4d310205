"""What the program says and does where a run takes only some of a checkpoint, or is of another kind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.end_to_end.conftest import ROOT, TINY_FLAGS, Run, status_of, write_corpus


class Ended(NamedTuple):
    """A run on one rank in this process."""

    status: int
    warnings: list[str]
    errors: list[str]
    iterations: list[dict[str, Any]]
    output: list[str]


Train = Callable[..., Ended]


FLAGS = (*TINY_FLAGS[:-2], "--eval-iters", "0")


@pytest.fixture
def train(corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> Train:
    monkeypatch.chdir(ROOT)

    def run(*flags: str, base: tuple[str, ...] = FLAGS) -> Ended:
        metrics = tmp_path / "metrics.jsonl"
        metrics.unlink(missing_ok=True)
        data = () if any(flag.endswith("data-path") for flag in flags) else ("--data-path", corpus)
        status = status_of(*base, *data, "--metrics-file", str(metrics), *flags)
        output = capsys.readouterr()
        return Ended(
            status,
            [line[9:] for line in output.out.splitlines() if line.startswith("warning: ")],
            [line[7:] for line in output.err.splitlines() if line.startswith("error: ")],
            [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else [],
            output.out.splitlines(),
        )

    return run


@pytest.fixture(scope="module")
def saved(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four iterations, from a rate of 0.01 down to 0."""
    folder = tmp_path_factory.mktemp("saved")
    assert status_of(*FLAGS, "--data-path", corpus, "--save", str(folder), "--lr", "0.01") == 0
    return folder


def figures(ended: Ended, name: str) -> list[Any]:
    assert ended.status == 0, ended.errors
    return [line[name] for line in ended.iterations if "iteration" in line]


def test_finetune_starts_a_run_of_its_own(train: Train, saved: Path, tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("iter_0000003")
    folders = ("--load", str(saved), "--save", str(tmp_path))
    ended = train(*folders, "--finetune", "--seed", "5", "--lr", "0.001", "--bf16")
    assert figures(ended, "iteration") == [1, 2, 3, 4]
    assert figures(ended, "consumed_samples") == [4, 8, 12, 16]
    assert figures(ended, "learning_rate") == pytest.approx([0.00075, 0.0005, 0.00025, 0.0])
    assert figures(ended, "lm_loss")[0] < 5.0  # log(257) is 5.5
    assert (
        f"loaded only the weights from {saved / 'iter_0000004'}: the run starts at iteration 0"
        in ended.output
    )
    assert any("params_dtype fp32 (now bf16)" in line for line in ended.warnings)
    assert any("holds checkpoints, but none of them is loaded" in line for line in ended.warnings)


@pytest.mark.slow
def test_a_longer_run_is_asked_for_its_schedule(train: Train, saved: Path) -> None:
    flags = ("--load", str(saved), "--lr", "0.01", "--train-iters", "8")
    ended = train(*flags)
    assert ended.status == 1
    (error,) = ended.errors
    assert "another schedule: lr_decay_iters 4 (now 8); pass --override-opt-param-scheduler" in error
    new = train(*flags, "--override-opt-param-scheduler")
    assert figures(new, "learning_rate") == pytest.approx([0.00375, 0.0025, 0.00125, 0.0])
    kept = train(*flags, "--use-checkpoint-opt-param-scheduler")
    assert figures(kept, "learning_rate") == [0.0] * 4
    (warning,) = (line for line in kept.warnings if "schedule" in line)
    assert "the checkpoint's schedule is kept: lr_decay_iters 4 (not 8)" in warning
    assert figures(train(*flags, "--lr-decay-iters", "4"), "learning_rate") == [0.0] * 4


@pytest.mark.slow
def test_the_optimizers_state_is_left_out_and_asked_for(train: Train, saved: Path, tmp_path: Path) -> None:
    more = ("--lr", "0.01", "--train-iters", "6", "--lr-decay-iters", "4")
    small = tmp_path / "small"
    assert train("--save", str(small), "--lr", "0.01", "--no-save-optim").status == 0
    (error,) = train("--load", str(small), *more).errors
    assert "has no optimizer state" in error
    losses = [
        figures(train("--load", str(folder), *more, "--no-load-optim"), "lm_loss")
        for folder in (small, saved)
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 2
    assert figures(train("--load", str(small), "--finetune"), "iteration") == [1, 2, 3, 4]


def test_another_tokenizer_is_told(train: Train, saved: Path) -> None:
    flags = ("--load", str(saved), "--lr", "0.01", "--train-iters", "5", "--lr-decay-iters", "4")
    assert not any("another tokenizer" in line for line in train(*flags).warnings)
    other = train(*flags, "--tokenizer-type", "NullTokenizer", "--vocab-size", "256")
    assert figures(other, "iteration") == [5]
    (warning,) = (line for line in other.warnings if "another tokenizer" in line)
    assert warning.startswith(f"checkpoint {saved / 'iter_0000004'} was trained with another tokenizer")


def test_the_model_of_the_checkpoint_is_taken(train: Train, saved: Path) -> None:
    base = FLAGS[2:4] + FLAGS[6:]
    assert not {"--preset", "--seq-length"} & {*base}
    flags = ("--load", str(saved), "--lr", "0.01", "--train-iters", "5", "--lr-decay-iters", "4")
    assert figures(train(*flags, "--use-checkpoint-args", base=base), "iteration") == [5]
    (error,) = train(*flags, base=base).errors
    assert "has another model: num_layers 4 (now 12), hidden_size 64 (now 768)" in error


GO_ON = ("--lr", "0.01", "--train-iters", "5", "--lr-decay-iters", "4")


def test_a_corpus_that_grew_is_refused_and_a_copy_is_not(
    train: Train, saved: Path, corpus: str, tmp_path: Path
) -> None:
    flags = ("--load", str(saved), *GO_ON)
    copy, grown = str(tmp_path / "copy"), str(tmp_path / "grown")
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{corpus}{suffix}", f"{copy}{suffix}")
    write_corpus(grown, [f"document {i}: ".encode() * 20 for i in range(41)])
    moved = train(*flags, "--data-path", copy)
    assert figures(moved, "iteration") == [5]
    assert moved.warnings == [f"changed since checkpoint {saved}/iter_0000004: train_iters 4 (now 5)"]
    (error,) = train(*flags, "--data-path", grown).errors
    assert error.startswith(
        f"checkpoint {saved}/iter_0000004 was trained on other data: corpus {corpus} 40 sequences in 20,400 "
        "bytes, "
    )
    assert "pass --allow-data-change to continue in the order of the new data" in error
    allowed = train(*flags, "--data-path", grown, "--allow-data-change")
    assert figures(allowed, "iteration") == [5]
    assert any("the next samples follow the new order" in line for line in allowed.warnings)
    assert any("new order; " in line and " and continues at " in line for line in allowed.warnings)
    longer = train(
        *flags[:2], "--lr", "0.01", "--train-iters", "4000", "--lr-decay-iters", "4", "--exit-interval", "5"
    )
    assert figures(longer, "iteration") == [5]
    (order,) = (
        line for line in longer.warnings if f"reorders the samples of {corpus} (epochs: 1, now " in line
    )
    assert "of its samples are read once more than without the change, and as many once less" in order
    (error,) = train(*flags, "--train-data-path", corpus).errors  # all of it: no --split cuts it
    assert f"train {corpus}[0:0.9] (now {corpus})" in error


def test_other_settings_of_the_optimizer_are_refused(train: Train, saved: Path) -> None:
    flags = ("--load", str(saved), *GO_ON)
    (error,) = train(*flags, "--clip-grad", "0.5", "--adam-beta2", "0.95", "--hidden-dropout", "0").errors
    assert "other settings: hidden_dropout 0.1 (now 0.0), adam_beta2 0.999 (now 0.95), clip_grad 1.0" in error
    allowed = train(*flags, "--clip-grad", "0.5", "--allow-settings-change")
    assert figures(allowed, "iteration") == [5]
    assert "the settings differ from the checkpoint's: clip_grad 1.0 (now 0.5)" in allowed.warnings


@pytest.mark.slow
def test_another_layout_and_precision_together(pretrain: Run, tmp_path: Path) -> None:
    save = ["--save", str(tmp_path / "a"), "--lr", "0.01", "--exit-interval", "2"]
    assert pretrain("--tp", "2", "--bf16", *save, ranks=2).returncode == 0
    untied = "--untie-embeddings-and-output-weights"
    load = ["--load", str(tmp_path / "a"), "--lr", "0.01", "--save", str(tmp_path / "b"), untied]
    done = pretrain("--pp", "2", "--fp16", "--allow-settings-change", *load, ranks=2)
    assert done.returncode == 0, done.stderr
    assert "resumed from" in done.stdout
    assert "the output weight starts as the word embedding" in done.stdout
    assert "it starts at --initial-loss-scale" in done.stdout
    back = pretrain("--load", str(tmp_path / "b"), "--finetune", "--params-dtype", "fp64")
    assert back.returncode == 0, back.stderr
