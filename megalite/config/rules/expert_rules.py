"""Rules for mixtures of experts."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.config import Config
from megalite.config.option import flag_with_value
from megalite.config.rules.model_rules import pattern_problems
from megalite.config.rules.sizes import not_divisible
from megalite.utils.errors import Problem

_TP = "tensor_model_parallel_size"
_EP, _ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"


def experts(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that a mixture of experts has enough of them, and a router that can select them."""
    model = config.model
    if model.num_experts is None or model.num_experts <= 1:
        return
    yield from _expert_groups(config)
    if model.moe_layer_freq is not None:
        if problems := list(pattern_problems(config, "moe_layer_freq", model.moe_layer_freq)):
            yield from problems
        elif not any(spec.experts for spec in model.layer_specs):
            pattern = flag_with_value("moe_layer_freq", model.moe_layer_freq)
            yield Problem(
                ("moe_layer_freq", "num_experts"),
                f"{pattern} leaves no layer with experts: remove both it and --num-experts",
            )


def _expert_groups(config: Config) -> Iterator[Problem]:
    """Check that a token's experts fit into its groups of experts."""
    model = config.model
    experts, groups, selected = model.num_experts, model.moe_router_num_groups, model.moe_router_group_topk
    assert experts is not None
    fields = ("moe_router_num_groups", "moe_router_group_topk", "num_experts", "moe_router_topk")
    if groups is None or selected is None:
        return
    if experts % groups:
        fix = "pass --moe-router-num-groups {divisors}"
        yield from not_divisible(
            "num_experts", experts, "--moe-router-num-groups", groups, fix, ("moe_router_num_groups",)
        )
    elif model.moe_router_topk > selected * (experts // groups):
        yield Problem(
            fields,
            f"--moe-router-group-topk {selected} of --moe-router-num-groups {groups} has "
            f"{selected * (experts // groups)} experts, for --moe-router-topk "
            f"{model.moe_router_topk}: pass more groups of a token, but at most {groups}",
        )
    elif model.moe_router_group_scores > max(2, experts // groups):
        yield Problem(
            ("moe_router_group_scores", *fields),
            f"--moe-router-group-scores {model.moe_router_group_scores} is more than the {experts // groups} "
            f"experts of a group: pass at most {experts // groups}",
        )


def imbalance(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that no plan assumes busier experts than there can be."""
    factor, capacity = config.parallel.moe_imbalance, config.model.moe_expert_capacity_factor
    if config.model.has_experts and capacity is not None and factor > max(1.0, capacity):
        yield Problem(
            ("moe_imbalance", "moe_expert_capacity_factor"),
            f"--moe-imbalance {factor:g} is above --moe-expert-capacity-factor {capacity:g}, which limits "
            f"every expert: pass at most --moe-imbalance {max(1.0, capacity):g}",
        )


def audited_experts(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that an audit can run a microbatch on another replica: experts must not sum tokens of both."""
    interval, parallel = config.training.audit_interval, config.parallel
    spans_replicas = parallel.ep * parallel.etp > parallel.tp * parallel.cp
    if interval is not None and config.model.has_experts and spans_replicas:
        yield Problem(
            ("audit_interval", _EP),
            f"--audit-interval {interval} with --ep {parallel.ep}: experts sum tokens in the order of the "
            "ranks that read them, so a microbatch has other bits on another replica; remove one",
        )


def expert_parallel(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that the axes of experts divide the experts and their width, and that ranks have own tokens."""
    model, parallel = config.model, config.parallel
    tp, ep, etp = parallel.tp, parallel.ep, parallel.etp
    if not model.has_experts:
        if parallel.has_expert_axes:
            sizes = {_EP: None if ep == 1 else ep, _ETP: parallel.expert_tensor_parallel_size}
            flag = " and ".join(flag_with_value(name, size) for name, size in sizes.items() if size)
            yield Problem(
                (_EP, _ETP, "num_experts"), f"{flag} without experts: pass --num-experts, or remove it"
            )
        return
    fix = "pass --ep {divisors}; each rank takes whole experts"
    yield from not_divisible("num_experts", model.num_experts or 0, "--ep", ep, fix, (_EP,))
    if parallel.has_expert_axes and tp > 1 and not parallel.sequence_parallel:
        yield Problem(
            (_EP, _ETP, _TP, "sequence_parallel"),
            f"--ep {ep} and --etp {etp} with --tp {tp} need --sequence-parallel: without it, tensor-parallel "
            "ranks would all send the same tokens",
        )
