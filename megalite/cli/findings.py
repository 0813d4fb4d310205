"""What reading a command line brings to light."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megalite.cli.fields import ConfigField


class Setting(NamedTuple):
    """A field's value as one place gives it.

    Attributes:
        name: what the user wrote there, `--tp` or `run.yaml line 3: tp`.
    """

    field: ConfigField
    value: Any
    name: str


@dataclass
class Findings:
    """Collects mistakes and remarks, so that all of them are told and not only the first."""

    problems: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    doubted: set[str] = field(default_factory=set)
    """Fields whose value is not what the user wanted, because it could not be read."""

    def doubt(self, problem: str, *names: str) -> None:
        """Adds a mistake that leaves these fields without their value."""
        self.problems.append(problem)
        self.doubted.update(names)

    def unique(self, settings: Iterable[Setting]) -> dict[str, Setting]:
        """The settings by field. Two names of one field that disagree are a mistake."""
        chosen: dict[str, Setting] = {}
        for setting in settings:
            name = setting.field.name
            before = chosen.get(name, setting)
            if before.value != setting.value:
                self._differ(before, setting)
            chosen[name] = setting
        return chosen

    def _differ(self, before: Setting, after: Setting) -> None:
        both = f"{_as_written(before)} and {_as_written(after)}"
        if before.name == after.name:
            self.notices.append(f"{both} are both given: the last one counts")
        else:
            self.doubt(f"{both} set the same option: leave one out", after.field.name)


def _as_written(setting: Setting) -> str:
    """The name with its value, or alone where it stands for one: --bf16."""
    stands_alone = setting.name.replace("_", "-") in setting.field.sets
    return setting.name if stands_alone else f"{setting.name} {shown(setting.value)}"


def shown(value: Any) -> str:
    """A value as it is written on a command line."""
    return " ".join(map(shown, value)) if isinstance(value, tuple) else str(value)
