"""Test the table of modules: its FLOPs are those of the papers, and it does not change the run."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megalite.config import Config, DataConfig, ModelConfig, OptimizerConfig, TrainingConfig, check_config
from megalite.distributed.topology import Topology
from megalite.kernels import CausalSoftmax, flash_attention
from megalite.plan.model_flops import flops_per_token_by_convention
from megalite.plan.model_parameters import total_parameters
from megalite.train.callbacks.module_profile import (
    ATTENTION_FLOPS,
    NUM_TIMED,
    log_module_profile,
    profile_modules,
)
from megalite.train.trainer import Trainer, start_trainer

MODEL = ModelConfig(
    num_layers=3, hidden_size=64, num_attention_heads=4, seq_length=32, vocab_size=500, params_dtype="fp64"
)
CONFIG = Config(
    model=MODEL,
    optimizer=OptimizerConfig(lr=1e-2),
    data=DataConfig(mock_data=True),
    training=TrainingConfig(train_iters=4, micro_batch_size=2, global_batch_size=4, eval_iters=0),
)


def trainer_of(topology: Topology, model: ModelConfig = MODEL) -> Trainer:
    config = replace(CONFIG, model=model)
    check_config(config, 1)
    return start_trainer(config, topology)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention_dropout": 0.0},
        {"activation": "swiglu", "num_query_groups": 2, "position_embedding_type": "rope"},
    ],
    ids=["written out", "fused", "llama"],
)
def test_operations_are_those_of_the_formula(one_rank: Topology, changes: dict[str, object]) -> None:
    model = replace(MODEL, **changes)
    rows = {row.name: row for row in profile_modules(trainer_of(one_rank, model))}
    tokens = 2 * model.seq_length
    assert rows[""].flops == tokens * flops_per_token_by_convention(model, 1)["full_attention"] / 3
    logits = 2 * tokens * model.hidden_size * model.padded_vocab_size(1)
    assert rows["layers.*"].flops == rows[""].flops - logits
    assert rows["layers.*"].flops == rows["layers.*.attention"].flops + rows["layers.*.mlp"].flops
    assert rows["layers.*.attention.qkv"].num_modules == model.num_layers
    assert rows[""].num_parameters == total_parameters(model, 1)


def test_operations_of_our_attention_on_gpus_are_counted() -> None:
    b, n, g, s, d = 2, 4, 2, 16, 8
    q, k = torch.zeros(b, n, s, d), torch.zeros(b, g, s, d)
    with FlopCounterMode(display=False, custom_mapping=ATTENTION_FLOPS) as counter:
        flash_attention(q, k, k, CausalSoftmax(s, 1.0))
    assert counter.get_total_flops() == 2 * 2 * b * n * s * s * d


def test_every_forward_is_timed_and_parts_take_no_longer_than_the_whole(one_rank: Topology) -> None:
    rows = {row.name: row for row in profile_modules(trainer_of(one_rank))}
    for number in range(NUM_TIMED):
        parts = [rows[name].seconds[number] for name in ("embedding", "layers.*", "final_norm")]
        assert all(part > 0.0 for part in parts)
        assert sum(parts) < rows[""].seconds[number]


def test_the_run_continues_unchanged(one_rank: Topology, caplog: pytest.LogCaptureFixture) -> None:
    plain, profiled = trainer_of(one_rank), trainer_of(one_rank)
    caplog.set_level(logging.INFO)
    for _ in range(3):
        log_module_profile(profiled)
        assert profiled.step() == plain.step()
    table = [record.getMessage() for record in caplog.records if "modules of rank 0" in record.getMessage()]
    assert [text.split(" before ")[1].split(",")[0] for text in table] == [
        "iteration 1",
        "iteration 2",
        "iteration 3",
    ]
    lines = table[0].splitlines()
    assert lines[2].split()[0] == "all"
    assert any(line.split()[0] == "layers.*.mlp.down" for line in lines)
    assert any(line.startswith("    outside these modules") for line in lines)
    assert not any(line.split()[0] == "layers" for line in lines)
