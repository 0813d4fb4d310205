"""Run functions without keeping what they save for backward, and run them again when backward needs it.

(Chen et al. 2016.) A recomputed function runs under hooks that replace each tensor it saves for backward by a
number. When backward unpacks the first number, the function runs again, and the hooks collect all its saved
tensors. Gradients of parameters, their hooks and the weight-gradient store therefore work as without
recomputation. The gradients have the same bits: dropout is counter-based, so there is no generator state to
restore, and tokens go to the experts that forward selected (`KeptChoices`).

Modules declare with these functions what --recompute-modules recomputes, in their `recompute_parts`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from megalite.distributed.axis import Axis
from megalite.distributed.collectives import start_all_gather
from megalite.kernels import ResidualSum
from megalite.model.routing_record import KeptChoices
from megalite.utils.torch_private import storage_number
from megalite.utils.wrapping import wrap

Keep = Callable[[Tensor], Callable[[], Tensor]]
"""Function that keeps a tensor for backward, and returns a function that returns the tensor."""


class _Keep(torch.autograd.Function):
    """Saves a tensor for backward like any operator; the result holds it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return anchor.view_as(anchor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        raise AssertionError("it has no gradient")


def keep_whole(x: Tensor) -> Callable[[], Tensor]:
    """Keep the tensor.

    Autograd saves it, so the hooks around this call apply, such as hooks that offload activations.
    """
    if not torch.is_grad_enabled():
        return x.detach
    anchor = x.new_empty(0, requires_grad=True)  # makes autograd save x.detach(); x would be its own leaf
    kept = _Keep.apply(x.detach(), anchor)  # before torch 2.13 the node alone does not keep saved tensors
    return lambda: kept.grad_fn.saved_tensors[0]


def keep_slice(tp: Axis) -> Keep:
    """Keep this rank's slice of a tensor that is replicated over tp, and all-gather the slices in backward.

    The first dim, the sequence, is cut. Its size must be divisible by the axis' size.
    """
    if tp.size == 1:
        return keep_whole

    def keep(x: Tensor) -> Callable[[], Tensor]:
        own_slice = keep_whole(x.detach().chunk(tp.size)[tp.rank].clone())
        return lambda: start_all_gather(own_slice(), tp).wait()

    return keep


def recompute(function: Callable[..., Any], *inputs: Tensor, keep: Keep = keep_whole) -> Any:
    """Return ``function(*inputs)``, and only keep the inputs for backward.

    Args:
        function: function to recompute. Other tensors that it uses must be parameters, or need no gradient.
        keep: how the first input is kept; the others are kept whole.
    """
    if torch.compiler.is_compiling():
        return _traced(function, *inputs)
    return _Region(function, inputs, keep).run(*inputs)


def _traced(function: Callable[..., Any], *inputs: Tensor) -> Any:
    """Mark a call whose results a graph of torch.compile recomputes in backward."""
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)


def recompute_core(core: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a mixer's core that keeps its floating-point tensors alone, for `wrap`."""

    def run(*arguments: Any) -> Tensor:
        kept = {
            number: each
            for number, each in enumerate(arguments)
            if isinstance(each, Tensor) and each.is_floating_point()
        }
        # The closure must not hold the kept tensors: their storages may be offloaded or released.
        others, numbers = [None if number in kept else each for number, each in enumerate(arguments)], [*kept]

        def core_with(*tensors: Tensor) -> Tensor:
            again = [*others]
            for number, each in zip(numbers, tensors, strict=True):
                again[number] = each
            return core(*again)

        result: Tensor = recompute(core_with, *kept.values())
        return result

    return run


def recompute_first(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that keeps its first argument alone, for `wrap`; the others need no gradient."""
    return lambda x, *others: recompute(_with_last(function, others), x)


def recompute_output(
    producer: nn.Module,
    produces: str,
    consumer: nn.Module,
    consumes: str,
    *,
    recompute_consumer: bool = False,
) -> None:
    """Wrap a method of each module so that the tensor passed between them is not kept.

    Use it for cheap functions with large outputs (norms and activations) whose consumer saves its input.
    Backward runs the producer once more, for the consumer's gradients and for its own. If the producer has
    several outputs, the first is the consumer's input. Further arguments of the consumer need no gradient.

    Args:
        produces: name of the producer's method, which takes one tensor; declared, like the consumer's.
        consumes: name of the consumer's method, which takes the producer's output.
        recompute_consumer: also recompute the consumer, from the recomputed output.
    """
    current: list[_Region] = []  # the producer's region, from its call to the consumer's call

    def produce_dropped(produce: Callable[..., Any], x: Tensor | ResidualSum) -> Any:
        if isinstance(x, ResidualSum):
            x = x.compute()  # the region keeps the sum, not its operands
        if torch.compiler.is_compiling():
            return _traced(produce, x)
        current[:] = [_Region(produce, (x,), keep_whole)]
        return current[0].run(x)

    def consume_dropped(consume: Callable[..., Any], y: Tensor, *others: Any) -> Any:
        consume = _with_last(consume, others)
        if torch.compiler.is_compiling():
            # torch.compile keeps a tensor that passes from one marked call to the next, but not its view.
            return _traced(consume, y.view_as(y)) if recompute_consumer else consume(y)
        if not current:  # the producer ran in a graph, and the consumer is called between graphs
            return recompute(consume, y) if recompute_consumer else consume(y)
        dropped = _DroppedOutput(current.pop(), y)
        if recompute_consumer:
            return recompute(consume, y, keep=lambda y: partial(dropped.unpack, dropped.pack(y)))
        with saved_tensors_hooks(dropped.pack, dropped.unpack):
            return consume(y)

    wrap(producer, produces, lambda produce: partial(produce_dropped, produce))
    wrap(consumer, consumes, lambda consume: partial(consume_dropped, consume))


def _with_last(function: Callable[..., Any], arguments: Sequence[Any]) -> Callable[..., Any]:
    """Return the function of one tensor that also passes these arguments."""
    return (lambda x: function(x, *arguments)) if arguments else function


class _AllCollected(Exception):
    """Raised to stop the second run of a function: it has saved everything that backward needs."""


class _Region:
    """Runs a function without saving tensors, and runs it again when backward needs the first of them."""

    def __init__(self, function: Callable[..., Any], inputs: tuple[Tensor, ...], keep: Keep) -> None:
        self.function = function
        keeps = chain((keep,), repeat(keep_whole))
        self.inputs = [(keep(x), x.requires_grad) for keep, x in zip(keeps, inputs, strict=False)]
        self.num_saved = 0
        self.collected: list[Tensor | None] = []
        self.second_output: Tensor | None = None
        self.choices = KeptChoices()

    def run(self, *inputs: Tensor) -> Any:
        with self.choices.first_run(), saved_tensors_hooks(self._pack, self._unpack):
            return self.function(*inputs)

    def output(self) -> Tensor:
        """Return the function's first output from a second run."""
        if self.second_output is None:
            self._run_again(to_the_end=True)
            assert self.second_output is not None
        return self.second_output

    def _pack(self, tensor: Tensor) -> int | Tensor:
        if _is_input(tensor):
            return tensor
        self.num_saved += 1
        return self.num_saved - 1

    def _unpack(self, packed: int | Tensor) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if not self.collected:
            self._run_again(to_the_end=False)
        tensor, self.collected[packed] = self.collected[packed], None
        assert tensor is not None, "a second backward through a recomputed region"
        return tensor

    def _run_again(self, to_the_end: bool) -> None:
        """Run the function again, `to_the_end` or until its last saved tensor."""

        def collect(tensor: Tensor) -> None:
            if _is_input(tensor):
                return
            self.collected.append(tensor.detach())
            if len(self.collected) == self.num_saved and not to_the_end:
                raise _AllCollected

        inputs = [kept().detach().requires_grad_(requires_grad) for kept, requires_grad in self.inputs]
        hooks = saved_tensors_hooks(collect, _never)
        with torch.enable_grad(), self.choices.second_run(), hooks, suppress(_AllCollected):
            self.second_output = _first(self.function(*inputs)).detach()
        assert len(self.collected) == self.num_saved, "the second run saved other tensors than the first"


class _DroppedOutput:
    """Replaces a region's output among its consumer's saved tensors, identified by size and strides."""

    def __init__(self, region: _Region, y: Tensor) -> None:
        self.region = region
        self.storage = storage_number(y.untyped_storage())

    def pack(self, tensor: Tensor) -> Any:
        if storage_number(tensor.untyped_storage()) != self.storage:
            return tensor.detach()
        return tensor.size(), tensor.stride(), tensor.storage_offset()

    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        return self.region.output().as_strided(*packed)


def _first(outputs: Tensor | tuple[Any, ...]) -> Any:
    return outputs if isinstance(outputs, Tensor) else outputs[0]


def _is_input(tensor: Tensor) -> bool:
    """Return whether a saved tensor is the microbatch's own: sample numbers, which dropout saves.

    They are kept, so the second run need not collect them and ends before a layer's last collective.
    """
    return tensor.dtype == torch.int64


def _never(_: None) -> Tensor:
    raise AssertionError("the second run has no backward of its own")
