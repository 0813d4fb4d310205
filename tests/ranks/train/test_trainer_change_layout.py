"""A run that changes its layout holds the same bits before and after each change, and is the same run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megalite.checkpoint.parameter_range import ParameterRange, Tensors, elements_of
from megalite.checkpoint.tensor_files import FilePiece
from megalite.config import Config, DataConfig
from megalite.distributed.topology import Topology
from megalite.observe.verify.layouts import Layout
from megalite.tensor_parallel.parameter_spec import ParameterShard
from megalite.train.trainer import start_trainer
from megalite.utils.errors import ConfigError
from tests.live_ranks import run_ranks
from tests.parity.models import DEEPSEEK, GPT_OSS, HYBRID, LATENT, MIXTRAL, MUON, NEMOTRON, config_of

GLOBAL_BATCH_SIZE = 4
OF_FOUR_RANKS = (
    *("tp4", "tp4+sp", "pp4", "dp4", "dp4+zero1", "dp4+zero2", "dp4+zero3", "dp4shard2+zero1"),
    *(
        "dp4shard2+zero3",
        "tp2pp2",
        "tp2dp2",
        "tp2dp2+sp+zero1+gather",
        "tp2dp2+zero3",
        "pp2dp2",
        "pp2dp2+zero2",
    ),
    *("pp2v2dp2+zero1", "pp2zbdp2", "pp2zbvdp2+zero3", "pp2dpvdp2", "tp2pp2gpipe+sp", "pp2dp2+uneven"),
    *(
        "tp2cp2",
        "cp2dp2+zero3",
        "cp4",
        "cp2pp2+a2a",
        "cp2dp2+p2p+zero1",
        "dp4ep2",
        "dp4ep4+zero1",
        "tp2dp2ep2",
    ),
    *("tp2dp2ep4etp1+sp", "pp2dp2ep2", "dp4mbs2", "tp2dp2mbs4+full", "dp4+zero2+offload", "tp2pp2+offload"),
)
MODELS_OF_SLOW = (
    *("gpt-tiny", "bloom-tiny", "llama-tiny", "gpt-tiny, neox", "llama-tiny, olmo", "llama-tiny, mtp", MUON),
    *(MIXTRAL, DEEPSEEK, HYBRID, NEMOTRON, LATENT, GPT_OSS, "llama-tiny, qk-clip"),
)


def small(model: str, dtype: str) -> Config:
    """A vocabulary that each tp pads to another size: 101, 102 and 104 rows."""
    config = config_of(model, dtype, "")
    shape = {"vocab_size": 101, "make_vocab_size_divisible_by": 1, "seq_length": 16}
    return replace(
        config,
        model=replace(config.model, **shape),
        data=DataConfig(mock_data=True),
        training=replace(
            config.training, train_iters=12, micro_batch_size=1, global_batch_size=GLOBAL_BATCH_SIZE
        ),
    )


def full_tensors(tensors: Tensors, topology: Topology) -> dict[str, Tensor]:
    """Put together what the ranks hold; NaN where none holds an element. Copies must be equal."""
    pieces = {
        name: FilePiece(elements_of(tensor).to("cpu", copy=True), ParameterRange.of(tensor, topology))
        for name, tensor in tensors.items()
        # Other ranks' copies of a buffer may have seen other activations.
        if not (isinstance(tensor, ParameterShard) and tensor.is_buffer)
        or tensor.spec.parameter_axes.acts(topology)
    }
    full: dict[str, Tensor] = {}
    for of_rank in topology.world.gather_objects(pieces, "pieces"):
        for name, piece in of_rank.items():
            assert piece.range is not None
            room = [size + 8 for size in piece.range.full_shape]  # padding
            is_new = name not in full
            whole = full.setdefault(name, torch.full(room, torch.nan).to(piece.tensor.dtype))
            for box, values in piece.range.views(piece.tensor):
                common = box.common(piece.range.full)
                held = common.within(box).of(values)
                known = common.of(whole)
                assert is_new or bool(((known != known) | (known == held)).all()), f"copies of {name} differ"
                known.copy_(held)
            full[name] = whole
    return {
        name: piece.range.full.of(full[name])
        for of_rank in topology.world.gather_objects(pieces, "pieces")
        for name, piece in of_rank.items()
    }


def train(topology: Topology, configs: Sequence[Config]) -> list[float]:
    """Return the losses of iterations, each in the layout of its config; check all tensors at each change."""
    with start_trainer(configs[0], topology) as trainer:
        losses = [trainer.step().loss]
        for config in configs[1:]:
            before, progress = full_tensors(trainer.tensors(), topology), trainer.progress
            trainer.change_layout(config)
            assert trainer.progress == progress
            after = full_tensors(trainer.tensors(), topology)
            assert before.keys() == after.keys()
            for name, tensor in before.items():
                assert tensor.dtype == after[name].dtype
                assert not tensor.isnan().any(), name
                assert torch.equal(tensor, after[name]), name
            losses.append(trainer.step().loss)
    return losses


def undisturbed(topology: Topology, config: Config, num_iterations: int) -> list[float]:
    with start_trainer(config, topology) as trainer:
        return [trainer.step().loss for _ in range(num_iterations)]


def check(base: Config, configs: Sequence[Config]) -> None:
    """Train an iteration in each layout, and compare the losses with those of a run on one rank."""
    losses, *others = run_ranks(train, configs[0].mesh, 4, configs)
    assert all(each == losses for each in others)
    size = 1 if base.depends_on_micro_batch else GLOBAL_BATCH_SIZE
    alone = Layout.parse(f"tp1mbs{size}").apply(base, GLOBAL_BATCH_SIZE)
    (expected,) = run_ranks(undisturbed, alone.mesh, 1, alone, len(losses))
    assert losses == pytest.approx(expected, rel=1e-12 if base.model.params_dtype == "fp64" else 1e-2)


@pytest.mark.parametrize(
    ("model", "dtype", "names"),
    [
        ("gpt-tiny", "fp64", "tp2pp2 dp4+zero3 tp2cp2+sp"),
        (DEEPSEEK, "fp64", "dp4ep2 tp2dp2+zero1"),
        (NEMOTRON, "fp64", "tp2pp2mbs2 dp4+zero3"),
        (MUON, "fp64", "dp4+zero1+offload dp4shard2+zero2 tp2pp2zb"),
        ("gpt-tiny, neox", "bf16", "tp2dp2+zero1 pp2v2dp2+zero3"),
        pytest.param(HYBRID, "fp64", "pp2dp2 tp2dp2+zero2", marks=pytest.mark.slow),
    ],
)
def test_changes(model: str, dtype: str, names: str) -> None:
    base = small(model, dtype)
    check(base, [Layout.parse(name).apply(base, GLOBAL_BATCH_SIZE) for name in names.split(" ")])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(50))
def test_random_changes(seed: int) -> None:
    draw = random.Random(seed)
    base = small(MODELS_OF_SLOW[seed % len(MODELS_OF_SLOW)], draw.choice(("fp64", "fp64", "bf16", "fp32")))
    configs: list[Config] = []
    for name in draw.sample(OF_FOUR_RANKS, len(OF_FOUR_RANKS)):
        with suppress(ConfigError):
            configs.append(Layout.parse(name).apply(base, GLOBAL_BATCH_SIZE))
    check(base, configs[:3])
