"""The command lines that users bring along."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from megalite.cli import parse
from megalite.errors import ConfigError
from tests.unit.config.lines import BLOOM, BLOOM_176B_ADDS, BLOOM_DEEPSPEED, COURSE

NOT_YET_IN_BLOOM = ["--bf16", "--checkpoint-activations", "--deepspeed-activation-checkpointing"]
NOT_YET_IN_176B = [
    "--train-samples",
    "--lr-decay-samples",
    "--lr-warmup-samples",
    "--rampup-batch-size",
    "--kill-switch-path",
]


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds_config.json").write_text(json.dumps(BLOOM_DEEPSPEED))
    return tmp_path


def without(line: str, *flags: str) -> list[str]:
    """The words of a line less these flags and their values."""
    kept, skipping = [], False
    for word in shlex.split(line):
        skipping = word in flags if word.startswith("--") else skipping
        if not skipping:
            kept.append(word)
    return kept


def test_the_course_script_is_accepted_whole() -> None:
    config, notices = parse(shlex.split(COURSE))
    config.validate(world_size=4)
    assert (config.parallel.tp, config.parallel.pp, config.model.num_attention_heads) == (2, 2, 32)
    assert config.optimizer.lr_warmup_fraction == 0.01
    assert config.optimizer.weight_decay == 0.1
    assert config.logging.profile_execution is True
    assert config.logging.profile_name == "TP_PP"
    assert config.data.resolved_tokenizer_type == "GPT2BPETokenizer"
    assert config.data.data_path == ("PREFIX",)
    assert config.training.exit_duration_in_mins == 1190
    assert [notice.split()[0] for notice in notices] == ["--data-impl", "--distributed-backend"]


def test_the_bloom_job_is_refused_by_name_and_for_nothing_else(in_folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(shlex.split(BLOOM))
    assert [problem.split()[0] for problem in caught.value.problems] == NOT_YET_IN_BLOOM
    assert all("is not in this version" in problem for problem in caught.value.problems)


def test_the_bloom_job_runs_less_what_is_refused(in_folder: Path) -> None:
    (in_folder / "ds_config.json").write_text(json.dumps({**BLOOM_DEEPSPEED, "bf16": {"enabled": False}}))
    config, notices = parse(without(BLOOM, *NOT_YET_IN_BLOOM, "--loss-scale"))
    config.validate(world_size=8)
    assert config.data.data_path == ("0.033178301", "ar_text_document", "0.0112", "ca_text_document")
    assert config.model.embed_layernorm
    assert config.model.head_dim == 448
    told = " ".join(notices)
    for flag in (
        "--data-impl",
        "--deepspeed ",
        "--zero-stage 0",
        "--sync-tp-duplicated-parameters",
        "--abort-on-unmet-fused-kernel-constraints",
        "--pp-partition-method type:transformer|embedding",
        "steps_per_print, wall_clock_breakdown",
        "--max-position-embeddings 2048 is without effect",
    ):
        assert flag in told, flag


def test_the_176b_script_is_refused_by_name(in_folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(without(BLOOM, "--data-path", "--split") + shlex.split(BLOOM_176B_ADDS))
    assert [problem.split()[0] for problem in caught.value.problems] == NOT_YET_IN_BLOOM + NOT_YET_IN_176B


def test_workers_are_accepted_and_told() -> None:
    _, notices = parse(shlex.split("--num-workers 2 --valid-num-workers 0"))
    assert [notice.split()[0] for notice in notices] == ["--num-workers", "--valid-num-workers"]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("--zero-stage 1", "--zero-stage 1 (sharded optimizer state) is not in this version"),
        ("--loss-scale 15", "--loss-scale 15 (loss scaling for fp16) is not in this version"),
        ("--data-impl lazy", "--data-impl takes mmap alone in this version, not lazy"),
        ("--pp 2 --pp-partition-method 'type:transformer|embedding'", "--pipeline-layers"),
        ("--num-workers", "--num-workers takes one value"),
        ("--sync-tp-duplicated-parameters 3", "takes no value"),
        ("--group-query-attention", "--group-query-attention needs --num-query-groups"),
        ("--sequence-parallel", "--sequence-parallel (sequence parallelism) is not in this version"),
        ("--deepspeed_config", "--deepspeed_config takes one value"),
    ],
)
def test_a_value_that_is_not_how_things_are_is_refused(line: str, told: str, problems) -> None:
    assert told in problems(line)[0]


def test_loss_scale_with_bf16_is_no_mistake_by_itself(problems) -> None:
    assert not any("--loss-scale" in problem for problem in problems("--bf16 --loss-scale 15"))


def test_local_rank_must_be_the_environments(problems, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert parse(["--local_rank=2"])[1] == []
    assert "LOCAL_RANK=2" in problems("--local-rank 0")[0]


@pytest.mark.parametrize(
    ("changes", "line", "told"),
    [
        ({"gradient_clipping": 0.5}, "", ["gradient_clipping is 0.5", "--clip-grad is 1.0"]),
        ({"train_batch_size": 8}, "", ["train_batch_size is 8", "--global-batch-size is 16"]),
        ({"train_micro_batch_size_per_gpu": 4}, "", ["per_gpu is 4", "--micro-batch-size is 2"]),
        ({"zero_optimization": {"stage": 1}}, "", ["zero_optimization.stage 1", "not in this version"]),
        ({"zero_optimization": {"stage": 1}}, "--zero-stage 0", ["stage is 1", "--zero-stage is 0"]),
        ({"bf16": {"enabled": True}}, "", ["bf16.enabled is true", "--bf16 is not given"]),
        ({"fp16": {"enabled": False}}, "--fp16", ["fp16.enabled is not true", "--fp16 is given"]),
        ({"gradient_accumulation_steps": 3}, "--dp 2", ["gradient_accumulation_steps is 3", "is 4"]),
    ],
)
def test_a_deepspeed_file_that_disagrees_names_both(
    changes: dict, line: str, told: list[str], problems, tmp_path: Path
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({**BLOOM_DEEPSPEED, "bf16": {"enabled": False}, **changes}))
    found = problems(f"--micro-batch-size 2 --global-batch-size 16 --deepspeed_config {path} {line}")
    (conflict,) = (problem for problem in found if str(path) in problem)
    assert all(words in conflict for words in told), conflict


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_deepspeed_file_that_is_none(content: str | None, problems, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    if content is not None:
        path.write_text(content)
    assert str(path) in problems(f"--deepspeed-config {path}")[0]
