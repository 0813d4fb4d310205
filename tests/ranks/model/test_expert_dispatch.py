"""Experts on axes of their own compute what one rank computes, however the router distributes the tokens."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megalite.config import CheckpointConfig, Config, DataConfig, ModelConfig, ParallelConfig, TrainingConfig
from megalite.config.presets import PRESETS
from megalite.distributed.topology import Topology
from megalite.model.expert_dispatch import Dispatched, Dispatcher, dispatcher_for
from megalite.model.experts import MixtureOfExperts, Router
from megalite.tensor_parallel.counter_random import initialize
from megalite.tensor_parallel.parameter_spec import LayerContext, gather_full, spec_of
from tests.live_ranks import continued_losses, run_ranks
from tests.traffic import Traffic

CONFIG = replace(
    PRESETS["llama-tiny"],
    hidden_size=12,
    kv_channels=4,
    vocab_size=64,
    seq_length=16,
    params_dtype="fp64",
    num_layers=2,
    num_experts=6,
    moe_router_topk=2,
    moe_ffn_hidden_size=8,
    init_method_std=0.4,
    add_mlp_bias=True,
)
ROUTERS: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda weight: weight,
    "all tokens to two experts": lambda weight: torch.cat((weight[:4] * 0 + 1, weight[4:] * 0 + 30)),
    "no token to an expert": lambda weight: torch.cat((weight[:3], weight[3:4] * 0 - 100, weight[4:])),
}
LENGTH = 8


def _hidden() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(LENGTH, 1, 12, generator=generator, dtype=torch.float64)


@dataclass
class WaitingDispatcher(Dispatcher):
    """Waits for the rows of another dispatcher as soon as they are on their way: one from outside."""

    of_rows: Dispatcher
    was_used: bool = False

    def start(
        self, x: Tensor, weights: Tensor, experts: Tensor, capacity_factor: float | None = None
    ) -> Callable[[], Dispatched]:
        self.was_used = True
        dispatched = self.of_rows.start(x, weights, experts, capacity_factor)()
        return lambda: dispatched


def _context(topology: Topology, dispatcher: str) -> LayerContext:
    return LayerContext(
        topology,
        torch.float64,
        sequence_parallel=topology.tp.size > 1,
        moe_token_dispatcher_type=dispatcher,
    )


def _experts(
    topology: Topology,
    config: ModelConfig,
    router: str,
    dispatcher: str = "alltoall",
    is_from_outside: bool = False,
) -> list[Tensor]:
    """Return this rank's part of the output and of the input's gradient, and the weights' whole gradients."""
    context = _context(topology, dispatcher)
    block = MixtureOfExperts(config, context, Router(config, context))
    if is_from_outside:
        block.dispatcher = WaitingDispatcher(block.dispatcher)
    initialize(block, 3, topology)
    with torch.no_grad():
        block.router.weight.copy_(ROUTERS[router](block.router.weight))
        for bias in (block.up.bias, block.down.bias):
            shape = spec_of(bias).full_shape
            full = torch.arange(math.prod(shape), dtype=torch.float64).view(shape).sin()
            bias.copy_(spec_of(bias).box(topology).of(full))
    x = _hidden().chunk(topology.world_size)[topology.rank].clone().requires_grad_()
    y = block(x, torch.arange(x.shape[1])).x
    assert not isinstance(block.dispatcher, WaitingDispatcher) or block.dispatcher.was_used
    y.square().sum().backward()
    gradients = []
    for weight in (block.up.weight, block.down.weight, block.up.bias, block.down.bias):
        spec = spec_of(weight)
        if (partial := spec.parameter_axes.partial_axis(topology)) is not None:
            torch.distributed.all_reduce(weight.grad, group=partial.group)
        torch.distributed.all_reduce(weight.grad, group=spec.parameter_axes.replicas(topology).group)
        gradients.append(gather_full(weight.grad, spec, topology))
    return [y.detach(), x.grad, *gradients]


DP4_EP2 = ParallelConfig(expert_model_parallel_size=2, data_parallel_size=4)
TP2_EP2 = ParallelConfig(tensor_model_parallel_size=2, expert_model_parallel_size=2, sequence_parallel=True)
TP4_EP2_ETP1 = ParallelConfig(
    tensor_model_parallel_size=4,
    expert_model_parallel_size=2,
    expert_tensor_parallel_size=1,
    sequence_parallel=True,
)


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize(
    ("parallel", "dispatcher"),
    [
        *((parallel, "alltoall") for parallel in (DP4_EP2, TP2_EP2, TP4_EP2_ETP1)),
        *((parallel, "allgather") for parallel in (TP2_EP2, TP4_EP2_ETP1)),
    ],
    ids=["dp4ep2", "tp2dp2ep2etp2", "tp4ep2etp1", "tp2dp2ep2etp2, all-gather", "tp4ep2etp1, all-gather"],
)
def test_experts_are_those_of_one_rank(parallel: ParallelConfig, dispatcher: str, router: str) -> None:
    (expected,) = run_ranks(_experts, ParallelConfig().mesh, 1, CONFIG, router)
    ranks = run_ranks(_experts, parallel.mesh, 4, CONFIG, router, dispatcher)
    for index, whole in enumerate(expected):
        parts = [each[index] for each in ranks]
        found = [torch.cat(parts)] if index < 2 else parts
        for each in found:
            torch.testing.assert_close(each, whole, rtol=1e-12, atol=1e-12)


def test_a_layer_takes_a_dispatcher_from_outside() -> None:
    router, parallel = "as it is", ParallelConfig(expert_model_parallel_size=2)
    (expected,) = run_ranks(_experts, ParallelConfig().mesh, 1, CONFIG, router)
    ranks = run_ranks(_experts, parallel.mesh, 2, CONFIG, router, "alltoall", True)
    for index, whole in enumerate(expected):
        parts = [each[index] for each in ranks]
        for each in [torch.cat(parts)] if index < 2 else parts:
            torch.testing.assert_close(each, whole, rtol=1e-12, atol=1e-12)


def test_forced_routing_is_that_of_one_rank() -> None:
    config = replace(CONFIG, moe_router_force_load_balancing=True)
    (expected,) = run_ranks(_experts, ParallelConfig().mesh, 1, config, "all tokens to two experts")
    ranks = run_ranks(_experts, TP4_EP2_ETP1.mesh, 4, config, "all tokens to two experts")
    torch.testing.assert_close(torch.cat([each[0] for each in ranks]), expected[0], rtol=1e-12, atol=1e-12)
    assert (expected[2].flatten(1).abs().sum(1) > 0).all()  # every expert has tokens


DROPPED = 4
CHOICES: dict[str, list[list[list[int]]]] = {
    "one token": [[[3, 0]], [[1, 2]]],
    "all tokens on one expert": [[[3], [3], [3]], [[3], [3], [3]]],
    "nothing is left on a rank": [[[DROPPED, DROPPED], [DROPPED, DROPPED]], [[0, DROPPED], [3, 1]]],
    "nothing is left": [[[DROPPED], [DROPPED]], [[DROPPED], [DROPPED]]],
}
"""The experts of each rank's tokens, of 4 experts on 2 ranks."""


def _dispatched(
    topology: Topology, dispatcher: str, choices: list[list[list[int]]]
) -> tuple[list[Tensor], list[Tensor], Counter[str]]:
    """Let expert e multiply rows by e + 1.

    Returns:
        The outputs and gradients, what they should be, and the bytes of floating-point messages by kind.
    """
    context = _context(topology, dispatcher)
    experts = torch.tensor(choices[topology.rank]).unsqueeze(1)  # [s, 1, k]
    torch.manual_seed(topology.rank)
    x = torch.randn(len(experts), 1, 5, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(experts.shape, dtype=torch.float64, requires_grad=True)
    with Traffic(topology) as traffic:
        rows, of_rows, ends, combine = dispatcher_for(4, context).start(x, weights, experts, 1.0)()
        first = 0 if context.expert_axes is None else 2 * topology.rank
        numbers = torch.arange(first, first + len(ends)).repeat_interleave(
            ends.diff(prepend=ends.new_zeros(1)), output_size=len(rows)
        )
        y = combine(rows * (of_rows * (numbers + 1)).unsqueeze(1) / topology.tp.size)  # tp adds slices up
        gradients = torch.autograd.grad(y.sum(), (x, weights))
    factors = torch.where(experts == DROPPED, 0, experts + 1)  # [s, 1, k]
    total = (weights * factors).sum(-1, keepdim=True)
    expected = [total * x, total.expand_as(x), factors * x.sum(-1, keepdim=True)]
    sent: Counter[str] = Counter()
    for call, count in traffic.calls.items():
        sent[call.kind] += call.num_bytes * count * (call.dtype == "float64")
    return [y.detach(), *gradients], [each.detach() for each in expected], sent


def _sent_by_all_to_all(rank: int, choices: list[list[list[int]]]) -> dict[str, int]:
    """Return the bytes of a row and its weight that go there, of 5 numbers that return, and of gradients."""
    flat = [[number for token in of_rank for number in token] for of_rank in choices]
    num_sent = sum(number != DROPPED for number in flat[rank])
    num_received = sum(number // 2 == rank for number in chain(*flat))
    return {"all-to-all": (2 * 6 + 2 * 5) * 8 * max(num_sent, num_received)}


def _sent_by_all_gather(rank: int, choices: list[list[list[int]]]) -> dict[str, int]:
    """Return the bytes of both ranks' tokens and weights, of outputs, and of the gradients of all of them.

    A gradient takes the opposite way of its tensor, by the opposite collective.
    """
    num_bytes = (5 + len(choices[0][0]) + 5) * 2 * len(choices[0]) * 8
    return {"all-gather": num_bytes, "reduce-scatter": num_bytes}


@pytest.mark.parametrize("case", CHOICES)
@pytest.mark.parametrize(
    ("parallel", "dispatcher", "sent_by"),
    [
        (ParallelConfig(expert_model_parallel_size=2), "alltoall", _sent_by_all_to_all),
        (ParallelConfig(expert_model_parallel_size=2), "allgather", _sent_by_all_gather),
        (ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True), "alltoall", None),
    ],
    ids=["ep2", "ep2, all-gather", "tp2"],
)
def test_few_tokens_and_none(
    parallel: ParallelConfig, dispatcher: str, sent_by: Callable[..., dict[str, int]] | None, case: str
) -> None:
    choices = CHOICES[case]
    ranks = run_ranks(_dispatched, parallel.mesh, 2, dispatcher, choices)
    for rank, (found, expected, num_bytes) in enumerate(ranks):
        for each, right in zip(found, expected, strict=True):
            torch.testing.assert_close(each, right, rtol=1e-14, atol=1e-14)
        assert sent_by is None or num_bytes == sent_by(rank, choices)


def test_a_rank_without_any_token_for_its_experts() -> None:
    """All tokens go to experts 4 and 5, which are on the last of three ranks."""
    router, parallel = "all tokens to two experts", ParallelConfig(expert_model_parallel_size=3)
    (expected,) = run_ranks(_experts, ParallelConfig().mesh, 1, replace(CONFIG, seq_length=6), router)
    config = replace(CONFIG, seq_length=6)
    ranks = run_ranks(_experts, parallel.mesh, 3, config, router)
    torch.testing.assert_close(torch.cat([each[0] for each in ranks]), expected[0], rtol=1e-12, atol=1e-12)


def test_a_checkpoint_continues_with_any_expert_parallel_size(tmp_path: Path) -> None:
    found: dict[str, list[float]] = {}
    layouts = {
        "others": (
            ParallelConfig(expert_model_parallel_size=2, zero_stage=1),
            ParallelConfig(),
            ParallelConfig(
                tensor_model_parallel_size=2,
                sequence_parallel=True,
                expert_model_parallel_size=2,
                expert_tensor_parallel_size=1,
                zero_stage=3,
            ),
        ),
        "one": (ParallelConfig(),) * 3,
    }
    for name, parallels in layouts.items():
        (tmp_path / name).mkdir()
        found[name] = []
        for parallel in parallels:
            config = Config(
                model=replace(CONFIG, num_experts=4),
                parallel=parallel,
                data=DataConfig(mock_data=True),
                training=TrainingConfig(micro_batch_size=1, global_batch_size=4, train_iters=6, eval_iters=0),
                checkpoint=CheckpointConfig(save=str(tmp_path / name), load=str(tmp_path / name)),
            )
            num_ranks = 1 if parallel == ParallelConfig() else 2
            found[name] += run_ranks(continued_losses, parallel.mesh, num_ranks, config, 2)[0]
    assert found["others"] == pytest.approx(found["one"], rel=1e-12, abs=0)
