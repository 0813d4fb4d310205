"""Rules and modules of a family's tables for mixtures of experts, with a tensor for each expert in files."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megalite.config import LayerSpec, ModelConfig
from megalite.frontends.huggingface.family import (
    HALVES,
    Module,
    Transform,
    in_layers_that,
    modules,
)
from megalite.frontends.huggingface.settings import (
    Fields,
    HFSettings,
    Rule,
    fixed,
    setting,
    switch,
)
from megalite.utils.errors import UserError

FUSED_EXPERTS = {"experts.gate_up_proj": ("gate_proj", "up_proj"), "experts.down_proj": ("down_proj",)}
"""See `Family.experts`."""


WIDTH, SHARED_WIDTH = "moe_intermediate_size", "moe_shared_expert_intermediate_size"
"""Their usual name of the width of an expert, and ours of the width of a shared one."""


def experts(
    count: str,
    width: str = WIDTH,
    topk: str = "num_experts_per_tok",
    loss: tuple[str, float] | None = ("router_aux_loss_coef", 0.001),
) -> tuple[Rule, ...]:
    """Return the rules of experts.

    Args:
        count: their names of the number of experts, the first of which is written.
        width, topk: their names of the width of an expert, and of the number of a token's experts.
        loss: their name of the coefficient of the load-balancing loss, and its default; None for no loss.
    """
    number = Rule(
        lambda hf, _: {"num_experts": hf[count]},
        lambda config: {count.split()[0]: config.num_experts or 1},  # another number than a dense model has
        tuple(count.split()),
    )
    balance = (
        fixed(moe_router_load_balancing_type="none")
        if loss is None
        else setting(loss[0], "moe_aux_loss_coeff", loss[1])
    )
    return number, setting(topk, "moe_router_topk"), setting(width, "moe_ffn_hidden_size"), balance


WEIGHTS_OF_CHOSEN = switch("norm_topk_prob", "moe_router_pre_softmax", False, negated=True)
"""Rule of the setting that takes the softmax over the chosen experts alone, instead of over all."""


def biased_scores(groups: int = 1, group_topk: int = 1) -> Rule:
    """Return the rule of sigmoid scores with a bias that chooses experts, in groups.

    Args:
        groups, group_topk: defaults of `n_group` and `topk_group`.
    """
    needed = {"scoring_func": "sigmoid", "norm_topk_prob": True}

    def read(hf: HFSettings, fields: Fields) -> Fields:
        hf.require(**needed)
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

    return Rule(read, written_groups, (*needed, "n_group", "topk_group"))


def written_groups(config: ModelConfig) -> Fields:
    """Return their settings of experts that are chosen in groups."""
    return {
        "n_group": config.moe_router_num_groups or 1,
        "topk_group": config.moe_router_group_topk or 1,
    }


def expert_modules(
    block: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj", router: str = "gate"
) -> tuple[Module, ...]:
    """Return the modules of a layer's experts.

    Args:
        block: their name of the block, with ``{}`` for the layer.
        gate, up, down: their names of an expert's matrices.
        router: their name of the router.
    """
    expert = "experts.{expert}."
    return modules(
        "layers.{}.mlp.",
        f"{block}.",
        ("table", "router", router),
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


def routed_and_shared_modules(shared: str, bias: str, router: str = "gate") -> tuple[Module, ...]:
    """Return the modules of a layer with routed and shared experts and a bias of the scores.

    Args:
        shared, bias, router: their names of these in the block.
    """
    block = "model.layers.{}.mlp"
    return (
        *expert_modules(block, router=router),
        *shared_expert_modules(f"{block}.{shared}"),
        *expert_bias(f"{block}.{bias}"),
    )


def modules_with_some_experts(dense: Iterable[Module], of_experts: Iterable[Module]) -> tuple[Module, ...]:
    """Return the modules of the layers of a model of which some may have experts.

    Args:
        dense: modules of a layer without experts.
        of_experts: modules that a layer with experts has in the place of an MLP.
    """
    dense = tuple(dense)
    return (
        *(module for module in dense if ".mlp." not in module.ours),
        *in_layers_that(
            lambda spec: spec.experts is None, *(module for module in dense if ".mlp." in module.ours)
        ),
        *in_layers_that(has_experts, *of_experts),
    )


def has_experts(spec: LayerSpec) -> bool:
    """Return whether a layer has experts."""
    return spec.experts is not None


_HALVES = Transform(  # [e, 2, ffn, h] to gate and up of each expert, each [ffn, h]
    lambda full, _: full.flatten(0, 1).unbind(0),
    lambda parts, _: torch.stack(tuple(parts)).unflatten(0, (-1, 2)),
)
JOINED_HALVES = Transform(  # [e, 2, ffn, h] to [e, 2 ffn, h]
    lambda full, _: [full.flatten(1, 2)], lambda parts, _: parts[0].unflatten(1, (2, -1))
)
"""Converts gate and up of all experts, which are one tensor in theirs."""
SEPARATE = Transform(lambda full, _: full.unbind(0), lambda parts, _: torch.stack(tuple(parts)))
"""Converts a matrix of each expert."""
