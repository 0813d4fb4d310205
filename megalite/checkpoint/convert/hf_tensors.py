"""Map our tensors to the tensors of transformers' models that hold the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megalite.config import ModelConfig
from megalite.errors import UserError

Parts = Sequence[Tensor]


@dataclass(frozen=True)
class Transform:
    """Converts one of our full tensors to transformers' parts of it, and back."""

    to_hf: Callable[[Tensor, ModelConfig], Parts]
    from_hf: Callable[[Parts, ModelConfig], Tensor]


def _split_qkv(qkv: Tensor, config: ModelConfig) -> Parts:
    """Split ``[g (r + 2) d, ...]``, grouped by key/value head, into ``[n d, ...]`` and two ``[g d, ...]``."""
    grouped = qkv.unflatten(0, (config.num_kv_heads, -1, config.head_dim))  # [g, r + 2, d, ...]
    queries = config.num_attention_heads // config.num_kv_heads
    return [part.flatten(0, 2) for part in grouped.split((queries, 1, 1), dim=1)]


def _join_qkv(parts: Parts, config: ModelConfig) -> Tensor:
    grouped = [part.unflatten(0, (config.num_kv_heads, -1, config.head_dim)) for part in parts]
    return torch.cat(grouped, dim=1).flatten(0, 2)


def _pad_vocabulary(parts: Parts, config: ModelConfig) -> Tensor:
    (table,) = parts
    if config.vocab_size is not None and table.shape[0] < config.vocab_size:
        raise UserError(
            f"the word embedding has {table.shape[0]} rows, fewer than --vocab-size {config.vocab_size}: "
            "pass a smaller size"
        )
    return torch.cat((table, table.new_zeros(config.padded_vocab_size(1) - table.shape[0], *table.shape[1:])))


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
    """A module's tensors in both programs; ``{}`` stands for the layer's number.

    Attributes:
        kind: determines whether the module has a bias: a table never has one, a norm does if it is a
            LayerNorm, a linear layer does if the config adds biases. A vector is one tensor, whose name has
            no suffix.
    """

    kind: Literal["table", "norm", "linear", "vector"]
    ours: str
    theirs: tuple[str, ...]
    transform: Transform = SAME

    def entries(self, config: ModelConfig, layer: int | None = None) -> Iterator[Entry]:
        """Yield its weight and, if it has one, its bias."""
        if self.kind == "vector":
            yield Entry(self.ours, self.theirs, self.transform)
            return
        has_bias = {
            "table": False,
            "norm": config.normalization == "LayerNorm",
            "linear": config.add_bias_linear,
        }
        for suffix in (".weight", ".bias")[: 1 + has_bias[self.kind]]:
            theirs = tuple(name.format(layer) + suffix for name in self.theirs)
            yield Entry(self.ours.format(layer) + suffix, theirs, self.transform)


@dataclass(frozen=True)
class Entry:
    """One of our tensors, and the tensors of theirs that hold the same numbers."""

    ours: str
    theirs: tuple[str, ...]
    transform: Transform

    def to_hf(self, full: Tensor, config: ModelConfig) -> dict[str, Tensor]:
        """Return their tensors by name, contiguous, without the vocabulary's padding rows."""
        parts = self.transform.to_hf(full, config)
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
            return self.transform.from_hf(parts, config).contiguous()
        except RuntimeError:
            shapes = ", ".join(f"{name} {list(tensors[name].shape)}" for name in self.theirs)
            raise UserError(
                f"{shapes}: the config has other shapes; does config.json belong to another model?"
            ) from None


OLD_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
"""Names of norm parameters in the published BERT files, and today's names."""


@dataclass(frozen=True)
class Family:
    """One of transformers' architectures.

    Attributes:
        prefix: prefix of the names; the hub's files of a bare model lack it.
        heads: prefixes of names outside of the bare model.
        fixed: values that the architecture fixes, by attribute of the config.
        ends: modules before and after the layers.
        layer: modules of one layer.
    """

    model_type: str
    prefix: str
    heads: tuple[str, ...]
    fixed: Callable[[ModelConfig], dict[str, object]]
    ends: tuple[Module, ...]
    layer: tuple[Module, ...]

    def full_name(self, name: str) -> str:
        """Return a tensor's name with the prefix, which it may lack, and with today's names for norms."""
        for old, new in OLD_NAMES.items():
            name = name.replace(old, new)
        return name if name.startswith((self.prefix, *self.heads)) else self.prefix + name

    def problems(self, config: ModelConfig) -> list[str]:
        """Return the config's values that this architecture does not support."""
        return [
            f"{name} {getattr(config, name)} (needs {value})"
            for name, value in self.fixed(config).items()
            if getattr(config, name) != value
        ]


def _multi_head(config: ModelConfig) -> dict[str, object]:
    return {
        "normalization": "LayerNorm",
        "add_bias_linear": True,
        "num_kv_heads": config.num_attention_heads,
        "head_dim": config.hidden_size // config.num_attention_heads,
    }


_PRE_NORM = {"norm_position": "pre"}


def _gpt2_fixed(config: ModelConfig) -> dict[str, object]:
    activation = "gelu" if config.is_gated else config.activation
    return {**_multi_head(config), **_PRE_NORM, "embed_layernorm": False, "activation": activation}


def _bloom_fixed(config: ModelConfig) -> dict[str, object]:
    ffn = 4 * config.hidden_size
    fixed = {"embed_layernorm": True, "activation": "gelu", "ffn_size": ffn}
    return {**_multi_head(config), **_PRE_NORM, **fixed}


def _llama_fixed(config: ModelConfig) -> dict[str, object]:
    return {**_PRE_NORM, "normalization": "RMSNorm", "embed_layernorm": False, "activation": "swiglu"}


def _bert_fixed(config: ModelConfig) -> dict[str, object]:
    activation = "gelu" if config.is_gated else config.activation
    return {
        **_multi_head(config),
        "norm_position": "post",
        "embed_layernorm": True,
        "position_embedding_type": "learned_absolute",
        "activation": activation,
        "untie_embeddings_and_output_weights": False,
    }


OUTPUT = Module("table", "output", ("lm_head",), VOCABULARY)
"""The output layer's own weight, only in untied models."""

GPT2 = Family(
    "gpt2",
    "transformer.",
    ("lm_head.",),
    _gpt2_fixed,
    (
        Module("table", "embedding.word", ("transformer.wte",), VOCABULARY),
        Module("table", "embedding.position", ("transformer.wpe",)),
        Module("norm", "final_norm", ("transformer.ln_f",)),
        OUTPUT,
    ),
    (
        Module("norm", "layers.{}.attention_norm", ("transformer.h.{}.ln_1",)),
        Module("linear", "layers.{}.attention.qkv", ("transformer.h.{}.attn.c_attn",), CONV_QKV),
        Module("linear", "layers.{}.attention.projection", ("transformer.h.{}.attn.c_proj",), CONV),
        Module("norm", "layers.{}.mlp_norm", ("transformer.h.{}.ln_2",)),
        Module("linear", "layers.{}.mlp.up", ("transformer.h.{}.mlp.c_fc",), CONV),
        Module("linear", "layers.{}.mlp.down", ("transformer.h.{}.mlp.c_proj",), CONV),
    ),
)

BLOOM = Family(
    "bloom",
    "transformer.",
    ("lm_head.",),
    _bloom_fixed,
    (
        Module("table", "embedding.word", ("transformer.word_embeddings",), VOCABULARY),
        Module("norm", "embedding.norm", ("transformer.word_embeddings_layernorm",)),
        Module("norm", "final_norm", ("transformer.ln_f",)),
        OUTPUT,
    ),
    (
        Module("norm", "layers.{}.attention_norm", ("transformer.h.{}.input_layernorm",)),
        # The rows are grouped by head, [n, 3, d], which is our layout with r = 1.
        Module("linear", "layers.{}.attention.qkv", ("transformer.h.{}.self_attention.query_key_value",)),
        Module("linear", "layers.{}.attention.projection", ("transformer.h.{}.self_attention.dense",)),
        Module("norm", "layers.{}.mlp_norm", ("transformer.h.{}.post_attention_layernorm",)),
        Module("linear", "layers.{}.mlp.up", ("transformer.h.{}.mlp.dense_h_to_4h",)),
        Module("linear", "layers.{}.mlp.down", ("transformer.h.{}.mlp.dense_4h_to_h",)),
    ),
)

LLAMA = Family(
    "llama",
    "model.",
    ("lm_head.",),
    _llama_fixed,
    (
        Module("table", "embedding.word", ("model.embed_tokens",), VOCABULARY),
        Module("norm", "final_norm", ("model.norm",)),
        OUTPUT,
    ),
    (
        Module("norm", "layers.{}.attention_norm", ("model.layers.{}.input_layernorm",)),
        Module(
            "linear",
            "layers.{}.attention.qkv",
            tuple(f"model.layers.{{}}.self_attn.{part}_proj" for part in "qkv"),
            QKV,
        ),
        Module("linear", "layers.{}.attention.projection", ("model.layers.{}.self_attn.o_proj",)),
        Module("norm", "layers.{}.mlp_norm", ("model.layers.{}.post_attention_layernorm",)),
        Module(
            "linear",
            "layers.{}.mlp.up",
            tuple(f"model.layers.{{}}.mlp.{part}_proj" for part in ("gate", "up")),
            HALVES,
        ),
        Module("linear", "layers.{}.mlp.down", ("model.layers.{}.mlp.down_proj",)),
    ),
)

ORDER = (
    Module("linear", "order_head.pooler", ("bert.pooler.dense",)),
    Module("linear", "order_head.classifier", ("cls.seq_relationship",)),
)
"""Modules of BERT's binary head."""
BERT = Family(
    "bert",
    "bert.",
    ("cls.",),
    _bert_fixed,
    (
        Module("table", "embedding.word", ("bert.embeddings.word_embeddings",), VOCABULARY),
        Module("table", "embedding.position", ("bert.embeddings.position_embeddings",)),
        Module("table", "embedding.token_type", ("bert.embeddings.token_type_embeddings",)),
        Module("norm", "embedding.norm", ("bert.embeddings.LayerNorm",)),
        Module("linear", "token_head.dense", ("cls.predictions.transform.dense",)),
        Module("norm", "token_head.norm", ("cls.predictions.transform.LayerNorm",)),
        Module("vector", "token_head.output_bias", ("cls.predictions.bias",), VOCABULARY),
        *ORDER,
    ),
    (
        Module(
            "linear",
            "layers.{}.attention.qkv",
            tuple(f"bert.encoder.layer.{{}}.attention.self.{part}" for part in ("query", "key", "value")),
            QKV,
        ),
        Module("linear", "layers.{}.attention.projection", ("bert.encoder.layer.{}.attention.output.dense",)),
        Module("norm", "layers.{}.attention_norm", ("bert.encoder.layer.{}.attention.output.LayerNorm",)),
        Module("linear", "layers.{}.mlp.up", ("bert.encoder.layer.{}.intermediate.dense",)),
        Module("linear", "layers.{}.mlp.down", ("bert.encoder.layer.{}.output.dense",)),
        Module("norm", "layers.{}.mlp_norm", ("bert.encoder.layer.{}.output.LayerNorm",)),
    ),
)

FAMILIES = {"learned_absolute": GPT2, "alibi": BLOOM, "rope": LLAMA}
"""Architectures of a gpt, by position embedding. Each has a different one."""


def family_of(config: ModelConfig) -> Family:
    """Return the transformers architecture that the config describes.

    Raises:
        UserError: transformers has none; the message names the fields that prevent it.
    """
    family = BERT if config.architecture == "bert" else FAMILIES.get(config.position_embedding_type)
    if family is None:
        known = ", ".join(FAMILIES)
        raise UserError(
            f"transformers has no such model: position_embedding_type is {config.position_embedding_type}, "
            f"not one of {known}"
        )
    if problems := family.problems(config):
        raise UserError(f"transformers' {family.model_type} cannot be this model: {', '.join(problems)}")
    return family


def layer_entries(config: ModelConfig, layer: int) -> list[Entry]:
    """Return the tensors of one layer."""
    return [entry for module in family_of(config).layer for entry in module.entries(config, layer)]


def end_entries(config: ModelConfig) -> list[Entry]:
    """Return the tensors outside the layers: embeddings, last norm, and an untied output weight."""
    absent: tuple[Module, ...] = () if config.untie_embeddings_and_output_weights else (OUTPUT,)
    absent += () if config.bert_binary_head else ORDER
    modules = [module for module in family_of(config).ends if module not in absent]
    return [entry for module in modules for entry in module.entries(config)]


def all_entries(config: ModelConfig) -> Iterator[Entry]:
    """Yield every tensor of the model once."""
    yield from end_entries(config)
    for layer in range(config.num_layers):
        yield from layer_entries(config, layer)


def to_hf(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Rename and reshape our full tensors, all or some of them, to transformers'.

    Raises:
        UserError: a name is not a parameter of the config's model, or transformers has no such model.
    """
    entries = {entry.ours: entry for entry in all_entries(config)}
    if unknown := sorted(set(tensors) - set(entries)):
        raise UserError(
            f"the model has no parameter {', '.join(unknown)}: does the config belong to another model?"
        )
    converted: dict[str, Tensor] = {}
    for name, full in tensors.items():
        converted.update(entries[name].to_hf(full, config))
    return converted


def from_hf(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Rename and reshape transformers' tensors of the whole model to ours.

    Their names may lack the prefix (``h.0.ln_1.weight``), as in the hub's files of GPT-2 and BLOOM. Unknown
    tensors are ignored, such as masks and rotary tables of old versions, or the second name of a tied weight.

    Raises:
        UserError: a tensor is missing or has another shape, or transformers has no such model.
    """
    whole = {family_of(config).full_name(name): tensor for name, tensor in tensors.items()}
    return {entry.ours: entry.from_hf(whole, config) for entry in all_entries(config)}
