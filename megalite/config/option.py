"""Declare a config field: its flags, its range, what excludes it, and the rule for resuming with another."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from megalite.utils.files import url_problem
from megalite.utils.object_store import is_object_url

_KEY = "option"


class Range(NamedTuple):
    """Values that a field may have.

    Attributes:
        holds: whether a value is one of them.
        text: the values in words, for a message.
        fault: what the message says before `text` about any other value.
    """

    holds: Callable[[Any], Any]
    text: str
    fault: str = "is out of range: it must be"


POSITIVE = Range(lambda value: 0 < value < math.inf, "greater than 0")
NOT_NEGATIVE = Range(lambda value: 0 <= value < math.inf, "at least 0")
SIZE = Range(lambda value: 0 < value < 2**31, "greater than 0 and below 2**31")
NONZERO_SHARE = Range(lambda value: 0 < value <= 1, "greater than 0 and at most 1")
FRACTION = Range(lambda value: 0 <= value < 1, "at least 0 and below 1")
OPEN_SHARE = Range(lambda value: 0 < value < 1, "greater than 0 and below 1")
SHARE = Range(lambda value: 0 <= value <= 1, "from 0 to 1")
ABOVE_ONE = Range(lambda value: 1 < value < math.inf, "greater than 1")
AT_LEAST_ONE = Range(lambda value: 1 <= value < math.inf, "at least 1")
AT_LEAST_TWO = Range(lambda value: 2 <= value < 2**31, "at least 2 and below 2**31")
TIMERS = Range(lambda value: value in (0, 1, 2), "0, 1 or 2")
ZERO_STAGE = Range(lambda value: value in (0, 1, 2, 3), "0, 1, 2 or 3")
SEED = Range(lambda value: 0 <= value < 2**32, "at least 0 and below 2**32")
LOCAL_PATH = Range(
    lambda path: not url_problem(path),
    "a path on this machine or on a mounted file system; object storage holds corpora and checkpoints alone",
    "is a URL: pass",
)
"""Paths of folders and files. A URL would create a folder such as `s3:` in the working directory."""
FOLDER_OR_URL = Range(
    lambda path: not url_problem(path) or is_object_url(path),
    "a path on this machine or on a mounted file system, or s3://BUCKET/FOLDER, gs://... or az://...",
    "is a URL: pass",
)


class OnResume(Enum):
    """Rule for a run that resumes with a value that differs from the checkpoint's."""

    MODEL = "refused: the weights differ; some fields may change with --finetune"
    RUN = "refused: samples and dropout masks differ; --finetune allows it"
    SCHEDULE = "refused: --override-opt-param-scheduler or --use-checkpoint-opt-param-scheduler allow it"
    SETTING = "refused: the updates differ; --allow-settings-change allows it"
    DATA = "refused: the samples differ; --allow-data-change allows it"
    CORPUS = "compared by the content of the corpora and the parts that are read, not by the flag's text"
    TOKENIZER = "logged if the resulting tokenizer differs"
    LOGGED = "logged: it changes neither updates nor samples, or the log says where it does"
    FREE = "ignored: layout, folders, logging, and the end of the run"


@dataclass(frozen=True)
class Setting:
    """Condition on a field: it is set, or its value is one of some, or in a range."""

    field: str
    values: tuple[Any, ...] | Range | None = None
    why: str = ""
    """Why another field has no effect without this setting, where the value of this field does not say it."""

    def is_met(self, value: Any) -> bool:
        """Return whether the field's value meets the condition."""
        if self.values is None:
            return bool(value)
        if isinstance(self.values, Range):
            return value is not None and bool(self.values.holds(value))
        return value in self.values

    def is_met_in(self, values: Mapping[str, Any]) -> bool:
        """Return whether the values of the fields meet the condition."""
        return self.is_met(values[self.field])


@dataclass(frozen=True)
class AnyOf:
    """Condition that at least one of several fields is set, or has a value that holds."""

    fields: tuple[str, ...]
    why: str
    """Why another field has no effect without all of them."""
    holds: Callable[[Any], bool] = bool

    def is_met_in(self, values: Mapping[str, Any]) -> bool:
        """Return whether the values of the fields meet the condition."""
        return any(self.holds(values[field]) for field in self.fields)


def other_than(*values: Any) -> Range:
    """Return the range of all values but these."""
    return Range(lambda value: value not in values, f"not {' or '.join(map(str, values))}")


class Conflict(NamedTuple):
    """Two settings that exclude each other, and why, with what to pass instead."""

    one: Setting
    other: Setting
    why: str

    @property
    def fields(self) -> tuple[str, str]:
        """Return the names of both fields."""
        return self.one.field, self.other.field

    def is_met_in(self, values: Mapping[str, Any]) -> bool:
        """Return whether both settings are met."""
        return self.one.is_met_in(values) and self.other.is_met_in(values)

    def text(self, values: Mapping[str, Any]) -> str:
        """Return the message: `--dry-run without --world-size: pass it too`."""
        one, other = ((name, values[name]) for name in self.fields)
        is_missing = other[1] in (None, False)
        second = f"without {flag_of(other[0])}" if is_missing else f"with {flag_with_value(*other)}"
        return f"{flag_with_value(*one)} {second}{self.why}"


class Bound(NamedTuple):
    """Field whose value must not be above another field's.

    Attributes:
        name, most: the two fields; None in either of them is no bound.
        fix: what to pass instead; it may contain {value} and {most}.
        is_strict: the value must be below the other.
        unless: a field that replaces `name` or `most` if it is set.
    """

    name: str
    most: str
    fix: str = ": pass at most {most}"
    is_strict: bool = False
    unless: str = ""

    @property
    def fields(self) -> tuple[str, str]:
        """Return the names of both fields."""
        return self.name, self.most

    def is_met_in(self, values: Mapping[str, Any]) -> bool:
        """Return whether the value is above the bound."""
        value, most = values[self.name], values[self.most]
        if value is None or most is None or values.get(self.unless) is not None:
            return False
        return bool(value >= most if self.is_strict else value > most)

    def text(self, values: Mapping[str, Any]) -> str:
        """Return the message: `--min-lr 2.0 is above --lr 1.0, the peak: pass at most 1.0`."""
        value, most = (values[name] for name in self.fields)
        one, other = flag_with_value(self.name, value), flag_with_value(self.most, most)
        relation = "not below" if self.is_strict else "above"
        return f"{one} is {relation} {other}{self.fix.format(value=value, most=most)}"


_Settings = str | Setting | tuple[str | Setting, ...]
Conflicts = Mapping[_Settings, Mapping[_Settings, str]]
"""Type of a class's declaration `conflicts`: settings, each with those that exclude it, and why. A name
is a field that is set; several settings stand for each of them. A field without effect excludes nothing."""


def conflicts_in(declared: Conflicts) -> Iterator[Conflict]:
    """Yield the conflict of every pair of settings."""
    for ones, reasons in declared.items():
        for others, why in reasons.items():
            for one, other in itertools.product(_listed(ones), _listed(others)):
                yield Conflict(one, other, why)


def require_both(one: str, other: str) -> Conflicts:
    """Return the conflicts of two fields of which one is set without the other."""
    why = ": they have an effect only together; pass both, or remove it"
    return {one: {Setting(other, (None,)): why}, other: {Setting(one, (None,)): why}}


def _listed(settings: _Settings) -> list[Setting]:
    several = (settings,) if isinstance(settings, str | Setting) else settings
    return [Setting(each) if isinstance(each, str) else each for each in several]


@dataclass(frozen=True)
class Option:
    """Declaration of a config field, besides its type, its default and its documentation."""

    aliases: tuple[str, ...] = ()
    """More flags that take the field's value, such as `--tp`."""
    sets: Mapping[str, Any] | None = None
    """Flags without a value, each with the value that it sets, such as `--swiglu`."""
    choices: Mapping[str, str] | None = None
    """Names that other programs use for values, each with the value that it means."""
    missing: Mapping[str, str] | None = None
    """Values of other programs that megalite does not have, each with what to do instead."""
    allowed: Range | None = None
    """Range of the value, or of each element of a tuple; every number has one."""
    on_resume: OnResume | None = None
    """Rule for a run that resumes with another value; by default the group's `default_on_resume`."""
    differs_between_ranks: bool = False
    """True if the ranks of a run may have different values."""
    same_shapes: bool | tuple[str, ...] = False
    """Whether the value can change with --finetune because the weights keep their shapes; or these values."""
    only_with: tuple[Setting | AnyOf, ...] = ()
    """Conditions without which the field has no effect."""
    in_megatron: bool = True
    """True if Megatron's checkpoints have this field of the model, with the same name and meaning."""


def option(
    default: Any,
    *aliases: str,
    only_with: str | Setting | AnyOf | Sequence[Setting | AnyOf] = (),
    **declared: Any,
) -> Any:
    """Return a dataclass field with this default; for the other arguments see `Option`.

    Args:
        only_with: what the field needs to have an effect: a field that must be set, or conditions.
    """
    if isinstance(only_with, str):
        only_with = Setting(only_with)
    needs = (only_with,) if isinstance(only_with, Setting | AnyOf) else tuple(only_with)
    return field(default=default, metadata={_KEY: Option(aliases, only_with=needs, **declared)})


def option_of(field: Field[Any]) -> Option:
    """Return the declaration of a dataclass field."""
    found = field.metadata.get(_KEY, Option())
    assert isinstance(found, Option)
    return found


def flag_of(name: str) -> str:
    """Return the flag of a field: `--num-layers` for `num_layers`."""
    return f"--{name.replace('_', '-')}"


def flag_tokens(name: str, value: Any) -> list[str]:
    """Return a field and its value as tokens of a command line.

    A field that is True becomes its flag alone, and a field that is False becomes ``--no-NAME``.
    """
    if isinstance(value, bool):
        return [flag_of(name) if value else f"--no-{flag_of(name)[2:]}"]
    return [flag_of(name), *(map(format_value, value) if isinstance(value, tuple) else [str(value)])]


def flag_with_value(name: str, value: Any) -> str:
    """Return a field and its value as on a command line: `--lr 0.1`, `--finetune`, `--no-load-optim`."""
    return " ".join(flag_tokens(name, value))


def format_value(value: Any) -> str:
    """Return a value as on a command line; the elements of a tuple are separated by spaces."""
    return " ".join(map(format_value, value)) if isinstance(value, tuple) else str(value)
