"""Settings of a DeepSpeed JSON file: their types, the fields that they set, and DeepSpeed's defaults.

``settings.yaml`` lists all settings, and the fields that follow from a value alone.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.config.arguments import nearest_hint
from megalite.config.fields import MAX_INT, fields_by_flag
from megalite.config.option import flag_of
from megalite.frontends import read_table
from megalite.utils.errors import shortened

CPU_CHECKPOINTING = "activation_checkpointing.cpu_checkpointing"
SCHEDULER, WARMUP_STEPS = "scheduler.type", "scheduler.params.warmup_num_steps"
_OFFLOAD = "zero_optimization.offload_optimizer"
_BREAKDOWN = "wall_clock_breakdown"
_OPTIMIZER, _LR, _PEAK = "optimizer.type", "optimizer.params.lr", "scheduler.params.warmup_max_lr"
_AUTO = "auto"
"""A value that lets the program choose, as in files for transformers."""


def tables() -> Mapping[str, Any]:
    """Return the tables of ``settings.yaml`` by their names."""
    tables: Mapping[str, Any] = read_table("deepspeed/settings.yaml")
    return tables


@dataclass(frozen=True)
class DeepSpeedSettings:
    """Settings of a file by their dotted names, such as ``zero_optimization.stage``.

    Attributes:
        values: the values, converted to their types.
        unknown: settings whose value is not known: it is ``auto``, or has a wrong type.
    """

    values: Mapping[str, Any]
    unknown: frozenset[str]

    @staticmethod
    def of(content: Mapping[str, Any]) -> tuple[DeepSpeedSettings, list[tuple[str, str]]]:
        """Return the settings of a file, and a message for each setting of a wrong type."""
        values, unknown, problems = dict[str, Any](), set[str](), list[tuple[str, str]]()
        found = dict(_flattened(content))
        for key, value in found.items():
            section, dot, name = key.partition(".")
            if (
                dot
                and section in tables()["switched"]
                and name != "enabled"
                and found.get(f"{section}.enabled") is not True
            ):
                continue
            if value == _AUTO and key not in (_OPTIMIZER, SCHEDULER):
                unknown.add(key)
                continue
            try:
                values[key] = _checked(key, value)
            except ValueError as error:
                problems.append((key, str(error)))
                unknown.add(key)
        return DeepSpeedSettings(values, frozenset(unknown)), problems

    def fields_of(self, key: str, value: Any) -> Mapping[str, Any]:
        """Return the fields that a setting sets, by name.

        Raises:
            ValueError: it is not supported; the message continues its name.
        """
        section = key.partition(".")[0]
        if key.startswith(("scheduler.params.", "optimizer.params.")) and not self._uses(key):
            return {}
        table = tables()
        if key in table["fields"]:
            return {table["fields"][key]: value}
        if key in table["fields_of_fp16"]:
            return {table["fields_of_fp16"][key]: value} if _may_be_fp16(self) else {}
        if key in table["by_value"]:
            return dict(table["by_value"][key].get(value, {}))
        if key in _DERIVED:
            return _DERIVED[key](self, value)
        if key in table["not_needed"] or key in kinds():
            return {}
        for name in (key, key.rpartition(".")[0], section):
            if name in table["refused"]:
                # A partition over 1 rank turns nothing on.
                is_off = value in (None, "none", 0, 1) and value is not True
                if is_off or self.values.get(f"{section}.enabled") is False:
                    return {}
                raise ValueError(f"is {shown(value)}: {table['refused'][name]}")
        raise ValueError(f"is not a known setting{nearest_hint(key, known_settings())}: remove it")

    def _uses(self, key: str) -> bool:
        """Return whether the parameters of the file's optimizer or scheduler are read.

        Raises:
            ValueError: there is none, or the scheduler has no such parameter.
        """
        section, _, name = key.split(".", 2)
        kind = self.values.get(f"{section}.type")
        if f"{section}.type" in self.unknown:
            return False  # the type is refused and reported
        if kind is None:
            raise ValueError(f"has no effect without {section}.type: set it, or remove the {section}")
        if section == "optimizer":
            return _is_adam(kind)
        if kind in tables()["schedules"] and name not in (known := tables()["schedules"][kind]["parameters"]):
            raise ValueError(f"is not a parameter of {kind}, which has {', '.join(known)}: remove it")
        return kind in tables()["schedules"]

    def unneeded(self) -> Iterator[tuple[str, str]]:
        """Yield the settings that change nothing, with the reason."""
        for key in self.values:
            if key in tables()["not_needed"]:
                yield key, tables()["not_needed"][key]
        if f"{_OFFLOAD}.nvme_path" in self.values and self.values.get(f"{_OFFLOAD}.device") != "nvme":
            yield f"{_OFFLOAD}.nvme_path", "the device is not nvme"
        if _LR in self.values and _scheduler_sets_peak(self):
            yield _LR, f"the rate is set by {SCHEDULER} {self.values[SCHEDULER]}"

    def soft_fields_of(self, key: str, value: Any) -> Mapping[str, Any]:
        """Return the fields set by DeepSpeed's settings for its own printing, by name."""
        if key == _BREAKDOWN:
            value = 2 if value else None
        name = tables()["soft"].get(key)
        return {} if name is None or value is None else {name: value}

    def defaults(self) -> dict[str, Any]:
        """Return DeepSpeed's defaults for settings missing from the file, where ours may differ."""
        found: dict[str, Any] = {"gradient_clipping": 0.0}
        if _is_adam(self.values.get(_OPTIMIZER, "")):
            is_torch = self.values.get("optimizer.params.torch_adam") and not _is_coupled(self)
            found |= {
                _LR: 1e-3,
                "optimizer.params.betas": [0.9, 0.999],
                "optimizer.params.eps": 1e-8,
                "optimizer.params.weight_decay": 0.01 if is_torch else 0.0,
            }
        if _is_dynamic(self):
            found["fp16.initial_scale_power"] = 16
        kind = self.values.get(SCHEDULER, "")
        for name in tables()["schedules"].get(kind, {}).get("parameters", ()):
            if name in tables()["schedule_defaults"] and (kind, name) != ("WarmupLR", "warmup_max_lr"):
                found[f"scheduler.params.{name}"] = tables()["schedule_defaults"][name]
        return {
            key: value for key, value in found.items() if key not in self.values and key not in self.unknown
        }


def _flattened(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings of an object and of the objects in it, by their dotted names."""
    for key, value in content.items():
        name = prefix + key.replace(".", r"\.")  # a name with a dot is no setting of DeepSpeed's
        is_section = name not in kinds()
        if isinstance(value, dict) and (value or is_section):
            yield from _flattened(value, f"{name}.")
        elif value is not None or name not in sections():
            yield name, value


def _checked(key: str, value: Any) -> Any:
    """Return the value of a setting, converted to its type; settings that are not read are unchanged.

    Raises:
        ValueError: it has another type; the message continues the setting's name.
    """
    if key in sections():
        raise ValueError(f"is {shown(value)}: it must be an object of settings")
    if key not in kinds():
        return value
    kind, is_optional = kinds()[key]
    return None if value is None and is_optional else _converted(kind, value)


def shown(value: Any) -> str:
    """Return a value as written in the file, shortened."""
    return shortened(json.dumps(value))


def _wrong(value: Any, expected: str) -> ValueError:
    return ValueError(f"is {shown(value)}: it must be {expected}")


_TYPES: Mapping[str, tuple[Any, str]] = {
    "bool": ((bool,), "true or false"),
    "float": ((int, float), "a number"),
    "int": ((int, float), "a whole number"),  # files have sizes such as 5e8
    "str": ((str,), "a string"),
}


def _converted(kind: str, value: Any) -> Any:
    if kind == "two_floats":
        if not isinstance(value, list) or len(value) != 2:
            raise _wrong(value, "a list of two numbers")
        return [_converted("float", item) for item in value]
    types, expected = _TYPES[kind]
    if not isinstance(value, types) or (isinstance(value, bool) and kind != "bool"):
        raise _wrong(value, expected)
    if kind == "float" and not abs(value) <= sys.float_info.max:
        raise _wrong(value, "a finite number")
    if kind != "int":
        return value
    if not -MAX_INT <= value <= MAX_INT:
        raise _wrong(value, "a whole number of at most 2**63 - 1")
    if value != int(value):
        raise _wrong(value, expected)
    return int(value)


def _sum_type(settings: DeepSpeedSettings, name: str | None) -> Mapping[str, Any]:
    if name not in (None, "fp32"):
        raise ValueError(f"is {shown(name)}: gradients are summed in fp32, set it to fp32 or remove it")
    return {}


def _may_be_fp16(settings: DeepSpeedSettings) -> bool:
    """Return whether the run has a loss scale, or may have one because the precision is left to a flag."""
    return settings.values.get("fp16.enabled", "fp16.enabled" in settings.unknown) is True


def _is_dynamic(settings: DeepSpeedSettings) -> bool:
    return _may_be_fp16(settings) and not settings.values.get("fp16.loss_scale")


def _initial_loss_scale(settings: DeepSpeedSettings, power: float) -> Mapping[str, Any]:
    if not _is_dynamic(settings):
        return {}
    if abs(power) >= 1024:  # a larger power of two is not a float
        raise _wrong(power, "the exponent of a loss scale, such as 16")
    return {"initial_loss_scale": 2.0**power}


def _is_adam(name: str) -> bool:
    return name.lower() in tables()["optimizers"]


def _optimizer(settings: DeepSpeedSettings, name: str) -> Mapping[str, Any]:
    """Check that the optimizer is AdamW, or the equivalent Adam without weight decay."""
    if not _is_adam(name):
        raise ValueError(f"is {shown(name)}: the optimizer is AdamW, choose one of Adam, AdamW, FusedAdam")
    if _is_coupled(settings):
        if settings.values.get("optimizer.params.weight_decay"):
            raise ValueError(
                f"is {name} with adam_w_mode false, which adds weight_decay to the gradient: weight decay is "
                "decoupled here, remove adam_w_mode or set weight_decay to 0"
            )
        return {"weight_decay": 0.0}
    return {}


def _is_coupled(settings: DeepSpeedSettings) -> bool:
    """Return whether weight decay is added to the gradient: DeepSpeed ignores the mode of an AdamW."""
    is_adamw = settings.values.get(_OPTIMIZER, "adam").lower() == "adamw"
    return not is_adamw and settings.values.get("optimizer.params.adam_w_mode") is False


def _scheduler_sets_peak(settings: DeepSpeedSettings) -> bool:
    """Return whether the scheduler replaces the optimizer's learning rate."""
    kind = settings.values.get(SCHEDULER)
    has_default = kind == "WarmupDecayLR" and _PEAK not in settings.unknown
    return kind in ("WarmupLR", "WarmupDecayLR") and (_PEAK in settings.values or has_default)


def _scheduler(settings: DeepSpeedSettings, name: str) -> Mapping[str, Any]:
    schedules = tables()["schedules"]
    if name not in schedules:
        raise ValueError(
            f"is {shown(name)}: choose one of {', '.join(schedules)}, or remove the scheduler and pass "
            "--lr-decay-style"
        )
    return {"lr_decay_style": schedules[name]["decay"], "lr_step_timing": "deepspeed"}


def _warmup_steps(settings: DeepSpeedSettings, steps: int) -> Mapping[str, Any]:
    """Return the length of the warm-up. In DeepSpeed it has at least two updates."""
    if steps < 1:
        raise _wrong(steps, "a positive whole number")
    return {"lr_warmup_iters": max(steps, 2)}


def _warmup_min_lr(settings: DeepSpeedSettings, rate: float) -> Mapping[str, Any]:
    """Return the learning rate at the start of the warm-up. A WarmupDecayLR decays to it."""
    is_minimum = settings.values[SCHEDULER] == "WarmupDecayLR"
    return {"lr_warmup_init": rate, **({"min_lr": rate} if is_minimum else {})}


def _share_of_lr(name: str) -> Callable[[DeepSpeedSettings, float], Mapping[str, Any]]:
    def fields(settings: DeepSpeedSettings, ratio: float) -> Mapping[str, Any]:
        if ratio and _LR not in settings.values:
            raise ValueError(f"needs {_LR}: set it to a number")
        return {name: settings.values[_LR] * ratio if ratio else 0.0}

    return fields


def _offload_device(settings: DeepSpeedSettings, device: str) -> Mapping[str, Any]:
    if device == "none":
        return {}
    if device == "cpu":
        return {"optimizer_cpu_offload": True}
    if device != "nvme":
        raise ValueError(f"is {shown(device)}: choose one of none, cpu, nvme")
    folder = settings.values.get(f"{_OFFLOAD}.nvme_path")
    if folder is None:
        raise ValueError("is nvme, which needs nvme_path: set it to a folder on a local disk")
    return {"optimizer_nvme_offload": folder}


def _offload_ratio(settings: DeepSpeedSettings, ratio: float) -> Mapping[str, Any]:
    device = settings.values.get(f"{_OFFLOAD}.device", "none")
    if ratio == 0 and device != "none":
        raise ValueError(f"is 0, but {_OFFLOAD}.device is {device}: set the device to none")
    return {} if device == "none" else {"optimizer_offload_fraction": ratio}


def _profiled_depth(settings: DeepSpeedSettings, depth: int) -> Mapping[str, Any]:
    """Return the depth of the tables; -1 is the whole tree."""
    is_whole = depth == -1 or settings.values.get("flops_profiler.detailed") is False
    return {} if is_whole else {"profile_modules_depth": depth}


def _mics_shard_size(settings: DeepSpeedSettings, size: int | None) -> Mapping[str, Any]:
    """Return the size of the groups that ZeRO 3 shards within; -1 is off."""
    if size in (None, -1):
        return {}
    stage = settings.values.get("zero_optimization.stage")
    if stage != 3:
        raise ValueError(
            f"is {size} with zero_optimization.stage {stage}: it shards stage 3 only; remove it, and pass "
            f"--data-parallel-shard-degree {size} to shard stage 1 or 2 within groups"
        )
    assert size is not None
    if size < 1:
        raise _wrong(size, "a positive number of ranks")
    return {"data_parallel_shard_degree": size}


def _save_interval(settings: DeepSpeedSettings, seconds: float) -> Mapping[str, Any]:
    if seconds <= 0:
        raise _wrong(seconds, "a positive number of seconds")
    return {"save_interval_minutes": seconds / 60.0}


_DERIVED: Mapping[str, Callable[[DeepSpeedSettings, Any], Mapping[str, Any]]] = {
    # 0 is a dynamic scale.
    "fp16.loss_scale": lambda file, scale: {"loss_scale": scale or None} if _may_be_fp16(file) else {},
    "fp16.initial_scale_power": _initial_loss_scale,
    "nebula.persistent_time_interval": _save_interval,
    "communication_data_type": lambda _, name: {"grad_communication_dtype": None if name == "fp32" else name},
    "data_types.grad_accum_dtype": _sum_type,
    _LR: lambda file, lr: {} if _scheduler_sets_peak(file) else {"lr": lr},
    "optimizer.params.betas": lambda _, betas: {"adam_beta1": betas[0], "adam_beta2": betas[1]},
    _OPTIMIZER: _optimizer,
    "zero_optimization.mics_shard_size": _mics_shard_size,
    SCHEDULER: _scheduler,
    WARMUP_STEPS: _warmup_steps,
    "scheduler.params.warmup_min_lr": _warmup_min_lr,
    "scheduler.params.warmup_min_ratio": _share_of_lr("lr_warmup_init"),
    "scheduler.params.cos_min_ratio": _share_of_lr("min_lr"),
    f"{_OFFLOAD}.device": _offload_device,
    f"{_OFFLOAD}.ratio": _offload_ratio,
    "tensorboard.output_path": lambda file, path: {
        "tensorboard_dir": str(Path(path) / file.values.get("tensorboard.job_name", ""))
    },
    "flops_profiler.enabled": lambda file, is_on: (
        {"profile_modules": 1} if is_on and "flops_profiler.profile_step" not in file.values else {}
    ),
    "flops_profiler.module_depth": _profiled_depth,
}
"""Functions that return the fields of the settings in the table `derived`."""


@functools.cache
def kinds() -> Mapping[str, tuple[str, bool]]:
    """Return the type of every setting that is read, and whether it may be null."""
    found = dict.fromkeys((f"{section}.enabled" for section in tables()["switched"]), ("bool", False))
    for table in ("fields", "fields_of_fp16", "soft"):
        for key, name in tables()[table].items():
            kind = fields_by_flag()[flag_of(name)].kind
            found[key] = kind.item.__name__, kind.is_optional
    for key, (kind, *_) in tables()["derived"].items():
        found[key] = kind.removeprefix("optional_"), kind.startswith("optional_")
    for key, row in tables()["read_with_others"].items():
        found[key] = row["type"], False
    return found | dict.fromkeys((*tables()["by_value"], _BREAKDOWN), ("bool", False))


@functools.cache
def known_settings() -> tuple[str, ...]:
    """Return every setting of the tables."""
    return (*kinds(), *tables()["not_needed"], *tables()["refused"])


@functools.cache
def sections() -> frozenset[str]:
    """Return the names of the objects that hold settings."""
    prefixes = (key.rpartition(".")[0] for key in known_settings())
    return frozenset(prefix for prefix in prefixes if prefix)
