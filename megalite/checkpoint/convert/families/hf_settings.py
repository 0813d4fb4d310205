"""Read the settings in a config of transformers, and refuse settings that nothing has read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from megalite.errors import UserError, shortened

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
THEIR_GATES = {ours: theirs for theirs, ours in reversed(HF_GATES.items())}
THEIR_ACTIVATIONS = {ours: theirs for theirs, ours in reversed(HF_ACTIVATIONS.items())}


class HFSettings:
    """Reads the settings of a ``config.json`` by name, and remembers which names were read.

    Args:
        hf: ``config.json`` read as JSON, or a config's ``to_dict()``.
        name: name of the object in error messages.
    """

    def __init__(self, hf: Mapping[str, Any], name: str = "transformers' config") -> None:
        self.hf, self.name = hf, name
        self.names_read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.names_read.add(name)
        return self.hf[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Return a setting, or the default if it is absent."""
        self.names_read.add(name)
        return self.hf.get(name, default)

    def first(self, *names: str) -> Any:
        """Return the value under the first of these names that is present, since settings were renamed."""
        self.names_read.update(names)
        for name in names:
            if self.hf.get(name) is not None:
                return self.hf[name]
        raise UserError(f"{self.name} has no {' or '.join(names)}")

    def switch(self, name: str, default: bool) -> bool:
        """Return a setting that is true or false."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise UserError(f"{self.name} has {name} {value!r}, which is not true or false")
        return value

    def activation(self, name: str, default: str, known: Mapping[str, str] = HF_ACTIVATIONS) -> str:
        """Return our name of an activation, by default of an ungated one."""
        value = self.get(name, default)
        if value not in known:
            raise UserError(f"{name} {value!r} cannot be converted: {', '.join(known)} can")
        return known[value]

    def require(self, kind: str, **needed: Any) -> None:
        """Refuse settings that are present with another value than the only one that megalite has."""
        for name, value in needed.items():
            if self.get(name, value) != value:
                raise UserError(f"{kind} with {name} {self.hf[name]} cannot be converted: only {value} can")

    def require_equal(self, first: str, second: str, default: object) -> None:
        """Refuse different values of two settings that are one option here."""
        values = self.get(first, default), self.get(second, default)
        if values[0] != values[1]:
            raise UserError(f"{first} {values[0]} and {second} {values[1]} must be equal to be converted")

    def refuse_unread(self, kind: str, without_effect: Collection[str] = ()) -> None:
        """Refuse settings that were not read, unless they are null or have no effect."""
        for name in sorted(self.hf.keys() - self.names_read - WITHOUT_EFFECT - {*without_effect}):
            if self.hf[name] is not None:
                raise UserError(
                    f"{kind} with {name} {shortened(repr(self.hf[name]))} cannot be converted: megalite does "
                    "not know this setting"
                )
