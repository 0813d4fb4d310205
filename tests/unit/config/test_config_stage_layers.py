"""Layers of pipeline stages, compared with Megatron-LM's own function, and splits that are rejected."""

from __future__ import annotations

import re
import shlex
import warnings
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.config import Config, ModelConfig, ParallelConfig, TrainingConfig, check_config
from megalite.config.config import balanced_partition, layers_of_stages, layers_per_stage, num_chunks
from megalite.config.fields import fields_by_flag
from megalite.frontends.command_line import parse
from megalite.utils.errors import ConfigError
from tests.command_line import mistakes_of

ENOUGH = "--train-iters 100 --data-path p --tokenizer-type byte --global-batch-size 64 "


def problems_with(line: str, world_size: int | None = None) -> list[str]:
    return mistakes_of(ENOUGH + line, world_size)


def split(line: str) -> tuple[int, ...]:
    config, _ = parse(shlex.split(ENOUGH + line))
    check_config(config)
    return layers_per_stage(config)


SPLITS = st.one_of(
    st.fixed_dictionaries({}),
    st.fixed_dictionaries({"decoder_first_pipeline_num_layers": st.integers(1, 8)}),
    st.fixed_dictionaries({"decoder_last_pipeline_num_layers": st.integers(1, 8)}),
    st.fixed_dictionaries(
        {
            "decoder_first_pipeline_num_layers": st.integers(1, 8),
            "decoder_last_pipeline_num_layers": st.integers(1, 8),
        }
    ),
    st.fixed_dictionaries(
        {
            "account_for_embedding_in_pipeline_split": st.booleans(),
            "account_for_loss_in_pipeline_split": st.booleans(),
        }
    ),
)


def megatrons(layers: int, pp: int, chunks: int, parallel: ParallelConfig) -> list[int] | None:
    """Return the layers of each stage in Megatron-LM, None if it rejects the config."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.transformer.transformer_block import get_num_layers_to_build
    config = SimpleNamespace(
        num_layers=layers,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        pipeline_model_parallel_layout=None,
        num_layers_in_first_pipeline_stage=parallel.decoder_first_pipeline_num_layers,
        num_layers_in_last_pipeline_stage=parallel.decoder_last_pipeline_num_layers,
        account_for_embedding_in_pipeline_split=parallel.account_for_embedding_in_pipeline_split,
        account_for_loss_in_pipeline_split=parallel.account_for_loss_in_pipeline_split,
    )
    try:
        return [
            get_num_layers_to_build(config, chunk if chunks > 1 else None, rank)
            for chunk in range(chunks)
            for rank in range(pp)
        ]
    except AssertionError:
        return None


@given(st.integers(1, 24), st.integers(2, 6), st.integers(1, 3), SPLITS)
def test_splits_are_megatrons(layers, pp, chunks, options):
    parallel = ParallelConfig(
        pipeline_model_parallel_size=pp,
        num_virtual_stages_per_pipeline_rank=chunks if chunks > 1 else None,
        **options,
    )
    config = Config(ModelConfig(num_layers=layers), parallel, training=TrainingConfig(global_batch_size=64))
    try:
        check_config(config)
    except ConfigError as error:
        # What is message besides the split is that the config has no corpus, length or vocabulary.
        refused = any("layers" in problem or "pipeline" in problem for problem in error.problems)
    expected = megatrons(layers, pp, chunks, parallel)
    if not refused:
        assert list(layers_per_stage(config)) == expected
        assert sum(layers_per_stage(config)) == layers
    elif expected is not None:
        assert sum(expected) != layers or min(expected) <= 0  # it would lose layers, or have idle ranks


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--pp 4 --num-layers 8", (2, 2, 2, 2)),
        ("--pp 2 --num-layers 8 --num-layers-per-virtual-pipeline-stage 1", (1,) * 8),
        ("--pp 2 --num-layers 8 --pipeline-schedule interleaved", (2, 2, 2, 2)),
        ("--pp 2 --num-layers 8 --pipeline-schedule zb-v --pipeline-layers 1 3 3 1", (1, 3, 3, 1)),
        ("--pp 3 --num-layers 8 --pp-partition-method uniform", (3, 3, 2)),
        ("--pp 3 --num-layers 8 --pp-partition-method type:transformer", (3, 3, 2)),
        ("--pp 2 --num-layers 8 --pp-partition-method type:transformer --vocab-size 300", (4, 4)),
        ("--pp 4 --num-layers 6 --account-for-embedding-in-pipeline-split"
         " --account-for-loss-in-pipeline-split", (1, 2, 2, 1)),
    ],
)  # fmt: skip
def test_a_split(line, expected):
    assert split(line) == expected


def test_blooms_own_split():
    """Check 70 layers on 12 ranks: the embedding and the tied output count as a layer each."""
    line = (
        "--num-layers 70 --pp 12 --num-attention-heads 8 --pp-partition-method 'type:transformer|embedding'"
    )
    assert split(line) == (5, *[6] * 10, 5)


def test_parameters_balance_the_word_table():
    """Check that a table of 24 h rows counts as two layers of 12 h^2 parameters."""
    line = "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --pp 3 --pp-partition-method parameters "
    assert split(line + f"--vocab-size {24 * 64} --pad-vocab-size-to {24 * 64}") == (2, 4, 2)


def test_parameters_balance_modules_of_later_tokens():
    """Check that a module counts as a layer of 12 h^2 parameters and a projection of 2 h^2."""
    line = "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --pp 3 --pp-partition-method parameters "
    line += f"--position-embedding-type rope --vocab-size {24 * 64} --pad-vocab-size-to {24 * 64} "
    assert split(line + "--mtp-num-layers 1") == (3, 4, 1)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.data())
def test_a_balanced_partition_is_the_best_of_all(weights, data):
    stages = data.draw(st.integers(1, len(weights)))
    before, after = data.draw(st.tuples(st.integers(0, 20), st.integers(0, 20)))

    def cost(counts):
        starts = [sum(counts[:stage]) for stage in range(stages)]
        sums = [sum(weights[s : s + n]) for s, n in zip(starts, counts, strict=True)]
        sums[0] += before
        sums[-1] += after
        return max(sums)

    def all_counts(layers, parts):
        if parts == 1:
            return [(layers,)]
        heads = range(1, layers - parts + 2)
        return [(head, *rest) for head in heads for rest in all_counts(layers - head, parts - 1)]

    found = balanced_partition(weights, stages, before, after)
    assert sum(found) == len(weights) and min(found) > 0
    assert cost(found) == min(cost(counts) for counts in all_counts(len(weights), stages))


RULES = [
    (
        "--num-virtual-stages-per-pipeline-rank 2",
        None,
        "2 with --pp 1: one rank has no pipeline, remove it or",
    ),
    (
        "--pp 2 --num-virtual-stages-per-pipeline-rank 2 --num-layers-per-virtual-pipeline-stage 2",
        None,
        "set the same thing: pass one of them",
    ),
    (
        "--pp 2 --num-layers-per-virtual-pipeline-stage 5",
        None,
        "--num-layers-per-virtual-pipeline-stage 5 x --pp 2 does not divide --num-layers 12",
    ),
    ("--pp 2 --num-layers-per-virtual-pipeline-stage 6", None, "leaves one chunk on each rank: it needs two"),
    (
        "--pp 2 --pipeline-schedule gpipe --num-virtual-stages-per-pipeline-rank 2",
        None,
        "with --pipeline-schedule gpipe, which has 1 chunk on each rank: remove it, or use interleaved",
    ),
    (
        "--pp 2 --pipeline-schedule zb-v --num-virtual-stages-per-pipeline-rank 3",
        None,
        "with --pipeline-schedule zb-v, which has 2 chunks on each rank",
    ),
    (
        "--pp 4 --num-virtual-stages-per-pipeline-rank 2",
        None,
        "--num-layers 12 is not divisible by the 8 stages of --pp 4 x 2 chunks: change one of them, or set "
        "the layers of each stage, as in --pipeline-layers 2 2 2 2 1 1 1 1",
    ),
    (
        "--pp 4 --num-virtual-stages-per-pipeline-rank 4",
        None,
        "fewer than the 16 stages of --pp 4 x 4 chunks",
    ),
    (
        "--pp 2 --pipeline-schedule zb-v --pipeline-layers 6 6",
        None,
        "names 2 stages, but there are the 4 stages of --pp 2 x 2 chunks: pass one number per stage",
    ),
    (
        "--pp 2 --pipeline-layers 4 8 --decoder-first-pipeline-num-layers 4",
        None,
        "--pipeline-layers 4 8 and --decoder-first-pipeline-num-layers 4 split the layers in different ways",
    ),
    (
        "--pp 2 --account-for-embedding-in-pipeline-split --pp-partition-method uniform",
        None,
        "--account-for-embedding-in-pipeline-split and --pp-partition-method uniform split the layers in",
    ),
    (
        "--pp 3 --decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 3 --num-layers 13",
        None,
        None,
    ),
    (
        "--pp 4 --decoder-first-pipeline-num-layers 4",
        None,
        "--num-layers 12 leave 8 layers to the other 3 of --pp 4 ranks, which must have equal numbers",
    ),
    (
        "--pp 3 --decoder-first-pipeline-num-layers 2 --num-virtual-stages-per-pipeline-rank 2",
        None,
        "make ranks of 2 5 5 layers, not all divisible by 2 chunks",
    ),
    (
        "--pp 2 --decoder-first-pipeline-num-layers 4 --num-layers-per-virtual-pipeline-stage 2",
        None,
        "makes chunks of different sizes: pass --num-virtual-stages-per-pipeline-rank",
    ),
    (
        "--pp 2 --decoder-first-pipeline-num-layers 4 --pipeline-schedule zb-v",
        None,
        "with --pipeline-schedule zb-v, whose first rank holds both ends: pass --pipeline-layers",
    ),
    ("--pp 5 --account-for-loss-in-pipeline-split", None, "(together 13) is not divisible by --pp 5"),
    (
        "--pp 2 --pp-partition-method best",
        None,
        "best is not known: choose uniform, parameters or type:REGEX",
    ),
    (
        "--pp 2 --pp-partition-method type:(",
        None,
        "type:( is not known: choose uniform, parameters or type:REGEX",
    ),
    (
        "--pp 2 --pp-partition-method type:mlp",
        None,
        "type:mlp is not known: choose uniform, parameters or type:REGEX, where REGEX matches Pa",
    ),
    (
        "--pp 4 --dp 16 --pipeline-layers 1 1 2 2 2 2 1 1 --num-virtual-stages-per-pipeline-rank 2 "
        "--micro-batch-size 2",
        64,
        "--global-batch-size 64 makes 2 microbatches of --micro-batch-size 2 on each of 16 replicas, but an "
        "interleaved schedule needs one for each of --pp 4 ranks",
    ),
    (
        "--pp 2 --num-virtual-stages-per-pipeline-rank 2 --rampup-batch-size 1 1 99",
        None,
        "--rampup-batch-size from 1 makes 1 microbatch",
    ),
]


@pytest.mark.parametrize(("line", "world_size", "expected"), [*RULES])
def test_each_rule_alone(line, world_size, expected):
    problems = problems_with(line.replace("type:(", "'type:('"), world_size)
    if expected is None:
        assert problems == []
        return
    assert len(problems) == 1, problems
    assert expected in problems[0]
    for flag in re.findall(r"--[a-z][a-z-]*", problems[0]):
        assert flag in fields_by_flag(), flag


def test_all_that_is_wrong_is_told_at_once():
    problems = problems_with(
        "--pp 2 --num-virtual-stages-per-pipeline-rank 5 --pp-partition-method best --tp 5", 2
    )
    assert len(problems) >= 3, problems


@pytest.mark.parametrize(
    ("line", "schedule", "chunks"),
    [
        ("--pp 2", "1f1b", 1),
        ("--pp 2 --num-virtual-stages-per-pipeline-rank 1", "1f1b", 1),
        ("--pp 2 --num-virtual-stages-per-pipeline-rank 3", "interleaved", 3),
        ("--pp 2 --num-layers-per-virtual-pipeline-stage 2", "interleaved", 3),
        ("--pp 2 --pipeline-schedule interleaved", "interleaved", 2),
        ("--pp 2 --pipeline-schedule zb-v", "zb-v", 2),
        ("--pp 4 --pipeline-schedule zb-h1", "zb-h1", 1),
        ("--pipeline-schedule gpipe", "1f1b", 1),
    ],
)
def test_chunks_of_a_schedule(line, schedule, chunks):
    config, _ = parse(shlex.split(ENOUGH + line))
    check_config(config)
    assert (config.parallel.schedule, num_chunks(config)) == (schedule, chunks)


@given(st.lists(st.integers(0, 5), min_size=1))
def test_layers_are_consecutive(counts):
    stages = layers_of_stages(sum(counts), counts)
    assert [layer for stage in stages for layer in stage] == list(range(sum(counts)))
    assert [len(stage) for stage in stages] == counts


@pytest.mark.parametrize("counts", [(1, 1), (2, 2, 2)])
def test_a_layer_is_never_lost(counts):
    with pytest.raises(AssertionError):
        layers_of_stages(5, counts)
