"""Changes of the model after an update: the use of experts is evened out, and large scores are clipped.

Shapes: e experts, L layers of this rank with experts. For QK-clip: n query heads, g key/value heads, r = n/g,
d head size, L layers of this rank, tp = tp.size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.distributed.collectives import all_reduce
from megalite.distributed.topology import Topology
from megalite.model.experts import Router
from megalite.optim.adamw import BucketState
from megalite.tensor_parallel.parameter_spec import ParameterShard, spec_of


class PostStepHook(Protocol):
    """Change of the model after an update, from what the iteration's forward shows."""

    def begin(self) -> None:
        """Forget the last iteration, before the first forward of the next one."""

    def step(self, is_good: Tensor) -> None:
        """Change the model.

        Args:
            is_good: whether the weights were updated, a bool scalar on the device; otherwise nothing changes.
        """


class ExpertBalance:
    """Update of the biases and loads of experts, after the optimizer's.

    The bias of an expert with fewer tokens of the global batch than the mean rises, and the bias of one with
    more falls (Wang et al. 2024, arXiv 2408.15664). The loads are what the next iteration's balance loss
    uses. The counts are whole numbers, so every layout makes the same changes.

    Args:
        routers: routers of this rank; forward has counted the tokens of their experts.
        rate: change of a bias in one update.
    """

    def __init__(self, topology: Topology, routers: Sequence[Router], rate: float) -> None:
        self.topology = topology
        self.routers = routers
        self.rate = rate

    def begin(self) -> None:
        """Forget the counts before an iteration."""
        for router in self.routers:
            router.num_tokens.zero_()
            router.num_counted.zero_()

    @torch.no_grad()
    def step(self, is_good: Tensor) -> None:
        """Change biases and loads; all ranks that hold the same layers must call it."""
        counts = torch.stack([torch.stack([each.num_tokens, each.num_counted]) for each in self.routers])
        sum_over_tokens(counts, self.routers[0].weight, self.topology)
        selected, counted = counts.unbind(1)  # both [L, e]
        signs = (selected * selected.shape[1] - selected.sum(1, keepdim=True)).sign()
        totals = counted.sum(1, keepdim=True)
        has_counts = is_good & (totals > 0)  # [L, 1]; forced balance counts nothing
        for router, sign, count, total, has_count in zip(
            self.routers, signs, counted, totals, has_counts, strict=True
        ):
            if router.expert_bias is not None:
                change = torch.where(is_good, sign, 0).to(router.expert_bias.dtype)
                router.expert_bias -= change * self.rate
            if router.expert_loads is not None:
                loads = count.to(router.expert_loads.dtype) / total
                router.expert_loads.copy_(torch.where(has_count, loads, router.expert_loads))


def sum_over_tokens(totals: Tensor, weight: nn.Parameter, topology: Topology) -> None:
    """Sum in place over the ranks of a stage whose routers, with this weight, route different tokens."""
    axes = spec_of(weight).parameter_axes
    for axis in (axes.replicas(topology), axes.partial_axis(topology)):
        if axis is not None:
            all_reduce(totals, axis, of="tokens of each expert")


class MeasuredHeads(NamedTuple):
    """Weights of a layer's queries and keys, and the largest scores that they gave.

    Attributes:
        weight, bias: of the linear layer of queries, keys and values, ``[g (r + 2) d / tp, h]`` and
            ``[g (r + 2) d / tp]``; the bias may be None.
        largest: largest score of each query head of this rank, ``[n/tp]``, which forward raises.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    largest: Tensor


class QKClip:
    """QK-clip (Kimi Team 2025, arXiv 2507.20534, section 2.1), after scores in forward that were too large.

    Query heads that share a key/value head are one group, as in Megatron-LM. If the largest score S of a
    group is above the threshold t, its queries are scaled by (t / S)^alpha and its keys by (t / S)^(1 -
    alpha), with their biases. This scales all scores of the group by t / S.

    Args:
        states: this rank's optimizer states with elements.
    """

    def __init__(
        self,
        config: ModelConfig,
        topology: Topology,
        layers: Sequence[MeasuredHeads],
        states: Sequence[BucketState],
    ) -> None:
        self.config = config
        self.topology = topology
        self.layers = layers
        parameters = {
            parameter: number
            for number, layer in enumerate(layers)
            for parameter in (layer.weight, layer.bias)
            if parameter is not None
        }
        self._entries = [
            (parameters[entry.parameter], state, entry)
            for state in states
            for entry in state.entries
            if entry.parameter in parameters
        ]

    def begin(self) -> None:
        """Forget the scores before an iteration."""
        for layer in self.layers:
            layer.largest.fill_(-torch.inf)

    @torch.no_grad()
    def step(self, is_good: Tensor) -> None:
        """Scale the main weights, and the weights that are rounded from them.

        All ranks that hold parts of the same layers must call it.

        Args:
            is_good: whether the weights were updated, a bool scalar on the device; otherwise they stay.
        """
        if not self.layers:
            return
        factors = torch.where(is_good, self._row_factors(), 1.0)
        for layer, state, entry in self._entries:
            box = entry.spec.box(self.topology)
            rows = slice(box.starts[0], box.starts[0] + box.shape[0])
            shard = state.parameter_shard(state.main, entry)
            _multiply_rows(shard, factors[layer, rows].to(shard.tensor.dtype))
            if state.rounded is not None:
                state.parameter_shard(state.rounded, entry).tensor.copy_(shard.tensor)

    def _row_factors(self) -> Tensor:
        """Return the factor of each row of the full query/key/value weights, ``[L, g (r + 2) d]``."""
        config, tp = self.config, self.topology.tp
        own = torch.stack([layer.largest for layer in self.layers])  # [L, n/tp]
        scores = own.new_full((len(own), config.num_attention_heads), -torch.inf)  # [L, n]
        scores.unflatten(1, (tp.size, -1))[:, tp.rank] = own
        replicas = spec_of(self.layers[0].weight).parameter_axes.replicas(self.topology)
        for axis in (tp, replicas):
            all_reduce(scores, axis, dist.ReduceOp.MAX, of="largest attention scores")
        threshold, alpha = config.qk_clip_threshold, config.qk_clip_alpha
        spec = config.head_specs[-1]  # all layers have its sizes
        by_group = scores.unflatten(1, (spec.num_kv_heads, -1))  # [L, g, r]
        factor = threshold / by_group.amax(2, keepdim=True).clamp(min=threshold)  # [L, g, 1]
        queries, *gates, _, _ = spec.group_heads
        ones = torch.ones_like(factor)
        factors = [factor**alpha] * queries + [ones] * sum(gates) + [factor ** (1.0 - alpha), ones]
        heads = torch.cat(factors, dim=2)  # [L, g, r + 2]; with gates, [L, g, 2 r + 2]
        return heads.flatten(1).repeat_interleave(spec.head_dim, dim=1)


def _multiply_rows(shard: ParameterShard, factors: Tensor) -> None:
    """Multiply the rows of a rank's slice by their factors, in the elements of the shard.

    Args:
        factors: factor of each row of the slice, along its first dim.
    """
    flat, start, count = shard.tensor, shard.start, shard.tensor.numel()
    row_size = torch.Size(shard.shape[1:]).numel()
    head = min(-start % row_size, count)  # elements of a row that begins in another shard
    num_rows = (count - head) // row_size
    first, tail = -(-start // row_size), head + num_rows * row_size
    if head:
        flat[:head].mul_(factors[start // row_size])
    if num_rows:
        flat[head:tail].view(num_rows, row_size).mul_(factors[first : first + num_rows, None])
    if tail < count:
        flat[tail:].mul_(factors[first + num_rows])
