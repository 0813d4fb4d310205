"""The fields of the config as flags: their names and types, and which of them have an effect."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, NamedTuple, Union

from megalite.config.config import Config
from megalite.config.model.model_config import MOST_LAYERS, ModelConfig
from megalite.config.option import (
    AnyOf,
    Bound,
    Conflict,
    OnResume,
    Option,
    Range,
    Setting,
    conflicts_in,
    flag_of,
    flag_with_value,
    format_value,
    option_of,
)

_MOST_VALUES = 3
"""Most values that a message names."""
MAX_INT = 2**63 - 1
"""Largest whole number of a field. PyTorch's sizes and most file formats cannot be larger."""
_GROUPS: Mapping[str, type] = {
    name: part for name, part in typing.get_type_hints(Config).items() if name in vars(Config())
}


class ValueKind(NamedTuple):
    """Type of a field.

    Attributes:
        item: type of the value, or of an element of a tuple.
        choices: the allowed values; empty if any value is allowed.
        is_many: the field is a tuple.
        unpacks_one: a single value is not in a tuple.
        is_optional: the field may be None.
    """

    item: type
    choices: tuple[str, ...]
    is_many: bool
    is_optional: bool
    unpacks_one: bool = False


@dataclass(frozen=True)
class ConfigField:
    """Field of a sub-config, with all its names on the command line."""

    group: str
    name: str
    kind: ValueKind
    default: Any
    flags: tuple[str, ...]
    """Flags that take the field's value; the first is the field's own name."""
    sets: Mapping[str, Any]
    """Flags without a value, each with the value that it sets."""
    choices: Mapping[str, str]
    """The allowed values, by their names in lower case, including names that other programs use."""
    declared: Option
    on_resume: OnResume
    """Rule for a run that resumes with another value."""
    section: str | None
    """Part of the group that the field belongs to in YAML files, such as the model's attention."""


@functools.cache
def config_fields() -> tuple[ConfigField, ...]:
    """Return all fields of the config, group by group."""
    return tuple(field for group, part in _GROUPS.items() for field in _fields_of(group, part))


@functools.cache
def fields_by_name() -> Mapping[str, ConfigField]:
    """Return every field by its name; no two groups share a name."""
    table = {field.name: field for field in config_fields()}
    assert len(table) == len(config_fields())
    return table


@functools.cache
def declared_conflicts() -> tuple[Conflict | Bound, ...]:
    """Return the conflicts and bounds that the config and all classes of its groups declare."""
    classes = [vars(each) for group in (Config, *_GROUPS.values()) for each in group.__mro__]
    conflicts = (conflict for each in classes for conflict in conflicts_in(each.get("conflicts", {})))
    return (*conflicts, *(bound for each in classes for bound in each.get("bounds", ())))


def value_of(name: str, config: Config) -> Any:
    """Return the value of a field by its name."""
    return getattr(getattr(config, fields_by_name()[name].group), name)


class FieldValues(Mapping[str, Any]):
    """Values of a config's fields by name, each read when it is requested."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def __getitem__(self, name: str) -> Any:
        return value_of(name, self._config)

    def __iter__(self) -> Iterator[str]:
        return iter(fields_by_name())

    def __len__(self) -> int:
        return len(fields_by_name())


def with_fields(config: Config, **values: Any) -> Config:
    """Return the config with some fields of any groups changed."""
    changes: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        changes.setdefault(fields_by_name()[name].group, {})[name] = value
    groups = {group: replace(getattr(config, group), **own) for group, own in changes.items()}
    return replace(config, **groups)


def resume_rule(name: str) -> OnResume | None:
    """Return the rule for a run that resumes with another value of a field; None for an unknown name."""
    field = fields_by_name().get(name)
    return None if field is None else field.on_resume


def without_effect(fields: Iterable[ConfigField], values: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields that have no effect with these values of fields, each with the reason."""
    reasons = dict[str, str]()
    for field in fields:
        for needed in field.declared.only_with:
            if not needed.is_met_in(values):
                reasons.setdefault(field.name, _reason(needed, values))
    return reasons


def _reason(needed: Setting | AnyOf, all_values: Mapping[str, Any]) -> str:
    """Return why a condition is not met by other fields' values."""
    if needed.why or isinstance(needed, AnyOf):
        return needed.why
    other, values, value = fields_by_name()[needed.field], needed.values, all_values[needed.field]
    if value is True and other.default is True:
        return f"it needs {next(flag for flag, set_value in other.sets.items() if set_value is False)}"
    if value is False and other.default is not False:
        return f"{flag_with_value(other.name, value)} is set"
    if value is None or value is False or value == ():
        return f"{flag_of(other.name)} is not set"
    if values in ((None,), (False,)):
        return f"{flag_with_value(other.name, value)} is set"
    is_named = not isinstance(values, Range) and values is not None and len(values) <= _MOST_VALUES
    others = f", not {' or '.join(map(str, values or ()))}" if is_named else ""
    return f"{flag_of(other.name)} is {format_value(value)}{others}"


def fields_with(*rules: OnResume) -> frozenset[str]:
    """Return the names of the fields that have one of these rules for resuming."""
    return frozenset(field.name for field in config_fields() if field.on_resume in rules)


@functools.cache
def fields_by_flag() -> Mapping[str, ConfigField]:
    """Return the field of every flag; no two fields share a flag."""
    table: dict[str, ConfigField] = {}
    for field in config_fields():
        for flag in (*field.flags, *field.sets):
            assert flag not in table, flag
            table[flag] = field
    return table


def normalised(name: str) -> str:
    """Return a flag with dashes, as in the tables; `--tensor_model_parallel_size` is accepted too."""
    return name.replace("_", "-")


@functools.cache
def field_docs(group: str) -> Mapping[str, str]:
    """Return the docstring under each field of a group, as one line, read from the source of its classes."""
    docs = {}
    for part in filter(is_dataclass, _GROUPS[group].__mro__):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(part))).body
        assert isinstance(definition, ast.ClassDef)
        for statement, following in itertools.pairwise(definition.body):
            match statement, following:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=text)):
                    docs[name] = " ".join(str(text).split())
    return docs


def _fields_of(group: str, part: Any) -> list[ConfigField]:
    hints = typing.get_type_hints(part)
    found = []
    for field in fields(part):
        kind, declared = _kind(hints[field.name]), option_of(field)
        flags, sets = (flag_of(field.name), *declared.aliases), dict(declared.sets or {})
        if kind.item is bool:
            sets |= {f"--no-{name[2:]}": False for name in flags}
        names = {choice: choice for choice in kind.choices} | dict(declared.choices or {})
        choices = {name.lower(): choice for name, choice in names.items()}
        rule = declared.on_resume or part.default_on_resume
        (owner,) = (each for each in part.__mro__ if field.name in vars(each).get("__annotations__", {}))
        section = vars(owner).get("section")
        found.append(
            ConfigField(group, field.name, kind, field.default, flags, sets, choices, declared, rule, section)
        )
    return found


def _kind(hint: Any) -> ValueKind:
    """Read a type hint such as `int`, `int | None`, `tuple[int, ...] | None`, `Literal[...]`.

    `T | tuple[T, ...]` is one or more values: a tuple of several.
    """
    is_optional = is_many = unpacks_one = False
    if typing.get_origin(hint) in (Union, types.UnionType):
        members = [member for member in typing.get_args(hint) if member is not type(None)]
        is_optional, unpacks_one = len(members) < len(typing.get_args(hint)), len(members) > 1
        hint = members[-1]
    if typing.get_origin(hint) is tuple:
        hint, _ = typing.get_args(hint)
        is_many = True
    if typing.get_origin(hint) is Literal:
        return ValueKind(str, typing.get_args(hint), is_many, is_optional, unpacks_one)
    return ValueKind(hint, (), is_many, is_optional, unpacks_one)


MODEL_FIELDS: Mapping[str, ConfigField] = {
    field.name: field for field in config_fields() if field.group == "model"
}
"""The fields of `ModelConfig`, by their names."""


def inactive_options(model: ModelConfig) -> dict[str, str]:
    """Return the fields of the model without effect, each with the reason."""
    return without_effect(MODEL_FIELDS.values(), vars(model))


def resolved_fields(model: ModelConfig) -> dict[str, Any]:
    """Return the fields that determine the model, with resolved defaults, and None if without effect."""
    fields = {
        name: getattr(model, name)
        for name, field in MODEL_FIELDS.items()
        if field.on_resume is OnResume.MODEL
    }
    scalar, base_head = model.query_pre_attn_scalar, model.mup_base_head_dim
    divisor = model.squared_score_divisor(model.head_dim)
    has_table = model.position_embedding_type == "learned_absolute"
    return {
        **fields,
        "ffn_hidden_size": model.ffn_size,
        "num_query_groups": model.num_kv_heads,
        "kv_channels": model.head_dim,
        "query_pre_attn_scalar": None if scalar == model.head_dim else scalar,  # its default
        "latent_norm_epsilon": model.latent_epsilon,
        "mup_base_width": None if model.width_ratio == 1.0 else model.mup_base_width,
        "mup_base_head_dim": None if divisor == model.head_dim else base_head,
        # Without a table of positions the longest context does not change the model.
        "max_position_embeddings": model.num_positions if has_table else None,
        "num_experts": model.num_experts if model.has_experts else None,
        "moe_ffn_hidden_size": model.expert_ffn_size,
        "mamba_num_heads": model.mamba.num_heads,
        "mamba_bias": model.has_mamba_bias,
        **_resolved_patterns(model),
        **dict.fromkeys(name for name in inactive_options(model) if name in fields),
    }


def _resolved_patterns(model: ModelConfig) -> dict[str, Any]:
    """Return the fields that select layers, as a mark for each layer, and those of layers with a window.

    A pattern that makes no difference between layers is None.
    """
    specs = [model.layer_spec(number) for number in range(min(model.num_layers, MOST_LAYERS))]
    attention = [spec.attention for spec in specs]
    windows = tuple(int(spec is not None and spec.window is not None) for spec in attention)
    has_rope = model.position_embedding_type == "rope"
    unrotated = tuple(int(spec is not None and has_rope and spec.rotary is None) for spec in attention)
    recurrent = tuple(int(spec is None) for spec in attention)
    with_experts = tuple(int(spec.experts is not None) for spec in specs)
    as_values = tuple(int(spec is not None and spec.keys_as_values) for spec in attention)
    size = model.ffn_size
    full = [spec for spec in attention if spec is not None and spec.window is None]
    own_sizes = {
        "full_attention_kv_channels": _first((spec.head_dim for spec in full), model.head_dim),
        "full_attention_query_groups": _first((spec.num_kv_heads for spec in full), model.num_kv_heads),
        "keys_as_values": as_values if any(as_values) else "none",
        "kv_shared_ffn_hidden_size": _first((spec.ffn_size or size for spec in specs), size),
    }
    rotary = {
        "window_rotary_base": model.window_rotary_base or model.rotary_base,
        "window_rope_scaling": model.window_rope_scaling,
    }
    return {
        "window_attn_skip_freq": windows if any(windows) and not all(windows) else None,
        "no_rope_freq": unrotated if any(unrotated) else None,
        "linear_attention_freq": recurrent if not all(recurrent) else None,
        "moe_layer_freq": with_experts if not all(with_experts) else None,
        **({"ffn_hidden_size": None} if all(with_experts) and not model.moe_beside_mlp else {}),
        **own_sizes,
        **(rotary if any(windows) else dict.fromkeys(rotary)),
    }


def _first(sizes: Iterable[int], default: int) -> int | None:
    """Return the first size that is not the default, if there is one."""
    return next((size for size in sizes if size != default), None)
