"""Test that every rank skips an update with a NaN, and that its origin is located."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from megalite.config import Config, DataConfig, ParallelConfig, TrainingConfig
from megalite.config.presets import PRESETS
from megalite.data.microbatch import BlockOutput, Microbatch
from megalite.distributed.local_ranks import run_ranks as run_new_ranks
from megalite.distributed.topology import Topology
from megalite.model.compiled import compile_layers
from megalite.train import model_chunks
from megalite.train.callbacks.nan_locator import anomaly_text
from megalite.train.telemetry.timers import Timers
from megalite.train.train_step import StepResult
from megalite.train.trainer import Trainer, start_trainer
from tests.live_ranks import run_ranks

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
    "dp2 pp2 fully sharded": ParallelConfig(
        data_parallel_size=2, pipeline_model_parallel_size=2, zero_stage=3
    ),
}
LAYOUTS = list(PARALLEL)
Change = Callable[[Tensor], Tensor]


def _config(layout: str, **training: object) -> Config:
    given = {"global_batch_size": 8, "micro_batch_size": 2, "train_iters": 40, "eval_iters": 0, **training}
    num_layers = 4 if "interleaved" in layout else 2
    model = replace(
        PRESETS["gpt-tiny"], num_layers=num_layers, vocab_size=64, seq_length=16, hidden_dropout=0.1
    )
    return Config(
        model=model,
        parallel=replace(PARALLEL[layout], distributed_backend="gloo"),
        data=DataConfig(mock_data=True),
        training=TrainingConfig(**given),  # type: ignore[arg-type]
    )


def _with_nan(x: Tensor) -> Tensor:
    x = x.clone()
    x.view(-1)[:8] = torch.nan  # more than dropout zeroes
    return x


def _grown(x: Tensor) -> Tensor:
    return x * 3000.0


def _with_nan_gradient(x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(_with_nan)
    return x


def _break(trainer: Trainer, module: str, sample: int, change: Change) -> None:
    """Change the output of a module for the microbatch that holds a sample."""
    stage = next((chunk for chunk in trainer.chunks if module in dict(chunk.named_modules())), None)
    if stage is None:
        return
    samples: list[int] = []

    def enter(_: nn.Module, arguments: tuple[Microbatch, Tensor | None]) -> None:
        samples[:] = arguments[0].sample_numbers.tolist()

    def leave(_: nn.Module, __: object, output: Tensor | BlockOutput) -> Tensor | BlockOutput | None:
        if sample not in samples:
            return None
        if isinstance(output, BlockOutput):
            return output._replace(x=change(output.x))
        return change(output)

    stage.register_forward_pre_hook(enter)
    stage.get_submodule(module).register_forward_hook(leave)


Break = tuple[str, int, Change]
"""A module, a sample and how the module's output changes for the microbatch that holds it."""


def _run(
    topology: Topology, config: Config, breaks: tuple[Break, ...], num_iterations: int = 3
) -> tuple[list[tuple[StepResult, str | None]], bool]:
    """Return result and anomaly of each iteration, and whether the weights changed only in its updates."""
    with (  # the flag is enough here
        mock.patch.object(model_chunks, "compile_layers"),
        mock.patch.object(model_chunks, "check_compiler"),
        start_trainer(config, topology) as trainer,
    ):
        for each in breaks:
            _break(trainer, *each)
        results, texts, as_reported = [], [], True
        for _ in range(num_iterations):
            before = _weights(trainer)
            results.append(trainer.step())
            texts.append(_anomaly_text(trainer, results[-1]))
            moved = not all(torch.equal(old, new) for old, new in zip(before, _weights(trainer), strict=True))
            as_reported = as_reported and moved is not results[-1].skipped
        counts = (trainer.progress.num_skipped, trainer.progress.num_nan)
    return list(zip(results, texts, strict=True)), as_reported and counts == _counts(results)


def _anomaly_text(trainer: Trainer, result: StepResult) -> str | None:
    return None if result.anomaly is None else anomaly_text(trainer, result.anomaly, result.plan)


def _num_ranks(layout: str) -> int:
    parallel = PARALLEL[layout]
    return parallel.tp * parallel.pp * (parallel.data_parallel_size or 1)


def _weights(trainer: Trainer) -> list[Tensor]:
    """Return copies of this rank's weights, or of its shards: comparing DTensors would be a collective."""
    trainer.optimizer.finish_weights()
    return [shard.tensor.clone() for shard in trainer.optimizer.weights().values()]


def _counts(results: list[StepResult]) -> tuple[int, int]:
    skipped = sum(result.skipped for result in results)
    return skipped, sum(result.loss != result.loss and not result.plan.is_excluded for result in results)


def _results(
    layout: str, breaks: tuple[Break, ...], num_iterations: int = 3, **training: object
) -> list[tuple[StepResult, str | None]]:
    """Return result and anomaly of each iteration; they are the same on all ranks."""
    config = _config(layout, **training)
    ranks = run_ranks(_run, config.parallel.mesh, _num_ranks(layout), config, breaks, num_iterations)
    assert all(as_reported for _, as_reported in ranks)
    assert all(repr(results) == repr(ranks[0][0]) for results, _ in ranks)  # a NaN is no other NaN's equal
    return ranks[0][0]


@pytest.mark.parametrize(
    ("layout", "module"), [*((layout, "layers.1.mlp") for layout in LAYOUTS), ("tp1", "layers.0.attention")]
)
def test_the_first_bad_part_and_microbatch_are_named(layout: str, module: str) -> None:
    """Test a loss that sample 13 makes bad, and a gradient that sample 21 does.

    They are in the third pairs of the second iteration, samples 8 to 15, and of the third.
    """
    breaks = (module, 13, _with_nan), (module, 21, _with_nan_gradient)
    texts = [text for _, text in _results(layout, breaks, 4)]
    place = "microbatch 1 of data-parallel rank 0" if "dp2" in layout else "microbatch 2"
    assert texts[:2] == [
        None,
        f"the loss is nan, first in {module} in {place} (samples 12 to 13); the update was skipped",
    ]
    samples = "microbatch 1 (samples 20 to 23)" if "dp2" in layout else "microbatch 2 (samples 20 to 21)"
    assert texts[2] is not None
    assert texts[2].startswith(f"the grad norm is nan, first in the gradient of {module}.")
    assert texts[2].endswith(f" in {samples}; the update was skipped")
    assert texts[3] is None


def _faults_of_spoilt_weights(
    topology: Topology, config: Config, backend: str
) -> tuple[list[str | None], int]:
    """Train with compiled layers, and return the anomalies of iterations in which one layer's weight is NaN.

    The second value is the number of graphs compiled for these iterations.
    """
    model_chunks.compile_layers = partial(
        compile_layers, backend=backend
    )  # this process is this rank's alone
    model_chunks.check_compiler = lambda device: None
    timers, faults = Timers(), []
    with start_trainer(config, topology, timers) as trainer:
        assert trainer.step().anomaly is None
        num_graphs = counters["stats"]["unique_graphs"]
        for layer in (1, 0):
            name = f"layers.{layer}.mlp.down.weight"
            held = [chunk for chunk in trainer.chunks if name in dict(chunk.named_parameters())]
            saved = [chunk.get_parameter(name).detach().clone() for chunk in held]
            for chunk in held:
                chunk.get_parameter(name).data.fill_(torch.nan)
            faults.append(_anomaly_text(trainer, trainer.step()))
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
    """Test also that the second run compiles no graph: torch.compile gives up after some graphs."""
    config = _config(layout, compile=True)
    num_ranks = _num_ranks(layout)
    expected = [
        f"the loss is nan, first in layers.{layer}.mlp in microbatch 0 (samples {first} to {first + 1}) and "
        "in 3 more microbatches; the update was skipped"
        for layer, first in ((1, 8), (0, 16))
    ]
    ranks = run_new_ranks(_faults_of_spoilt_weights, config.parallel.mesh, num_ranks, config, backend)
    assert ranks == [(expected, 0)] * num_ranks


def test_layers_that_add_terms_to_the_loss_are_named() -> None:
    """The terms of routers and of later tokens are means over other tokens than the loss of the next one."""
    config = _config("pp2")
    terms = {"num_experts": 4, "moe_layer_freq": (1, 0), "mtp_num_layers": 1}
    config = replace(config, model=replace(config.model, **terms))
    place = "layers.1.mlp in microbatch 2 (samples 12 to 13)"
    breaks = (("layers.1.mlp", 13, _with_nan),)
    for found, as_reported in run_ranks(_run, config.parallel.mesh, 2, config, breaks):
        assert as_reported
        texts = [text for _, text in found]
        assert texts == [None, f"the loss is nan, first in {place}; the update was skipped", None]


def test_a_spike_names_the_microbatch_and_what_stands_out_in_it() -> None:
    """Test sample 85: it is in the eleventh iteration, the first with ten losses before it."""
    breaks = (("final_norm", 85, _grown),)
    results = _results("pp2", breaks, 12, check_for_spiky_loss=True, spiky_loss_factor=1.5)
    texts = [text for _, text in results]
    assert texts[:10] == [None] * 10
    assert texts[10] is not None
    assert texts[10].startswith(f"the loss {results[10][0].loss:.6g} is above 1.5 times ")
    assert texts[10].endswith(
        "the median of the last 10, the largest part of it in microbatch 2 (samples 84 to 85), "
        "where final_norm is the first to stand out; the update was skipped"
    )
    assert texts[11] is None


def _nan_once(x: Tensor) -> Tensor:
    """Fail once, as faulty hardware does: in the first run, which has gradients, but not in the second."""
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
def test_a_loss_that_is_bad_once(compiles: bool, cause: str) -> None:
    results = _results("tp1", (("layers.1.mlp", 13, _nan_once),), compile=compiles)
    assert results[1][1] == f"the loss is nan, {cause}; the update was skipped"


def test_with_the_check_off_a_bad_gradient_still_changes_nothing() -> None:
    results = _results("tp1", (("layers.1.mlp", 13, _with_nan),), check_for_nan_in_loss_and_grad=False)
    assert [(result.skipped, text) for result, text in results] == [
        (False, None),
        (True, None),
        (False, None),
    ]


def test_iterations_to_skip_consume_their_samples() -> None:
    """Test that later iterations have the samples of a run without the flag."""
    results = _results("dp2", (("layers.1.mlp", 13, _with_nan),), iterations_to_skip=("2",))
    assert [(result.plan.is_excluded, result.skipped, text) for result, text in results] == [
        (False, False, None),
        (True, True, None),
        (False, False, None),
    ]
