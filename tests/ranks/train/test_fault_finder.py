"""An iteration that goes bad is left out on every rank, and every rank says where it began."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from megalite.config import Config, DataConfig, ParallelConfig, TrainingConfig
from megalite.local_ranks import run_ranks
from megalite.model.compiled import compile_layers
from megalite.presets import PRESETS
from megalite.topology import Topology
from megalite.train import chunks
from megalite.train.prepare import build_data
from megalite.train.step import StepResult
from megalite.train.telemetry.timers import Timers
from megalite.train.trainer import Trainer

PARALLEL = {
    "tp1": ParallelConfig(),
    "tp2": ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True),
    "pp2": ParallelConfig(pipeline_model_parallel_size=2),
    "pp2 interleaved": ParallelConfig(
        pipeline_model_parallel_size=2,
        pipeline_schedule="interleaved",
        num_virtual_stages_per_pipeline_rank=2,
    ),
    "dp2": ParallelConfig(data_parallel_size=2, zero_stage=2),
    "dp2 fully sharded": ParallelConfig(data_parallel_size=2, zero_stage=3),
}
LAYOUTS = list(PARALLEL)
Change = Callable[[Tensor], Tensor]


def _config(layout: str, **training: object) -> Config:
    given = {"global_batch_size": 8, "micro_batch_size": 2, "train_iters": 40, "eval_iters": 0, **training}
    model = replace(PRESETS["gpt-tiny"], vocab_size=64, seq_length=16, hidden_dropout=0.1)
    return Config(
        model=model,
        parallel=replace(PARALLEL[layout], distributed_backend="gloo"),
        data=DataConfig(mock_data=True),
        training=TrainingConfig(**given),  # type: ignore[arg-type]
    )


def _with_nan(x: Tensor) -> Tensor:
    x = x.clone()
    x.view(-1)[:8] = torch.nan  # more than dropout takes away
    return x


def _grown(x: Tensor) -> Tensor:
    return x * 3000.0


def _with_nan_gradient(x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(_with_nan)
    return x


def _break(trainer: Trainer, module: str, sample: int, change: Change) -> None:
    """Changes what a module gives for the microbatch that holds a sample."""
    stage = next((chunk for chunk in trainer.chunks if module in dict(chunk.named_modules())), None)
    if stage is None:
        return
    samples: list[int] = []

    def enter(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        samples[:] = arguments[2].tolist()

    def leave(_: nn.Module, __: object, output: Tensor) -> Tensor | None:
        return change(output) if sample in samples else None

    stage.register_forward_pre_hook(enter)
    stage.get_submodule(module).register_forward_hook(leave)


def _run(
    topology: Topology, config: Config, module: str, sample: int, change: Change, num_iterations: int = 3
) -> tuple[list[StepResult], bool]:
    """Results of each iteration, and whether the weights moved in each as its result says."""
    if config.training.compile:  # the flag is enough here; this process is this rank's alone
        chunks.compile_layers = chunks.check_compiler = lambda _: None
    timers = Timers()
    trainer = Trainer(config, topology, build_data(config, topology, timers), timers)
    _break(trainer, module, sample, change)
    results, as_told = [], True
    for _ in range(num_iterations):
        before = _weights(trainer)
        results.append(trainer.step())
        moved = not all(torch.equal(old, new) for old, new in zip(before, _weights(trainer), strict=True))
        as_told = as_told and moved is not results[-1].skipped
    counts = (trainer.progress.num_skipped, trainer.progress.num_nan)
    return results, as_told and counts == _counts(results)


def _weights(trainer: Trainer) -> list[Tensor]:
    trainer.optimizer.finish_weights()
    return [weight.detach().clone() for chunk in trainer.chunks for weight in chunk.parameters()]


def _counts(results: list[StepResult]) -> tuple[int, int]:
    skipped = sum(result.skipped for result in results)
    return skipped, sum(result.loss != result.loss and not result.is_left_out for result in results)


def _results(
    layout: str, module: str, sample: int, change: Change, num_iterations: int = 3, **training: object
) -> list[StepResult]:
    """What each iteration comes to: on all ranks the same."""
    config = _config(layout, **training)
    num_ranks = 1 if layout == "tp1" else 2
    ranks = run_ranks(_run, config.parallel, num_ranks, config, module, sample, change, num_iterations)
    assert all(as_told for _, as_told in ranks)
    assert all(repr(results) == repr(ranks[0][0]) for results, _ in ranks)  # a NaN is no other NaN's equal
    return ranks[0][0]


def _faults(layout: str, module: str, sample: int, change: Change, **training: object) -> list[str | None]:
    return [result.fault for result in _results(layout, module, sample, change, **training)]


@pytest.mark.parametrize(
    ("layout", "module"), [*((layout, "layers.1.mlp") for layout in LAYOUTS), ("tp1", "layers.0.attention")]
)
def test_the_first_bad_part_and_microbatch_are_named(layout: str, module: str) -> None:
    """Sample 13 is in the second iteration, samples 8 to 15: in its third pair."""
    place = "microbatch 1 of data-parallel rank 0" if "dp2" in layout else "microbatch 2"
    assert _faults(layout, module, 13, _with_nan) == [
        None,
        f"the loss is nan, first in {module} in {place} (samples 12 to 13); the update was skipped",
        None,
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gradient_alone_that_is_bad_names_its_parameter(layout: str) -> None:
    samples = "microbatch 1 (samples 12 to 15)" if "dp2" in layout else "microbatch 2 (samples 12 to 13)"
    told = _faults(layout, "layers.1.mlp", 13, _with_nan_gradient)
    assert told[0] is None
    assert told[2] is None
    assert told[1] is not None
    assert told[1].startswith("the grad norm is nan, first in the gradient of layers.1.mlp.")
    assert told[1].endswith(f" in {samples}; the update was skipped")


def _faults_of_spoilt_weights(
    topology: Topology, config: Config, backend: str
) -> tuple[list[str | None], int]:
    """Train with compiled layers, and return the faults of iterations for which one layer's weight is NaN.

    With them, how many graphs were made for these iterations.
    """
    chunks.compile_layers = partial(compile_layers, backend=backend)  # this process is this rank's alone
    chunks.check_compiler = lambda device: None
    timers, faults = Timers(), []
    with Trainer(config, topology, build_data(config, topology, timers), timers) as trainer:
        assert trainer.step().fault is None
        num_graphs = counters["stats"]["unique_graphs"]
        for layer in (1, 0):
            name = f"layers.{layer}.mlp.down.weight"
            held = [chunk for chunk in trainer.chunks if name in dict(chunk.named_parameters())]
            saved = [chunk.get_parameter(name).detach().clone() for chunk in held]
            for chunk in held:
                chunk.get_parameter(name).data.fill_(torch.nan)
            faults.append(trainer.step().fault)
            for chunk, weight in zip(held, saved, strict=True):
                chunk.get_parameter(name).data.copy_(weight)
    return faults, counters["stats"]["unique_graphs"] - num_graphs


@pytest.mark.parametrize(
    ("layout", "backend"),
    [
        ("tp1", "eager"),
        *(pytest.param(layout, "inductor", marks=pytest.mark.slow) for layout in ("tp1", "tp2", "pp2")),
    ],
)
def test_compiled_layers_do_not_hide_the_first_bad_part(layout: str, backend: str) -> None:
    """And no graph is made for the second run: torch.compile gives a layer up after some graphs."""
    config = _config(layout, compile=True)
    num_ranks = 1 if layout == "tp1" else 2
    expected = [
        f"the loss is nan, first in layers.{layer}.mlp in microbatch 0 (samples {first} to {first + 1}) and "
        "in 3 more microbatches; the update was skipped"
        for layer, first in ((1, 8), (0, 16))
    ]
    ranks = run_ranks(_faults_of_spoilt_weights, config.parallel, num_ranks, config, backend)
    assert ranks == [(expected, 0)] * num_ranks


def test_a_spike_names_the_microbatch_and_what_stands_out_in_it() -> None:
    """Sample 85 is in the eleventh iteration, the first that has ten losses before it."""
    results = _results("pp2", "final_norm", 85, _grown, 12, check_for_spiky_loss=True, spiky_loss_factor=1.5)
    told = [result.fault for result in results]
    assert told[:10] == [None] * 10
    assert told[10] is not None
    assert told[10].startswith(f"the loss {results[10].loss:.6g} is above 1.5 times ")
    assert told[10].endswith(
        "the median of the last 10, the largest part of it in microbatch 2 (samples 84 to 85), "
        "where final_norm is the first to stand out; the update was skipped"
    )
    assert told[11] is None


def _nan_once(x: Tensor) -> Tensor:
    """As faulty hardware: with gradients, but not in the second run, which has none."""
    return _with_nan(x) if torch.is_grad_enabled() else x


@pytest.mark.parametrize(
    ("compiles", "cause"),
    [
        (False, "but not when it was computed again: suspect the hardware"),
        (
            True,
            "but not when it was computed again without --compile: suspect the compiled layers or the "
            "hardware",
        ),
    ],
)
def test_a_loss_that_is_bad_once_is_told_as_such(compiles: bool, cause: str) -> None:
    assert _faults("tp1", "layers.1.mlp", 13, _nan_once, compile=compiles)[1] == (
        f"the loss is nan, {cause}; the update was skipped"
    )


def test_with_the_check_off_a_bad_gradient_still_changes_nothing() -> None:
    results = _results("tp1", "layers.1.mlp", 13, _with_nan, check_for_nan_in_loss_and_grad=False)
    assert [(result.skipped, result.fault) for result in results] == [
        (False, None),
        (True, None),
        (False, None),
    ]


def test_iterations_to_skip_consume_their_samples() -> None:
    """The samples of the iterations after are those of a run without the flag."""
    results = _results("dp2", "layers.1.mlp", 13, _with_nan, iterations_to_skip=("2",))
    assert [(result.is_left_out, result.skipped, result.fault) for result in results] == [
        (False, False, None),
        (True, True, None),
        (False, False, None),
    ]
