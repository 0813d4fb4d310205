"""Read the settings of the config from a DeepSpeed JSON file.

megalite does not use DeepSpeed. Each setting in the file either sets a field, or is not needed (the log says
why), or is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megalite.config.arguments import Diagnostics, UserSetting, parse_value
from megalite.config.config import Config, layers_per_stage, num_stages
from megalite.config.fields import ConfigField, fields_by_flag
from megalite.config.option import flag_of, flag_with_value
from megalite.config.rules.parallel_rules import sample_ranks
from megalite.frontends.deepspeed.settings import (
    CPU_CHECKPOINTING,
    SCHEDULER,
    WARMUP_STEPS,
    DeepSpeedSettings,
    shown,
    tables,
)
from megalite.utils.files import parse_json

_SCHEDULE = ("lr", "min_lr", "lr_warmup_init", "lr_warmup_iters", "lr_decay_iters", "lr_step_timing")
"""Fields that depend on both the optimizer and the scheduler."""


@dataclass(frozen=True)
class DeepSpeedFile:
    """Settings of a DeepSpeed file. Errors are reported with the file's name."""

    path: str
    found: DeepSpeedSettings

    @staticmethod
    def read(path: str, diagnostics: Diagnostics) -> DeepSpeedFile | None:
        """Read a file, or report why it cannot be read."""
        try:
            content = parse_json(Path(path).read_text(encoding="utf-8"), unique_keys=True)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            diagnostics.add_problem(f"--deepspeed_config {path} cannot be read: {reason}")
            return None
        if not isinstance(content, dict):
            diagnostics.add_problem(
                f"--deepspeed_config {path} is not a JSON object: pass DeepSpeed's own file"
            )
            return None
        found, problems = DeepSpeedSettings.of(content)
        file = DeepSpeedFile(path, found)
        for key, problem in problems:
            file._report(key, problem, diagnostics)
        return file

    def _report(self, key: str, problem: object, diagnostics: Diagnostics) -> None:
        """Report a mistake in a setting, and the fields that are invalid because of it."""
        copied = (tables()["fields"].get(key, ""),)
        invalid = _SCHEDULE if key.startswith(("optimizer", "scheduler")) else copied
        diagnostics.add_problem(f"{self.path}: {key} {problem}", *invalid)

    def settings(self, diagnostics: Diagnostics) -> list[UserSetting]:
        """Return the fields that the file sets; report settings that cannot be applied."""
        found = list(self._settings_of(self.found.values, self.found.fields_of, diagnostics))
        if unneeded := [f"{key} ({reason})" for key, reason in self.found.unneeded()]:
            diagnostics.notices.append(f"{self.path}: not needed: {', '.join(unneeded)}")
        return found

    def soft_settings(self, diagnostics: Diagnostics) -> list[UserSetting]:
        """Return settings that any flag or file overrides: DeepSpeed's own printing and its defaults."""
        printing = self._settings_of(self.found.values, self.found.soft_fields_of, diagnostics)
        return [*printing, *self._settings_of(self.found.defaults(), self.found.fields_of, diagnostics)]

    def _settings_of(
        self,
        values: Mapping[str, Any],
        fields_of: Callable[[str, Any], Mapping[str, Any]],
        diagnostics: Diagnostics,
    ) -> Iterator[UserSetting]:
        """Yield the fields that `fields_of` returns for each setting; report settings for which it raises."""
        for key, value in values.items():
            text = shown(value)
            if key == "fp16.loss_scale" and not value:
                text = f"{text}, which is dynamic,"
            if key not in self.found.values:
                text = f"not set, which is {text} in DeepSpeed"
            try:
                for name, field_value in fields_of(key, value).items():
                    yield UserSetting(*_parsed(name, field_value, value), f"{self.path}: {key}", text)
            except ValueError as error:
                self._report(key, error, diagnostics)

    def completed(self, config: Config, world_size: int | None, diagnostics: Diagnostics) -> Config:
        """Apply the settings that depend on the whole config, and report contradictions to it."""
        for key, name in (("bf16", "bf16"), ("bfloat16", "bf16"), ("fp16", "fp16")):
            if self.found.values.get(f"{key}.enabled") is False and config.model.params_dtype == name:
                diagnostics.add_problem(
                    f"{self.path}: {key}.enabled is false, but --params-dtype is {name}: remove one"
                )
        for setting in self.soft_settings(Diagnostics()):  # their mistakes have been reported already
            name, key = setting.field.name, setting.name.removeprefix(f"{self.path}: ")
            used = config.values()[name]
            if used != setting.value:
                diagnostics.notices.append(
                    f"{setting.name} is {setting.text}, but {flag_with_value(name, used)} is used"
                )
            elif key not in self.found.values and used != setting.field.default:
                diagnostics.notices.append(
                    f"{setting.name} is {setting.text}: {flag_with_value(name, used)} is used"
                )
        self._report_warmup(config, diagnostics)
        config = self._with_offload(config, diagnostics)
        return self._with_accumulation(config, world_size, diagnostics)

    def _report_warmup(self, config: Config, diagnostics: Diagnostics) -> None:
        """Log what a user of a scheduler may not expect: a minimal warm-up, and one that is too long."""
        if self.found.values.get(SCHEDULER) not in tables()["schedules"]:
            return
        steps, passed = config.optimizer.lr_warmup_iters, self.found.values.get(WARMUP_STEPS)
        if passed is not None and passed < steps:
            diagnostics.notices.append(
                f"{self.path}: {WARMUP_STEPS} is {passed}: as in DeepSpeed, the warm-up has {steps} updates"
            )
        last = config.optimizer.lr_decay_iters or config.training.train_iters
        if last is not None and steps >= last:
            diagnostics.notices.append(
                f"{self.path}: {WARMUP_STEPS} {steps}: the warm-up does not end within the {last} updates of "
                "the schedule"
            )

    def _with_offload(self, config: Config, diagnostics: Diagnostics) -> Config:
        """Offload the inputs of all recomputed layers, if the file says so."""
        key, recompute = CPU_CHECKPOINTING, config.recompute
        if not self.found.values.get(key):
            return config
        # If the layout has another mistake there are no stages; the rules report it.
        number = max(layers_per_stage(config)) if num_stages(config) <= config.model.num_layers else 0
        if recompute.recompute_granularity != "full":
            diagnostics.add_problem(
                f"{self.path}: {key} is true, but no layer is recomputed: pass --recompute-granularity full, "
                f"or set it to false and pass --cpu-offload-activations {number}"
            )
        elif recompute.cpu_offload_activations not in (0, number):
            diagnostics.add_problem(
                f"{self.path}: {key} is true, which offloads the {number} layers of a stage, but "
                f"--cpu-offload-activations is {recompute.cpu_offload_activations}: make them equal"
            )
        return replace(config, recompute=replace(recompute, cpu_offload_activations=number))

    def _with_accumulation(self, config: Config, world_size: int | None, diagnostics: Diagnostics) -> Config:
        """Set the global batch from the accumulation steps, or compare it with them."""
        steps = self.found.values.get("gradient_accumulation_steps")
        if steps is None:
            return config
        training, dp = config.training, sample_ranks(config, world_size)
        if steps < 1:
            diagnostics.add_problem(
                f"{self.path}: gradient_accumulation_steps is {steps}: it must be a positive whole number"
            )
        elif dp is None and training.global_batch_size is None:
            diagnostics.add_problem(
                f"{self.path}: gradient_accumulation_steps is {steps}, which makes a global batch once the "
                "number of ranks is known: pass --global-batch-size, or start with torchrun"
            )
        elif dp is not None and training.global_batch_size is None:
            batch = steps * training.micro_batch_size * dp
            return replace(config, training=replace(training, global_batch_size=batch))
        elif dp is not None and steps * training.micro_batch_size * dp != training.global_batch_size:
            assert training.global_batch_size is not None
            each = training.global_batch_size / (training.micro_batch_size * dp)
            diagnostics.add_problem(
                f"{self.path}: gradient_accumulation_steps is {steps}, but --global-batch-size "
                f"{training.global_batch_size} / (--micro-batch-size {training.micro_batch_size} x "
                f"data-parallel size {dp}) is {each:g}: make them equal"
            )
        return config


def _parsed(name: str, value: Any, original: Any) -> tuple[ConfigField, Any]:
    """Return a field and its value, checked as if a flag had set it.

    Args:
        original: the setting's value in the file, from which `value` is derived.

    Raises:
        ValueError: the field cannot have the value; the message continues the setting's name.
    """
    field = fields_by_flag()[flag_of(name)]
    if value is None:
        return field, None
    parsed = parse_value(field, (value if isinstance(value, str) else str(value).lower(),))
    allowed = field.declared.allowed
    if allowed is not None and not allowed.holds(parsed):
        raise ValueError(f"is {shown(original)}: it must be {allowed.text}")
    return field, parsed
