"""The courses of learning rate and weight decay as a checkpoint records them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from megalite.config import Config, OptimizerConfig
from megalite.optim.learning_rate import DECAYS, LearningRate
from megalite.optim.weight_decay import WeightDecay

_STYLES = {
    "lr_decay_style": {"linear", "cosine", "constant", "inverse-square-root", "WSD"},
    "lr_wsd_decay_style": set(DECAYS),
    "weight_decay_incr_style": {"constant", "linear", "cosine"},
}


@dataclass(frozen=True)
class Schedule:
    """Learning rate and weight decay of every position in a run.

    Attributes:
        config: their fields.
        run_length: iterations or samples of the run.
        unit: that the run is counted in.
    """

    config: OptimizerConfig
    run_length: int
    unit: Literal["iters", "samples"]

    @staticmethod
    def of(config: Config) -> Schedule:
        """The schedule that a config asks for."""
        is_in_samples = config.training.is_counted_in_samples
        return Schedule(config.optimizer, config.training.length, "samples" if is_in_samples else "iters")

    @property
    def learning_rate(self) -> LearningRate:
        """The learning rate's course."""
        return LearningRate(self.config, self.run_length, self.unit)

    @property
    def weight_decay(self) -> WeightDecay:
        """The weight decay's course."""
        given = getattr(self.config, f"weight_decay_incr_{self.unit}")
        return WeightDecay(self.config, given or self.run_length)

    def fields(self) -> dict[str, Any]:
        """The config's fields that have an effect, lengths resolved: alike for schedules that are alike."""
        names, unit = ["lr", "lr_decay_style", "weight_decay_incr_style"], self.unit
        lengths: dict[str, float] = {f"lr_warmup_{unit}": self.learning_rate.warmup_length}
        if lengths[f"lr_warmup_{unit}"]:
            names.append("lr_warmup_init")
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
        return {name: getattr(self.config, name) for name in names} | lengths

    def with_fields(self, fields: Mapping[str, Any]) -> Schedule:
        """The schedule that recorded `fields`, in the same unit.

        Raises:
            ValueError: they are not what `fields` gives for any schedule in that unit.
        """
        try:
            config = replace(self.config, lr_warmup_fraction=None, **fields)
            found = Schedule(config, self.run_length, self.unit)
            is_sound = _is_sound(fields) and found.fields() == fields
        except TypeError as error:
            raise ValueError("its schedule is damaged") from error
        if not is_sound:
            raise ValueError("its schedule is damaged")
        return found


def _is_sound(fields: Mapping[str, Any]) -> bool:
    """Whether every value is of its field's kind."""
    return all(
        isinstance(value, str) and value in _STYLES[name]
        if name in _STYLES
        else isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
        for name, value in fields.items()
    )
