"""What one layout saves, another loads: every element bitwise, and the run continues as if undisturbed."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.checkpoint.manifest import read_manifest
from megalite.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainingConfig,
)
from megalite.config.presets import PRESETS
from megalite.tensor_parallel.parameter_spec import ParameterShard
from megalite.train.trainer import Trainer, start_trainer
from tests.live_ranks import run_ranks

Layout = dict[str, Any]
TP2_PP2: Layout = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
TP2_DP2: Layout = {"tensor_model_parallel_size": 2, "data_parallel_size": 2}
PP2_DP2: Layout = {"pipeline_model_parallel_size": 2, "data_parallel_size": 2}
DP4_SHARD2: Layout = {"data_parallel_size": 4, "data_parallel_shard_degree": 2}
GATHERED: Layout = {"overlap_param_gather": True}
GATHERED_IN_8_BITS = {"fp8_format": "hybrid", "emulate": True, "fp8_param_gather": True}
LAYOUTS: dict[str, Layout] = {
    "one rank": {},
    "tp2 sequence parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "tp4": {"tensor_model_parallel_size": 4},
    "tp2 pp2": TP2_PP2,
    "pp4": {"pipeline_model_parallel_size": 4},
    "pp2": {"pipeline_model_parallel_size": 2},
    "pp2 uneven": {"pipeline_model_parallel_size": 2, "pipeline_layers": [3, 1]},
    "pp2 interleaved": {"pipeline_model_parallel_size": 2, "pipeline_schedule": "interleaved"},
    "pp2 zb-v": {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-v"},
    "dp2": {"data_parallel_size": 2},
    "dp2 zero1": {"data_parallel_size": 2, "zero_stage": 1, **GATHERED},
    "dp2 zero2": {"data_parallel_size": 2, "zero_stage": 2, **GATHERED},
    "dp2 zero3": {"data_parallel_size": 2, "zero_stage": 3},
    "dp3 zero3": {"data_parallel_size": 3, "zero_stage": 3},
    "dp4 zero1": {"data_parallel_size": 4, "zero_stage": 1, **GATHERED},
    "dp4 zero3": {"data_parallel_size": 4, "zero_stage": 3},
    "dp4 zero1 shard2": {**DP4_SHARD2, "zero_stage": 1, **GATHERED},
    "dp4 zero2 shard2": {**DP4_SHARD2, "zero_stage": 2, **GATHERED},
    "dp4 zero3 shard2": {**DP4_SHARD2, "zero_stage": 3},
    "tp2 dp2 zero1": {**TP2_DP2, "zero_stage": 1},
    "tp2 dp2 zero3": {**TP2_DP2, "zero_stage": 3},
    "pp2 dp2 zero1": {**PP2_DP2, "zero_stage": 1},
    "pp2 dp2 zero3": {**PP2_DP2, "zero_stage": 3},
    "pp2 interleaved dp2 zero2": {**PP2_DP2, "pipeline_schedule": "interleaved", "zero_stage": 2},
    "pp2 zb-v dp2 zero3": {**PP2_DP2, "pipeline_schedule": "zb-v", "zero_stage": 3},
    "tp2 pp2 dp2 zero1": {**TP2_PP2, "data_parallel_size": 2, "zero_stage": 1},
}
WAYS_TO_SHARE = (
    "dp2 zero1, one rank, dp2 zero2, dp4 zero1, dp4 zero3 shard2, dp4 zero1 shard2, dp2 zero3, dp2"
)
CHAINS = [
    (
        *("gpt-tiny", "fp64"),
        "one rank, tp2 pp2, pp2 uneven, tp2 dp2 zero3, pp2 zb-v dp2 zero3, one rank",
    ),
    ("llama-tiny, 2 layers, ema", "fp64", "pp2, tp2 dp2 zero3, tp2 sequence parallel"),
    ("llama-tiny, 2 layers, muon", "fp64", "pp2, tp2 dp2 zero1, tp2 sequence parallel"),
    ("bloom-tiny, 2 layers", "fp64", "pp2, tp4, tp2 sequence parallel"),
    ("gpt-tiny, 2 layers, ema", "bf16", "tp2 sequence parallel, tp2 sequence parallel, tp2 dp2 zero3, pp2"),
    ("llama-tiny, 2 layers", "fp16", "pp2, tp2 dp2 zero1, tp2 sequence parallel"),
    ("llama-tiny, 2 layers, ema, fp8", "bf16", "dp2 zero1, tp2 dp2 zero3, dp4 zero2 shard2, pp2, dp2 zero1"),
    (
        *("gpt-tiny, 2 layers", "bf16"),
        "dp2 zero1, one rank, dp2 zero2, dp4 zero2 shard2, dp4 zero2 shard2, dp4 zero3 shard2, "
        "dp4 zero3 shard2, dp2 zero3, dp2 zero3, dp2, dp2 zero1",
    ),
    (
        "gpt-tiny, 2 layers",
        "fp32",
        "dp4 zero1, dp4 zero1 shard2, dp2 zero3, one rank",
    ),
    ("gpt-tiny, 2 layers", "fp16", "dp2 zero2, dp3 zero3, dp2"),
    *(
        pytest.param(*row, marks=pytest.mark.slow)
        for row in (
            ("gpt-tiny", "fp64", ", ".join(name for name in [*LAYOUTS, "one rank"] if "dp3" not in name)),
            ("llama-tiny", "fp64", "tp2 pp2, tp4, pp2 zb-v, tp2 pp2"),
            ("bloom-tiny", "fp64", "tp2 pp2, pp2 dp2 zero1, tp2 pp2"),
            ("gpt-tiny, ema", "bf16", "tp2 pp2, tp4, tp2 pp2"),
            ("gpt-tiny, 2 layers", "fp32", WAYS_TO_SHARE),
            ("gpt-tiny, 2 layers", "fp16", WAYS_TO_SHARE),
        )
    ),
]
"""Preset, precision, and the layouts that load from one another."""


def config_of(preset: str, layout: Layout, dtype: str, load: Path, save: Path, batch_size: int = 4) -> Config:
    """A vocabulary that each tp pads to another size: 101, 102 and 104 rows."""
    preset, *options = preset.split(", ")
    optimizer = OptimizerConfig(
        lr=1e-2,
        initial_loss_scale=2.0**10,
        optimizer="muon" if "muon" in options else "adam",
        ema_decay=0.9 if "ema" in options else None,
    )
    micro_batch_size = math.gcd(2, batch_size // layout.get("data_parallel_size", 1))
    model = dataclasses.replace(
        PRESETS[preset],
        num_layers=2 if "2 layers" in options else 4,
        vocab_size=101,
        make_vocab_size_divisible_by=1,
    )
    return Config(
        model=dataclasses.replace(model, seq_length=16, params_dtype=dtype),
        parallel=ParallelConfig(**layout, ddp_bucket_size=20000),
        optimizer=optimizer,
        data=DataConfig(mock_data=True),
        training=TrainingConfig(
            **(GATHERED_IN_8_BITS if "fp8" in options else {}),
            **{"micro_batch_size": micro_batch_size, "global_batch_size": batch_size},
            **{"train_iters": 8, "eval_iters": 0},
        ),
        checkpoint=CheckpointConfig(save=str(save), load=str(load)),
    )


def world_size(parallel: ParallelConfig) -> int:
    return parallel.tp * parallel.pipeline_model_parallel_size * (parallel.data_parallel_size or 1)


Piece = tuple[torch.Tensor, int, tuple[int, ...], tuple[int, ...], int | None, int]
"""A part's elements, start, shape, full shape without padding, shard, and rank of tp."""
Pieces = dict[str, Piece | torch.Tensor]
Ranks = list[Pieces]
"""By rank and name."""


def run(topology, config: Config, num_before: int) -> tuple[Pieces, float, Pieces]:
    """Load if there is something to load, train, save, and train one more iteration.

    Returns:
        The pieces of this rank as saved, the last iteration's loss, and the pieces at the end.
    """
    with start_trainer(config, topology) as trainer:
        assert (trainer.load() is not None) is Path(config.checkpoint.load or "").exists()
        for _ in range(num_before):
            trainer.step()
        trainer.save()
        return pieces_of(trainer), trainer.step().loss, pieces_of(trainer)


def pieces_of(trainer: Trainer) -> Pieces:
    tp_rank = trainer.topology.tp.rank
    return {name: piece_of(tensor, tp_rank) for name, tensor in trainer.tensors().items()}


def piece_of(held: torch.Tensor | ParameterShard, tp_rank: int) -> Piece | torch.Tensor:
    if isinstance(held, torch.Tensor):
        return held.clone()
    spec = held.spec
    return held.tensor.clone(), held.start, held.shape, spec.used_shape, spec.dim_cut_over("tp"), tp_rank


def full_tensors(ranks: Ranks) -> dict[str, torch.Tensor]:
    """What the ranks hold, each tensor put together; NaN where none holds an element."""
    full: dict[str, torch.Tensor] = {}
    used: dict[str, int] = {}
    for pieces in ranks:
        for name, piece in pieces.items():
            if isinstance(piece, torch.Tensor):
                assert torch.equal(full.setdefault(name, piece), piece), name
                continue
            elements, start, shape, used_shape, cut_dim, tp_rank = piece
            dim = cut_dim or 0
            offset = 0 if cut_dim is None else shape[dim] * tp_rank
            room = list(used_shape)
            room[dim] += 8  # padding
            whole = full.setdefault(name, torch.full(room, torch.nan, dtype=elements.dtype))
            mine = whole.narrow(dim, offset, shape[dim])
            flat = mine.flatten()
            flat[start : start + elements.numel()] = elements
            mine.copy_(flat.view(shape))
            used[name] = (dim, used_shape[dim])
    return {
        name: tensor.narrow(used[name][0], 0, used[name][1]) if name in used else tensor
        for name, tensor in full.items()
    }


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert tensor.isfinite().all(), name
        assert torch.equal(found[name], tensor), name


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Weights and optimizer state, of each tensor's largest element."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name] - tensor).abs().max() <= 1e-11 * tensor.abs().max(), name


def assert_bitwise(ranks: Ranks, expected_ranks: Ranks) -> None:
    """Padding too."""
    for pieces, expected in zip(ranks, expected_ranks, strict=True):
        assert pieces.keys() == expected.keys()
        for name, piece in expected.items():
            pair = (pieces[name][0], piece[0]) if isinstance(piece, tuple) else (pieces[name], piece)
            assert torch.equal(*pair), name


@pytest.mark.parametrize(("preset", "dtype", "names"), CHAINS)
def test_each_layout_loads_what_another_saved(tmp_path: Path, preset: str, dtype: str, names: str) -> None:
    """The first layout trains. Each later one loads and saves the same bits, and trains on alike."""
    known: dict[str, tuple[float, Ranks, Ranks]] = {}
    previous = None
    for number, name in enumerate(names.split(", ")):
        load, save = tmp_path / f"{number - 1}", tmp_path / f"{number}"
        save.mkdir()
        config = config_of(preset, LAYOUTS[name], dtype, load, save, 6 if "dp3" in names else 4)
        if dtype == "fp16":  # the first updates overflow, and the scale that is saved is not the initial one
            optimizer = dataclasses.replace(config.optimizer, initial_loss_scale=2.0**20, hysteresis=1)
            config = dataclasses.replace(config, optimizer=optimizer)
        ranks = run_ranks(run, config.mesh, world_size(config.parallel), config, 0 if number else 3)
        saved, losses, ends = (list(each) for each in zip(*ranks, strict=True))
        if number == 0:
            expected, expected_loss, expected_end = full_tensors(saved), losses[-1], full_tensors(ends)
        assert_same(full_tensors(saved), expected)
        tolerance = {"fp64": 1e-12, "fp32": 1e-5, "bf16": 5e-3, "fp16": 1e-3}[dtype]
        assert losses[-1] == pytest.approx(expected_loss, rel=tolerance)
        if dtype == "fp64":
            assert_close(full_tensors(ends), expected_end)
        if name in known:  # a layout continues as itself bitwise
            assert losses[-1] == known[name][0]
            assert_same(full_tensors(ends), full_tensors(known[name][2]))
        if name == previous:
            assert_bitwise(saved, known[name][1])
            assert_bitwise(ends, known[name][2])
        known[name] = losses[-1], saved, ends
        previous = name
    assert expected["optimizer.num_steps"] > 0
    assert expected.get("optimizer.loss_scaler.scale", 0.0) < 2.0**20
    assert ("optimizer.loss_scaler.scale" in expected) is (dtype == "fp16")
    assert any(name.endswith(".main") for name in expected) is (dtype in ("bf16", "fp16"))
    for name, main in expected.items():
        if name.endswith(".main"):
            weight = expected[name.removesuffix(".main").replace("optimizer.", "model.", 1)]
            assert main.dtype == torch.float32
            assert torch.equal(weight, main.to(weight.dtype))


def test_what_is_held_alike_is_saved_once(tmp_path: Path) -> None:
    config = config_of("gpt-tiny, 2 layers", TP2_PP2, "fp64", tmp_path / "none", tmp_path)
    ranks = run_ranks(run, config.mesh, 4, config, 0)
    manifest = read_manifest(tmp_path / "iter_0000000")
    files = {name: [piece.file for piece in pieces] for name, pieces in manifest.tensors.items()}
    assert files.keys() == set().union(*(saved for saved, *_ in ranks))
    assert files["model.layers.0.attention_norm.weight"] == ["pp_00_tp_00.safetensors"]
    assert len(files["model.layers.0.mlp.up.weight"]) == 2
    assert len(files["model.embedding.word.weight"]) == 4  # on the first and the last stage


def test_the_padding_of_the_vocabulary_is_free(tmp_path: Path, one_rank) -> None:
    losses = []
    for number, padding in enumerate(({}, {"pad_vocab_size_to": 150}, {"make_vocab_size_divisible_by": 7})):
        load, save = tmp_path / f"{number - 1}", tmp_path / f"{number}"
        save.mkdir()
        config = config_of("gpt-tiny, 2 layers", {}, "fp64", load, save)
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, **padding))
        losses.append(run(one_rank, config, 0 if number else 2)[1])
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-12)


def initial(topology, config: Config) -> Pieces:
    with start_trainer(config, topology) as trainer:
        return pieces_of(trainer)


def test_initial_main_weights_are_drawn_in_fp32(tmp_path: Path, one_rank) -> None:
    exact = full_tensors([initial(one_rank, config_of("gpt-tiny, 2 layers", {}, "fp32", tmp_path, tmp_path))])
    names = [name.removeprefix("model.") for name in exact if name.startswith("model.")]
    assert names
    for layout in ("dp2 zero1", "dp2 zero3"):
        config = config_of("gpt-tiny, 2 layers", LAYOUTS[layout], "bf16", tmp_path, tmp_path)
        rounded = full_tensors(run_ranks(initial, config.mesh, 2, config))
        for name in names:
            assert torch.equal(rounded[f"optimizer.{name}.main"], exact[f"model.{name}"])
            assert torch.equal(rounded[f"model.{name}"], exact[f"model.{name}"].bfloat16())


def evaluate_and_load(topology, config: Config) -> tuple[float, float, float]:
    """Validation losses of what is saved, of the weights an iteration later, and of what is loaded."""
    with start_trainer(config, topology) as trainer:
        saved = trainer.evaluate(trainer.datasets.valid, 0)["lm_loss"]
        trainer.save()
        trainer.step()
        later = trainer.evaluate(trainer.datasets.valid, 0)["lm_loss"]
        assert trainer.load()
        return saved, later, trainer.evaluate(trainer.datasets.valid, 0)["lm_loss"]


def test_weights_that_an_evaluation_left_whole_are_not_used_again(tmp_path: Path) -> None:
    config = config_of("gpt-tiny, 2 layers", LAYOUTS["dp2 zero3"], "fp32", tmp_path, tmp_path)
    config = dataclasses.replace(config, training=dataclasses.replace(config.training, eval_iters=1))
    for saved, later, loaded in run_ranks(evaluate_and_load, config.mesh, 2, config):
        assert saved == loaded != later
