"""Layers with one block: the letters of the pattern, the sizes of Mamba-2, and what neither can have."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megalite.config import AttentionSpec, LayerSpec, ModelConfig
from megalite.config.fields import resolved_fields
from megalite.config.presets import PRESETS
from megalite.config.validate import unused_options
from megalite.frontends.command_line import parse
from tests.command_line import mistakes_of

BASE = "--preset nemotron-h-tiny --vocab-size 128 --mock-data --train-iters 2 --lr 1e-3"
EXPERTS = "--num-experts 4 --moe-router-topk 2"


def _problems(line: str) -> list[str]:
    return mistakes_of(f"{BASE} {line}", 1)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "--hybrid-override-pattern MMMM",
        "--hybrid-layer-pattern *-M-",
        f"--hybrid-override-pattern ME*E {EXPERTS}",
        "--mamba-num-heads 4 --mamba-head-dim 5",
        "--position-embedding-type rope",
        "--hybrid-override-pattern *-*- --mamba-num-groups 3 --fp8 --bf16",
    ],
)
def test_these_models_are_valid(line: str) -> None:
    assert _problems(line) == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "--hybrid-override-pattern M*X|",
            "--hybrid-override-pattern M*X| has other letters: its letters are M (Mamba-2)",
        ),
        (
            "--hybrid-override-pattern M*-M-",
            "has 5 letters, not one for each of --num-layers 4: pass --num-layers 5",
        ),
        ("--hybrid-override-pattern M*-E", "M*-E has layers with experts: pass --num-experts"),
        (EXPERTS, "M*M- leaves no layer with experts: remove --num-experts 4"),
        (
            "--norm-position output",
            "--norm-position output with --hybrid-override-pattern M*M-, whose layers",
        ),
        ("--parallel-residual", "--parallel-residual with --hybrid-override-pattern M*M-, whose layers"),
        (
            "--window-size 8,0",
            "--window-size 8 0 with --hybrid-override-pattern M*M-, which names each layer",
        ),
        ("--recurrent-mixer gated_delta_net", "which names each layer: remove one"),
        (f"--moe-layer-freq 2 {EXPERTS}", "--moe-layer-freq 2 with --hybrid-override-pattern M*M-"),
        (
            "--mamba-head-dim 48",
            "--mamba-head-dim 48 does not divide twice --hidden-size 64: pass --mamba-head-dim 32",
        ),
        (
            "--mamba-num-groups 3",
            "--mamba-num-groups 3 does not divide the 8 heads of Mamba-2: pass --mamba-num-groups 2 or 4",
        ),
        (
            "--cp 3 --mamba-num-groups 4 --seq-length 48",
            "--mamba-num-groups 4 with --cp 3, over which the 4 cannot be split: pass --cp 2 or 4; each rank "
            "computes whole groups with their heads for all tokens",
        ),
        ("--mamba-multipliers 1 2 0.5", "--mamba-multipliers 1.0 2.0 0.5 has 3 factors: pass 5, or remove"),
        ("--mixer-multipliers 1 0", "--mixer-multipliers 0.0 is out of range: it must be greater than 0"),
        ("--fp8 --bf16", "--fp8-format hybrid with --hybrid-override-pattern M*M-"),
        ("--compile", "--compile with --hybrid-override-pattern M*M-"),
        ("--mup-base-width 32", "--mup-base-width 32 with --hybrid-override-pattern M*M-"),
        ("--architecture bert", "--hybrid-override-pattern M*M- with --architecture bert"),
    ],
)
def test_a_mistake_is_one_line_with_the_fix(line: str, message: str) -> None:
    assert any(message in problem for problem in _problems(line)), _problems(line)


def test_sizes_of_mamba_without_mamba_are_reported() -> None:
    config, _ = parse([*BASE.split(), "--hybrid-override-pattern", "*-*-"])
    expected = "--mamba-num-groups 4 has no effect: no layer has Mamba-2 (M or B in "
    expected += "--hybrid-override-pattern)"
    assert expected in unused_options(config)
    config, _ = parse(BASE.split())
    assert not any("--mamba" in line for line in unused_options(config))


def test_tp_divides_the_groups() -> None:
    (problem,) = mistakes_of(f"{BASE} --mamba-num-groups 2 --tp 4", 4)
    assert problem.startswith("--mamba-num-groups 2 is not divisible by --tp 4: pass --tp 2; each rank")


def test_letters_are_kinds_of_layers() -> None:
    model = ModelConfig(num_layers=4, hybrid_override_pattern="M*-E", num_experts=4)
    attention, mlp = LayerSpec(AttentionSpec(12, 12, 64, 64, 1 / 8), None), LayerSpec(None, model.ffn_size)
    experts = LayerSpec(None, None, model.experts)
    assert model.layer_specs == (LayerSpec(model.mamba, None), attention, mlp, experts)


def test_sizes_of_mamba_count_where_layers_have_it() -> None:
    tiny = PRESETS["nemotron-h-tiny"]
    found = resolved_fields(tiny)
    assert found["mamba_num_heads"] == 8  # twice the hidden size of 64, in heads of 16
    without = resolved_fields(replace(tiny, hybrid_override_pattern="-*-*"))
    assert {name for name in found if name.startswith("mamba_") and without[name] is not None} == set()
    assert resolved_fields(ModelConfig())["mamba_state_dim"] is None
