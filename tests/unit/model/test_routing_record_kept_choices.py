"""Recomputation sends tokens to the experts that forward selected, even if it would select others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megalite.config import RecomputeConfig
from megalite.data.microbatch import Microbatch
from megalite.model import experts
from megalite.model.routing_record import KeptChoices, choose
from tests.stages import build_stage
from tests.unit.model.test_experts import CONFIG

MODES = {
    "full": RecomputeConfig(recompute_granularity="full"),
    "mlp": RecomputeConfig(recompute_granularity="selective", recompute_modules=("mlp",)),
}


def _gradients(topology, recompute: RecomputeConfig | None) -> list[Tensor]:
    config = replace(CONFIG, num_layers=2, moe_router_topk=2)
    stage = build_stage(config, topology, range(2), seed=3, recompute=recompute)
    ids = torch.randint(101, (2, 10), generator=torch.Generator().manual_seed(1))
    loss = torch.zeros((), dtype=torch.float64)
    for term in stage(Microbatch.of(ids, torch.tensor([7, 8])), None).terms.values():
        loss = loss + term.total * term.scale
    loss.backward()
    return [parameter.grad for parameter in stage.parameters()]


def _others_from_call(number: int) -> Callable[[Tensor, int], Tensor]:
    """Return a function that selects the best experts in its first calls, and the worst from `number` on."""
    calls = 0
    best = experts.highest

    def select(x: Tensor, count: int) -> Tensor:
        nonlocal calls
        calls += 1
        return best(x if calls < number else -x, count)

    return select


@pytest.mark.parametrize("mode", MODES)
def test_backward_does_not_select_again(mode: str, one_rank, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _gradients(one_rank, None)
    monkeypatch.setattr(experts, "highest", _others_from_call(3))  # after both layers' forward
    found = _gradients(one_rank, MODES[mode])
    assert all(map(torch.equal, found, expected))


def test_a_second_run_repeats_choices_in_their_order() -> None:
    kept = KeptChoices()
    with kept.first_run():
        assert [int(choose(lambda number=number: torch.tensor(number))[0]) for number in (5, 6)] == [5, 6]
    with kept.second_run():
        assert [tuple(map(int, choose(lambda: torch.tensor(9)))) for _ in range(2)] == [(5, 0), (6, 0)]
    assert tuple(map(int, choose(lambda: torch.tensor(9)))) == (9, 1)
