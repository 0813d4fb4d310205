"""The checks by stage, in the order in which they run, with time limits; which stages fit into a time."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.gpu_check.runner import Check, Stage

BUILD = Check("build", "installation.build", 400.0)
"""After the first time it takes seconds."""
BUILD_SECONDS = 180.0
"""Seconds that a plan of stages allows for everything that is built and compiled before checks."""

STAGES = (
    Stage(
        1,
        "installation and ceilings",
        (
            Check("versions", "installation.versions", 30.0),
            Check("kernels", "installation.kernels", 30.0),
            Check("copy", "ceilings.copy", 20.0),
            Check("large GEMM", "ceilings.large_gemm", 45.0),
            Check("layer GEMMs", "ceilings.layer_gemms", 45.0),
            Check("GELU in GEMMs", "ceilings.gelu_in_gemms", 30.0),
            Check("attention", "ceilings.attention", 60.0),
            Check("no synchronization", "ceilings.no_synchronization", 40.0),
            Check("operator tests", "installation.operator_tests", 120.0),
        ),
        (BUILD, Check("compile attention", "ceilings.compile_attention", 90.0)),
    ),
    Stage(
        3,
        "speed",
        (
            Check("train_step gpt-1.3b", "speed.step_1", 90.0),
            Check("profile", "speed.profile", 60.0),
            Check("train_step gpt-1.3b, 8 microbatches", "speed.step_8", 75.0),
            Check("peer plain", "speed.peer_plain", 45.0),
            Check("peer compiled", "speed.peer_compiled", 60.0),
            Check("peer transformers", "speed.peer_transformers", 45.0),
            Check("peer megatron", "speed.peer_megatron", 45.0),
        ),
        (BUILD, Check("compile peers", "speed.compile_peers", 100.0)),
    ),
    Stage(
        6,
        "tests that compile much",
        (
            Check("Triton tests", "installation.triton_tests", 200.0),
            Check("compiled layers", "installation.compiled_layer_tests", 100.0),
            Check("attention backends", "installation.backend_tests", 120.0),
        ),
        (BUILD,),
    ),
    Stage(
        2,
        "the same numbers on CPU and GPU in fp64",
        (
            Check("operators", "same_numbers.operators", 40.0),
            Check("masks", "same_numbers.masks", 30.0),
            Check("attention in fp64", "same_numbers.attention", 30.0),
            Check("train steps", "same_numbers.train_steps", 240.0),
            Check("bf16 attention", "same_numbers.auto_attention", 40.0),
            Check("bf16 GELU", "same_numbers.gelu_in_gemms", 40.0),
        ),
        (BUILD,),
    ),
    Stage(
        4,
        "faults",
        (
            Check("asynchronous saves", "saves.asynchronous", 110.0),
            Check("resume", "faults.resume_sync", 135.0),
            Check("resume, async save", "faults.resume_async", 135.0),
            Check("out of memory", "faults.out_of_memory", 40.0),
        ),
        (BUILD,),
    ),
    Stage(
        5,
        "several ranks",
        (
            Check("all-reduce", "several_ranks.all_reduce", 60.0),
            Check("runs of several ranks", "several_ranks.runs", 110.0),
            Check("resume in other layouts", "several_ranks.resumes", 70.0),
            Check("a killed rank", "several_ranks.killed_rank", 60.0),
            Check("verify_layout", "several_ranks.verification", 50.0),
            Check("asynchronous saves of 2 ranks", "saves.of_two_ranks", 70.0),
        ),
        (BUILD,),
    ),
    Stage(
        8,
        "speed of larger models",
        (
            Check("train_step gpt-7b", "speed.step_7b", 60.0),
            Check("train_step bloom-20b-slice", "speed.step_bloom", 60.0),
        ),
        (BUILD,),
    ),
    Stage(
        10,
        "recurrences in Triton",
        (Check("recurrences", "installation.recurrence_tests", 300.0),),
        (BUILD,),
    ),
    Stage(
        7,
        "operators without nvcc",
        (Check("operator tests without nvcc", "installation.run_time_tests", 420.0),),
        (BUILD,),
    ),
    Stage(
        9,
        "memory errors and races in kernels",
        (
            Check("memcheck", "faults.memcheck", 220.0),
            Check("racecheck", "faults.racecheck", 180.0),
        ),
        (BUILD,),
    ),
    Stage(
        11,
        "the layout table",
        (
            Check("Triton's attention on several ranks", "layout_rows.attention_on_ranks", 120.0),
            Check("layout table", "layout_rows.rows", 300.0),
        ),
        (BUILD,),
    ),
)
"""The first three answer the most: does the installation work, how fast is it, does Triton work."""


def fitting(stages: Sequence[Stage], seconds: float) -> list[Stage]:
    """Return the stages that end in a time even if each check needs its limit, the first one in any case."""
    chosen: list[Stage] = []
    left = seconds - BUILD_SECONDS
    for stage in stages:
        if not chosen or stage.seconds <= left:
            chosen.append(stage)
            left -= stage.seconds
    return chosen
