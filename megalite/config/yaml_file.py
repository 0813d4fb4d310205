"""Read settings from YAML files (--config, the model in a checkpoint), and write a config as one."""

from __future__ import annotations

import functools
import json
import math
import re
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalite.config.arguments import Diagnostics, UserSetting, nearest, parse_value
from megalite.config.checkpoint import CheckpointConfig
from megalite.config.config import Config
from megalite.config.fields import ConfigField, config_fields, fields_by_flag, normalised
from megalite.utils.errors import UserError
from megalite.utils.files import read_regular, read_yaml_file
from megalite.utils.object_store import ObjectFolder, is_object_url

if TYPE_CHECKING:
    import yaml

_MAP, _SEQ, _NULL = (f"tag:yaml.org,2002:{kind}" for kind in ("map", "seq", "null"))
_GROUPS = tuple(group.name for group in fields(Config))
_CHECKPOINT = re.compile(r"iter_[0-9]{7,18}")
_MAX_CONFIG_BYTES = 1 << 24


def read_yaml(path: str, diagnostics: Diagnostics) -> dict[str, UserSetting]:
    """Return the settings in a YAML file, by field. Groups of fields and their sections are optional.

    Scalars are parsed like the values of flags: `1e-5` and `220_000_000` mean the same in both.
    """
    try:
        root = read_yaml_file(f"--config {path}", path, as_nodes=True)
    except UserError as error:
        diagnostics.add_problem(str(error))
        return {}
    if root is None:
        return {}
    return diagnostics.by_field(_settings(root, None, None, path, diagnostics))


def _settings(
    node: yaml.Node, group: str | None, section: str | None, path: str, diagnostics: Diagnostics
) -> Iterator[UserSetting]:
    """Yield the settings of a mapping of fields, with groups of fields if `group` is None.

    A group may have sections, and a section has fields alone.
    """
    parent = section or group
    if node.tag != _MAP:
        parent = f"under {parent}" if parent else "at the top level"
        diagnostics.add_problem(f"{_line(node, path)}: expected `key: value` lines {parent}")
        return
    seen: dict[str, yaml.Node] = {}
    for key, value in node.value:
        name = str(key.value)
        if seen.setdefault(name, key) is not key:
            line = seen[name].start_mark.line + 1
            diagnostics.add_problem(f"{_line(key, path)}: {name} is already in line {line}: remove one", name)
        elif group is None and _is_group(name, value):
            if not _is_null(value):  # it is null if all lines of the group are commented out
                yield from _settings(value, name, None, path, diagnostics)
        elif section is None and name in _sections(group) and value.tag == _MAP:
            yield from _settings(value, group, name, path, diagnostics)
        elif _is_field(name, group, section):
            field = fields_by_flag()[f"--{normalised(name)}"]
            try:
                yield UserSetting(field, _value(field, value), f"{_line(key, path)}: {name}")
            except ValueError as error:
                diagnostics.add_problem(f"{_line(key, path)}: {name} {error}", field.name)
        else:
            known = [field.name for field in config_fields() if _is_in(field, group, section)]
            guess = nearest(name.replace("-", "_"), known)
            hint = f"; nearest is {guess!r}" if guess else ""
            if _is_field(name, None, None):
                field = fields_by_flag()[f"--{normalised(name)}"]
                hint = f", but of {field.section if field.group == group and field.section else field.group}"
            owner = f" of {parent}" if parent else ""
            diagnostics.add_problem(
                f"{_line(key, path)}: {name!r} is not a field{owner}{hint}", *((guess,) if guess else ())
            )


def _value(field: ConfigField, node: yaml.Node) -> Any:
    if _is_null(node):
        if not field.kind.is_optional:
            raise ValueError("cannot be null: write a value, or remove the line")
        return None
    items = node.value if node.tag == _SEQ and field.kind.is_many else [node]
    if any(not isinstance(item.value, str) for item in items):
        raise ValueError("takes a list of plain values" if field.kind.is_many else "takes one plain value")
    return parse_value(field, [item.value for item in items]) if items else ()


def _is_field(name: str, group: str | None, section: str | None) -> bool:
    flag = f"--{normalised(name)}"
    field = fields_by_flag().get(flag)
    return field is not None and flag in field.flags and _is_in(field, group, section)


def _is_in(field: ConfigField, group: str | None, section: str | None) -> bool:
    return group in (None, field.group) and section in (None, field.section)


@functools.cache
def _sections(group: str | None) -> set[str | None]:
    """Return the names of a group's sections; at the top level, those of all groups."""
    return {field.section for field in config_fields() if group in (None, field.group)}


def _is_group(name: str, value: yaml.Node) -> bool:
    """Return whether a top-level key names a group. `optimizer` with a plain value is a field."""
    return name in _GROUPS and (
        not isinstance(value.value, str) or _is_null(value) or not _is_field(name, None, None)
    )


def _is_null(node: yaml.Node) -> bool:
    return bool(node.tag == _NULL)


def _line(node: yaml.Node, path: str) -> str:
    return f"{path} line {node.start_mark.line + 1}"


def read_checkpoint_model(checkpoint: CheckpointConfig, diagnostics: Diagnostics) -> dict[str, UserSetting]:
    """Return the model's settings in the checkpoint that --load names, for --use-checkpoint-args.

    They are read from the resolved config in the checkpoint, whose data, layout and so on are not used. If
    there is no checkpoint, the result is empty, and a notice says so.
    """
    if checkpoint.load is None:
        return {}  # reported by a rule of the config
    with ExitStack() as stack:
        if is_object_url(checkpoint.load):
            downloads = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            folder = _download_config(checkpoint.load, checkpoint.load_iteration, downloads)
        else:
            folder = _find_checkpoint(Path(checkpoint.load), checkpoint.load_iteration)
        if folder is None:
            diagnostics.notices.append(
                f"--use-checkpoint-args: there is no checkpoint in --load {checkpoint.load} yet, so the "
                "flags define the model"
            )
            return {}
        settings = read_yaml(str(folder / "config.yaml"), diagnostics)
    return {name: setting for name, setting in settings.items() if setting.field.group == "model"}


def _download_config(url: str, iteration: int | None, folder: Path) -> Path | None:
    """Download the config of the checkpoint that `_find_checkpoint` would choose; return None without it.

    Raises:
        UserError: object storage cannot be read.
    """
    objects = ObjectFolder(url)
    try:
        folders, marks = objects.list_top()
        found = [name for name in folders if f"unaudited_{name}" not in marks]
        for name in _candidates(found, lambda: objects.read("latest"), iteration):
            with suppress(FileNotFoundError):
                objects.download(f"{name}/config.yaml", folder / "config.yaml")
                return folder
    except OSError as error:
        raise UserError(f"--load {url} cannot be read: {error.strerror}") from None
    return None


def _find_checkpoint(folder: Path, iteration: int | None) -> Path | None:
    """Return the checkpoint to load, chosen by name alone; loading checks its content later."""
    found = [path.name for path in folder.glob("iter_*")]
    for name in _candidates(found, lambda: read_regular(folder / "latest", 256), iteration):
        file = folder / name / "config.yaml"
        if file.is_file() and file.stat().st_size <= _MAX_CONFIG_BYTES:
            return file.parent
    return None


def _candidates(found: Sequence[str], read_latest: Callable[[], bytes], iteration: int | None) -> list[str]:
    """Return the names of the checkpoints to try, in order."""
    if iteration is not None:
        return [f"iter_{iteration:07d}"]
    try:
        latest = read_latest().decode().strip()
    except (OSError, UnicodeError):
        latest = ""
    return [name for name in (latest, *sorted(found, reverse=True)) if _CHECKPOINT.fullmatch(name)]


_UNPRINTABLE = re.compile("[^\x20-\x7e]")


def to_yaml(config: Config, unset: Collection[str] = ()) -> str:
    """Return the config as YAML, by group and section; `--config` reads it back to an equal config.

    Fields in `unset` are omitted, since a field in the file counts as set; they must have their defaults.

    Writing a checkpoint must not need a YAML library, so scalars and lists are written as JSON, a subset of
    YAML. Floats are the exception: YAML 1.1 needs a point before the exponent.
    """
    groups: dict[str, dict[str | None, list[str]]] = {}
    for field in config_fields():
        if field.name not in unset:
            value = yaml_value(getattr(getattr(config, field.group), field.name))
            groups.setdefault(field.group, {}).setdefault(field.section, []).append(f"{field.name}: {value}")
    lines: list[str] = []
    for group, sections in groups.items():
        lines += [f"{group}:", *(f"  {line}" for line in sections.pop(None, []))]
        for section, values in sections.items():
            lines += [f"  {section}:", *(f"    {line}" for line in values)]
    return "\n".join(lines) + "\n"


def yaml_value(value: Any) -> str:
    """Return a scalar or a tuple of scalars as YAML in one line."""
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, tuple):
        return "[" + ", ".join(yaml_value(item) for item in value) + "]"
    if isinstance(value, str):
        # YAML's escapes are not limited to 16 bits as JSON's are.
        return _UNPRINTABLE.sub(
            lambda found: f"\\U{ord(found[0]):08x}", json.dumps(value, ensure_ascii=False)
        )
    return json.dumps(value)


def _float(value: float) -> str:
    if not math.isfinite(value):
        return {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}[str(value)]
    mantissa, exponent_mark, exponent = repr(value).partition("e")
    if exponent_mark and "." not in mantissa:
        mantissa += ".0"
    return mantissa + exponent_mark + exponent
