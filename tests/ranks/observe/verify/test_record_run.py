"""Layouts can be compared after near ties of experts, and another router is still found."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megalite.checkpoint.load import LoadPlan
from megalite.config import Config, DataConfig, OptimizerConfig, RecomputeConfig, TrainingConfig
from megalite.distributed.topology import Topology
from megalite.model.experts import Router
from megalite.model.routing_record import RoutingRecord
from megalite.observe.verify.compare_runs import TOLERANCES, RunComparison, compare
from megalite.observe.verify.layouts import Layout, layouts_named
from megalite.observe.verify.record_run import RunRecord, merge_stages, record_rank
from megalite.observe.verify.verification import verify_layouts
from megalite.train.train_step import IterationPlan, TrainStep
from megalite.train.trainer import Trainer
from megalite.utils.errors import UserError
from tests.live_ranks import record_run, run_ranks
from tests.ranks.model.test_expert_dispatch import CONFIG

RANKING = Router._ranking
LOAD = Trainer.load
FULL = RecomputeConfig(recompute_granularity="full")


def _near_ties(self: Router, *inputs: Any) -> Tensor:
    """Rank experts by rounded scores, with a rounding error that depends on the layout."""
    coarse = (RANKING(self, *inputs) * 2).round() / 2
    error = 1e-13 if self.context.topology.world_size > 1 else 0.0
    return coarse + error * torch.arange(self.num_experts)


def _other_order(self: Router, *inputs: Any) -> Tensor:
    """Prefer the worst experts in layouts of several ranks."""
    ranking = RANKING(self, *inputs)
    return -ranking if self.context.topology.world_size > 1 else ranking


RANKINGS: dict[str, Callable[..., Tensor]] = {"near ties": _near_ties, "other order": _other_order}


def _config(recompute: RecomputeConfig | None = None, skipped: tuple[str, ...] = ()) -> Config:
    return Config(
        model=CONFIG,
        optimizer=OptimizerConfig(lr=1e-3),
        data=DataConfig(mock_data=True, reset_attention_mask=True),
        training=TrainingConfig(
            global_batch_size=4, micro_batch_size=2, train_iters=2, eval_iters=0, iterations_to_skip=skipped
        ),
        recompute=recompute or RecomputeConfig(),
    )


def _rank(topology: Topology, config: Config, routing: RoutingRecord | None, ranking: str) -> RunRecord:
    with mock.patch.object(Router, "_ranking", RANKINGS[ranking]):
        return record_rank(topology, config, 2, None, routing)


def _record(config: Config, layout: Layout, routing: RoutingRecord | None, ranking: str) -> RunRecord:
    applied = layout.apply(config, 4)
    return merge_stages(run_ranks(_rank, applied.mesh, layout.world_size, applied, routing, ranking))


def _compared(names: str, config: Config, ranking: str, *, replays: bool) -> list[RunComparison]:
    reference = _record(config, Layout(), RoutingRecord() if replays else None, ranking)
    layouts = layouts_named(names, config)
    return [compare(_record(config, each, reference.routing, ranking), reference) for each in layouts]


@pytest.mark.parametrize(
    ("names", "recompute"),
    [("tp2+sp,tp2,dp2ep2", None), ("pp2,cp2,cp2+p2p+dynamic", FULL)],
    ids=["kept", "recomputed"],
)
def test_near_ties_are_replayed_and_counted(names: str, recompute: RecomputeConfig | None) -> None:
    found = _compared(names, _config(recompute), "near ties", replays=True)
    assert not any(each.excesses(TOLERANCES["fp64"]) for each in found)
    assert len({each.num_rerouted for each in found}) == 1 and found[0].num_rerouted > 5
    assert all(0.0 < each.rerouted_gap < 1e-12 for each in found)


def test_near_ties_make_other_runs_without_a_replay() -> None:
    (found,) = _compared("dp2", _config(), "near ties", replays=False)
    assert found.excesses(TOLERANCES["fp64"]) and not found.num_rerouted


def test_another_router_is_no_near_tie() -> None:
    (found,) = _compared("dp2", _config(), "other order", replays=True)
    (excess,) = found.excesses(TOLERANCES["fp64"])
    assert excess.startswith(f"a score at which {found.num_rerouted} tokens change experts differs by")
    assert found.num_rerouted > 2 * 4 * 16  # most tokens of 2 iterations of 4 samples in 2 layers


def _rank_with_nan(topology: Topology, config: Config) -> RunRecord:
    """Record a run whose first loss is NaN."""
    compute = TrainStep.compute_gradients

    def compute_nan(self: TrainStep, plan: IterationPlan) -> tuple[Tensor, Tensor]:
        losses, norm = compute(self, plan)
        return losses * (math.nan if plan.iteration == 1 else 1.0), norm

    with mock.patch.object(TrainStep, "compute_gradients", compute_nan):
        return record_rank(topology, config, 2)


def test_the_first_gradients_are_of_an_iteration_that_updates_the_weights() -> None:
    whole = _config()
    first, second = (record_run(config, 2, 1).gradients for config in (whole, _config(skipped=("1",))))
    (with_nan,) = run_ranks(_rank_with_nan, whole.mesh, 1, whole)
    assert math.isnan(with_nan.losses[0]) and with_nan.gradients.keys() == second.keys()
    assert all(torch.equal(with_nan.gradients[name], each) for name, each in second.items())
    assert not all(torch.equal(first[name], each) for name, each in second.items())


def test_a_run_that_excludes_an_iteration_can_be_compared() -> None:
    excluding = _config(skipped=("2",))
    (layout,) = layouts_named("dp2", excluding)
    reference, run = record_run(excluding, 2, 1), record_run(layout.apply(excluding, 4), 2, 2)
    assert run.terms[1] == {} and compare(run, reference).excesses(TOLERANCES["fp64"]) == []


def test_a_run_without_any_update_is_refused() -> None:
    with pytest.raises(UserError, match="--iterations-to-skip 1:2 3 skips the first 3 iterations: pass more"):
        record_run(_config(skipped=("1:2", "3")), 3, 1)


def _late(topology: Topology, config: Config, number: int, providers: Any, routing: Any, quick: bool) -> Any:
    """Record a run that reads its last sample again after a resume."""

    def load(self: Trainer) -> LoadPlan | None:
        loaded = LOAD(self)
        self.progress = replace(self.progress, consumed_samples=self.progress.consumed_samples - 1)
        return loaded

    with mock.patch.object(Trainer, "load", load):
        return record_rank(topology, config, number, providers, routing, quick)


@pytest.mark.parametrize("is_quick", [False, True])
def test_a_verification_resumes_in_the_next_layout(caplog: pytest.LogCaptureFixture, is_quick: bool) -> None:
    caplog.set_level(logging.INFO, logger="megalite")
    config = _config()
    layouts = layouts_named("dp2,tp2", config)
    with mock.patch("megalite.observe.verify.record_run.record_rank", _late):
        assert verify_layouts(config, layouts, 2, is_quick=is_quick) == is_quick
    rows = [row for row in caplog.messages if row.startswith(("dp2 ", "tp2 ", "one rank "))]
    if is_quick:
        assert [row.endswith("the same run") for row in rows] == [True, True]
    else:
        names = [row.partition("resumed from ")[2].partition(":")[0] for row in rows]
        assert names == ["one rank", "dp2", "tp2"] and "traced" not in caplog.text


def test_a_verification_replays(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="megalite")
    config = _config()
    assert verify_layouts(config, layouts_named("dp2", config), 1, replays_routing=True)
    (row,) = (message for message in caplog.messages if message.startswith("dp2"))
    assert row.endswith("the same run")  # no token went elsewhere
