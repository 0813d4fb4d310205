"""What is compared trains the same model on the same samples: its losses and sizes are megalite's."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace

import pytest

from megalite.config import Config, DataConfig, ModelConfig, OptimizerConfig, TrainingConfig
from megalite.config.presets import PRESETS
from megalite.distributed.local_ranks import LocalRanks
from megalite.distributed.topology import Topology

GPT = ModelConfig(
    num_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    seq_length=32,
    vocab_size=256,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
LLAMA = replace(PRESETS["llama-tiny"], num_layers=2, seq_length=32, vocab_size=256)
EXPERTS = replace(
    LLAMA,
    num_experts=8,
    moe_router_topk=2,
    moe_ffn_hidden_size=48,
    moe_router_load_balancing_type="none",
    moe_layer_freq=(0, 1),
)
MODULES = {"megatron": "megatron_peer"}


def config_of(model: ModelConfig) -> Config:
    return Config(
        model=model,
        optimizer=OptimizerConfig(lr=2e-2, lr_decay_style="constant", clip_grad=0.5, weight_decay=0.1),
        data=DataConfig(mock_data=True),
        training=TrainingConfig(micro_batch_size=2, global_batch_size=4, train_iters=100, eval_iters=0),
    )


def steps_of(topology: Topology, config: Config, names: list[str]) -> dict[str, tuple[int, list[float]]]:
    """Each one's number of parameters, and its losses in four steps."""
    found = {}
    for name in names:
        work = getattr(importlib.import_module(MODULES.get(name, "one_rank_peers")), name)(config, topology)
        found[name] = work.num_parameters, [work.step() for _ in range(4)]
    return found


@pytest.fixture(scope="module")
def ranks() -> Iterator[LocalRanks]:
    """A rank that imports each framework once; it starts in a test, where it can import the scripts."""
    with LocalRanks() as ranks:
        yield ranks


def check_same(ranks: LocalRanks, model: ModelConfig, names: list[str], tolerance: float) -> None:
    config = config_of(model)
    (found,) = ranks.run(steps_of, config.parallel.mesh, 1, config, ["megalite", *names])
    count, losses = found["megalite"]
    assert abs(losses[0] - losses[-1]) > 0.05  # the updates are seen
    for name in names:
        assert found[name][0] == count, name
        assert found[name][1] == pytest.approx(losses, rel=tolerance), name


def test_gpt_in_pytorch_and_transformers(ranks: LocalRanks) -> None:
    check_same(ranks, GPT, ["plain", "transformers"], 1e-4)


def test_llama_in_transformers(ranks: LocalRanks) -> None:
    check_same(ranks, LLAMA, ["transformers"], 1e-4)


@pytest.mark.slow  # its import alone takes seconds
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("model", [GPT, LLAMA, EXPERTS], ids=["gpt", "llama", "experts"])
def test_megatron(ranks: LocalRanks, model: ModelConfig, dtype: str) -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    check_same(ranks, replace(model, params_dtype=dtype), ["megatron"], 1e-4 if dtype == "fp32" else 5e-3)
