"""The time of GEMMs in 8 bits, of their casts, and of a host that launches kernels too slowly."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megalite.observe.unit_record import GemmCall, PhaseRecord
from megalite.plan.estimate import RunPlan
from megalite.plan.iteration_time import time_iteration
from megalite.plan.kernel_time import gemm_seconds
from megalite.plan.layer_time import WorkSeconds, phase_work, unit_work
from megalite.plan.plan_report import answer
from megalite.plan.plan_request import read_request
from megalite.plan.planned_run import PlannedRun
from megalite.utils.errors import UserError
from megalite.utils.hardware.gpus import find_gpu

LLAMA = (
    "--gpu h100 --world-size 1 --preset llama3-8b --num-layers 6 --seq-length 8192 --micro-batch-size 1 "
    "--global-batch-size 1 --bf16"
)
GPT = (
    "--gpu h100 --world-size 1 --preset gpt-1.3b --hidden-dropout 0 --attention-dropout 0 "
    "--micro-batch-size 8 --global-batch-size 8 --bf16"
)
WIDE = (
    "--gpu h100 --world-size 8 --num-layers 4 --hidden-size 1024 --num-attention-heads 8 --seq-length 1024 "
    "--padded-vocab-size 1024 --bf16 --attention-dropout 0"
)
SMALL = f"{WIDE} --fp8"

NVFP4 = "--gpu b200 --fp4-format e2m1 --fp4-recipe nvfp4"


def run_of(flags: str) -> PlannedRun:
    return read_request(flags.split()).planned_run()


def work_of(flags: str) -> WorkSeconds:
    return time_iteration(run_of(flags)).work


@pytest.mark.parametrize(
    ("flags", "measured"),
    [(LLAMA, 41_639), (f"{LLAMA} --fp8", 42_923), (GPT, 61_494), (f"{GPT} --fp8", 48_793)],
)
def test_plans_are_close_to_runs_of_one_h100(flags: str, measured: float) -> None:
    """Compare tokens/s with the runs in docs/plan.md. The last row was used to choose a constant."""
    assert RunPlan(run_of(flags)).tokens_per_second == pytest.approx(measured, rel=0.03)


def test_the_parts_of_a_step_are_close_to_their_kernels() -> None:
    """Compare the Llama step with its profile: GEMMs in 16 and 8 bits, and casts."""
    run, plain = run_of(f"{LLAMA} --fp8"), run_of(LLAMA)
    (layer,) = run.units.layers.values()
    gemms = [gemm for phase in layer.phases() for gemm in phase.gemms]
    in_8_bits = sum(gemm_seconds(run.cluster.gpu, *gemm[:5]) for gemm in gemms if gemm.element_bytes == 1)
    assert 6 * in_8_bits == pytest.approx(30.4e-3, rel=0.12)
    assert work_of(f"{LLAMA} --fp8").gemms - 6 * in_8_bits == pytest.approx(63.5e-3, rel=0.15)
    casts = time_iteration(run).work.memory_bound - time_iteration(plain).work.memory_bound
    assert casts == pytest.approx(21.9e-3, rel=0.1)
    assert sum(1 + cast.measures for phase in layer.phases() for cast in phase.casts) == 240 / 6


@pytest.mark.parametrize(
    ("gpu", "size", "ratio"),
    [
        ("h100", 1, 2.0),
        ("l40s", 1, 733 / 362.05),
        ("mi355x", 1, 2.0),
        ("b200", 1, 2.0 * 0.55 / 0.70),  # at the limit of its power
        ("gb300", 1, 2.0),
        ("gb300", 0.5, 6.0 * 0.46 / 0.66),
    ],
)
def test_few_bits_have_the_rate_of_the_data_sheet(gpu: str, size: float, ratio: float) -> None:
    wide, narrow = (gemm_seconds(find_gpu(gpu), *[65536] * 3, element_bytes=each) for each in (2, size))
    assert wide / narrow == pytest.approx(ratio, rel=0.04)


def test_any_number_of_rows_of_an_expert_is_summed_at_the_full_rate() -> None:
    """Rows of features lie in memory one after the other: their number need not be a multiple of 8."""
    run = run_of(f"{LLAMA} --fp8")

    def seconds(rows: int, batch: int) -> float:
        gemm = GemmCall(7168, 2048, rows, batch, 2, sums_rows=batch > 1)
        return phase_work(run, PhaseRecord(gemms=(gemm,)), "backward").gemms

    assert seconds(10923, 6) == pytest.approx(seconds(10944, 6))
    assert seconds(10923, 1) > 3 * seconds(10944, 1)


def test_weights_are_rounded_once_per_iteration() -> None:
    """Compare iterations of 8 microbatches with 8 iterations of one, and without copies of weights."""
    one, many, again = (
        work_of(f"{SMALL} --tp 8 --sequence-parallel --micro-batch-size 8 --global-batch-size {flags}")
        for flags in ("8", "64", "64 --no-fp8-weight-cache")
    )
    (layer,) = run_of(f"{SMALL} --tp 8 --sequence-parallel --micro-batch-size 8").units.layers.values()
    of_weights = [cast for phase in layer.phases() for cast in phase.casts if cast.of_weight]
    assert len(of_weights) == 3 * 4  # of each linear layer: measured, rounded for both GEMMs
    assert many.memory_bound < again.memory_bound < 8 * one.memory_bound
    assert many.gemms == pytest.approx(8 * one.gemms)


@pytest.mark.parametrize(
    ("flags", "num_narrow", "num_casts"),
    [
        ("--fp8", 2, 7),
        ("--fp8 --fp8-recipe delayed", 2, 4),
        ("--fp8 --fp8-recipe blockwise", 3, 6),
        ("--fp8 --fp8-recipe mxfp8", 3, 6),
        ("--fp8 --fp8-recipe mxfp8 --no-fp8-wgrad", 2, 4),
        (NVFP4, 3, 6),
        (f"{NVFP4} --no-fp8-wgrad", 2, 4),
    ],
)
def test_a_recipe_rounds_the_operands_of_its_gemms(flags: str, num_narrow: int, num_casts: int) -> None:
    (layer,) = run_of(f"{WIDE} --tp 8 --micro-batch-size 8 {flags}").units.layers.values()
    gemms: list[GemmCall] = [gemm for phase in layer.phases() for gemm in phase.gemms]
    narrow = 0.5 if NVFP4 in flags else 1
    assert sum(gemm.element_bytes == narrow for gemm in gemms) == 4 * num_narrow
    assert len(gemms) == 4 * 3
    assert sum(len(phase.casts) for phase in layer.phases()) == 4 * num_casts
    weight_gradients = [gemm for gemm in gemms if gemm.adds]
    assert all(gemm.element_bytes == (narrow if num_narrow == 3 else 2) for gemm in weight_gradients)


def test_an_operand_in_4_bits_is_read_in_16_and_written_once_also_if_it_is_transformed() -> None:
    """The Hadamard transform is part of the kernel that rounds, and has no bytes or launches of its own."""
    flags = f"{WIDE} --tp 8 --micro-batch-size 8"
    in_4_bits, plain = (
        next(iter(run_of(f"{flags} {more}").units.layers.values())).backward for more in (NVFP4, "")
    )
    sizes = [2 * gemm.m * gemm.k + 2 * gemm.k * gemm.n for gemm in plain.gemms]
    casts = sum(cast.num_bytes for cast in in_4_bits.casts)
    assert casts == pytest.approx(sum(sizes) * 2.5 / 2)
    assert (in_4_bits.kernel_bytes, in_4_bits.num_kernels) == (plain.kernel_bytes, plain.num_kernels)


def test_first_and_last_layers_are_planned_in_16_bits() -> None:
    run = run_of(f"{SMALL} --tp 8 --first-last-layers-bf16 --num-layers-at-end-in-bf16 2")
    plain = run_of(f"{WIDE} --tp 8")
    assert run.units.kinds == (0, 1, 0, 0)
    assert run.units.layers[0] == plain.units.layers[0]
    assert unit_work(run, run.units.layers[1]) != unit_work(run, run.units.layers[0])
    assert run.units.head == plain.units.head


def test_weight_gradients_of_experts_are_planned_in_16_bits() -> None:
    flags = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 512 --fp8-recipe mxfp8"
    (layer,) = run_of(f"{SMALL} {flags}").units.layers.values()
    forward, backward = (
        sorted(gemm.element_bytes for gemm in phase.gemms if gemm.batch == 8)
        for phase in (layer.forward, layer.backward)
    )
    assert (forward, backward) == ([1, 1], [1, 1, 2, 2])


def test_a_plan_warns_of_a_host_that_launches_too_slowly() -> None:
    text = " ".join(answer(f"{GPT} --fp8".split()))
    assert "the GPU waits for the host" in text
    assert "pass a --micro-batch-size above 8" in text
    for flags in (GPT, f"{LLAMA} --fp8"):
        assert "waits for the host" not in " ".join(answer(flags.split()))


def test_what_has_no_gemms_in_8_bits_is_refused() -> None:
    missing = r"--fp8-format hybrid .* --gpu a100 has GEMMs in 16 bits: .* h100-80, .*fp8_tflops=2000"
    with pytest.raises(UserError, match=missing):
        read_request(SMALL.replace("h100", "a100").split())
    with pytest.raises(UserError, match="remove --emulate"):
        read_request(f"{SMALL} --emulate".split())
    assert read_request(f"{SMALL} --gpu a100 --gpu-set fp8_tflops=600".split()).cluster.gpu.fp8_tflops == 600


@pytest.mark.parametrize(
    ("gpu", "problem"),
    [
        ("h200", "h200 has GEMMs in 16, 8 bits: pass --gpu with one of b200, b300, gb200, gb300, or"),
        ("mi355x", r"mi355x has GEMMs in 16, 8, 4 \(MXFP4\) bits: pass --gpu with one of b200, .*, gb300$"),
    ],
)
def test_a_gpu_without_nvfp4_is_refused_by_what_it_has(gpu: str, problem: str) -> None:
    with pytest.raises(UserError, match=f"--fp4-format e2m1 needs .* and --gpu {problem}"):
        read_request(f"{WIDE} {NVFP4} --gpu {gpu}".split())


def test_a_search_keeps_a_micro_batch_size_that_scales_depend_on() -> None:
    search = "--global-batch-size 64 --search --tp 8 --zero-stage 1 --recompute-granularity full --json"
    (note,) = read_request(f"{SMALL} {search}".split()).notices
    assert note.startswith("--micro-batch-size 1 is kept")
    assert not read_request(f"{SMALL} {search} --fp8-recipe mxfp8 --micro-batch-size 2".split()).notices[1:]


def test_a_gpu_without_a_row_has_twice_the_rate_in_8_bits() -> None:
    gpu = replace(run_of(f"{SMALL} --tp 8").cluster.gpu, fp8_tflops=0.0)
    wide, narrow = (gemm_seconds(gpu, *[16384] * 3, element_bytes=size) for size in (2, 1))
    assert wide / narrow == pytest.approx(2.0, rel=0.04)
