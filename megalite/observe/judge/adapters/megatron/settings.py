"""Megatron's configs, from a layout, megalite's config and options by name, and its parameters by name."""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megalite.config import Config
from megalite.config.fields import MODEL_FIELDS, inactive_options
from megalite.config.option import flag_of
from megalite.observe.judge.program import Piece, positions_in, refuse_unmapped
from megalite.observe.verify.layouts import Layout
from megalite.utils.errors import UserError

_SWITCHES: Mapping[str, Mapping[str, Any]] = {
    "sp": {"sequence_parallel": True},
    "zero1": {"use_distributed_optimizer": True},
    "gather": {"overlap_param_gather": True, "overlap_grad_reduce": True},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "selective": {"recompute_granularity": "selective"},
    "uneven": {"num_layers_in_first_pipeline_stage": 1},
    "allgather": {"moe_token_dispatcher_type": "allgather"},
}
"""Fields of Megatron's configs that the switches of a layout set."""

_ACTIVATIONS: Mapping[str, Mapping[str, Any]] = {
    "gelu": {"activation_func": partial(F.gelu, approximate="tanh")},
    "gelu_exact": {"activation_func": F.gelu},
    "relu": {"activation_func": F.relu},
    "squared_relu": {"activation_func": lambda values: F.relu(values).square()},
    "swiglu": {"activation_func": F.silu, "gated_linear_unit": True},
    "geglu": {"activation_func": partial(F.gelu, approximate="tanh"), "gated_linear_unit": True},
    "geglu_exact": {"activation_func": F.gelu, "gated_linear_unit": True},
    "reglu": {"activation_func": F.relu, "gated_linear_unit": True},
}

_SCHEDULE = ("lr_decay_style", "lr_decay_iters", "lr_warmup_iters", "lr_warmup_init")
"""Fields of megalite's optimizer that Megatron's scheduler of the learning rate takes."""

_OF_THE_PROGRAM = {
    *("architecture", "seq_length", "max_position_embeddings", "vocab_size", "make_vocab_size_divisible_by"),
    *("pad_vocab_size_to", "position_embedding_type", "untie_embeddings_and_output_weights", "norm_epsilon"),
    *(
        "zero_centered_norms",
        "activation",
        "num_experts",
        "recurrent_mixer",
        "params_dtype",
        "attention_backend",
    ),
    *("bert_binary_head", "mask_prob", "init_method_std", "rope_scaling"),
}
"""Fields of megalite's model that `model_values` reads, or that do not matter here."""


def model_values(config: Config) -> dict[str, Any]:
    """Return the fields of Megatron's configs that describe megalite's model.

    Raises:
        UserError: it has an option that the GPT model of megatron-core does not have.
    """
    model = config.model
    theirs = {field.name for field in dataclasses.fields(TransformerConfig)}
    unknown = MODEL_FIELDS.keys() - theirs - _OF_THE_PROGRAM - inactive_options(model).keys()
    for name in sorted(unknown):
        if getattr(model, name) != MODEL_FIELDS[name].default:
            raise UserError(f"megatron-core has no {flag_of(name)} {getattr(model, name)}: remove it")
    if model.activation not in _ACTIVATIONS:
        raise UserError(
            f"megatron-core has no --activation {model.activation}: pass {' or '.join(_ACTIVATIONS)}"
        )
    if model.architecture != "gpt" or model.rope_scaling != "none":
        raise UserError("megatron-core is judged with GPT models, without --rope-scaling")
    if model.multi_latent_attention:
        raise UserError("--multi-latent-attention of megatron-core needs Transformer Engine: remove it")
    if model.position_embedding_type == "alibi":
        raise UserError("megatron-core has no --position-embedding-type alibi: pass rope")
    values = {name: getattr(model, name) for name in MODEL_FIELDS if name in theirs}
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    for name in ("moe_layer_freq", "linear_attention_freq", "window_attn_skip_freq"):
        if values[name] is not None and len(values[name]) == 1:
            values[name] = values[name][0]
    values |= {
        **_ACTIVATIONS[model.activation],
        "ffn_hidden_size": model.ffn_size,
        "kv_channels": model.head_dim,
        "num_query_groups": model.num_kv_heads,
        "layernorm_epsilon": model.norm_epsilon,
        "layernorm_zero_centered_gamma": model.zero_centered_norms,
        "num_moe_experts": model.num_experts,
        "moe_ffn_hidden_size": model.expert_ffn_size if model.num_experts else None,
        "moe_layer_freq": values["moe_layer_freq"] or 1,
        "moe_z_loss_coeff": model.moe_z_loss_coeff or None,
        "moe_token_dispatcher_type": config.parallel.moe_token_dispatcher_type,
        "mtp_num_layers": model.mtp_num_layers or None,
        "params_dtype": torch.float32,
        "pipeline_dtype": torch.float32,
        "use_cpu_initialization": True,
    }
    if model.recurrent_mixer != "none":
        values |= {
            "experimental_attention_variant": model.recurrent_mixer,
            "transformer_impl": "transformer_engine",
            "deterministic_mode": True,
        }
    values.pop("attention_backend", None)
    return values


def layout_values(layout: Layout) -> dict[str, Any]:
    """Return the fields of Megatron's configs that a layout sets.

    Raises:
        UserError: megatron-core has no such layout on a CPU.
    """
    if layout.size("cp") > 1:
        raise UserError(
            f"layout {layout}: context parallelism of megatron-core needs Transformer Engine: remove cp"
        )
    if layout.schedule is not None:
        raise UserError(f"layout {layout}: megatron-core has no such schedule: write pp2 or pp2v2")
    values: dict[str, Any] = {
        "tensor_model_parallel_size": layout.size("tp"),
        "pipeline_model_parallel_size": layout.size("pp"),
        "virtual_pipeline_model_parallel_size": layout.v,
        "expert_model_parallel_size": layout.size("ep"),
        "expert_tensor_parallel_size": layout.sizes.get("etp", layout.size("tp")),
    }
    if layout.v is not None:
        values |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}  # as Megatron-LM's arguments do
    for switch in layout.switches:
        if switch not in _SWITCHES:
            raise UserError(f"layout {layout}: megatron-core has no +{switch} on a CPU: remove it")
        values |= _SWITCHES[switch]
    if layout.shard is not None:
        values["num_distributed_optimizer_instances"] = layout.size("dp") // layout.shard
    return values


def optimizer_values(config: Config) -> dict[str, Any]:
    """Return the fields of Megatron's optimizer that megalite's optimizer describes.

    Raises:
        UserError: megatron-core needs another package for it.
    """
    ours = config.optimizer
    if ours.optimizer != "adam":
        raise UserError(f"--optimizer {ours.optimizer} of megatron-core needs emerging_optimizers: pass adam")
    names = {field.name for field in dataclasses.fields(OptimizerConfig)}
    same = names & {field.name for field in dataclasses.fields(ours)} - {"optimizer_cpu_offload"}
    same -= {"exp_avg_dtype", "exp_avg_sq_dtype", "optimizer_offload_fraction"}
    refuse_unmapped(config, "megatron-core", *same, *_SCHEDULE)
    return {name: getattr(ours, name) for name in same}


_Options = TypeVar("_Options")
_UNIONS = (typing.Union, types.UnionType)


def filled(kind: type[_Options], values: Mapping[str, Any], options: Mapping[str, str]) -> _Options:
    """Return one of Megatron's configs: the values and options that it has fields for."""
    hints = typing.get_type_hints(kind)
    named = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    chosen = {name: value for name, value in values.items() if name in named}
    chosen |= {name: _parsed(name, text, hints[name]) for name, text in options.items() if name in named}
    try:
        return kind(**chosen)
    except (AssertionError, ValueError) as error:
        raise UserError(f"megatron-core refuses its {kind.__name__}: {error}") from None


def _parsed(name: str, text: str, hint: Any) -> Any:
    """Return the value of a field that --set gives as text.

    Raises:
        UserError: the field has another type.
    """
    for kind in typing.get_args(hint) if typing.get_origin(hint) in _UNIONS else (hint,):
        if kind is type(None) and text == "None":
            return None
        if kind is bool and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if typing.get_origin(kind) is typing.Literal and text in typing.get_args(kind):
            return text
        if isinstance(kind, type) and issubclass(kind, enum.Enum) and text in kind.__members__:
            return kind[text]
        if kind is torch.dtype and isinstance(getattr(torch, text, None), torch.dtype):
            return getattr(torch, text)
        if kind in (Callable, typing.get_origin(Callable[..., Any])) and hasattr(F, text):
            return getattr(F, text)
        try:
            value = ast.literal_eval(text)
        except (SyntaxError, ValueError):
            value = text
        wanted = typing.get_origin(kind) or kind
        if isinstance(wanted, type) and type(value) is wanted:
            return value
        if kind is float and type(value) is int:
            return float(value)
    raise UserError(f"--set {name}={text}: megatron-core wants {inspect.formatannotation(hint)}")


_CUTS = {
    r"word_embeddings\.weight|output_layer\.weight": 0,
    r"linear_(qkv|fc1)\.(weight|bias)": 0,
    r"linear_(proj|fc2)\.weight|out_proj\.weight": 1,
    r"softmax_offset|eh_proj\.weight|in_proj\.weight|conv1d\.weight|A_log|dt_bias": 0,
}
"""Dims that tensor parallelism cuts, by the end of a parameter's name; others are equal on all ranks."""


def piece_of(name: str, tensor: Tensor, config: TransformerConfig) -> Piece:
    """Return the piece of a full parameter that this rank holds."""
    if "experts.local_experts" in name or "experts.weight" in name:
        index, count = (
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        )
    else:
        index, count = (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_world_size(),
        )
    if "experts.weight" in name:
        return _grouped_piece(name, tensor, config, index, count)
    dim = next((dim for end, dim in _CUTS.items() if re.search(rf"(^|[._])({end})$", name)), None)
    if dim is None:
        return Piece.whole(tensor)
    if name.endswith(("in_proj.weight", "conv1d.weight")):
        keys = config.linear_key_head_dim * config.linear_num_key_heads
        values = config.linear_value_head_dim * config.linear_num_value_heads
        heads = config.linear_num_value_heads
        sections = [keys, keys, values]
        sections += [] if name.endswith("conv1d.weight") else [values, heads, heads]
    else:
        whole = tensor.shape[dim] * count
        is_gated = "linear_fc1" in name and config.gated_linear_unit
        sections = [whole // 2, whole // 2] if is_gated else [whole]
    rows = [part.view(count, -1)[index] for part in torch.arange(sum(sections)).split(sections)]
    shape = (*tensor.shape[:dim], sum(sections), *tensor.shape[dim + 1 :])
    return Piece(tensor, shape, positions_in(shape).index_select(dim, torch.cat(rows)))


def _grouped_piece(name: str, tensor: Tensor, config: TransformerConfig, index: int, count: int) -> Piece:
    """Return the piece of a matrix of all experts, whose memory is `[experts, rows, columns]`."""
    num_local = config.num_moe_experts // config.expert_model_parallel_size
    first = num_local * parallel_state.get_expert_model_parallel_rank()
    hidden = config.hidden_size
    if name.endswith("weight1"):
        cut = Piece.cut(tensor.view(num_local, hidden, -1), 2, index, count, 1 + config.gated_linear_unit)
        full = (config.num_moe_experts, hidden, cut.shape[2])
        shape = (hidden, full[0] * full[2])
    else:
        cut = Piece.cut(tensor.view(num_local, -1, hidden), 1, index, count)
        full = (config.num_moe_experts, cut.shape[1], hidden)
        shape = (full[0] * full[1], hidden)
    assert cut.positions is not None
    of_expert = positions_in(full).flatten(1)[first : first + num_local]
    return Piece(tensor, shape, of_expert[:, cut.positions[0].flatten()].view(tensor.shape))


def whole_name(chunk: GPTModel, name: str) -> str:
    """Return the name on one rank of a module or parameter of a chunk of the model."""
    layer = re.match(r"decoder\.layers\.(\d+)(.*)", name)
    if layer is not None:
        number = chunk.decoder.layers[int(layer[1])].layer_number - 1
        name = f"decoder.layers.{number}{layer[2]}"
    expert = re.search(r"\.local_experts\.(\d+)", name)
    if expert is not None:
        config = chunk.config
        first = parallel_state.get_expert_model_parallel_rank() * (
            config.num_moe_experts // config.expert_model_parallel_size
        )
        name = f"{name[: expert.start(1)]}{first + int(expert[1])}{name[expert.end(1) :]}"
    if chunk.share_embeddings_and_output_weights and name == "output_layer.weight":
        return "embedding.word_embeddings.weight"  # the last stage's copy
    return name


_OURS = (
    (r"embedding\.word\.", "embedding.word_embeddings."),
    (r"embedding\.position\.", "embedding.position_embeddings."),
    (r"final_norm\.", "decoder.final_layernorm."),
    (r"output\.", "output_layer."),
    (r"layers\.", "decoder.layers."),
    (r"\.attention_norm\.", ".input_layernorm."),
    (r"\.mlp_norm\.", ".pre_mlp_layernorm."),
    (r"\.attention\.sinks", ".self_attention.core_attention.softmax_offset"),
    (r"\.attention\.", ".self_attention."),
    (r"\.qkv\.", ".linear_qkv."),
    (r"\.projection\.", ".linear_proj."),
    (r"\.query_norm\.", ".q_layernorm."),
    (r"\.key_norm\.", ".k_layernorm."),
    (r"\.shared\.gate\.weight", ".shared_experts.gate_weight"),
    (r"\.shared\.", ".shared_experts."),
    (r"\.up\.", ".linear_fc1."),
    (r"\.down\.", ".linear_fc2."),
)
"""Parts of our names, and theirs, in the order in which they are replaced."""


def from_megalite(config: Config, full: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return full tensors of megalite's model by the names and in the shapes of one rank here.

    Raises:
        UserError: the models differ.
    """
    model = config.model
    if model.recurrent_mixer != "none" or model.mtp_num_layers:
        raise UserError(
            "gated delta net and multi-token prediction have other weights in megatron-core than in "
            "megalite: judge a script that has its build, and not its from_megalite"
        )
    theirs: dict[str, Tensor] = {}
    for ours, tensor in full.items():
        name = ours
        for pattern, part in _OURS:
            name = re.sub(f"^{pattern}" if pattern[0] != "\\" else pattern, part, name)
        layer = re.match(r"layers\.(\d+)\.mlp\.(up|down)\.", ours)
        if layer is not None and model.layer_spec(int(layer[1])).experts is not None:
            for number, expert in enumerate(tensor):
                each = name.replace(".mlp.", f".mlp.experts.local_experts.{number}.")
                theirs[each] = _as_theirs(each, expert)
        else:
            theirs[name] = _as_theirs(name, tensor)
    return theirs


def _as_theirs(name: str, tensor: Tensor) -> Tensor:
    """Return a tensor whose gate and values, `[2, n, ...]`, are joined in one matrix."""
    has_halves = ".linear_fc1." in name and tensor.dim() == 2 + name.endswith("weight")
    return tensor.flatten(0, 1) if has_halves else tensor
