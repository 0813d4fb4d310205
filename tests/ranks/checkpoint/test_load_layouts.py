"""What one layout saves, another loads: every element bitwise, and the run continues as if undisturbed."""

from __future__ import annotations

import dataclasses
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

NUM_ITERATIONS = 2
Layout = dict[str, Any]
TP2_PP2: Layout = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
ONE: Layout = {}
LAYOUTS: dict[str, Layout] = {
    "one rank": ONE,
    "tp2 sequence parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "tp4": {"tensor_model_parallel_size": 4},
    "pp4": {"pipeline_model_parallel_size": 4},
    "pp2 uneven": {"pipeline_model_parallel_size": 2, "pipeline_layers": [3, 1]},
    "pp2 interleaved": {"pipeline_model_parallel_size": 2, "pipeline_schedule": "interleaved"},
    "pp2 zb-v": {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-v"},
    "dp2": {"data_parallel_size": 2},
    "dp2 zero1": {"data_parallel_size": 2, "zero_stage": 1},
    "dp2 zero2": {"data_parallel_size": 2, "zero_stage": 2},
    "dp2 zero3": {"data_parallel_size": 2, "zero_stage": 3},
    "tp2 dp2 zero1": {"tensor_model_parallel_size": 2, "data_parallel_size": 2, "zero_stage": 1},
    "pp2 dp2 zero1": {"pipeline_model_parallel_size": 2, "data_parallel_size": 2, "zero_stage": 1},
    "tp2 dp2 zero3": {"tensor_model_parallel_size": 2, "data_parallel_size": 2, "zero_stage": 3},
    "pp2 interleaved dp2 zero2": {
        "pipeline_model_parallel_size": 2,
        "pipeline_schedule": "interleaved",
        "data_parallel_size": 2,
        "zero_stage": 2,
    },
    "tp2 pp2 dp2 zero1": {**TP2_PP2, "data_parallel_size": 2, "zero_stage": 1},
    "pp2 zb-v dp2 zero3": {
        "pipeline_model_parallel_size": 2,
        "pipeline_schedule": "zb-v",
        "data_parallel_size": 2,
        "zero_stage": 3,
    },
    "pp2 dp2 zero3": {"pipeline_model_parallel_size": 2, "data_parallel_size": 2, "zero_stage": 3},
    "dp4 zero3": {"data_parallel_size": 4, "zero_stage": 3},
}
FAST = ("one rank", "tp4", "pp2 uneven", "pp2 zb-v", "dp2 zero2", "tp2 dp2 zero3", "pp2 dp2 zero3")
"""The whole table is for the slow tests."""
CASES = [
    *(
        pytest.param("gpt-tiny", name, "fp64", marks=[] if name in FAST else pytest.mark.slow)
        for name in LAYOUTS
    ),
    ("llama-tiny, ema", "tp2 dp2 zero3", "fp64"),
    ("bloom-tiny", "tp4", "fp64"),
    ("llama-tiny, muon", "tp2 dp2 zero1", "fp64"),
    ("gpt-tiny, ema", "tp2 dp2 zero3", "bf16"),
    ("llama-tiny", "tp2 dp2 zero1", "fp16"),
    *(
        pytest.param(*row, marks=pytest.mark.slow)
        for row in (
            ("llama-tiny", "tp4", "fp64"),
            ("llama-tiny", "pp2 zb-v", "fp64"),
            ("bloom-tiny", "pp2 dp2 zero1", "fp64"),
            ("gpt-tiny, ema", "tp4", "bf16"),
        )
    ),
]


def config_of(preset: str, layout: Layout, dtype: str, load: Path, save: Path) -> Config:
    """A vocabulary that each tp pads to another size: 101, 102 and 104 rows."""
    preset, _, option = preset.partition(", ")
    optimizer = OptimizerConfig(
        lr=1e-2,
        initial_loss_scale=2.0**10,
        optimizer="muon" if option == "muon" else "adam",
        ema_decay=0.9 if option == "ema" else None,
    )
    model = dataclasses.replace(PRESETS[preset], vocab_size=101, make_vocab_size_divisible_by=1)
    return Config(
        model=dataclasses.replace(model, seq_length=16, params_dtype=dtype),
        parallel=ParallelConfig(**layout, ddp_bucket_size=20000),
        optimizer=optimizer,
        data=DataConfig(mock_data=True),
        training=TrainingConfig(micro_batch_size=1, global_batch_size=4, train_iters=8, eval_iters=0),
        checkpoint=CheckpointConfig(save=str(save), load=str(load)),
    )


def world_size(parallel: ParallelConfig) -> int:
    return parallel.tp * parallel.pipeline_model_parallel_size * (parallel.data_parallel_size or 1)


Piece = tuple[torch.Tensor, int, tuple[int, ...], tuple[int, ...], int | None, int]
"""A part's elements, start, shape, full shape without padding, shard, and rank of tp."""
Pieces = dict[str, Piece | torch.Tensor]
Ranks = list[Pieces]
"""By rank and name."""


def run(topology, config: Config, num_before: int, num_after: int):
    """Loads or trains, saves, and continues: its pieces as saved, the last losses, and pieces at the end."""
    trainer = start_trainer(config, topology)
    assert (trainer.load() is not None) is (num_before == 0)
    for _ in range(num_before):
        trainer.step()
    trainer.save()
    pieces = pieces_of(trainer)
    return pieces, [trainer.step().loss for _ in range(num_after)], pieces_of(trainer)


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


Saved = tuple[Path, Ranks, list[float], Ranks]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """By preset and dtype: what each rank of tp 2 x pp 2 saved, and the undisturbed rest: losses and end."""
    known: dict[tuple[str, str], Saved] = {}

    def of(preset: str, dtype: str) -> Saved:
        if (preset, dtype) not in known:
            folder = tmp_path_factory.mktemp(preset)
            config = config_of(preset, TP2_PP2, dtype, folder / "none", folder)
            ranks = run_ranks(run, config.mesh, 4, config, NUM_ITERATIONS, NUM_ITERATIONS)
            before, losses, after = zip(*ranks, strict=True)
            known[preset, dtype] = folder, list(before), losses[-1], list(after)
        return known[preset, dtype]

    return of


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


@pytest.mark.parametrize(("preset", "layout", "dtype"), CASES)
def test_there_and_back(tmp_path: Path, saved, preset: str, layout: str, dtype: str) -> None:
    folder, saved_ranks, losses, ranks_at_end = saved(preset, dtype)
    expected = full_tensors(saved_ranks)
    there = config_of(preset, LAYOUTS[layout], dtype, folder, tmp_path)
    ranks = run_ranks(run, there.mesh, world_size(there.parallel), there, 0, NUM_ITERATIONS)
    assert_same(full_tensors([rank[0] for rank in ranks]), expected)
    tolerance = {"fp64": 1e-12, "bf16": 5e-3, "fp16": 1e-3}[dtype]
    assert ranks[-1][1] == pytest.approx(losses, rel=tolerance)
    if dtype == "fp64":
        assert_close(full_tensors([rank[2] for rank in ranks]), full_tensors(ranks_at_end))
    back = config_of(preset, TP2_PP2, dtype, tmp_path, tmp_path / "back")
    ranks = run_ranks(run, back.mesh, 4, back, 0, 0)
    assert_same(full_tensors([rank[0] for rank in ranks]), expected)


def test_the_same_layout_goes_on_bitwise(tmp_path: Path, saved) -> None:
    folder, saved_ranks, losses, ranks_at_end = saved("gpt-tiny, ema", "bf16")
    config = config_of("gpt-tiny, ema", TP2_PP2, "bf16", folder, tmp_path)
    ranks = run_ranks(run, config.mesh, 4, config, 0, NUM_ITERATIONS)
    assert ranks[-1][1] == losses
    for (before, _, after), *expected in zip(ranks, saved_ranks, ranks_at_end, strict=True):
        assert_bitwise(before, expected[0])
        assert_bitwise(after, expected[1])


def assert_bitwise(
    pieces: dict[str, Piece | torch.Tensor], expected: dict[str, Piece | torch.Tensor]
) -> None:
    """Padding too."""
    assert pieces.keys() == expected.keys()
    for name, piece in expected.items():
        assert torch.equal(pieces[name][0], piece[0]) if isinstance(piece, tuple) else pieces[name] == piece


def test_what_is_held_alike_is_saved_once(tmp_path: Path, saved) -> None:
    folder, saved_ranks, *_ = saved("gpt-tiny", "fp64")
    (checkpoint,) = folder.glob("iter_*")
    manifest = read_manifest(checkpoint)
    stages = {name: [piece.file for piece in pieces] for name, pieces in manifest.tensors.items()}
    assert stages.keys() == set().union(*saved_ranks)
    assert stages["model.layers.0.attention_norm.weight"] == ["pp_00_tp_00.safetensors"]
    assert len(stages["model.layers.0.mlp.up.weight"]) == 2
    assert len(stages["model.embedding.word.weight"]) == 4  # on the first and the last stage


@pytest.mark.parametrize(
    "padding", [{"pad_vocab_size_to": 150}, {"make_vocab_size_divisible_by": 7}], ids=str
)
def test_the_padding_of_the_vocabulary_is_free(tmp_path: Path, saved, padding) -> None:
    folder, _, losses, _ = saved("gpt-tiny", "fp64")
    config = config_of("gpt-tiny", ONE, "fp64", folder, tmp_path)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, **padding))
    ((_, resumed, _),) = run_ranks(run, config.mesh, 1, config, 0, NUM_ITERATIONS)
    assert resumed == pytest.approx(losses, rel=1e-12)
