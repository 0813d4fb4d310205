"""Parameters cut over several axes, and over an axis of a second mesh: the training of one rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from megalite.checkpoint.load import load_checkpoint
from megalite.checkpoint.parameter_range import Tensors
from megalite.checkpoint.progress import TrainingProgress
from megalite.config import OptimizerConfig, ParallelConfig
from megalite.distributed.axes import MeshOptions
from megalite.distributed.topology import Topology
from megalite.optim.optimizer import Optimizer
from megalite.optim.weight_gathering import ChunkModules
from megalite.tensor_parallel.counter_random import initialize
from megalite.tensor_parallel.parameter_spec import (
    LayerContext,
    ParameterSpec,
    gather_full,
    new_parameter,
    spec_of,
)
from megalite.tensor_parallel.placement import Cut
from tests.live_ranks import run_ranks
from tests.ranks.checkpoint.saving import config_of, save_checkpoint
from tests.trial_axis import EXPERTS, TWO_CUTTING_AXES

SPECS = {
    "two_dims": ParameterSpec((8, 12), (Cut("tp", 0), Cut("tq", 1)), std=0.5),
    "inner_dims": ParameterSpec((3, 4, 6), (Cut("tp", 1), Cut("tq", 2)), std=0.5),
    "one_dim_twice": ParameterSpec((8, 6), (Cut("tp", 0), Cut("tq", 0)), std=0.5, num_padding=1),
    "experts": ParameterSpec((4, 7), Cut("ep", 0), std=0.5),
    "partial_over_tq": ParameterSpec((6, 4), Cut("tp", 0), std=0.5, partial_over=("tq",)),
    "partial_over_both": ParameterSpec((6, 3), std=0.5, decay=False, partial_over=("tp", "tq")),
    "replicated": ParameterSpec((5,), mean=1.0, decay=False),
}
CONFIG = OptimizerConfig(lr=0.1, clip_grad=0.5)
ROUNDED = (
    OptimizerConfig(lr=0.1, clip_grad=0.5, exp_avg_dtype="fp8", exp_avg_sq_dtype="bf16"),
    OptimizerConfig(lr=0.1, clip_grad=0.5, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16"),
    OptimizerConfig(lr=0.1, clip_grad=0.5, exp_avg_dtype="fp8"),
)
SAME = {"rtol": 1e-11, "atol": 1e-13}


class Run(NamedTuple):
    """Norms and counts of each step, and the full parameters at the beginning and the end."""

    steps: list[tuple[float, float, int]]
    first: dict[str, torch.Tensor]
    last: dict[str, torch.Tensor]


class Net(nn.Module):
    """Computes a sum over all parameters p of a (p - b)^2 / 2 with given numbers a and b."""

    def __init__(self, context: LayerContext) -> None:
        super().__init__()
        for name, spec in SPECS.items():
            self.register_parameter(name, new_parameter(spec, context))

    def forward(self, x: torch.Tensor, topology: Topology) -> torch.Tensor:
        """Return this rank's part of it: a box of the parameters, and a share of the sum over ranks."""
        total = x.sum()
        for name, parameter in self.named_parameters():
            spec, generator = spec_of(parameter), torch.Generator().manual_seed(sum(map(ord, name)))
            a = torch.randint(0, 4, spec.full_shape, generator=generator).double()
            b = torch.randn(spec.full_shape, generator=generator, dtype=torch.float64)
            box, share = spec.box(topology), 1.0
            for axis in (spec.parameter_axes.replicas(topology), spec.parameter_axes.partial_axis(topology)):
                if axis is not None:  # ranks have different shares
                    share *= 2 * (axis.rank + 1) / (axis.size * (axis.size + 1))
            total = total + share * (box.of(a) * (parameter - box.of(b)).square()).sum() / 2
        return total


class Training:
    """The net and its optimizer on this rank."""

    def __init__(self, topology: Topology, zero_stage: int, config: OptimizerConfig) -> None:
        self.topology = topology
        self.net = Net(LayerContext(topology, torch.float64, has_memory=zero_stage < 3))
        if zero_stage < 3:
            initialize(self.net, 3, topology)
        units = [(self.net, list(self.net.parameters()))]
        self.optimizer = Optimizer(
            self.net.named_parameters(),
            None,
            config,
            ParallelConfig(zero_stage=zero_stage, ddp_bucket_size=10),
            topology,
            torch.float64,
            [ChunkModules(self.net, [], units)],
            seed=7,
        )
        self.optimizer.initialize_main(3)

    def step(self) -> tuple[float, float, int]:
        self.optimizer.begin(2)
        for _ in range(2):
            self.net(torch.zeros(1, dtype=torch.float64, requires_grad=True), self.topology).backward()
        norm = self.optimizer.finish_gradients()
        zeros = self.optimizer.num_zeros()
        self.optimizer.step(0.1, CONFIG.weight_decay, norm)
        return norm.item(), self.optimizer.params_norm(), zeros

    def full(self) -> dict[str, torch.Tensor]:
        self.optimizer.finish_weights()
        return {
            name: gather_full(self.optimizer.weight(name), spec_of(parameter), self.topology)
            for name, parameter in self.net.named_parameters()
        }

    def tensors(self) -> Tensors:
        """The tensors of a checkpoint."""
        self.optimizer.finish_weights()
        weights = {f"model.{name}": part for name, part in self.optimizer.weights().items()}
        return weights | {f"optimizer.{name}": part for name, part in self.optimizer.state().items()}

    def load(self, folder: Path) -> Tensors:
        """Load a checkpoint; return its tensors."""
        tensors = self.tensors()
        assert load_checkpoint(folder, tensors, config_of(folder), self.topology)
        self.optimizer.seal_state({name.removeprefix("optimizer."): part for name, part in tensors.items()})
        return tensors


def train(topology: Topology, zero_stage: int, folder: Path, config: OptimizerConfig = CONFIG) -> Run:
    """Train three steps, and save before the third."""
    training = Training(topology, zero_stage, config)
    first = training.full()
    steps = [training.step(), training.step()]
    save_checkpoint(folder, TrainingProgress(2, 16), training.tensors(), config_of(folder), topology)
    return Run([*steps, training.step()], first, training.full())


def load_and_train(
    topology: Topology, zero_stage: int, folders: list[Path], config: OptimizerConfig = CONFIG
) -> list[Run]:
    """Take the third step from each checkpoint."""
    runs = []
    for folder in folders:
        training = Training(topology, zero_stage, config)
        training.load(folder)
        first = training.full()
        runs.append(Run([training.step()], first, training.full()))
    return runs


def train_and_load(
    topology: Topology, zero_stage: int, folder: Path, other: Path, config: OptimizerConfig = CONFIG
) -> tuple[Run, list[Run]]:
    return (
        train(topology, zero_stage, folder, config),
        load_and_train(topology, zero_stage, [other], config),
    )


def moments_in(
    topology: Topology, zero_stage: int, folder: Path, config: OptimizerConfig
) -> dict[str, torch.Tensor]:
    """The moments in a checkpoint, on one rank that has them all."""
    tensors = Training(topology, zero_stage, config).load(folder)
    return {name: part.tensor for name, part in tensors.items() if ".exp_avg" in name}


class Placing(NamedTuple):
    """Sizes of the axes, and the ZeRO stage."""

    tp: int
    tq: int
    dp: int
    ep: int
    zero_stage: int

    @property
    def mesh(self) -> MeshOptions:
        sizes = {"tp": self.tp, "tq": self.tq, "dp": self.dp, "ep": self.ep}
        return MeshOptions(sizes, (TWO_CUTTING_AXES, EXPERTS))

    @property
    def world_size(self) -> int:
        return self.tp * self.tq * self.dp


ONE = Placing(1, 1, 1, 1, 0)
PLACINGS = (
    Placing(2, 2, 1, 2, 0),
    Placing(2, 2, 2, 2, 1),
    Placing(1, 2, 2, 4, 1),  # experts have no replicas, and ZeRO shards the others
    Placing(2, 2, 2, 4, 2),
    Placing(2, 2, 2, 4, 3),
    Placing(2, 1, 2, 2, 3),
)


def run_in(placing: Placing, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    return run_ranks(function, placing.mesh, placing.world_size, placing.zero_stage, *arguments)


def check_last_step(found: Run, expected: Run) -> None:
    assert found.steps[-1] == pytest.approx(expected.steps[-1], rel=1e-11)
    for name in SPECS:
        torch.testing.assert_close(found.last[name], expected.last[name], **SAME)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    """The run of one rank, and the folder of its checkpoint."""
    folder = tmp_path_factory.mktemp("one_rank")
    return run_in(ONE, train, folder)[0], folder


@pytest.mark.parametrize("placing", PLACINGS, ids=str)
def test_the_training_is_that_of_one_rank(
    placing: Placing, one_rank: tuple[Run, Path], tmp_path: Path
) -> None:
    """Initial values, norms, clipping and updates; and each loads the checkpoint of the other."""
    expected, its_folder = one_rank
    assert expected.steps[0][0] > CONFIG.clip_grad  # gradients are clipped
    for found, (loaded,) in run_in(placing, train_and_load, tmp_path, its_folder):
        for (norm, params_norm, zeros), of_one in zip(found.steps, expected.steps, strict=True):
            assert (norm, params_norm) == pytest.approx(of_one[:2], rel=1e-11)
            assert zeros == of_one[2] > 0
        for name in SPECS:
            torch.testing.assert_close(found.first[name], expected.first[name], rtol=0, atol=0)
            assert not torch.equal(found.first[name], found.last[name])
        check_last_step(found, expected)
        check_last_step(loaded, expected)
    ((back,),) = run_in(ONE, load_and_train, [tmp_path])
    check_last_step(back, expected)


@pytest.mark.parametrize(
    ("placing", "config"),
    [
        (PLACINGS[3], ROUNDED[0]),
        *(
            pytest.param(placing, config, marks=pytest.mark.slow)
            for placing in PLACINGS
            for config in ROUNDED
            if (placing, config) != (PLACINGS[3], ROUNDED[0])
        ),
    ],
    ids=str,
)
def test_rounded_moments_are_those_of_one_rank(
    placing: Placing, config: OptimizerConfig, tmp_path: Path
) -> None:
    """Bit by bit after two steps; and each takes the third step from the checkpoint of the other."""
    alone, here = tmp_path / "alone", tmp_path / "here"
    (expected,) = run_in(ONE, train, alone, config)
    for found, (loaded,) in run_in(placing, train_and_load, here, alone, config):
        check_last_step(found, expected)
        check_last_step(loaded, expected)
    ((back,),) = run_in(ONE, load_and_train, [here], config)
    check_last_step(back, expected)
    ((own,), (other,)) = (run_in(ONE, moments_in, folder, config) for folder in (alone, here))
    assert own.keys() == other.keys() and len(own) == 2 * len(SPECS)
    for name in own:
        torch.testing.assert_close(
            own[name], other[name], rtol=0 if own[name].dtype == torch.bfloat16 else 1e-13, atol=0
        )
    assert own["optimizer.two_dims.exp_avg"].dtype == torch.bfloat16


@pytest.mark.slow
def test_every_placing_loads_the_checkpoints_of_all(one_rank: tuple[Run, Path], tmp_path: Path) -> None:
    folders = [tmp_path / str(number) for number in range(len(PLACINGS))]
    for placing, folder in zip(PLACINGS, folders, strict=True):
        run_in(placing, train, folder)
    for placing in PLACINGS:
        for runs in run_in(placing, load_and_train, folders):
            for found in runs:
                check_last_step(found, one_rank[0])
