"""A mixture of experts in the place of an MLP: a router sends each token to some of many small MLPs.

(Shazeer et al. 2017; Fedus et al. 2022.) No token is dropped: an expert computes all tokens that it gets.

Shapes: s sequence, b microbatch, t = s b tokens, h hidden size, e experts, k experts of a token, ffn width of
an expert, tp = tp.size. Rows are pairs of a token and one of its experts, ``t k`` of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megalite.config import ModelConfig
from megalite.distributed.collectives import (
    all_reduce,
    copy_to_tensor_parallel,
    gather_from_sequence_parallel,
    reduce_from_tensor_parallel,
    reduce_scatter_to_sequence_parallel,
    start_all_gather,
)
from megalite.loss_terms import LossTerm, Terms
from megalite.model.block import BlockOutput
from megalite.model.mlp import activation_of
from megalite.tensor_parallel.linear import depth_scaled_std
from megalite.tensor_parallel.parameter_spec import LayerContext, ParameterSpec, new_parameter
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
    """Selects the experts of each token by a linear layer, in at least fp32."""

    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        super().__init__()
        assert config.num_experts is not None
        self.config = config
        self.context = context
        self.num_experts, self.topk = config.num_experts, config.moe_router_topk
        self.term_names = names_of_terms(config)
        spec = ParameterSpec((self.num_experts, config.hidden_size), std=config.init_method_std)
        self.weight = new_parameter(spec, context)  # [e, h]

    def forward(self, x: Tensor) -> Routing:
        """Route the rank's tokens ``[s, b, h]``, ``[s/tp, b, h]`` if sequence parallel."""
        wide = torch.promote_types(x.dtype, torch.float32)
        logits = F.linear(x.to(wide), self.weight.to(wide))  # [s, b, e]
        is_softmax = self.config.moe_router_score_function == "softmax"
        scores = logits.softmax(-1) if is_softmax else logits.sigmoid()
        # Of equal scores, the lower number comes first, on any device.
        experts = logits.detach().sort(dim=-1, descending=True, stable=True).indices[..., : self.topk]
        if not is_softmax:
            selected = scores.gather(-1, experts)
            weights = selected / selected.sum(-1, keepdim=True) if self.topk > 1 else selected
        elif self.config.moe_router_pre_softmax:
            weights = scores.gather(-1, experts)
        else:
            weights = logits.gather(-1, experts).softmax(-1)
        terms = {}
        if BALANCE_LOSS in self.term_names:
            shares = scores if is_softmax else scores / scores.sum(-1, keepdim=True)
            balance = self._balance_loss(shares, experts)
            terms[BALANCE_LOSS] = LossTerm(balance, scale=self.config.moe_aux_loss_coeff)
        if ROUTER_Z_LOSS in self.term_names:
            total = self._over_tokens(logits.logsumexp(-1).square().sum())
            terms[ROUTER_Z_LOSS] = LossTerm(total, scale=self.config.moe_z_loss_coeff)
        return Routing(weights.to(x.dtype), experts, terms)

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
        numbers = torch.arange(self.num_experts, device=experts.device)
        counts = (selected.unsqueeze(-1) == numbers).sum(1).to(shares.dtype)  # [b, e]
        axes = self.context.sequence_axes
        if axes:
            all_reduce(counts, self.context.topology.model.over(*axes), of="the rows of each expert")
        num_rows = counts.sum(1, keepdim=True)  # [b, 1]
        return self._over_tokens((shares.sum(0) * counts / num_rows).sum() * self.num_experts)

    def _over_tokens(self, total: Tensor) -> Tensor:
        """Sum a total of the rank's hidden states over all of its tokens, which tp can cut."""
        if not self.context.sequence_parallel:
            return total
        return reduce_from_tensor_parallel(total, self.context.tp)


class ExpertWeights(nn.Module):
    """Holds one matrix of each expert; tp cuts all of them along the expert's width."""

    def __init__(self, shape: tuple[int, ...], cut: int, std: float, context: LayerContext) -> None:
        super().__init__()
        self.weight = new_parameter(ParameterSpec(shape, Cut("tp", cut), std=std), context)


class MixtureOfExperts(nn.Module):
    """Computes the sum of down_i(weight_i * activation(up_i(x))) over each token's experts i.

    Of each expert, a rank has the same slice of its width as of an MLP.
    """

    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        super().__init__()
        self.context = context
        self.router = Router(config, context)
        self.activation = activation_of(config)
        e, h, ffn = self.router.num_experts, config.hidden_size, config.expert_ffn_size
        std, down_std = config.init_method_std, depth_scaled_std(config.init_method_std, config.num_layers)
        up_shape = (e, 2, ffn, h) if config.is_gated else (e, ffn, h)
        self.up = ExpertWeights(up_shape, len(up_shape) - 2, std, context)  # [e, ffn/tp, h], or [e, 2, ...]
        self.down = ExpertWeights((e, h, ffn), 2, down_std, context)  # [e, h, ffn/tp]

    def forward(self, x: Tensor) -> BlockOutput:
        """Map ``[s, b, h]`` to ``[s, b, h]``, both ``[s/tp, b, h]`` if sequence parallel."""
        y, terms = self.transform(x)
        return BlockOutput(y, None, terms)

    @communication_point
    def transform(self, x: Tensor) -> tuple[Tensor, Terms]:
        """Compute `forward`."""
        weights, experts, terms = self.router(x)
        x, weights, experts = self._gathered(x), self._gathered(weights), self._gathered_numbers(experts)
        rows = Rows.of(experts.flatten(0, 1), self.router.num_experts)

        y = rows.dispatch(x.flatten(0, 1))  # [t k, h]
        y = grouped_linear(y, self.up.weight, rows.ends)  # [t k, ffn/tp], or [t k, 2 ffn/tp]
        # The weights come before the product, because its input is smaller than its output in many models,
        # and its output then need not be kept.
        y = _WeightedActivation.apply(y, weights.flatten()[rows.order], self.activate)  # [t k, ffn/tp]
        y = grouped_linear(y, self.down.weight, rows.ends)  # [t k, h], partial
        return self._summed(rows.combine(y).view_as(x)), terms

    def activate(self, x: Tensor) -> Tensor:
        """Map `up`'s ``[t k, ffn/tp]``, or ``[t k, 2 ffn/tp]`` if gated, to ``[t k, ffn/tp]``."""
        function, adds_bias, _ = self.activation
        return function(x, None) if adds_bias else function(x)

    def _gathered(self, x: Tensor) -> Tensor:
        """Return a value of all tokens, for use by this rank's slice of the experts."""
        use = gather_from_sequence_parallel if self.context.sequence_parallel else copy_to_tensor_parallel
        return use(x, self.context.tp)

    def _gathered_numbers(self, experts: Tensor) -> Tensor:
        if not self.context.sequence_parallel or self.context.tp.size == 1:
            return experts
        return start_all_gather(experts, self.context.tp).wait()

    def _summed(self, y: Tensor) -> Tensor:
        """Sum the output over the ranks' slices of the experts."""
        if self.context.sequence_parallel:
            return reduce_scatter_to_sequence_parallel(y, self.context.tp)
        return reduce_from_tensor_parallel(y, self.context.tp, in_place=True)


class Rows(NamedTuple):
    """Describes an order of the rows in which each expert's are consecutive.

    Attributes:
        order: row of the token's order, ``token * k + i``, by its place in the experts' order, ``[t k]``.
        places: the inverse, ``[t k]``.
        ends: number of rows of each expert and the experts before it, int32 ``[e]``.
        num_selected: k.
    """

    order: Tensor
    places: Tensor
    ends: Tensor
    num_selected: int

    @staticmethod
    def of(experts: Tensor, num_experts: int) -> Rows:
        """Order the rows of tokens with these experts, ``[t, k]``, without a read by the host."""
        of_rows, order = experts.flatten().sort(stable=True)
        places = torch.empty_like(order)
        places[order] = torch.arange(order.numel(), device=order.device)
        numbers = torch.arange(num_experts, device=order.device)
        ends = torch.searchsorted(of_rows, numbers, right=True, out_int32=True)
        return Rows(order, places, ends, experts.shape[1])

    def dispatch(self, x: Tensor) -> Tensor:
        """Return the rows of tokens ``[t, h]`` in the experts' order, ``[t k, h]``."""
        rows: Tensor = _Dispatch.apply(x, self)
        return rows

    def combine(self, y: Tensor) -> Tensor:
        """Sum each token's rows of ``[t k, h]``; return ``[t, h]``."""
        combined: Tensor = _Combine.apply(y, self)
        return combined

    def of_tokens(self, x: Tensor) -> Tensor:
        """Copy each token of ``[t, h]`` to its rows, ``[t k, h]``."""
        return x[self.order // self.num_selected]

    def sums(self, y: Tensor) -> Tensor:
        """Sum each token's rows of ``[t k, h]`` to ``[t, h]``."""
        return F.embedding_bag(self.places.view(-1, self.num_selected), y, mode="sum")


class _Dispatch(torch.autograd.Function):
    """Copies each token to its rows; backward sums a token's rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Rows) -> Tensor:
        ctx.rows = rows
        return rows.of_tokens(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.rows.sums(grad), None


class _Combine(torch.autograd.Function):
    """Sums each token's rows; backward copies a token's gradient to its rows."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, rows: Rows) -> Tensor:
        ctx.rows = rows
        return rows.sums(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.rows.of_tokens(grad), None


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


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply consecutive rows of ``[n, in]`` by the transposed weight of their group; return ``[n, out]``.

    Args:
        weight: ``[groups, ..., out, in]``; all dims between are output features.
        ends: number of rows of each group and the groups before it, int32 ``[groups]``.
    """
    weight = weight.flatten(1, -2)
    product = GroupedGemm if GroupedGemm.serves(weight) else GemmByGroup
    y: Tensor = product.apply(x, weight, ends)
    return y


class GroupedGemm(torch.autograd.Function):
    """Runs one kernel for all groups, which reads their sizes on the GPU."""

    @staticmethod
    def serves(weight: Tensor) -> bool:
        """Return whether the kernel takes a weight ``[groups, out, in]``: it loads 16 bytes at once."""
        is_aligned = all(size % 8 == 0 for size in weight.shape[1:])
        return weight.is_cuda and weight.dtype == torch.bfloat16 and is_aligned

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        return F.grouped_mm(x, weight.mT, offs=ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, ends = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        grad = grad.contiguous()  # the kernel refuses expanded rows
        x_grad = F.grouped_mm(grad, weight, offs=ends) if needs_x else None
        weight_grad = F.grouped_mm(grad.mT, x, offs=ends) if needs_weight else None
        return x_grad, weight_grad, None


class GemmByGroup(torch.autograd.Function):
    """Runs one GEMM for each group that has rows; the host reads their sizes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sizes = _sizes(ends, x.shape[0])
        y = x.new_empty(x.shape[0], weight.shape[1])
        for rows, matrix, out in zip(x.split(ctx.sizes), weight, y.split(ctx.sizes), strict=True):
            if rows.shape[0]:
                torch.mm(rows, matrix.t(), out=out)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        x_grad = torch.empty_like(x) if needs_x else None
        weight_grad = torch.empty_like(weight) if needs_weight else None
        start = 0
        for number, size in enumerate(ctx.sizes):
            rows = slice(start, start + size)
            start += size
            if size and x_grad is not None:
                torch.mm(grad[rows], weight[number], out=x_grad[rows])
            if weight_grad is not None:  # of a group without rows, it is zero
                torch.mm(grad[rows].t(), x[rows], out=weight_grad[number])
        return x_grad, weight_grad, None


def _sizes(ends: Tensor, num_rows: int) -> list[int]:
    """Return the number of rows of each group; as even as possible without values, on the meta device."""
    if ends.is_meta:
        fewest, more = divmod(num_rows, len(ends))
        return [fewest + (number < more) for number in range(len(ends))]
    return ends.diff(prepend=ends.new_zeros(1)).tolist()
