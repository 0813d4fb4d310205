"""Two actions of DualPipeV run in turns: one computes while rows of the other are on their way to experts."""

from __future__ import annotations

import threading
from dataclasses import replace

import torch
from torch import Tensor

from megalite.config import ParallelConfig
from megalite.config.presets import PRESETS
from megalite.distributed.collectives import OverlapSlots
from megalite.distributed.topology import Topology
from megalite.model.experts import MixtureOfExperts, Router
from megalite.pipeline.executor import Pipeline, PointToPoint
from megalite.tensor_parallel.counter_random import initialize
from megalite.tensor_parallel.gemm import WeightGradientStore
from megalite.tensor_parallel.parameter_spec import LayerContext
from tests.live_ranks import run_ranks

CONFIG = replace(
    PRESETS["llama-tiny"], hidden_size=16, num_experts=4, moe_router_topk=2, moe_ffn_hidden_size=8
)
SHAPE = (6, 1, CONFIG.hidden_size)
NUM_MICROBATCHES = 4


class NotedSlots(OverlapSlots):
    """Notes which of two computations gives the other one a turn."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.given = ""

    def yield_slot(self) -> None:
        if self._are_two:
            self.given += "F" if threading.current_thread() is threading.main_thread() else "B"
        super().yield_slot()


def _step(topology: Topology, overlap_slots: OverlapSlots | None) -> list[Tensor]:
    """Return the losses and the gradients of two chunks on one pipeline rank."""
    store = WeightGradientStore()
    context = LayerContext(topology, torch.float64, weight_gradient_store=store, overlap_slots=overlap_slots)
    blocks = [MixtureOfExperts(CONFIG, context, Router(CONFIG, context, layer)) for layer in range(2)]
    for seed, block in enumerate(blocks):
        initialize(block, seed, topology)

    def load(number: int) -> Tensor:
        generator = torch.Generator().manual_seed(10 * number + topology.rank)
        return torch.randn(SHAPE, generator=generator, dtype=torch.float64)

    chunks = [
        lambda x, _: blocks[0](x).x,
        lambda x, hidden: (hidden + blocks[1](hidden).x - x).square().sum(),
    ]
    exchange = PointToPoint(topology.pp, torch.float64, topology.device)
    pipeline = Pipeline(chunks, exchange, "dualpipev", store, overlap_slots)
    losses = pipeline.train_step(NUM_MICROBATCHES, load, SHAPE)
    gradients = [weight.grad for block in blocks for weight in block.parameters()]
    return [*(each["lm_loss"] for each in losses), *(each for each in gradients if each is not None)]


def _both(topology: Topology) -> tuple[list[Tensor], list[Tensor], str]:
    overlap_slots = NotedSlots(topology.device)
    return _step(topology, overlap_slots), _step(topology, None), overlap_slots.given


def test_actions_change_places_while_rows_are_in_flight() -> None:
    for in_turns, one_by_one, given in run_ranks(_both, ParallelConfig(expert_model_parallel_size=2).mesh, 2):
        # Rows go there and back. In the backward of the first chunk, no gradients of its tokens do.
        assert given == "FBFBFBF" * (NUM_MICROBATCHES - 1)
        assert len(in_turns) == NUM_MICROBATCHES + 2 * 3
        assert all(torch.equal(a, b) for a, b in zip(in_turns, one_by_one, strict=True))
