"""DeepSpeed's JSON file: each setting sets a field, is not needed with a reason, or is refused by name."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from megalite.config import Config, check_config, deepspeed
from megalite.config.command_line import parse
from megalite.errors import ConfigError


def _parsed(settings: dict, line: str, folder: Path) -> tuple[Config, list[str]]:
    path = folder / "ds.json"
    path.write_text(json.dumps(settings))
    return parse(shlex.split(f"--mock-data --vocab-size 99 --train-iters 5 --deepspeed_config {path} {line}"))


_NOT_OFFLOADED = {
    "optimizer_cpu_offload": False,
    "optimizer_nvme_offload": None,
    "optimizer_offload_fraction": 1.0,
}


def _offloading(**settings: object) -> dict:
    return {"zero_optimization": {"offload_optimizer": settings}}


DEEPSPEED_FIELDS: list[tuple[dict, dict]] = [
    ({"train_batch_size": 8}, {"global_batch_size": 8}),
    ({"train_micro_batch_size_per_gpu": 4}, {"micro_batch_size": 4}),
    ({"gradient_clipping": 0.5}, {"clip_grad": 0.5}),
    ({"communication_data_type": "bf16"}, {"grad_communication_dtype": "bf16"}),
    (
        {"zero_optimization": {"stage": 2, "overlap_comm": False, "reduce_bucket_size": 5e8}},
        {"zero_stage": 2, "overlap_grad_reduce": False, "ddp_bucket_size": 500_000_000},
    ),
    (
        {"zero_optimization": {"stage": 3, "stage3_max_live_parameters": 1e9}},
        {"zero_stage": 3, "fsdp_reshard_after_forward": "default"},
    ),
    ({"bf16": {"enabled": True}}, {"params_dtype": "bf16"}),
    ({"bfloat16": {"enabled": True}}, {"params_dtype": "bf16"}),
    (
        {"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 3}},
        {"params_dtype": "fp16", "loss_scale": None, "initial_loss_scale": 65536.0, "hysteresis": 3},
    ),
    (
        {"fp16": {"enabled": True, "loss_scale": 8, "initial_scale_power": 9}},
        {"loss_scale": 8.0, "initial_loss_scale": 2.0**32},
    ),
    ({"fp16": {"enabled": False, "loss_scale": 8}}, {"params_dtype": "fp32", "loss_scale": None}),
    (
        {"optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.8, 0.9], "weight_decay": 0.1}}},
        {"lr": 1e-3, "adam_beta1": 0.8, "adam_beta2": 0.9, "weight_decay": 0.1},
    ),
    (
        {
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {
                    "warmup_type": "linear",
                    "warmup_max_lr": 1e-3,
                    "warmup_num_steps": 2,
                    "total_num_steps": 4,
                },
            }
        },
        {"lr": 1e-3, "lr_warmup_iters": 2, "lr_decay_iters": 4, "lr_decay_style": "linear"},
    ),
    (
        {
            "optimizer": {"params": {"lr": 1e-2}},
            "scheduler": {
                "type": "WarmupCosineLR",
                "params": {"warmup_min_ratio": 0.5, "cos_min_ratio": 0.1},
            },
        },
        {"lr_decay_style": "cosine", "lr_warmup_init": 5e-3, "min_lr": 1e-3},
    ),
    ({"tensorboard": {"enabled": True, "output_path": "T", "job_name": "J"}}, {"tensorboard_dir": "T/J"}),
    ({"tensorboard": {"enabled": False, "output_path": "T"}}, {"tensorboard_dir": None}),
    ({"wandb": {"enabled": True, "project": "P"}}, {"wandb_project": "P"}),
    (
        {"nebula": {"enabled": True, "persistent_storage_path": "S", "num_of_version_in_retention": 2}},
        {"save": "S", "keep_last": 2},
    ),
    ({"nebula": {"enabled": True, "persistent_time_interval": 90}}, {"save_interval_minutes": 1.5}),
    ({"flops_profiler": {"enabled": True}}, {"profile_modules": 1, "profile_modules_depth": None}),
    (
        {
            "flops_profiler": {
                **{"enabled": True, "profile_step": 3, "module_depth": -1, "top_modules": 2},
                **{"detailed": True, "output_file": "F", "recompute_fwd_factor": 0.0},
            }
        },
        {
            **{"profile_modules": 3, "profile_modules_depth": None},
            **{"profile_modules_top": 2, "profile_modules_file": "F"},
        },
    ),
    (
        {"flops_profiler": {"enabled": True, "module_depth": 2, "output_file": None}},
        {"profile_modules_depth": 2, "profile_modules_file": None},
    ),
    (
        {"flops_profiler": {"enabled": True, "module_depth": 2, "detailed": False}},
        {"profile_modules_depth": 0},
    ),
    ({"flops_profiler": {"enabled": False, "profile_step": 3}}, {"profile_modules": None}),
    ({"steps_per_print": 7, "wall_clock_breakdown": True}, {"log_interval": 7, "timing_log_level": 2}),
    ({"gradient_accumulation_steps": 4, "train_micro_batch_size_per_gpu": 2}, {"global_batch_size": 16}),
    ({"fp16": {}, "optimizer": {"params": {}}}, {"params_dtype": "fp32"}),
    ({"train_batch_size": "auto", "zero_optimization": {"stage": "auto"}}, {"zero_stage": 0}),
    ({"zero_optimization": {"offload_optimizer": {"device": "none"}, "zero_hpz_partition_size": 1}}, {}),
    (
        {"zero_optimization": {"stage": 3, "mics_shard_size": 2, "mics_hierarchical_params_gather": False}},
        {"zero_stage": 3, "data_parallel_shard_degree": 2},
    ),
    ({"zero_optimization": {"stage": 2, "mics_shard_size": -1}}, {"data_parallel_shard_degree": None}),
    ({"zero_optimization": {"cpu_offload": True}}, {"optimizer_cpu_offload": True}),
    (
        _offloading(device="cpu", pin_memory=True, ratio=0.5, nvme_path="/local_nvme"),
        {**_NOT_OFFLOADED, "optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5},
    ),
    (
        {**_offloading(device="nvme", nvme_path="/d", buffer_count=4), "aio": {"block_size": 1048576}},
        {**_NOT_OFFLOADED, "optimizer_nvme_offload": "/d"},
    ),
    (_offloading(device="none", ratio=0.5, nvme_path="/d"), _NOT_OFFLOADED),
]


@pytest.mark.parametrize(("settings", "fields"), DEEPSPEED_FIELDS)
def test_a_deepspeed_file_sets_what_it_says(settings: dict, fields: dict, tmp_path: Path) -> None:
    config, _ = _parsed(settings, "--dp 2", tmp_path)
    values = config.values()
    assert {name: values[name] for name in fields} == pytest.approx(fields)


@pytest.mark.parametrize(
    ("settings", "line", "message"),
    [
        ({"gradient_clipping": 0.5}, "--clip-grad 1", ["gradient_clipping 0.5", "--clip-grad 1"]),
        ({"zero_optimization": {"stage": 1}}, "--zero-stage 0", ["optimization.stage 1", "--zero-stage 0"]),
        ({"zero_optimization": {"stage": 0}}, "--use-distributed-optimizer", ["stage 0", "--use-distrib"]),
        ({"bf16": {"enabled": True}}, "--fp16", ["bf16.enabled bf16", "--fp16"]),
        ({"fp16": {"enabled": False}}, "--fp16", ["fp16.enabled is false", "--params-dtype is fp16"]),
        ({"fp16": {"enabled": True, "initial_scale_power": "9"}}, "", ["initial_scale_power is 9"]),
        ({"fp16": {"enabled": True, "initial_scale_power": 9999}}, "", ["initial_scale_power is 9999"]),
        ({"gradient_accumulation_steps": 3}, "--dp 2 --global-batch-size 8", ["steps is 3", "is 4"]),
        ({"gradient_accumulation_steps": 3}, "", ["pass --global-batch-size, or start with torchrun"]),
        ({"gradient_accumulation_steps": 0.5}, "--dp 2", ["is 0.5: it must be a positive whole number"]),
        ({"train_batch_size": "many"}, "", ["train_batch_size takes a whole number, not 'many'"]),
        (_offloading(device="nvme"), "", ["device is nvme, which needs nvme_path"]),
        (_offloading(device="disk"), "", ["device is disk: choose one of none, cpu, nvme"]),
        (_offloading(device="cpu", ratio=0), "", ["ratio is 0, but zero_optimization.offload_optimizer.dev"]),
        (_offloading(device="cpu", max_in_cpu=1), "", ["max_in_cpu is not a known setting"]),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, "", ["weights are not offloaded"]),
        (
            {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}},
            "",
            ["zero_hpz_partition_size is 8", "mics_shard_size"],
        ),
        (
            {"zero_optimization": {"stage": 2, "mics_shard_size": 8}},
            "",
            ["mics_shard_size is 8 with zero_optimization.stage 2", "pass --data-parallel-shard-degree 8"],
        ),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": "8"}}, "", ["mics_shard_size is 8: it must"]),
        (
            {"zero_optimization": {"stage": 3, "mics_shard_size": 2}},
            "--data-parallel-shard-degree 4",
            ["mics_shard_size 2", "--data-parallel-shard-degree 4"],
        ),
        (
            {
                "zero_optimization": {
                    "stage": 3,
                    "mics_shard_size": 2,
                    "mics_hierarchical_params_gather": True,
                }
            },
            "",
            ["mics_hierarchical_params_gather is True"],
        ),
        (
            {"zero_optimization": {"stages": 1}},
            "",
            ["known setting; nearest is zero_optimization.stage: remove"],
        ),
        (
            {"activation_checkpointing": {"cpu_checkpointing": True}},
            "",
            ["cpu_checkpointing is true, but no layer is recomputed"],
        ),
        (
            {"activation_checkpointing": {"cpu_checkpointing": True}},
            "--checkpoint-activations --cpu-offload-activations 1",
            ["cpu_checkpointing is true, which offloads the 12 layers", "--cpu-offload-activations is 1"],
        ),
        ({"optimizer": {"type": "Lamb"}}, "", ["optimizer.type is Lamb", "choose one of Adam"]),
        ({"optimizer": {"params": {"betas": 1}}}, "", ["optimizer.params.betas is 1"]),
        ({"scheduler": {"type": "WarmupLR"}}, "", ["logarithmic warm-up"]),
        ({"scheduler": {"type": "OneCycle"}}, "", ["scheduler.type is OneCycle"]),
        ({"scheduler": {"type": "WarmupCosineLR"}}, "", ["needs optimizer.params.lr"]),
        ({"steps_per_print": "many"}, "", ["steps_per_print takes a whole number, not 'many'"]),
        ({"elasticity": {"enabled": True}}, "", ["elasticity.enabled is True", "remove it"]),
    ],
)
def test_a_deepspeed_file_that_contradicts_or_is_not_supported(
    settings: dict, line: str, message: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        _parsed(settings, line, tmp_path)
    (problem,) = (each for each in caught.value.problems if "ds.json" in each)
    assert all(words in problem for words in message), problem


@pytest.mark.parametrize(
    ("settings", "line", "message"),
    [
        (_offloading(device="cpu", ratio=2), "", "--optimizer-offload-fraction 2.0 is out of range"),
        (
            _offloading(device="cpu"),
            "--optimizer-nvme-offload /d",
            "--optimizer-cpu-offload and --optimizer-nvme-offload /d are two places for the same state: "
            "pass only one of them",
        ),
        (
            _offloading(device="nvme", nvme_path="/d"),
            "--save f --save-interval 1 --async-save",
            "--async-save copies the optimizer state into host memory",
        ),
    ],
)
def test_offloading_follows_the_rules_of_its_flags(
    settings: dict, line: str, message: str, tmp_path: Path
) -> None:
    config, _ = _parsed(settings, line, tmp_path)
    with pytest.raises(ConfigError, match=message):
        check_config(config)


def test_a_deepspeed_file_may_not_contradict_the_yaml_file(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("parallel:\n  zero_stage: 2\n")
    with pytest.raises(ConfigError, match=r"zero_stage 2 and .*zero_optimization.stage 1"):
        _parsed({"zero_optimization": {"stage": 1}}, f"--config {tmp_path / 'run.yaml'}", tmp_path)


def test_deepspeeds_own_printing_gives_way_to_flags(tmp_path: Path) -> None:
    config, notices = _parsed({"steps_per_print": 7}, "--log-interval 3", tmp_path)
    assert config.logging.log_interval == 3
    assert any("steps_per_print is 7, but --log-interval 3 is used" in notice for notice in notices)


def test_every_known_setting_of_a_deepspeed_file_is_accounted_for(tmp_path: Path) -> None:
    """Check that a setting of no table is refused, and that one without effect is named."""
    _, notices = _parsed({"zero_optimization": {"contiguous_gradients": True}}, "", tmp_path)
    assert any("zero_optimization.contiguous_gradients (gradients are always" in notice for notice in notices)
    for name in (*deepspeed._FIELDS, *deepspeed._HANDLERS, *deepspeed._NOT_NEEDED, *deepspeed._REFUSED):
        tables = (deepspeed._FIELDS, deepspeed._HANDLERS, deepspeed._NOT_NEEDED, deepspeed._REFUSED)
        assert sum(name in table for table in tables) == 1, name
    for name in deepspeed._FIELDS.values():
        assert name in Config().values()


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_deepspeed_file_that_is_none(content: str | None, problems, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    if content is not None:
        path.write_text(content)
    assert str(path) in problems(f"--deepspeed-config {path}")[0]
