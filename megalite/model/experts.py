"""A mixture of experts in the place of an MLP: a router sends each token to some of many small MLPs.

(Shazeer et al. 2017; Fedus et al. 2022.) No token is dropped: an expert computes all tokens that it gets.

Shapes: s sequence, b microbatch, h hidden size, e experts, k experts of a token, ffn width of an expert,
tp = tp.size. ep and etp are the sizes of the axes of experts; without these, ep = 1 and etp = tp. A rank's
experts compute n rows, each of which is a token for one expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megalite.config import ModelConfig
from megalite.distributed.collectives import all_reduce, reduce_from_tensor_parallel
from megalite.kernels import fill_normal_, site_key
from megalite.loss_terms import LossTerm, Terms
from megalite.model.block import BlockOutput
from megalite.model.expert_dispatch import dispatch
from megalite.model.grouped_linear import grouped_linear
from megalite.model.mlp import activation_of
from megalite.model.shared_expert import SharedExpert
from megalite.tensor_parallel.linear import depth_scaled_std
from megalite.tensor_parallel.parameter_spec import LayerContext, ParameterSpec, new_buffer, new_parameter
from megalite.tensor_parallel.placement import Cut
from megalite.wrapping import communication_point

BALANCE_LOSS, ROUTER_Z_LOSS = "load_balancing_loss", "router_z_loss"


def names_of_terms(config: ModelConfig) -> tuple[str, ...]:
    """Return the names of the terms that experts add to the loss."""
    if not config.has_experts:
        return ()
    has_balance = config.moe_router_load_balancing_type != "none" and config.moe_aux_loss_coeff > 0
    return (BALANCE_LOSS,) * has_balance + (ROUTER_Z_LOSS,) * (config.moe_z_loss_coeff > 0)


class Routing(NamedTuple):
    """Holds the experts of each token.

    Attributes:
        weights: of each of a token's experts in its output, ``[s, b, k]``.
        experts: their numbers, ``[s, b, k]``.
        terms: terms of the loss.
    """

    weights: Tensor
    experts: Tensor
    terms: Terms


class Router(nn.Module):
    """Selects the experts of each token by a linear layer, in at least fp32.

    Attributes:
        expert_bias: ``[e]``, added to the scores that select experts; None without it.
        num_tokens: ``[e]``, how often each expert was selected in the iteration, on this rank. Recomputation
            counts all tokens of the layer twice.
    """

    expert_bias: Tensor | None

    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        super().__init__()
        assert config.num_experts is not None
        self.config = config
        self.context = context
        self.num_experts, self.topk = config.num_experts, config.moe_router_topk
        self.term_names = names_of_terms(config)
        spec = ParameterSpec((self.num_experts, config.hidden_size), std=config.init_method_std)
        self.weight = new_parameter(spec, context)  # [e, h]
        wide = torch.promote_types(context.dtype, torch.float32)
        has_bias = config.moe_router_enable_expert_bias
        bias = new_buffer(torch.zeros(self.num_experts, dtype=wide), context) if has_bias else None
        self.register_buffer("expert_bias", bias)
        self.num_tokens = torch.zeros(self.num_experts, dtype=torch.int64, device=context.device)
        self.random_key = site_key(context.seed, "moe_router_force_load_balancing")

    def forward(self, x: Tensor) -> Routing:
        """Route the rank's tokens ``[s, b, h]``, ``[s/tp, b, h]`` if sequence parallel."""
        wide = torch.promote_types(x.dtype, torch.float32)
        logits = F.linear(x.to(wide), self.weight.to(wide))  # [s, b, e]
        is_softmax = self.config.moe_router_score_function == "softmax"
        scores = logits.softmax(-1) if is_softmax else logits.sigmoid()
        experts = highest(self._ranking(logits.detach(), scores.detach()), self.topk)
        if self.expert_bias is not None and torch.is_grad_enabled():
            self.num_tokens += self._counts(experts.flatten())
        if not is_softmax:
            selected = scores.gather(-1, experts)
            weights = selected / selected.sum(-1, keepdim=True) if self.topk > 1 else selected
        elif self.config.moe_router_pre_softmax:
            weights = scores.gather(-1, experts)
        else:
            weights = logits.gather(-1, experts).softmax(-1)
        if self.config.moe_router_topk_scaling_factor != 1.0:
            weights = weights * self.config.moe_router_topk_scaling_factor
        terms = {}
        if BALANCE_LOSS in self.term_names:
            shares = scores if is_softmax else scores / scores.sum(-1, keepdim=True)
            balance = self._balance_loss(shares, experts)
            terms[BALANCE_LOSS] = LossTerm(balance, scale=self.config.moe_aux_loss_coeff)
        if ROUTER_Z_LOSS in self.term_names:
            total = self._over_tokens(logits.logsumexp(-1).square().sum())
            terms[ROUTER_Z_LOSS] = LossTerm(total, scale=self.config.moe_z_loss_coeff)
        return Routing(weights.to(x.dtype), experts, terms)

    def _ranking(self, logits: Tensor, scores: Tensor) -> Tensor:
        """Return numbers ``[s, b, e]`` in the order of the experts: -inf for those of other groups.

        A group's score is the sum of its two highest (DeepSeek-AI 2024, DeepSeek-V3, section 2.1.2).
        """
        num_groups, num_selected = self.config.moe_router_num_groups, self.config.moe_router_group_topk
        if self.config.moe_router_force_load_balancing and self.training:
            logits = scores = self._random_scores(scores)
        elif self.expert_bias is not None:
            logits = scores = scores + self.expert_bias
        if num_groups is None or num_selected is None:
            return logits
        by_group = scores.unflatten(-1, (num_groups, -1))  # [s, b, groups, e / groups]
        of_groups = by_group.topk(min(2, by_group.shape[-1]), dim=-1).values.sum(-1)
        is_other = torch.ones_like(of_groups, dtype=torch.bool)
        is_other.scatter_(-1, highest(of_groups, num_selected), False)
        return by_group.masked_fill(is_other.unsqueeze(-1), -torch.inf).flatten(-2)

    def _random_scores(self, like: Tensor) -> Tensor:
        """Return random scores ``[s, b, e]``.

        A position has the same scores in all samples, iterations and layouts.
        """
        num_positions, num_samples, num_experts = like.shape
        scores = like.new_empty(num_positions, 1, num_experts)
        first = self.context.first_position(num_positions)
        fill_normal_(scores, self.random_key, std=1.0, base=first * num_experts)
        return scores.expand(-1, num_samples, -1)

    def _balance_loss(self, shares: Tensor, experts: Tensor) -> Tensor:
        """Return the balance loss of the samples, summed over the microbatch's tokens.

        The loss of a sample is ``e sum_i f_i p_i``: f_i is the part of its rows that expert i has, p_i the
        mean of the router's share for it. It is 1 if all experts are used alike, and at most e. A sample's
        loss needs no other samples, so it does not depend on the layout (DeepSeek-AI 2024, section 2.1.2).

        Args:
            shares: ``[s, b, e]``, which add up to 1 over the experts.
            experts: ``[s, b, k]``.
        """
        selected = experts.transpose(0, 1).flatten(1)  # [b, s k]
        counts = self._counts(selected).to(shares.dtype)  # [b, e]
        axes = self.context.sequence_axes
        if axes:
            all_reduce(counts, self.context.topology.model.over(*axes), of="the rows of each expert")
        num_rows = counts.sum(1, keepdim=True)  # [b, 1]
        return self._over_tokens((shares.sum(0) * counts / num_rows).sum() * self.num_experts)

    def _counts(self, experts: Tensor) -> Tensor:
        """Return how often each expert occurs in the last dim, ``[..., e]``."""
        numbers = torch.arange(self.num_experts, device=experts.device)
        return (experts.unsqueeze(-1) == numbers).sum(-2)

    def _over_tokens(self, total: Tensor) -> Tensor:
        """Sum a total of the rank's hidden states over all of its tokens, which tp can cut."""
        if not self.context.sequence_parallel:
            return total
        return reduce_from_tensor_parallel(total, self.context.tp)


def highest(x: Tensor, count: int) -> Tensor:
    """Return the indices of the highest numbers of the last dim.

    Of equal numbers, the lower index comes first, on any device.
    """
    return x.sort(dim=-1, descending=True, stable=True).indices[..., :count]


class ExpertWeights(nn.Module):
    """Holds a matrix of each of the rank's experts, or the rank's slice of it.

    Args:
        shape: of the matrices of all experts.
        width_dim: dim of the expert's width.
    """

    def __init__(self, shape: tuple[int, ...], width_dim: int, std: float, context: LayerContext) -> None:
        super().__init__()
        has_own_axes = context.expert_axes is not None
        cut = (Cut("ep", 0), Cut("etp", width_dim)) if has_own_axes else Cut("tp", width_dim)
        self.weight = new_parameter(ParameterSpec(shape, cut, std=std), context)


class MixtureOfExperts(nn.Module):
    """Computes the sum of down_i(weight_i * activation(up_i(x))) over each token's experts i.

    The output of a shared expert is added; see `SharedExpert`.
    """

    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        super().__init__()
        self.context = context
        self.router = Router(config, context)
        self.activation = activation_of(config)
        e, h, ffn = self.router.num_experts, config.hidden_size, config.expert_ffn_size
        std, down_std = config.init_method_std, depth_scaled_std(config.init_method_std, config.num_blocks)
        up_shape = (e, 2, ffn, h) if config.is_gated else (e, ffn, h)
        # [e/ep, ffn/etp, h], or [e/ep, 2, ffn/etp, h] if gated
        self.up = ExpertWeights(up_shape, len(up_shape) - 2, std, context)
        self.down = ExpertWeights((e, h, ffn), 2, down_std, context)  # [e/ep, h, ffn/etp]
        has_shared = config.moe_shared_expert_intermediate_size is not None
        self.shared = SharedExpert(config, context) if has_shared else None

    def forward(self, x: Tensor) -> BlockOutput:
        """Map ``[s, b, h]`` to ``[s, b, h]``, both ``[s/tp, b, h]`` if sequence parallel."""
        y, terms = self.transform(x)
        return BlockOutput(y, None, terms)

    @communication_point
    def transform(self, x: Tensor) -> tuple[Tensor, Terms]:
        """Compute `forward`."""
        shared = None if self.shared is None else self.shared.transform(x)
        weights, experts, terms = self.router(x)
        y, weights, ends, combine = dispatch(x, weights, experts, self.router.num_experts, self.context)
        y = grouped_linear(y, self.up.weight, ends)  # [n, ffn/etp], or [n, 2 ffn/etp]
        # The weights come before the product, because its input is smaller than its output in many models,
        # and its output then need not be kept.
        y = _WeightedActivation.apply(y, weights, self.activate)  # [n, ffn/etp]
        y = combine(grouped_linear(y, self.down.weight, ends))
        return y if shared is None else y + shared, terms

    def activate(self, x: Tensor) -> Tensor:
        """Map `up`'s ``[n, ffn/etp]``, or ``[n, 2 ffn/etp]`` if gated, to ``[n, ffn/etp]``."""
        function, adds_bias, _ = self.activation
        return function(x, None) if adds_bias else function(x)


class _WeightedActivation(torch.autograd.Function):
    """Multiplies an activation ``[n, out]`` by the rows' weights ``[n]``; backward computes it again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, activate: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(x, weights)
        ctx.activate = activate
        return activate(x).mul_(weights.unsqueeze(-1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weights = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = ctx.activate(x)
        of_weights = torch.linalg.vecdot(y.detach(), grad)
        (of_x,) = torch.autograd.grad(y, x, grad * weights.unsqueeze(-1))
        return of_x, of_weights, None
