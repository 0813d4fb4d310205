"""Command lines of users' existing scripts."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from megalite.config import RecomputeConfig, check_config
from megalite.config.data import split_weights, tokenizer_type_for
from megalite.frontends.command_line import parse
from megalite.utils.errors import ConfigError
from tests.unit.frontends.megatron.lines import (
    BLOOM,
    BLOOM_176B_ADDS,
    BLOOM_DEEPSPEED,
    COURSE,
    example_scripts,
)

COMPLETE = "--mock-data --vocab-size 64 --train-iters 2"


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds_config.json").write_text(json.dumps(BLOOM_DEEPSPEED))
    return tmp_path


def without(line: str, *flags: str) -> list[str]:
    """Return the tokens of a line without these flags and their values."""
    kept, skipping = [], False
    for word in shlex.split(line):
        skipping = word in flags if word.startswith("--") else skipping
        if not skipping:
            kept.append(word)
    return kept


def test_the_course_script_is_accepted_whole() -> None:
    config, notices = parse(shlex.split(COURSE))
    check_config(config, world_size=4)
    assert (config.parallel.tp, config.parallel.pp, config.model.num_attention_heads) == (2, 2, 32)
    assert config.optimizer.lr_warmup_fraction == 0.01
    assert config.optimizer.weight_decay == 0.1
    assert config.logging.profile_execution is True
    assert config.logging.profile_name == "TP_PP"
    assert config.data.resolved_tokenizer_type == "GPT2BPETokenizer"
    assert config.data.data_path == ("PREFIX",)
    assert config.training.exit_duration_in_mins == 1190
    assert [notice.split()[0] for notice in notices] == ["--data-impl", "--distributed-backend"]


def test_the_course_recomputes_all_layers_by_an_older_flag() -> None:
    words = ["--fp16", "--activations-checkpoint-method", "block", "--activations-checkpoint-num-layers", "3"]
    config, _ = parse([*shlex.split(COURSE), *words])
    assert config.recompute == RecomputeConfig("full", "block", 3)
    with pytest.raises(ConfigError) as caught:
        parse([*words, "--recompute-granularity", "selective"])
    assert caught.value.problems[0].endswith(
        "--recompute-granularity selective set the same option: remove one"
    )


def test_the_bloom_job_is_accepted_whole(in_folder: Path) -> None:
    config, notices = parse(shlex.split(BLOOM))
    check_config(config, world_size=8)
    assert config.data.data_path == ("0.033178301", "ar_text_document", "0.0112", "ca_text_document")
    assert config.model.embed_layernorm
    assert (config.model.params_dtype, config.parallel.zero_stage) == ("bf16", 0)
    assert config.recompute.recompute_granularity == "full"
    assert config.recompute.groups(2) == [(range(1), True), (range(1, 2), True)]
    assert config.model.head_dim == 448
    message = " ".join(notices)
    for flag in (
        "--data-impl",
        "--deepspeed ",
        "--zero-stage 0: every data-parallel rank holds the whole optimizer state. BLOOM's bf16",
        "--loss-scale 15.0 has no effect: only --fp16 has a loss scale",
        "--sync-tp-duplicated-parameters",
        "--abort-on-unmet-fused-kernel-constraints",
        "--pp-partition-method type:transformer|embedding",
        "steps_per_print is 2000, but --log-interval 1 is used",
        "--max-position-embeddings 2048 has no effect",
    ):
        assert flag in message, flag


def test_the_176b_script(in_folder: Path) -> None:
    (in_folder / "ds_config.json").write_text(json.dumps({**BLOOM_DEEPSPEED, "train_batch_size": 2048}))
    job = without(BLOOM, "--data-path", "--split", "--train-iters", "--global-batch-size")
    config, _ = parse([*job, "--global-batch-size", "2048", *shlex.split(BLOOM_176B_ADDS)])
    assert config.training.kill_switch_path == "FILE"
    assert config.training.rampup_batch_size == (192, 16, 9_765_625)


def megatron(path: str) -> list[str]:
    return example_scripts()[f"NVIDIA/Megatron-LM/examples/{path}"].flags


def test_megatrons_example_of_gpt3_is_accepted_whole() -> None:
    config, notices = parse(megatron("gpt3/train_gpt3_175b_distributed.sh"))
    check_config(config, world_size=128)
    assert (config.parallel.tp, config.parallel.pp, config.training.global_batch_size) == (8, 16, 1536)
    assert config.training.step_batch_size_schedule is not None
    assert config.training.step_batch_size_schedule[0] == "0:16"
    assert config.batch_size(1)(0) == 16
    assert notices == []


def test_megatrons_example_of_llama_is_accepted_whole() -> None:
    config, notices = parse(megatron("llama/train_llama3_8b_h100_fp8.sh"))
    check_config(config, world_size=8)
    assert (config.optimizer.decoupled_lr, config.optimizer.decoupled_min_lr) == (5e-4, 4.5e-5)
    assert (config.training.fp8_format, config.parallel.zero_stage) == ("hybrid", 1)
    assert split_weights(config.data.split) == [99, 1, 0]
    assert all(" is not needed: " in notice or " has no effect: " in notice for notice in notices)


def test_megatrons_example_of_bert_is_accepted_but_for_its_stages() -> None:
    """Its 16 stages do not divide 24 layers."""
    flags = [*megatron("bert/train_bert_340m_distributed.sh"), "--override-flags", "--pp", "1"]
    config, notices = parse(flags, architecture="bert")
    check_config(config, world_size=8)
    assert config.data.resolved_tokenizer_type == "BertWordPieceLowerCase"
    assert notices == []


@pytest.mark.parametrize(
    ("line", "notice"),
    [
        ("--train-sync-interval 1", "--train-sync-interval 1 is not needed: cached memory"),
        ("--no-mmap-bin-files", "--no-mmap-bin-files is not needed: files are memory-mapped"),
        ("--cross-entropy-loss-fusion", "--cross-entropy-loss-fusion is not needed: the fastest kernel"),
        (
            "--calculate-per-token-loss",
            "--calculate-per-token-loss is not needed: the loss is always the mean",
        ),
        ("--no-pipeline-parallel", "--no-pipeline-parallel is not needed: --pipeline-model-parallel-size 1"),
        ("--ds-sequence-parallel-size 1", "--ds-sequence-parallel-size 1 is not needed: it is always so"),
        ("--use-flash-attn", "--use-flash-attn is not needed: the fastest attention"),
        ("--disable-tp-comm-bulk-wgrad", "--disable-tp-comm-bulk-wgrad is not needed: tensor-parallel comm"),
        ("--no-rl-use-sequence-packing", "--no-rl-use-sequence-packing is not needed: it is always so"),
        ("--moe-loss-coeff 0.01", "--moe-loss-coeff 0.01 has no effect: the model has no experts"),
        ("--cuda-graph-modules attn mlp", "--cuda-graph-modules attn mlp is not needed: CUDA graphs"),
        ("--ckpt-format torch_dist", "--ckpt-format torch_dist is not needed: checkpoints are checksummed"),
    ],
)
def test_flags_that_change_nothing_are_accepted_with_the_reason(line: str, notice: str) -> None:
    _, notices = parse(shlex.split(line))
    assert len(notices) == 1
    assert notices[0].startswith(notice)


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("--normalization rmsnorm", "normalization", "RMSNorm"),
        ("--position-embedding-type rotary", "position_embedding_type", "rope"),
        ("--tokenizer-type HFTokenizer --tokenizer-model t", "tokenizer_type", "HuggingFaceTokenizer"),
        ("--num-key-value-heads 4", "num_query_groups", 4),
        ("--rotary-position-embeddings-theta 500000", "rotary_base", 500000.0),
        ("--cpu-optimizer", "optimizer_cpu_offload", True),
        ("--pp 2 --enable-zbh1-pipeline", "pipeline_schedule", "zb-h1"),
        ("--distribute-checkpointed-activations", "distribute_saved_activations", True),
        ("--override-lr-scheduler", "override_opt_param_scheduler", True),
        ("--kill-switch-file f", "kill_switch_path", "f"),
        ("--skip-train-iteration-range 3-4 9-9", "iterations_to_skip", ("3-4", "9-9")),
    ],
)
def test_other_names_of_options_and_values(line: str, field: str, value: object) -> None:
    assert parse(shlex.split(line))[0].values()[field] == value


def test_positions_without_a_table_need_no_flag_against_it(problems) -> None:
    _, notices = parse(["--use-rotary-position-embeddings", "--no-position-embedding"])
    assert notices[0].startswith(
        "--no-position-embedding is not needed: --position-embedding-type rope has no"
    )
    assert "--no-position-embedding does not say what replaces" in problems("--no-position-embedding")[0]


def test_a_flag_is_refused_by_the_beginning_of_its_name(problems) -> None:
    assert "--rl-of-next-year (another kind of training) is not supp" in problems("--rl-of-next-year 3")[0]


@pytest.mark.parametrize(
    "options",
    [
        "",
        " --moe-enable-deepep",
        " --moe-flex-dispatcher-backend deepep",
        " --moe-flex-dispatcher-backend hybridep --moe-hybridep-num-sms 32",
    ],
)
def test_the_flex_dispatcher_is_an_all_to_all_with_one_notice(options: str) -> None:
    line = (
        f"--num-experts 4 --disable-bias-linear --ep 2 --moe-token-dispatcher-type flex{options} {COMPLETE}"
    )
    config, notices = parse(shlex.split(line))
    assert config.parallel.moe_token_dispatcher_type == "alltoall"
    assert notices == [
        f"--moe-token-dispatcher-type flex{options}: tokens are sent as by alltoall, with the same results; "
        "DeepEP and HybridEP are not used"
    ]


def test_options_of_the_flex_dispatcher_need_it() -> None:
    _, notices = parse(shlex.split(f"--moe-flex-dispatcher-backend deepep {COMPLETE}"))
    assert notices == [
        "--moe-flex-dispatcher-backend deepep has no effect: --moe-token-dispatcher-type is not flex"
    ]


@pytest.mark.parametrize(
    ("flag", "fix"),
    [
        ("--moe-layer-recompute", "pass --recompute-granularity selective --recompute-modules moe"),
        ("--moe-extended-tp", "pass --expert-tensor-parallel-size"),
        ("--moe-token-dropping", "pass --moe-expert-capacity-factor"),
    ],
)
def test_older_flags_of_experts_name_the_newer_one(flag: str, fix: str, problems) -> None:
    assert problems(f"--num-experts 4 --disable-bias-linear {flag}")[0].endswith(fix)


def test_megatrons_names_of_recomputed_modules(problems) -> None:
    line = "--multi-latent-attention --position-embedding-type rope --disable-bias-linear"
    line = f"{line} --recompute-granularity selective --recompute-modules {{}} {COMPLETE}"
    config, notices = parse(shlex.split(line.format("moe mla_up_proj")))
    assert (config.recompute.recompute_modules, notices) == (("mlp", "mla_up_proj"), [])
    assert config.recompute.modules == {"mlp", "mla_up_proj", "core_attn"}
    assert "remove it: experts always compute their activation again" in problems(line.format("moe_act"))[0]
    assert "pass moe, which recomputes the shared expert" in problems(line.format("shared_experts"))[0]


def test_options_of_experts_are_refused_with_experts_alone(problems) -> None:
    problem = problems("--num-experts 4 --disable-bias-linear --moe-loss-coeff 0.01")[0]
    assert problem.startswith("--moe-loss-coeff (this option of experts) is not supported")
    _, notices = parse(shlex.split(f"--moe-loss-coeff 0.01 {COMPLETE}"))
    assert "--moe-loss-coeff 0.01 has no effect: the model has no experts" in notices


def test_a_balance_loss_over_a_microbatch_depends_on_its_size() -> None:
    line = "--num-experts 4 --disable-bias-linear --moe-router-load-balancing-type aux_loss"
    config, notices = parse(shlex.split(f"{line} {COMPLETE}"))
    assert config.model.moe_router_load_balancing_type == "aux_loss"
    assert [each for each in notices if "aux_loss depends on --micro-batch-size" in each]


def test_a_split_keeps_the_quotes_of_a_shell_array() -> None:
    assert split_weights("'99,1,0'") == [99, 1, 0]


@pytest.mark.parametrize(
    ("line", "signals"),
    [
        ("", ("SIGTERM", "SIGUSR1")),
        ("--exit-signal-handler", ("SIGTERM", "SIGUSR1")),
        ("--no-exit-signal-handler", ()),
        ("--exit-signal SIGUSR2", ("SIGUSR2",)),
        ("--exit-signals SIGHUP SIGTERM", ("SIGHUP", "SIGTERM")),
    ],
)
def test_signals_that_end_a_run(line: str, signals: tuple[str, ...]) -> None:
    assert parse(shlex.split(line))[0].training.exit_signals == signals


def test_workers_are_accepted_and_told() -> None:
    _, notices = parse(shlex.split("--num-workers 2 --valid-num-workers 0"))
    assert [notice.split()[0] for notice in notices] == ["--num-workers", "--valid-num-workers"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--zero-stage 2 --use_distributed_optimizer", "--zero-stage 2 and --use_distributed_optimizer set"),
        ("--bf16 --fp16", "--bf16 and --fp16 set the same option"),
        (
            "--accumulate-allreduce-grads-in-fp32 --grad-reduce-in-bf16",
            "--accumulate-allreduce-grads-in-fp32 and --grad-communication-dtype bf16 contradict each other",
        ),
        ("--data-impl lazy", "--data-impl only accepts mmap or infer in this version, not lazy"),
        ("--num-workers", "--num-workers takes one value"),
        ("--sync-tp-duplicated-parameters 3", "takes no value"),
        ("--group-query-attention", "--group-query-attention needs --num-query-groups"),
        ("--use-mup", "--use-mup needs --mup-base-width (--mup-base-hidden-size)"),
        ("--use-mup --mup-base-hidden-size 256", "pass --mup-base-head-dim 1 for Megatron-LM's scores"),
        ("--mup-attn-scale-power 0.5", "--mup-attn-scale-power only accepts 1 in this version"),
        ("--context-parallel-size 2 --cp-comm-type ring", "--cp-comm-type"),
        ("--deepspeed_config", "--deepspeed-config takes one value"),
        (
            "--ds-sequence-parallel-size 4",
            "--ds-sequence-parallel-size only accepts 1 in this version, not 4 (context parallelism",
        ),
        (
            "--pp 2 --no-pipeline-parallel",
            "--no-pipeline-parallel and --pipeline-model-parallel-size 2 contradict each other",
        ),
        ("--rope-type", "--rope-type only accepts rope in this version, not no value"),
        (
            "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend nccl",
            "--moe-flex-dispatcher-backend cannot be 'nccl': choose one of deepep, hybridep",
        ),
    ],
)
def test_a_value_that_is_not_how_things_are_is_refused(line: str, message: str, problems) -> None:
    assert message in problems(line)[0]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--lr-warmup-style log", "--lr-warmup-style log has no effect: there is no warm-up"),
        ("--lr-warmup-init 1e-5", "--lr-warmup-init 1e-05 has no effect: there is no warm-up"),
        ("--loss-scale 15", "--loss-scale 15.0 has no effect: only --fp16 has a loss scale"),
        ("--bf16 --hysteresis 3", "--hysteresis 3 has no effect: only --fp16 has a loss scale"),
        ("--fp16 --loss-scale 8 --hysteresis 3", "--hysteresis 3 has no effect: --loss-scale 8.0 is"),
        ("--log-straggler --dp 1", "--log-straggler-interval 100 has no effect: there is only one rank"),
        ("--overlap-param-gather", "no effect: --zero-stage is 0, not 1 or 2"),
        ("--tp-comm-overlap", "--tp-comm-overlap has no effect: --tensor-model-parallel-size is 1"),
        (
            "--tp 2 --no-tp-comm-overlap --tp-comm-overlap-chunks 4",
            "4 has no effect: --no-tp-comm-overlap is",
        ),
        (
            "--tp 2 --tp-comm-overlap-method symmetric_memory",
            "no effect: --sequence-parallel is not set",
        ),
        (
            "--tp 2 --bf16 --fp8-format hybrid --tp-comm-overlap",
            "no effect: with --fp8-recipe tensorwise or delayed no GEMM",
        ),
        (
            "--tp 2 --tp-comm-overlap-rs",
            "--tp-comm-overlap-rs is not needed: tensor-parallel communication over",
        ),
        ("--use-distributed-optimizer --dp 1", "--zero-stage 1 has no effect: there is one replica"),
        ("--train-iters 9 --iterations-to-skip 10:12", "no effect: the run ends at --train-iters 9"),
        ("--accumulate-allreduce-grads-in-fp32", "--accumulate-allreduce-grads-in-fp32 is not needed"),
    ],
)
def test_what_has_no_effect_is_told_with_the_reason(line: str, message: str) -> None:
    _, notices = parse(shlex.split(line))
    assert len(notices) == 1
    assert message in notices[0]


@pytest.mark.parametrize(
    "line",
    [
        "--fp16 --loss-scale 8",
        "--fp16 --hysteresis 3 --min-loss-scale 2",
        "--zero-stage 0",
        "--tp 2 --tp-comm-overlap",  # Megatron's flag
        "--tp 2 --no-tp-comm-overlap",
        "--tp 2 --sequence-parallel --tp-comm-overlap-method symmetric_memory --tp-comm-overlap-chunks 4",
        "--iterations-to-skip 10:12 --train-iters 10",
    ],
)
def test_what_has_an_effect_is_not_told(line: str) -> None:
    assert parse(shlex.split(line))[1] == []


@pytest.mark.parametrize(("world_size", "is_told"), [("2", True), ("4", False)])
def test_what_only_replicas_do_is_told_of_where_one_is_started(
    world_size: str, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", world_size)
    notices = parse(shlex.split("--tp 2 --overlap-param-gather --zero-stage 1"))[1]
    assert [notice.split()[0] for notice in notices] == ["--zero-stage", "--overlap-param-gather"] * is_told


def test_an_option_that_has_no_effect_for_two_reasons_is_told_once() -> None:
    (notice,) = parse(shlex.split("--overlap-param-gather --dp 1 --recompute-granularity full"))[1]
    assert notice.startswith("--overlap-param-gather has no effect")
    (notice,) = parse(shlex.split("--recompute-modules mlp layernorm"))[1]
    assert notice.startswith("--recompute-modules mlp layernorm has no effect")


def test_local_rank_must_be_the_environments(problems, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert parse(["--local_rank=2"])[1] == []
    assert "LOCAL_RANK=2" in problems("--local-rank 0")[0]


def test_the_kind_of_a_vocabulary_follows_from_its_content(tmp_path: Path) -> None:
    words, gpt2 = tmp_path / "bert-vocab.json", tmp_path / "gpt2-vocab.txt"
    words.write_text("[PAD]\n[UNK]\n")
    gpt2.write_text('\n{"a": 0}')
    for path, kind in (
        (words, "BertWordPieceLowerCase"),
        (gpt2, "GPT2BPETokenizer"),
        ("absent.json", "GPT2BPETokenizer"),
        ("absent", "BertWordPieceLowerCase"),
    ):
        assert tokenizer_type_for(None, str(path), None, None) == kind
        assert tokenizer_type_for(None, str(path), "merges.txt", None) == "GPT2BPETokenizer"
