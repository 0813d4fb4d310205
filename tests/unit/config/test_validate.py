"""Validation of a config: every rule, with messages that name the flags."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from megalite.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainingConfig,
    check_config,
    rules,
)
from megalite.config.fields import ConfigField, config_fields, fields_by_flag
from megalite.config.option import FOLDER_OR_URL, LOCAL_PATH, flag_of
from megalite.config.rules.attention_rules import (
    assigned_documents,
    comm_types_of_layers,
    context_levels,
    exchanged_heads,
)
from megalite.config.rules.parallel_rules import (
    batch,
    replicas,
    sample_ranks,
    sequence,
    shard_groups,
)
from megalite.config.validate import RULES as CHECKED
from megalite.config.validate import conflicts, problems_of, range_problems, unused_options
from megalite.frontends.command_line import parse
from megalite.utils.commands import main_of
from megalite.utils.errors import ConfigError, UserError
from tests.command_line import mistakes_of

ENOUGH = "--train-iters 100 --data-path p --tokenizer-type byte "


def problems_with(line: str, world_size: int | None = None) -> list[str]:
    return mistakes_of(ENOUGH + line, world_size)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "--seq-length 8",
            "--mask-prob 0.15 masks less than one of the 5 tokens of a sample (--seq-length 8 ",
        ),
        ("--seq-length 8", "pass at least --seq-length 10 or --mask-prob 0.2"),
        ("--seq-length 32 --mask-prob 0.03", "pass at least --seq-length 37 or --mask-prob 0.035"),
        ("--seq-length 10", None),
        ("--seq-length 8 --mask-prob 0.2", None),
        ("--seq-length 32 --mask-prob 0.035", None),
    ],
)
def test_a_bert_predicts_a_token_of_each_sample(line: str, message: str | None) -> None:
    line = f"--preset bert-tiny --vocab-size 100 --mock-data --train-iters 1 {line}"
    config, _ = parse(line.split(), architecture="bert")
    if message is None:
        check_config(config)
        return
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        check_config(config)
    assert len(caught.value.problems) == 1


def test_every_rule_is_checked() -> None:
    for path in Path(rules.__path__[0]).glob("[a-z]*.py"):
        module = import_module(f"{rules.__name__}.{path.stem}")
        public = {each for name, each in vars(module).items() if callable(each) and not name.startswith("_")}
        named = {each for each in public if "config" in getattr(each, "__annotations__", {})}
        named = {each for each in named if len(each.__annotations__) <= 3}  # a helper takes more
        yielding = {each for each in named if each.__annotations__["return"] == "Iterator[Problem]"}
        assert yielding and yielding <= {*CHECKED}, path.stem


def test_the_default_needs_a_corpus_a_length_and_a_vocabulary() -> None:
    with pytest.raises(ConfigError) as caught:
        check_config(Config())
    assert [problem[:13] for problem in caught.value.problems] == [
        "--train-iters",
        "--data-path i",
        "the vocabular",
    ]


RULES = [
    ("--hang-timeout 451", None, "--hang-timeout 451 leaves no time for its report before"),
    (
        "--distributed-timeout-minutes 1 --hang-timeout 46",
        None,
        "pass at most --hang-timeout 45, or a larger",
    ),
    ("--hang-timeout -1", None, "--hang-timeout -1.0 is out of range: it must be at least 0"),
    ("--log-straggler-interval 0", None, "--log-straggler-interval 0 is out of range"),
    ("--fim-rate 0.5", None, "--fim-rate 0.5 with --tokenizer-type byte: pass the tokenizer of the corpus"),
    ("--sft --eod-mask-loss", None, "--eod-mask-loss with --sft, which separates conversations by itself"),
    ("--sft --reset-position-ids", None, "--reset-position-ids with --sft, which separates conversations"),
    (
        "--sft --reset-attention-mask",
        None,
        "--reset-attention-mask with --sft, which separates conversations",
    ),
    (
        "--sft --fim-rate 0.5 --tokenizer-type GPT2BPETokenizer --vocab-file v --merge-file m",
        None,
        "--fim-rate 0.5 with --sft: it rearranges text; remove --fim-rate",
    ),
    (
        "--document-packing best_fit --eod-mask-loss",
        None,
        "--eod-mask-loss with --document-packing best_fit, which separates documents by itself: remove it",
    ),
    ("--data-phases f", None, "--data-path and --data-phases both set the corpora: remove one"),
    ("--sample-order windows --sft", None, "--sample-order windows with --sft, whose samples are no windows"),
    ("--document-packing best_fit --sft", None, "--sft packs conversations by itself; remove"),
    ("--fim-rate 1.5", None, "--fim-rate 1.5 is out of range: it must be from 0 to 1"),
    ("--data-args-path f", None, "--data-path and --data-args-path both set the corpora: remove one"),
    (
        "--train-weighted-split-paths-path f",
        None,
        "--data-path and --train-weighted-split-paths-path both set the corpora",
    ),
    ("--num-attention-heads 10", None, "by --num-attention-heads 10: pass --num-attention-heads 8 or 12, or"),
    ("--num-attention-heads 769", None, "--hidden-size 768 is not divisible by --num-attention-heads 769"),
    (
        "--hidden-size 12 --num-attention-heads 4 --position-embedding-type rope",
        None,
        "even head size, not 3",
    ),
    (
        "--attention-backend flash",
        None,
        "--attention-dropout 0.1 with --attention-backend flash, which has no dropout",
    ),
    (
        "--num-query-groups 5",
        None,
        "12 is not divisible by --num-query-groups 5: pass --num-query-groups 4 or 6",
    ),
    (
        "--window-size 0,0",
        None,
        "--window-size 0 0 with --seq-length 1024: pass --window-size W,0 with 1 <= W",
    ),
    ("--window-size (1024,0)", None, "--window-size 1024 0 with --seq-length 1024: pass"),
    ("--window-size 8,3", None, "--window-size 8 3 must be a number of tokens before a token, and 0 for"),
    ("--window-size 8", None, "for the tokens after it: pass --window-size 8,0"),
    (
        "--window-size 8,0 --architecture bert --mock-data",
        None,
        "--window-size 8 0 with --architecture bert, whose attention is bidir",
    ),
    ("--window-attn-skip-freq 2", None, "--window-attn-skip-freq 2 without --window-size: pass both"),
    ("--window-size 8,0 --window-attn-skip-freq 1", None, "--window-attn-skip-freq 1 leaves no layer with"),
    ("--window-size 8,0 --window-attn-skip-freq [1]*3", None, "1 1 1 has 3 numbers, not one for each of --n"),
    ("--window-size 8,0 --window-attn-skip-freq [1,2]*6", None, "has numbers other than 0 and 1: change"),
    ("--seq-length 2048 --max-position-embeddings 1024", None, "--seq-length 2048 is above --max-position"),
    ("--num-attention-heads 6 --tp 4", 4, "--num-attention-heads 6 is not divisible by --tp 4"),
    (
        "--ffn-hidden-size 3074 --tp 4",
        4,
        "--ffn-hidden-size 3074 is not divisible by --tp 4: use a multiple of it, such as 3076",
    ),
    (
        "--pad-vocab-size-to 1001 --tp 2",
        2,
        "--pad-vocab-size-to 1001 is not divisible by --tp 2: pass --pad-vocab-size-to 1002",
    ),
    (
        "--vocab-size 257 --pad-vocab-size-to 256",
        None,
        "--vocab-size 257 is above --pad-vocab-size-to 256: pass at",
    ),
    (
        "--num-query-groups 3 --tp 2",
        2,
        "--num-query-groups 3 with --tp 2: one must be divisible by the other",
    ),
    (
        "--num-attention-heads 12 --num-query-groups 4 --tp 6",
        6,
        "--num-query-groups 4 with --tp 6: one must be",
    ),
    ("--num-attention-heads 6 --num-query-groups 2 --tp 6 --kv-channels 1", 6, "5 rows of a group"),
    ("--num-layers 3 --pp 4", 4, "--num-layers 3 is fewer than --pp 4 stages"),
    ("--num-layers 7 --pp 2", 2, "or set the layers of each stage, as in --pipeline-layers 4 3"),
    (
        "--num-layers 4 --pp 3 --account-for-loss-in-pipeline-split",
        3,
        "change one of them, or replace --account-for-loss-in-pipeline-split by --pipeline-layers 2 1 1",
    ),
    ("--pipeline-layers 3 9 --pp 3", 3, "--pipeline-layers 3 9 names 2 stages, but --pp is 3"),
    ("--pipeline-layers 3 8 --pp 2", 2, "--pipeline-layers 3 8 add up to 11, not to --num-layers 12"),
    ("--tp 2 --pp 2", 6, "world size 6 is not a multiple of --tp 2 x --pp 2 = 4: start 8 ranks"),
    ("--tp 2 --pp 2", 2, "start 4 ranks"),
    ("--tp 2 --dp 2", 8, "world size 8 is not --tp 2 x --pp 1 x --dp 2 = 4"),
    (
        "--micro-batch-size 4 --global-batch-size 6",
        None,
        "6 is not divisible by --micro-batch-size 4: use 8",
    ),
    (
        "--micro-batch-size 2 --global-batch-size 6",
        4,
        "--micro-batch-size 2 x data-parallel size 4 = 8: use 8",
    ),
    ("--lr 1e-4 --min-lr 1e-3", None, "--min-lr 0.001 is above --lr 0.0001"),
    ("--decoupled-min-lr 1e-5", None, "--decoupled-min-lr 1e-05 without --decoupled-lr"),
    (
        "--decoupled-lr 1e-5 --min-lr 1e-4",
        None,
        "--min-lr 0.0001 is above --decoupled-lr 1e-05, the peak: pass at most 1e-05, or pass --decoupled",
    ),
    (
        "--decoupled-lr 1e-5 --decoupled-min-lr 1e-4",
        None,
        "--decoupled-min-lr 0.0001 is above --decoupled-lr 1e-05",
    ),
    (
        "--decoupled-lr 1e-5 --lr-warmup-iters 5 --lr-warmup-init 1e-4",
        None,
        "--lr-warmup-init 0.0001 is above --decoupled-lr 1e-05",
    ),
    (
        "--mup-base-width 256 --optimizer muon",
        None,
        "--mup-base-width 256 with --muon-scale-mode spectral, whose updates grow with the width: pass "
        "--muon-scale-mode unit_rms_norm or shape_scaling",
    ),
    (
        "--mup-base-width 256 --mup-base-head-dim 32 --query-pre-attn-scalar 9",
        None,
        "--mup-base-head-dim 32 with --query-pre-attn-scalar 9.0, which also sets the scale",
    ),
    (
        "--mup-base-width 256 --architecture bert --mock-data",
        None,
        "--mup-base-width 256 with --architecture bert, whose",
    ),
    ("--mtp-num-layers 1", None, "learned_absolute, whose positions are in the embedding: pass rope"),
    (
        "--mtp-num-layers 1 --position-embedding-type alibi --embed-layernorm",
        None,
        "--mtp-num-layers 1 with --embed-layernorm: its modules normalize the embedding; remove one of them",
    ),
    (
        "--mtp-num-layers 8 --position-embedding-type rope --seq-length 8",
        None,
        "--mtp-num-layers 8 is not below --seq-length 8, the tokens of a sample: change one of them",
    ),
    ("--qk-clip --qk-layernorm", None, "--qk-clip with --qk-layernorm, which bounds the scores itself"),
    ("--qk-clip --compile", None, "--qk-clip with --compile is not supported"),
    (
        "--qk-clip --attention-backend fused --attention-dropout 0",
        None,
        "--qk-clip with --attention-backend fused, which does not return the largest",
    ),
    (
        "--qk-clip --optimizer-cpu-offload",
        None,
        "--qk-clip with --optimizer-cpu-offload: weights are only scaled on the device",
    ),
    ("--lr-warmup-iters 5 --lr-warmup-init 1", None, "--lr-warmup-init 1.0 is above --lr"),
    ("--lr-warmup-iters 5 --lr-warmup-fraction .1", None, "both set the warm-up"),
    (
        "--lr-step-timing deepspeed",
        None,
        "--lr-step-timing deepspeed needs a warm-up: pass --lr-warmup-iters",
    ),
    (
        "--lr-step-timing deepspeed --lr-warmup-iters 9 --lr-decay-style inverse-square-root",
        None,
        "inverse-square-root: choose one of constant, linear, cosine",
    ),
    ("--lr-warmup-iters 100", None, "--lr-warmup-iters 100 does not end before --train-iters 100"),
    ("--lr-warmup-iters 50 --lr-decay-iters 50", None, "does not end before --lr-decay-iters 50"),
    ("--train-samples 500", None, "--train-iters 100 with --train-samples 500, which also sets the length"),
    ("--lr-decay-samples 50", None, "--lr-decay-samples 50 with --train-iters 100: a run is counted in"),
    ("--lr-warmup-samples 5", None, "--lr-warmup-samples 5 with --train-iters 100: a run is counted in"),
    ("--rampup-batch-size 2 2 --global-batch-size 8", None, "has 2 numbers: pass three, START INCREMENT SAM"),
    ("--rampup-batch-size 2 2 9", None, "--rampup-batch-size 2 2 9 needs --global-batch-size"),
    ("--rampup-batch-size 8 2 9 --global-batch-size 8", None, "starts at 8, not below --global-batch-size 8"),
    (
        "--rampup-batch-size 2 4 9 --global-batch-size 8",
        None,
        "8 - 2 is not divisible by the increment 4; pass --global-batch-size 10",
    ),
    (
        "--rampup-batch-size 4 2 9 --global-batch-size 8 --micro-batch-size 4",
        None,
        "the increment 2 is not divisible by --micro-batch-size 4: use 4",
    ),
    ("--rampup-batch-size 2 0 9 --global-batch-size 8", None, "--rampup-batch-size 0 is out of range"),
    (
        "--step-batch-size-schedule 1M:4",
        None,
        "schedule 1M:4 is not a schedule: pass TOKENS:SIZE entries whose",
    ),
    (
        "--step-batch-size-schedule 0:4 1M:8 --global-batch-size 4",
        None,
        "0:4 1M:8 ends with batches of 8 samples, but --global-batch-size is 4: pass --global-batch-size 8",
    ),
    (
        "--step-batch-size-schedule 0:4 1M:8 --rampup-batch-size 4 4 9",
        None,
        "0:4 1M:8 with --rampup-batch-size 4 4 9, which contradicts it: remove one",
    ),
    (
        "--step-batch-size-schedule 0:4 1M:6 2M:8 --micro-batch-size 4",
        None,
        "0:4 1M:6 2M:8: the size 6 is not divisible by --micro-batch-size 4: use 8, or change one of them",
    ),
    (
        "--step-batch-size-schedule 0:4 1M:8 --micro-batch-size 4 --pp 2 --pipeline-schedule interleaved "
        "--num-virtual-stages-per-pipeline-rank 2",
        2,
        "--step-batch-size-schedule with 4 makes 1 microbatch of --micro-batch-size 4",
    ),
    (
        "--seq-length 64 --seq-length-schedule 1K:64",
        None,
        "--seq-length-schedule 1K:64 is not a schedule: pass TOKENS:LENGTH entries whose tokens rise from 0",
    ),
    (
        "--seq-length 64 --seq-length-schedule 0:16 1K:32",
        None,
        "0:16 1K:32 ends with 32 tokens, but --seq-length is 64: pass --seq-length 32",
    ),
    (
        "--seq-length 64 --seq-length-schedule 0:24 1K:64",
        None,
        "has sequences of 24 tokens: pass lengths that divide --seq-length 64, such as 16",
    ),
    (
        "--seq-length 64 --seq-length-schedule 0:4 1K:64 --cp 4 --cp-comm-type p2p",
        4,
        "pass lengths that divide --seq-length 64 and are multiples of 8, which the layout needs, such as 8",
    ),
    (
        "--seq-length 64 --seq-length-schedule 0:2 1K:64 --mtp-num-layers 2 --position-embedding-type rope",
        None,
        "has sequences of 2 tokens: pass lengths that divide --seq-length 64, such as 4",
    ),
    (
        "--sft --seq-length 64 --seq-length-schedule 0:8 1K:64",
        None,
        "0:8 1K:64 with --sft, whose samples it would cut: remove it",
    ),
    ("--iterations-to-skip 5 9:7", None, "--iterations-to-skip 9:7 is not a range: pass FIRST:LAST"),
    (f"--iterations-to-skip {'9' * 5000}", None, "is not a range: pass FIRST:LAST"),
    (f"--step-batch-size-schedule 0:{'9' * 5000}", None, "is not a schedule: pass TOKENS:SIZE"),
    (f"--step-batch-size-schedule 0:1 {'9' * 400}:2", None, "is not a schedule: pass TOKENS:SIZE"),
    ("--iterations-to-skip 0:2", None, "--iterations-to-skip 0:2 is not a range"),
    ("--start-weight-decay 0.1", None, "--start-weight-decay 0.1 with --weight-decay-incr-style constant"),
    (
        "--weight-decay-incr-style linear --end-weight-decay 1",
        None,
        "--weight-decay-incr-style linear without --start-weight-decay",
    ),
    (
        "--weight-decay-incr-style cosine --start-weight-decay 1 --end-weight-decay .5",
        None,
        "--start-weight-decay 1.0 is above --end-weight-decay 0.5",
    ),
    ("--lr-decay-style WSD", None, "--lr-decay-style WSD needs --lr-wsd-decay-iters"),
    (
        "--lr-decay-style WSD --lr-wsd-decay-iters 101",
        None,
        "--lr-wsd-decay-iters 101 is above --train-iters 100: pass at most 100",
    ),
    ("--split 1,2,3,4", None, "--split 1,2,3,4 is not a split"),
    ("--split 0,0,0", None, "--split 0,0,0 is not a split"),
    ("--split a,b", None, "--split a,b is not a split"),
    ("--split=-1,2", None, "--split -1,2 is not a split"),
    (
        "--tokenizer-type GPT2BPETokenizer --vocab-file v",
        None,
        "tokenizer GPT2BPETokenizer needs --merge-file",
    ),
    ("--tokenizer-type HuggingFaceTokenizer", None, "--tokenizer-model or --tokenizer-name-or-path"),
    ("--tokenizer-type NullTokenizer", None, "the vocabulary size is unknown: pass --vocab-size"),
    ("--profile-execution", None, "--profile-execution without --tensorboard-dir"),
    (
        "--fp16 --min-loss-scale 4 --initial-loss-scale 2",
        None,
        "4.0 is above --initial-loss-scale 2.0: change one",
    ),
    ("--spiky-loss-factor 1", None, "--spiky-loss-factor 1.0 is out of range: it must be greater than 1"),
    ("--zero-stage 4", None, "--zero-stage 4 is out of range: it must be 0, 1, 2 or 3"),
    ("--grad-reduce-in-bf16 --params-dtype fp64", None, "which is meant to verify layouts: remove"),
    ("--grad-communication-dtype fp16 --bf16", None, "without fp16 weights, no loss scale"),
    ("--hidden-dropout 1", None, "--hidden-dropout 1.0 is out of range: it must be at least 0 and below 1"),
    ("--num-layers 0", None, "--num-layers 0 is out of range: it must be greater than 0"),
    ("--lr nan", None, "--lr nan is out of range"),
    ("--clip-grad inf", None, "--clip-grad inf is out of range"),
    ("--seed 4294967296", None, "--seed 4294967296 is out of range"),
    ("--qk-pos-emb-head-dim 3", None, "--qk-pos-emb-head-dim 3 is out of range: it must be even"),
    ("--pipeline-layers 12 0 --pp 2", 2, "--pipeline-layers 0 is out of range"),
]


@pytest.mark.parametrize(("line", "world_size", "expected"), RULES)
def test_each_rule_alone(line: str, world_size: int | None, expected: str) -> None:
    # The last --tokenizer-type counts, so a line may give its own.
    found = problems_with(line, world_size)
    assert len(found) == 1, found
    assert expected in found[0]
    assert ":" in found[0], "cause, then fix"


def test_every_batch_of_a_ramp_up_is_whole_microbatches() -> None:
    line = "--rampup-batch-size 2 3 9 --global-batch-size 8 --micro-batch-size 2"
    given, divisor = "--rampup-batch-size 2 3 9", "--micro-batch-size 2 x data-parallel size 2 = 4"
    assert problems_with(line, 2) == [
        f"{given}: the {what} is not divisible by {divisor}: use 4, or change one of them"
        for what in ("start 2", "increment 3")
    ]


SAMPLES = "--data-path p --tokenizer-type byte --train-samples 100 "


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--lr-decay-iters 5", "--lr-decay-iters 5 with --train-samples 100: a run is counted in"),
        ("--lr-warmup-iters 5", "--lr-warmup-iters 5 with --train-samples 100"),
        (
            "--lr-step-timing deepspeed",
            "--lr-step-timing deepspeed with --train-samples 100: it counts updates",
        ),
        ("--lr-warmup-samples 100", "--lr-warmup-samples 100 does not end before --train-samples 100"),
        ("--lr-decay-style WSD", "--lr-decay-style WSD needs --lr-wsd-decay-samples: pass the samples"),
        ("--global-batch-size 101", "--train-samples 100 is less than the first batch of 101"),
        ("--global-batch-size 101 --rampup-batch-size 1 1 9", None),
        ("--lr-decay-samples 50 --lr-warmup-fraction 0.1", None),
    ],
)
def test_a_run_counted_in_samples(line: str, expected: str | None) -> None:
    problems = mistakes_of(SAMPLES + line)
    assert len(problems) == (expected is not None)
    assert all(expected in problem for problem in problems)


@pytest.mark.parametrize(("line", "world_size", "expected"), RULES)
def test_messages_name_flags_that_exist(line: str, world_size: int | None, expected: str) -> None:
    for flag in re.findall(r"--[a-z][a-z-]*", problems_with(line, world_size)[0]):
        assert flag in fields_by_flag() or flag == "--nproc-per-node", flag


@pytest.mark.parametrize(
    ("line", "world_size"),
    [
        ("--tp 4 --num-attention-heads 8 --num-query-groups 2", 4),
        ("--tp 2 --num-query-groups 4", 8),
        ("--num-layers 7 --pp 2 --pipeline-layers 3 4", 2),
        ("--position-embedding-type alibi --seq-length 4096 --max-position-embeddings 64", 1),
        ("--kv-channels 80 --num-attention-heads 10", 1),
        ("--attention-backend flash --attention-dropout 0", 1),
        ("--attention-backend local", 1),
        ("--lr-warmup-iters 99", 1),
        ("--save x", 1),
        ("--eval-iters 0", 1),
        ("--split 100", 1),
        ("--split 0.9,0.05,0.05", 1),
        ("--micro-batch-size 3 --dp 2 --global-batch-size 12", None),
        ("--tp 8 --hidden-size 512 --num-attention-heads 8 --vocab-size 50257", 8),
    ],
)
def test_what_is_sound_is_let_through(line: str, world_size: int | None) -> None:
    assert problems_with(line, world_size) == []


def test_all_mistakes_are_told_at_once() -> None:
    found = problems_with(
        "--num-attention-heads 10 --num-layers 7 --pp 2 --tp 4 --global-batch-size 3 --micro-batch-size 2", 6
    )
    assert len(found) == 5


@pytest.mark.parametrize("wrong", ["window-attn-skip-freq", "moe-layer-freq", "no-rope-freq"])
@pytest.mark.parametrize("other", ["", "--recurrent-mixer gated_delta_net --linear-attention-freq 1,0,0,1"])
def test_a_pattern_of_another_length_is_refused_beside_others(wrong: str, other: str) -> None:
    patterns = {"window-attn-skip-freq": "2", "moe-layer-freq": "2", "no-rope-freq": "2", wrong: "1 0 1"}
    options = "--num-layers 4 --num-experts 4 --window-size 8,0 --position-embedding-type rope"
    flags = " ".join(f"--{name} {value}" for name, value in patterns.items())
    assert problems_with(f"{options} {flags} {other}", None) == [
        f"--{wrong} 1 0 1 has 3 numbers, not one for each of --num-layers 4: change one of them"
    ]


def test_ranks_of_experts_that_do_not_fit_the_world_hide_no_other_mistake() -> None:
    line = "--num-experts 8 --ep 8 --tp 2 --sequence-parallel --global-batch-size 3 --micro-batch-size 2"
    too_few, batch_size = problems_with(line, 8)
    assert too_few.startswith("world size 8 is not a multiple of --etp 2 x --ep 8 x --pp 1 = 16: start 16 ")
    assert batch_size.startswith("--global-batch-size 3 is not divisible by --micro-batch-size 2 x data-")


def test_a_wrong_value_does_not_bring_up_others() -> None:
    assert problems_with("--num-attention-heads 0 --tp 0 --micro-batch-size 0 --global-batch-size 7", 4) == [
        f"{name} 0 is out of range: it must be greater than 0 and below 2**31"
        for name in ("--num-attention-heads", "--tensor-model-parallel-size", "--micro-batch-size")
    ]


HUGE = f"1{'0' * 400}"


@pytest.mark.parametrize(
    "field", [field for field in config_fields() if field.kind.item is int], ids=lambda field: field.name
)
def test_a_whole_number_that_is_too_large_is_refused(field: ConfigField, tmp_path: Path) -> None:
    limit = f"takes a whole number of at most 2**63 - 1, not '{HUGE[:40]}... (401 characters)'"
    (tmp_path / "run.yaml").write_text(f"{field.name}: {HUGE}")
    yaml = f"{tmp_path / 'run.yaml'} line 1: {field.name}"
    for line, name in ((f"--config {tmp_path / 'run.yaml'}", yaml), (f"{flag_of(field.name)} {HUGE}", "")):
        with pytest.raises(ConfigError) as caught:
            parse(line.split())
        assert f"{name or flag_of(field.name)} {limit}" in caught.value.problems
    part = getattr(Config(), field.group)
    value = (10**400,) if field.kind.is_many else 10**400
    config = replace(Config(), **{field.group: replace(part, **{field.name: value})})
    (problem,) = range_problems(config)
    assert problem.text.endswith("... (401 characters) is out of range: it must be at most 2**63 - 1")


def test_suggestions_for_the_largest_size_are_found_at_once() -> None:
    (problem,) = problems_with(f"--hidden-size {2**31 - 1} --num-attention-heads 8", None)
    assert "pass --num-attention-heads 1 or 2147483647" in problem


def test_every_number_has_a_range_and_every_other_value_its_choices() -> None:
    for field in config_fields():
        assert field.declared.allowed is not None or field.kind.item not in (int, float), field.name
    config = Config(model=ModelConfig(normalization="Batch"))  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match="--normalization Batch is not known: choose one of LayerNorm, RMSNorm"
    ):
        check_config(config)


def test_choices_are_strings() -> None:
    for group in fields(Config):
        for hint in get_type_hints(type(getattr(Config(), group.name))).values():
            if get_origin(hint) is Literal:
                assert all(isinstance(choice, str) for choice in get_args(hint))


def test_tokenizers_are_those_that_can_be_built() -> None:
    from megalite.config.data import TokenizerType
    from megalite.data.tokenizers.tokenizer import TOKENIZER_TYPES

    assert set(get_args(TokenizerType)) == set(TOKENIZER_TYPES)


def test_derived_sizes() -> None:
    assert ModelConfig().ffn_size == 3072
    assert (
        ModelConfig(hidden_size=4096, activation="swiglu").ffn_size == 10944
    )  # 10922.67 up to a multiple of 64
    assert ModelConfig(hidden_size=64, activation="swiglu").ffn_size == 192
    assert ModelConfig(ffn_hidden_size=5).ffn_size == 5
    assert (ModelConfig().head_dim, ModelConfig(kv_channels=80).head_dim) == (64, 80)
    assert (ModelConfig().num_kv_heads, ModelConfig(num_query_groups=3).num_kv_heads) == (12, 3)
    assert (ModelConfig().num_positions, ModelConfig(max_position_embeddings=7).num_positions) == (1024, 7)


def test_batches() -> None:
    config = Config(
        parallel=ParallelConfig(2, 2), training=TrainingConfig(micro_batch_size=2, global_batch_size=24)
    )
    assert (config.global_batch(3), config.num_microbatches(3)) == (24, 4)
    alone = Config(training=TrainingConfig(micro_batch_size=2), optimizer=OptimizerConfig())
    assert (alone.global_batch(3), alone.num_microbatches(3)) == (6, 1)


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("--train-data-path p", None),
        ("--train-data-path p --valid-data-path q", None),
        ("--per-split-data-args-path f", None),
        ("--train-weighted-split-paths t --valid-weighted-split-paths-path f", None),
        ("--valid-data-path p", "--valid-data-path is set, but --train-data-path is not"),
        (
            "--test-weighted-split-paths-path f",
            "--test-weighted-split-paths-path is set, but --train-weighted-split-paths is not",
        ),
        (
            "--train-weighted-split-paths t --train-weighted-split-paths-path f",
            "--train-weighted-split-paths t with --train-weighted-split-paths-path f: both set the same",
        ),
        (
            "--train-data-path p --per-split-data-args-path f",
            "--train-data-path and --per-split-data-args-path both set the corpora",
        ),
    ],
)
def test_splits_given_apart(line: str, fault: str | None) -> None:
    problems = mistakes_of("--train-iters 100 --tokenizer-type byte " + line)
    assert len(problems) == (fault is not None)
    assert all(fault in problem for problem in problems)


def test_split_says_nothing_where_splits_are_given_apart() -> None:
    assert parse(["--train-data-path", "p", "--split", "1"])[1] == [
        "--split 1 has no effect: each split has its own data"
    ]


@pytest.mark.parametrize("flag", ["--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss"])
def test_ends_of_documents_take_a_tokenizer(flag: str) -> None:
    line = ["--train-iters", "1", "--vocab-size", "9", flag]
    with pytest.raises(ConfigError, match=f"{flag} without a tokenizer: pass the corpus's --tokenizer-type"):
        check_config(parse([*line, "--data-path", "p"])[0])
    check_config(parse([*line, "--mock-data"])[0])
    check_config(parse([*line, "--data-path", "p", "--tokenizer-type", "NullTokenizer"])[0])


def test_positions_that_restart_change_no_distances() -> None:
    line = ["--reset-position-ids", "--mock-data", "--position-embedding-type"]
    assert [bool(parse([*line, kind])[1]) for kind in ("alibi", "none", "rope", "learned_absolute")] == [
        *(True, True),
        *(False, False),
    ]


LOCAL_PATHS = {field.name for field in config_fields() if field.declared.allowed is LOCAL_PATH}
STORED = {field.name for field in config_fields() if field.declared.allowed is FOLDER_OR_URL}


def test_checkpoints_alone_can_be_in_object_storage() -> None:
    for flag in ("--save", "--load"):
        for store in ("s3", "gs", "az"):
            config, _ = parse([flag, f"{store}://bucket/run"])
            assert not any("is a URL" in each for each in problems_of(config, 1))
        (problem,) = [each for each in problems_of(parse([flag, "hf://b/run"])[0], 1) if "is a URL" in each]
        assert problem.endswith("on a mounted file system, or s3://BUCKET/FOLDER, gs://... or az://...")
    _, notices = parse(["--save", "here", "--save-stage", "there"])
    assert any("--save-stage" in each and "neither --save nor --load is a URL" in each for each in notices)


@pytest.mark.parametrize("name", sorted(LOCAL_PATHS))
def test_a_url_is_refused_where_a_path_is_needed(name: str) -> None:
    """Check paths of every kind: a URL would create a folder named `s3:` in the working directory."""
    flag = flag_of(name)
    config, _ = parse([flag, "s3://bucket/run"])
    (problem,) = [each for each in problems_of(config, 1) if "is a URL" in each]
    assert problem.startswith(f"{flag} s3://bucket/run is a URL: pass a path on this machine")
    config, _ = parse([flag, "bucket:/run"])
    assert not any("is a URL" in each for each in problems_of(config, 1))


def test_every_field_that_names_a_path_is_looked_at() -> None:
    texts = {field.name for field in config_fields() if field.kind.item is str and not field.kind.is_many}
    words = ("_path", "_dir", "_file", "_json", "save", "load")
    assert {name for name in texts if name.endswith(words)} <= LOCAL_PATHS | STORED


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("convert", "--load here --save s3://bucket/model"),
        ("train-tokenizer", "--input here --output gs://bucket/tokenizer.json"),
        ("show-schedule", "--svg file:///tmp/a.svg"),
        ("autotune", "--folder s3://bucket/tuning"),
        ("scaling", "--folder s3://bucket/scaling"),
        ("plan", "--gpu h100 --scaling 1,2 --svg s3://bucket/scaling.svg"),
        ("launch", "--nodes 1 --time 1:00:00 --output s3://bucket/job.sbatch"),
    ],
)
def test_a_tool_refuses_a_url_too(command: str, words: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="is a URL: pass a path on this machine"):
        main_of(command)(words.split())
    assert not list(tmp_path.iterdir())


OF_TWO_SLICES = ", in 2 slices for each of the --cp ranks (--cp-comm-type all_gather)"


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [
        (
            ParallelConfig(tensor_model_parallel_size=4, sequence_parallel=True),
            "--sequence-parallel with --seq-length 26, which is not divisible by --tp 4: use a multiple of "
            "it, such as 28, or another --tp",
        ),
        *(
            (
                ParallelConfig(
                    tensor_model_parallel_size=4,
                    context_parallel_size=2,
                    sequence_parallel=True,
                    cp_comm_type=comm_type,
                ),
                "--sequence-parallel with --seq-length 26, which is not divisible by --cp 2 x --tp 4"
                f"{slices}: use a multiple of it, such as 32, or another --tp",
            )
            for comm_type, slices in (("a2a", ""), ("all_gather", OF_TWO_SLICES))
        ),
    ],
)
def test_axes_that_cut_the_sequence_must_divide_its_length(parallel: ParallelConfig, expected: str) -> None:
    config = Config(model=ModelConfig(seq_length=26), parallel=parallel)
    assert [problem.text for problem in sequence(config, None)] == [expected]
    assert parallel.num_hidden_slices == parallel.mesh.num_position_slices * 4
    assert config.microbatch_tokens == 26 // parallel.mesh.num_position_slices


def test_no_shorter_length_is_proposed_where_none_fits_the_layout() -> None:
    line = "--cp 3 --cp-comm-type a2a --seq-length 32 --seq-length-schedule 0:16 1K:32"
    (problem,) = problems_with(line, 3)
    assert problem.startswith("--seq-length 32 is not divisible by --cp 3: use a multiple of it, such as 33")


def test_an_axis_cuts_the_sequence_without_sequence_parallelism() -> None:
    for comm_type, fitting, slices in (("a2a", 26, ""), ("all_gather", 28, OF_TWO_SLICES)):
        parallel = ParallelConfig(
            tensor_model_parallel_size=4, context_parallel_size=2, cp_comm_type=comm_type
        )
        assert parallel.num_hidden_slices == 2
        assert not [*sequence(Config(model=ModelConfig(seq_length=fitting), parallel=parallel), None)]
        (problem,) = sequence(Config(model=ModelConfig(seq_length=25), parallel=parallel), None)
        assert problem.text == (
            f"--seq-length 25 is not divisible by --cp 2{slices}: use a multiple of it, such as {fitting}, "
            "or another --cp"
        )


def test_ranks_that_share_samples_are_replicas_too() -> None:
    parallel = ParallelConfig(
        data_parallel_size=1, context_parallel_size=2, zero_stage=1, data_parallel_shard_degree=2
    )
    config = Config(parallel=parallel, training=TrainingConfig(micro_batch_size=4, global_batch_size=4))
    assert (sample_ranks(config, 2), replicas(config, 2)) == (1, 2)
    assert (sample_ranks(config, None), replicas(config, None)) == (1, 2)
    assert not [*shard_groups(config, 2), *batch(config, 2)]
    assert not [line for line in unused_options(config, 2) if "zero-stage" in line]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--qk-layernorm --qk-layernorm-width all_heads", "all_heads with --normalization LayerNorm: pass"),
        (
            "--position-embedding-type rope --rotary-percent 0.3 --kv-channels 10",
            "of a head of 10 is 3 elements",
        ),
        (
            "--position-embedding-type rope --no-rope-freq 1,0",
            "has 2 numbers, not one for each of --num-layers 12",
        ),
        (
            "--position-embedding-type rope --use-rope-scaling --rope-low-freq-factor 4",
            "--rope-low-freq-factor 4.0 is not below --rope-high-freq-factor 4.0: change one of them",
        ),
        (
            "--position-embedding-type rope --rope-scaling yarn --yarn-mscale 1",
            "have an effect only together",
        ),
        (
            "--norm-position output --recompute-granularity selective --recompute-modules layernorm",
            "layernorm with --norm-position output",
        ),
        (
            "--attn-logit-softcapping 30 --attention-dropout 0 --attention-backend flash",
            "--attention-backend flash, which cannot cap scores: pass",
        ),
        (
            "--softmax-type learnable --attention-dropout 0 --attention-backend flash",
            "--attention-backend flash, which has no sinks in its softmax: pass",
        ),
    ],
)
def test_options_of_attention_and_norms_are_checked(flags: str, problem: str) -> None:
    assert any(problem in found for found in problems_with(flags, None))


def test_options_of_conversations_have_no_effect_without_them() -> None:
    options: dict[str, Any] = {"sft_packing": False, "sft_long_conversations": "drop"}
    names = ["--no-sft-packing", "--sft-long-conversations drop"]
    lines = unused_options(Config(data=DataConfig(**options)))
    assert [f"{name} has no effect: --sft is not set" for name in names] == lines[-2:]
    lines = unused_options(Config(data=DataConfig(sft=True, mock_data=True, **options)))
    assert [line for line in lines if "--sft" in line] == [
        "--sft-long-conversations drop has no effect: --mock-data does not read a corpus"
    ]
    assert not unused_options(Config(data=DataConfig(sft=True, **options)))


def test_options_without_effect_name_the_other_option() -> None:
    without_window = ModelConfig(position_embedding_type="rope", window_rotary_base=100.0)
    assert unused_options(Config(model=without_window)) == [
        "--window-rotary-base 100.0 has no effect: --window-size is not set"
    ]
    lines = unused_options(Config(model=ModelConfig(add_qkv_bias=True, rope_scaling_factor=2.0)))
    assert "--add-qkv-bias has no effect: it needs --disable-bias-linear" in lines
    assert (
        "--rope-scaling-factor 2.0 has no effect: --rope-scaling is none, not linear or llama3 or yarn"
        in lines
    )


OWN_GROUPS = (
    "--cp 4 --num-attention-heads 12 --num-query-groups 3 --full-attention-query-groups 1 --window-size 8 0 "
    "--window-attn-skip-freq 2"
)


@pytest.mark.parametrize(
    ("tp", "cp", "heads", "groups", "expected"),
    [
        (1, 4, 8, 2, ""),
        (2, 2, 8, 2, ""),
        (1, 3, 8, 2, "the 8 query and 2 key/value heads cannot be split: use --cp 2, or "),
        (2, 4, 12, 2, "the 6 query and 1 key/value heads of each of 2 tensor-parallel ranks .* --cp 3, or "),
    ],
)
def test_exchanged_heads_are_divided(tp: int, cp: int, heads: int, groups: int, expected: str) -> None:
    parallel = ParallelConfig(tp, context_parallel_size=cp, cp_comm_type="a2a")
    model = ModelConfig(num_attention_heads=heads, num_query_groups=groups, hidden_size=heads * 8)
    problems = [problem.text for problem in exchanged_heads(Config(model=model, parallel=parallel), None)]
    assert len(problems) == bool(expected)
    assert all(re.search(f"{expected}--cp-comm-type all_gather", problem) for problem in problems)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--cp 4", ""),
        ("--cp 8 --hierarchical-context-parallel-sizes 2 4", ""),
        ("--cp 2", "--cp 2: it needs two sizes above 1, of product 2; pass --cp-comm-type a2a or p2p"),
        ("--cp 4 --tp 8", "--cp 4: .*; pass --hierarchical-context-parallel-sizes 2 2"),
        ("--cp 8 --hierarchical-context-parallel-sizes 4 1", "sizes 4 1: .*; pass .*-sizes 2 4 or 4 2"),
        ("--cp 4 --hierarchical-context-parallel-sizes 3 2", "sizes 3 2: .*; pass .*-sizes 2 2"),
        ("--cp 8 --hierarchical-context-parallel-sizes 8 1", "sizes 8 1: .*; pass .*-sizes 2 4 or 4 2"),
        ("--cp 8 --hierarchical-context-parallel-sizes 2 2 2", "sizes 2 2 2: .*; pass .*-sizes 2 4 or 4 2"),
        (
            "--cp 16 --hierarchical-context-parallel-sizes 8 2 --num-attention-heads 12",
            "-sizes 8 2, over which the 12 query and 12 key/value heads cannot be split: use "
            "--hierarchical-context-parallel-sizes 4 4 or --cp-comm-type p2p",
        ),
        (
            "--cp 4 --num-attention-heads 3 --hidden-size 48",
            "-sizes 2 2, over which the 3 query .* use --cp-comm-type p2p",
        ),
        (
            "--cp 4 --compile",
            "--compile with --cp-comm-type a2a\\+p2p is not supported: .* all_gather or a2a",
        ),
        (
            "--cp 4 --hidden-dropout 0 --reset-attention-mask --dynamic-context-parallel",
            "--dynamic-context-parallel with --cp-comm-type a2a\\+p2p, .*: pass --cp-comm-type p2p",
        ),
        ("--cp 4 --seq-length 36", "36 is not divisible by --cp 4, in 2 slices .* a2a\\+p2p"),
    ],
)
def test_neighbours_exchange_heads_in_a_ring_of_two_groups_or_more(line: str, expected: str) -> None:
    config, _ = parse(
        f"--preset gpt-tiny --num-attention-heads 8 --seq-length 96 --cp-comm-type a2a+p2p {line}".split()
    )
    rules = conflicts, context_levels, exchanged_heads, assigned_documents, sequence
    problems = [problem.text for rule in rules for problem in rule(config, None)]
    assert len(problems) == bool(expected)
    assert all(re.search(expected, problem) for problem in problems)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--cp 2 --cp-comm-type p2p a2a p2p all_gather", ""),
        (
            "--cp 2 --cp-comm-type p2p a2a",
            "^--cp-comm-type has 2 values, not one for each of --num-layers 4: pass one for all layers, or",
        ),
        ("--cp-comm-type p2p a2a p2p", "^--cp-comm-type has 3 values, not one for each of --num-layers 4: "),
        (
            "--cp 2 --compile --cp-comm-type a2a a2a p2p a2a",
            "^--compile with --cp-comm-type a2a a2a p2p a2a is not supp",
        ),
        (
            "--cp 2 --reset-attention-mask --dynamic-context-parallel --cp-comm-type p2p p2p p2p a2a",
            "^--dynamic-context-parallel with --cp-comm-type p2p p2p p2p a2a, whose messages .* pass --cp",
        ),
        ("--cp 4 --cp-comm-type a2a a2a a2a a2a+p2p --seq-length 36", "in 2 slices .* a2a\\+p2p"),
        ("--cp 2 --cp-comm-type a2a a2a a2a a2a+p2p", "^--cp-comm-type a2a\\+p2p with --cp 2: it needs two"),
        (
            "--cp 4 --cp-comm-type a2a p2p p2p p2p --num-attention-heads 6",
            "a2a with --cp 4, over which the ",
        ),
        # Two layers have a window, and the others one key/value head, which any number of ranks can share.
        (f"{OWN_GROUPS} --cp-comm-type p2p a2a p2p a2a", ""),
        (
            f"{OWN_GROUPS} --cp-comm-type a2a p2p a2a p2p",
            "a2a with --cp 4, over which the 12 query and 3",
        ),
    ],
)
def test_each_layer_may_have_a_comm_type_of_its_own(line: str, expected: str) -> None:
    config, _ = parse(f"--preset gpt-tiny --hidden-size 96 --seq-length 96 {line}".split())
    rules = (
        *(conflicts, context_levels, comm_types_of_layers, exchanged_heads),
        *(assigned_documents, sequence),
    )
    problems = [problem.text for rule in rules for problem in rule(config, None)]
    assert len(problems) == bool(expected)
    assert all(re.search(expected, problem) for problem in problems)


def test_a_ring_refuses_what_it_cannot_do() -> None:
    parallel = ParallelConfig(context_parallel_size=2, cp_comm_type="p2p")
    model = ModelConfig(num_attention_heads=4, hidden_size=32, seq_length=30, qk_clip=True)
    config = Config(model=model, parallel=parallel, training=TrainingConfig(compile=True))
    texts = [problem.text for problem in conflicts(config, None)]
    assert [text.partition(" is ")[0] for text in texts if "cp-comm-type p2p" in text] == [
        "--qk-clip with --cp-comm-type p2p",
        "--compile with --cp-comm-type p2p",
    ]
    (problem,) = sequence(config, None)
    assert problem.text == (
        "--seq-length 30 is not divisible by --cp 2, in 2 slices for each of the --cp ranks (--cp-comm-type "
        "p2p): use a multiple of it, such as 32, or another --cp"
    )
    alone = replace(config, parallel=ParallelConfig(cp_comm_type="p2p"))
    assert not any("cp-comm-type" in problem.text for problem in conflicts(alone, None))
    assert not [*sequence(alone, None)]
