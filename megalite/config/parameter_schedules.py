"""Learning rate and weight decay as functions of the training progress, with Megatron's formulas."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from megalite.config import Config, OptimizerConfig
from megalite.config.fields import fields_by_name

DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (math.cos(math.pi * progress) + 1.0),
    "exponential": lambda progress: 2.0 * 0.5**progress - 1.0,
    "minus_sqrt": lambda progress: 1.0 - math.sqrt(progress),
    "constant": lambda progress: 1.0,
}
"""Rate between the minimum (0) and the peak (1), as a function of the decay's progress in [0, 1]."""


@dataclass(frozen=True)
class LearningRate:
    """Learning rate, warm-up and then decay, by the position in the run alone.

    The update that brings the run to a position uses the rate that Megatron logs for it. Megatron's own
    update uses the previous rate, so its first update, at the start of warm-up, has rate 0. With
    `lr_step_timing` deepspeed, update n has the rate of update n in DeepSpeed (WarmupLR, WarmupDecayLR and
    WarmupCosineLR).

    Args:
        run_length: length of the run in iterations or samples; the decay's length unless the config sets it.
        unit: unit of the run's length and of the config's fields.
        batch_size: samples per iteration, after any ramp-up.
    """

    config: OptimizerConfig
    run_length: int
    unit: Literal["iters", "samples"] = "iters"
    batch_size: int = 1

    @property
    def decay_length(self) -> int:
        """Return the position at which the decay ends."""
        return self._length("lr_decay") or self.run_length

    @property
    def warmup_length(self) -> float:
        """Return the length of the warm-up; it may not be an integer if it is a fraction of the decay."""
        fraction = self.config.lr_warmup_fraction
        return self._length("lr_warmup") if fraction is None else fraction * self.decay_length

    def __call__(self, position: int) -> float:
        """Return the rate of the update that brings the run to `position`.

        Args:
            position: number of the iteration, from 1, or the samples consumed including this iteration.
        """
        if self.config.lr_step_timing == "deepspeed":
            return self._after_steps(position - 1)
        if position <= self.warmup_length:
            return self._warmup(position)
        return self._decayed(position)

    def _after_steps(self, steps: int) -> float:
        """Return the rate after this number of steps of a DeepSpeed scheduler; its first step is number 0."""
        style = self.config.lr_decay_style
        if steps == 0:
            return 0.0 if style == "cosine" else self.config.lr_warmup_init
        if steps <= self.warmup_length:
            return self._warmup(steps - 1 if self.config.lr_warmup_style == "linear" else steps)
        return self._decayed(steps - 1 if style == "linear" else steps)

    def _warmup(self, position: int) -> float:
        start, length = self.config.lr_warmup_init, self.warmup_length
        if self.config.lr_warmup_style == "linear":
            return start + (self.config.lr - start) * position / length
        share = math.log(position) / math.log(length) if length > 1 else 1.0
        return start + (self.config.lr - start) * share

    def _decayed(self, position: int) -> float:
        """Return the rate at a position after the warm-up."""
        peak, least, style = self.config.lr, self.config.min_lr, self.config.lr_decay_style
        if style == "constant":
            return peak
        if style == "inverse-square-root" and position <= self.decay_length:
            sample = 1 if self.unit == "samples" else 1 / self.batch_size  # Megatron counts in samples
            return max(least, peak * math.sqrt(max(self.warmup_length, sample) / position))
        if position >= self.decay_length:
            return least
        return least + self._decay(position) * (peak - least)

    def _decay(self, position: int) -> float:
        if self.config.lr_decay_style != "WSD":
            progress = (position - self.warmup_length) / (self.decay_length - self.warmup_length)
            return DECAYS[self.config.lr_decay_style](progress)
        length = self._length("lr_wsd_decay")
        since = position - (self.decay_length - length)
        return 1.0 if since <= 0 else DECAYS[self.config.lr_wsd_decay_style](since / length)

    def _length(self, name: str) -> int:
        """Return the config's field with this name in the run's unit; 0 if it is not set."""
        return getattr(self.config, f"{name}_{self.unit}") or 0


@dataclass(frozen=True)
class WeightDecay:
    """Weight decay, which may rise over the run, by the position in the run alone.

    Args:
        length: number of iterations or samples until it reaches its final value.
    """

    config: OptimizerConfig
    length: int

    def __call__(self, position: int) -> float:
        """Return the weight decay of the update that brings the run to `position`."""
        if self.config.weight_decay_incr_style == "constant":
            return self.config.weight_decay
        start, end = self.config.start_weight_decay, self.config.end_weight_decay
        assert start is not None and end is not None
        share = min(position / self.length, 1.0)
        if self.config.weight_decay_incr_style == "cosine":
            share = 0.5 * (math.cos(math.pi * (1.0 - share)) + 1.0)
        return start + share * (end - start)


@dataclass(frozen=True)
class OptimizerSchedules:
    """Learning rate and weight decay at every position in a run.

    Attributes:
        config: the optimizer's config.
        run_length: length of the run in iterations or samples.
        unit: unit of the run's length.
        batch_size: samples per iteration, after any ramp-up.
    """

    config: OptimizerConfig
    run_length: int
    unit: Literal["iters", "samples"]
    batch_size: int

    @staticmethod
    def of(config: Config, dp: int) -> OptimizerSchedules:
        """Return the schedules of a config on `dp` replicas."""
        return OptimizerSchedules(
            config.optimizer,
            config.training.length,
            "samples" if config.training.is_counted_in_samples else "iters",
            config.global_batch(dp),
        )

    @property
    def learning_rate(self) -> LearningRate:
        """Return the schedule of the learning rate."""
        return LearningRate(self.config, self.run_length, self.unit, self.batch_size)

    @property
    def decoupled_learning_rate(self) -> LearningRate | None:
        """Return the schedule of the embedding's and output layer's separate learning rate, or None."""
        peak, least = self.config.decoupled_lr, self.config.decoupled_min_lr
        if peak is None:
            return None
        own = replace(self.config, lr=peak, min_lr=self.config.min_lr if least is None else least)
        return LearningRate(own, self.run_length, self.unit, self.batch_size)

    @property
    def weight_decay(self) -> WeightDecay:
        """Return the schedule of the weight decay."""
        length = getattr(self.config, f"weight_decay_incr_{self.unit}")
        return WeightDecay(self.config, length or self.run_length)

    def fields(self) -> dict[str, Any]:
        """Return the config's effective fields, with resolved lengths: equal for equal schedules."""
        names, unit = ["lr", "lr_decay_style", "weight_decay_incr_style"], self.unit
        lengths: dict[str, float] = {f"lr_warmup_{unit}": self.learning_rate.warmup_length}
        if lengths[f"lr_warmup_{unit}"]:
            names += ["lr_warmup_init", *self._not_default("lr_warmup_style")]
        names += self._not_default("lr_step_timing")
        if self.config.lr_decay_style != "constant":
            names.append("min_lr")
            lengths[f"lr_decay_{unit}"] = self.learning_rate.decay_length
        if self.config.lr_decay_style == "WSD":
            names += ["lr_wsd_decay_style", f"lr_wsd_decay_{unit}"]
        if self.config.weight_decay_incr_style == "constant":
            names.append("weight_decay")
        else:
            names += ["start_weight_decay", "end_weight_decay"]
            lengths[f"weight_decay_incr_{unit}"] = self.weight_decay.length
        fields = {name: getattr(self.config, name) for name in names} | lengths
        if decoupled := self.decoupled_learning_rate:
            fields["decoupled_lr"] = decoupled.config.lr
            if self.config.lr_decay_style != "constant":
                fields["decoupled_min_lr"] = decoupled.config.min_lr
        return fields

    def _not_default(self, name: str) -> list[str]:
        """Return a field's name if its value is not the default; earlier versions do not record it."""
        return [name] if getattr(self.config, name) != getattr(OptimizerConfig(), name) else []

    def with_fields(self, fields: Mapping[str, Any]) -> OptimizerSchedules:
        """Return the schedules that `fields` were recorded from, in the same unit.

        Raises:
            ValueError: no schedules in this unit have these fields.
        """
        absent = {
            **{"lr_warmup_fraction": None, "decoupled_lr": None, "decoupled_min_lr": None},
            **{"lr_warmup_style": "linear", "lr_step_timing": "megatron"},
        }
        try:
            config = replace(self.config, **{**absent, **fields})
            found = replace(self, config=config)
            is_sound = _is_sound(fields) and found.fields() == fields
        except TypeError as error:
            raise ValueError("its schedule is damaged") from error
        if not is_sound:
            raise ValueError("its schedule is damaged")
        return found


def _is_sound(fields: Mapping[str, Any]) -> bool:
    """Return whether every value has the type and range of its field."""
    choices = {name: fields_by_name()[name].kind.choices for name in fields}
    return all(
        isinstance(value, str) and value in choices[name]
        if choices[name]
        else isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
        for name, value in fields.items()
    )
