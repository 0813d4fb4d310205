"""Failures in a plan: simulated runs against formulas and published runs, checkpoints, and the output."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks.planner_goodput import PUBLISHED
from megalite.plan.estimate import RunPlan
from megalite.plan.failing_run import (
    FREE_SPARE,
    FailingRun,
    compare_intervals,
    daly_interval,
    enough_spares,
    simulate_runs,
    young_interval,
)
from megalite.plan.goodput import GoodputPlan
from megalite.plan.plan_report import answer, goodput_of
from megalite.plan.plan_request import read_request
from megalite.plan.write_job import write_job
from megalite.utils.errors import UserError
from tests.programs import run_program

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0
LLAMA = "--preset llama3-70b --gpu h100 --world-size 16384 --tp 8 --pp 4 --global-batch-size 2048 --bf16"
RUN = f"{LLAMA} --zero-stage 1 --node-mtbf 264d"
PEERS = "--peer-copies 1 --non-persistent-save-interval 10 --non-persistent-local-ckpt-dir /dev/shm/run"
LENGTH = "--train-tokens 30e12 --price-per-gpu-hour 2"


def failing(gap: float, blocked: float, **others: float) -> FailingRun:
    given = {"written": 0.0, "restart": 10 * MINUTE, "repair": DAY, "spares": 100} | others
    return FailingRun(gap, blocked, **given)  # type: ignore[arg-type]


def goodput(text: str) -> GoodputPlan:
    request = read_request(text.split())
    found = goodput_of(request, RunPlan(request.planned_run()))
    assert found is not None
    return found


@pytest.mark.parametrize(("gap", "minutes"), [(24 * HOUR, 117), (6 * HOUR, 57), (15 * MINUTE, 9.1)])
def test_daly_s_formula_and_the_simulation_give_the_optima_of_his_figures(gap: float, minutes: float) -> None:
    """Check figures 3 to 5 of Daly 2006: dumps of 5 minutes, restarts of 10."""
    assert daly_interval(gap, 5 * MINUTE) / MINUTE == pytest.approx(minutes, rel=0.01)
    best = compare_intervals(failing(gap, 5 * MINUTE), iteration=1.0).best
    assert best / MINUTE == pytest.approx(minutes, rel=0.03)


@pytest.mark.parametrize("gap", [30 * MINUTE, 3 * HOUR, 7 * DAY])
@pytest.mark.parametrize("blocked", [3.0, 60.0])
def test_the_simulated_optimum_is_daly_s(gap: float, blocked: float) -> None:
    found = compare_intervals(failing(gap, blocked), iteration=0.5)
    assert found.best * 0.5 == pytest.approx(daly_interval(gap, blocked), rel=0.04)
    assert daly_interval(gap, blocked) == pytest.approx(young_interval(gap, blocked), rel=0.2)
    low, high = found.near_best
    assert low < found.best < high


def test_a_save_that_takes_longer_than_two_failures() -> None:
    assert daly_interval(100.0, 250.0) == 100.0


@pytest.mark.parametrize("interval", [60.0, 400.0, 3000.0])
def test_whole_runs_take_as_long_as_daly_s_formula_says(interval: float) -> None:
    """Check Daly's equation for the length of a run, in which failures hit saves and restarts too."""
    run, work = failing(3 * HOUR, 20.0), 60 * DAY
    gap = run.failure_gap
    factor = math.exp(run.restart / gap) * (math.exp((interval + run.blocked) / gap) - 1)
    times = simulate_runs(run, work, interval, num_runs=300)
    assert times.total.mean() == pytest.approx(gap * factor * work / interval, rel=0.01)
    assert np.allclose(times.work, work)
    assert times.failures.mean() == pytest.approx(times.total.mean() / gap, rel=0.02)


def test_without_failures_only_saves_cost_time() -> None:
    times = simulate_runs(failing(1e15, 5.0, written=7.0), 1000.0, 100.0, num_runs=3)
    assert times.total.tolist() == [1000.0 + 10 * 5.0 + 7.0] * 3
    assert times.failures.sum() == 0


def test_an_async_save_counts_once_it_is_written() -> None:
    """Check the saves that a failure leaves: one stops training at 100 to 102, and is complete at 142."""
    run = failing(1.0, 2.0, written=40.0)
    assert run.saved(np.array([10.0, 141.9, 142.1, 244.1]), 100.0).tolist() == [0, 0, 1, 2]


def test_the_seed_makes_runs_the_same() -> None:
    run = failing(3 * HOUR, 20.0)
    first, again, other = (simulate_runs(run, 9 * DAY, 600.0, 20, seed).total for seed in (1, 1, 2))
    assert (first == again).all()
    assert not (first == other).any()


def test_a_long_run_is_like_its_parts() -> None:
    """Simulate a part of a run with 20,000 failures: means grow with the length, the spread with its root."""
    run = failing(HOUR, 5.0)
    short, long = (simulate_runs(run, days * DAY, 200.0).total for days in (60, 600))
    assert long.mean() == pytest.approx(10 * short.mean(), rel=0.01)
    assert long.std() == pytest.approx(math.sqrt(10) * short.std(), rel=0.2)


@pytest.mark.parametrize("load", [0.3, 4.0, 60.0])
def test_enough_spare_nodes_leave_few_waits(load: float) -> None:
    gap = DAY / load
    count = enough_spares(gap, DAY)
    waits = [
        simulate_runs(failing(gap, 1.0, spares=spares, restart=1.0), 50 * gap, gap / 20, 200)
        for spares in (0, count - 1, count)
    ]
    shares = [float(times.waits.sum() / times.failures.sum()) / DAY for times in waits]
    assert shares[0] == pytest.approx(1.0, rel=0.1)  # without spare nodes, each failure waits for a repair
    assert shares[2] <= shares[1] < 0.1 and shares[2] < 2 * (1 - FREE_SPARE)


def test_spare_nodes_for_many_repairs() -> None:
    """Check both ways to compute the quantile of a Poisson distribution, and a load that exp cannot take."""
    assert [enough_spares(1.0, load) for load in (499.0, 501.0)] == [553, 555]
    assert enough_spares(1.0, 1e6) == pytest.approx(1e6 + 2.33e3, rel=1e-4)


def test_published_runs() -> None:
    """Compare with Llama 3's share, and with the number of restarts of OPT-175B."""
    runs = {run.name: run for run in PUBLISHED}
    llama = runs["Llama 3 405B"].planned()
    assert llama.share("work") >= runs["Llama 3 405B"].goodput[0]
    assert llama.failures.mean() == pytest.approx(419, rel=0.05)
    opt = runs["OPT-175B"]
    assert opt.planned(restart_minutes=240).share("work") < 0.75 < 0.95 < opt.planned().share("work")
    assert 60 < opt.planned().failures.mean() < 100  # about 90 restarts, some for other reasons
    bloom = runs["BLOOM 176B"]
    assert bloom.goodput[0] < bloom.planned().share("work")  # its hangs and maintenance are no node failures


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--node-mtbf 26000",
            "--node-mtbf: '26000' does not end in a unit: pass hours, days or years, such as 26000h, 1",
        ),
        ("--node-mtbf d", "--node-mtbf: '' is not a number above 0"),
        ("--node-mtbf -3d", "argument --node-mtbf"),
        ("--node-mtbf 3d --node-repair 1w", "--node-repair: '1w' does not end in a unit"),
        ("--node-mtbf 3d --spare-nodes -1", "--spare-nodes"),
        (
            "--node-mtbf 1h",
            "--node-mtbf 1h: one of 2048 nodes fails every 1.8 seconds, and a restart takes 11 m",
        ),
        ("--node-mtbf 264d --save-interval 900000", "progress; pass --save-interval "),
        (
            f"--node-mtbf 264d {PEERS.replace('interval 10', 'interval 900000')}",
            "progress; pass --non-persistent-save-interval ",
        ),
        (
            f"--node-mtbf 264d {PEERS} --peer-copies 2048",
            "--peer-copies 2048 needs 2049 nodes, and the run has 2048: pass fewer copies",
        ),
    ],
)
def test_mistakes_are_one_line(words: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        list(answer(f"{LLAMA} --zero-stage 1 {words}".split()))
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "flag", ["--storage-gbps 3", "--restart-minutes 3", "--node-repair 2d", "--spare-nodes 0"]
)
def test_options_without_effect_are_named(flag: str) -> None:
    note = f"note: {flag.split()[0]} has no effect without --node-mtbf"
    assert note in list(answer(f"{LLAMA} {flag}".split()))


def test_flags_of_checkpoints_need_no_folder_in_a_plan() -> None:
    text = list(answer(f"{RUN} --save-interval 100 --async-save".split()))
    assert not any(line.startswith("note: ") for line in text)
    assert any("100 iterations, " in line and line.endswith(", as requested") for line in text)


def test_every_option_changes_the_plan() -> None:
    def share(flags: str = "", kind: str = "work") -> float:
        return goodput(f"{RUN} {flags}").times.share(kind)

    assert share() < share("--node-mtbf 3y")
    assert share("--restart-minutes 60", "restarts") > 3 * share(kind="restarts")
    assert share("--storage-gbps 100", "saves") > 2 * share(kind="saves")
    assert share("--async-save", "saves") < 0.5 * share(kind="saves")
    assert share("--spare-nodes 1", "waits") > 0.3 > 0.01 > share(kind="waits")
    assert share("--spare-nodes 1 --node-repair 1h", "waits") < 0.2
    assert share("--save-interval 5000", "lost") > 5 * share(kind="lost")
    assert goodput(f"{RUN} --save-interval-minutes 30").save_interval == pytest.approx(
        30 * MINUTE / goodput(RUN).plan.time.seconds
    )


def test_a_run_restarts_from_peer_copies() -> None:
    """Each of 16384 ranks writes a part and a copy at 0.8 GB/s, and loads over a network of 50 GB/s."""
    from_storage, found = goodput(f"{RUN} --storage-gbps 50"), goodput(f"{RUN} {PEERS} --storage-gbps 50")
    parameters = found.plan.parameters
    part = 14 * parameters / 16384 / 1e9
    assert found.peer_save_seconds == pytest.approx(2 * part / 0.8)
    loaded = part / 0.8 + (512 * 2 + 12) * parameters / 16384 / 50e9
    assert found.failing.restart == pytest.approx(600 + loaded)
    assert found.failing.blocked == found.peer_save_seconds
    assert found.save_interval == 10
    assert found.times.share("work") > from_storage.times.share("work")
    assert found.times.share("lost") < 0.2 * from_storage.times.share("lost")
    both = goodput(f"{RUN} {PEERS} --storage-gbps 50 --save-interval 100")
    more = found.save_seconds / 100 / (found.failing.blocked / 10)
    ratio = [each.times.share("saves") / each.times.share("work") for each in (both, found)]
    assert ratio[0] / ratio[1] == pytest.approx(1 + more, rel=0.02)
    in_background = goodput(f"{RUN} {PEERS} --async-save").failing
    assert in_background.blocked < 0.01 * in_background.written


def test_peer_copies_are_in_the_output() -> None:
    text = list(answer(f"{RUN} {PEERS} --async-save --storage-gbps 2000".split()))
    (row,) = [row for row in text if row.startswith("peer copies")]
    assert (
        row == "peer copies    1 of each part, 1.93 GB a node: made in 0.151 seconds, loaded in 0.165 seconds"
    )
    assert any(row.startswith("best interval  --non-persistent-save-interval ") for row in text)
    (line,) = answer(f"{RUN} {PEERS} --json".split())
    assert json.loads(line)["goodput"]["peer_save_s"] == goodput(f"{RUN} {PEERS}").peer_save_seconds


@pytest.mark.parametrize("repairs", [0.1, 1.0, 5.0])
def test_missing_nodes_cost_what_a_simulated_repair_shop_says(repairs: float) -> None:
    """Each failure takes a node away for the time of a repair; one of 20 nodes is a spare."""
    gap, rates = 10 * HOUR, [1 - number / 19 for number in range(20)]
    run = failing(gap, 1.0, spares=1, restart=1.0, repair=repairs * gap, rates=rates)
    failed_at = np.cumsum(np.random.default_rng(0).exponential(gap, 100_000))
    looked_at = np.arange(100, 90_000) * gap
    in_repair = np.searchsorted(failed_at, looked_at) - np.searchsorted(failed_at, looked_at - run.repair)
    lost = 1 - np.array(rates)[np.maximum(in_repair - 1, 0)].mean()
    assert run.missing == pytest.approx((lost, (in_repair > 0).mean()), rel=0.05, abs=1e-4)
    times = simulate_runs(run, 4000 * HOUR, HOUR, num_runs=20)
    assert times.waits.sum() / (times.work + times.waits).sum() == pytest.approx(run.missing[0])
    assert np.allclose(times.work, 4000 * HOUR)


@pytest.mark.parametrize(
    ("layout", "batch", "smaller"),
    [
        ("--world-size 64 --tp 8 --pp 2", 48, 3),  # 4 replicas of 2 nodes
        ("--world-size 64 --tp 8 --pp 2", 32, 2),
        ("--world-size 32 --tp 2 --pp 1", 96, 12),  # 16 replicas, 4 on a node
        ("--world-size 8 --tp 8 --pp 1", 8, 0),
    ],
)
def test_dp_after_the_loss_of_a_node_divides_the_batch(layout: str, batch: int, smaller: int) -> None:
    flags = f"--preset llama3-8b --gpu h100 {layout} --micro-batch-size 1 --global-batch-size {batch} --bf16"
    assert goodput(f"{flags} --node-mtbf 3y").dp_without(1) == smaller


def test_recoveries_are_compared() -> None:
    in_process = f"{PEERS} --inprocess-restart --save runs/a"
    found = goodput(f"{RUN} {in_process}")
    assert found.failing.restart == pytest.approx(20 + found.peer_load_seconds)
    assert goodput(f"{RUN} {in_process} --restart-minutes 2").failing.restart == pytest.approx(
        120 + found.peer_load_seconds
    )
    plans = found.recoveries
    assert [each.times.share("work") for each in plans] == sorted(
        (each.times.share("work") for each in plans), reverse=True
    )
    assert [(each.num_copies, each.recovery.in_process, each.failing.spares > 0) for each in plans] == [
        *((1, True, True), (1, False, True), (0, False, True), (1, True, False))
    ]
    alone = goodput(RUN)
    (same,) = [each for each in plans if not each.num_copies]
    assert same.times.share("work") == alone.times.share("work")
    assert (same.save_interval, found.save_interval) == (alone.intervals.best, 10)


@pytest.mark.parametrize(("repair", "pays"), [("1h", False), ("1000d", True)])
def test_spare_nodes_pay_if_repairs_take_long(repair: str, pays: bool) -> None:
    """In 100 days on 16 nodes, of which one fails every 16 days."""
    flags = "--preset llama3-8b --gpu h100 --world-size 128 --global-batch-size 128 --bf16 --tp 8 --pp 1"
    found = goodput(f"{flags} --zero-stage 1 --node-mtbf 264d --node-repair {repair}")
    assert (3 < found.cheapest_spares < 16) if pays else (found.cheapest_spares == 0)


def test_async_saves_are_not_due_while_one_is_written() -> None:
    found = goodput(f"{RUN} --async-save --storage-gbps 20")
    assert found.intervals.best * found.plan.time.seconds >= 2 * found.save_seconds
    assert found.failing.blocked < 0.01 * found.save_seconds


def test_loads_read_what_each_rank_holds() -> None:
    """Check 70.6 billion parameters on 512 replicas: 2 bytes of weights and 12 of state for each."""
    words = f"{LLAMA} --node-mtbf 264d --storage-gbps 1000"
    size = goodput(f"{words} --zero-stage 1").plan.parameters / 1e12
    for stage, bytes_of_all in ((0, 512 * 14), (1, 512 * 2 + 12), (3, 14)):
        assert goodput(f"{words} --zero-stage {stage}").load_seconds == pytest.approx(size * bytes_of_all)


@pytest.mark.parametrize("options", ["--params-dtype bf16", "--params-dtype fp32 --ema-decay 0.9"])
def test_a_checkpoint_is_as_large_as_planned(options: str, tmp_path: Path) -> None:
    flags = f"--preset gpt-tiny --seq-length 32 --global-batch-size 2 {options}"
    words = f"{flags} --vocab-size 256 --mock-data --train-iters 1 --eval-iters 0 --save {tmp_path}"
    assert run_program("pretrain_gpt.py", *words.split()).returncode == 0
    tensors = sum(path.stat().st_size for path in tmp_path.glob("iter_*/*.safetensors"))
    planned = goodput(f"{flags} --padded-vocab-size 256 --gpu h100 --world-size 1 --node-mtbf 3y")
    assert planned.checkpoint_bytes == pytest.approx(tensors, rel=0.02)  # headers of the files


def test_the_output_fits_a_terminal_and_the_object_agrees() -> None:
    text = list(answer(f"{RUN} {LENGTH}".split()))
    start = next(number for number, line in enumerate(text) if line.startswith("failures "))
    rows = text[start : text.index("", start)]
    assert [row[:15].strip() for row in rows if row[0] != " "] == [
        *("failures", "checkpoint", "save interval", "goodput", "spare nodes", "recovery"),
        *("with failures", "total price"),
    ]
    assert max(map(len, rows)) <= 100
    (line,) = answer(f"{RUN} {LENGTH} --json".split())
    found = json.loads(line)
    of_run = found["goodput"]
    assert f"--save-interval {of_run['best_save_interval']}, " in "\n".join(rows)
    assert sum(of_run["share_by_kind"].values()) == pytest.approx(1.0)
    days, price = of_run["days"], of_run["price"]
    assert found["days"] < days["percentile_5"] < days["mean"] < days["percentile_95"]
    assert days["mean"] == pytest.approx(found["days"] / of_run["goodput"], rel=1e-3)
    gpus = 16384 + 8 * of_run["spare_nodes"]
    assert price["mean"] == pytest.approx(2 * 24 * gpus * days["mean"])


def test_a_search_plans_the_failures_of_the_fastest_layout() -> None:
    words = (
        "--preset llama3-8b --gpu h100 --world-size 64 --global-batch-size 512 --bf16 --tp 2 --pp 1 "
        "--micro-batch-size 1 --recompute-granularity full --no-sequence-parallel --zero-stage 1 "
        "--search --top 2"
    )
    text = "\n".join(answer(f"{words} --node-mtbf 264d".split()))
    assert "\ngoodput  " in text and "\nwith failures" not in text  # the run has no length
    (line,) = answer(f"{words} --node-mtbf 264d --json".split())
    shares = [each["goodput"]["goodput"] for each in json.loads(line)["layouts"]]
    assert len(shares) == 2 and all(0.9 < share < 1 for share in shares)


def test_a_job_names_the_interval_to_type(tmp_path: Path) -> None:
    words = (
        "--nodes 4 --gpu h100 --time 1-00:00:00 --preset llama3-8b --global-batch-size 512 --bf16 --tp 8 "
        f"--zero-stage 1 --train-iters 1000 --mock-data --node-mtbf 264d --output {tmp_path / 'job'}"
    )
    said = write_job(words.split(), "")
    (row,) = [line for line in said if line.startswith("save interval")]
    best = row.split()[3].rstrip(",")
    (warning,) = [line for line in said if "--save-interval is not set" in line]
    assert warning.endswith(f"; pass --save-interval {best}")
    assert not any(line.startswith("torchrun ") for line in said)  # the script is the command
