"""Plans of Megatron-LM's command lines, and the gains of flags that they lack."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.megatron_settings import WHOLE
from benchmarks.plan_for import (
    MESSAGES_OVERLAP,
    NO_MODEL,
    gain_lines,
    gains,
    layers_of_stages,
    main,
    read_command,
)
from benchmarks.planner_gains import pairs
from benchmarks.planner_published import compare
from benchmarks.published_rows import OPEN, read_rows
from megalite.cli import plan as commands
from megalite.utils.errors import UserError

COMMON = (
    "--hidden-size 2048 --num-attention-heads 16 --swiglu --normalization RMSNorm --disable-bias-linear "
    "--bf16 --position-embedding-type rope --seq-length 4096 --vocab-size 32000 --attention-dropout 0 "
    "--hidden-dropout 0 --micro-batch-size 1 --global-batch-size 64"
)
DENSE = f"--gpu h100 --world-size 16 --num-layers 8 {COMMON} --tensor-model-parallel-size 2"
EXPERTS = (
    f"--gpu b200 --world-size 16 --num-layers 8 {COMMON} --num-experts 16 --moe-router-topk 4 "
    "--moe-ffn-hidden-size 1024 --moe-grouped-gemm --expert-model-parallel-size 8 "
    "--expert-tensor-parallel-size 1 "
    "--use-distributed-optimizer"
)


@pytest.mark.parametrize(
    "words", [DENSE, EXPERTS, f"{DENSE} --sequence-parallel --use-distributed-optimizer"]
)
def test_a_gain_is_what_the_command_line_with_the_flags_has(words: str) -> None:
    """Append the flags of each line, without its remark, and plan the longer command line."""
    found = list(gains(read_command(words.split()).run))
    assert len(found) > 10
    for gain in found:
        longer = read_command([*words.split(), *gain.flags.partition(",")[0].split()])
        _, plan = gain.run.planned
        assert longer.run.planned[1].time.seconds == plan.time.seconds, gain.flags
        assert longer.run.planned[1].memory_bytes == plan.memory_bytes, gain.flags
        assert not longer.not_modelled and gain.flags not in [each.flags for each in gains(longer.run)]


@pytest.mark.parametrize(
    ("words", "offered", "excluded"),
    [
        (
            DENSE,
            "--sequence-parallel --overlap-grad-reduce blockwise",
            "--tp-comm-overlap mxfp8 --cuda-graph-impl",
        ),
        (f"{DENSE} --sequence-parallel", "--tp-comm-overlap", "--sequence-parallel --optimizer-cpu-offload"),
        (
            f"{DENSE} --fp8-format e4m3 --fp8-recipe tensorwise",
            "--sequence-parallel",
            "blockwise --fp8-param-gather",
        ),
        (EXPERTS, "nvfp4 mxfp8 deepep full_iteration moe", "blockwise --sequence-parallel mla_up_proj"),
        (
            f"{EXPERTS} --overlap-grad-reduce --fp8-format e4m3",
            "--overlap-param-gather --fp8-param-gather",
            "nvfp4",
        ),
        (f"{EXPERTS} --cuda-graph-impl full_iteration", "deepep", "attn full_iteration"),
        (f"{EXPERTS} --recompute-granularity full", "deepep", "full_iteration core_attn"),
    ],
)
def test_flags_that_the_others_allow_are_offered(words: str, offered: str, excluded: str) -> None:
    found = " ".join(gain.flags for gain in gains(read_command(words.split()).run)).replace(",", "").split()
    assert set(offered.split()) <= set(found)
    assert not set(excluded.split()) & set(found)


def test_settings_of_a_command_line() -> None:
    extra = (
        "--cuda-graph-impl transformer_engine --cuda-graph-scope attn,moe_router --fp8-format hybrid "
        "--moe-token-dispatcher-type flex --recompute-granularity selective "
        "--recompute-modules moe_act layernorm "
        "--grad-reduce-in-bf16 --moe-router-force-load-balancing --use-mcore-models "
        "--save a --load a --no-load-optim --log-energy --ckpt-convert-format zarr"
    )
    run, not_modelled = read_command(f"{EXPERTS} {extra}".split())
    settings = run.settings
    assert settings.graphs >= {"attn", "moe_router"} and settings.recipe == "delayed"
    assert settings.sends_tokens_once and settings.recomputes_expert_activation and settings.reduces_in_bf16
    assert not (settings.fuses_loss or settings.overlaps_tp or settings.gathers_rounded or not_modelled)
    config = run.planned[1].run.config
    assert config.recompute.recompute_modules == ("layernorm",)
    assert not config.parallel.overlap_grad_reduce and not config.parallel.overlap_param_gather


@pytest.mark.parametrize(
    ("layout", "layers"),
    [
        ("Et*3|(tt|)*2t|tmL", [3, 2, 2, 1, 1]),
        ("E(t|)*3tL", [1, 1, 1, 1]),
        ("Ett|(t|t|)*2tL", [2, 1, 1, 1, 1, 1]),
    ],
)
def test_layers_of_a_layout(layout: str, layers: list[int]) -> None:
    assert layers_of_stages(layout) == layers


def test_a_layout_of_stages_is_planned() -> None:
    words = f"{DENSE} --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout"
    run, not_modelled = read_command([*words.split(), "Et*3|tt|tt|tL"])
    assert run.planned[1].run.layers == (3, 2, 2, 1) and not not_modelled
    _, not_modelled = read_command([*words.split(), "Et*4|tttt|L"])  # the last stage has no layer
    assert not_modelled == ("--pipeline-model-parallel-layout Et*4|tttt|L",)


def test_a_published_run_is_planned_by_its_command_line() -> None:
    """Plan Llama-3 70B in NVFP4 on 64 GB200s (Megatron-Bridge 26.04) by flags, and by its row."""
    words = (
        "--gpu gb200 --world-size 64 --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --swiglu "
        "--bf16 --num-attention-heads 64 --group-query-attention --num-query-groups 8 --normalization "
        "RMSNorm --position-embedding-type rope --disable-bias-linear "
        "--untie-embeddings-and-output-weights --seq-length 8192 --padded-vocab-size 128256 "
        "--attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1 --global-batch-size 256 "
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 4 "
        "--num-virtual-stages-per-pipeline-rank 5 --use-distributed-optimizer --overlap-grad-reduce "
        "--overlap-param-gather --grad-reduce-in-bf16 --tp-comm-overlap --cross-entropy-loss-fusion "
        "--cross-entropy-fusion-impl te --fp4-format e2m1 --fp4-param-gather"
    )
    rows = [row for row in read_rows(OPEN) if row["model"] == "llama3_70b" and row["precision"] == "nvfp4"]
    published = next(each for each in compare(rows) if each.row["release"] == "26.04")
    assert published.plan is not None
    plan = read_command(words.split()).run.planned[1]
    assert plan.time.seconds == pytest.approx(published.plan.time.seconds, rel=0.01)
    assert plan.memory_bytes == pytest.approx(published.plan.memory_bytes, rel=0.01)
    assert abs(plan.time.seconds / published.seconds - 1) < 0.15


def test_flags_without_a_model_are_named_and_have_no_number(capsys: pytest.CaptureFixture[str]) -> None:
    extra = (
        f"{MESSAGES_OVERLAP} --moe-paged-stash --fine-grained-activation-offloading --offload-modules moe_act"
    )
    command = read_command(f"{EXPERTS} {extra}".split())
    names = {text.split()[0] for text in command.not_modelled}
    assert names == {*extra.split()} - {"moe_act"}
    assert command.run.planned[1].time.seconds == read_command(EXPERTS.split()).run.planned[1].time.seconds
    (named,) = [
        line for line in gain_lines(command) if line.startswith("not modelled: --fine") or "use-nccl" in line
    ]
    assert not any(name in named for name in names) and "%" not in named and NO_MODEL[-1] in named
    main(["megatron", *f"{EXPERTS} {extra}".split()])
    text = capsys.readouterr().out
    assert f"not modelled, and not in this plan: {MESSAGES_OVERLAP}" in text and "80% interval" in text
    graph = next(line for line in text.splitlines() if line.endswith("which needs --moe-paged-stash"))
    assert WHOLE in graph and graph.split()[0].endswith("%") and "no model" in graph


LAYOUT = "--pipeline-model-parallel-layout"


def test_mistakes_are_one_line() -> None:
    for words, message in (
        ("torch", "pass the program"),
        ("megatron --num-layers 2", "pass --gpu with a value"),
        ("megatron --gpu foo --world-size 8", "foo is not known"),
        ("megatron torchrun --gpu h100 --world-size 8", "pass only the flags"),
        (f"megatron {DENSE} --cuda-graph-impl all", "it is none, local"),
        (f"megatron {DENSE} --yaml-cfg a.yaml", "is not read"),
        (
            f"megatron {DENSE} --pipeline-model-parallel-size 2 {LAYOUT} Et|t|tL",
            "3 stages, which is not a multiple",
        ),
    ):
        with pytest.raises(UserError, match=message):
            main(words.split())
    with pytest.raises(UserError, match="--heterogeneous"):  # which makes it another model
        main(["megatron", *DENSE.split(), "--heterogeneous-layers-config-path", "a"])


def test_megalite_plan_runs_it_in_the_repository(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commands.plan(["--for", "megatron", *DENSE.split()])
    assert "with one more flag" in capsys.readouterr().out
    monkeypatch.setattr(commands, "__file__", str(tmp_path / "megalite" / "cli" / "plan.py"))
    with pytest.raises(UserError, match="in megalite's repository and not in its package"):
        commands.plan(["--for", "megatron", *DENSE.split()])


def test_pairs_of_rows_that_differ_in_one_setting() -> None:
    rows = [row for row in read_rows(OPEN) if row["model"] == "llama3_70b" and row["gpu"] == "gb200"]
    found = [pair for pair in pairs(list(compare(rows))) if "nvfp4" in pair.setting]
    assert len(found) >= 4 and all(pair.planned and pair.setting.startswith("precision") for pair in found)
    assert all(abs(pair.planned - pair.published) < 0.1 for pair in found)
    assert {pair.first.row["release"] == pair.second.row["release"] for pair in found} == {True}
