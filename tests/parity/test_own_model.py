"""Models, datasets and losses of a user's own: those of examples/, in any layout."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as functional

from megalite import FieldSamples, LayerContext, Microbatch, Providers, Topology
from megalite.config import Config, DataConfig, OptimizerConfig, RecomputeConfig, TrainingConfig
from megalite.config.presets import PRESETS
from megalite.errors import UserError
from megalite.verify.compare_runs import TOLERANCES, compare
from megalite.verify.layouts import Layout
from megalite.verify.record_run import RunRecord, record_run

NUM_ITERATIONS, GLOBAL_BATCH_SIZE = 3, 8
FULL = RecomputeConfig(recompute_granularity="full")
MODELS = {
    "own_model": "ConvolutionModel",
    "own_loss": "FocalGPT",
    "own_scan": "ScanModel",
    "own_vocabulary_loss": "VocabularyLossGPT",
}
EXAMPLES = Path(__file__).parents[2] / "examples"


def _example(name: str) -> ModuleType:
    """Import a file of examples/."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def _providers(name: str) -> Providers:
    example = _example(name)
    if name in MODELS:
        return Providers(model=getattr(example, MODELS[name]))
    return Providers(datasets=example.datasets, samples=FieldSamples(example.FIELDS))


@pytest.fixture(autouse=True)
def _examples_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the ranks too, which import what is pickled by name."""
    monkeypatch.syspath_prepend(str(EXAMPLES))


def _config(**parallel: object) -> Config:
    return Config(
        model=replace(PRESETS["gpt-tiny"], vocab_size=200, params_dtype="fp64", seq_length=32),
        optimizer=OptimizerConfig(lr=3e-3, lr_decay_style="constant"),
        data=DataConfig(mock_data=True),
        training=TrainingConfig(
            micro_batch_size=2, global_batch_size=GLOBAL_BATCH_SIZE, train_iters=NUM_ITERATIONS, eval_iters=2
        ),
    )


@cache
def _reference(name: str) -> RunRecord:
    return record_run(_config(), NUM_ITERATIONS, 1, _providers(name))


@pytest.mark.parametrize(
    ("name", "layout", "recompute"),
    [
        ("own_model", "tp2pp2dp2+sp+zero1", FULL),
        ("own_model", "pp2zbv+gather", RecomputeConfig()),
        ("own_model", "tp2dp2+zero3", RecomputeConfig()),
        ("own_dataset", "tp2pp4", RecomputeConfig()),
        ("own_loss", "tp2pp2+sp", RecomputeConfig()),
        ("own_scan", "tp2", RecomputeConfig()),
        ("own_scan", "tp2dp2+sp", FULL),
        ("own_vocabulary_loss", "tp2pp2", RecomputeConfig()),
        ("own_vocabulary_loss", "tp4+sp", RecomputeConfig()),
    ],
)
def test_same_run(name: str, layout: str, recompute: RecomputeConfig) -> None:
    chosen = Layout.parse(layout)
    config = replace(chosen.apply(_config(), GLOBAL_BATCH_SIZE), recompute=recompute)
    run = record_run(config, NUM_ITERATIONS, chosen.world_size, _providers(name))
    assert not compare(run, _reference(name)).excesses(TOLERANCES["fp64"])


def test_the_loss_over_the_vocabulary_is_torchs(one_rank: Topology) -> None:
    config = _config()
    example = _example("own_vocabulary_loss")
    context = LayerContext(one_rank, torch.float64)
    stage = example.VocabularyLossGPT(config.model, context, range(1))
    tokens = torch.randint(200, (2, 33), generator=torch.Generator().manual_seed(1))
    microbatch = Microbatch.of(tokens, torch.arange(2))
    hidden = stage.final_norm(stage.hidden_states(microbatch, None))
    logits = stage.logits_of(hidden)[..., :200].flatten(0, 1)
    smoothed = functional.cross_entropy(
        logits, microbatch.labels.t().flatten(), label_smoothing=example.SMOOTHING, reduction="sum"
    )
    expected = smoothed + example.Z_LOSS * logits.logsumexp(-1).square().sum()
    torch.testing.assert_close(stage(microbatch, None), expected, rtol=1e-12, atol=0)


def test_parts_that_an_own_layer_does_not_have_are_refused() -> None:
    parts = RecomputeConfig(recompute_granularity="selective", recompute_modules=("mlp",))
    with pytest.raises(UserError, match=r"this model's layers are ConvolutionLayer: pass .* full"):
        record_run(replace(_config(), recompute=parts), 1, 1, _providers("own_model"))
