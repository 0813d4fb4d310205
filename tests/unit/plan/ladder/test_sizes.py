"""A run scaled to other sizes, and the configs that a ladder writes."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from megalite.cli.ladder import main
from megalite.config import Config
from megalite.config.model.model_config import flops_per_token
from megalite.config.presets import PRESETS
from megalite.config.validate import problems_of
from megalite.frontends.command_line import parse, parse_run
from megalite.plan.ladder.sizes import (
    LadderRun,
    ScalingRules,
    check_reference,
    ladder_lines,
    ladder_runs,
    measured_run,
    scaled_model,
    scaled_run,
    scaling_parameters,
    vocab_size_of,
    write_configs,
)
from megalite.plan.units import whole_model
from megalite.utils.errors import UserError

ROOT = Path(__file__).parents[4]
WORDS = "--preset llama-tiny --vocab-size 256 --mock-data --global-batch-size 16 --tp 1"
DEPTH, WIDTH = ScalingRules("depth"), ScalingRules("width")


def _config(words: str = "") -> Config:
    given = f"--preset gpt-tiny --vocab-size 256 --mock-data --lr 1e-3 --global-batch-size 16 {words}"
    return parse(given.split(), ("train_iters",))[0]


def _reference(words: str = "") -> LadderRun:
    config = _config(words)
    return measured_run("", config, vocab_size_of(config), tokens=0)


@pytest.mark.parametrize(
    ("preset", "parameters", "tables"),
    [
        (
            "gpt2-124m",
            124_439_808 + 47 * 768,
            1024 * 768,
        ),  # padded to 50304; the tied table is the output layer
        ("llama2-7b", 6_738_415_616, 32000 * 4096),
    ],
)
def test_tables_do_not_count(preset: str, parameters: int, tables: int) -> None:
    model = PRESETS[preset]
    assert whole_model(model, 1).num_parameters == parameters
    assert scaling_parameters(model, 1) == parameters - tables


def test_the_reference_has_its_own_batch_and_learning_rate() -> None:
    reference = _reference("--train-iters 100 --lr-warmup-iters 10")
    run = scaled_run(reference, DEPTH, 4, 20, "depth-4")
    assert run.config.model == reference.config.model and run.parameters == reference.parameters
    assert (run.config.training.global_batch_size, run.config.optimizer.lr) == (16, 1e-3)
    assert run.config.training.train_iters == round(20 * run.parameters / (16 * 64))
    assert run.tokens == run.config.training.train_iters * 16 * 64
    assert run.flops == run.tokens * flops_per_token(reference.config.model, 1)
    assert run.config.optimizer.lr_warmup_iters == round(run.config.training.train_iters / 10)


def test_batch_and_learning_rate_follow_the_parameters() -> None:
    reference = _reference("--min-lr 1e-4")
    run = scaled_run(reference, DEPTH, 8, 20, "depth-8")
    growth = run.parameters / reference.parameters
    assert growth > 4
    assert run.config.training.global_batch_size == round(16 * growth ** (2 / 3))
    assert run.config.optimizer.lr == pytest.approx(1e-3 * growth ** (-1 / 3))
    assert run.config.optimizer.min_lr == pytest.approx(run.config.optimizer.lr / 10)
    same = scaled_run(reference, ScalingRules("depth", 0.0, 0.0), 8, 20, "depth-8")
    assert (same.config.training.global_batch_size, same.config.optimizer.lr) == (16, 1e-3)


def test_all_sizes_evaluate_once_on_as_many_samples() -> None:
    reference = _reference("--eval-iters 8")
    for size in (2, 4, 8):
        training = scaled_run(reference, DEPTH, size, 20, "").config.training
        assert training.global_batch_size and training.eval_iters
        assert training.eval_interval == training.train_iters
        assert 0 <= training.global_batch_size * training.eval_iters - 8 * 16 < training.global_batch_size


def test_a_batch_has_whole_microbatches_on_each_replica() -> None:
    reference = _reference("--micro-batch-size 4 --dp 2")
    sizes = [scaled_run(reference, DEPTH, size, 20, "").config for size in (1, 3, 6)]
    assert [config.training.global_batch_size for config in sizes] == [8, 8, 32]
    assert [line for config in sizes for line in problems_of(config, None)] == []


@pytest.mark.parametrize(
    "preset", ["gpt2-124m", "llama3-8b", "qwen3-0.6b", "gemma2-2b", "gemma3-1b", "gemma4-31b", "olmo2-7b"]
)
def test_shapes_keep_their_ratios(preset: str) -> None:
    config = Config(model=PRESETS[preset])
    old = config.model
    new = scaled_model(config, "depth", old.num_layers * 2)
    assert (new.num_layers, new.hidden_size) == (2 * old.num_layers, 2 * old.hidden_size)
    assert (new.num_attention_heads, new.head_dim) == (2 * old.num_attention_heads, old.head_dim)
    assert new.num_kv_heads == (1 if old.num_kv_heads == 1 else 2 * old.num_kv_heads)
    assert new.ffn_size == pytest.approx(2 * old.ffn_size, abs=64)
    if "gemma" in preset:
        assert new.embedding_multiplier == pytest.approx(new.hidden_size**0.5)
    assert scaled_model(config, "depth", old.num_layers) == old
    assert scaled_model(config, "width", old.hidden_size) == old


def test_sizes_of_kinds_of_layers_keep_their_ratios() -> None:
    model = replace(PRESETS["gemma4-31b"], num_kv_shared_layers=20, kv_shared_ffn_hidden_size=43008)
    half = scaled_model(Config(model=model), "depth", 30)
    assert (half.num_query_groups, half.full_attention_query_groups) == (8, 2)
    assert (half.num_kv_shared_layers, half.kv_shared_ffn_hidden_size) == (10, 21504)


def test_experts_grow_with_the_width() -> None:
    widths = {"moe_shared_expert_intermediate_size": 64, "moe_latent_size": 32}
    model = replace(PRESETS["llama-tiny"], num_experts=4, moe_ffn_hidden_size=96, **widths)
    scaled = scaled_model(Config(model=model), "width", 128)
    assert scaled.moe_ffn_hidden_size == 192
    assert (scaled.moe_shared_expert_intermediate_size, scaled.moe_latent_size) == (128, 64)
    assert scaled_model(Config(model=model), "width", 64) == model


def test_a_width_has_whole_heads_on_each_rank() -> None:
    config = Config(model=PRESETS["llama-tiny"])  # 4 heads of 16, 2 per key/value head
    for width in (96, 128):
        assert scaled_model(config, "width", width).num_query_groups == width // 32
    with pytest.raises(UserError, match=r"^--widths 112 is not a multiple of 32, .* pass 96 or 128$"):
        scaled_model(config, "width", 112)
    two = replace(config, parallel=replace(config.parallel, tensor_model_parallel_size=2))
    with pytest.raises(UserError, match=r"^--widths 32 is not a multiple of 64, .* pass 64$"):
        scaled_model(two, "width", 32)
    assert scaled_model(two, "depth", 2).hidden_size == 64


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--save x", "--save would be the same for all sizes"),
        ("--train-samples 100", "--train-samples would be the same for all sizes"),
        ("--lr-warmup-iters 10", "--lr-warmup-iters 10 is a share of a run without a length"),
        ("--eval-iters 0", "--eval-iters 0: a ladder compares validation losses"),
    ],
)
def test_what_cannot_be_scaled_is_refused(words: str, message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}"):
        check_reference(_config(words))


def test_a_run_of_less_than_a_batch_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"^small trains on .* tokens, less than half of a global batch of 16 "
    ):
        scaled_run(_reference(), DEPTH, 4, 1e-3, "small")


def test_a_file_is_read_back_as_its_run(tmp_path: Path) -> None:
    config, _, set_fields = parse_run(WORDS.split(), ("train_iters",))
    runs = ladder_runs(config, WIDTH, [64, 96], [5.0, 20.0])
    names = ["width-64-tokens-5", "width-64-tokens-20", "width-96-tokens-5", "width-96-tokens-20"]
    assert [run.name for run in runs] == names
    for run, file in zip(runs, write_configs(runs, tmp_path, set_fields), strict=True):
        read, _ = parse(["--config", str(file)])
        assert (read.model, read.training, read.optimizer) == (
            *(run.config.model, run.config.training, run.config.optimizer),
        )
        text = file.read_text()
        assert text.startswith(f"# {run.name}: {run.parameters:,} parameters")
        # A field that is set to its default stays set: then the run chooses no layout.
        assert "tensor_model_parallel_size: 1\n" in text and "recompute" not in text


def test_the_table_has_a_line_for_each_run() -> None:
    config, *_ = parse_run(WORDS.split(), ("train_iters",))
    heads, *lines = ladder_lines(ladder_runs(config, DEPTH, [2, 4], [20.0]))
    assert heads.split()[:3] == ["run", "layers", "hidden"] and len({*map(len, (heads, *lines))}) == 1
    assert [line.split()[:4] for line in lines] == [["depth-2", "2", "32", "2"], ["depth-4", "4", "64", "4"]]


def test_ties_are_refused() -> None:
    config, *_ = parse_run(WORDS.split(), ("train_iters",))
    with pytest.raises(UserError, match=r"^--depths has 4 twice: remove one$"):
        ladder_runs(config, DEPTH, [2, 4, 4], [20.0])
    with pytest.raises(UserError, match=r"^--tokens-per-parameter has 20 twice: remove one$"):
        ladder_runs(config, DEPTH, [2, 4], [20.0, 5.0, 20.0])


def test_the_documentation_shows_the_table_of_its_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "ladder.md").read_text()
    (command,) = re.findall(r"^python tools/ladder.py (write .*?[^\\])$", page, re.MULTILINE | re.DOTALL)
    main([*shlex.split(command.replace("\\\n", " ")), "--output", str(tmp_path)])
    table, _, files = capsys.readouterr().out.partition("\n\n")
    assert "".join(f"    {line}\n" for line in table.splitlines()) in page
    assert files.splitlines() == [str(file) for file in sorted(tmp_path.glob("*/config.yaml"))]
