"""Intervals of plans, and the measurement that narrows them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from megalite.plan.estimate import RunPlan
from megalite.plan.plan_report import answer, requested_plan
from megalite.plan.plan_request import read_request
from megalite.plan.uncertainty import OTHER, RATES, ErrorRange, error_ranges, interval, kind_of_run, narrowing

GPT = "--num-layers 4 --hidden-size 2048 --num-attention-heads 16 --padded-vocab-size 51200 --bf16 --gpu h100"
EXPERTS = "--num-experts 8 --moe-router-topk 2 --ep 8 --etp 1"


def plan(flags: str) -> RunPlan:
    words = f"{GPT} --world-size 8 --seq-length 2048 --global-batch-size 64 {flags}"
    return requested_plan(read_request(words.split()))


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        ("--micro-batch-size 8", "dense, 16 bits"),
        (
            "--micro-batch-size 8 --hidden-size 8192 --num-attention-heads 64 --fp8-format e4m3",
            "dense, 8 or 4 bits",
        ),
        (f"--micro-batch-size 8 {EXPERTS}", "experts, 16 bits"),
        ("--micro-batch-size 1 --seq-length 128", "dense, 16 bits, launch-bound"),
    ],
)
def test_the_kind_of_a_run(flags: str, kind: str) -> None:
    found = plan(flags)
    assert kind_of_run(found.run, found.time) == kind
    time = found.intervals["time"]
    assert time.kind == (kind if kind in error_ranges("time") else OTHER)
    assert time.low < found.time.seconds < time.high
    memory = found.intervals["memory"]
    assert memory.low < found.memory_bytes < memory.high


def test_the_interval_of_a_range_of_errors() -> None:
    """A run whose plan was 60% too long took 0.625 times the plan, and 1.25 times if it was 20% too short."""
    assert ErrorRange(-0.2, 0.6, 5).around(10.0) == pytest.approx((6.25, 12.5))
    dense = error_ranges("time")["dense, 16 bits"]
    assert interval("time", 1.0, "dense, 16 bits")[:2] == dense.around(1.0)
    assert interval("time", 1.0, "no such kind") == (*error_ranges("time")[OTHER].around(1.0), OTHER, 143)


def test_what_narrows_an_interval() -> None:
    found = plan("--micro-batch-size 8")
    name, share = narrowing(found.run, found.time)
    assert name == RATES and 0.8 < share <= 1
    cluster = replace(found.run.cluster, gpu=replace(found.run.cluster.gpu, product_share=1.0))
    assert narrowing(replace(found.run, cluster=cluster), found.time)[0] != RATES
    slow = plan("--micro-batch-size 1 --zero-stage 3 --gpus-per-node 1 --network-gbps 0.1")
    assert "--network-gbps" in narrowing(slow.run, slow.time)[0]


def test_plans_and_searches_print_it() -> None:
    words = f"{GPT} --world-size 8 --seq-length 2048 --global-batch-size 64 --micro-batch-size 1".split()
    for search in ([], ["--search", "--tp", "2", "--top", "1"]):
        text = "\n".join(answer([*words, *search]))
        assert "80% interval   0." in text and "narrower with  the rates of this GPU (--calibrate)" in text
    (line,) = answer([*words, "--json"])
    found = json.loads(line)
    for quantity in ("iteration_time_s", "memory_gb"):
        low, high = found[f"{quantity}_interval"]
        assert low < found[quantity] < high
