"""Terms of the loss that layers of an own model add, on any pipeline stage: the same run in any layout."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalite import GPT, LossTerm, Microbatch, Providers, Topology, WithTerms, start_trainer, wrap_point
from megalite.config import Config, DataConfig, LoggingConfig, RecomputeConfig, TrainingConfig
from megalite.config.presets import PRESETS
from megalite.distributed.local_ranks import run_ranks as run_new_ranks
from megalite.model.layer import TransformerLayer
from megalite.observe.verify.compare_runs import TOLERANCES, compare
from megalite.observe.verify.layouts import Layout
from megalite.observe.verify.record_run import RunRecord, record_rank
from megalite.train.telemetry.metrics import IntervalMeter
from megalite.train.telemetry.writers import iteration_line
from tests.live_ranks import record_run, run_ranks

GLOBAL_BATCH_SIZE = 8
SCALE = 0.05
FULL = {"recompute_granularity": "full", "recompute_method": "uniform"}
ROWS: dict[str, dict[str, Any]] = {
    "pp2": {},
    "pp4": {},
    "pp2zbvdp2": {},
    "pp4mbs1": FULL,
    "pp2v2": {"cpu_offload_activations": 1},
    "dp2+zero3": FULL,
}


class RoutedLayer(TransformerLayer):
    """A layer that also adds a term of its output: it depends on all weights before it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.gate = nn.Linear(64, 4, bias=False, dtype=torch.float64)

    @wrap_point
    def forward(self, x: Tensor, *args: Any) -> WithTerms:  # type: ignore[override]
        x = super().forward(x, *args)
        total = torch.logsumexp(self.gate(x), dim=-1).square().sum()
        return WithTerms(x, {"router_loss": LossTerm(total, per="sample", scale=SCALE)})


class RoutedGPT(GPT):
    """A GPT whose second and third of four layers add a term."""

    loss_names = ("lm_loss", "router_loss")

    def build_layer(self, number: int) -> nn.Module:
        if number not in (1, 2):
            return super().build_layer(number)
        return RoutedLayer(self.config, self.context, self.core, number)


class MeanGPT(RoutedGPT):
    """A GPT whose layers add the mean of a microbatch's samples, a mistake."""

    def build_layer(self, number: int) -> nn.Module:
        layer = super().build_layer(number)
        layer.register_forward_hook(self._averaged)
        return layer

    @staticmethod
    def _averaged(layer: nn.Module, inputs: Any, output: Any) -> Any:
        if not isinstance(output, WithTerms):
            return output
        terms = {
            name: term._replace(total=term.total / output.hidden.shape[1])  # type: ignore[union-attr]
            for name, term in output.terms.items()
        }
        return output._replace(terms=terms)


def _config() -> Config:
    model = replace(PRESETS["gpt-tiny"], num_layers=4, vocab_size=50, seq_length=16, params_dtype="fp64")
    training = TrainingConfig(global_batch_size=GLOBAL_BATCH_SIZE, micro_batch_size=2, train_iters=2)
    return Config(model=model, data=DataConfig(mock_data=True), training=replace(training, eval_iters=1))


def _on_rank(topology: Topology, config: Config) -> tuple[RunRecord, dict[str, float], dict[str, float], str]:
    """Return gradients, terms of an iteration and an evaluation by name, and the iteration's log line."""
    providers = Providers(RoutedGPT)
    record = record_rank(topology, config, 1, providers)
    with start_trainer(config, topology, providers=providers) as trainer:
        meter = IntervalMeter(config.model, 2, topology.world_size, topology.device, topology.tp.size)
        result = trainer.step()
        meter.add(result)
        line = iteration_line(meter.take(GLOBAL_BATCH_SIZE), LoggingConfig())
        assert trainer.datasets.valid is not None
        return record, dict(result.losses), trainer.evaluate(trainer.datasets.valid, 0), line


@functools.cache
def _reference() -> tuple[RunRecord, dict[str, float], dict[str, float], str]:
    (found,) = run_ranks(_on_rank, _config().parallel.mesh, 1, _config())
    return found


@pytest.mark.parametrize("row", ROWS)
def test_same_gradients_and_terms_as_one_rank(row: str) -> None:
    _check(Layout.parse(row), RecomputeConfig(**ROWS[row]))


@pytest.mark.slow
@pytest.mark.parametrize("row", ["mbs2", "pp4", "tp2pp2"])
def test_compiled_layers_add_the_same_terms(row: str) -> None:
    _check(Layout.parse(row), RecomputeConfig(), compile=True)


def _check(layout: Layout, recompute: RecomputeConfig, compile: bool = False) -> None:
    config = replace(layout.apply(_config(), GLOBAL_BATCH_SIZE), recompute=recompute)
    config = replace(config, training=replace(config.training, compile=compile))
    expected, losses, evaluated, line = _reference()
    run = run_new_ranks if compile else run_ranks  # torch keeps what it has compiled
    by_rank = run(_on_rank, config.parallel.mesh, layout.world_size, config)
    gradients: dict[str, Tensor] = {}
    for record, *found, logged in by_rank:
        gradients |= record.gradients
        assert found == [pytest.approx(losses, rel=1e-11), pytest.approx(evaluated, rel=1e-11)]
        assert logged.partition("lm loss")[2].split("|")[:2] == line.partition("lm loss")[2].split("|")[:2]
    assert gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        difference = (gradients[name] - gradient).abs().max() / gradient.abs().max()
        assert difference < 1e-11, name


def test_a_verification_names_the_term_that_differs() -> None:
    runs = [
        record_run(Layout.parse(name).apply(_config(), GLOBAL_BATCH_SIZE), 1, 1, Providers(MeanGPT))
        for name in ("mbs1", "mbs2")
    ]
    excesses = compare(*runs).excesses(TOLERANCES["fp64"])
    assert excesses[0].startswith("router_loss of iteration 1 differs by 1.0e+00, over")
    assert not any("lm_loss" in excess for excess in excesses)


def test_the_term_is_logged_and_has_a_gradient(one_rank: Topology) -> None:
    """Against plain autograd over the whole batch."""
    with start_trainer(_config(), one_rank, providers=Providers(RoutedGPT)) as trainer:
        assert trainer.datasets.train is not None
        rows = torch.stack([torch.from_numpy(trainer.datasets.train[i]) for i in range(GLOBAL_BATCH_SIZE)])
        stage: Any = trainer.chunks[0].train()
        batch = Microbatch.of(rows, torch.arange(GLOBAL_BATCH_SIZE))
        terms = stage(batch, None).terms
        router = SCALE * terms["router_loss"].total / GLOBAL_BATCH_SIZE
        lm = terms["lm_loss"].total / batch.tokens.numel()
        weights = dict(stage.named_parameters())
        of_router = torch.autograd.grad(router, [*weights.values()], retain_graph=True, allow_unused=True)
        of_sum = torch.autograd.grad(lm + router, [*weights.values()])
    record, losses, _, line = _reference()
    assert losses == pytest.approx({"lm_loss": lm.item(), "router_loss": router.item()}, rel=1e-12)
    assert f"| lm loss: {lm.item():.6E} | router loss: {router.item():.6E} | loss scale" in line
    for name, gradient, of_term in zip(weights, of_sum, of_router, strict=True):
        found = record.gradients[name]
        torch.testing.assert_close(found, gradient[: len(found)], rtol=1e-10, atol=1e-15, msg=name)
        is_after = name.startswith(("layers.3.", "final_norm"))
        assert (of_term is None) == is_after, name
