"""What a run loads from a checkpoint of another precision, of a tied model, or in part, in any layout."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from megalite.checkpoint.progress import TrainingProgress
from megalite.config import Config
from megalite.train.trainer import Trainer, start_trainer
from megalite.utils.errors import UserError
from tests.live_ranks import run_ranks
from tests.ranks.checkpoint.test_load_layouts import Layout, config_of, full_tensors, piece_of, world_size

TP2: Layout = {"tensor_model_parallel_size": 2}
PP2: Layout = {"pipeline_model_parallel_size": 2}
DP2_ZERO1: Layout = {"data_parallel_size": 2, "zero_stage": 1}
DP2_ZERO3: Layout = {"data_parallel_size": 2, "zero_stage": 3}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
NUM_ITERATIONS = 2
Tensors = dict[str, torch.Tensor]


class Taken(NamedTuple):
    """What a run has after loading."""

    tensors: Tensors
    progress: TrainingProgress
    losses: list[float]
    rates: list[float]


def trainer_of(topology, config: Config) -> Trainer:
    return start_trainer(config, topology)


def train_and_save(topology, config: Config):
    with trainer_of(topology, config) as trainer:
        for _ in range(NUM_ITERATIONS):
            trainer.step()
        trainer.save()
        return {name: piece_of(tensor, topology.tp.rank) for name, tensor in trainer.tensors().items()}


def load_and_train(topology, config: Config, saves: bool):
    with trainer_of(topology, config) as trainer:
        try:
            assert trainer.load()
        except UserError as error:
            return str(error)
        if saves:
            trainer.save()
        pieces = {name: piece_of(tensor, topology.tp.rank) for name, tensor in trainer.tensors().items()}
        progress = trainer.progress
        results = [trainer.step() for _ in range(NUM_ITERATIONS)]
        return (
            pieces,
            progress,
            [result.loss for result in results],
            [result.plan.learning_rate for result in results],
        )


def saved_by(config: Config) -> Tensors:
    """What a run saves, put together."""
    Path(config.checkpoint.save or "").mkdir(exist_ok=True)
    return full_tensors(run_ranks(train_and_save, config.parallel.mesh, world_size(config.parallel), config))


def taken_by(config: Config, *, saves: bool = False) -> Taken:
    """What a run has of what it loads, put together."""
    Path(config.checkpoint.save or "").mkdir(exist_ok=True)
    ranks = run_ranks(load_and_train, config.parallel.mesh, world_size(config.parallel), config, saves)
    assert not isinstance(ranks[0], str), ranks[0]
    _, progress, losses, rates = ranks[-1]
    return Taken(full_tensors([rank[0] for rank in ranks]), progress, losses, rates)


def refusal(config: Config) -> str:
    """Every rank's error message."""
    messages = set(
        run_ranks(load_and_train, config.parallel.mesh, world_size(config.parallel), config, False)
    )
    assert len(messages) == 1
    return messages.pop()


def run_of(folder: Path, layout: Layout, dtype: str = "bf16", **changes: Any) -> Config:
    """A run of the folder, in whatever precision, with fields changed by name."""
    config = config_of("gpt-tiny", layout, dtype, folder, folder)
    changes = {"allow_settings_change": True, "num_layers": 2, "micro_batch_size": 2, **changes}
    for group in ("model", "optimizer", "training", "checkpoint"):
        part = getattr(config, group)
        mine = {name: value for name, value in changes.items() if hasattr(part, name)}
        config = dataclasses.replace(config, **{group: dataclasses.replace(part, **mine)})
    return config


Saved = tuple[Path, Tensors]


@pytest.fixture(scope="module")
def saved_as(tmp_path_factory):
    """By precision: the folder and the tensors of two iterations of tp 2."""
    known: dict[str, Saved] = {}

    def of(dtype: str) -> Saved:
        if dtype not in known:
            folder = tmp_path_factory.mktemp(dtype)
            known[dtype] = folder, saved_by(run_of(folder, TP2, dtype))
        return known[dtype]

    return of


def main_of(tensors: Tensors, name: str) -> torch.Tensor:
    """The finest weights that there are of a parameter."""
    return tensors.get(f"optimizer.{name}.main", tensors[f"model.{name}"])


def names_of(tensors: Tensors) -> list[str]:
    return [name.removeprefix("model.") for name in tensors if name.startswith("model.")]


def assert_weights(taken: Tensors, saved: Tensors, dtype: str) -> None:
    """Main weights bit for bit, and the model's those rounded."""
    assert set(names_of(taken)) == set(names_of(saved))
    for name in names_of(saved):
        main = main_of(taken, name)
        assert torch.equal(main, main_of(saved, name).to(main.dtype)), name
        assert taken[f"model.{name}"].dtype == DTYPES[dtype]
        assert torch.equal(taken[f"model.{name}"], main.to(DTYPES[dtype])), name


def moments_of(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if ".exp_avg" in name}


def assert_moments(taken: Tensors, saved: Tensors) -> None:
    assert moments_of(taken).keys() == moments_of(saved).keys()
    for name, moment in moments_of(taken).items():
        assert torch.equal(moment, moments_of(saved)[name].to(moment.dtype)), name


@pytest.mark.parametrize(
    ("before", "after", "layout"),
    [
        ("fp32", "bf16", PP2),
        ("bf16", "fp64", PP2),
        *(
            pytest.param(before, after, layout, marks=pytest.mark.slow)
            for before, after, layout in (
                ("fp16", "bf16", DP2_ZERO3),
                ("fp32", "fp16", DP2_ZERO1),
                ("bf16", "fp16", PP2),
                ("bf16", "fp32", DP2_ZERO3),
                ("fp64", "fp16", PP2),
                ("fp64", "bf16", DP2_ZERO3),
                ("fp32", "bf16", TP2),
            )
        ),
    ],
)
def test_another_precision_and_back(
    tmp_path: Path, saved_as, before: str, after: str, layout: Layout
) -> None:
    folder, saved = saved_as(before)
    there = run_of(folder, layout, after, save=str(tmp_path))
    taken = taken_by(there, saves=True)
    assert taken.progress.iteration == NUM_ITERATIONS
    assert_weights(taken.tensors, saved, after)
    assert_moments(taken.tensors, saved)
    assert torch.equal(taken.tensors["optimizer.num_steps"], saved["optimizer.num_steps"])
    back = taken_by(run_of(tmp_path, TP2, before))
    if before != "fp64":  # what fp32 rounded is lost
        assert_weights(back.tensors, saved, before)
        assert_moments(back.tensors, saved)
    if after == "fp16" or before == "fp16":
        assert ("optimizer.loss_scaler.scale" in taken.tensors) is (after == "fp16")
        scale = (taken if after == "fp16" else back).tensors["optimizer.loss_scaler.scale"]
        assert scale == 2.0**10  # the config's, anew
    assert taken.losses == pytest.approx(back.losses, rel=2e-2)


def test_moments_of_other_dtypes_and_back(tmp_path: Path, saved_as) -> None:
    """From fp32 to fp8 at ZeRO stage 1, then bit by bit to another layout, and to fp32."""
    folder, saved = saved_as("bf16")
    fp8 = {"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "bf16", "allow_settings_change": False}
    taken = taken_by(run_of(folder, DP2_ZERO1, save=str(tmp_path), **fp8), saves=True)
    num_changed = 0
    for name, moment in moments_of(saved).items():
        found = taken.tensors[name]
        assert found.dtype == torch.bfloat16
        if name.endswith(".exp_avg_sq"):
            assert torch.equal(found, moment.bfloat16())
            continue
        root = taken.tensors[name + "_sq"].float().sqrt()
        error = (found.float() - moment).abs()
        assert (error <= moment.abs() / 7 + root * 2.0**-12 + 1e-18).all()
        num_changed += int((error > 0).sum())
    assert num_changed > 1000
    again = taken_by(run_of(tmp_path, PP2, **fp8))
    assert_moments(again.tensors, taken.tensors)
    assert again.losses == pytest.approx(taken.losses, rel=1e-3)
    assert_moments(taken_by(run_of(tmp_path, TP2, allow_settings_change=False)).tensors, taken.tensors)


@pytest.mark.parametrize(
    ("before", "after", "layout"),
    [
        ("bf16", "fp32", PP2),
        ("fp32", "bf16", DP2_ZERO1),
        pytest.param("bf16", "bf16", DP2_ZERO3, marks=pytest.mark.slow),
    ],
)
def test_finetune_takes_the_weights_alone(saved_as, before: str, after: str, layout: Layout) -> None:
    folder, saved = saved_as(before)
    changes = {"finetune": True, "seed": 99, "global_batch_size": 8, "lr": 1e-3, "lr_warmup_iters": 4}
    taken = taken_by(run_of(folder, layout, after, **changes))
    assert taken.progress == TrainingProgress()
    assert taken.rates == pytest.approx([0.25e-3, 0.5e-3])
    assert_weights(taken.tensors, saved, after)
    assert not any(moment.any() for moment in moments_of(taken.tensors).values())
    assert taken.tensors["optimizer.num_steps"] == 0


@pytest.mark.parametrize("layout", [PP2, pytest.param(DP2_ZERO3, marks=pytest.mark.slow)])
def test_the_optimizers_state_need_not_be_loaded(saved_as, layout: Layout) -> None:
    folder, saved = saved_as("bf16")
    taken = taken_by(run_of(folder, layout, load_optim=False))
    assert taken.progress.iteration == NUM_ITERATIONS
    assert_weights(taken.tensors, saved, "bf16")  # main weights and all
    assert not any(moment.any() for moment in moments_of(taken.tensors).values())
    assert taken.tensors["optimizer.num_steps"] == 0


@pytest.mark.parametrize("layout", [PP2, pytest.param(DP2_ZERO3, marks=pytest.mark.slow)])
def test_the_optimizers_state_need_not_be_saved(tmp_path: Path, saved_as, layout: Layout) -> None:
    folder, whole = saved_as("bf16")
    small, saved = tmp_path, saved_by(run_of(tmp_path, TP2, save_optim=False))
    sizes = [
        sum(file.stat().st_size for file in each.glob("iter*/*.safetensors")) for each in (folder, small)
    ]
    assert sizes[1] < 0.2 * sizes[0]  # 2 of 14 bytes a weight
    message = refusal(run_of(small, layout))
    assert "has no optimizer state" in message
    assert "pass --no-load-optim" in message
    taken = taken_by(run_of(small, layout, load_optim=False))
    assert taken.progress.iteration == NUM_ITERATIONS
    for name in names_of(saved):
        rounded = taken.tensors[f"model.{name}"]
        assert torch.equal(rounded, whole[f"model.{name}"])
        assert torch.equal(taken.tensors[f"optimizer.{name}.main"], rounded.float())


@pytest.mark.parametrize("layout", [PP2, pytest.param(DP2_ZERO3, marks=pytest.mark.slow)])
def test_a_tied_model_goes_on_untied(tmp_path: Path, saved_as, layout: Layout) -> None:
    folder, saved = saved_as("bf16")
    untied = {"untie_embeddings_and_output_weights": True}
    taken = taken_by(run_of(folder, layout, save=str(tmp_path), **untied), saves=True)
    state = (f"optimizer.{{}}.{kind}" for kind in ("main", "exp_avg", "exp_avg_sq"))
    for pattern in ("model.{}", *state):
        for name in ("output.weight", "embedding.word.weight"):
            word = saved[pattern.format("embedding.word.weight")]
            assert torch.equal(taken.tensors[pattern.format(name)], word)
    message = refusal(run_of(tmp_path, layout))
    assert "untie_embeddings_and_output_weights True (now False); its output weight differs" in message
    back = taken_by(run_of(tmp_path, TP2, finetune=True))
    assert_weights(back.tensors, saved, "bf16")


def test_a_prolonged_run_chooses_its_schedule(tmp_path: Path, saved_as) -> None:
    folder, _ = saved_as("bf16")  # which reaches iteration 8, from 1e-2 down to 0
    longer = {"train_iters": 16}
    message = refusal(run_of(folder, PP2, **longer))
    assert "lr_decay_iters 8 (now 16); pass --override-opt-param-scheduler" in message
    keep = {"use_checkpoint_opt_param_scheduler": True, "save": str(tmp_path)}
    assert taken_by(run_of(folder, PP2, **keep, **longer), saves=True).rates == pytest.approx(
        [1e-2 * 5 / 8, 1e-2 * 4 / 8]
    )
    new = run_of(tmp_path, PP2, override_opt_param_scheduler=True, **longer)
    assert taken_by(new).rates == pytest.approx([1e-2 * 13 / 16, 1e-2 * 12 / 16])
