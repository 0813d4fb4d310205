"""Rows of a family's table of settings: names in config.json, and the fields of our config.

`HFSettings` reads a config.json and remembers what was read, so that no setting is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from megalite.config import ModelConfig
from megalite.utils.errors import UserError, shortened

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_NAMES = """
    _attn_implementation _attn_implementation_autoset _name_or_path architectures attn_implementation auto_map
    chunk_size_feed_forward classifier_dropout cls_token_id decoder_start_token_id dtype finetuning_task
    gradient_checkpointing id2label initializer_range is_decoder is_encoder_decoder label2id mask_token_id
    model_type name_or_path output_attentions output_hidden_states output_past pretraining_tp problem_type
    return_dict return_dict_in_generate sep_token_id task_specific_params tokenizer_class torch_dtype
    torchscript transformers_version unk_token_id use_bfloat16 use_cache vocab_size

    bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping
    encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id
    length_penalty max_length max_new_tokens min_length no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_scores remove_invalid_values repetition_penalty suppress_tokens temperature
    top_k top_p typical_p
"""
WITHOUT_EFFECT = frozenset((*TOKEN_IDS, *_NAMES.split()))
"""Settings of any model that do not change what it computes: tokens, formats, and defaults of generation."""

HF_ACTIVATIONS = {
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_fast": "gelu",
    "gelu": "gelu_exact",
    "relu": "relu",
    "relu2": "squared_relu",
}
"""Our activation for each of transformers' names for ungated activations. ``silu`` is missing: in Llama it is
the gate of SwiGLU, and megalite has no ungated MLP with SiLU."""
HF_GATES = {
    "silu": "swiglu",
    "gelu_pytorch_tanh": "geglu",
    "gelu_new": "geglu",
    "gelu": "geglu_exact",
    "relu": "reglu",
}
"""Our gated activation for each of transformers' names for the gate's function."""


class HFSettings:
    """Reads the settings of a ``config.json`` by name, and remembers which names were read.

    Args:
        hf: ``config.json`` read as JSON, or a config's ``to_dict()``.
        kind: name of what the settings describe, such as the family, in error messages.
        name: name of the object in error messages.
    """

    def __init__(self, hf: Mapping[str, Any], kind: str, name: str = "transformers' config") -> None:
        self.hf, self.kind, self.name = hf, kind, name
        self.names_read: set[str] = set()

    def __getitem__(self, names: str) -> Any:
        """Return the value under the first of some names that is present, since settings were renamed.

        Args:
            names: separated by spaces.

        Raises:
            UserError: none is present, or all are null.
        """
        self.names_read.update(names.split())
        for name in names.split():
            if self.hf.get(name) is not None:
                return self.hf[name]
        raise UserError(f"{self.name} has no {' or '.join(names.split())}")

    def get(self, names: str, default: Any = None) -> Any:
        """Return the first of some settings that is present, also if null, or the default if none is."""
        self.names_read.update(names.split())
        return next((self.hf[name] for name in names.split() if name in self.hf), default)

    def switch(self, name: str, default: bool) -> bool:
        """Return a setting that is true or false."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise UserError(f"{self.name} has {name} {value!r}, which is not true or false")
        return value

    def require(self, **needed: Any) -> None:
        """Refuse settings that are present with another value than the only one that megalite has."""
        for name, value in needed.items():
            if self.get(name, value) != value:
                raise UserError(
                    f"{self.kind} with {name} {self.hf[name]} cannot be converted: only {value} can"
                )

    def require_equal(self, first: str, second: str, default: object) -> None:
        """Refuse different values of two settings that are one option here."""
        values = self.get(first, default), self.get(second, default)
        if values[0] != values[1]:
            raise UserError(f"{first} {values[0]} and {second} {values[1]} must be equal to be converted")

    def refuse_unread(self, without_effect: Collection[str] = ()) -> None:
        """Refuse settings that were not read, unless they are null or have no effect."""
        for name in sorted(self.hf.keys() - self.names_read - WITHOUT_EFFECT - {*without_effect}):
            if self.hf[name] is not None:
                raise UserError(
                    f"{self.kind} with {name} {shortened(repr(self.hf[name]))} cannot be converted: megalite "
                    "does not know this setting"
                )


Fields = dict[str, Any]
"""Fields of our config, or settings of theirs, by name."""


@dataclass(frozen=True)
class Rule:
    """Settings of theirs that belong together, and our fields for them: one or several rows of a table.

    Attributes:
        read: returns our fields, for their settings and for the fields of the rules before.
        write: returns their settings for our config.
        names: their settings, which have no effect in a model that `where` excludes.
    """

    read: Callable[[HFSettings, Fields], Fields] = lambda hf, fields: {}
    write: Callable[[ModelConfig], Fields] = lambda config: {}
    names: tuple[str, ...] = ()


def where(
    in_theirs: Callable[[HFSettings, Fields], bool], in_ours: Callable[[ModelConfig], bool], *rules: Rule
) -> Rule:
    """Return the rules of settings that only some models of a family have, as one.

    Args:
        in_theirs, in_ours: return whether a model has them, in the arguments of `Rule.read` and `Rule.write`.
    """
    names = tuple(name for rule in rules for name in rule.names)

    def read(hf: HFSettings, fields: Fields) -> Fields:
        found: Fields = {}
        if in_theirs(hf, fields):
            for rule in rules:
                found |= rule.read(hf, fields | found)
        else:
            hf.names_read.update(names)
        return found

    def write(config: ModelConfig) -> Fields:
        written = [rule.write(config) for rule in rules] if in_ours(config) else []
        return {name: value for settings in written for name, value in settings.items()}

    return Rule(read, write, names)


_REQUIRED = object()
_RESOLVED = {
    "ffn_hidden_size": "ffn_size",
    "kv_channels": "head_dim",
    "moe_ffn_hidden_size": "expert_ffn_size",
    "num_query_groups": "num_kv_heads",
    "seq_length": "num_positions",
}
"""Properties of our config with the value of a field that may be unset."""


def setting(theirs: str, ours: str, default: Any = _REQUIRED, attribute: str = "") -> Rule:
    """Return the rule of a setting whose value is a field's.

    Args:
        theirs: its name; of several names, the first is written, and the first that is present is read.
        default: value if it is absent; without one, it is required.
        attribute: property of our config to write, such as `mamba.kernel`; by default the field's.
    """
    names, value_of = theirs.split(), attrgetter(attribute or _RESOLVED.get(ours, ours))
    return Rule(
        lambda hf, fields: {ours: hf[theirs] if default is _REQUIRED else hf.get(theirs, default)},
        lambda config: {names[0]: value_of(config)},
        tuple(names),
    )


def switch(theirs: str, ours: str, default: bool, attribute: str = "", *, negated: bool = False) -> Rule:
    """Return the rule of a setting that is true or false, the field's value or its negation."""
    return Rule(
        lambda hf, fields: {ours: hf.switch(theirs, default) != negated},
        lambda config: {theirs: getattr(config, attribute or ours) != negated},
        (theirs,),
    )


def fixed(**fields: Any) -> Rule:
    """Return the rule of fields that have the same value in every model of a family."""
    return Rule(lambda hf, _: fields)


def only(**needed: Any) -> Rule:
    """Return the rule of settings of which megalite has only one value."""

    def read(hf: HFSettings, fields: Fields) -> Fields:
        hf.require(**needed)
        return {}

    return Rule(read, names=tuple(needed))


def activation(theirs: str, default: str, known: dict[str, str] = HF_ACTIVATIONS) -> Rule:
    """Return the rule of the activation; `known` has our name for each of theirs."""
    names = {ours: name for name, ours in reversed(known.items())}

    def read(hf: HFSettings, fields: Fields) -> Fields:
        name = hf.get(theirs, default)
        if name not in known:
            raise UserError(f"{theirs} {name!r} cannot be converted: {', '.join(known)} can")
        return {"activation": known[name]}

    return Rule(read, lambda config: {theirs: names.get(config.activation, default)})


def hidden_dropout(of_embedding: str | None, of_blocks: str, default: float = 0.0) -> Rule:
    """Return the rule of the dropouts of the embeddings and of each block's output; None for no dropout."""

    def read(hf: HFSettings, fields: Fields) -> Fields:
        first = hf.get(of_embedding, default) if of_embedding else 0.0
        others = hf.get(of_blocks, default)
        return {"hidden_dropout": others, "embedding_dropout": None if first == others else first}

    def write(config: ModelConfig) -> Fields:
        first = {of_embedding: config.embedding_drop} if of_embedding else {}
        return {**first, of_blocks: config.hidden_dropout}

    return Rule(read, write)


def biases(default: bool = False, mlp: bool | None = False) -> Rule:
    """Return the rule of `attention_bias`, which adds biases to all projections of attention.

    Args:
        default: default of `attention_bias`.
        mlp: whether the MLPs have biases; None if `mlp_bias` says so.
    """

    def read(hf: HFSettings, fields: Fields) -> Fields:
        has_mlp_bias = hf.switch("mlp_bias", False) if mlp is None else mlp
        has_bias = hf.switch("attention_bias", default)
        if has_bias and has_mlp_bias:
            return {"add_bias_linear": True}
        return {
            "add_bias_linear": False,
            "add_qkv_bias": has_bias,
            "add_attention_output_bias": has_bias,
            "add_mlp_bias": has_mlp_bias,
        }

    def write(config: ModelConfig) -> Fields:
        own = {"mlp_bias": config.has_mlp_bias} if mlp is None else {}
        return {"attention_bias": config.has_attention_output_bias, **own}

    return Rule(read, write)
