"""Describe an architecture of transformers: its config, and the tensors with the same numbers as ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from megalite.checkpoint.convert.families.grouped_rows import join_kinds, split_kinds
from megalite.checkpoint.convert.families.hf_settings import HFSettings
from megalite.checkpoint.convert.families.multi_token import read_mtp, write_mtp
from megalite.config import LayerKind, ModelConfig
from megalite.config.model_fields import resolved_fields
from megalite.config.vocab_padding import padded_vocab_size
from megalite.errors import UserError

Parts = Sequence[Tensor]


@dataclass(frozen=True)
class Transform:
    """Converts one of our full tensors to transformers' parts of it, and back."""

    to_hf: Callable[[Tensor, ModelConfig], Parts]
    from_hf: Callable[[Parts, ModelConfig], Tensor]


def _split_qkv(qkv: Tensor, config: ModelConfig) -> Parts:
    """Split ``[g (r + 2) d, ...]``, grouped by key/value head, into ``[n d, ...]`` and two ``[g d, ...]``."""
    return split_kinds(qkv, config.num_kv_heads, qkv_rows(config))


def _join_qkv(parts: Parts, config: ModelConfig) -> Tensor:
    return join_kinds(parts, config.num_kv_heads, qkv_rows(config))


def qkv_rows(config: ModelConfig) -> tuple[int, int, int]:
    """Return the rows of queries, keys and values of a key/value head."""
    queries, d = config.num_attention_heads // config.num_kv_heads, config.head_dim
    return queries * d, d, d


def _pad_vocabulary(parts: Parts, config: ModelConfig) -> Tensor:
    (table,) = parts
    if config.vocab_size is not None and table.shape[0] < config.vocab_size:
        raise UserError(
            f"the word embedding has {table.shape[0]} rows, fewer than --vocab-size {config.vocab_size}: "
            "pass a smaller size"
        )
    return torch.cat(
        (table, table.new_zeros(padded_vocab_size(config, 1) - table.shape[0], *table.shape[1:]))
    )


SAME = Transform(lambda full, _: [full], lambda parts, _: parts[0])
VOCABULARY = Transform(lambda full, config: [full[: config.vocab_size]], _pad_vocabulary)  # [v, h]
QKV = Transform(_split_qkv, _join_qkv)
HALVES = Transform(lambda full, _: full.unbind(0), lambda parts, _: torch.stack(tuple(parts)))
# GPT-2's Conv1D keeps its weight as [in, out]; `t` leaves a bias as it is.
CONV = Transform(lambda full, _: [full.t()], lambda parts, _: parts[0].t())
CONV_QKV = Transform(
    lambda full, config: [torch.cat(tuple(_split_qkv(full, config))).t()],
    lambda parts, config: _join_qkv(parts[0].t().chunk(3), config),
)


@dataclass(frozen=True)
class Module:
    """A module's tensors in both programs; ``{}`` stands for the layer's number, ``{expert}`` for an expert.

    Attributes:
        kind: determines whether the module has a bias: a table never has one, a norm does if it is a
            LayerNorm, a linear layer does if the config adds biases. A vector is one tensor, whose name has
            no suffix.
        only_if: returns whether the model has the module; by default it has.
        only_in: returns whether layers of a kind have the module; by default all have it.
    """

    kind: Literal["table", "norm", "linear", "qkv", "attention_output", "mlp", "mamba", "vector"]
    ours: str
    theirs: tuple[str, ...]
    transform: Transform = SAME
    only_if: Callable[[ModelConfig], bool] = lambda config: True
    only_in: Callable[[LayerKind], bool] = lambda kind: True

    def entries(self, config: ModelConfig, layer: int | None = None) -> Iterator[Entry]:
        """Yield its weight and, if it has one, its bias."""
        kind = LayerKind() if layer is None else config.layer_kind(layer)
        if not self.only_if(config) or not self.only_in(kind):
            return
        if self.kind == "vector":
            names = tuple(name.format(layer) for name in self.theirs)
            yield Entry(self.ours.format(layer), names, self.transform, kind)
            return
        has_bias = {
            "table": False,
            "norm": config.normalization == "LayerNorm",
            "linear": config.add_bias_linear,
            "qkv": config.has_qkv_bias,
            "attention_output": config.has_attention_output_bias,
            "mlp": config.has_mlp_bias,
            "mamba": config.has_mamba_bias,
        }
        for suffix in (".weight", ".bias")[: 1 + has_bias[self.kind]]:
            experts = range(config.num_experts or 0 if "{expert}" in self.theirs[0] else 1)
            theirs = tuple(
                name.format(layer, expert=expert) + suffix for expert in experts for name in self.theirs
            )
            yield Entry(self.ours.format(layer) + suffix, theirs, self.transform, kind)


@dataclass(frozen=True)
class Entry:
    """One of our tensors, and the tensors of theirs that hold the same numbers.

    Attributes:
        kind: kind of the tensor's layer.
    """

    ours: str
    theirs: tuple[str, ...]
    transform: Transform
    kind: LayerKind

    def to_hf(self, full: Tensor, config: ModelConfig) -> dict[str, Tensor]:
        """Return their tensors by name, contiguous, without the vocabulary's padding rows."""
        parts = self.transform.to_hf(full, config.for_kind(self.kind))
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
            return self.transform.from_hf(parts, config.for_kind(self.kind)).contiguous()
        except RuntimeError:
            shapes = ", ".join(f"{name} {list(tensors[name].shape)}" for name in self.theirs)
            raise UserError(
                f"{shapes}: the config has other shapes; does config.json belong to another model?"
            ) from None


MTP_PARTS = (
    Module("norm", "mtp.{}.embedding_norm", ("model.layers.{}.enorm",)),
    Module("norm", "mtp.{}.hidden_norm", ("model.layers.{}.hnorm",)),
    Module("table", "mtp.{}.projection", ("model.layers.{}.eh_proj",)),
    Module("norm", "mtp.{}.final_norm", ("model.layers.{}.shared_head.norm",)),
)
"""Modules of multi-token prediction besides their layers; ``{}`` stands for the number of the layer."""

_NOT_COMPARED = {"seq_length", "max_position_embeddings", "vocab_size"}
"""Sizes that every family has, under names that not every family distinguishes."""


@dataclass(frozen=True)
class Family:
    """One of transformers' architectures.

    Attributes:
        architecture: name of transformers' class, unless `write` names another.
        prefix: prefix of the names; the hub's files of a bare model lack it.
        heads: prefixes of names outside of the bare model.
        read: returns our fields for a config of theirs.
        write: returns their settings for our config, under their own names. If the family cannot be the
            model, `read` of the result returns other fields; this is how `problems` finds them.
        ends: modules before and after the layers.
        layer: modules of one layer.
        without_effect: their settings that do not change the model.
        other_names: parts of names in older files or in transformers' modules, and the written names.
        experts: parts of the name of a parameter that holds the matrices of all experts, and the names of an
            expert's own matrices in files, which are stacked along the rows.
        mtp: modules besides the layer of a module of multi-token prediction; none if it cannot have any.
    """

    model_type: str
    architecture: str
    prefix: str
    heads: tuple[str, ...]
    read: Callable[[HFSettings], dict[str, Any]]
    write: Callable[[ModelConfig], dict[str, Any]]
    ends: tuple[Module, ...]
    layer: tuple[Module, ...]
    without_effect: tuple[str, ...] = ()
    other_names: Mapping[str, str] = field(default_factory=dict)
    experts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    mtp: tuple[Module, ...] = ()

    def full_name(self, name: str) -> str:
        """Return a tensor's name with the prefix, which it may lack, and with the name that is written."""
        for old, new in self.other_names.items():
            name = name.replace(old, new)
        return name if name.startswith((self.prefix, *self.heads)) else self.prefix + name

    def names_in_files(self, name: str, num_experts: int) -> list[tuple[str, ...]]:
        """Return the names of the tensors that transformers reads a parameter from.

        Returns:
            One for most parameters; for the matrices of all experts, those of each expert.
        """
        name = self.full_name(name)
        for fused, parts in self.experts.items():
            if name.endswith(fused):
                block = name.removesuffix(fused)
                of_experts = (f"{block}experts.{number}" for number in range(num_experts))
                return [tuple(f"{expert}.{part}.weight" for part in parts) for expert in of_experts]
        return [(name,)]

    def model(self, hf: Mapping[str, Any]) -> ModelConfig:
        """Return our config of a config of this family.

        Raises:
            UserError: megalite does not have one of its options, or a setting is unknown.
        """
        settings = HFSettings(hf)
        fields = self.read(settings) | (read_mtp(settings) if self.mtp else {})
        settings.refuse_unread(self.model_type, self.without_effect)
        return ModelConfig(**fields)

    def settings(self, config: ModelConfig) -> dict[str, Any]:
        """Return their settings for our config."""
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "vocab_size": config.vocab_size,
            "initializer_range": config.init_method_std,
            "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
            **self.write(config),
            **(write_mtp(config) if self.mtp else {}),
        }

    def problems(self, config: ModelConfig) -> dict[str, str]:
        """Return the fields that this architecture cannot have, each with its value and the needed one."""
        found, needed = resolved_fields(config), resolved_fields(self.model(self.settings(config)))
        return {
            name: f"{name} {value} (needs {needed[name]})"
            for name, value in found.items()
            if value != needed[name] and name not in _NOT_COMPARED
        }


OUTPUT = Module(
    "table",
    "output",
    ("lm_head",),
    VOCABULARY,
    only_if=lambda config: config.untie_embeddings_and_output_weights,
)
"""The output layer's own weight, only in untied models."""
