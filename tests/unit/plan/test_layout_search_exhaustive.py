"""A search finds what planning each layout alone finds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megalite.plan.estimate import RunPlan
from megalite.plan.layout_search import _layouts, largest_kind, ranked, search
from megalite.plan.plan_request import read_request
from megalite.plan.planned_run import first_problem

MODEL = (
    "--num-layers 6 --hidden-size 512 --num-attention-heads 6 --kv-channels 64 --seq-length 512 --bf16 "
    "--padded-vocab-size 1024 --attention-dropout 0 --gpu a100-40 --world-size 8 --gpus-per-node 4 "
    "--search"
)
EXPERTS = "--num-experts 8 --moe-ffn-hidden-size 64 --swiglu --global-batch-size 16 --pp 2"


@pytest.mark.parametrize(
    "flags",
    [
        "--global-batch-size 12 --pp 2",
        "--hidden-size 12288 --ffn-hidden-size 49152 --global-batch-size 8 --zero-stage 1",
        EXPERTS,
    ],
    ids=["dense", "large", "experts"],
)
def test_a_search_finds_what_planning_each_layout_alone_finds(flags: str) -> None:
    request = read_request(f"{MODEL} {flags}".split())
    found, fitting = search(request), list[RunPlan]()
    too_large, num_rejected = list[str](), 0
    for layouts in _layouts(request, request.cluster):
        for sharding in layouts.shardings:
            config = replace(layouts.config, parallel=sharding.run.config.parallel)
            if first_problem(config, request.cluster) is not None:
                num_rejected += 1
            elif (plan := RunPlan(request.planned_run(config, request.cluster))).fits:
                fitting.append(plan)
            else:
                too_large.append(largest_kind(plan))
    assert len(found.fitting) == len(fitting) > 0
    assert found.rejected.total() == num_rejected > 0
    assert found.too_large == {kind: too_large.count(kind) for kind in too_large}
    in_order = sorted(fitting, key=lambda plan: plan.time.seconds)
    times = [plan.time.seconds for plan in ranked(found.fitting, 10)]
    assert times[1:] == [plan.time.seconds for plan in in_order if plan.time.seconds != times[0]][:9]
