"""--full-validation: each sample counts once, whatever the batches and the layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.config import Config, DataConfig, TrainingConfig
from megalite.config.presets import PRESETS
from megalite.data.indexed_dataset import IndexedWriter
from megalite.distributed.topology import Topology
from megalite.observe.verify.layouts import Layout
from megalite.train.trainer import start_trainer
from tests.live_ranks import run_ranks

SEQ_LENGTH, NUM_SAMPLES = 16, 13
LOSSES = {"gpt": {}, "eod_mask_loss": {"eod_mask_loss": True, "tokenizer_type": "byte"}}


def _corpus(folder: Path) -> str:
    """Write a corpus whose validation part is one document of 13 samples and a half."""
    prefix = str(folder / "corpus")
    tokens = np.random.default_rng(1).integers(0, 100, (NUM_SAMPLES * 2 + 1) * SEQ_LENGTH)
    half = NUM_SAMPLES * SEQ_LENGTH + SEQ_LENGTH // 2
    tokens[[half // 2, half - 1, half + half // 2, -1]] = 256  # byte tokenizer's end of a document
    with IndexedWriter(prefix, "uint16") as writer:
        writer.add_documents(tokens, np.array([half, half], dtype=np.int32))
    return prefix


def _config(prefix: str, batch_size: int, **data: Any) -> Config:
    model = replace(
        PRESETS["llama-tiny"],
        vocab_size=257,
        seq_length=SEQ_LENGTH,
        params_dtype="fp64",
        num_experts=4,
        moe_router_load_balancing_type="seq_aux_loss",
        moe_aux_loss_coeff=0.1,
        mtp_num_layers=1,
    )
    training = TrainingConfig(global_batch_size=batch_size, train_iters=2, full_validation=True)
    return Config(model=model, data=DataConfig(data_path=(prefix,), split="1,1,0", **data), training=training)


def _evaluate(topology: Topology, config: Config) -> dict[str, float]:
    with start_trainer(config, topology) as trainer:
        dataset = trainer.datasets.valid
        assert dataset is not None and len(dataset) == NUM_SAMPLES
        return trainer.evaluate(dataset, 0, num_samples=trainer.evaluator.num_samples("valid", dataset))


@pytest.mark.parametrize("data", LOSSES.values(), ids=LOSSES)
def test_a_partial_batch_counts_its_samples_in_any_layout(tmp_path: Path, data: dict[str, Any]) -> None:
    """Batches of one sample have no padding: 13 of these are the reference of two batches of 8."""
    prefix = _corpus(tmp_path)
    alone = _config(prefix, 1, **data)
    (expected,) = run_ranks(_evaluate, alone.parallel.mesh, 1, alone)
    assert expected.keys() == {*("lm_loss", "load_balancing_loss", "mtp_1_loss", "mtp_1_load_balancing_loss")}
    for row in ("mbs8", "dp2mbs2", "pp2", "cp2"):
        layout = Layout.parse(row)
        config = layout.apply(_config(prefix, 8, **data), 8)
        found = run_ranks(_evaluate, config.parallel.mesh, layout.world_size, config)
        assert found == [pytest.approx(expected, rel=1e-12)] * layout.world_size, row
