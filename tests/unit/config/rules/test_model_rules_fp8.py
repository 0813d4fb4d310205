"""8-bit GEMMs: the flags, what they require of a model, and what they can be combined with."""

from __future__ import annotations

import shlex

import pytest

from megalite.config import check_config
from megalite.config.validate import unused_options
from megalite.frontends.command_line import parse
from tests.command_line import mistakes_of

BASE = "--preset gpt-tiny --vocab-size 128 --mock-data --train-iters 2 --lr 1e-3"


def _problems(line: str, world_size: int = 1) -> list[str]:
    return mistakes_of(f"{BASE} {line}", world_size)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--fp8", "hybrid"),
        ("--fp8-format hybrid", "hybrid"),
        ("--fp8-format e4m3", "e4m3"),
        ("--fp8-e4m3", "e4m3"),
        ("--fp4-format e2m1 --fp4-recipe nvfp4", "e2m1"),
        ("", None),
    ],
)
def test_megatrons_names(flags: str, expected: str | None) -> None:
    config, _ = parse(shlex.split(f"{BASE} --bf16 {flags}"))
    assert config.training.fp8_format == expected
    check_config(config, 1)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "fp64"])
def test_the_rest_is_in_bf16(dtype: str) -> None:
    (message,) = _problems(f"--fp8 --params-dtype {dtype}")
    assert message.startswith(f"--fp8-format hybrid with --params-dtype {dtype}: ")
    assert "pass --bf16" in message


@pytest.mark.parametrize(
    ("line", "world_size", "named"),
    [
        ("--hidden-size 60 --num-attention-heads 4 --kv-channels 16", 1, "--hidden-size 60"),
        ("--ffn-hidden-size 200", 1, "--ffn-hidden-size 200"),
        ("--ffn-hidden-size 240 --tp 2", 2, "--ffn-hidden-size 240 over --tp 2"),
        ("--num-attention-heads 4 --kv-channels 10", 1, "--kv-channels"),
        ("--num-attention-heads 4 --num-query-groups 1 --kv-channels 4", 1, "--num-query-groups"),
    ],
)
def test_sides_are_multiples_of_16(line: str, world_size: int, named: str) -> None:
    assert not _problems(f"--bf16 {line}", world_size)
    message = _problems(f"--bf16 --fp8 {line}", world_size)
    assert message
    assert all(problem.startswith("--fp8-format hybrid with ") for problem in message)
    assert any(named in problem for problem in message)


@pytest.mark.parametrize(
    ("line", "world_size", "named"),
    [
        ("--fp8-recipe mxfp8 --ffn-hidden-size 96 --tp 2", 2, "--ffn-hidden-size 96 over --tp 2: "),
        ("--fp8-recipe blockwise --tp 2", 2, "each rank's share must be a multiple of 128"),
        ("--fp8-recipe mxfp8 --seq-length 64 --cp 2", 2, "--seq-length 64 over --cp 2: "),
        ("--fp8-recipe mxfp8 --num-experts 2 --moe-ffn-hidden-size 48 --tp 2", 2, "48 over --etp 2: "),
        ("--fp8-recipe mxfp8 --compile", 1, "--compile with --emulate"),
        ("--fp8-recipe delayed --compile", 1, "graphs have no history"),
        ("--fp8-recipe mxfp8 --fp8-param-gather --zero-stage 3", 2, "other 8 bits for each"),
        (
            "--fp8-recipe mxfp8 --tp 2 --sequence-parallel --tp-comm-overlap-method symmetric_memory",
            *(2, "without rounding: pass chunks"),
        ),
        ("--fp8-recipe mxfp8 --mlp-chunks-for-training 2", 1, "which cuts a sample within blocks"),
        ("--fp8-recipe nvfp4", 1, "for 4 bits pass --fp4-format e2m1 --fp4-recipe nvfp4"),
        ("--fp8-recipe nvfp4 --seq-length 40 --cp 2", 2, "must be a multiple of 16"),
        ("--multi-latent-attention --fp8-recipe tensorwise", 1, "pass --fp8-recipe blockwise or mxfp8"),
        ("--first-last-layers-bf16 --num-layers-at-start-in-bf16 9", 1, "leaves none of --num-layers"),
    ],
)
def test_what_a_recipe_requires(line: str, world_size: int, named: str) -> None:
    problems = _problems(f"--params-dtype fp64 --fp8 --emulate --disable-bias-linear {line}", world_size)
    assert any(named in problem for problem in problems), problems


def test_experts_need_no_other_recipe() -> None:
    assert not _problems("--bf16 --fp8 --num-experts 2 --disable-bias-linear")


def test_fp16_has_no_range_for_the_scales_of_blocks() -> None:
    (message,) = _problems("--fp16 --fp8 --fp8-recipe mxfp8 --emulate")
    assert message.endswith("pass --bf16")


def test_emulation_takes_any_size_that_no_rank_cuts() -> None:
    sizes = "--hidden-size 60 --num-attention-heads 4 --ffn-hidden-size 90 --seq-length 50"
    for recipe in ("tensorwise", "blockwise", "mxfp8"):
        assert not _problems(f"--params-dtype fp32 --fp8 --fp8-recipe {recipe} --emulate {sizes}")


def test_first_and_last_layers_in_16_bits() -> None:
    flags = "--fp8 --first-last-layers-bf16 --num-layers-at-end-in-bf16 2"
    config, _ = parse(shlex.split(f"{BASE} --bf16 {flags}"))
    assert [config.training.is_layer_in_fp8(number, 6) for number in range(6)] == [0, 1, 1, 1, 0, 0]


@pytest.mark.parametrize(
    ("flags", "world_size", "reason"),
    [
        ("", 1, "--fp8-format is not set"),
        ("--fp8 --zero-stage 3", 2, "with --zero-stage 3 full weights are not kept"),
        ("--fp8 --compile", 1, "compiled layers round weights for each microbatch"),
        ("--fp8 --compile --tp 2", 2, ""),
        ("--fp8 --compile --pp 2 --pipeline-schedule zb-h1", 2, ""),
        ("--fp8 --zero-stage 2", 2, ""),
    ],
)
def test_a_cache_without_effect_is_named(flags: str, world_size: int, reason: str) -> None:
    config, _ = parse(shlex.split(f"{BASE} --bf16 --no-fp8-weight-cache {flags}"))
    lines = [line for line in unused_options(config, world_size) if "fp8-weight-cache" in line]
    expected = f"--no-fp8-weight-cache has no effect: {reason}"
    assert (lines[0].startswith(expected) and len(lines) == 1) if reason else not lines


def test_a_dry_run_compiles_nothing() -> None:
    _, notices = parse(shlex.split(f"{BASE} --compile --dry-run --world-size 1"))
    assert [notice for notice in notices if notice.startswith("--compile has no effect: ")]
    _, notices = parse(shlex.split(f"{BASE} --compile"))
    assert not [notice for notice in notices if "--compile" in notice]
