"""Rules and modules of a family's tables for mixtures of experts, with a tensor for each expert in files."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from megalite.config import LayerSpec, ModelConfig
from megalite.frontends.huggingface.family import (
    HALVES,
    Module,
    Parts,
    Place,
    Transform,
    in_layers_that,
    modules,
)
from megalite.frontends.huggingface.settings import Fields, HFSettings, Rule, switch
from megalite.utils.errors import UserError

FUSED_EXPERTS = {"experts.gate_up_proj": ("gate_proj", "up_proj"), "experts.down_proj": ("down_proj",)}
"""See `Family.experts`."""


def experts(count: str, width: str) -> Rule:
    """Return the rule of experts in all layers.

    Args:
        count: their names for the number of experts, the first of which is written.
        width: their name for the width of one.
    """
    return Rule(
        lambda hf, fields: _read_experts(hf, count, width),
        lambda config: _write_experts(config, count.split()[0], width),
    )


def _read_experts(hf: HFSettings, count: str, width: str) -> Fields:
    return {
        "num_experts": hf.first(*count.split()),
        "moe_router_topk": hf["num_experts_per_tok"],
        "moe_ffn_hidden_size": hf[width],
        "moe_aux_loss_coeff": hf.get("router_aux_loss_coef", 0.001),
    }


def _write_experts(config: ModelConfig, count: str, width: str) -> Fields:
    return {
        count: config.num_experts or 1,  # another number than a dense model has
        "num_experts_per_tok": config.moe_router_topk,
        width: config.expert_ffn_size,
        "router_aux_loss_coef": config.moe_aux_loss_coeff,
    }


WEIGHTS_OF_CHOSEN = switch("norm_topk_prob", "moe_router_pre_softmax", False, negated=True)
"""Rule of the setting that takes the softmax over the chosen experts alone, instead of over all."""

_WIDTH, _SHARED_WIDTH = "moe_intermediate_size", "shared_expert_intermediate_size"
_SPARSE = (_WIDTH, _SHARED_WIDTH, "num_experts_per_tok", "norm_topk_prob", "output_router_logits")
"""Settings of experts, without effect in a dense model; besides `router_aux_loss_coef`."""


def sparse_experts(norm_topk_prob: bool = False, *, gated: bool = False, in_all_layers: bool = False) -> Rule:
    """Return the rule of Qwen's experts, which some layers may not have.

    Args:
        norm_topk_prob: default of their setting of this name.
        gated: whether there is a shared expert with a gate.
        in_all_layers: whether every layer has experts, weighted by a softmax over the chosen ones.
    """
    constant = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}

    def read(hf: HFSettings, fields: Fields) -> Fields:
        if in_all_layers:
            hf.require(**constant)
        step, dense = hf.get("decoder_sparse_step", 1), hf.get("mlp_only_layers") or ()
        count, layers = hf.first("num_local_experts", "num_experts"), range(fields["num_layers"])
        is_sparse = (count > 0 and (number + 1) % step == 0 and number not in dense for number in layers)
        marks = tuple(map(int, is_sparse))
        if not any(marks):
            hf.names_read.update((*_SPARSE, "router_aux_loss_coef"))
            return {}
        hf.require(output_router_logits=False)
        found = {
            **_read_experts(hf, "num_local_experts num_experts", _WIDTH),
            "moe_layer_freq": None if all(marks) else marks,
            "moe_router_pre_softmax": not hf.switch("norm_topk_prob", norm_topk_prob),
        }
        if gated:
            found |= {
                "moe_shared_expert_intermediate_size": hf[_SHARED_WIDTH],
                "moe_shared_expert_gate": True,
            }
        return found

    def write(config: ModelConfig) -> Fields:
        settings: Fields = {"num_experts": 0, "mlp_only_layers": [], "decoder_sparse_step": 1}
        if config.has_experts:
            specs = enumerate(config.layer_specs)
            settings |= {
                **_write_experts(config, "num_experts", _WIDTH),
                "norm_topk_prob": not config.moe_router_pre_softmax,
                "mlp_only_layers": [number for number, spec in specs if spec.experts is None],
            }
            if gated:
                settings[_SHARED_WIDTH] = config.moe_shared_expert_intermediate_size or 0
        if in_all_layers:
            settings = {name: value for name, value in settings.items() if name not in constant}
            settings.setdefault(_WIDTH, config.expert_ffn_size)
        return settings

    return Rule(read, write)


_AFTER_DENSE = (
    *("n_routed_experts", "num_local_experts", "num_experts", "n_shared_experts", "num_experts_per_tok"),
    *(_WIDTH, "n_group", "topk_group", "topk_method", "norm_topk_prob"),
    *("routed_scaling_factor", "scoring_func", "aux_loss_alpha", "moe_layer_freq"),
)
"""Settings of experts after dense layers, without effect in a dense model."""


def experts_after_dense(dense: int, factor: float, scores: Rule) -> Rule:
    """Return the rule of DeepSeek's experts, which the layers after the first dense ones have.

    Args:
        dense: default of `first_k_dense_replace`.
        factor: default of `routed_scaling_factor`.
        scores: rule of the scores that choose experts.
    """

    def read(hf: HFSettings, fields: Fields) -> Fields:
        layers, first_dense = fields["num_layers"], int(hf.get("first_k_dense_replace", dense))
        if first_dense >= layers:
            hf.names_read.update(_AFTER_DENSE)
            return {}
        hf.require(moe_layer_freq=1)
        width = hf[_WIDTH]
        found = {
            "num_experts": hf.first("n_routed_experts", "num_local_experts", "num_experts"),
            "moe_router_topk": hf["num_experts_per_tok"],
            "moe_ffn_hidden_size": width,
            "moe_shared_expert_intermediate_size": width * hf["n_shared_experts"],
            "moe_layer_freq": (0,) * first_dense + (1,) * (layers - first_dense) if first_dense else None,
            "moe_router_topk_scaling_factor": float(hf.get("routed_scaling_factor", factor)),
            "moe_aux_loss_coeff": float(hf.get("aux_loss_alpha", 0.0)),
        }
        return found | scores.read(hf, found)

    def write(config: ModelConfig) -> Fields:
        dense_layers = [spec.experts is None for spec in config.layer_specs]
        if all(dense_layers):
            return {"first_k_dense_replace": config.num_layers}
        return {
            "first_k_dense_replace": dense_layers.index(False),
            "n_routed_experts": config.num_experts,
            "num_experts_per_tok": config.moe_router_topk,
            _WIDTH: config.expert_ffn_size,
            "n_shared_experts": (config.moe_shared_expert_intermediate_size or 0) // config.expert_ffn_size,
            "n_group": config.moe_router_num_groups or 1,
            "topk_group": config.moe_router_group_topk or 1,
            "routed_scaling_factor": config.moe_router_topk_scaling_factor,
            "aux_loss_alpha": config.moe_aux_loss_coeff,
        }

    return Rule(read, write)


def biased_scores(groups: int = 1, group_topk: int = 1) -> Rule:
    """Return the rule of sigmoid scores with a bias that chooses experts, in groups; others write them.

    Args:
        groups, group_topk: defaults of `n_group` and `topk_group`.
    """

    def read(hf: HFSettings, fields: Fields) -> Fields:
        hf.require(scoring_func="sigmoid", norm_topk_prob=True)
        if fields["moe_router_topk"] == 1:
            raise UserError(
                f"{hf.kind} with num_experts_per_tok 1, whose weight is its score here and 1 there"
            )
        numbers = hf.get("n_group", groups), hf.get("topk_group", group_topk)
        groups_and_topk = (None, None) if numbers == (1, 1) else numbers
        return {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_num_groups": groups_and_topk[0],
            "moe_router_group_topk": groups_and_topk[1],
        }

    return Rule(read)


def expert_modules(block: str, gate: str, up: str, down: str) -> tuple[Module, ...]:
    """Return the modules of a layer's experts.

    Args:
        block: their name of the block, with ``{}`` for the layer.
        gate, up, down: their names of an expert's matrices.
    """
    expert = "experts.{expert}."
    return modules(
        "layers.{}.mlp.",
        f"{block}.",
        ("table", "router", "gate"),
        ("table", "up", f"{expert}{gate} {expert}{up}", _HALVES),
        ("table", "down", f"{expert}{down}", SEPARATE),
    )


def shared_expert_modules(block: str) -> tuple[Module, ...]:
    """Return the modules of a layer's shared expert without its gate; `block` is their name of it."""
    return modules(
        "layers.{}.mlp.shared.",
        f"{block}.",
        ("linear", "up", "gate_proj up_proj", HALVES),
        ("linear", "down", "down_proj"),
    )


def expert_bias(name: str) -> tuple[Module, ...]:
    """Return the bias of the scores of a layer's experts; `name` is their name of it."""
    row = ("vector", "layers.{}.mlp.router.expert_bias", name)
    return modules("", "", row, only_if=lambda config: config.moe_router_enable_expert_bias)


def modules_with_some_experts(dense: Iterable[Module], of_experts: Iterable[Module]) -> tuple[Module, ...]:
    """Return the modules of the layers of a model of which some may have experts.

    Args:
        dense: modules of a layer without experts.
        of_experts: modules that a layer with experts has in the place of an MLP.
    """
    dense = tuple(dense)
    return (
        *(module for module in dense if ".mlp." not in module.ours),
        *in_layers_that(_has_mlp, *(module for module in dense if ".mlp." in module.ours)),
        *in_layers_that(has_experts, *of_experts),
    )


def has_experts(spec: LayerSpec) -> bool:
    """Return whether a layer has experts."""
    return spec.experts is not None


def _has_mlp(spec: LayerSpec) -> bool:
    return spec.experts is None


def _split_halves(full: Tensor, _: Place) -> Parts:
    """Split ``[e, 2, ffn, h]`` into gate and up of each expert, each ``[ffn, h]``."""
    return full.flatten(0, 1).unbind(0)


def _join_halves(parts: Parts, _: Place) -> Tensor:
    return torch.stack(tuple(parts)).unflatten(0, (-1, 2))


_HALVES = Transform(_split_halves, _join_halves)
SEPARATE = Transform(lambda full, _: full.unbind(0), lambda parts, _: torch.stack(tuple(parts)))
"""Converts a matrix of each expert."""
