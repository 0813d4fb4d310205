"""A mixture of experts in the place of an MLP: a router sends each token to some of many small MLPs.

(Shazeer et al. 2017; Fedus et al. 2022.) By default no token is dropped: an expert computes all that it gets.

Shapes: s sequence, b microbatch, h hidden size, e experts, k experts of a token, ffn width of an expert,
tp = tp.size. ep and etp are the sizes of the axes of experts; without these, ep = 1 and etp = tp. A rank's
experts compute n rows, each of which is a token for one expert.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megalite.attention.positions import PositionInfo
from megalite.config import ModelConfig, RecomputeConfig
from megalite.data.microbatch import REAL_TOKEN, BlockOutput, LossTerm, SampleNumbers, Terms, numbers_of
from megalite.distributed.collectives import all_reduce, reduce_from_tensor_parallel, start_all_gather
from megalite.kernels import fill_normal_, site_key
from megalite.model.expert_dispatch import Dispatcher, dispatcher_for, within_capacity
from megalite.model.grouped_linear import grouped_bias, grouped_linear
from megalite.model.mlp import SharedExpert, activation_of
from megalite.model.recompute_region import recompute_output
from megalite.model.routing_record import ChoiceObserver, RoutingStatistics, choose
from megalite.tensor_parallel.counter_random import Jitter
from megalite.tensor_parallel.linear import depth_scaled_std, gemm_of_experts
from megalite.tensor_parallel.parameter_spec import LayerContext, ParameterSpec, new_buffer, new_parameter
from megalite.tensor_parallel.placement import Cut
from megalite.tensor_parallel.uncut_linear import UncutLinear
from megalite.utils.errors import UserError
from megalite.utils.wrapping import eager_point

BALANCE_LOSS, ROUTER_Z_LOSS = "load_balancing_loss", "router_z_loss"


def names_of_terms(config: ModelConfig) -> tuple[str, ...]:
    """Return the names of the terms that experts add to the loss."""
    if not config.has_experts:
        return ()
    has_balance = config.moe_router_load_balancing_type != "none" and config.moe_aux_loss_coeff > 0
    return (BALANCE_LOSS,) * has_balance + (ROUTER_Z_LOSS,) * (config.moe_z_loss_coeff > 0)


class Routing(NamedTuple):
    """Experts of each token.

    Attributes:
        weights: of each of a token's experts in its output, ``[s, b, k]``.
        experts: their numbers, ``[s, b, k]``; e for an expert that drops the token.
        terms: terms of the loss.
    """

    weights: Tensor
    experts: Tensor
    terms: Terms


class Router(nn.Module):
    """Selects the experts of each token by a linear layer, in at least fp32.

    Args:
        layer: number of the layer in the whole model; it keys the jitter.

    Attributes:
        expert_bias: ``[e]``, added to the scores that select experts; None without it.
        expert_loads: ``[e]``, the parts of the last global batch's choices that the experts had, by which the
            balance loss weighs them; None with another balance loss.
        num_tokens: ``[e]``, how often each expert was selected in the iteration, on this rank.
        num_counted: the same of the experts that the balance loss counts.
        statistics: counts the tokens of the iteration for the log; None if it is not due.
        choice_observer: records or replaces the experts of tokens; None in a usual run.
    """

    expert_bias: Tensor | None
    expert_loads: Tensor | None

    def __init__(self, config: ModelConfig, context: LayerContext, layer: int = 0) -> None:
        super().__init__()
        assert config.num_experts is not None
        self.config = config
        self.context = context
        self.num_experts, self.topk = config.num_experts, config.moe_router_topk
        self.term_names = names_of_terms(config)
        eps = config.moe_input_jitter_eps
        self.jitter = None if eps is None else Jitter(eps, context, f"layers.{layer}.mlp.router.input")
        spec = ParameterSpec((self.num_experts, config.hidden_size), std=config.init_method_std)
        self.weight = new_parameter(spec, context)  # [e, h]
        of_bias = ParameterSpec((self.num_experts,), decay=False)
        self.bias = new_parameter(of_bias, context) if config.has_mlp_bias else None
        wide = torch.promote_types(context.dtype, torch.float32)
        has_bias = config.moe_router_enable_expert_bias
        bias = new_buffer(torch.zeros(self.num_experts, dtype=wide), context) if has_bias else None
        self.register_buffer("expert_bias", bias)
        even = torch.full((self.num_experts,), 1 / self.num_experts, dtype=wide)
        is_global = config.moe_router_load_balancing_type == "global_aux_loss"
        has_loads = is_global and BALANCE_LOSS in self.term_names
        self.register_buffer("expert_loads", new_buffer(even, context) if has_loads else None)
        self.num_tokens = torch.zeros(self.num_experts, dtype=torch.int64, device=context.device)
        self.num_counted = torch.zeros_like(self.num_tokens)
        self.random_key = site_key(context.seed, "moe_router_force_load_balancing")
        self.statistics: RoutingStatistics | None = None
        self.choice_observer: ChoiceObserver | None = None

    @property
    def is_adjusted(self) -> bool:
        """Return whether `ExpertBalance` changes a buffer of this router after an update."""
        return self.expert_bias is not None or self.expert_loads is not None

    def forward(
        self, x: Tensor, sample_numbers: SampleNumbers | None = None, is_real: Tensor | None = None
    ) -> Routing:
        """Route the rank's tokens ``[s, b, h]``, ``[s/tp, b, h]`` if sequence parallel.

        Padding goes to experts too, but counts nowhere: neither in the terms of the loss, nor in the experts'
        loads and capacities, nor in statistics.

        Args:
            sample_numbers: numbers of the samples in the run. Only a router whose choices depend neither on
                positions nor on random numbers needs none.
            is_real: bool ``[s, b]``, False for padding, of all tokens that the rank holds before sequence
                parallelism cuts them; None without padding.
        """
        if is_real is not None:
            is_real = is_real[self.context.own_tokens(len(x))]
        wide = torch.promote_types(x.dtype, torch.float32)
        bias = None if self.bias is None else self.bias.to(wide)
        logits = F.linear(self._jittered(x.to(wide), sample_numbers), self.weight.to(wide), bias)  # [s, b, e]
        is_softmax = self.config.moe_router_score_function == "softmax"
        scores = logits.softmax(-1) if is_softmax else logits.sigmoid()
        ranking = partial(self._ranking, logits.detach(), scores.detach(), sample_numbers)
        experts, is_first = choose(lambda: self._select(ranking(), sample_numbers))
        counted = self._counted(scores.detach(), experts)
        if is_first and torch.is_grad_enabled():
            self._count(experts, counted, scores.detach(), is_real)
        weights, terms = self._weights(logits, scores, experts), self._terms(logits, scores, counted, is_real)
        kept = self._kept(experts, weights.detach(), sample_numbers, is_real)
        return Routing(weights.to(x.dtype), kept, terms)

    def _counted(self, scores: Tensor, experts: Tensor) -> Tensor:
        """Return the experts ``[s, b, k]`` that the balance loss counts.

        Where a bias or groups select others, these are the experts with the highest scores, as in DeepSeek-V3
        (DeepSeek-AI 2024, equation 18) and Megatron-LM.
        """
        if BALANCE_LOSS not in self.term_names:
            return experts
        if self.expert_bias is None and self.config.moe_router_num_groups is None:
            return experts
        return choose(lambda: highest(scores, self.topk))[0]

    def _weights(self, logits: Tensor, scores: Tensor, experts: Tensor) -> Tensor:
        """Return the weights ``[s, b, k]`` of the selected experts."""
        if self.config.moe_router_score_function != "softmax":
            selected = scores.gather(-1, experts)
            weights = shares_of(selected) if self.topk > 1 else selected
        elif self.config.moe_router_pre_softmax:
            weights = scores.gather(-1, experts)
        else:
            weights = logits.gather(-1, experts).softmax(-1)
        factor = self.config.moe_router_topk_scaling_factor
        return weights if factor == 1.0 else weights * factor

    def _terms(self, logits: Tensor, scores: Tensor, counted: Tensor, is_real: Tensor | None) -> Terms:
        """Return the terms of the loss by name: means over all tokens but padding."""
        terms = {}
        if BALANCE_LOSS in self.term_names:
            is_softmax = self.config.moe_router_score_function == "softmax"
            balance = self._balance_loss(scores if is_softmax else shares_of(scores), counted, is_real)
            terms[BALANCE_LOSS] = LossTerm(balance, REAL_TOKEN, self.config.moe_aux_loss_coeff)
        if ROUTER_Z_LOSS in self.term_names:
            squares = logits.logsumexp(-1).square()  # [s, b]
            squares = squares if is_real is None else squares.where(is_real, 0.0)
            total = self._over_tokens(squares.sum())
            terms[ROUTER_Z_LOSS] = LossTerm(total, REAL_TOKEN, self.config.moe_z_loss_coeff)
        return terms

    def _jittered(self, x: Tensor, sample_numbers: SampleNumbers | None) -> Tensor:
        if self.jitter is None:
            return x
        jittered: Tensor = self.jitter(x, _required(sample_numbers))
        return jittered

    def _kept(
        self,
        experts: Tensor,
        weights: Tensor,
        sample_numbers: SampleNumbers | None,
        is_real: Tensor | None,
    ) -> Tensor:
        """Replace the experts ``[s, b, k]`` that drop the token by e. Evaluation and generation drop none."""
        factor = self.config.moe_expert_capacity_factor
        if factor is None or not self.training:
            return experts
        experts = self._of_real(experts, is_real)
        positions = self.context.positions_of(experts, _required(sample_numbers))
        kept, is_first = choose(lambda: self._within_capacity(experts, weights, positions, factor))
        if is_first and self.statistics is not None and torch.is_grad_enabled():
            self.statistics.num_dropped += (kept != experts).sum()
        return kept

    def _within_capacity(self, experts: Tensor, weights: Tensor, positions: Tensor, factor: float) -> Tensor:
        positions = positions.unsqueeze(-1).expand_as(experts)
        whole, priorities = experts, weights
        if self.context.sequence_slice.count > 1:
            axis = self.context.topology.model.over(*self.context.sequence_axes)
            of_ranks = (start_all_gather(each, axis).wait() for each in (positions, experts, weights))
            all_positions, whole, priorities = of_ranks
            order = all_positions.argsort(dim=0)
            whole, priorities = whole.gather(0, order), priorities.gather(0, order)
        if self.config.moe_token_drop_policy == "position":
            priorities = torch.zeros_like(priorities)
        is_kept = within_capacity(whole, priorities, self.num_experts, factor)
        return experts.masked_fill(~is_kept.gather(0, positions), self.num_experts)

    def _of_real(self, experts: Tensor, is_real: Tensor | None) -> Tensor:
        """Replace the experts ``[s, b, k]`` of padding by e."""
        return experts if is_real is None else experts.masked_fill(~is_real.unsqueeze(-1), self.num_experts)

    def _select(self, ranking: Tensor, sample_numbers: SampleNumbers | None) -> Tensor:
        """Return the experts of the tokens, ``[s, b, k]``."""
        experts = highest(ranking, self.topk)
        if self.choice_observer is None:
            return experts
        samples = _required(sample_numbers)
        positions = self.context.positions_of(experts, samples)
        return self.choice_observer(experts, ranking, numbers_of(samples), positions)

    def _ranking(self, logits: Tensor, scores: Tensor, sample_numbers: SampleNumbers | None) -> Tensor:
        """Return numbers ``[s, b, e]`` in the order of the experts: -inf for those of other groups.

        A group's score is the sum of its highest ones: two in DeepSeek-V3 (DeepSeek-AI 2024, section 2.1.2).
        """
        num_groups, num_selected = self.config.moe_router_num_groups, self.config.moe_router_group_topk
        if self.config.moe_router_force_load_balancing and self.training:
            logits = scores = self._random_scores(scores, _required(sample_numbers))
        elif self.expert_bias is not None:
            logits = scores = scores + self.expert_bias
        if num_groups is None or num_selected is None:
            return logits
        by_group = scores.unflatten(-1, (num_groups, -1))  # [s, b, groups, e / groups]
        num_summed = min(self.config.moe_router_group_scores, by_group.shape[-1])
        of_groups = by_group.topk(num_summed, dim=-1).values.sum(-1)
        is_other = torch.ones_like(of_groups, dtype=torch.bool)
        is_other.scatter_(-1, highest(of_groups, num_selected), False)
        return by_group.masked_fill(is_other.unsqueeze(-1), -torch.inf).flatten(-2)

    def _random_scores(self, like: Tensor, sample_numbers: SampleNumbers) -> Tensor:
        """Return random scores ``[s, b, e]``.

        A position has the same scores in all samples, iterations and layouts.
        """
        num_positions, _, num_experts = like.shape
        of_groups = []
        for numbers, runs in self.context.ranges_by_samples(num_positions, sample_numbers):
            scores = like.new_empty(num_positions, 1, num_experts)
            for part, run in zip(scores.split([*map(len, runs)]), runs, strict=True):
                fill_normal_(part, self.random_key, std=1.0, base=run.start * num_experts)
            of_groups.append(scores.expand(-1, len(numbers), -1))
        return of_groups[0] if len(of_groups) == 1 else torch.cat(of_groups, dim=1)

    def _balance_loss(self, shares: Tensor, counted: Tensor, is_real: Tensor | None) -> Tensor:
        """Return the balance loss, summed over the microbatch's tokens but padding.

        It is ``e sum_i f_i p_i``: f_i is the part of the choices that expert i has, and p_i the mean of the
        router's share for it (Fedus et al. 2022). It is 1 if all experts are used alike, and at most e.

        - seq_aux_loss: f and p of each sample (DeepSeek-AI 2024, section 2.1.2).
        - global_aux_loss: p of each token, f of the last global batch, which is a constant.
        - aux_loss: f and p of each microbatch, so that the loss depends on its size.

        Args:
            shares: ``[s, b, e]``, which add up to 1 over the experts.
            counted: the experts that count, ``[s, b, k]``.
        """
        if is_real is not None:
            shares = shares.where(is_real.unsqueeze(-1), 0.0)
        if self.expert_loads is not None:
            return self._over_tokens((shares * self.expert_loads).sum() * self.num_experts)
        selected = self._of_real(counted, is_real).transpose(0, 1).flatten(1)  # [b, s k]
        counts, sums = self._counts(selected).to(shares.dtype), shares.sum(0)  # [b, e]
        if self.config.moe_router_load_balancing_type == "aux_loss":
            counts, sums = counts.sum(0, keepdim=True), sums.sum(0, keepdim=True)  # [1, e]
        axes = self.context.sequence_axes
        if axes:
            all_reduce(counts, self.context.topology.model.over(*axes), of="the rows of each expert")
        num_rows = counts.sum(1, keepdim=True).clamp_min(1.0)  # a sample may be padding only
        return self._over_tokens((sums * counts / num_rows).sum() * self.num_experts)

    def _count(self, experts: Tensor, counted: Tensor, scores: Tensor, is_real: Tensor | None) -> None:
        """Count the tokens of a microbatch, for `ExpertBalance` and for the log."""
        if not self.is_adjusted and self.statistics is None:
            return
        counts = self._counts(self._of_real(experts, is_real).flatten())
        if self.is_adjusted and not self.config.moe_router_force_load_balancing:
            self.num_tokens += counts
            if self.expert_loads is not None:
                self.num_counted += self._counts(self._of_real(counted, is_real).flatten())
        if self.statistics is not None:
            self.statistics.add(counts, shares_of(scores), is_real)

    def _counts(self, experts: Tensor) -> Tensor:
        """Return how often each expert occurs in the last dim, ``[..., e]``."""
        counts = experts.new_zeros(*experts.shape[:-1], self.num_experts + 1)  # the last is e, for no expert
        return counts.scatter_add_(-1, experts, torch.ones_like(experts))[..., :-1]

    def _over_tokens(self, total: Tensor) -> Tensor:
        """Sum a total of the rank's hidden states over all of its tokens, which tp can cut."""
        if not self.context.sequence_parallel:
            return total
        return reduce_from_tensor_parallel(total, self.context.tp)


def shares_of(scores: Tensor) -> Tensor:
    """Divide scores, which are not negative, by their sum in the last dim.

    In fp32 a sigmoid below about -88 is 0, and so may all scores be: their shares are 0. Megatron-LM and
    transformers add the same number.
    """
    return scores / (scores.sum(-1, keepdim=True) + 1e-20)


def _required(samples: SampleNumbers | None) -> SampleNumbers:
    if samples is None:
        raise UserError(
            "experts with jitter, a capacity, forced balance or recorded choices need the numbers of the "
            "samples: pass microbatch.samples to their layer"
        )
    return samples


def highest(x: Tensor, count: int) -> Tensor:
    """Return the indices of the highest numbers of the last dim.

    Of equal numbers, the lower index comes first, on any device.
    """
    return x.sort(dim=-1, descending=True, stable=True).indices[..., :count]


class ExpertWeights(nn.Module):
    """Matrix of each of the rank's experts, or the rank's slice of it, and a bias if there is one.

    Args:
        shape: of the matrices of all experts.
        width_dim: dim of the expert's width. A bias without it is added by the first of the ranks that share
            an expert, so its gradient is a partial sum over them.
    """

    def __init__(
        self, shape: tuple[int, ...], width_dim: int, std: float, context: LayerContext, *, bias: bool
    ) -> None:
        super().__init__()
        axes = context.expert_axes
        of_experts, width = ((Cut("ep", 0),), "etp") if axes is not None else ((), "tp")
        cuts = (*of_experts, Cut(width, width_dim))
        self.weight = new_parameter(ParameterSpec(shape, cuts, std=std), context)
        has_width = width_dim < len(shape) - 1
        partial = None if has_width else (width,)
        spec = ParameterSpec(shape[:-1], cuts if has_width else of_experts, decay=False, partial_over=partial)
        self.bias = new_parameter(spec, context) if bias else None
        sharers = context.tp if axes is None else axes.axes[width]
        self.gemm = gemm_of_experts(context)
        self.adds_bias = has_width or sharers.rank == 0

    def multiply(self, x: Tensor, ends: Tensor, weights: Tensor | None = None) -> Tensor:
        """Map rows ``[n, in]`` to ``[n, out]`` by their experts' matrices, and add the biases.

        Args:
            ends: see `Dispatched`.
            weights: factors of the rows' biases, ``[n]``; 1 by default.
        """
        y = grouped_linear(x, self.weight, ends, self.gemm)
        if self.bias is None:
            return y
        weights = x.new_ones(x.shape[0]) if weights is None else weights
        # Other ranks add 0 times the bias, so that it has a gradient on each rank.
        return y + grouped_bias(weights * self.adds_bias, self.bias, ends)


class MixtureOfExperts(nn.Module):
    """Computes the sum of weight_i * down_i(activation(up_i(x))) over each token's experts i.

    The weight is applied before the matrix of `down`, and to its bias. The inputs and outputs of experts are
    hidden states, or latents to and from which other matrices project them. The output of a shared expert is
    added; see `SharedExpert`.

    Attributes:
        dispatcher: brings tokens to experts and back; another `Dispatcher` can replace it.
    """

    def __init__(self, config: ModelConfig, context: LayerContext, router: Router) -> None:
        super().__init__()
        self.context = context
        self.capacity_factor = config.moe_expert_capacity_factor
        self.router = router
        self.dispatcher: Dispatcher = dispatcher_for(router.num_experts, context)
        self.activation = activation_of(config)
        spec = config.experts
        e, ffn, h = (
            spec.count,
            spec.width,
            config.hidden_size if spec.latent_size is None else spec.latent_size,
        )
        std, down_std = config.init_method_std, depth_scaled_std(config.init_method_std, config.num_blocks)
        up_shape = (e, 2, ffn, h) if config.is_gated else (e, ffn, h)
        bias = config.has_mlp_bias
        # [e/ep, ffn/etp, h], or [e/ep, 2, ffn/etp, h] if gated
        self.up = ExpertWeights(up_shape, len(up_shape) - 2, std, context, bias=bias)
        self.down = ExpertWeights((e, h, ffn), 2, down_std, context, bias=bias)  # [e/ep, h, ffn/etp]
        self.to_latent = self.from_latent = None
        if spec.latent_size is not None:
            self.to_latent = UncutLinear(config.hidden_size, h, context, std=std)
            self.from_latent = UncutLinear(h, config.hidden_size, context, std=down_std)
        self.shared = None if spec.shared_width is None else SharedExpert(config, context, spec)

    def recompute_parts(self, config: RecomputeConfig, norm: nn.Module) -> None:
        """Let backward recompute the experts with their norm, or the norm."""
        if {"mlp", "layernorm"} & config.modules:
            again = "mlp" in config.modules
            recompute_output(norm, "forward", self, "transform", recompute_consumer=again)

    def forward(
        self,
        x: Tensor,
        sample_numbers: SampleNumbers | None = None,
        positions: PositionInfo | None = None,
    ) -> BlockOutput:
        """Map ``[s, b, h]`` to ``[s, b, h]``, both ``[s/tp, b, h]`` if sequence parallel.

        Args:
            sample_numbers: ``[b]``; see `Router.forward`.
            positions: say which tokens are padding.
        """
        y, terms = self.transform(x, sample_numbers, None if positions is None else positions.is_real)
        return BlockOutput(y, None if self.shared is None else self.shared.down.bias, terms)

    @eager_point
    def transform(
        self, x: Tensor, sample_numbers: SampleNumbers | None = None, is_real: Tensor | None = None
    ) -> tuple[Tensor, Terms]:
        """Compute `forward`."""
        return self.compute_experts(x, self.router(x, sample_numbers, is_real))

    def compute_experts(self, x: Tensor, routing: Routing) -> tuple[Tensor, Terms]:
        """Map ``[s, b, h]`` to the weighted sum of each token's experts."""
        weights, experts, terms = routing
        latents = x if self.to_latent is None else self.to_latent(x)
        wait_for_rows = self.dispatcher.start(
            latents, weights, experts, self.capacity_factor if self.training else None
        )
        shared = None if self.shared is None else self.shared.transform(x)  # while rows are in flight
        y, weights, ends, combine = wait_for_rows()
        y = self.up.multiply(y, ends)  # [n, ffn/etp], or [n, 2 ffn/etp]
        # The weights come before the product, because its input is smaller than its output in many models,
        # and its output then need not be kept.
        y = _WeightedActivation.apply(y, weights, self.activate)  # [n, ffn/etp]
        y = combine(self.down.multiply(y, ends, weights))
        y = y if self.from_latent is None else self.from_latent(y)
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
