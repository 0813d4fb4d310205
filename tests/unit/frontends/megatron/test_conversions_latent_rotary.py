"""Megatron's flags for the positions of multi-latent attention: the same numbers as megatron-core's."""

from __future__ import annotations

import itertools
import math
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megalite.attention.positions import Rotary
from megalite.config import ModelConfig, to_yaml
from megalite.frontends.command_line import parse

BASE = "--mock-data --vocab-size 64 --train-iters 2 --num-layers 2 --disable-bias-linear "
LATENT = (
    f"{BASE} --multi-latent-attention --position-embedding-type rope --num-attention-heads 3 "
    "--hidden-size 21 --qk-head-dim 13 --qk-pos-emb-head-dim 22 --v-head-dim 5 --kv-lora-rank 7 "
)
FLAGS = ("--rotary-scaling-factor", "--mscale", "--mscale-all-dim")


def model_of(line: str) -> ModelConfig:
    return parse(shlex.split(LATENT + line))[0].model


def notices_of(line: str) -> list[str]:
    return parse(shlex.split(LATENT + line))[1]


def megatrons(monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Any, float]:
    """Return the rotary positions and the scale of scores that Megatron's attention makes of its arguments.

    Args:
        options: values of its arguments, of which Megatron's command line gives the others' defaults.
    """
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    from megatron.core.transformer import multi_latent_attention as theirs
    from megatron.core.transformer.attention import Attention
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    scales = []

    def build(spec: Any, *sizes: Any, softmax_scale: float | None = None, **_: Any) -> None:
        scales.extend([] if softmax_scale is None else [softmax_scale])

    def of_base(self: nn.Module, config: Any, **_: Any) -> None:
        nn.Module.__init__(self)
        self.config, self.layer_number = config, 1
        self.attn_mask_type = self.attention_type = None
        self.pg_collection = SimpleNamespace(cp=None, tp=None)

    monkeypatch.setattr(Attention, "__init__", of_base)
    monkeypatch.setattr(theirs, "build_module", build)
    monkeypatch.setattr(theirs, "HAVE_TE", False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    defaults = {"rotary_scaling_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}
    sizes = {"qk_head_dim": 13, "qk_pos_emb_head_dim": 22, "v_head_dim": 5, "kv_lora_rank": 7}
    config = MLATransformerConfig(
        num_layers=2, hidden_size=21, num_attention_heads=3, **sizes, **defaults | options
    )

    class OneLayer(theirs.MultiLatentAttention):
        def get_query_key_value_tensors(self, *_: Any, **__: Any) -> Any: ...

    parts = SimpleNamespace(core_attention=None, linear_proj=None)
    layer = OneLayer(config, parts, 1, None, "self")
    return layer.rotary_pos_emb, scales[0]


def assert_same_positions(model: ModelConfig, rotary: Any) -> None:
    """Compare cosines and sines with the factor that Megatron returns beside its angles."""
    length = 77
    found = rotary(length)
    angles, factor = found if isinstance(found, tuple) else (found, 1.0)
    spec = model.head_specs[0].rotary
    assert spec is not None
    ours = Rotary(spec, model, SimpleNamespace(device="cpu", dtype=torch.float32)).table(length)
    for x, y in zip(ours, (angles.cos() * factor, angles.sin() * factor), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=2e-5)  # their frequencies and angles are in fp32


@pytest.mark.parametrize("factor", [None, 1.0, 0.5, 3.0, 40.0])
def test_positions_and_scores_are_megatrons(factor: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for mscale, mscale_all, kind in itertools.product((None, 1.0, 0.7), (None, 0.0, 1.9), (None, "yarn")):
        case = dict(zip((*FLAGS, "--rope-type"), (factor, mscale, mscale_all, kind), strict=True))
        passed = {name: value for name, value in case.items() if value is not None}
        model = model_of(" ".join(f"{name} {value}" for name, value in passed.items()))
        options = {name[2:].replace("-", "_"): value for name, value in passed.items()}
        rotary, scale = megatrons(monkeypatch, **options)
        assert model.head_specs[0].score_scale == pytest.approx(scale, rel=1e-14)
        assert_same_positions(model, rotary)


@pytest.mark.parametrize("flags", [{}, {"rotary_scaling_factor": 40.0, "mscale": 0.7}], ids=str)
def test_positions_without_scaling_are_megatrons(
    flags: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("--rope-type rope " + " ".join(f"--{name} {value}" for name, value in flags.items()))
    rotary, scale = megatrons(monkeypatch, rope_type="rope", **flags)
    assert (model.rope_scaling, model.head_specs[0].score_scale) == ("none", pytest.approx(scale, rel=1e-14))
    assert_same_positions(model, rotary)


@pytest.mark.parametrize("bounds", ["--beta-fast 5 --beta-slow 2", "--yarn-beta-fast 5 --yarn-beta-slow 2"])
def test_other_bounds_and_another_length(bounds: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"rotary_scaling_factor": 4.0, "original_max_position_embeddings": 333}
    rotary, _ = megatrons(monkeypatch, **options, beta_fast=5, beta_slow=2)
    line = "--rotary-scaling-factor 4 --original-max-position-embeddings 333"
    assert_same_positions(model_of(f"{line} {bounds}"), rotary)


def test_without_the_flags_nothing_is_scaled() -> None:
    """Megatron's default factor is 1."""
    assert model_of("") == parse(shlex.split(LATENT))[0].model
    assert model_of("").rope_scaling == "none"
    assert notices_of("") == []


def test_deepseeks_own_values_are_those_of_its_preset() -> None:
    names = ("rope_scaling", "rope_scaling_factor", "original_max_position_embeddings")
    names = (*names, "yarn_mscale", "yarn_mscale_all_dim", "yarn_attention_factor")
    preset = parse(shlex.split(f"{BASE} --preset deepseek-v3 --num-layers 61"))[0].model
    model = model_of("--rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 1.0")
    assert [getattr(model, name) for name in names] == [getattr(preset, name) for name in names]


def test_a_flag_changes_a_presets_value_alone() -> None:
    line = f"{BASE} --preset deepseek-v2-lite --num-layers 27 --rotary_scaling_factor 20"
    model = parse(shlex.split(line))[0].model
    assert (model.rope_scaling_factor, model.yarn_mscale, model.yarn_mscale_all_dim) == (20.0, 0.707, 0.707)
    assert parse(shlex.split(f"{line} --rope-type rope"))[0].model.rope_scaling == "none"


@pytest.mark.parametrize(
    ("line", "notice"),
    [
        ("--rope-type yarn", "--rope-type yarn has no effect: --rotary-scaling-factor is 1"),
        ("--mscale 0.7", "--mscale 0.7 has no effect: --rotary-scaling-factor is 1"),
        ("--rope-type rope --mscale 0.7", "--mscale 0.7 has no effect: --rope-type is rope"),
        (
            "--rope-type rope --rotary-scaling-factor 40",
            "--rotary-scaling-factor 40 has no effect: --rope-type is rope",
        ),
    ],
)
def test_a_flag_without_effect_is_reported(line: str, notice: str) -> None:
    assert notices_of(line) == [notice]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("--mscale 0", "--mscale takes a number above 0, but got 0"),
        ("--mscale_all_dim -1", "--mscale_all_dim takes a number that is at least 0, but got -1"),
        ("--rotary-scaling-factor inf", "--rotary-scaling-factor takes a number above 0, but got inf"),
        ("--rotary-scaling-factor", "--rotary-scaling-factor takes a number above 0, but got none"),
        ("--rope-type linear", "--rope-type takes rope or yarn, but got linear"),
        (
            "--rope-scaling llama3 --rotary-scaling-factor 40",
            "--rope-scaling llama3 and --rotary-scaling-factor 40 set the same option: remove one",
        ),
        (
            "--rope-scaling yarn --rope-scaling-factor 32 --rotary-scaling-factor 40",
            "--rope-scaling-factor 32.0 and --rotary-scaling-factor 40 set the same option: remove one",
        ),
        (
            "--rope-type rope --rotary-scaling-factor 40 --mscale-all-dim 1",
            "--rope-type rope with --rotary-scaling-factor 40 and --mscale-all-dim 1: Megatron scales the "
            "scores but not the positions; pass --rope-type yarn, or remove --mscale-all-dim",
        ),
    ],
)
def test_what_is_refused(line: str, problem: str, problems) -> None:
    assert problems(LATENT + line)[0] == problem


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("--rope-type yarn", "--rope-type only accepts rope in this version, not yarn (YaRN by this flag): "),
        ("--rotary-scaling-factor 40", "--rotary-scaling-factor only accepts 1 in this version, not 40 ("),
        ("--mscale 0.7", "--mscale only accepts 1 in this version, not 0.7 (YaRN by this flag): "),
        (
            "--mscale-all-dim 1",
            "--mscale-all-dim only accepts 0 in this version, not 1 (YaRN by this flag): ",
        ),
    ],
)
def test_other_attention_accepts_only_what_changes_nothing(line: str, found: str, problems) -> None:
    assert problems(BASE + line)[0].startswith(found)
    off = {"--rope-type": "rope", "--mscale-all-dim": "0.0"}.get(line.split()[0], "1.0")
    _, notices = parse(shlex.split(f"{BASE} {line.split()[0]} {off}"))
    assert notices == [f"{line.split()[0]} {off} is not needed: it is always so"]


def test_mscale_alone_is_the_factor_of_cosines_and_sines() -> None:
    model = model_of("--rotary-scaling-factor 40 --mscale 0.7")
    assert model.yarn_attention_factor == pytest.approx(0.07 * math.log(40) + 1)


def test_flags_override_a_file_of_all_settings(tmp_path: Path) -> None:
    """A file that --print-config wrote has a value for every field."""
    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(parse(shlex.split(LATENT))[0]))
    flags = "--rotary-scaling-factor 40 --use-megatron-fsdp --data-parallel-sharding-strategy optim"
    config, _ = parse(shlex.split(f"--config {file} {flags}"))
    assert config.model == model_of("--rotary-scaling-factor 40")
    assert config.parallel.zero_stage == 1
