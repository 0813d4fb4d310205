"""The catalogue of injected errors, a table: what goes wrong, its class, where it acts, and the change."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megalite.attention import core, kernels, plain, positions, ring
from megalite.checkpoint import load
from megalite.checkpoint.convert import average
from megalite.checkpoint.parameter_range import ParameterRange
from megalite.data import batch_loader
from megalite.data.document_assignment import DocumentRun
from megalite.data.microbatch import LayerState, Microbatch
from megalite.distributed import collectives
from megalite.distributed.axes import Slice
from megalite.distributed.axis import HeldPositions
from megalite.distributed.collectives import Pending, gather_from_tensor_parallel
from megalite.distributed.topology import Topology
from megalite.model import (
    activation_offload,
    attention,
    bert_stage,
    embedding,
    expert_dispatch,
    experts,
    gated_delta_net,
    layer,
    mamba,
    mlp,
    multi_token_prediction,
    norm,
    recompute,
    recompute_region,
    recurrent_mixer,
    stage,
)
from megalite.model.norm import LayerNorm, RMSNorm
from megalite.model.transformer_stage import TransformerStage
from megalite.optim import (
    adamw,
    flat_buffers,
    gradient_buckets,
    gradient_scale,
    muon,
    optimizer,
    post_step_hooks,
    weight_gathering,
)
from megalite.pipeline import executor
from megalite.pipeline.executor import PointToPoint
from megalite.pipeline.schedules import ActionKind
from megalite.tensor_parallel import (
    counter_random,
    gemm_collectives,
    linear,
    parameter_spec,
    uncut_linear,
    vocab_parallel,
)
from megalite.tensor_parallel.parameter_spec import LayerContext, ParameterShard
from megalite.tensor_parallel.placement import Box, ParameterAxes
from megalite.train import global_batch, model_chunks, trainer
from megalite.train.global_batch import LossMasks
from megalite.utils.hardware.host_memory import HostBuffers
from tests.power import own_stage
from tests.power.injected_error import (
    Change,
    InjectedError,
    after,
    before,
    complete_over,
    instead,
    mean_first,
    not_summed,
    over,
    rounded,
    twice,
    unless,
)

SAME = "It is the same in every layout and on one rank: compare with another implementation."
"""The reason why a comparison of layouts cannot show an error."""

Collectives = gemm_collectives.SeparateCollectives
Buffer = gradient_buckets.GradientBuffer
Sharded = gradient_buckets.ShardedGradientBuffer


def _sums(*names: str) -> Callable[..., bool]:
    """Return a condition for sums of these names."""
    return lambda *_, **more: more.get("of") in names


def _first(x: Tensor, *_: Any) -> Tensor:
    return x


def _gathered_only(whole: Tensor, *_: Any, **more: Any) -> Pending:
    return Pending(whole, None)


def _scattered_only(mine: Tensor, *_: Any) -> Pending:
    return Pending(mine, None)


def _from_next_rank(rows: Tensor, exchange: Any) -> Tensor:
    """Return what an exchange of rows returns, with the ranges of the ranks in another order, if they fit."""
    parts = rows.split(list(exchange.receive))
    return torch.cat([*parts[1:], *parts[:1]])


def _cut(x: Tensor, axis: Any) -> Pending:
    return Pending(x.chunk(axis.size)[axis.rank].clone(), None)


def _other_part(mine: Tensor, whole: Tensor, axis: Any) -> tuple[Any, ...]:
    return mine, whole.roll(mine.numel()), axis


def _without_gradient(embeddings: Mapping[int, Tensor]) -> dict[int, Tensor]:
    return {number: x.detach() + 0.0 * x for number, x in embeddings.items()}


def _local_layer(original: Callable[..., Any], topology: Topology) -> Callable[..., Any]:
    return lambda self, number: original(self, number % max(1, self.config.num_layers // topology.pp.size))


def _own_seed(original: Callable[..., Any], topology: Topology) -> Callable[..., Any]:
    return lambda module, seed, topo: original(module, seed + topology.pp.rank, topo)


def _dropped_on_last(original: Callable[..., Any], _: Topology) -> Callable[..., Any]:
    return lambda gradient, pp: original(gradient.zero_() if pp.is_last else gradient, pp=pp)


def _mean_over_samples(terms: Any, _: Any, losses: Tensor, microbatch: Microbatch) -> Any:
    return {name: term._replace(total=term.total / len(microbatch.tokens)) for name, term in terms.items()}


def _of_block_alone(blocks: Any, q: Tensor, k: Tensor, v: Tensor, whole: Any, *rest: Any) -> tuple[Any, ...]:
    """Return arguments with the output of the block, where that of attention with all keys belongs."""
    out, _ = blocks.forward(q, k, v, *rest)
    deltas = (out * whole.grad).sum(-1)
    return blocks, q, k, v, whole._replace(out=out, deltas=deltas), *rest


def _ends_with_slice(cut: Microbatch, *_: Any) -> Microbatch:
    if cut.later_tokens is None:
        return cut
    own = replace(cut, document_ids=None).with_later_tokens(cut.later_tokens.shape[1])
    return replace(own, document_ids=cut.document_ids)


def _with_the_next_mask(later: Microbatch, *_: Any) -> Microbatch:
    if later.later_mask is None or later.loss_mask is None:
        return later
    return replace(later, later_mask=later.loss_mask[:, None].expand_as(later.later_mask))


def _only_last_microbatch(self: Any, entry: Any) -> tuple[Tensor, bool]:
    self.stale.discard(entry.name)
    return self.bucket.view(self.full, entry), True


def _no_biases(original: Callable[..., Any], _: Topology) -> Callable[..., Any]:
    def start_reduce(self: Any, is_last: bool = True) -> Any:
        if self.bucket.entries[0].spec.decay:
            return original(self, is_last)
        return flat_buffers.ReduceHandle(Pending(self.complete(), None), lambda: None)

    return start_reduce


def _previous_message(original: Callable[..., Any], _: Topology) -> Callable[..., Any]:
    last: dict[Any, Tensor] = {}

    def received(self: Any, reader: Any) -> Tensor:
        tensor: Tensor = original(self, reader)
        before, last[reader.kind] = last.get(reader.kind, tensor), tensor
        return before

    return received


def _at_last_stage(change: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return a change of the microbatch that the last of several pipeline ranks uses."""

    def changed(original: Callable[..., Any], topology: Topology) -> Callable[..., Any]:
        is_there = topology.pp.size > 1 and topology.pp.is_last
        return lambda *args: change(original(*args)) if is_there else original(*args)

    return changed


def _other_microbatch(original: Callable[..., Any], topology: Topology) -> Callable[..., Any]:
    if topology.pp.size == 1 or not topology.pp.is_last:
        return original
    return lambda self, consumed, index: original(self, consumed, index ^ 1)


def _numbered(change: Callable[[Any, Tensor], Tensor]) -> Callable[..., Any]:
    """Return a change of the sample numbers that key a microbatch's dropout."""
    return after(
        lambda microbatch, self, *_: replace(
            microbatch, sample_numbers=change(self, microbatch.sample_numbers)
        )
    )


class _OwnCounts(LossMasks):
    """Counts the tokens with a loss of this replica alone."""

    def token_ratio(self, topology: Topology) -> Tensor:
        return torch.tensor(self._num_tokens / max(1, int(sum(self._num_with_loss))), dtype=torch.float64)


class _FirstCounts(LossMasks):
    """Counts the tokens with a loss of the first microbatch alone."""

    def token_ratio(self, topology: Topology) -> Tensor:
        self._num_with_loss[1:] = self._num_with_loss[:1] * (len(self._num_with_loss) - 1)
        return super().token_ratio(topology)


def _loading(change: Callable[[Mapping[str, Any], Topology], None]) -> Callable[..., Any]:
    """Return a change of the tensors that a checkpoint was loaded into."""

    def changed(original: Callable[..., Any], topology: Topology) -> Callable[..., Any]:
        def load_checkpoint(folder: Any, tensors: Mapping[str, Any], *rest: Any) -> Any:
            loaded = original(folder, tensors, *rest)
            change(tensors, topology)
            return loaded

        return load_checkpoint

    return changed


def _tensor(entry: Any) -> Tensor:
    """Return the elements of a checkpoint's tensor on this rank."""
    return entry.tensor if isinstance(entry, ParameterShard) else entry


def _reset(ending: str) -> Callable[..., None]:
    """Return a function that sets the tensors of this name to zero."""

    def reset(tensors: Mapping[str, Any], _: Topology) -> None:
        found = [_tensor(each) for name, each in tensors.items() if name.endswith(ending)]
        for each in found:
            each.zero_()

    return reset


def _one_sample_late(plan: Any, *_: Any) -> Any:
    progress = replace(plan.progress, consumed_samples=plan.progress.consumed_samples + 1)
    return replace(plan, progress=progress)


def _places_of_next(axis: str) -> Callable[..., Any]:
    """Return a change of the places of tensors in a checkpoint: those of the next rank along an axis."""

    def changed(original: Callable[..., Any], _: Topology) -> Callable[..., Any]:
        def of(tensor: Any, topology: Topology) -> ParameterRange:
            found: ParameterRange = original(tensor, topology)
            dim = tensor.spec.dim_cut_over(axis) if isinstance(tensor, ParameterShard) else None
            if dim is None or found.shape[dim] == found.full_shape[dim]:
                return found
            offsets = list(found.offsets)
            offsets[dim] = (offsets[dim] + found.shape[dim]) % found.full_shape[dim]
            return replace(found, offsets=tuple(offsets))

        return of

    return changed


def _without_averages(tensors: Mapping[str, Any], *_: Any) -> dict[str, Any]:
    return {name: each for name, each in tensors.items() if not name.startswith("ema.")}


def _without_moments(tensors: Mapping[str, Any], *_: Any) -> None:
    for name, each in tensors.items():
        if name.startswith("optimizer.") and isinstance(each, ParameterShard):
            each.tensor.zero_()


def _blind_at_the_window_edge(steps: Any, held: Any, own: int, window: int | None, _: bool) -> Any:
    """Return the steps of a ring without the blocks of which only the last key is in the window."""
    return tuple(
        step._replace(
            blocks=tuple(
                (i, j)
                for i, j in step.blocks
                if window is None or step.positions[j].stop > held.ranks[own][i].positions.start - window + 1
            )
        )
        for step in steps
    )


def _drops_anew(original: Callable[..., Any], _: Topology) -> Callable[..., Any]:
    calls: dict[int, int] = {}

    def sum_for_norm(self: Any, x: Tensor, y: Tensor, bias: Any, numbers: Tensor) -> Any:
        # Numbers that no sample has: a mask of its own for each call.
        calls[self.key] = calls.get(self.key, 0) + 1
        is_repeated = torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1
        return original(self, x, y, bias, numbers + 1000 if is_repeated else numbers)

    return sum_for_norm


def _dp(change: Callable[[Any, int], Any], key: str) -> Callable[..., Any]:
    """Return a change of one of the divisors of a batch by the number of ranks that read samples."""

    def changed(original: Callable[..., Any], topology: Topology) -> Callable[..., Any]:
        def opened(*args: Any) -> Any:
            load, divisors = original(*args)
            return load, {**divisors, key: change(divisors[key], topology.sample_ranks.size)}

        return opened

    return changed


def _with_decay(pieces: Any, decay: float) -> Any:
    """Give updates without weight decay this one."""
    return [(each._replace(weight_decay=each.weight_decay or decay), own) for each, own in pieces]


def _rate_by_replicas(original: Callable[..., Any], topology: Topology) -> Callable[..., Any]:
    return lambda self, rate, *rest: original(self, rate * topology.replicas.size, *rest)


def _gathers_before_update(original: Callable[..., Any], _: Topology) -> Callable[..., Any]:
    def step(self: Any, *args: Any) -> None:
        gatherer, self.gatherer = self.gatherer, type("Nothing", (), {"start": staticmethod(lambda: None)})
        gatherer.start()
        original(self, *args)
        self.gatherer = gatherer

    return step


def _at_middle(change: Callable[..., Any]) -> Callable[..., Any]:
    """Make a change on pipeline ranks that are neither the first nor the last."""

    def changed(original: Callable[..., Any], topology: Topology) -> Callable[..., Any]:
        is_edge = topology.pp.is_first or topology.pp.is_last
        wrong: Callable[..., Any] = original if is_edge else change(original, topology)
        return wrong

    return changed


def _without_tokens(microbatch: Any, *_: Any) -> Any:
    nothing = microbatch.tokens.new_empty((0, 1))
    return replace(microbatch, tokens=nothing, labels=nothing)


def _exchanged(layers: Any, *_: Any) -> Any:
    """Exchange the layers of the second and the third stage, if there are so many."""
    return [layers[0], layers[2], layers[1], *layers[3:]] if len(layers) > 3 else layers


def _in_chunks(change: Callable[..., Any]) -> Callable[..., Any]:
    """Change a method of `ScheduleRun` for the actions of the last of several chunks."""

    def changed(original: Callable[..., Any], _: Topology) -> Callable[..., Any]:
        def method(self: Any, action: Any) -> Any:
            is_wrong = action.chunk > 0 and action.chunk == self._stages.num_chunks - 1
            return change(original, self, action) if is_wrong else original(self, action)

        return method

    return changed


def _computing(kind: ActionKind, change: Callable[..., Any]) -> Callable[..., Any]:
    """Change the method of one kind in the executor's table."""
    return lambda table, topology: {**table, kind: change(table[kind], topology)}


def _with_double_losses(original: Callable[..., Any], self: Any, action: Any) -> Any:
    scale, self._loss_scale = self._loss_scale, 2.0 * self._loss_scale
    try:
        return original(self, action)
    finally:
        self._loss_scale = scale


def _previous_local_input(original: Callable[..., Any], _: Topology) -> Callable[..., Any]:
    last: dict[Any, Tensor] = {}

    def read(self: Any, action: Any) -> Any:
        is_local = action in self._local_inputs
        tensor = original(self, action)
        if not is_local:
            return tensor
        before, last[action.kind] = last.get(action.kind, tensor), tensor
        return before

    return read


def _overtaking(original: Callable[..., Any], topology: Topology) -> Callable[..., Any]:
    """Let the second message of the first rank overtake the first one, once."""
    held: list[Any] = []
    if topology.pp.size == 1 or not topology.pp.is_first:
        return original

    def launch(group: Any, receives: Any, send: Any) -> Any:
        if send is None or len(held) > 1:
            return original(group, receives, send)
        held.append(send)
        received, work = original(group, receives, None if len(held) == 1 else send)
        if len(held) > 1:
            original(group, [], held[0])[1].wait()
        return received, work

    return launch


def _scale_of(is_next: Callable[[Topology], bool]) -> Callable[..., Any]:
    """Return a change of the loss scaler: some ranks already have the next step's scale."""

    def changed(original: Any, topology: Topology) -> Any:
        factor = 2.0 if is_next(topology) else 1.0
        return property(lambda self: original.fget(self) * factor)

    return changed


def _half_copied(buffer: Any, *_: Any) -> Any:
    buffer.memory[buffer.num_bytes // 2 :] = 0
    return buffer


def _previous_copy(original: Callable[..., Any], _: Topology) -> Callable[..., Any]:
    last: dict[int, Tensor] = {}

    def copy_to_device(self: Any, buffer: Any) -> Tensor:
        tensor: Tensor = original(self, buffer)
        before = last.get(tensor.numel(), tensor)
        last[tensor.numel()] = tensor.clone()
        return before

    return copy_to_device


def _without_sum(original: Callable[..., Any], _: Topology) -> Callable[..., Any]:
    """Compute the output layer's input gradient from this rank's logits alone."""

    def column_linear(x: Tensor, weight: Any, bias: Any, context: Any) -> Tensor:
        if context.tp.size == 1:
            return original(x, weight, bias, context)
        hidden = context.hidden_collectives
        unsummed = type("Unsummed", (type(hidden),), {"start_sum": lambda self, y: _own(self, y)})
        alone = unsummed(hidden.gemm, hidden.tp, hidden.sequence_parallel, 1)
        return original(x, weight, bias, replace(context, hidden_collectives=alone))

    return column_linear


def _gradient_times(x: Tensor, factor: float) -> Tensor:
    """Return x, whose gradient is multiplied by a factor."""
    return x.detach() + (x - x.detach()) * factor


def _drops_nothing(original: Callable[..., Any], _: Topology) -> Callable[..., Any]:
    def sum_for_norm(self: Any, *args: Any) -> Any:
        p = self.p
        self.p = 0.0 if torch._C._current_graph_task_id() != -1 else p
        try:
            return original(self, *args)
        finally:
            self.p = p

    return sum_for_norm


def _per_rank_rate(original: Callable[..., Any], topology: Topology) -> Callable[..., Any]:
    return lambda self, rate, *rest: original(self, rate * (1.0 + 0.1 * topology.pp.rank), *rest)


def _gathered_once(original: Callable[..., Any], _: Topology) -> Callable[..., Any]:
    first: dict[Any, Tensor] = {}

    def gather(whole: Tensor, mine: Tensor, axis: Any, **more: Any) -> Pending:
        pending = original(whole, mine, axis, **more).wait()
        key = whole.data_ptr(), whole.numel()
        first.setdefault(key, pending.clone())
        pending.copy_(first[key])
        return Pending(pending, None)

    return gather


def _complete_normed_keys(layer: Any, q: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    *gate, k = others
    keys = layer.key_norm(k)
    return layer.query_norm(q), *gate, keys, layer.value_norm(keys)


def _order_of_slices(original: Callable[..., Any], topology: Topology) -> Callable[..., Any]:
    def reduced(x: Tensor, tp: Any) -> Tensor:
        return original(x.roll(len(x) // tp.size, 0), tp)

    return reduced


def _with_all_logits(logits: Tensor, targets: Tensor, vocab_size: int, tp: Any) -> tuple[Any, ...]:
    """Gather the logits, as a head that returns them whole would."""
    return (gather_from_tensor_parallel(logits, tp) if tp.size > 1 else logits), targets, vocab_size, tp


def _with_own_log_sums(original: Callable[..., Any], _: Topology) -> Callable[..., Any]:
    def losses_and_log_sums(logits: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        own = logits.logsumexp(-1)  # before the logits are overwritten
        return original(logits.clone(), *rest)[0], own

    return losses_and_log_sums


def _of_slices(scales: Any, topology: Topology) -> Any:
    """Return Muon's scales of matrices of which a rank has some rows."""

    def of_slice(scale: Callable[[int, int], float]) -> Callable[[int, int], float]:
        return lambda rows, columns: scale(rows // topology.tp.size, columns)

    return {name: of_slice(scale) for name, scale in scales.items()}


def _own_parts(exchange: Any, matrices: Any) -> Any:
    """Return matrices with zeros where other ranks hold them."""
    kept = []
    for matrix, segments in zip(matrices, exchange._segments, strict=True):
        own, only = segments[exchange._axis.rank], torch.zeros_like(matrix)
        elements = torch.zeros(own.part.shape, dtype=matrix.dtype).view(-1)
        elements[own.start : own.end] = matrix[own.part.block].reshape(-1)[own.start : own.end]
        only[own.part.block] = elements.view(own.part.shape)
        kept.append(only)
    return kept


def _last_changed(change: Callable[[Tensor], Tensor]) -> Callable[..., tuple[Any, ...]]:
    """Change the last of the matrices that a rank has orthogonalized for others."""

    def changed(exchange: Any, matrices: Any) -> tuple[Any, ...]:
        if exchange._axis.size == 1 or not matrices:
            return exchange, matrices
        return exchange, [*matrices[:-1], change(matrices[-1])]

    return changed


def _with_heads(name: str, change: Callable[[Tensor, Topology], Tensor]) -> Callable[..., Any]:
    """Change a parameter of Mamba-2 that has a number for each head, as the recurrence reads it."""

    def changed(original: Callable[..., Any], topology: Topology) -> Callable[..., Any]:
        def recur(self: Any, *args: Any) -> Tensor:
            changes = {name: change(getattr(self, name), topology)}
            delegate = type("Changed", (), {"__getattr__": lambda _, other: getattr(self, other)})()
            delegate.__dict__.update(changes)
            return original(delegate, *args)

        return recur

    return changed


def _other_vector(box: Any, spec: Any, topology: Topology, *_: Any) -> Any:
    """Return the place of the last rank for the first one of a cut vector, and so on."""
    if len(box.shape) > 1 or not spec.cuts:
        return box
    return Box((spec.full_shape[0] - box.shape[0] - box.starts[0],), box.shape)


def _other_heads(mean: float) -> Change:
    """Change the place of cut vectors with these initial values (`_other_vector`): Gated DeltaNet's."""

    def change(box: Any, spec: Any, topology: Topology, *_: Any) -> Any:
        return _other_vector(box, spec, topology) if spec.mean == mean else box

    return after(change)


def _on_later_stages(change: Callable[..., tuple[Any, ...]]) -> Change:
    """Change the arguments on all stages but the first."""
    return lambda original, topology: (
        lambda *args, **options: original(*(args if topology.pp.is_first else change(*args)), **options)
    )


def _in_plain_order(ranks: Any, *_: Any) -> Any:
    return ranks._replace(order=HeldPositions(ranks.axis.rank, ranks.axis.size))


def _as_post_norm(module: Any, *_: Any) -> Any:
    module.normalized = layer.NORMALIZED["post"]
    return module


ROWS: dict[str, list[tuple[Any, ...]]] = {
    "sum over replicas": [
        ("gradients are not summed over replicas", "dp2", gradient_buckets, "start_all_reduce",
         instead(not_summed)),
        ("gradients are means over replicas", "dp2", gradient_buckets, "start_all_reduce",
         before(mean_first)),
        ("gradients are summed twice over replicas", "dp2", gradient_buckets, "start_all_reduce", twice),
        ("gradients are summed over tp instead of replicas", "tp2dp2", gradient_buckets, "start_all_reduce",
         over(lambda topology: topology.tp)),
        ("gradients of biases and norms are not summed over replicas", "dp2", Buffer, "start_reduce",
         _no_biases),
        ("gradients are summed over replicas in fp32", "dp2", gradient_buckets, "start_all_reduce",
         before(rounded(torch.float32))),
        ("gradients are summed over replicas in bf16", "dp2", gradient_buckets, "start_all_reduce",
         before(rounded(torch.bfloat16))),
    ],
    "ZeRO": [
        ("gradients are not reduce-scattered", "dp2+zero1", gradient_buckets, "flat_reduce_scatter",
         instead(_scattered_only)),
        ("a rank receives the shard of another one", "dp2+zero1", gradient_buckets, "flat_reduce_scatter",
         before(_other_part)),
        ("groups of shards are not summed", "dp4shard2+zero1", gradient_buckets, "start_all_reduce",
         instead(not_summed)),
        ("a shard holds the last microbatch only", "dp2+zero2", Sharded, "_accumulate_shard",
         instead(lambda self, result: self.shard_sum.copy_(result))),
        ("a shard keeps the sum of the iteration before", "dp2+zero2", Sharded, "begin",
         instead(Buffer.begin)),
        ("updated weights are not gathered", "dp2+zero1", weight_gathering, "flat_all_gather",
         instead(_gathered_only)),
        ("weights are gathered before the update", "dp2+zero1", optimizer.Optimizer, "step",
         _gathers_before_update),
        ("gathered weights are those of another rank", "dp2+zero3", weight_gathering, "flat_all_gather",
         after(lambda pending, *_: _rolled(pending))),
        ("only the first replica counts its shard in the norm", "dp2+zero2", optimizer.Optimizer, "_counted",
         lambda original, topology: lambda self, state: (
             original(self, state) if topology.replicas.rank == 0 else slice(0, 0))),
        ("weights are those of the first gathering", "dp2+zero3", weight_gathering, "flat_all_gather",
         _gathered_once),
    ],
    "tensor parallelism": [
        ("input gradients of column layers are not summed", "tp2", Collectives, "start_summed_input_gradient",
         instead(lambda self, grad, *rest: _own(self, self.gemm.input_gradient(grad, *rest)))),
        ("row layers are not summed", "tp2", Collectives, "summed_forward",
         instead(lambda self, x, weight, bias: _own(self, self.gemm.forward(x, weight, bias)).tensor)),
        ("all sums of linear layers are means", "tp2", gemm_collectives, "start_all_reduce",
         before(mean_first)),
        ("all sums of linear layers run twice", "tp2", gemm_collectives, "start_all_reduce", twice),
        ("sums of linear layers are in fp32", "tp2", gemm_collectives, "start_all_reduce",
         before(rounded(torch.float32))),
        ("sums of linear layers are over the replicas", "tp2dp2", gemm_collectives, "start_all_reduce",
         over(lambda topology: topology.replicas)),
        ("the first of three parts of a sum is missing", "tp2+overlap", gemm_collectives, "start_all_reduce",
         unless(lambda x, _: x.shape[0] == 10, not_summed)),
        ("every rank adds a row layer's bias", "tp2", attention.Attention, "forward",
         after(lambda out, self, *_: out._replace(bias=out.bias * self.tp.size))),
        ("word embeddings are not summed", "tp2", vocab_parallel, "reduce_from_tensor_parallel",
         instead(_first)),
        ("tokens of other ranks look up their first row", "tp2", vocab_parallel.VocabParallelEmbedding,
         "forward", instead(lambda self, tokens: self.reduce(torch.nn.functional.embedding(
             (tokens - self.tp.rank * len(self.weight)).clamp(0, len(self.weight) - 1), self.weight),
             self.tp))),
        ("padding of the vocabulary is in the loss", "tp2", stage, "vocab_parallel_cross_entropy",
         before(lambda logits, targets, _, tp: (logits, targets, 10**6, tp)), "gpt",
         "The vocabulary of 101 tokens has the same padding in every layout that is verified."),
        ("the cross-entropy gets the logits of all ranks as its slice", "tp2", stage,
         "vocab_parallel_cross_entropy", before(_with_all_logits)),
        ("the maximum of the logits is not reduced", "tp2", vocab_parallel, "all_reduce",
         unless(lambda x, tp, *op: bool(op), _first)),
        ("the sums of the cross-entropy are not reduced", "tp2", vocab_parallel, "all_reduce",
         unless(lambda x, tp, *op: not op, _first)),
        ("the sums of the cross-entropy are means", "tp2", vocab_parallel, "all_reduce",
         before(lambda x, tp, *op: (x if op else x.div_(tp.size), tp, *op))),
        ("a target's column is off by one after the first rank", "tp2", vocab_parallel,
         "cross_entropy_statistics",
         before(lambda rows, targets, start, real: (rows, targets, start + (start > 0), real))),
        ("the gradient of shared keys and values is not summed", "tp4", attention, "all_gather_from",
         instead(gather_from_tensor_parallel), "llama"),
        ("queries of a shared group are those of another rank", "tp4", attention.Attention,
         "_split_shared_group", after(lambda qkv, *_: (qkv[0].flip(2).roll(1, 0), *qkv[1:])), "llama"),
        ("every rank has the ALiBi slopes of the first heads", "tp2", positions, "alibi_slopes",
         lambda original, topology: lambda n: original(n)[: n // topology.tp.size] * topology.tp.size,
         "bloom"),
        ("the input gradient of the output layer is not summed", "tp2", embedding, "column_linear",
         _without_sum),
        ("biases have weight decay after the first rank", "tp2", adamw.AdamW, "_update",
         lambda original, topology: lambda self, pieces, *rest: original(
             self, _with_decay(pieces, 0.1 * (topology.tp.rank > 0)), *rest)),
    ],
    "sequence parallelism": [
        ("partial gradients are not summed", "tp2+sp", optimizer.Optimizer, "_sum_partial",
         instead(lambda self: None)),
        ("partial gradients are means", "tp2+sp", optimizer, "all_reduce", before(mean_first)),
        ("partial gradients are summed twice", "tp2+sp", optimizer.Optimizer, "_sum_partial",
         lambda original, _: lambda self: (original(self), original(self))),
        ("gradients of LayerNorm's weight are not summed", "tp2+sp", LayerNorm, "__init__",
         complete_over("weight")),
        ("gradients of LayerNorm's bias are not summed", "tp2+sp", LayerNorm, "__init__",
         complete_over("bias")),
        ("gradients of RMSNorm are not summed", "tp2+sp", RMSNorm, "__init__", complete_over("weight"),
         "llama"),
        ("gradients of LayerNorm after the embedding are not summed", "tp2+sp", LayerNorm, "__init__",
         complete_over("weight"), "bloom"),
        ("gradients of post-norm are not summed", "tp2+sp", LayerNorm, "__init__",
         complete_over("weight", "bias"), "bert"),
        ("gradients of row layers' biases are not summed", "tp2+sp", linear.RowParallelLinear, "__init__",
         complete_over("bias")),
        ("gradients of the position table are not summed", "tp2+sp", embedding.PositionTable, "__init__",
         complete_over("weight")),
        ("gradients of the token types are not summed", "tp2+sp", embedding.TokenTypeTable, "__init__",
         complete_over("weight"), "bert"),
        ("gradients of BERT's heads are not summed", "tp2+sp", bert_stage.ReplicatedLinear, "__init__",
         complete_over("weight", "bias"), "bert"),
        ("input gradients are cut instead of reduce-scattered", "tp2+sp", gemm_collectives,
         "start_reduce_scatter", instead(_cut)),
        ("sums over slices are means", "tp2+sp", gemm_collectives, "start_reduce_scatter",
         before(lambda x, axis: (x / axis.size, axis))),
        ("slices of the sequence are gathered in another order", "tp2+sp", gemm_collectives,
         "start_all_gather", after(lambda pending, *_: _rolled(pending, halves=True))),
        ("positions of a slice count from 0", "tp2+sp", parameter_spec.LayerContext, "position_ranges",
         instead(lambda self, num_positions: (range(num_positions),))),
        ("a slice looks up the position ids of the first slice", "tp2+sp", parameter_spec.LayerContext,
         "own_tokens", instead(lambda self, num_positions: slice(0, num_positions)), "packed"),
        ("every rank adds BERT's order loss", "tp2+sp", bert_stage, "reduce_from_tensor_parallel",
         before(lambda x, tp: (x + 1.0 * tp.rank, tp)), "bert"),
        ("a rank gets another rank's slice of the word embeddings", "tp2+sp", vocab_parallel,
         "reduce_scatter_to_sequence_parallel", _order_of_slices),
        ("the gradient of the order loss is multiplied by tp", "tp2+sp", bert_stage,
         "reduce_from_tensor_parallel",
         lambda original, topology: lambda x, tp: original(_gradient_times(x, tp.size), tp), "bert"),
    ],
    "context parallelism": [
        ("queries of a slice see the keys of the first slice", "cp2", plain, "attend_slices",
         instead(lambda q, softmax, runs, attend: attend(q, softmax))),
        ("documents of a slice are off by one", "cp2", core.StageCore, "visible_keys",
         before(lambda self, shape, ids, windows: (
             self, shape, ids if ids is None else ids.roll(self.own_positions.index, dims=1), windows)),
         "packed"),
        ("rotary positions of a slice count from 0", "cp2", positions.Rotary, "held_by",
         before(lambda self, own, s: (self, HeldPositions(0, own.count), s)), "llama"),
        ("gradients of gathered keys are cut instead of reduce-scattered", "cp2", collectives,
         "start_reduce_scatter", instead(_cut)),
        ("gradients of gathered keys are means", "cp2", collectives, "start_reduce_scatter",
         before(lambda x, axis: (x / axis.size, axis))),
        ("slices of keys are gathered in another order", "cp2", collectives, "start_all_gather",
         after(lambda pending, *_: _rolled(pending, halves=True))),
        ("heads return in the order of another rank", "cp2+a2a", core, "_to_tokens",
         after(lambda y, x, cp: y.roll(x.shape[2], dims=2))),
        ("exchanged heads have the ALiBi slopes of the first ones", "cp2+a2a", parameter_spec.LayerContext,
         "attention_heads", lambda original, _: property(
             lambda self: Slice(self.tp.rank * self.cp.size, self.tp.size * self.cp.size)), "bloom"),
        ("the divisor counts the tokens of a slice", "cp2", global_batch.GlobalBatches, "open",
         after(lambda opened, self, *_: (opened[0], {
             name: number / (self._topology.positions.count if name == "token" else 1)
             for name, number in opened[1].items()}))),
        ("tokens with a loss are counted on a slice", "cp2", global_batch.LossMasks, "token_ratio",
         lambda original, topology: lambda self, over: original(self, topology) * (1 + over.positions.index),
         "packed"),
        ("a block of a ring sees later keys", "cp2+p2p", plain, "_hide_",
         before(lambda scores, queries, keys, softmax: (
             scores, range(queries.start + 1, queries.stop + 1), keys, softmax))),
        ("queries of a ring do not see the slice before theirs", "cp2+p2p", ring, "ring_steps",
         after(lambda steps, held, own, *_: tuple(
             _blind_to_the_slice_before(step, held.ranks[own]) for step in steps))),
        ("a ring does not see a key at the edge of a window", "cp2+p2p", ring, "ring_steps",
         after(_blind_at_the_window_edge), "edge"),
        ("rotary positions of zigzag slices are consecutive", "cp2+p2p", positions.Rotary, "held_by",
         before(lambda self, own, s: (self, HeldPositions(own.index, own.count), s)), "llama"),
        ("hidden states of zigzag slices have consecutive positions", "cp2+p2p",
         parameter_spec.LayerContext, "position_ranges",
         lambda original, topology: lambda self, count: (
             (range((first := topology.positions.index * count), first + count),)
             if topology.positions.count > 1 else original(self, count))),
        ("results of a ring are merged without their weights", "cp2+p2p", ring, "merge_",
         before(lambda out, sums, more, more_sums: (out, sums, more, sums.clone()))),
        ("gradients of keys do not return to their rank", "cp2+p2p", ring, "_add_returned",
         instead(lambda returning, own: returning and returning[1].wait())),
        ("keys of a ring arrive one token later than their values", "cp4+p2p", ring, "_unpacked",
         after(lambda pair, *_: (pair[0].roll(1, 2), pair[1]))),
        ("a block's softmax is differentiated alone", "cp2+p2p", plain.PlainKernel, "backward",
         before(_of_block_alone)),
        ("sinks of a ring count twice", "cp2+p2p", ring.Ring, "__init__",
         before(lambda self, axis, held, softmax, kernel: (
             self, axis, held, softmax._replace(
                 parameters=tuple(x + math.log(2.0) for x in softmax.parameters)), kernel)), "gpt-oss"),
        ("slices of ranks that exchange heads stay in the order of the ranks", "cp4+a2a+p2p",
         core.KeyRanks, "of", after(_in_plain_order)),
        ("tokens of the only layer that exchanges heads stay in the order of the ranks", "cp2",
         core.KeyRanks, "of", after(_in_plain_order),
         "mixed"),
        ("exchanged heads of a ring have the ALiBi slopes of the first ones", "cp4+a2a+p2p",
         parameter_spec.LayerContext, "attention_heads", lambda original, _: property(
             lambda self: replace(
                 own := original.fget(self), index=self.tp.rank * own.count // self.tp.size)), "bloom"),
        ("assigned tokens have the positions of their neighbours", "cp2+p2p+dynamic", Microbatch, "rank_part",
         after(lambda own, *_: replace(own, position_ids=own.position_ids.roll(1, dims=1))), "later"),
        ("the last label of an assigned document is the rank's next token", "cp2+p2p+dynamic", Microbatch,
         "rank_part", after(lambda own, *_: replace(own, labels=own.tokens.roll(-1, dims=1))), "later"),
        ("queries of assigned documents see earlier documents", "cp2+p2p+dynamic", ring, "_blocks",
         before(lambda queries, keys, *rest: (_of_one_document(queries), _of_one_document(keys), *rest)),
         "later"),
        ("queries of an assigned document do not see the part before theirs", "cp2+p2p+dynamic",
         ring, "ring_steps", after(lambda steps, held, own, *_: tuple(
             _blind_to_the_slice_before(step, held.ranks[own]) for step in steps)), "later"),
        ("dropout of assigned documents counts a rank's tokens from 0", "cp2+p2p+dynamic",
         parameter_spec.LayerContext, "ranges_by_samples", after(lambda groups, self, num_positions, _: [
             (numbers, (range(num_positions),) if len(groups) > 1 else runs) for numbers, runs in groups]),
         "packed"),
        ("tokens of assigned documents recur in the order of the ranks", "cp2+p2p+dynamic", core,
         "_rows", instead(lambda x, order: x), "hybrid"),
        ("every slice adds an order loss", "cp2", bert_stage.BertStage, "_order_loss",
         after(lambda loss, self, *_: loss + 1.0 * self.context.topology.positions.index), "bert"),
    ],
    "experts": [
        ("gradients of experts are not summed over their replicas", "dp4ep2", gradient_buckets,
         "start_all_reduce", unless(lambda x, axis: axis.name == "edp", not_summed), "experts"),
        ("gradients of experts are means over their replicas", "dp4ep2", gradient_buckets,
         "start_all_reduce", before(
             lambda x, axis: (x.div_(axis.size if axis.name == "edp" else 1), axis)), "experts"),
        ("gradients of experts are divided by the ranks that send tokens", "dp2ep2", experts.ExpertWeights,
         "__init__", after(lambda _, self, *args: self.weight.register_hook(
             lambda grad: grad / args[-1].topology.dp.size) and None), "experts"),
        ("tokens go to the experts of the next rank", "dp2ep2", expert_dispatch.Exchange, "start",
         after(lambda wait, exchange, _: lambda: _from_next_rank(wait(), exchange)), "experts"),
        ("gathered tokens' outputs return to the next rank", "dp2ep2+allgather",
         expert_dispatch.TokenReduceScatter, "start", before(
             lambda transfer, x: (transfer, x.roll(len(x) // transfer.axis.size, 0))), "experts"),
        ("sums over slices of an expert's width are means", "tp2dp2ep2+sp", expert_dispatch.Rows,
         "sums_of_tokens", after(lambda y, self, rows: y / max(1, self.num_selected // 2)), "experts"),
        ("the norm counts the experts of one rank", "dp2ep2", ParameterAxes, "acts",
         lambda original, topology: lambda self, over: original(self, over) and not (
             "ep" in self.cut_over and over.meshes["experts"].axes["ep"].rank > 0), "experts"),
        ("the balance loss is that of a microbatch", "mbs1", experts.Router, "_balance_loss",
         before(lambda self, shares, selected, is_real: (
             self, shares.flatten(0, 1).unsqueeze(1), selected.flatten(0, 1).unsqueeze(1), is_real)),
         "experts"),
        ("a router counts the rows of its slice", "tp2+sp", experts, "all_reduce",
         instead(lambda x, axis, **_: x), "experts"),
        ("a router's losses are those of its slice", "tp2+sp", experts, "reduce_from_tensor_parallel",
         instead(lambda x, tp: x), "experts"),
        ("gradients of the router are not summed", "tp2+sp", experts.Router, "__init__",
         complete_over("weight"), "experts"),
        ("experts drop tokens as if all slices were the own one", "tp2+sp", experts, "start_all_gather",
         instead(lambda x, axis: Pending(torch.cat([x] * axis.size), None)), "dropping"),
        ("an expert has a capacity for the microbatch", "mbs1", experts, "within_capacity",
         lambda original, _: lambda experts, weights, number, factor: original(
             experts.flatten(0, 1).unsqueeze(1), weights.flatten(0, 1).unsqueeze(1), number,
             factor).view_as(experts), "dropping"),
        ("gradients of the router's bias are not summed", "tp2+sp", experts.Router, "__init__",
         complete_over("bias"), "biased experts"),
        ("gradients of the projections of experts' latents are not summed", "tp2+sp",
         uncut_linear.UncutLinear, "__init__", complete_over("weight"), "deepseek"),
        ("gradients of a router's scales are not summed", "tp2+sp", layer.NormedRouter, "__init__",
         complete_over("scale", "expert_scale"), "experts beside MLPs"),
        ("each rank with a slice of an expert adds its bias", "tp2", experts.ExpertWeights, "__init__",
         after(lambda _, self, *args: setattr(self, "adds_bias", True)), "biased experts"),
        ("gradients of a shared expert's gate are not summed", "tp2+sp", uncut_linear.UncutLinear, "__init__",
         complete_over("weight"), "gated"),
        ("gradients of the gates of layers' own embeddings are not summed", "tp2+sp",
         uncut_linear.UncutLinear, "__init__", complete_over("weight"), "gemma4 e2b"),
        ("ranks after the first have a shared expert without its gate", "tp2", mlp.SharedExpert,
         "transform", lambda original, topology: mlp.MLP.transform if topology.tp.rank else original,
         "gated"),
    ],
    "random numbers": [
        ("attention dropout is keyed by the local head", "tp2", counter_random.Dropout, "attention_drop",
         before(lambda self, numbers, _: (self, numbers, 0))),
        ("dropout is keyed by the position in the slice", "tp2+sp", LayerContext, "ranges_by_samples",
         after(lambda groups, self, length, *_: [(numbers, (range(length),)) for numbers, _ in groups])),
        ("jitter is keyed by the position in the slice", "tp2+sp", counter_random, "random_words",
         before(lambda first, *others: (first - first.min(), *others)), "dropping"),
        ("dropout is keyed by the index in the microbatch", "mbs1", batch_loader.BatchLoader, "__call__",
         _numbered(lambda self, numbers: torch.arange(len(numbers)))),
        ("dropout is keyed by the samples of the rank", "dp2", batch_loader.BatchLoader, "__call__",
         _numbered(lambda self, numbers: numbers - self.sample_ranks.rank * self.micro_batch_size)),
        ("dropout is keyed by the layer's number in the stage", "pp2", TransformerStage, "build_layer",
         _local_layer),
        ("recomputation draws other masks", "tp1+full", counter_random.Dropout, "sum_for_norm", _drops_anew),
        ("slices of initial weights begin at element 0", "tp2", counter_random, "fill_normal_",
         lambda original, _: lambda *args, **more: original(*args, **{**more, "base": 0})),
        ("slices of initial columns are drawn as rows", "tp2", counter_random, "fill_normal_",
         lambda original, _: lambda *a, **m: original(*a, **{**m, "run_stride": m["run_length"]})),
        ("every stage has a seed of its own", "pp2", stage, "initialize", _own_seed),
        ("recomputation drops nothing", "tp1+full", counter_random.Dropout, "sum_for_norm", _drops_nothing),
    ],
    "pipeline": [
        ("the copies of a tied embedding are not summed", "pp2", optimizer, "sum_tied_embedding_grads",
         instead(lambda gradient, pp: None)),
        ("the copies of a tied embedding are averaged", "pp2", optimizer, "sum_tied_embedding_grads",
         after(lambda _, gradient, **more: gradient.div_(2))),
        ("embeddings for later layers have a gradient of 0", "pp2", LayerState, "message",
         before(lambda self: (self._replace(embeddings=_without_gradient(self.embeddings)),)),
         "gemma4 e2b"),
        ("later stages have the embeddings for layers in another order", "pp2", LayerState,
         "of_message", after(lambda result, *_: result._replace(
             embeddings=dict(enumerate(reversed(result.embeddings.values()))))), "gemma4 e2b"),
        ("windows follow the layer's number in the stage", "pp2", TransformerStage, "build_layer",
         _local_layer, "window"),
        ("the last stage has the labels of another microbatch", "pp2", batch_loader.BatchLoader, "__call__",
         _other_microbatch),
        ("the last stage's labels are shifted by one", "pp2", batch_loader.BatchLoader, "__call__",
         _at_last_stage(lambda each: replace(each, labels=each.labels.roll(1, 1)))),
        ("a stage reads the message before", "pp2", PointToPoint, "received", _previous_message),
        ("hidden states are rounded to fp32 between stages", "pp2", PointToPoint, "_checked",
         before(rounded(torch.float32))),
        ("gradients between stages are doubled", "pp2", executor._StageInput, "backward",
         before(lambda context, grad: (context, grad * 2.0))),
        ("the last stored weight gradient is dropped", "pp2zb", executor, "run_stored",
         before(lambda stored: (stored[:-1],))),
        ("a stored weight gradient is computed twice", "pp2zb", executor, "run_stored",
         before(lambda stored: ([*stored, *(each for each in stored if each.weight.dim() == 1)],))),
        ("a message overtakes the one before", "pp2", executor, "_launch_each", _overtaking),
    ],
    "gradient norm": [
        ("both copies of a tied embedding count", "pp2", optimizer.Optimizer, "_is_copied",
         instead(lambda self, bucket: False)),
        ("every tp rank counts what is replicated", "tp2", ParameterAxes, "acts", instead(lambda *_: True)),
        ("every replica counts its whole bucket", "dp2", optimizer.Optimizer, "_counted",
         instead(lambda self, state: slice(0, len(state.main)))),
        ("squares are summed over the replicas only", "pp2", gradient_scale, "all_reduce",
         over(lambda topology: topology.replicas)),
        ("squares are means over all ranks", "dp2", gradient_scale, "all_reduce", before(mean_first)),
        ("clipping divides the norm by the replicas", "dp2", adamw.AdamW, "_divisor",
         lambda original, topology: lambda self, norm: original(self, norm / topology.replicas.size)),
        ("cut parameters count on the first tp rank only", "tp2", ParameterAxes, "acts",
         instead(lambda self, topology: topology.tp.rank == 0)),
        ("each rank clips by the norm of its own gradients", "pp2", gradient_scale, "all_reduce",
         instead(_first)),
        ("the logged number of zeros counts a replicated parameter on each rank", "tp2", optimizer.Optimizer,
         "num_zeros", instead(lambda self: 0), "gpt",
         "The verification compares losses, norms, gradients and weights, but no other logged number."),
    ],
    "loss and divisors": [
        ("the logged loss is not summed", "dp2", global_batch, "all_reduce",
         unless(_sums("the loss"), _first)),
        ("the logged loss is a mean over replicas", "dp2", global_batch, "all_reduce", before(mean_first)),
        ("the divisor counts the rank's samples", "dp2", global_batch.GlobalBatches, "open",
         _dp(lambda divisor, size: divisor / size, "token")),
        ("the divisor counts one microbatch", "mbs1", global_batch.GlobalBatches, "open",
         before(lambda self, read, num, samples, length: (self, read, num, samples // num, length))),
        ("the order loss is divided by the rank's samples", "dp2", global_batch.GlobalBatches, "open",
         _dp(lambda divisor, size: divisor / size, "sample"), "bert"),
        ("masked tokens are counted on the rank", "dp2", global_batch, "all_reduce",
         unless(_sums("the number of tokens"), _first), "bert"),
        ("tokens with a loss are counted on the rank", "dp2", global_batch, "all_reduce",
         unless(_sums("the number of tokens"), _first), "packed"),
        ("a loss is a mean over the microbatch's tokens", "mbs1", stage.Stage, "masked_sum",
         after(lambda total, _, losses, microbatch: total * losses.numel() / microbatch.loss_mask.sum()),
         "packed"),
        ("tokens without a loss are in the loss", "dp2", stage.Stage, "masked_sum",
         before(lambda self, losses, microbatch: (self, losses, replace(microbatch, loss_mask=None))),
         "packed", SAME),
        ("the order loss is a mean over the microbatch's samples", "mbs1",
         bert_stage.BertStage, "_order_loss",
         after(lambda total, _, __, microbatch: total / len(microbatch.tokens)), "bert"),
        ("the validation loss is a mean over ranks", "dp2", global_batch, "global_losses", instead(_first),
         "gpt", "The verification does not evaluate."),
    ],
    "microbatches": [
        ("all replicas read the same samples", "dp2", batch_loader, "microbatch_samples",
         before(lambda consumed, index, size, rank, ranks: (consumed, index, size, 0, ranks))),
        ("replicas read overlapping samples", "dp2", batch_loader, "microbatch_samples",
         before(lambda consumed, index, size, rank, ranks: (consumed, index + rank, size, 0, 1))),
        ("the last microbatch repeats the one before", "dp2", batch_loader.BatchLoader, "__call__",
         before(lambda self, consumed, i: (self, consumed, min(i, 8 // self.micro_batch_size
                                                               // self.sample_ranks.size - 2)))),
        ("a microbatch overwrites the gradient before", "dp2", Buffer, "claim",
         instead(_only_last_microbatch)),
        ("gradients keep the sum of the iteration before", "dp2", Buffer, "begin",
         lambda original, _: lambda self: (original(self), self.stale.clear())[0]),
    ],
    "Muon": [
        ("a rank orthogonalizes its slice of a matrix", "tp2", muon, "orthogonalize",
         lambda original, topology: lambda matrix, *more: torch.cat(
             [original(part, *more) for part in matrix.chunk(topology.tp.size)]), "muon"),
        ("a rank orthogonalizes its ZeRO shard of a matrix", "dp2+zero2", muon, "orthogonalize",
         lambda original, topology: lambda matrix, *more: torch.cat(
             [original(part, *more) for part in matrix.chunk(topology.replicas.size)]), "muon"),
        ("a fused weight of which a rank has a slice is one matrix", "tp2", muon, "matrices_of",
         lambda original, topology: lambda spec, splits_fused=True: original(
             spec, splits_fused=splits_fused and topology.tp.size == 1), "muon"),
        ("an update has the scale of a slice", "tp2", muon, "SCALES", _of_slices, "muon"),
        ("other ranks' momentum is not exchanged", "dp2+zero2", muon.MatrixExchange, "gather",
         after(lambda matrices, exchange, _: _own_parts(exchange, matrices)), "muon"),
        ("the last matrix of a rank is not orthogonalized", "dp2", muon.MatrixExchange, "scatter",
         before(_last_changed(lambda matrix: torch.zeros_like(matrix))), "muon"),
        ("the last matrix of a rank is orthogonalized twice", "dp2", muon.MatrixExchange,
         "scatter", before(_last_changed(lambda matrix: muon.orthogonalize(matrix, "quintic", 5))), "muon"),
        ("ranks share the matrices out in different ways", "dp2", muon, "share_out",
         lambda original, topology: lambda costs, count: (
             original(costs[::-1], count)[::-1] if topology.rank else original(costs, count)), "muon"),
        ("the ranks of other replicas send their elements too", "dp2", muon.MatrixExchange,
         "__init__", after(lambda _, exchange, *more: setattr(
             exchange, "_is_source", [True] * len(exchange._is_source))), "muon"),
    ],
    "newer models": [
        ("gradients of the norms of queries and keys are not summed", "tp2", RMSNorm, "__init__",
         complete_over("weight"), "qwen"),
        ("gradients of a norm over all heads are not summed", "tp2", norm.AllHeadsRMSNorm, "__init__",
         complete_over("weight"), "olmo"),
        ("a norm over all heads uses the rank's heads alone", "tp2", norm, "reduce_from_tensor_parallel",
         instead(_first), "olmo"),
        ("the gradient of a norm over all heads is that of the rank's heads", "tp2", norm,
         "copy_to_tensor_parallel", instead(_first), "olmo"),
        ("a rank's queries, keys and values have the bias of another rank", "tp2",
         parameter_spec.ParameterSpec, "box", after(_other_vector), "qwen"),
        ("rotary frequencies are scaled on the first stage only", "pp2", positions, "SCALINGS",
         lambda table, topology: table if topology.pp.is_first else dict.fromkeys(table, table["none"]),
         "qwen"),
        ("rotary frequencies are scaled by the inverse factor", "tp2", positions, "SCALINGS",
         instead({"linear": lambda frequencies, base, config: (
             frequencies * config.rope_scaling_factor, 1.0)}), "qwen", SAME),
        ("a rank rotates its share of the rotated part", "tp2", positions.Rotary, "__init__",
         lambda original, topology: lambda self, spec, *others: original(
             self, replace(spec, size=spec.size // topology.tp.size), *others),
         "qwen"),
        ("rotary positions continue over the replicas' samples", "dp2", positions.Rotary, "compute",
         lambda original, topology: lambda self, ids: original(
             self, ids * (1 + topology.replicas.rank)), "qwen"),
        ("a rank has the sinks of another rank's heads", "tp2", parameter_spec.ParameterSpec, "box",
         after(_other_vector), "gpt-oss"),
        ("ranks of a shared group take queries for gates", "tp4", attention.Attention, "_split_shared_group",
         after(lambda heads, *_: (heads[1], heads[0], *heads[2:])), "gpt-oss"),
        ("a rank has the decays of another rank's heads (A_log)", "tp2", parameter_spec.ParameterSpec, "box",
         _other_heads(0.0), "hybrid"),
        ("a rank has the steps of another rank's heads (dt_bias)", "tp2", parameter_spec.ParameterSpec, "box",
         _other_heads(1.0), "hybrid"),
        ("gradients of a recurrence's norm are not summed", "tp2", gated_delta_net.GatedNorm, "__init__",
         complete_over("weight"), "hybrid"),
        ("states of later stages go on after a document's end", "pp2", gated_delta_net, "chunked_recurrence",
         _on_later_stages(lambda q, k, v, decay, rate, starts, state: (
             q, k, v, decay, rate, None, state)), "hybrid"),
        ("convolutions of later stages see the document before", "pp2", recurrent_mixer.ShortConvolution,
         "forward", _on_later_stages(lambda self, x, starts, before: (self, x, None, before)), "hybrid"),
        ("slices recur with the convolution of the first heads", "cp2", core.HeadExchange, "own",
         lambda original, _: lambda self, each: (
             original(self, each) if each.dim() == 1 else each.chunk(self.ranks.size)[0]), "hybrid"),
        ("tokens of zigzag slices recur in the order of the ranks", "cp2+p2p", HeldPositions,
         "in_position_order",
         instead(lambda self, x: x), "hybrid"),
        ("the z-loss is of the sums of a rank's logits", "tp2", stage, "losses_and_log_sums",
         _with_own_log_sums, "gpt-oss"),
        ("factors of queries continue over the replicas' samples", "dp2", positions.QueryScale, "compute",
         lambda original, topology: lambda self, ids: original(
             self, ids * (1 + topology.replicas.rank)), "gpt-oss"),
        ("sinks have the gradient of the first replica's samples", "dp2", kernels, "parameter_gradient",
         lambda original, topology: lambda *args: original(*args) * float(topology.replicas.is_first),
         "gpt-oss"),
        ("the gradient of sinks is a mean over the microbatch's samples", "mbs1", kernels,
         "parameter_gradient", after(lambda gradient, grad, *_: gradient / len(grad)), "gpt-oss"),
        ("the gradient of the shared part of keys is that of the rank's heads", "tp2", attention,
         "copy_to_tensor_parallel", instead(_first), "latent"),
        ("a rank's tokens have the shared part of keys of another rank's", "tp2+sp", attention,
         "gather_from_sequence_parallel", after(lambda whole, *_: whole.roll(len(whole) // 2, 0)), "latent"),
        ("gradients of latents' projections are not summed", "tp2+sp", uncut_linear.UncutLinear, "__init__",
         complete_over("weight"), "latent"),
        ("each rank's heads have the values of other heads", "tp2", attention.LatentAttention,
         "rotated", after(lambda heads, self, *_: (*heads[:2], heads[2].roll(self.tp.rank, 2))), "latent"),
        ("tokens of each expert are those of the replica", "dp2", post_step_hooks, "all_reduce",
         instead(lambda x, *_, **more: x), "deepseek"),
        ("a recomputed layer gives no gradient to keys and values that it shares", "tp1+full", recompute,
         "recompute", before(lambda function, x, *keys: (function, x, *(each.detach() for each in keys))),
         "gemma4"),
        ("ranks after the first rotate layers without a window by the windows' base", "tp2", core,
         "Rotary", lambda original, topology: lambda spec, config, context: original(
             replace(spec, base=100.0) if topology.tp.rank and spec.base == config.rotary_base else spec,
             config, context), "gemma4"),
        ("ranks after the first use keys as values after their norm", "tp2", attention.Attention,
         "_complete_keys_as_values", lambda original, topology: (
             _complete_normed_keys if topology.tp.rank else original), "gemma4"),
        ("keys are used as values after their norm", "tp2", attention.Attention, "_complete_keys_as_values",
         instead(_complete_normed_keys), "gemma4", SAME),
        ("gradients of the factors of layers' outputs are not summed", "tp2+sp", layer.OutputScale,
         "__init__", complete_over("weight"), "gemma4"),
        ("an output's norm is that of a part of the sum", "tp2", Collectives, "summed_forward",
         instead(lambda self, x, *rest: _own(self, self.gemm.forward(x, *rest)).tensor), "olmo"),
        ("gradients of an output's norm are not summed", "tp2+sp", RMSNorm, "__init__",
         complete_over("weight"), "olmo"),
        ("of parallel blocks, attention alone sums its input gradient", "tp2", Collectives,
         "start_summed_input_gradient",
         lambda original, _: lambda self, grad, weight, *rest: (
             _own(self, self.gemm.input_gradient(grad, weight, *rest))
             if weight.shape[0] == 160 // self.tp.size and self.tp.size > 1
             else original(self, grad, weight, *rest)), "neox"),
        ("parallel blocks add their input once on each rank", "tp2", layer.TransformerLayer, "forward",
         lambda original, topology: lambda self, x, *rest: (
             original(self, x, *rest) + x * (topology.tp.size - 1)), "neox"),
        ("stages between the first and the last have norms after the residual connections", "pp4",
         TransformerStage, "build_layer", _at_middle(after(_as_post_norm)), "olmo"),
    ],
    "Mamba-2": [
        ("a rank's heads decay at the rates of other heads", "tp2", mamba.Mamba, "recur",
         _with_heads("A_log", lambda each, topology: each.roll(topology.tp.rank)), "nemotron-h"),
        ("decay rates have the gradient of the first replica's samples", "dp2", mamba.Mamba, "recur",
         _with_heads("A_log", lambda each, topology: _gradient_times(
             each, float(topology.replicas.is_first))), "nemotron-h"),
        ("a rank's heads have the time steps of other heads", "tp2", mamba.Mamba, "recur",
         _with_heads("dt_bias", lambda each, topology: each.roll(topology.tp.rank)), "nemotron-h"),
        ("time-step biases have the gradient of the first replica's samples", "dp2", mamba.Mamba, "recur",
         _with_heads("dt_bias", lambda each, topology: _gradient_times(
             each, float(topology.replicas.is_first))), "nemotron-h"),
        ("every rank adds the inputs of all heads", "tp2", mamba.Mamba, "recur",
         _with_heads("D", lambda each, topology: each * topology.tp.size), "nemotron-h"),
        ("the gated norm is over all groups of a rank", "tp2", mamba, "gated_rms_norm",
         before(lambda y, gate, weight, *rest: (
             y.flatten(-2), gate.flatten(-2), weight.flatten(), *rest)), "nemotron-h"),
        ("decay rates have the gradient of the first slice's heads", "cp2", mamba.Mamba, "recur",
         _with_heads("A_log", lambda each, topology: _gradient_times(
             each, float(topology.positions.index == 0))), "nemotron-h"),
        ("skips of Mamba-2 have their gradient once for each slice", "cp2", mamba.Mamba, "recur",
         _with_heads("D", lambda each, topology: _gradient_times(
             each, float(topology.positions.count))), "nemotron-h"),
        ("states of Mamba-2 on later stages go on after a document's end", "pp2", mamba, "chunked_recurrence",
         _on_later_stages(lambda q, k, v, decay, rate, starts, state: (
             q, k, v, decay, rate, None, state)), "nemotron-h"),
    ],
    "multi-token prediction": [
        ("the last stage's gradient of the word embedding is dropped", "pp2", optimizer,
         "sum_tied_embedding_grads", _dropped_on_last, "later"),
        ("later tokens are counted on the rank", "dp2", global_batch, "all_reduce",
         unless(_sums("the number of later-1 tokens", "the number of later-2 tokens"), _first), "later"),
        ("the loss of a later token is a mean over the microbatch's samples", "mbs1",
         multi_token_prediction.MultiTokenPrediction, "terms", after(_mean_over_samples), "later"),
        ("later tokens end with the rank's slice", "cp2", Microbatch, "cut", after(_ends_with_slice),
         "later"),
        ("the gradient of the weight that joins two states is not summed", "tp2+sp",
         multi_token_prediction.JoiningLinear, "__init__", complete_over("weight"), "later"),
        ("the loss of later tokens is divided by their number twice", "tp2",
         multi_token_prediction.MultiTokenPrediction, "__init__",
         after(lambda _, modules, *args: setattr(modules, "scale", modules.scale / len(modules))), "later",
         SAME),
        ("later labels have the mask of the next ones", "tp2", Microbatch, "with_later_tokens",
         after(_with_the_next_mask), "later", SAME),
    ],
    "recomputation": [
        ("saved slices of a layer's input are gathered in another order", "tp2+full", recompute_region,
         "start_all_gather", after(lambda pending, *_: _rolled(pending, halves=True)), "sliced"),
        ("saved slices are gathered over the replicas", "tp2dp2+full", recompute_region, "start_all_gather",
         over(lambda topology: topology.replicas), "sliced"),
        ("every rank saves the first slice of a layer's input", "tp2+full", recompute, "keep_slice",
         before(lambda tp: (type("First", (), {"size": tp.size, "rank": 0, "__getattr__": (
             lambda self, name: getattr(tp, name))})(),)), "sliced"),
    ],
    "averages": [
        ("an average counts the last checkpoint twice", "tp2", average, "average", instead(lambda *_: None),
         "gpt", "The verification averages no checkpoints: a test of the tool compares known means."),
    ],
    "update": [
        ("the learning rate grows with the replicas", "dp2", optimizer.Optimizer, "step", _rate_by_replicas),
        ("biases have weight decay", "tp1+offload", adamw.AdamW, "_update",
         before(lambda self, pieces, *rest: (self, _with_decay(pieces, 0.1), *rest))),
        ("the bias correction is one step late", "tp1+offload", adamw.AdamW, "_update",
         before(lambda self, updates, number, *rest: (self, updates, number + 1, *rest))),
        ("later stages have the learning rate of a later step", "pp2", optimizer.Optimizer, "step",
         _per_rank_rate),
    ],
    "stages between the first and the last": [
        ("they have no tokens, with windows", "pp4", batch_loader.BatchLoader, "__call__",
         _at_middle(after(_without_tokens)), "window"),
        ("they have no tokens, with ALiBi", "pp4", batch_loader.BatchLoader, "__call__",
         _at_middle(after(_without_tokens)), "bloom"),
        ("they do not know the documents", "pp4", batch_loader.BatchLoader, "__call__",
         _at_middle(after(lambda microbatch, *_: replace(
             microbatch, document_ids=torch.zeros_like(microbatch.document_ids)))), "packed"),
        ("their dropout is keyed by the samples of another microbatch", "pp4", batch_loader.BatchLoader,
         "__call__", _at_middle(lambda original, _: lambda self, consumed, index: original(
             self, consumed, index ^ 1))),
        ("they double the gradients that they pass on", "pp4", executor._StageInput, "backward",
         _at_middle(before(lambda context, grad: (context, grad * 2.0)))),
        ("their gradients are not counted in the norm", "pp4", optimizer.Optimizer, "_counted",
         _at_middle(instead(lambda self, state: slice(0, 0)))),
        ("they skip the update", "pp4", optimizer.Optimizer, "step", _at_middle(instead(lambda *_: None))),
        ("they skip their layers", "pp4", TransformerStage, "run_group",
         _at_middle(instead(lambda self, group, layers, state, *_: state))),
        ("two of them exchange their layers", "pp4", model_chunks, "layers_of_stages", after(_exchanged)),
    ],
    "chunks of a rank": [
        ("the last chunk has another microbatch", "pp2v2", executor.ScheduleRun, "_microbatch",
         _in_chunks(lambda original, self, action: (
             original(self, action), self._load(action.microbatch ^ 1))[1])),
        ("the last chunk scales its losses twice", "pp2v2", executor, "_COMPUTE",
         _computing(ActionKind.BACKWARD, _in_chunks(_with_double_losses))),
        ("the tip of the V reads the output before", "pp2zbv", executor.ScheduleRun, "_input",
         _previous_local_input),
        ("weight gradients of the second chunk are not computed", "pp2zbv", executor, "_COMPUTE",
         _computing(ActionKind.BACKWARD_WEIGHT, _in_chunks(lambda original, self, action: self._stored.pop(
             (action.microbatch, action.chunk)) and None))),
        ("a rank with the first and the last stage has two copies of a tied embedding", "pp2zbv",
         TransformerStage, "shared_modules", instead(lambda self: {})),
    ],
    "loss scale": [
        ("the last stage has the scale of the next step", "pp2", gradient_scale.LossScaler, "scale",
         _scale_of(lambda topology: topology.pp.size > 1 and topology.pp.is_last), "fp16"),
        ("one replica has the scale of the next step", "dp2", gradient_scale.LossScaler, "scale",
         _scale_of(lambda topology: topology.replicas.rank == 1), "fp16"),
        ("gradients are clipped before they are unscaled", "dp2", adamw.AdamW, "_divisor",
         lambda original, _: lambda self, norm: original(self, norm * self.scaler.scale), "fp16", SAME),
        ("the update unscales with the scale of the step before", "dp2", adamw.AdamW, "_divisor",
         lambda original, _: lambda self, norm: original(self, norm) * 2.0, "fp16", SAME),
    ],
    "offload": [
        ("half of a storage is copied to the host", "tp1+offload", HostBuffers, "copy_to_host",
         after(lambda buffer, *_: _half_copied(buffer))),
        ("a layer gets the activations before", "tp1+offload", HostBuffers, "copy_to_device", _previous_copy),
        ("views of a copied storage begin at its start", "tp1+offload", activation_offload, "_Saved",
         before(lambda *args: (*args[:4], 0))),
        ("offloaded weights have no weight decay", "tp1+offload", adamw, "OffloadedUpdate",
         before(lambda gradient, weight, rate, decay, epsilon: (gradient, weight, rate, 0.0, epsilon))),
        ("offloaded states have the learning rate of another step", "tp1+offload", adamw, "OffloadedUpdate",
         before(lambda gradient, weight, rate, *rest: (gradient, weight, 0.5 * rate, *rest))),
    ],
    "buffers": [
        ("every rank holds the first slice of a buffer", "tp2", own_stage, "new_buffer",
         lambda original, _: lambda full, context, cut: original(
             full[: len(full) // context.tp.size].repeat(context.tp.size), context, cut), "buffers"),
        ("a buffer is not summed over replicas", "dp2", own_stage, "all_reduce", instead(_first), "buffers"),
        ("a recomputed forward counts again in a buffer", "tp1+full", own_stage, "is_recomputed",
         instead(lambda: False), "buffers"),
    ],
}  # fmt: skip
"""By class: name, layout, owner, attribute, change, and optionally the model and why no layout shows it."""


OF_SAVES: dict[str, list[tuple[Any, ...]]] = {
    "evaluation": [
        ("tokens of an evaluation are counted on the rank", "dp2", global_batch, "LossMasks",
         instead(_OwnCounts)),
        ("an evaluation counts the tokens with a loss of one microbatch", "mbs1", global_batch, "LossMasks",
         instead(_FirstCounts)),
    ],
    "checkpoints": [
        ("a checkpoint has experts in the places of the next rank's", "dp2ep2", ParameterRange, "of",
         _places_of_next("ep"), "experts"),
        ("a checkpoint has slices of experts in the places of the next rank's", "tp2dp2ep2etp2+sp",
         ParameterRange, "of", _places_of_next("etp"), "experts"),
        ("a checkpoint has slices of tp in the places of the next rank's", "tp2", ParameterRange, "of",
         _places_of_next("tp")),
        ("a checkpoint has no averages of weights", "dp2", trainer.Trainer, "saved_tensors",
         after(_without_averages), "averaged"),
        ("a checkpoint's moments are not loaded", "dp2", trainer, "load_checkpoint",
         _loading(_without_moments)),
        ("the number of updates is reset in a resume", "dp2", trainer, "load_checkpoint",
         _loading(_reset("optimizer.num_steps"))),
        ("the biases of experts are reset in a resume", "dp2ep2", trainer, "load_checkpoint",
         _loading(_reset("expert_bias")), "deepseek"),
        ("a resume reads data one sample late", "dp2", load, "plan_load", after(_one_sample_late)),
    ],
}  # fmt: skip
"""As `ROWS`: errors that a quick verification does not show, in evaluations, saves and resumes."""


def _rolled(pending: Pending, halves: bool = False) -> Pending:
    """Return a gathered tensor with the first half of it behind the second one."""
    whole = pending.wait()
    return Pending(whole.roll(len(whole) // 2, 0), None) if halves else _swap_in_place(whole)


def _swap_in_place(whole: Tensor) -> Pending:
    whole.copy_(whole.roll(len(whole) // 2, 0).clone())
    return Pending(whole, None)


def _blind_to_the_slice_before(step: Any, runs: Sequence[DocumentRun]) -> Any:
    """Return a step of a ring without its blocks whose keys end where the queries begin."""
    return step._replace(
        blocks=tuple((i, j) for i, j in step.blocks if step.positions[j].stop != runs[i].positions.start)
    )


def _of_one_document(runs: Sequence[DocumentRun]) -> list[DocumentRun]:
    """Return runs as if the whole sample were one document."""
    return [run._replace(document=range(0)) for run in runs]


def _own(collectives: Any, x: Tensor) -> Pending:
    """Return a rank's part of a sum that is missing."""
    if collectives.sequence_parallel:
        x = x.chunk(collectives.tp.size)[collectives.tp.rank].clone()
    return Pending(x, None)


CATALOGUE = tuple(
    InjectedError(name, kind, layout, owner, attribute, change, *more, is_of_saves=rows_of is OF_SAVES)
    for rows_of in (ROWS, OF_SAVES)
    for kind, rows in rows_of.items()
    for name, layout, owner, attribute, change, *more in rows
)

CONTROL = InjectedError(
    "nothing", "control", "tp2", optimizer.Optimizer, "step", lambda original, _: original
)
"""Changes nothing: a verification must find no difference."""
