"""Record the progress of a run, and the state of its callbacks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from megalite.utils.errors import UserError, kind_of
from megalite.utils.files import parse_json

NUM_RECENT_LOSSES = 100
_MAX_COUNT = 1 << 63


@dataclass(frozen=True)
class TrainingProgress:
    """State of a run in addition to its tensors; it determines data order and schedules.

    Attributes:
        num_skipped: number of iterations in the whole run whose update was skipped.
        num_nan: number of iterations in the whole run whose loss was NaN or infinite.
        recent_losses: the last losses, oldest first, with which the spike check compares; empty without the
            check.
    """

    iteration: int = 0
    consumed_samples: int = 0
    num_skipped: int = 0
    num_nan: int = 0
    recent_losses: tuple[float, ...] = ()

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> TrainingProgress:
        """Return the progress of a record from JSON, the inverse of `asdict`; a missing count is 0.

        Raises:
            ValueError: the record is malformed.
        """
        names = {field.name for field in fields(TrainingProgress)}
        losses = record.get("recent_losses", [])
        counts = {name: count for name, count in record.items() if name != "recent_losses"}
        if (
            not {"iteration", "consumed_samples"} <= record.keys() <= names
            or not all(type(count) is int and 0 <= count < _MAX_COUNT for count in counts.values())
            or not isinstance(losses, list | tuple)
            or not all(isinstance(loss, float) for loss in losses)
        ):
            raise ValueError("run.json is damaged: its progress is malformed")
        return TrainingProgress(**counts, recent_losses=tuple(losses))

    def after(
        self,
        num_samples: int,
        *,
        skipped: bool = False,
        is_nan: bool = False,
        losses: tuple[float, ...] = (),
    ) -> TrainingProgress:
        """Return the progress after one more iteration of `num_samples` samples.

        Args:
            skipped: whether the update was skipped.
            is_nan: whether the loss was NaN or infinite.
            losses: the loss, if later losses are compared with it.
        """
        return TrainingProgress(
            self.iteration + 1,
            self.consumed_samples + num_samples,
            self.num_skipped + skipped,
            self.num_nan + is_nan,
            (self.recent_losses + losses)[-NUM_RECENT_LOSSES:],
        )


CallbackStates = Mapping[str, Mapping[str, Any]]
"""State of each callback that has one, by the name of its class."""
STATES = "callbacks"
"""Part of run.json with the states. Each is a string of JSON, because it may have numbers such as Infinity,
which standard JSON does not have: other programs can read run.json."""
MAX_BYTES = 1 << 20
"""Size limit of a callback's state. Every rank reads run.json as a whole."""


def recorded_state(name: str, state: Any) -> str:
    """Return a callback's state as JSON, from which `states_of` returns an equal state.

    Raises:
        UserError: the state is not a dict of JSON's types, or is too large.
    """
    if not isinstance(state, dict):
        raise UserError(f"{name}.state returns {kind_of(state)}: return a dict")
    if fault := next(_faults(state, f"{name}.state()"), None):
        raise UserError(
            f"{fault}: a checkpoint holds dicts with str keys, lists, str, int, float, bool and None; pass "
            "tensor.tolist() for a tensor"
        )
    text = json.dumps(state)
    if len(text) > MAX_BYTES:
        raise UserError(
            f"{name}.state returns {len(text):,} bytes as JSON: the limit is {MAX_BYTES:,}; write large data "
            "to a file of your own in on_save"
        )
    return text


def _faults(value: Any, where: str) -> Iterator[str]:
    """Yield each value that JSON would not give back as it was, and where it is."""
    if isinstance(value, dict):
        for key, each in value.items():
            if not isinstance(key, str):
                yield f"{where} has the key {key!r}"
            yield from _faults(each, f"{where}[{key!r}]")
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from _faults(each, f"{where}[{index}]")
    elif not isinstance(value, str | int | float | None):
        yield f"{where} is {kind_of(value)}"


def states_of(description: Mapping[str, Any]) -> CallbackStates:
    """Return the states in a run.json; empty without them, as in checkpoints of earlier versions.

    Raises:
        ValueError: they are malformed.
    """
    texts = description.get(STATES, {})
    damaged = ValueError(f"run.json is damaged: its {STATES} are malformed")
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise damaged
    try:
        states = {name: parse_json(text) for name, text in texts.items()}
    except ValueError:
        raise damaged from None
    if not all(isinstance(state, dict) for state in states.values()):
        raise damaged
    return states
