"""The tokens of each expert are those of the global batch, counted once, in any layout."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import pytest
import torch

from megalite.config import Config, DataConfig, ParallelConfig, RecomputeConfig, TrainingConfig
from megalite.distributed.topology import Topology
from megalite.model.experts import Router, Routing
from megalite.train.callbacks.expert_use import begin_counts, end_counts, loads_of_layers
from megalite.train.telemetry.expert_use import LayerLoads
from megalite.train.trainer import start_trainer
from tests.live_ranks import run_ranks
from tests.ranks.model.test_expert_dispatch import CONFIG

SAMPLES = 4
MODEL = replace(CONFIG, num_layers=4, moe_layer_freq=(0, 1, 1, 1), mtp_num_layers=1)
FULL = RecomputeConfig(recompute_granularity="full")
SP = {"sequence_parallel": True}
LAYOUTS = {
    "tp2": ParallelConfig(tensor_model_parallel_size=2),
    "tp2, sequence parallel": ParallelConfig(tensor_model_parallel_size=2, **SP),
    "pp2, dense layers alone on no stage": ParallelConfig(pipeline_model_parallel_size=2),
    "dp2": ParallelConfig(data_parallel_size=2),
    "cp2": ParallelConfig(context_parallel_size=2),
    "dp2, ep2": ParallelConfig(expert_model_parallel_size=2),
}


def _loads(topology: Topology, config: Config) -> tuple[Mapping[str, LayerLoads], Mapping[str, list[int]]]:
    """Return the loads of an iteration, and the tokens that the routers' outputs have, by layer."""
    by_hand: dict[str, torch.Tensor] = {}

    def add(name: str, router: Router, _: object, routing: Routing) -> None:
        # Of one rank: the last position of a sample has no later token.
        experts = routing.experts[:-1] if name.startswith("mtp") else routing.experts
        by_hand[name] = by_hand.get(name, 0) + experts.flatten().bincount(minlength=router.num_experts)

    with start_trainer(config, topology) as trainer:
        for chunk in trainer.chunks:
            for name, module in chunk.named_modules():
                if isinstance(module, Router):
                    module.register_forward_hook(partial(add, ".".join(name.split(".")[:2])))
        begin_counts(trainer)
        trainer.step()
        counted = end_counts(trainer)
        return loads_of_layers(counted, trainer), {name: each.tolist() for name, each in by_hand.items()}


def _config(parallel: ParallelConfig, recompute: RecomputeConfig) -> Config:
    training = TrainingConfig(micro_batch_size=1, global_batch_size=SAMPLES, train_iters=2, eval_iters=0)
    data = DataConfig(mock_data=True)
    return Config(model=MODEL, parallel=parallel, recompute=recompute, data=data, training=training)


@functools.cache
def _one_rank() -> Mapping[str, LayerLoads]:
    ((loads, by_hand),) = run_ranks(
        _loads, ParallelConfig().mesh, 1, _config(ParallelConfig(), RecomputeConfig())
    )
    assert {name: list(each.tokens) for name, each in loads.items()} == by_hand
    return loads


def test_one_rank_counts_what_its_routers_return() -> None:
    loads = _one_rank()
    assert list(loads) == ["layers.1", "layers.2", "layers.3", "mtp.0"]
    for name, each in loads.items():
        num_positions = MODEL.seq_length - name.startswith("mtp")
        assert sum(each.tokens) == SAMPLES * num_positions * MODEL.moe_router_topk
        assert 0.0 < each.entropy < torch.tensor(float(MODEL.num_experts)).log()


@pytest.mark.parametrize("recompute", [RecomputeConfig(), FULL], ids=["kept", "recomputed"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_counts_the_same(layout: str, recompute: RecomputeConfig) -> None:
    parallel = LAYOUTS[layout]
    for loads, _ in run_ranks(_loads, parallel.mesh, 2, _config(parallel, recompute)):
        assert loads.keys() == _one_rank().keys()
        for name, expected in _one_rank().items():
            assert loads[name].tokens == expected.tokens
            assert loads[name].entropy == pytest.approx(expected.entropy, rel=1e-12)
