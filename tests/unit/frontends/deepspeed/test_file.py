"""DeepSpeed's JSON file: each setting sets a field, is not needed with a reason, or is refused by name."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path

import pytest

from megalite.checkpoint.progress import TrainingProgress
from megalite.config import Config, check_config
from megalite.config.arguments import Diagnostics
from megalite.frontends.command_line import parse
from megalite.frontends.deepspeed.file import DeepSpeedFile
from megalite.frontends.deepspeed.settings import kinds, known_settings, sections, tables
from megalite.train.train_step import IterationPlanner
from megalite.utils.errors import ConfigError


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


def _adam(name: str, **params: object) -> dict:
    return {"optimizer": {"type": name, "params": params}}


def _scheduler(name: str, **params: object) -> dict:
    return {"scheduler": {"type": name, "params": params}}


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
            **_adam("AdamW", lr=1e-2),
            **_scheduler("WarmupCosineLR", warmup_min_ratio=0.5, cos_min_ratio=0.1, warmup_num_steps=1),
        },
        {
            **{"lr_decay_style": "cosine", "lr_warmup_init": 5e-3, "min_lr": 1e-3},
            **{"lr_warmup_style": "log", "lr_warmup_iters": 2, "lr_step_timing": "deepspeed"},
        },
    ),
    (
        {**_adam("AdamW", lr=1e-2), **_scheduler("WarmupDecayLR", warmup_min_lr=1e-5)},
        {
            **{"lr": 1e-3, "lr_decay_style": "linear", "lr_warmup_init": 1e-5, "min_lr": 1e-5},
            **{"lr_warmup_style": "log", "lr_warmup_iters": 1000},
        },
    ),
    (
        {**_adam("AdamW", lr=1e-2), **_scheduler("WarmupLR")},
        {"lr": 1e-2, "lr_decay_style": "constant", "lr_warmup_init": 0.0, "lr_warmup_iters": 1000},
    ),
    (_scheduler("WarmupLR", warmup_max_lr="auto", warmup_num_steps=9), {"lr": 3e-4, "lr_warmup_iters": 9}),
    (_adam("Adam"), {"lr": 1e-3, "weight_decay": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.999}),
    (_adam("AdamW"), {"lr": 1e-3, "weight_decay": 0.0, "adam_eps": 1e-8}),
    (_adam("adamw", torch_adam=True), {"lr": 1e-3, "weight_decay": 0.01}),
    (_adam("Adam", torch_adam=True, adam_w_mode=False), {"weight_decay": 0.0}),
    (_adam("AdamW", adam_w_mode=False, weight_decay=0.1), {"weight_decay": 0.1}),
    (_adam("AdamW", weight_decay="auto", lr="auto"), {"weight_decay": 0.01, "lr": 3e-4}),
    ({}, {"clip_grad": 0.0, "weight_decay": 0.01}),
    ({"gradient_clipping": "auto"}, {"clip_grad": 1.0}),
    ({"fp16": {"enabled": "auto", "hysteresis": 3}}, {"params_dtype": "fp32", "hysteresis": 3}),
    ({"fp16": {"enabled": True}}, {"initial_loss_scale": 65536.0, "loss_scale": None}),
    ({"data_types": {"grad_accum_dtype": "fp32"}}, {}),
    ({"communication_data_type": "fp32"}, {"grad_communication_dtype": None}),
    (
        {"zero_optimization": {"offload_optimizer": None}},
        _NOT_OFFLOADED,
    ),
    ({"tensorboard": {"enabled": True, "output_path": "T", "job_name": "J"}}, {"tensorboard_dir": "T/J"}),
    ({"tensorboard": {"enabled": False, "output_path": "T", "job_name": None}}, {"tensorboard_dir": None}),
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
        ({"bf16": {"enabled": True}}, "--fp16", ["bf16.enabled true", "--fp16"]),
        ({"fp16": {"enabled": False}}, "--fp16", ["fp16.enabled is false", "--params-dtype is fp16"]),
        (
            {"fp16": {"enabled": True, "initial_scale_power": "9"}},
            "",
            ['initial_scale_power is "9": it must be a num'],
        ),
        ({"fp16": {"enabled": True, "initial_scale_power": 9999}}, "", ["initial_scale_power is 9999"]),
        ({"gradient_accumulation_steps": 3}, "--dp 2 --global-batch-size 8", ["steps is 3", "is 4"]),
        ({"gradient_accumulation_steps": 3}, "", ["pass --global-batch-size, or start with torchrun"]),
        ({"gradient_accumulation_steps": 0.5}, "--dp 2", ["is 0.5: it must be a whole number"]),
        ({"train_batch_size": "many"}, "", ['train_batch_size is "many": it must be a whole number']),
        (_offloading(device="nvme"), "", ["device is nvme, which needs nvme_path"]),
        (_offloading(device="disk"), "", ['device is "disk": choose one of none, cpu, nvme']),
        (_offloading(device="cpu", ratio=0), "", ["ratio is 0, but zero_optimization.offload_optimizer.dev"]),
        (_offloading(device="cpu", max_in_cpu=1), "", ["max_in_cpu is not a known setting"]),
        (
            _offloading(device="cpu", ratio=2),
            "",
            ["offload_optimizer.ratio is 2: it must be greater than 0"],
        ),
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
        (
            {"zero_optimization": {"stage": 3, "mics_shard_size": "8"}},
            "",
            ['mics_shard_size is "8": it must'],
        ),
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
            ["mics_hierarchical_params_gather is true"],
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
        ({"optimizer": {"type": "Lamb"}}, "", ['optimizer.type is "Lamb"', "choose one of Adam"]),
        ({"optimizer": {"type": "Adam", "params": {"betas": 1}}}, "", ["optimizer.params.betas is 1"]),
        (
            {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0}}},
            "",
            ['type is "OneCycle": choose'],
        ),
        ({"scheduler": {"type": "LRRangeTest"}}, "", ['scheduler.type is "LRRangeTest": choose']),
        ({"scheduler": {"params": {"warmup_num_steps": 1}}}, "", ["has no effect without scheduler.type"]),
        (
            {"optimizer": {"params": {"lr": 1}}},
            "",
            ["optimizer.params.lr has no effect without optimizer.type"],
        ),
        (_scheduler("WarmupLR", total_num_steps=9), "", ["total_num_steps is not a parameter of WarmupLR"]),
        (_scheduler("WarmupLR", warmup_num_steps=0), "", ["warmup_num_steps is 0: it must be a positive"]),
        (
            _scheduler("WarmupLR", warmup_type="exp"),
            "",
            ["warmup_type cannot be 'exp': choose one of linear"],
        ),
        (_scheduler("WarmupLR", warmup_min_lr=[0, 1]), "", ["warmup_min_lr is [0, 1]: it must be a number"]),
        (_scheduler("WarmupLR", warmup_max_lr=-1), "", ["warmup_max_lr is -1: it must be at least 0"]),
        (
            _scheduler("WarmupLR", warmup_max_lr=1.0),
            "--lr 2",
            ["warmup_max_lr 1.0 and --lr 2.0 set the same"],
        ),
        (
            _adam("Adam", adam_w_mode=False, weight_decay=0.1),
            "",
            ["adam_w_mode false, which adds weight_decay"],
        ),
        (
            _adam("Adam", adam_w_mode=False),
            "--weight-decay 0.1",
            ['optimizer.type "Adam" and --weight-decay'],
        ),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "", ['grad_accum_dtype is "bf16": gradients are']),
        ({"data_types": {"param_dtype": "bf16"}}, "", ['data_types.param_dtype is "bf16": remove it']),
        (
            {"fp16": {"enabled": True, "loss_scale": 0}},
            "--loss-scale 15",
            ["fp16.loss_scale 0, which is dynamic, and --loss-scale 15.0 set the same option"],
        ),
        ({"fp16": {"enabled": "false"}}, "", ['fp16.enabled is "false": it must be true or false']),
        ({"fp16": []}, "", ["fp16 is []: it must be an object of settings"]),
        ({"fp16.enabled": True}, "", [r"fp16\.enabled is not a known setting; nearest is fp16.enabled"]),
        ({"train_batch_size": {}}, "", ["train_batch_size is {}: it must be a whole number"]),
        ({"train_batch_size": 10**400}, "", ["(401 characters): it must be a whole number of at most 2**63"]),
        ({"scheduler": {"type": "WarmupCosineLR"}}, "", ["needs optimizer.params.lr"]),
        ({"steps_per_print": "many"}, "", ['steps_per_print is "many": it must be a whole number']),
        ({"elasticity": {"enabled": True}}, "", ["elasticity.enabled is true", "remove it"]),
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
        (
            _offloading(device="cpu"),
            "--optimizer-nvme-offload /d",
            "--optimizer-cpu-offload with --optimizer-nvme-offload /d, which offloads the same state: "
            "pass only one of them",
        ),
        (
            _offloading(device="nvme", nvme_path="/d"),
            "--save f --save-interval 1 --async-save",
            "--async-save with --optimizer-nvme-offload /d, which keeps the optimizer state out",
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
    """Check that a setting is in one table only, and that one without effect is named."""
    _, notices = _parsed({"zero_optimization": {"contiguous_gradients": True}}, "", tmp_path)
    assert any("zero_optimization.contiguous_gradients (gradients are always" in notice for notice in notices)
    known = known_settings()
    assert len(known) == len({*known})
    for name in (*tables()["fields"].values(), *tables()["fields_of_fp16"].values()):
        assert name in Config().values()


@pytest.mark.parametrize(
    ("settings", "line", "notice"),
    [
        ({}, "", "gradient_clipping is not set, which is 0.0 in DeepSpeed: --clip-grad 0.0 is used"),
        (
            {},
            "--clip-grad 2",
            "gradient_clipping is not set, which is 0.0 in DeepSpeed, but --clip-grad 2.0 is",
        ),
        (
            _adam("Adam"),
            "",
            "optimizer.params.weight_decay is not set, which is 0.0 in DeepSpeed: --weight-decay",
        ),
        (
            _adam("Adam"),
            "--lr 0.1",
            "optimizer.params.lr is not set, which is 0.001 in DeepSpeed, but --lr 0.1 is",
        ),
        (
            {**_adam("Adam", lr=1.0), **_scheduler("WarmupDecayLR", warmup_max_lr=0.5)},
            "",
            "not needed: optimizer.params.lr (the rate is set by scheduler.type WarmupDecayLR)",
        ),
        (
            _scheduler("WarmupLR", warmup_num_steps=1),
            "",
            "warmup_num_steps is 1: as in DeepSpeed, the warm-up has 2",
        ),
        (_scheduler("WarmupLR"), "", "1000: the warm-up does not end within the 5 updates of the schedule"),
        (
            _scheduler("WarmupDecayLR"),
            "--min-lr 1e-4",
            "warmup_min_lr is not set, which is 0.0 in DeepSpeed, but --min-lr 0.0001 is used",
        ),
    ],
)
def test_what_a_deepspeed_file_does_not_set_is_deepspeeds_default(
    settings: dict, line: str, notice: str, tmp_path: Path
) -> None:
    config, notices = _parsed(settings, line, tmp_path)
    check_config(config)
    assert any(notice in each for each in notices), notices


POINTS = json.loads(Path(__file__).with_name("deepspeed_points.json").read_text())["cases"]
"""Rates of updates by DeepSpeed's own schedulers: deepspeed_points.py has written them."""


@pytest.mark.parametrize("case", POINTS, ids=lambda case: case["name"])
def test_a_run_trains_with_deepspeeds_learning_rates(case: dict, tmp_path: Path) -> None:
    settings = {**_adam("AdamW", lr=case["lr"]), **_scheduler(case["type"], **case["params"])}
    config, _ = _parsed(settings, f"--train-iters {len(case['rates'])}", tmp_path)
    check_config(config)
    planner, progress, rates = IterationPlanner(config, dp=2), TrainingProgress(), []
    for _ in case["rates"]:
        plan = planner(progress)
        rates.append(plan.learning_rate)
        progress = progress.after(plan.num_samples)
    assert rates == pytest.approx(case["rates"], rel=1e-12, abs=1e-18)


WRONG: dict[str, object] = {
    **{"list": [], "object": {}, "null": None, "text": "x", "true": True, "huge": 10**400, "below 0": -1},
    **{"nan": math.nan, "infinity": math.inf, "number as text": "1e3", "half": 0.5, "deep": [[{"a": [1]}]]},
}
IN_NO_TYPE = ("list", "huge", "nan", "infinity", "deep")


@pytest.mark.parametrize("name", WRONG)
def test_any_value_of_any_setting_is_read_or_refused_in_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    base: dict = {
        **_adam("Adam", lr=0.1),
        **_scheduler("WarmupCosineLR"),
        "fp16": {"enabled": True},
        **{section: {"enabled": True} for section in tables()["switched"]},
    }
    for key in (*known_settings(), *sections()):
        settings = json.loads(json.dumps(base))
        *parents, last = key.split(".")
        parent = settings
        for part in parents:
            parent = parent.setdefault(part, {})
        parent[last] = WRONG[name]
        diagnostics = Diagnostics()
        Path("ds.json").write_text(json.dumps(settings))
        file = DeepSpeedFile.read("ds.json", diagnostics)
        assert file is not None
        found = [*file.settings(diagnostics), *file.soft_settings(diagnostics)]
        for setting in found:
            if row := tables()["derived"].get(setting.name.removeprefix("ds.json: ")):
                assert setting.field.name in row[1:]
        diagnostics.by_field(found)
        file.completed(Config(), 1, diagnostics)
        assert all("\n" not in problem and len(problem) < 300 for problem in diagnostics.problems)
        is_read = key in kinds() or key in sections()
        if name in IN_NO_TYPE and is_read:
            assert any(f"ds.json: {key} is " in problem for problem in diagnostics.problems), key


def test_objects_in_objects_without_end(problems, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"a": ' * 800 + "1" + "}" * 800)
    assert "is not a known setting" in problems(f"--deepspeed-config {path}")[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"zero_optimization": {"stage": 1, "stage": 2}}', 'it has "stage" twice in an object: remove one'),
        ('{"bf16": {}, "bf16": {"enabled": true}}', 'it has "bf16" twice in an object: remove one'),
    ],
)
def test_a_key_that_occurs_twice(text: str, message: str, problems, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(text)
    assert message in problems(f"--deepspeed-config {tmp_path / 'ds.json'}")[0]


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_deepspeed_file_that_is_none(content: str | None, problems, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    if content is not None:
        path.write_text(content)
    assert str(path) in problems(f"--deepspeed-config {path}")[0]
