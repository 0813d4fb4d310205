"""A mixture that changes in mid-run, in any layout: every rank takes its samples of the same order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megalite.config import Config, DataConfig, OptimizerConfig, TrainingConfig
from megalite.config.presets import PRESETS
from megalite.data.indexed_dataset import IndexedWriter
from megalite.observe.verify.compare_runs import TOLERANCES, compare
from tests.parity.models import run_alone, run_in

NUM_ITERATIONS = 3
PHASES = """
sources: {{web: {{path: {0}/web}}, code: {{path: {0}/code, max_epochs: 0.2}}}}
phases:
- {{until: 1 iterations, weights: {{web: 1}}}}
- {{until: 20 samples, ramp: {{web: 1, code: 3}}, when_exhausted: renormalize}}
- {{until: end, weights: {{web: 1, code: 1}}, when_exhausted: renormalize}}
"""


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Return a run in which code runs out."""
    for token, name in enumerate(("web", "code")):
        with IndexedWriter(str(tmp_path / name), "uint16") as writer:
            tokens = np.random.default_rng(token).integers(0, 200, 1000)
            writer.add_documents(tokens, np.full(20, 50, np.int32))
    path = tmp_path / "phases.yaml"
    path.write_text(PHASES.format(tmp_path))
    model = replace(PRESETS["llama-tiny"], vocab_size=200, params_dtype="fp64", seq_length=32)
    return Config(
        model=model,
        optimizer=OptimizerConfig(lr=3e-3, lr_decay_style="constant"),
        data=DataConfig(data_phases=str(path), split="1,0,0"),
        training=TrainingConfig(micro_batch_size=2, global_batch_size=8, train_iters=NUM_ITERATIONS),
    )


@pytest.mark.parametrize(
    "name", ["dp2mbs1", *(pytest.param(each, marks=pytest.mark.slow) for each in ("tp2pp2", "pp4", "cp2dp2"))]
)
def test_same_run(config: Config, name: str) -> None:
    run, reference = run_in(name, config, NUM_ITERATIONS), run_alone(config, NUM_ITERATIONS)
    assert not compare(run, reference).excesses(TOLERANCES["fp64"])
