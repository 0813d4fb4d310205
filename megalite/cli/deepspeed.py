"""A DeepSpeed JSON file, checked against the config.

There is no DeepSpeed here; its settings that have an equal must say what the flags say.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from megalite.cli.findings import Findings
from megalite.config import Config
from megalite.config.rules.layout import replicas
from megalite.parsing import parse_json

_COMPARED = {
    "communication_data_type",
    "gradient_clipping",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
}
"""Settings that are compared with flags, besides those of the sections."""
_SECTIONS: Mapping[str, Collection[str]] = {
    "bf16": ("enabled",),
    "bfloat16": ("enabled",),
    "fp16": ("enabled",),
    "zero_optimization": ("stage", "offload_optimizer", "offload_param", "cpu_offload"),
}
"""Sections of which some settings are compared; those of the loss scale in fp16 are `_loss_scale_keys`."""
_OFFLOADED = {
    "offload_optimizer": ("the optimizer's state", "1, 2 or 3"),
    "offload_param": ("weights", "3"),
    "cpu_offload": ("the optimizer's state", "1, 2 or 3"),
}
"""Settings of ZeRO that move something out of the GPU's memory, and the stages that shard it instead.

DeepSpeed's older files have `cpu_offload`."""


def check_file(
    path: str,
    config: Config,
    world_size: int | None,
    findings: Findings,
) -> None:
    """Finds what the file says otherwise than the command line, and names both.

    Args:
        path: the JSON file.
        config: what fields, YAML file and preset come to.
        world_size: number of ranks, if known.
        findings: gets the conflicts, and a notice of the settings that have no equal here.
    """
    try:
        settings = parse_json(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        findings.problems.append(f"--deepspeed_config {path} cannot be read: {reason}")
        return
    if not isinstance(settings, dict):
        findings.problems.append(
            f"--deepspeed_config {path} holds no JSON object: give DeepSpeed's own settings"
        )
        return
    conflicts = [
        *_precision(settings, config.model.params_dtype),
        *_loss_scaling(settings, config),
        *_zero(settings, config.parallel.zero_stage),
        *_offload(settings),
        *_communication(settings, config.parallel.grad_communication_dtype),
        *_same(settings, "gradient_clipping", "--clip-grad", config.optimizer.clip_grad),
        *_same(
            settings, "train_micro_batch_size_per_gpu", "--micro-batch-size", config.training.micro_batch_size
        ),
        *_same(settings, "train_batch_size", "--global-batch-size", config.training.global_batch_size),
        *_accumulation(settings, config, world_size),
    ]
    findings.problems += [f"{path}: {conflict}" for conflict in conflicts]
    if unread := sorted(_unread(settings, config)):
        findings.notices.append(f"{path}: {', '.join(unread)} without effect: there is no DeepSpeed here")


def _precision(settings: Mapping[str, Any], dtype: str) -> Iterator[str]:
    for key in ("bf16", "bfloat16", "fp16"):  # the second one is the older name of the first
        name = "fp16" if key == "fp16" else "bf16"
        if key not in settings and (key == "bfloat16" or "bfloat16" in settings):
            continue
        section = settings.get(key, {})
        enabled = section.get("enabled", False) if isinstance(section, dict) else section
        if enabled == "auto" or bool(enabled) == (dtype == name):
            continue
        if dtype == name:
            yield f"{key}.enabled is not true, but --{name} is given: make them agree"
        else:
            yield f"{key}.enabled is true, but --params-dtype is {dtype}: give --{name}, or set it to false"


def _unread(settings: Mapping[str, Any], config: Config) -> Iterator[str]:
    """Yield every setting that nothing here compares with a flag, one in a section by `section.name`."""
    for key, value in settings.items():
        if key in _SECTIONS and isinstance(value, dict):
            compared = {*_SECTIONS[key], *(_loss_scale_keys(config) if key == "fp16" else ())}
            yield from (f"{key}.{name}" for name in value if name not in compared)
        elif key not in _SECTIONS and key not in _COMPARED:
            yield key


def _loss_scale_keys(config: Config) -> Collection[str]:
    """Return the settings of the section of fp16 that `_loss_scaling` compares."""
    if config.model.params_dtype != "fp16":
        return ()
    if config.optimizer.loss_scale is not None:
        return ("loss_scale",)
    return ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")


def _offload(settings: Mapping[str, Any]) -> Iterator[str]:
    """Find what DeepSpeed would keep in the host's memory or on a disk, and nothing here does."""
    section = settings.get("zero_optimization", {})
    for name, (what, stages) in _OFFLOADED.items() if isinstance(section, dict) else ():
        value = section.get(name)
        device = value.get("device", "none") if isinstance(value, dict) else "cpu" if value else "none"
        if device not in ("none", None):
            yield (
                f"zero_optimization.{name} offloads {what} to {device}, which megalite does not support: "
                f"remove it; --zero-stage {stages} shards {what} over data-parallel ranks"
            )


def _loss_scaling(settings: Mapping[str, Any], config: Config) -> Iterator[str]:
    """The section of fp16 says the same of the loss scale; a scale of 0 is a dynamic one."""
    section, optimizer = settings.get("fp16", {}), config.optimizer
    if config.model.params_dtype != "fp16" or not isinstance(section, dict):
        return
    wanted = {f"fp16.{key}": value for key, value in section.items()}
    power = wanted.get("fp16.initial_scale_power")
    if isinstance(power, int | float) and abs(power) < 1024:  # else no power of two in a float
        wanted["fp16.initial_scale_power"] = 2.0**power
    yield from _same(wanted, "fp16.loss_scale", "--loss-scale", optimizer.loss_scale or 0)
    if optimizer.loss_scale is None:
        yield from _same(
            wanted, "fp16.initial_scale_power", "--initial-loss-scale", optimizer.initial_loss_scale
        )
        yield from _same(wanted, "fp16.loss_scale_window", "--loss-scale-window", optimizer.loss_scale_window)
        yield from _same(wanted, "fp16.hysteresis", "--hysteresis", optimizer.hysteresis)
        yield from _same(wanted, "fp16.min_loss_scale", "--min-loss-scale", optimizer.min_loss_scale)


def _zero(settings: Mapping[str, Any], zero_stage: int) -> Iterator[str]:
    section = settings.get("zero_optimization", {})
    stage = section.get("stage", 0) if isinstance(section, dict) else section
    return _same({"zero_optimization.stage": stage}, "zero_optimization.stage", "--zero-stage", zero_stage)


def _communication(settings: Mapping[str, Any], dtype: str | None) -> Iterator[str]:
    """Gradients are sent in fp32 unless told; DeepSpeed's default depends on the precision: not read."""
    wanted = settings.get("communication_data_type")
    if wanted is not None and wanted != (dtype or "fp32"):
        yield (
            f"communication_data_type is {wanted}, but --grad-communication-dtype is {dtype or 'fp32'}: "
            "make them agree"
        )


def _same(settings: Mapping[str, Any], key: str, flag: str, value: float | None) -> Iterator[str]:
    """The file's number is the flag's, which counts by its default too where it is not given."""
    number = settings.get(key, "auto")
    if number == "auto":
        return
    if value is None:
        yield f"{key} is {number}, but {flag} is not given: give {flag} {number}"
    elif number != value:
        yield f"{key} is {number}, but {flag} is {value}: make them agree"


def _accumulation(settings: Mapping[str, Any], config: Config, world_size: int | None) -> Iterator[str]:
    """Steps of accumulation are microbatches: global batch / (micro batch x dp)."""
    steps = settings.get("gradient_accumulation_steps", "auto")
    batch, micro = config.training.global_batch_size, config.training.micro_batch_size
    dp = replicas(config, world_size)
    if steps == "auto" or batch is None or dp is None or steps * micro * dp == batch:
        return
    yield (
        f"gradient_accumulation_steps is {steps}, but --global-batch-size {batch} / "
        f"(--micro-batch-size {micro} x data-parallel size {dp}) is {batch / (micro * dp):g}: make them agree"
    )
