"""Describe an architecture of transformers: its config, and the tensors with the same numbers as ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from megalite.config import AttentionSpec, LayerSpec, ModelConfig
from megalite.config.fields import resolved_fields
from megalite.config.model.model_config import padded_vocab_size
from megalite.frontends.huggingface.settings import Fields, HFSettings, Rule
from megalite.utils.errors import UserError

Parts = Sequence[Tensor]


class Place(NamedTuple):
    """Where a tensor stands: its model, and its layer, None outside of the layers."""

    config: ModelConfig
    layer: LayerSpec | None

    @property
    def attention(self) -> AttentionSpec:
        """Return the layer's attention."""
        assert self.layer is not None and self.layer.attention is not None
        return self.layer.attention


@dataclass(frozen=True)
class Transform:
    """Converts one of our full tensors to transformers' parts of it, and back."""

    to_hf: Callable[[Tensor, Place], Parts]
    from_hf: Callable[[Parts, Place], Tensor]


def by_kind(groups_and_rows: Callable[[Place], tuple[int, Sequence[int]]], apart: int = 0) -> Transform:
    """Return the transform of rows that are ordered by group of heads in ours, and by kind of row in theirs.

    Args:
        groups_and_rows: returns the number of groups, and the numbers of rows of each kind in a group.
        apart: how many of the last kinds are tensors of their own in theirs; the others are one tensor.
    """

    def to_hf(full: Tensor, place: Place) -> Parts:  # [groups sum(rows), ...]
        groups, rows = groups_and_rows(place)
        parts = [part.flatten(0, 1) for part in full.unflatten(0, (groups, -1)).split(list(rows), dim=1)]
        joined = len(rows) - apart
        return [torch.cat(parts[:joined]), *parts[joined:]]

    def from_hf(parts: Parts, place: Place) -> Tensor:
        groups, rows = groups_and_rows(place)
        joined = parts[0].split([groups * size for size in rows[: len(rows) - apart]])
        kinds = zip((*joined, *parts[1:]), rows, strict=True)
        return torch.cat([part.unflatten(0, (groups, size)) for part, size in kinds], dim=1).flatten(0, 1)

    return Transform(to_hf, from_hf)


def with_kernel_dim(transform: Transform) -> Transform:
    """Return the transform of a convolution's weight, whose second dim is 1 in theirs."""
    return Transform(
        lambda full, place: [part.unsqueeze(1) for part in transform.to_hf(full, place)],
        lambda parts, place: transform.from_hf([part.squeeze(1) for part in parts], place),
    )


def with_parts_joined(transform: Transform) -> Transform:
    """Return the transform of tensors of rows by kind, which may be cut elsewhere in theirs."""
    return Transform(
        transform.to_hf, lambda parts, place: transform.from_hf([torch.cat(tuple(parts))], place)
    )


def _transposed(transform: Transform) -> Transform:
    """Return the transform of GPT-2's Conv1D: its weight is ``[in, out]``, and a bias stays as it is."""
    return Transform(
        lambda full, place: [part.t() for part in transform.to_hf(full, place)],
        lambda parts, place: transform.from_hf([part.t() for part in parts], place),
    )


def qkv_groups(place: Place) -> tuple[int, Sequence[int]]:
    """Return the number of key/value heads, and the rows of queries, keys and values of each."""
    spec, d = place.attention, place.attention.head_dim
    return spec.num_kv_heads, (spec.num_heads // spec.num_kv_heads * d, d, d)


def _pad_vocabulary(parts: Parts, place: Place) -> Tensor:
    (table,), config = parts, place.config
    if config.vocab_size is not None and table.shape[0] < config.vocab_size:
        raise UserError(
            f"the word embedding has {table.shape[0]} rows, fewer than --vocab-size {config.vocab_size}: "
            "pass a smaller size"
        )
    return torch.cat(
        (table, table.new_zeros(padded_vocab_size(config, 1) - table.shape[0], *table.shape[1:]))
    )


SAME = Transform(lambda full, _: [full], lambda parts, _: parts[0])
VOCABULARY = Transform(lambda full, place: [full[: place.config.vocab_size]], _pad_vocabulary)  # [v, h]
QKV = by_kind(qkv_groups, apart=2)
HALVES = Transform(lambda full, _: full.unbind(0), lambda parts, _: torch.stack(tuple(parts)))
CONV, CONV_QKV = _transposed(SAME), _transposed(by_kind(qkv_groups))


@dataclass(frozen=True)
class Module:
    """Names a module's tensors in both programs; ``{}`` is the layer's number, ``{expert}`` the expert's.

    Attributes:
        kind: determines whether the module has a bias: a table never has one, a norm does if it is a
            LayerNorm, a linear layer does if the config adds biases. A vector is one tensor, whose name has
            no suffix.
        only_if: returns whether the model has the module; by default it has.
        only_in: returns whether a layer has the module; by default all have it.
        per_layer: number of our layers that are one of theirs: two if ours have one block each.
    """

    kind: Literal["table", "norm", "linear", "qkv", "attention_output", "mlp", "mamba", "vector"]
    ours: str
    theirs: tuple[str, ...]
    transform: Transform = SAME
    only_if: Callable[[ModelConfig], bool] = lambda config: True
    only_in: Callable[[LayerSpec], bool] = lambda spec: True
    per_layer: int = 1

    def entries(self, config: ModelConfig, layer: int | None = None) -> Iterator[Entry]:
        """Yield its weight and, if it has one, its bias."""
        spec = None if layer is None else config.layer_spec(layer)
        if not self.only_if(config) or not (spec is None or self.only_in(spec)):
            return
        number = None if layer is None else layer // self.per_layer
        if self.kind == "vector":
            names = tuple(name.format(number) for name in self.theirs)
            yield Entry(self.ours.format(layer), names, self.transform, spec)
            return
        has_bias = {
            "table": False,
            "norm": config.normalization == "LayerNorm" and config.add_norm_bias,
            "linear": config.add_bias_linear,
            "qkv": config.has_qkv_bias,
            "attention_output": config.has_attention_output_bias,
            "mlp": config.has_mlp_bias,
            "mamba": config.has_mamba_bias,
        }
        for suffix in (".weight", ".bias")[: 1 + has_bias[self.kind]]:
            experts = range(config.num_experts or 0 if "{expert}" in self.theirs[0] else 1)
            theirs = tuple(
                name.format(number, expert=expert) + suffix for expert in experts for name in self.theirs
            )
            yield Entry(self.ours.format(layer) + suffix, theirs, self.transform, spec)


def modules(
    ours: str,
    theirs: str,
    *rows: tuple[Any, ...],
    only_if: Callable[[ModelConfig], bool] = lambda config: True,
    only_in: Callable[[LayerSpec], bool] = lambda spec: True,
) -> tuple[Module, ...]:
    """Return modules from the rows of a table: kind, our name, their names, and a transform.

    Args:
        ours, theirs: prefixes of the names. The names of theirs are separated by spaces.
        only_if, only_in: conditions of all these modules; see `Module`.
    """

    def module(kind: Any, name: str, names: str, transform: Transform = SAME) -> Module:
        full_names = tuple(theirs + each for each in names.split())
        return Module(kind, ours + name, full_names, transform, only_if, only_in)

    return tuple(module(*row) for row in rows)


def in_layers_that(test: Callable[[LayerSpec], bool], *chosen: Module) -> tuple[Module, ...]:
    """Return the modules for some layers only."""
    return tuple(replace(module, only_in=test) for module in chosen)


@dataclass(frozen=True)
class Entry:
    """Pairs one of our tensors with the tensors of theirs that hold the same numbers.

    Attributes:
        layer: layer of the tensor; None outside of the layers.
    """

    ours: str
    theirs: tuple[str, ...]
    transform: Transform
    layer: LayerSpec | None

    def to_hf(self, full: Tensor, config: ModelConfig) -> dict[str, Tensor]:
        """Return their tensors by name, contiguous, without the vocabulary's padding rows."""
        parts = self.transform.to_hf(full, Place(config, self.layer))
        return {name: part.contiguous() for name, part in zip(self.theirs, parts, strict=True)}

    def from_hf(self, tensors: Mapping[str, Tensor], config: ModelConfig) -> Tensor:
        """Return our tensor, contiguous; padding rows are zero, as many as one tensor-parallel rank needs.

        If more ranks cannot divide the rows, use a config with a suitable `pad_vocab_size_to`.

        Raises:
            UserError: one of their tensors is missing, or its shape differs from the config's.
        """
        if missing := [name for name in self.theirs if name not in tensors]:
            raise UserError(
                f"the weights lack {', '.join(missing)}: does the config belong to another model?"
            )
        parts = [tensors[name] for name in self.theirs]
        try:
            return self.transform.from_hf(parts, Place(config, self.layer)).contiguous()
        except RuntimeError:
            shapes = ", ".join(f"{name} {list(tensors[name].shape)}" for name in self.theirs)
            raise UserError(
                f"{shapes}: the config has other shapes; does config.json belong to another model?"
            ) from None


MTP_COUNT = "num_nextn_predict_layers"
"""Name of the number of modules of multi-token prediction in config.json."""
UNREADABLE = "unreadable"
"""Key of the problem of a family that refuses to read a config's settings."""
_NOT_COMPARED = {"seq_length", "max_position_embeddings", "vocab_size"}
"""Sizes that every family has, under names that not every family distinguishes."""


@dataclass(frozen=True)
class Family:
    """One of transformers' architectures.

    Attributes:
        architecture: name of transformers' class, unless a rule writes another.
        rules: the table of its settings; a later rule replaces fields and settings of earlier ones. If the
            family cannot be a model, reading what it wrote returns other fields: `problems` finds them.
        ends: modules before and after the layers.
        layer: modules of one layer.
        prefix: prefix of the names; the hub's files of a bare model lack it.
        heads: prefixes of names outside of the bare model.
        tied: default of `tie_word_embeddings`; None if it has no effect, and the weights are never tied.
        without_effect: their settings that do not change the model.
        other_names: parts of names in older files or in transformers' modules, and the written names.
        experts: parts of the name of a parameter that holds the matrices of all experts, and the names of an
            expert's own matrices in files, which are stacked along the rows.
        joined: end of the name of a parameter that stacks tensors of files along the rows, and the ends of
            their names.
        mtp: modules of multi-token prediction besides their layer; none if the family cannot have any.
    """

    model_type: str
    architecture: str
    rules: tuple[Rule, ...]
    ends: tuple[Module, ...]
    layer: tuple[Module, ...]
    prefix: str = "model."
    heads: tuple[str, ...] = ("lm_head.",)
    tied: bool | None = False
    without_effect: tuple[str, ...] = ()
    other_names: Mapping[str, str] = field(default_factory=dict)
    experts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    mtp: tuple[Module, ...] = ()

    def full_name(self, name: str) -> str:
        """Return a tensor's name with the prefix, which it may lack, and with the name that is written."""
        for old, new in self.other_names.items():
            name = name.replace(old, new)
        return name if name.startswith((self.prefix, *self.heads)) else self.prefix + name

    def names_in_files(self, name: str, num_experts: int) -> list[tuple[str, ...]]:
        """Return the names of the tensors that transformers reads a parameter from.

        Returns:
            One for most parameters; for the matrices of all experts, those of each expert; for a parameter of
            joined tensors, all of them.
        """
        name = self.full_name(name)
        for fused, parts in self.experts.items():
            if name.endswith(fused):
                block = name.removesuffix(fused)
                of_experts = (f"{block}experts.{number}" for number in range(num_experts))
                return [tuple(f"{expert}.{part}.weight" for part in parts) for expert in of_experts]
        for end, parts in self.joined.items():
            if name.endswith(end):
                return [tuple(name.removesuffix(end) + part for part in parts)]
        return [(name,)]

    def model(self, hf: Mapping[str, Any]) -> ModelConfig:
        """Return our config of a config of this family.

        Raises:
            UserError: megalite does not have one of its options, or a setting is unknown.
        """
        settings = HFSettings(hf, self.model_type)
        fields: Fields = {}
        for rule in (_VOCABULARY_AND_SCALE, *self.rules):
            fields |= rule.read(settings, fields)
        tied = False if self.tied is None else settings.switch("tie_word_embeddings", self.tied)
        if self.mtp:
            counts = [settings.get(name) for name in (MTP_COUNT, "num_mtp_layers")]  # in files and in configs
            fields["mtp_num_layers"] = counts[0] or counts[1] or 0
        settings.refuse_unread(self.without_effect)
        return ModelConfig(**_without_defaults(fields), untie_embeddings_and_output_weights=not tied)

    def settings(self, config: ModelConfig) -> dict[str, Any]:
        """Return their settings for our config."""
        settings: Fields = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
        }
        for rule in (_VOCABULARY_AND_SCALE, *self.rules):
            settings |= rule.write(config)
        has_mtp = self.mtp and config.mtp_num_layers
        return settings | ({MTP_COUNT: config.mtp_num_layers} if has_mtp else {})

    def problems(self, config: ModelConfig) -> dict[str, str]:
        """Return the fields that this architecture cannot have, each with its value and the needed one.

        If it cannot read its own settings for the config, the only problem is `UNREADABLE`.
        """
        try:
            needed = resolved_fields(self.model(self.settings(config)))
        except UserError as error:
            return {UNREADABLE: str(error)}
        found = resolved_fields(config)
        return {
            name: f"{name} {value} (needs {needed[name]})"
            for name, value in found.items()
            if value != needed[name] and name not in _NOT_COMPARED
        }


def _without_defaults(fields: Fields) -> Fields:
    """Return fields without sizes that equal their default, so that a model has only one possible config."""
    heads = fields["num_attention_heads"]
    defaults = {"num_query_groups": heads}
    if "kv_channels" in fields:
        defaults["kv_channels"] = fields["hidden_size"] // heads
    return {name: None if value == defaults.get(name) else value for name, value in fields.items()}


_VOCABULARY_AND_SCALE = Rule(
    lambda hf, _: {"vocab_size": hf.hf["vocab_size"], "init_method_std": hf.get("initializer_range", 0.02)},
    lambda config: {"vocab_size": config.vocab_size, "initializer_range": config.init_method_std},
)
OUTPUT = Module(
    "table",
    "output",
    ("lm_head",),
    VOCABULARY,
    only_if=lambda config: config.untie_embeddings_and_output_weights,
)
"""The output layer's own weight, only in untied models."""
