"""Names of Megatron's parameters in the whole model, what a rank holds of them, and megalite's as these."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megalite.config import Config
from megalite.observe.judge.program import Piece, positions_in
from megalite.utils.errors import UserError

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
