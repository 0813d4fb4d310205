"""A DeepSpeed JSON file, checked against the config.

There is no DeepSpeed here; its settings that have an equal must say what the flags say.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megalite.cli.findings import Findings
from megalite.config import Config
from megalite.config.rules.layout import replicas

_READ = {
    "bf16",
    "fp16",
    "zero_optimization",
    "gradient_clipping",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
}


def check_file(
    path: str,
    config: Config,
    precisions: Mapping[str, bool],
    zero_stage: str | None,
    world_size: int | None,
    findings: Findings,
) -> None:
    """Finds what the file says otherwise than the command line, and names both.

    Args:
        path: the JSON file.
        config: what fields, YAML file and preset come to.
        precisions: for `bf16` and `fp16` whether the command line has the flag.
        zero_stage: the word after --zero-stage, if it is given.
        world_size: number of ranks, if known.
        findings: gets the conflicts, and a notice of the settings that have no equal here.
    """
    try:
        settings = json.loads(Path(path).read_text(encoding="utf-8"))
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
        *_precision(settings, precisions),
        *_zero(settings, zero_stage),
        *_same(settings, "gradient_clipping", "--clip-grad", config.optimizer.clip_grad),
        *_same(
            settings, "train_micro_batch_size_per_gpu", "--micro-batch-size", config.training.micro_batch_size
        ),
        *_same(settings, "train_batch_size", "--global-batch-size", config.training.global_batch_size),
        *_accumulation(settings, config, world_size),
    ]
    findings.problems += [f"{path}: {conflict}" for conflict in conflicts]
    if unread := sorted(set(settings) - _READ):
        findings.notices.append(f"{path}: {', '.join(unread)} without effect: there is no DeepSpeed here")


def _precision(settings: Mapping[str, Any], precisions: Mapping[str, bool]) -> Iterator[str]:
    for name, is_flag in precisions.items():
        section = settings.get(name, {})
        enabled = section.get("enabled", False) if isinstance(section, dict) else section
        if enabled == "auto" or bool(enabled) == is_flag:
            continue  # where both want it, the flag is refused by itself
        if is_flag:
            yield f"{name}.enabled is not true, but --{name} is given: make them agree"
        else:
            yield f"{name}.enabled is true, but --{name} is not given: set it to false to train in fp32"


def _zero(settings: Mapping[str, Any], zero_stage: str | None) -> Iterator[str]:
    section = settings.get("zero_optimization", {})
    stage = section.get("stage", 0) if isinstance(section, dict) else section
    if stage == "auto":
        return
    if zero_stage is not None and str(stage) != zero_stage:
        yield f"zero_optimization.stage is {stage}, but --zero-stage is {zero_stage}: make them agree"
    elif zero_stage is None and stage != 0:
        yield f"zero_optimization.stage {stage} (sharded optimizer state) is not in this version: set it to 0"


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
