"""The planner's offloaded optimizer state: where it is, what an update moves, and when a search offloads."""

from __future__ import annotations

import json

import pytest

from megalite.plan.optimizer_update import OffloadSeconds
from megalite.plan.plan_report import answer
from megalite.plan.plan_request import read_request
from megalite.plan.write_job import chosen_plan
from megalite.utils.errors import UserError

MODEL = "--preset llama2-7b --bf16 --gpu a100-80 --global-batch-size 8 --attention-dropout 0"


def plan(flags: str) -> dict:
    (line,) = answer(["--json", *f"{MODEL} {flags}".split()])
    return json.loads(line)


def test_the_state_leaves_the_gpu_and_is_counted_on_the_host() -> None:
    before, after = plan("--world-size 1"), plan("--world-size 1 --optimizer-cpu-offload")
    count, state = before["parameters"], after["offload"]
    assert not before["fits"] and after["fits"]
    assert "offload" not in before
    assert state["state_gb"] == pytest.approx(12e-9 * count)
    assert (state["gradients_gb"], state["up_gb"]) == pytest.approx((4e-9 * count, 2e-9 * count))
    assert state["host_gb"] == pytest.approx(16e-9 * count, rel=0.01)  # with the gradients
    assert (state["file_gb"], state["disk_gb"], state["down_gb"]) == (0, 0, 0)
    assert before["memory_gb"] - after["memory_gb"] == pytest.approx(1.06 * state["state_gb"])
    seconds = state["seconds"]
    assert seconds["gradients"] == pytest.approx(state["gradients_gb"] / (0.8 * 32))
    assert seconds["update"] == pytest.approx(30e-9 * count / 200)


def test_averages_are_offloaded_with_the_state() -> None:
    before = plan("--world-size 1 --optimizer-cpu-offload")
    after = plan("--world-size 1 --optimizer-cpu-offload --ema-decay 0.999")
    count = before["parameters"]
    assert after["memory_gb"] == pytest.approx(before["memory_gb"])
    assert after["offload"]["host_gb"] - before["offload"]["host_gb"] == pytest.approx(4e-9 * count)
    assert after["offload"]["seconds"]["update"] == pytest.approx((30 + 8) * 1e-9 * count / 200)


def test_what_no_computation_hides_is_waited_for() -> None:
    in_memory = OffloadSeconds(gradients=5, down=0, up=1, update=3, disk=0)
    assert in_memory.exposed(backward_seconds=4, forward_seconds=2) == 1 + 1
    assert in_memory.exposed(backward_seconds=6, forward_seconds=4) == 0
    assert OffloadSeconds(0, 1, 1, 3, 9).exposed(backward_seconds=4, forward_seconds=2) == 7

    def waits(flags: str) -> float:
        return plan(f"--optimizer-cpu-offload {flags}")["seconds_by_kind"].get("offload", 0.0)

    whole = plan("--world-size 2 --zero-stage 1 --optimizer-cpu-offload")["offload"]["seconds"]["update"]
    assert waits("--world-size 2 --zero-stage 1 --no-overlap-param-gather") == pytest.approx(whole)
    assert 0.0 < waits("--world-size 2 --zero-stage 1") < 0.8 * whole


def test_ranks_of_a_node_share_its_disk_and_zero_shares_the_state() -> None:
    one = plan("--world-size 1 --optimizer-nvme-offload /d")["offload"]
    eight = plan("--world-size 8 --zero-stage 1 --optimizer-nvme-offload /d")["offload"]
    half = plan("--world-size 1 --optimizer-nvme-offload /d --optimizer-offload-fraction 0.5")["offload"]
    assert one["host_gb"] < 0.3
    assert one["disk_gb"] == pytest.approx(2 * one["file_gb"])
    assert eight["file_gb"] == pytest.approx(one["file_gb"] / 8)
    assert eight["seconds"]["disk"] == pytest.approx(one["seconds"]["disk"])
    assert half["file_gb"] == pytest.approx(one["file_gb"] / 2)


def test_zero_3_and_fp32_keep_main_weights_on_the_gpu() -> None:
    count = plan("--world-size 2")["parameters"]
    sharded = plan("--world-size 2 --zero-stage 3 --optimizer-cpu-offload")["offload"]
    assert sharded["state_gb"] == pytest.approx(8e-9 * count / 2)
    assert (sharded["gradients_gb"], sharded["down_gb"]) == pytest.approx((4e-9 * count / 2,) * 2)
    assert sharded["up_gb"] == pytest.approx(4e-9 * count / 2)


def test_a_search_offloads_only_where_nothing_else_fits() -> None:
    model = f"{MODEL} --micro-batch-size 1"

    def commands(flags: str) -> list[str]:
        (line,) = answer(["--json", *f"{model} {flags} --search --top 3".split()])
        return [each["command"] for each in json.loads(line)["layouts"]]

    assert all("--optimizer-cpu-offload" in command for command in commands("--world-size 1"))
    text = "\n".join(answer(f"{model} --world-size 1 --search --top 1".split()))
    assert "note: no layout fits with the optimizer state on the GPU" in text
    assert not any("offload" in command for command in commands("--world-size 8"))
    job = chosen_plan(read_request(f"{model} --world-size 1 --search".split()))
    assert job.run.config.optimizer.optimizer_cpu_offload  # as for --layout auto
    with pytest.raises(UserError, match="no layout fits"):  # a node has no room for this state
        list(answer(f"--preset gpt3-175b --bf16 --gpu a100-80 --world-size 8 {SEARCH}".split()))


SEARCH = "--global-batch-size 8 --micro-batch-size 1 --attention-dropout 0 --search"


def test_the_text_says_where_it_is_and_what_moves() -> None:
    text = "\n".join(answer(f"{MODEL} --world-size 1 --optimizer-nvme-offload /d".split()))
    for words in (
        "0.28 GB of host memory and 80.86 GB on the disk",
        "26.95 GB down in 1.05 s",
        "they overlap",
    ):
        assert words in text, text
    assert "offloading 79%" in text
