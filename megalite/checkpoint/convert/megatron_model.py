"""Read a Megatron model as the source of a conversion: its arguments, parameter names and shards."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.convert.foreign_files import StandIn
from megalite.checkpoint.convert.model_settings import Settings, parameters_of, precision_of
from megalite.checkpoint.progress import TrainingProgress
from megalite.config import Config, ModelConfig
from megalite.config.fields import MODEL_FIELDS, config_fields
from megalite.frontends import none_if_default
from megalite.tensor_parallel.parameter_spec import ParameterSpec
from megalite.utils.errors import UserError, few
from megalite.utils.log import log

_MODULES = {
    "input_layernorm": "attention_norm",
    "input_norm": "attention_norm",
    "attention.query_key_value": "attention.qkv",
    "self_attention.query_key_value": "attention.qkv",
    "self_attention.linear_qkv": "attention.qkv",
    "self_attention.q_layernorm": "attention.query_norm",
    "self_attention.k_layernorm": "attention.key_norm",
    "attention.dense": "attention.projection",
    "self_attention.dense": "attention.projection",
    "self_attention.linear_proj": "attention.projection",
    "post_attention_layernorm": "mlp_norm",
    "post_attention_norm": "mlp_norm",
    "pre_mlp_layernorm": "mlp_norm",
    "mlp.dense_h_to_4h": "mlp.up",
    "mlp.linear_fc1": "mlp.up",
    "mlp.dense_4h_to_h": "mlp.down",
    "mlp.linear_fc2": "mlp.down",
}
"""Modules of a layer."""

_ENDS = {
    "embedding.word_embeddings": "embedding.word",
    "embedding.position_embeddings": "embedding.position",
    "embedding.word_embeddings.norm": "embedding.norm",
    "word_embeddings": "embedding.word",
    "position_embeddings": "embedding.position",
    "word_embeddings.norm": "embedding.norm",
    "final_layernorm": "final_norm",
    "final_norm": "final_norm",
    "output_layer": "output",
}
"""Modules outside the layers."""

_NORMS_INSIDE = {
    "self_attention.linear_qkv.layer_norm": "attention_norm",
    "mlp.linear_fc1.layer_norm": "mlp_norm",
}
"""Norms that Transformer Engine stores in a linear layer, as ``layer_norm_weight``."""

_WHOLE_NAMES = {"self_attention.core_attention.softmax_offset": "attention.sinks"}
"""Parameters of a layer that are neither a weight nor a bias."""

_FRAME = re.compile(r"(module\.|model\.|language_model\.|encoder\.|transformer\.|decoder\.)*")
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_NO_WEIGHTS = re.compile(
    r".*(_extra_state|rotary_pos_emb\.inv_freq|rotary_emb\.inv_freq|core_attention\.(?!softmax_offset$).*)"
)
_TIED_COPY = "word_embeddings_for_head"


def flattened(nested: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in nested dicts, with their keys joined by dots, and skip everything else."""
    for key, value in nested.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{prefix}{key}.")
        elif isinstance(value, Tensor):
            yield f"{prefix}{key}", value


def our_name(theirs: str) -> tuple[str, int | None] | None:
    """Return our name of a parameter, with ``{}`` for the layer's number, and that number within its stage.

    Return None for buffers, and for the copy of a tied table on the last stage.

    Raises:
        KeyError: our model has no such parameter.
    """
    name = theirs[_FRAME.match(theirs).end() :]  # type: ignore[union-attr]  # matches the empty string too
    if name.startswith(_TIED_COPY) or _NO_WEIGHTS.fullmatch(name):
        return None
    in_layer = _LAYER.fullmatch(name)
    if in_layer is None:
        module, kind = _split(name)
        return f"{_ENDS[module]}.{kind}", None
    if in_layer[2] in _WHOLE_NAMES:
        return f"layers.{{}}.{_WHOLE_NAMES[in_layer[2]]}", int(in_layer[1])
    module, kind = _split(in_layer[2])
    ours = _NORMS_INSIDE.get(module) or _MODULES[module]
    return f"layers.{{}}.{ours}.{kind}", int(in_layer[1])


def _split(name: str) -> tuple[str, str]:
    """Return a parameter's module, and "weight" or "bias".

    Raises:
        KeyError: it is neither.
    """
    found = re.fullmatch(r"(.+?)[._](weight|bias)", name)
    if found is None:
        raise KeyError(name)
    return found[1], found[2]


_WORD, _OUTPUT = "embedding.word.weight", "output.weight"
"""Parameters with one row per token, and rows for padding."""


def join(
    name: str, shards: Sequence[Tensor], spec: ParameterSpec, config: ModelConfig, version: float
) -> Tensor:
    """Return the full tensor without the vocabulary's padding.

    Their shards are the same slices as ours, but in another shape: SwiGLU's gate and up projections are
    concatenated.

    Args:
        version: version of their checkpoint; before 2, queries, keys and values had other orders.

    Raises:
        UserError: the shards do not add up to the parameter's shape.
    """
    dim = spec.dim_cut_over("tp")
    if dim is None:
        return _replicated(name, shards, spec)
    if ".attention.qkv." in name and version < 2:
        shards = [_by_head(shard, config, version, len(shards)) for shard in shards]
    shape = list(spec.full_shape)
    shape[dim] = -1  # the vocabulary may be padded to another size
    try:
        full = torch.cat([shard.reshape(shape) for shard in shards], dim=dim)
    except RuntimeError:
        raise _misshapen(name, shards, spec) from None
    if name in (_WORD, _OUTPUT):
        full = full[: spec.used_shape[0]]
    if tuple(full.shape) != spec.used_shape:
        raise _misshapen(name, shards, spec)
    return full


def _replicated(name: str, shards: Sequence[Tensor], spec: ParameterSpec) -> Tensor:
    """Return a tensor that every rank has. Copies that differ, as BLOOM's norms do, are averaged."""
    first = shards[0]
    if any(shard.shape != first.shape for shard in shards) or first.numel() != math.prod(spec.used_shape):
        raise _misshapen(name, shards, spec)
    if all(torch.equal(first, other) for other in shards[1:]):
        return first.reshape(spec.used_shape)
    stacked = torch.stack(tuple(shards)).double()
    largest = (stacked - stacked[0]).abs().max().item()
    log.warning("%s differs by up to %.1e between tensor-parallel ranks: their mean is used", name, largest)
    return stacked.mean(dim=0).to(first.dtype).reshape(spec.used_shape)


def _by_head(shard: Tensor, config: ModelConfig, version: float, num_ranks: int) -> Tensor:
    """Reorder rows from [3, n/t, d] (version 0) or [n/t, d, 3] (version 1) to [n/t, 3, d]."""
    heads, size = config.num_attention_heads // num_ranks, config.head_dim
    if shard.shape[0] != 3 * heads * size:
        return shard  # `join` refuses its shape
    if version < 1:
        return shard.unflatten(0, (3, heads, size)).transpose(0, 1).flatten(0, 2)
    return shard.unflatten(0, (heads, size, 3)).transpose(1, 2).flatten(0, 2)


def _misshapen(name: str, shards: Sequence[Tensor], spec: ParameterSpec) -> UserError:
    shapes = " and ".join(str(list(shape)) for shape in dict.fromkeys(shard.shape for shard in shards))
    return UserError(
        f"{name} is {shapes} on {len(shards)} tensor-parallel ranks, which does not make "
        f"{list(spec.used_shape)}: does the config belong to another model?"
    )


Arguments = Mapping[str, Any]

_REFUSED = {
    "apply_residual_connection_post_layernorm": False,
    "multi_latent_attention": False,
    "rotary_seq_len_interpolation_factor": 1,
    "qk_l2_norm": False,
    "num_experts": None,
    "hybrid_override_pattern": None,
    "hybrid_layer_pattern": None,
    "experimental_attention_variant": None,
    "glu_activation": None,
    "use_mup": False,
    "mtp_num_layers": 0,
}
"""Switches that our model does not have, with the only supported value; missing switches have it too."""

_POSITIONS = {
    "learned_absolute": "learned_absolute",
    "absolute": "learned_absolute",
    "rope": "rope",
    "rotary": "rope",
    "alibi": "alibi",
    "none": "none",
}
_POSITIONS_BY_NUMBER = {1: "rotary", 2: "absolute", 3: "alibi"}
"""Megatron-DeepSpeed's enum."""


def model_of(arguments: Arguments, base: ModelConfig) -> dict[str, Any]:
    """Return fields of our config.

    Args:
        arguments: Megatron's arguments, by name; old versions have only a few.
        base: the config with the values for missing arguments.

    Raises:
        UserError: an option is one that our model does not have.
    """
    _refuse_others(arguments)
    heads, hidden = arguments["num_attention_heads"], arguments["hidden_size"]
    group_query = arguments.get("group_query_attention", False)
    fields: dict[str, Any] = {
        name: _tuple_of(arguments.get(name)) if name in _MANY else arguments.get(name)
        for name, field in MODEL_FIELDS.items()
        if field.declared.in_megatron
    } | {
        "num_layers": arguments.get("num_layers") or arguments.get("encoder_num_layers"),
        "num_query_groups": arguments.get("num_query_groups") if group_query else None,
        "kv_channels": none_if_default(arguments.get("kv_channels"), hidden // heads),
        "seq_length": arguments.get("seq_length") or arguments.get("max_position_embeddings"),
        "position_embedding_type": _positions(arguments),
        "norm_epsilon": arguments.get("norm_epsilon") or arguments.get("layernorm_epsilon"),
        "activation": _activation(arguments),
        "zero_centered_norms": arguments.get("apply_layernorm_1p"),
        "rope_scaling": "llama3" if arguments.get("use_rope_scaling") else None,
    }
    if arguments.get("window_size") is None:
        fields["window_attn_skip_freq"] = None
    known = {name: value for name, value in fields.items() if value is not None}
    for name in ("rotary_base", "rotary_percent", "rope_scaling_factor"):
        known[name] = float(known.get(name, getattr(base, name)))
    return known


_MANY = {field.name for field in config_fields() if field.kind.is_many}


def _tuple_of(value: Any) -> tuple[int, ...] | None:
    return None if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)


def training_of(arguments: Arguments) -> dict[str, Any]:
    """Return the values that determine the order of samples, so that a run can continue."""
    fields: dict[str, Any] = {name: arguments.get(name) for name in ("seed", "global_batch_size")}
    if ramp_up := arguments.get("rampup_batch_size"):
        fields["rampup_batch_size"] = tuple(int(number) for number in ramp_up)
    return {name: value for name, value in fields.items() if value is not None}


def _refuse_others(arguments: Arguments) -> None:
    for needed in ("num_attention_heads", "hidden_size"):
        if not isinstance(arguments.get(needed), int):
            raise UserError(f"the checkpoint's arguments have no {needed}: pass the model's flags")
    others = [
        f"{name} {arguments[name]}"
        for name, only in _REFUSED.items()
        if arguments.get(name) is not None and arguments[name] != only
    ]
    if others:
        raise UserError(f"megalite has no model with {', '.join(others)}: it cannot be converted")


def _positions(arguments: Arguments) -> str:
    kind = arguments.get("position_embedding_type", "learned_absolute")
    if isinstance(kind, StandIn):
        (number,) = kind.arguments or (None,)
        kind = _POSITIONS_BY_NUMBER.get(number, "unknown") if isinstance(number, int) else "unknown"
    if arguments.get("use_rotary_position_embeddings"):
        kind = "rope"
    if kind not in _POSITIONS:
        raise UserError(f"position_embedding_type {kind} cannot be converted: {', '.join(_POSITIONS)} can")
    return _POSITIONS[kind]


def _activation(arguments: Arguments) -> str:
    if arguments.get("swiglu"):
        return "swiglu"
    if arguments.get("quick_geglu"):
        return "quick_geglu"
    if arguments.get("squared_relu"):
        return "squared_relu"
    # Megatron's default, the fused GELU, is the tanh form; its unfused GELU is the erf form.
    tanh = arguments.get("bias_gelu_fusion", True) or arguments.get("openai_gelu")
    return "gelu" if tanh else "gelu_exact"


class MegatronSource:
    """Parameters of a Megatron checkpoint, whose shards are joined one parameter at a time.

    Args:
        shards: each parameter's shards on the tensor-parallel ranks, by our name.
        arguments: the run's arguments; None if the checkpoint does not hold them.
        version: version of the checkpoint's format.
        why_unread: why the arguments could not be read; empty if they are just missing.

    Raises:
        UserError: megalite does not have the model, or tensors are missing or unknown.
    """

    hugging_face = None

    def __init__(
        self,
        settings: Settings,
        folder: str,
        shards: Mapping[str, Sequence[Tensor]],
        arguments: Arguments | None,
        version: float,
        iteration: int,
        why_unread: str = "",
    ) -> None:
        self._folder, self._shards, self._shard_version = folder, shards, version
        if _WORD not in shards:
            raise UserError(f"{folder} lacks the word embeddings: are files missing?")
        self.config = settings.applied(self._base(settings, arguments, why_unread))
        if self.config.model.architecture != "gpt":
            raise UserError(
                f"{folder}: a {self.config.model.architecture} of Megatron cannot be converted, only a gpt: "
                "convert it to transformers' format with Megatron's tools"
            )
        self._specs = parameters_of(self.config.model)
        self._check_names()
        samples = (arguments or {}).get("consumed_train_samples", 0)
        is_count = type(samples) is int and 0 <= samples < 1 << 63
        self.progress = TrainingProgress(iteration, samples if is_count else 0)

    def dtype_of(self, name: str) -> torch.dtype:
        return self._shards[name][0].dtype

    def tensor(self, name: str) -> Tensor:
        return join(name, self._shards[name], self._specs[name], self.config.model, self._shard_version)

    def _check_names(self) -> None:
        folder, shards = self._folder, self._shards
        if missing := sorted(self._specs.keys() - shards.keys()):
            raise UserError(f"{folder} lacks {few(missing)}: does the config belong to another model?")
        others = sorted(shards.keys() - self._specs.keys())
        if others == [_OUTPUT]:
            pairs = zip(shards[_OUTPUT], shards[_WORD], strict=True)
            if all(torch.equal(output, word) for output, word in pairs):
                return  # the copy of a tied table on the last stage
            raise UserError(
                f"{folder} has an output layer that differs from the word embedding: "
                "pass --untie-embeddings-and-output-weights"
            )
        if others:
            raise UserError(f"{folder} has parameters that the config's model does not have: {few(others)}")

    def _base(self, settings: Settings, arguments: Arguments | None, why_unread: str) -> Config:
        """Return the config that the arguments describe, or an empty one if the user's flags describe it."""
        dtype = precision_of(self._shards[_WORD][0].dtype)
        rows = sum(shard.shape[0] for shard in self._shards[_WORD])
        if settings.describe_model:
            return Config(model=ModelConfig(vocab_size=rows, params_dtype=dtype))
        if arguments is None:
            reason = why_unread or f"{self._folder} does not say which model it holds"
            raise UserError(f"{reason}; pass the model's flags, such as --num-layers or --preset")
        base, vocab_size = Config(), arguments.get("vocab_size")
        if not isinstance(vocab_size, int) or not vocab_size:  # only newer versions save the unpadded size
            vocab_size = rows
        fields = model_of(arguments, base.model)
        return replace(
            base,
            model=replace(base.model, **fields, vocab_size=vocab_size, params_dtype=dtype),
            training=replace(base.training, **training_of(arguments)),
        )
