"""The checks by stage, with their time limits: at most 9 minutes in total per stage."""

from __future__ import annotations

from benchmarks.gpu_check.runner import Check, Stage

BUILD = Check("build", "installation.build", 300.0)
"""The build begins each stage. After the first time it takes seconds, so its limit is not counted."""

STAGES = (
    Stage(
        1,
        "installation and ceilings",
        (
            BUILD,
            Check("versions", "installation.versions", 30.0),
            Check("kernels", "installation.kernels", 30.0),
            Check("copy", "ceilings.copy", 30.0),
            Check("large GEMM", "ceilings.large_gemm", 50.0),
            Check("layer GEMMs", "ceilings.layer_gemms", 60.0),
            Check("GELU in GEMMs", "ceilings.gelu_in_gemms", 40.0),
            Check("attention", "ceilings.attention", 60.0),
            Check("no synchronization", "ceilings.no_synchronization", 60.0),
            Check("operator tests", "installation.operator_tests", 150.0),
        ),
    ),
    Stage(
        2,
        "the same numbers on CPU and GPU in fp64",
        (
            BUILD,
            Check("operators", "same_numbers.operators", 60.0),
            Check("masks", "same_numbers.masks", 60.0),
            Check("attention in fp64", "same_numbers.attention", 60.0),
            Check("train steps", "same_numbers.train_steps", 240.0),
            Check("bf16 attention", "same_numbers.auto_attention", 60.0),
            Check("bf16 GELU", "same_numbers.gelu_in_gemms", 60.0),
        ),
    ),
    Stage(
        3,
        "speed",
        (
            BUILD,
            Check("train_step gpt-1.3b", "speed.step_1", 90.0),
            Check("profile", "speed.profile", 80.0),
            Check("train_step gpt-1.3b, 8 microbatches", "speed.step_8", 90.0),
            Check("peers", "speed.peers", 190.0),
            Check("train_step gpt-7b", "speed.step_7b", 45.0),
            Check("train_step bloom-20b-slice", "speed.step_bloom", 45.0),
        ),
    ),
    Stage(
        4,
        "faults",
        (
            BUILD,
            Check("resume", "faults.resume_sync", 150.0),
            Check("resume, async save", "faults.resume_async", 150.0),
            Check("out of memory", "faults.out_of_memory", 40.0),
            Check("memcheck", "faults.memcheck", 190.0),
        ),
    ),
    Stage(
        5,
        "several GPUs",
        (
            BUILD,
            Check("all-reduce", "several_gpus.all_reduce", 90.0),
            Check("runs on 2 GPUs", "several_gpus.runs", 150.0),
            Check("layout table", "several_gpus.layouts", 300.0),
        ),
    ),
    Stage(
        6,
        "tests that compile much",
        (
            BUILD,
            Check("Triton tests", "installation.triton_tests", 180.0),
            Check("compiled layers", "installation.compiled_layer_tests", 90.0),
            Check("attention backends", "installation.backend_tests", 110.0),
            Check("racecheck", "faults.racecheck", 150.0),
        ),
    ),
    Stage(
        7,
        "operators without nvcc",
        (BUILD, Check("operator tests without nvcc", "installation.run_time_tests", 540.0)),
    ),
)
