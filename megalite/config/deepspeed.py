"""A DeepSpeed JSON file, compared with the config.

megalite does not use DeepSpeed; settings that have an equivalent must agree with the flags.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from megalite.config.arguments import Diagnostics
from megalite.config.config import Config
from megalite.config.rules.parallel_rules import replicas
from megalite.files import parse_json

_COMPARED = {
    "communication_data_type",
    "gradient_clipping",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
}
"""Settings that are compared with flags, besides those in sections."""
_SECTIONS: Mapping[str, Collection[str]] = {
    "bf16": ("enabled",),
    "bfloat16": ("enabled",),
    "fp16": ("enabled",),
    "zero_optimization": ("stage", "offload_optimizer", "offload_param", "cpu_offload"),
}
"""Sections, and their settings that are compared; `_loss_scale_keys` adds those of fp16's loss scale."""
_OFFLOADED = {
    "offload_optimizer": ("the optimizer's state", "1, 2 or 3"),
    "offload_param": ("weights", "3"),
    "cpu_offload": ("the optimizer's state", "1, 2 or 3"),  # the name in older files
}
"""Settings that offload something from GPU memory, and the ZeRO stages that shard it instead."""


def check_deepspeed_file(path: str, config: Config, world_size: int | None, diagnostics: Diagnostics) -> None:
    """Report the settings of a DeepSpeed file that disagree with the config, and those without an equivalent.

    Args:
        path: the JSON file.
        config: the config of the whole command line.
        world_size: number of ranks, if it is known.
    """
    try:
        settings = parse_json(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        diagnostics.add_problem(f"--deepspeed_config {path} cannot be read: {reason}")
        return
    if not isinstance(settings, dict):
        diagnostics.add_problem(f"--deepspeed_config {path} is not a JSON object: pass DeepSpeed's own file")
        return
    training = config.training
    conflicts = [
        *_precision(settings, config.model.params_dtype),
        *_loss_scaling(settings, config),
        *_zero(settings, config.parallel.zero_stage),
        *_offload(settings),
        *_communication(settings, config.parallel.grad_communication_dtype),
        *_compare(settings, "gradient_clipping", "--clip-grad", config.optimizer.clip_grad),
        *_compare(
            settings, "train_micro_batch_size_per_gpu", "--micro-batch-size", training.micro_batch_size
        ),
        *_compare(settings, "train_batch_size", "--global-batch-size", training.global_batch_size),
        *_accumulation(settings, config, world_size),
    ]
    for conflict in conflicts:
        diagnostics.add_problem(f"{path}: {conflict}")
    if unused := sorted(_unused_settings(settings, config)):
        has = "has" if len(unused) == 1 else "have"
        diagnostics.notices.append(
            f"{path}: {', '.join(unused)} {has} no effect: megalite does not use DeepSpeed"
        )


def _compare(settings: Mapping[str, Any], key: str, flag: str, value: float | None) -> Iterator[str]:
    """Compare a number of the file with a flag's value, which may be its default."""
    number = settings.get(key, "auto")
    if number == "auto":
        return
    if value is None:
        yield f"{key} is {number}, but {flag} is not set: pass {flag} {number}"
    elif number != value:
        yield f"{key} is {number}, but {flag} is {value}: pass {flag} {number}, or change the file"


def _precision(settings: Mapping[str, Any], dtype: str) -> Iterator[str]:
    for key in ("bf16", "bfloat16", "fp16"):  # bfloat16 is the older name of bf16
        name = "fp16" if key == "fp16" else "bf16"
        if key not in settings and (key == "bfloat16" or "bfloat16" in settings):
            continue
        section = settings.get(key, {})
        enabled = section.get("enabled", False) if isinstance(section, dict) else section
        if enabled == "auto" or bool(enabled) == (dtype == name):
            continue
        if dtype == name:
            yield f"{key}.enabled is not true, but --params-dtype is {dtype}: set it to true"
        else:
            yield f"{key}.enabled is true, but --params-dtype is {dtype}: pass --{name}, or set it to false"


def _loss_scaling(settings: Mapping[str, Any], config: Config) -> Iterator[str]:
    """Compare the loss scale in the section of fp16; 0 is a dynamic one."""
    section, optimizer = settings.get("fp16", {}), config.optimizer
    if config.model.params_dtype != "fp16" or not isinstance(section, dict):
        return
    in_file = {f"fp16.{key}": value for key, value in section.items()}
    scale, constant = in_file.get("fp16.loss_scale", "auto"), optimizer.loss_scale
    if scale != "auto" and scale != (constant or 0):
        fix = f"pass --loss-scale {scale}" if scale else "remove --loss-scale"
        yield f"fp16.loss_scale is {scale}, but --loss-scale is {constant or 0}: {fix}, or change the file"
    if constant is None:
        yield from _initial_loss_scale(
            section.get("initial_scale_power", "auto"), optimizer.initial_loss_scale
        )
        yield from _compare(
            in_file, "fp16.loss_scale_window", "--loss-scale-window", optimizer.loss_scale_window
        )
        yield from _compare(in_file, "fp16.hysteresis", "--hysteresis", optimizer.hysteresis)
        yield from _compare(in_file, "fp16.min_loss_scale", "--min-loss-scale", optimizer.min_loss_scale)


def _initial_loss_scale(power: Any, initial: float) -> Iterator[str]:
    is_number = isinstance(power, int | float) and abs(power) < 1024  # a larger power of two is not a float
    if power != "auto" and not (is_number and 2.0**power == initial):
        scale = f", a loss scale of {2.0**power}" if is_number else ""
        yield (
            f"fp16.initial_scale_power is {power}{scale}, but --initial-loss-scale is {initial}: "
            "make them equal"
        )


def _loss_scale_keys(config: Config) -> Collection[str]:
    """Return the settings in the section of fp16 that `_loss_scaling` compares."""
    if config.model.params_dtype != "fp16":
        return ()
    if config.optimizer.loss_scale is not None:
        return ("loss_scale",)
    return ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")


def _zero(settings: Mapping[str, Any], zero_stage: int) -> Iterator[str]:
    section = settings.get("zero_optimization", {})
    stage = section.get("stage", 0) if isinstance(section, dict) else section
    return _compare({"zero_optimization.stage": stage}, "zero_optimization.stage", "--zero-stage", zero_stage)


def _offload(settings: Mapping[str, Any]) -> Iterator[str]:
    section = settings.get("zero_optimization", {})
    for name, (what, stages) in _OFFLOADED.items() if isinstance(section, dict) else ():
        value = section.get(name)
        device = value.get("device", "none") if isinstance(value, dict) else "cpu" if value else "none"
        if device not in ("none", None):
            yield (
                f"zero_optimization.{name} offloads {what} to {device}, which megalite does not support: "
                f"remove it, and pass --zero-stage {stages} to shard {what} over data-parallel ranks"
            )


def _communication(settings: Mapping[str, Any], dtype: str | None) -> Iterator[str]:
    # DeepSpeed's default depends on the precision, so a file without the setting is not compared.
    wanted = settings.get("communication_data_type")
    if wanted is not None and wanted != (dtype or "fp32"):
        yield (
            f"communication_data_type is {wanted}, but --grad-communication-dtype is {dtype or 'fp32'}: "
            "make them equal"
        )


def _accumulation(settings: Mapping[str, Any], config: Config, world_size: int | None) -> Iterator[str]:
    """Compare the accumulation steps with the number of microbatches, global batch / (micro batch x dp)."""
    steps = settings.get("gradient_accumulation_steps", "auto")
    batch, micro = config.training.global_batch_size, config.training.micro_batch_size
    dp = replicas(config, world_size)
    if steps == "auto" or batch is None or dp is None or steps * micro * dp == batch:
        return
    yield (
        f"gradient_accumulation_steps is {steps}, but --global-batch-size {batch} / "
        f"(--micro-batch-size {micro} x data-parallel size {dp}) is {batch / (micro * dp):g}: make them equal"
    )


def _unused_settings(settings: Mapping[str, Any], config: Config) -> Iterator[str]:
    """Yield the settings that are not compared with a flag, those in a section as `section.name`."""
    for key, value in settings.items():
        if key in _SECTIONS and isinstance(value, dict):
            compared = {*_SECTIONS[key], *(_loss_scale_keys(config) if key == "fp16" else ())}
            yield from (f"{key}.{name}" for name in value if name not in compared)
        elif key not in _SECTIONS and key not in _COMPARED:
            yield key
