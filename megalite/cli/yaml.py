"""YAML files of settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalite.cli.fields import ConfigField, config_fields, fields_by_flag, normalised
from megalite.cli.findings import Findings, Setting
from megalite.cli.hints import nearest
from megalite.cli.values import value_of
from megalite.config import Config
from megalite.errors import UserError

if TYPE_CHECKING:
    import yaml

_MAP, _SEQ, _NULL = (f"tag:yaml.org,2002:{kind}" for kind in ("map", "seq", "null"))
_GROUPS = tuple(group.name for group in fields(Config))


def read_yaml(path: str, findings: Findings) -> dict[str, Setting]:
    """The settings in a YAML file, by field; keys are fields, under the name of their group or not.

    Scalars are read from their text by the rules of flags, so `1e-5` and `220_000_000` mean the same in both.
    """
    try:
        root = _compose(path)
    except UserError as error:
        findings.problems.append(str(error))
        return {}
    if root is None:
        return {}
    return findings.unique(_settings(root, None, path, findings))


def _compose(path: str) -> yaml.Node | None:
    """The file's syntax tree; None where the file is empty.

    Raises:
        UserError: the file or the YAML library is not there, or the file is no YAML.
    """
    try:
        import yaml
    except ImportError:
        raise UserError(
            f"--config {path} needs PyYAML: pip install pyyaml, or give the settings as flags"
        ) from None
    try:
        text = Path(path).read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except (OSError, UnicodeError) as error:
        raise UserError(f"--config {path} cannot be read: {_reason(error)}") from None
    except RecursionError:
        raise UserError(f"--config {path} is not a settings file: it is nested too deeply") from None
    except yaml.YAMLError as error:
        raise UserError(f"--config {path} is not YAML: {' '.join(str(error).split())}") from None
    assert root is None or isinstance(root, yaml.Node)
    return root


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)


def _settings(node: yaml.Node, group: str | None, path: str, findings: Findings) -> Iterator[Setting]:
    """Walks a mapping of fields, or of groups of them where `group` is None."""
    if node.tag != _MAP:
        findings.problems.append(
            f"{_place(node, path)}: expected `key: value` lines under {group or 'the top'}"
        )
        return
    for key, value in node.value:
        name = str(key.value)
        if group is None and _is_group(name, value):
            # A group whose lines are all commented out is there but empty.
            if not _is_null(value):
                yield from _settings(value, name, path, findings)
        elif _is_field(name, group):
            yield from _setting(_field(name), key, value, path, findings)
        else:
            findings.doubt(*_unknown(key, group, path))


def _setting(
    field: ConfigField, key: yaml.Node, value: yaml.Node, path: str, findings: Findings
) -> Iterator[Setting]:
    where = f"{_place(key, path)}: {key.value}"
    try:
        yield Setting(field, _value(field, value), where)
    except ValueError as error:
        findings.doubt(f"{where} {error}", field.name)


def _value(field: ConfigField, node: yaml.Node) -> Any:
    if _is_null(node):
        if not field.kind.is_optional:
            raise ValueError("cannot be null: give a value, or leave the line out")
        return None
    items = node.value if node.tag == _SEQ and field.kind.is_many else [node]
    if any(not isinstance(item.value, str) for item in items):
        raise ValueError("takes a list of plain values" if field.kind.is_many else "takes one plain value")
    return value_of(field, [item.value for item in items]) if items else ()


def _unknown(key: yaml.Node, group: str | None, path: str) -> tuple[str, str]:
    """What to say of a key that is no field, and the field that it stands for most likely."""
    name = str(key.value)
    known = [field.name for field in config_fields() if group in (None, field.group)]
    guess = nearest(name.replace("-", "_"), known)
    inside = f" of {group}" if group else ""
    return f"{_place(key, path)}: {name!r} is no field{inside}; nearest is {guess!r}", guess


def _field(name: str) -> ConfigField:
    return fields_by_flag()[f"--{normalised(name)}"]


def _is_field(name: str, group: str | None) -> bool:
    flag = f"--{normalised(name)}"
    field = fields_by_flag().get(flag)
    return field is not None and flag in field.flags and group in (None, field.group)


def _is_group(name: str, value: yaml.Node) -> bool:
    """Whether a key at the top names a group; `optimizer` is also a field, and then has a plain value."""
    return name in _GROUPS and (
        not isinstance(value.value, str) or _is_null(value) or not _is_field(name, None)
    )


def _is_null(node: yaml.Node) -> bool:
    return bool(node.tag == _NULL)


def _place(node: yaml.Node, path: str) -> str:
    return f"{path} line {node.start_mark.line + 1}"
