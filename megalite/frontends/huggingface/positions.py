"""Rules of a family's table for rotary positions, sliding windows and recurrent layers, by kind of layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megalite.config import ModelConfig
from megalite.config.model.layers import windows_differ
from megalite.frontends import none_if_default
from megalite.frontends.huggingface.settings import Fields, HFSettings, Rule, where
from megalite.utils.errors import UserError

WINDOW, FULL, RECURRENT = "sliding_attention", "full_attention", "linear_attention"
"""Their names of layers with and without a window, and of recurrent ones."""
_NAMES: dict[str, dict[str, str]] = {
    "default": {},
    "linear": {"factor": "rope_scaling_factor"},
    "llama3": {
        "factor": "rope_scaling_factor",
        "original_max_position_embeddings": "original_max_position_embeddings",
        "low_freq_factor": "rope_low_freq_factor",
        "high_freq_factor": "rope_high_freq_factor",
    },
    "yarn": {
        "factor": "rope_scaling_factor",
        "original_max_position_embeddings": "original_max_position_embeddings",
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
        "truncate": "yarn_truncate",
        "attention_factor": "yarn_attention_factor",
        "mscale": "yarn_mscale",
        "mscale_all_dim": "yarn_mscale_all_dim",
    },
    "proportional": {"partial_rotary_factor": "proportional_rotary_share"},
}
"""Our fields for the settings of each `rope_type`, which is `rope_scaling` here; their default is none."""
_WHOLE = {"original_max_position_embeddings", "yarn_truncate"}
_REQUIRED = {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"}


def rotary(
    base: float = 10000.0, old_base: str = "rope_theta", share: tuple[str, float] | None = None
) -> Rule:
    """Return the rule of rotary positions, which are in `rope_parameters` since version 5 of transformers.

    Args:
        base: base of the angles if the config does not have it.
        old_base: name of the base in older versions, which are written.
        share: setting of the share of a head's elements that are rotated, and its default; None if the family
            rotates all of them.
    """

    def read(hf: HFSettings, fields: Fields) -> Fields:
        return read_rotary(hf, base, None if share is None else hf.get(*share), old_base)

    def write(config: ModelConfig) -> Fields:
        written = {} if share is None else {share[0]: config.rotary_percent}
        return _written_rotary(config, old_base) | written

    return Rule(read, write)


def read_rotary(hf: HFSettings, base: float, share: float | None, old_base: str = "rope_theta") -> Fields:
    """Return our fields of rotary positions; see `rotary`."""
    current, old, theta = hf.get("rope_parameters"), hf.get("rope_scaling"), hf.get(old_base)
    return rotary_fields(current or old or {}, theta or base, share)


def rotary_by_layer(
    base: float, window_base: float | None = None, old_window_base: str = "", *, in_old_files: bool = True
) -> Rule:
    """Return the rule of a family with other rotary positions in layers with a window.

    Args:
        base: base of the angles in layers without a window, if the config does not have it.
        window_base: the same with a window; by default the other layers' base.
        old_window_base: name of the base in layers with a window in older versions, if it had one.
        in_old_files: whether older versions have the family; their settings are written too.
    """

    def read(hf: HFSettings, _: Fields) -> Fields:
        by_kind = hf.get("rope_parameters") or {}
        kinds = HFSettings(by_kind, "rotary positions by kind of layer", "transformers' rope_parameters")
        old, theta = hf.get("rope_scaling"), hf.get("rope_theta")
        full = rotary_fields(kinds.get(FULL) or old or {}, theta or base, None)
        old_base = hf.get(old_window_base) if old_window_base else None
        windows = rotary_fields(kinds.get(WINDOW) or {}, old_base or window_base or full["rotary_base"], None)
        kinds.refuse_unread()
        own_base = windows.pop("rotary_base")
        is_scaled = windows["rope_scaling"] != "none"
        if is_scaled and any(full.get(name) != value for name, value in windows.items()):
            raise UserError(
                f"rope_parameters of {WINDOW} cannot be converted: only {FULL}'s or 'default' can"
            )
        return {
            **full,
            "window_rotary_base": none_if_default(own_base, full["rotary_base"]),
            "window_rope_scaling": is_scaled or full["rope_scaling"] == "none",
        }

    def write(config: ModelConfig) -> Fields:
        own_base = config.window_rotary_base or config.rotary_base
        window = scaling_of(config) if config.window_rope_scaling else {"rope_type": "default"}
        full = {**scaling_of(config), "rope_theta": config.rotary_base}
        return {
            **(_written_rotary(config, "rope_theta") if in_old_files else {}),
            **({old_window_base: own_base} if old_window_base else {}),
            "rope_parameters": {FULL: full, WINDOW: {**window, "rope_theta": own_base}},
        }

    return Rule(read, write)


def rotary_fields(settings: Mapping[str, Any], theta: float, share: float | None) -> Fields:
    """Return our fields for one object of settings.

    Args:
        theta: base of the angles if the object does not have it.
        share: see `rotary`.
    """
    kind = settings.get("rope_type", settings.get("type", "default"))
    rope = HFSettings(settings, f"rope_type {kind!r}", "transformers' rope_parameters")
    rope.names_read.update(("rope_type", "type"))
    if kind not in _NAMES:
        raise UserError(f"rope_type {kind!r} cannot be converted: {', '.join(_NAMES)} can")
    fields: Fields = {
        "position_embedding_type": "rope",
        "rotary_base": float(rope.get("rope_theta") or theta),
        "rope_scaling": "none" if kind == "default" else kind,
    }
    if kind == "proportional":
        rope.require(factor=1.0)
        fields["proportional_rotary_share"] = 1.0  # theirs by default
    elif share is None:
        rope.require(partial_rotary_factor=1.0)
    else:
        fields["rotary_percent"] = float(rope.get("partial_rotary_factor", share))
    for theirs, ours in _NAMES[kind].items():
        value = rope.get(theirs)
        if value is not None:
            fields[ours] = value if ours in _WHOLE else float(value)
        elif theirs in _REQUIRED:
            raise UserError(f"rope_type {kind!r} without {theirs} cannot be converted")
    rope.refuse_unread()
    return fields


def _written_rotary(config: ModelConfig, old_base: str) -> Fields:
    """Return transformers' settings, under names that older versions read too."""
    scaling = {} if config.rope_scaling == "none" else {"rope_scaling": scaling_of(config)}
    return {old_base: config.rotary_base, **scaling}


def scaling_of(config: ModelConfig) -> Fields:
    """Return transformers' settings of the scaling, without the base."""
    kind = "default" if config.rope_scaling == "none" else config.rope_scaling
    values = {theirs: getattr(config, ours) for theirs, ours in _NAMES[kind].items()}
    return {"rope_type": kind, **{name: value for name, value in values.items() if value is not None}}


def _read_windows(hf: HFSettings, fields: Fields) -> Fields:
    num_layers, size = fields["num_layers"], hf.get("sliding_window")
    first = hf.get("max_window_layers", 0)
    marks = _marks_of(hf, [number >= first for number in range(num_layers)])
    if not hf.switch("use_sliding_window", False) or size is None or size >= fields["seq_length"]:
        return {}
    return _window_fields(size, marks)


def _windows(config: ModelConfig) -> list[int | None]:
    """Return the window of each layer."""
    attention = (spec.attention for spec in config.layer_specs)
    return [None if spec is None else spec.window for spec in attention]


def _write_windows(config: ModelConfig) -> Fields:
    marks = [window is not None for window in _windows(config)]
    return {
        **_written_types(config),
        **({} if any(marks) else {"sliding_window": None}),
        "use_sliding_window": any(marks),
        "max_window_layers": marks.index(True) if any(marks) else config.num_layers,
    }


WINDOWS = Rule(_read_windows, _write_windows)
"""Windows as Qwen and SmolLM describe them."""


def one_window(default: int | None = None, *, switched: bool = False) -> Rule:
    """Return the rule of a window in all layers, as Mistral's.

    Args:
        default: size if the config does not have it.
        switched: whether `use_sliding_window` turns it on.
    """

    def read(hf: HFSettings, fields: Fields) -> Fields:
        size = hf.get("sliding_window", default)
        is_off = switched and not hf.switch("use_sliding_window", False)
        if is_off or size is None or size >= fields["seq_length"]:
            return {}
        return {"window_size": (size - 1, 0)}  # theirs counts the token itself

    def write(config: ModelConfig) -> Fields:
        window = _windows(config)[0]
        own = {"use_sliding_window": window is not None} if switched else {}
        return {"sliding_window": None if window is None else window + 1, **own}

    return Rule(read, write)


def last_windows(first: int) -> Rule:
    """Return the rule of windows in the last layers, from number `max_window_layers` on; see `layer_types`.

    Args:
        first: number of the first one if the config does not have it.
    """

    def read(hf: HFSettings, fields: Fields) -> Fields:
        size, number = hf.get("sliding_window", 4096), hf.get("max_window_layers", first)
        marks = _marks_of(hf, [size is not None and layer >= number for layer in range(fields["num_layers"])])
        return {} if size is None or size >= fields["seq_length"] else _window_fields(size, marks)

    return Rule(read, _written_types)


def layer_types(full_every: int, old_name: str = "") -> Rule:
    """Return the rule of windows as Gemma and OLMo 3 describe them; it comes after all other rules.

    Layers with a window may have other rotary positions or sizes: they then keep a window that is as long as
    the samples.

    Args:
        full_every: every Nth layer has no window, if the config does not list the layers; 0 if all have one.
        old_name: older name of a setting for this number, if there is one.
    """

    def read(hf: HFSettings, fields: Fields) -> Fields:
        size, marks = _read_types(hf, fields, full_every, old_name)
        if size is None or (size >= fields["seq_length"] and not windows_differ(ModelConfig(**fields))):
            return {}
        return _window_fields(size, marks)

    return Rule(read, _written_types)


def _read_types(
    hf: HFSettings, fields: Fields, full_every: int, old_name: str, usual_size: int = 4096
) -> tuple[int | None, list[bool]]:
    """Return the size of windows, and whether each layer has one; see `layer_types`."""
    size = hf.get("sliding_window", usual_size)
    every = hf.get(old_name, full_every) if old_name else full_every
    listed = hf.get("layer_types") is not None  # the number may then be a word, such as LLLG
    if not listed and not isinstance(every, int):
        raise UserError(f"{hf.kind} with {old_name} {every!r} cannot be converted without layer_types")
    layers = range(fields["num_layers"])
    marks = _marks_of(hf, [listed or not every or (number + 1) % every != 0 for number in layers])
    if size is None and listed and any(marks):
        raise UserError(f"{hf.kind} with sliding_window None cannot be converted: layer_types lists windows")
    return size, marks


def windows_with_rotation(
    full_every: int, old_name: str = "", *, usual_size: int = 4096, rotates_without: bool = False
) -> Rule:
    """Return the rule of families that rotate queries and keys only in layers with a window.

    Args:
        full_every, old_name: see `layer_types`.
        usual_size: size of windows if the config does not have it.
        rotates_without: whether a model without windows rotates in all layers.
    """

    def read(hf: HFSettings, fields: Fields) -> Fields:
        size, marks = _read_types(hf, fields, full_every, old_name, usual_size)
        if size is None:
            if not rotates_without or any(marks):
                raise UserError(f"{hf.kind} with sliding_window None cannot be converted")
            return {}
        unrotated = () if all(marks) else tuple(int(not mark) for mark in marks)
        windows = {} if size >= fields["seq_length"] else _window_fields(size, marks)
        return {**windows, "no_rope_freq": unrotated or None}

    def write(config: ModelConfig) -> Fields:
        attention = [spec.attention for spec in config.layer_specs]
        rotated = [spec is not None and spec.rotary is not None for spec in attention]
        if rotates_without and all(rotated) and config.window_size is None:
            return {"sliding_window": None, "layer_types": [FULL] * len(rotated)}
        return {**_written_types(config), "layer_types": [WINDOW if mark else FULL for mark in rotated]}

    return Rule(read, write)


def _read_bases(hf: HFSettings, fields: Fields) -> Fields:
    num_layers, size = fields["num_layers"], hf.get("sliding_window", 128)
    marks = _marks_of(hf, [number % 4 != 0 for number in range(num_layers)])
    bases = hf.get("layer_rope_theta") or [fields["rotary_base"]] * num_layers
    pairs = [*zip(marks, bases, strict=False)]
    with_window, others = ({base for mark, base in pairs if mark == kind and base} for kind in (True, False))
    if len(bases) != num_layers or max(len(with_window), len(others)) > 1:
        raise UserError(
            f"layer_rope_theta {bases} cannot be converted: one number for layers with a window, one for "
            "other layers, and 0 for layers without rotation can"
        )
    usual = float(next(iter(others or with_window), fields["rotary_base"]))
    own = float(next(iter(with_window), usual))
    found = {
        "rotary_base": usual,
        "window_rotary_base": None if own == usual else own,
        "no_rope_freq": None if all(bases) else tuple(int(not base) for base in bases),
    }
    if size is None or (size >= fields["seq_length"] and not windows_differ(ModelConfig(**fields | found))):
        return found
    return found | _window_fields(size, marks)


def _write_bases(config: ModelConfig) -> Fields:
    rotary = [spec.attention.rotary if spec.attention else None for spec in config.layer_specs]
    bases = [0 if each is None else each.base for each in rotary]
    return {**_written_types(config), "layer_rope_theta": bases}


WINDOWS_AND_BASES = Rule(_read_bases, _write_bases)
"""Windows, and the base of rotary positions of each layer, as GraniteSWA describes them."""


def recurrent_layers(
    mixer: str,
    usual: Callable[[HFSettings, int], list[bool]],
    *rules: Rule,
    kind: str = RECURRENT,
) -> Rule:
    """Return the rule of the layers that have a recurrent mixer in the place of attention.

    Args:
        mixer: our name of it.
        usual: returns whether each of a number of layers has it if `layer_types` does not list them.
        rules: rules of settings of the mixer, which have no effect in a model without it.
        kind: their name of layers that have it.
    """

    def read(hf: HFSettings, fields: Fields) -> Fields:
        marks = _marks_of(hf, usual(hf, fields["num_layers"]), kind)
        pattern = None if all(marks) else tuple(map(int, marks))
        return {"recurrent_mixer": mixer, "linear_attention_freq": pattern} if any(marks) else {}

    def write(config: ModelConfig) -> Fields:
        return {"layer_types": [FULL if spec.recurrence is None else kind for spec in config.layer_specs]}

    has_mixer = where(
        lambda hf, fields: "recurrent_mixer" in fields, lambda config: config.recurrent_mixer == mixer, *rules
    )

    def read_all(hf: HFSettings, fields: Fields) -> Fields:
        found = read(hf, fields)
        return found | has_mixer.read(hf, fields | found)

    return Rule(read_all, lambda config: write(config) | has_mixer.write(config))


def _marks_of(hf: HFSettings, usual: list[bool], marked: str = WINDOW) -> list[bool]:
    """Return whether each layer is of a kind and not `FULL`, by default as usual in the family."""
    types = hf.get("layer_types")
    if types is None:
        return usual
    if len(types) != len(usual) or not {*types} <= {marked, FULL}:
        raise UserError(f"layer_types {types} cannot be converted: {marked} and {FULL} of each layer can")
    return [kind == marked for kind in types]


def _window_fields(size: int, marks: list[bool]) -> Fields:
    if not any(marks):
        return {}
    window = {"window_size": (size - 1, 0)}  # theirs counts the token itself
    return window if all(marks) else {**window, "window_attn_skip_freq": tuple(map(int, marks))}


def _written_types(config: ModelConfig) -> Fields:
    """Return the kinds of layers, and the size of a window even if no layer has one."""
    size = config.num_positions if config.window_size is None else config.window_size[0] + 1
    return {
        "sliding_window": size,
        "layer_types": [FULL if window is None else WINDOW for window in _windows(config)],
    }
