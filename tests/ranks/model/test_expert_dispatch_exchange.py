"""The shared expert computes while rows of the other experts are in flight, in forward and in backward."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar
from unittest import mock

import pytest
import torch
from torch import Tensor

from megalite.config import ModelConfig, ParallelConfig
from megalite.config.presets import PRESETS
from megalite.distributed.topology import Topology
from megalite.model import expert_dispatch
from megalite.model.expert_dispatch import Transfer, _MessagesInFlight
from megalite.model.experts import MixtureOfExperts, Router
from megalite.tensor_parallel.counter_random import initialize
from megalite.tensor_parallel.parameter_spec import LayerContext
from tests.live_ranks import run_ranks

CONFIG = replace(
    PRESETS["llama-tiny"],
    hidden_size=16,
    num_experts=4,
    moe_router_topk=2,
    moe_ffn_hidden_size=8,
    moe_shared_expert_intermediate_size=24,
)
EP2 = ParallelConfig(expert_model_parallel_size=2)


class NotedMessages(_MessagesInFlight):
    """Notes when rows depart and when they are waited for."""

    events: ClassVar[list[str]] = []

    def start(self, x: Tensor, transfer: Transfer) -> Tensor:
        self.events.append(f"start {x.shape[-1]}")
        return super().start(x, transfer)

    def wait(self) -> Tensor:
        rows = super().wait()
        self.events.append("wait")
        return rows


def _events(topology: Topology, config: ModelConfig, dispatcher: str) -> tuple[list[str], list[str]]:
    """Return what happens in forward and in backward: messages, and the work of both kinds of experts."""
    context = LayerContext(topology, torch.float64, moe_token_dispatcher_type=dispatcher)
    block = MixtureOfExperts(config, context, Router(config, context))
    initialize(block, 3, topology)
    assert block.shared is not None
    events: list[str] = []
    for name, module in (("shared", block.shared.up), ("experts", block.down)):
        module.weight.register_post_accumulate_grad_hook(lambda _, name=name: events.append(name))
    multiply, transform = block.down.multiply, block.shared.transform

    def noted_multiply(*args: Tensor) -> Tensor:
        events.append("experts")
        return multiply(*args)

    def noted_transform(x: Tensor) -> Tensor:
        events.append("shared")
        return transform(x)

    block.down.multiply, block.shared.transform = noted_multiply, noted_transform  # type: ignore[method-assign]
    NotedMessages.events = events
    torch.manual_seed(topology.rank)
    x = torch.randn(6, 1, config.hidden_size, dtype=torch.float64, requires_grad=True)
    with mock.patch.object(expert_dispatch, "_MessagesInFlight", NotedMessages):
        y = block(x).x
    forward = events.copy()
    events.clear()
    y.sum().backward()
    return forward, events


@pytest.mark.parametrize(("dispatcher", "width"), [("alltoall", 1), ("allgather", 2)])
def test_the_shared_expert_computes_under_the_messages(dispatcher: str, width: int) -> None:
    """Weights go with the hidden states: one of each row, or two of each token."""
    for forward, backward in run_ranks(_events, EP2.mesh, 2, CONFIG, dispatcher):
        sent = [f"start {width}", "start 16"]
        assert forward == [*sent, "shared", "wait", "wait", "experts", "start 16", "wait"]
        assert backward == ["start 16", "wait", "experts", *sent, "shared", "wait", "wait"]
