"""BERT in any layout: masked tokens, padding and the order of segments; each loss has a divisor of its own.

Every rank has other numbers of masked tokens, so that a mean over a microbatch's or a rank's own would show.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megalite.config import Config, DataConfig, OptimizerConfig, RecomputeConfig, TrainingConfig
from megalite.config.presets import PRESETS
from megalite.distributed.topology import Topology
from megalite.observe.verify.compare_runs import TOLERANCES, compare
from megalite.observe.verify.record_run import RunRecord
from megalite.train.trainer import start_trainer
from tests.parity.models import run_alone, run_in

NUM_ITERATIONS, GLOBAL_BATCH_SIZE = 2, 8
FULL = RecomputeConfig(recompute_granularity="full", recompute_method="uniform")
SELECTIVE = RecomputeConfig(recompute_granularity="selective", recompute_modules=("core_attn", "mlp_act"))
ROWS: dict[str, tuple[str, dict[str, Any], RecomputeConfig]] = {
    "every axis": ("tp2pp2dp2", {}, RecomputeConfig()),
    "sequence parallel": ("tp2pp2mbs1", {"sequence_parallel": True}, SELECTIVE),
    "zero bubble": (
        "tp2pp2dp2",
        {"sequence_parallel": True, "pipeline_schedule": "zb-v", "zero_stage": 2},
        FULL,
    ),
    "stages that have neither end": ("pp4", {}, RecomputeConfig()),
    "fully sharded": ("dp4mbs1", {"zero_stage": 3}, RecomputeConfig()),
    "slices of samples": ("tp2cp2", {"sequence_parallel": True}, SELECTIVE),
    "heads for tokens": ("pp2cp2", {"cp_comm_type": "a2a", "zero_stage": 1}, RecomputeConfig()),
    "a ring": ("tp2cp2", {"cp_comm_type": "p2p", "sequence_parallel": True}, RecomputeConfig()),
    "heads in a ring": ("cp4", {"cp_comm_type": "a2a+p2p"}, SELECTIVE),
    "losses in chunks": ("tp2dp2", {"sequence_parallel": True}, RecomputeConfig(cross_entropy_chunks=3)),
}


def _config(**model: Any) -> Config:
    values = {"hidden_dropout": 0.1, "attention_dropout": 0.1, **model}
    return Config(
        model=replace(PRESETS["bert-tiny"], vocab_size=200, params_dtype="fp64", seq_length=32, **values),
        optimizer=OptimizerConfig(lr=3e-3, lr_decay_style="constant"),
        data=DataConfig(mock_data=True),
        training=TrainingConfig(
            micro_batch_size=2, global_batch_size=GLOBAL_BATCH_SIZE, train_iters=NUM_ITERATIONS, eval_iters=2
        ),
    )


@functools.cache
def _reference(norm_position: str) -> RunRecord:
    return run_alone(_config(norm_position=norm_position), NUM_ITERATIONS)


@pytest.mark.parametrize(
    ("row", "norm_position"),
    [
        *((row, "post") for row in ROWS if row not in ("heads in a ring", "sequence parallel")),
        ("sequence parallel", "pre"),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (("heads in a ring", "post"), ("sequence parallel", "post"), ("zero bubble", "pre"))
        ),
    ],
)
def test_same_run(row: str, norm_position: str) -> None:
    name, parallel, recompute = ROWS[row]
    config = _config(norm_position=norm_position)
    config = replace(config, parallel=replace(config.parallel, **parallel), recompute=recompute)
    run = run_in(name, config, NUM_ITERATIONS)
    assert not compare(run, _reference(norm_position)).excesses(TOLERANCES["fp64"])


@pytest.mark.parametrize("has_order", [True, False])
def test_losses_are_means_over_what_is_predicted(has_order: bool, one_rank: Topology) -> None:
    """In training and evaluation: against one pass over all samples and torch's mean."""
    config = _config(hidden_dropout=0.0, attention_dropout=0.0, bert_binary_head=has_order)
    trainer = start_trainer(config, one_rank)
    (stage,), samples = trainer.chunks, trainer.load_batch.samples

    def expected(dataset: Any, num_samples: int) -> dict[str, torch.Tensor]:
        numbers = torch.arange(num_samples)
        rows = torch.stack([torch.from_numpy(dataset[int(i)]) for i in numbers])
        batch = samples.microbatch(rows, numbers)
        assert batch.loss_mask is not None and batch.order_labels is not None
        normed = stage.final_norm(stage.hidden_states(batch, None))
        logits = stage.logits_of(normed).transpose(0, 1)[..., :200]  # of all tokens
        logits = logits[torch.arange(num_samples)[:, None], batch.label_positions]
        losses = {"lm_loss": F.cross_entropy(logits[batch.loss_mask], batch.labels[batch.loss_mask])}
        if has_order:
            losses["sop_loss"] = F.cross_entropy(stage.order_scores(normed), batch.order_labels)
        return losses

    assert trainer.datasets.train is not None and trainer.datasets.valid is not None
    losses = expected(trainer.datasets.train, GLOBAL_BATCH_SIZE)
    weights = dict(stage.named_parameters())
    gradients = torch.autograd.grad(sum(losses.values()), list(weights.values()))
    found, grad_norm = trainer.train_step.compute_gradients(
        trainer.train_step.plan_iteration(trainer.progress)
    )
    assert found.tolist() == pytest.approx([loss.item() for loss in losses.values()], rel=1e-13)
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    assert grad_norm.item() == pytest.approx(flat.norm().item(), rel=1e-12)

    evaluated = trainer.evaluate(trainer.datasets.valid, 0)
    means = expected(trainer.datasets.valid, 2 * GLOBAL_BATCH_SIZE)
    assert evaluated == pytest.approx({name: each.item() for name, each in means.items()}, rel=1e-13)
    trainer.close()
