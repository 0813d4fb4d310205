"""Options of checkpoints: what is loaded, saved and kept, contradictions, and --use-checkpoint-args."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path

import pytest

from megalite.config import Config, ModelConfig, TrainingConfig, check_config, to_yaml
from megalite.config.validate import unused_options
from megalite.frontends.command_line import parse
from megalite.utils.errors import ConfigError
from tests.command_line import mistakes_of

ENOUGH = "--train-iters 100 --data-path p --tokenizer-type byte "


def read(line: str) -> tuple[Config, list[str]]:
    config, notices = parse(shlex.split(ENOUGH + line))
    check_config(config, None)
    return config, notices


def test_megatrons_flags() -> None:
    line = "--load A --save B --no-load-optim --no-save-optim --no-load-rng --no-save-rng"
    config, notices = read(line)
    assert (config.checkpoint.load_optim, config.checkpoint.save_optim) == (False, False)
    assert [notice.split(": ")[0] for notice in notices] == [
        "--no-load-rng is not needed",
        "--no-save-rng is not needed",
    ]
    config, notices = read("--load A --save A --override-opt-param-scheduler")
    assert config.checkpoint.override_opt_param_scheduler
    assert notices == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--finetune", "--finetune has no effect: --load is not set"),
        ("--no-load-optim", "--no-load-optim has no effect: --load is not set"),
        ("--no-save-optim", "--no-save-optim has no effect: --save is not set"),
        ("--load A --finetune --no-load-optim", "--no-load-optim has no effect: --finetune loads only the"),
        (
            "--load A --finetune --use-checkpoint-opt-param-scheduler",
            "--use-checkpoint-opt-param-scheduler has no effect: --finetune loads only the weights",
        ),
        (
            "--load A --no-load-optim --override-opt-param-scheduler",
            "--override-opt-param-scheduler has no effect: --no-load-optim is set",
        ),
        (
            "--weight-decay-incr-iters 5",
            "--weight-decay-incr-iters 5 has no effect: --weight-decay-incr-style is",
        ),
        ("--load-iteration 5", "--load-iteration 5 has no effect: --load is not set"),
        ("--keep-last 5", "--keep-last 5 has no effect: --save is not set"),
        ("--keep-every 5", "--keep-every 5 has no effect: --save is not set"),
    ],
)
def test_what_has_no_effect_is_told(line: str, message: str) -> None:
    (notice,) = read(line)[1]
    assert notice.startswith(message)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "--load A --override-opt-param-scheduler --use-checkpoint-opt-param-scheduler",
            "--override-opt-param-scheduler with --use-checkpoint-opt-param-scheduler: one resumes",
        ),
        ("--use-checkpoint-args", "--use-checkpoint-args without --load, from which it reads"),
        (
            "--load A --save A --finetune",
            "--finetune starts a new run at iteration 0, but --save A is",
        ),
        (
            "--load A --save ./A/ --finetune",
            "--finetune starts a new run at iteration 0, but --save ./A/ is",
        ),
        (
            "--load A --save A --no-load-optim",
            "--no-load-optim would drop the optimizer state at every restart",
        ),
        ("--load A --preset gpt-tiny --use-checkpoint-args", "--preset and --use-checkpoint-args both set"),
        (
            "--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 1 "
            "--weight-decay-incr-samples 5",
            "--weight-decay-incr-samples 5 with --train-iters 100: a run is counted in iterations or in",
        ),
        ("--load A --load-iteration -1", "--load-iteration -1 is out of range: it must be at least 0"),
        (
            "--save A --keep-last 0",
            "--keep-last 0 is out of range: it must be greater than 0 and below 2**31",
        ),
        ("--save A --keep-every 0", "--keep-every 0 is out of range: it must be greater than 0"),
    ],
)
def test_what_cannot_be_is_refused(line: str, message: str) -> None:
    (problem,) = mistakes_of(ENOUGH + line)
    assert problem.startswith(message)


MODEL = ModelConfig(num_layers=3, hidden_size=96, num_attention_heads=6, vocab_size=256, params_dtype="bf16")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Create two checkpoints, the earlier one with a layer less."""
    for iteration, num_layers in ((10, 2), (20, 3)):
        checkpoint = tmp_path / f"iter_{iteration:07d}"
        checkpoint.mkdir()
        model = ModelConfig(**{**vars(MODEL), "num_layers": num_layers})
        config = Config(model=model, training=TrainingConfig(seed=99))
        (checkpoint / "config.yaml").write_text(to_yaml(config))
    (tmp_path / "latest").write_text("iter_0000020\n")
    return tmp_path


def test_the_model_comes_from_the_checkpoint_where_it_is_not_given(folder: Path) -> None:
    config, notices = read(f"--load {folder} --use-checkpoint-args --hidden-dropout 0 --tp 2")
    assert config.model == ModelConfig(**{**vars(MODEL), "hidden_dropout": 0.0})
    assert config.training == TrainingConfig(train_iters=100)
    assert config.data.tokenizer_type == "byte"
    assert notices == []


def test_the_iteration_counts_and_latest_may_be_missing(folder: Path) -> None:
    assert read(f"--load {folder} --load-iteration 10 --use-checkpoint-args")[0].model.num_layers == 2
    for text in (None, "../../elsewhere", "iter_0000030", "\x00"):
        (folder / "latest").unlink(missing_ok=True)
        if text is not None:
            (folder / "latest").write_text(text)
        assert read(f"--load {folder} --use-checkpoint-args")[0].model == MODEL


def test_no_checkpoint_yet(tmp_path: Path) -> None:
    config, (notice,) = read(f"--load {tmp_path} --use-checkpoint-args --num-layers 5")
    assert config.model == ModelConfig(num_layers=5)
    assert "no checkpoint in --load" in notice


def test_a_config_of_a_later_version_is_told_by_line(folder: Path) -> None:
    file = folder / "iter_0000020" / "config.yaml"
    file.write_text(file.read_text().replace("model:\n", "model:\n  num_heads: 8\n"))
    with pytest.raises(ConfigError, match=r"config.yaml line 2: 'num_heads' is not a field of model"):
        read(f"--load {folder} --use-checkpoint-args")


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("--load A --load-iteration 20", "load_iteration", 20),
        ("--load A --ckpt-step 0", "load_iteration", 0),
        ("--save A --keep-last 2", "keep_last", 2),
        ("--save A --keep-every 100", "keep_every", 100),
        ("--save A --save-retain-interval 100", "keep_every", 100),
    ],
)
def test_flags_and_megatrons_are_taken(line: str, name: str, value: int) -> None:
    config, notices = read(line)
    assert getattr(config.checkpoint, name) == value
    assert not notices


BASE = ("--mock-data", "--vocab-size", "100", "--train-iters", "8")
LOCAL = ("--non-persistent-save-interval", "2", "--non-persistent-local-ckpt-dir", "/dev/shm/megalite")


def test_non_persistent_saves_need_a_place_and_a_run() -> None:
    text = "\n".join(mistakes_of(ENOUGH + "--non-persistent-save-interval 2"))
    assert "--non-persistent-save-interval 2 without --non-persistent-local-ckpt-dir" in text
    assert "--non-persistent-save-interval 2 without --save" in text


@pytest.mark.parametrize("kind", ["global", "in_memory"])
def test_other_kinds_are_refused_by_name(kind: str) -> None:
    (problem,) = mistakes_of(f"{ENOUGH} --save x {shlex.join(LOCAL)} --non-persistent-ckpt-type {kind}")
    assert f"--non-persistent-ckpt-type cannot be '{kind}': choose one of local" in problem


def test_megatrons_local_saves_are_taken() -> None:
    flags = ["--save", "x", *LOCAL, "--non-persistent-ckpt-type", "local", "--async-save"]
    config, _ = parse([*BASE, *flags, "--exit-on-save-failure"])
    check_config(config, 1)
    checkpoint = config.checkpoint
    assert (checkpoint.non_persistent_save_interval, checkpoint.async_save) == (2, True)
    assert not [line for line in unused_options(config) if "save" in line or "persistent" in line]


def test_saves_without_effect_are_told() -> None:
    config, _ = parse([*BASE, "--async-save", "--exit-on-save-failure", *LOCAL[2:]])
    message = "\n".join(unused_options(config))
    for name in ("async-save", "exit-on-save-failure", "non-persistent-local-ckpt-dir"):
        assert f"--{name}" in message
    saved = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, save="x"))
    assert "--async-save has no effect: the run saves only at its end" in "\n".join(unused_options(saved))
    by_time = dataclasses.replace(saved.checkpoint, save_interval_minutes=5.0)
    assert "--async-save" not in "\n".join(unused_options(dataclasses.replace(saved, checkpoint=by_time)))
    unsaved = dataclasses.replace(config, checkpoint=dataclasses.replace(by_time, save=None))
    assert "--save-interval-minutes 5.0 has no effect: --save is not set" in unused_options(unsaved)
