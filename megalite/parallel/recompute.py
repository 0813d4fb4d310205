"""Activations that backward computes again instead of keeping (Chen et al. 2016; Korthikanti et al. 2022).

Autograd's saved tensors are replaced by their number; the first of them that backward needs runs the function
again and gives all of them. So a parameter's gradient, its hooks, and a weight gradient that is put off come
about as ever, and bitwise the same: dropout is by counter, and has no state to restore.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from megalite.config import RecomputeConfig
from megalite.parallel.collectives import start_gather
from megalite.parallel.shard import Placement
from megalite.topology import Axis

Y = TypeVar("Y", Tensor, tuple[Tensor, Tensor])
Z = TypeVar("Z", Tensor, tuple[Tensor, Tensor])
Layer = Callable[[Tensor], Tensor]
"""Computes an activation from another; what else it needs (parameters, sample numbers) it holds itself."""
Keep = Callable[[Tensor], Callable[[], Tensor]]
"""Takes a tensor, and gives what returns it later."""


def keep_whole(x: Tensor) -> Callable[[], Tensor]:
    """Keeps the tensor itself."""
    kept = x.detach()
    return lambda: kept


def keep_slice(tp: Axis) -> Keep:
    """Keeps this rank's slice of a tensor that all ranks have, and gathers the slices when it is needed.

    The first dim, the sequence, is cut, and must be divisible by the axis' size.
    """
    if tp.size == 1:
        return keep_whole

    def keep(x: Tensor) -> Callable[[], Tensor]:
        mine = x.detach().chunk(tp.size)[tp.rank].clone()
        return lambda: start_gather(mine, tp).wait()

    return keep


def recompute(function: Callable[..., Y], *inputs: Tensor, keep: Keep = keep_whole) -> Y:
    """``function(*inputs)``, of which the inputs alone are kept for backward.

    Args:
        keep: how each of them is.
    """
    if torch.compiler.is_compiling():
        return _traced(function, *inputs)
    region = _Region(function, inputs, keep)
    with saved_tensors_hooks(region.pack, region.unpack):
        return function(*inputs)


def _traced(function: Callable[..., Y], *inputs: Tensor) -> Y:
    """A call whose results torch.compile's graph does not keep for its backward: it computes them again."""
    y: Y = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
    return y


def compute(function: Callable[..., Y], *inputs: Tensor) -> Y:
    """``function(*inputs)``: what stands in the place of `recompute` where autograd keeps what it likes."""
    return function(*inputs)


def recompute_between(function: Callable[[Tensor], Y], x: Tensor, consumer: Callable[[Y], Z]) -> Z:
    """``consumer(function(x))``, keeping nothing but `x` of `function`: not its output for `consumer` either.

    For cheap functions with large outputs that a product saves as its input: norms and activations. Of two
    outputs that is the first. Backward runs `function` once, for the consumer's gradients and for its own.
    """
    if torch.compiler.is_compiling():
        return consumer(_traced(function, x))
    region = _Region(function, (x,), keep_whole)
    with saved_tensors_hooks(region.pack, region.unpack):
        y = function(x)
    output = _Output(region, _first(y))
    with saved_tensors_hooks(output.pack, output.unpack):
        return consumer(y)


def compute_between(function: Callable[[Tensor], Y], x: Tensor, consumer: Callable[[Y], Z]) -> Z:
    """``consumer(function(x))``: what stands in the place of `recompute_between` likewise."""
    return consumer(function(x))


class RecomputedLayers:
    """Runs a stage's layers one after the other, in the groups in which backward computes them again."""

    def __init__(self, config: RecomputeConfig, place: Placement, num_layers: int) -> None:
        """Plans the groups.

        Args:
            config: which layers are recomputed, and whether their saved inputs are sliced over tp.
            place: says whether sequence parallelism has sliced them already.
            num_layers: of the stage.
        """
        is_sliced = config.distribute_saved_activations and not place.sequence_parallel
        keep = keep_slice(place.tp) if is_sliced else keep_whole
        again = partial(recompute, keep=keep)
        self.groups = [
            (group, again if is_again else compute) for group, is_again in config.groups(num_layers)
        ]

    def __call__(self, layers: Sequence[Layer], x: Tensor) -> Tensor:
        """``[s, b, h]`` -> ``[s, b, h]``."""
        for group, run in self.groups:
            x = run(partial(_chain, [layers[place] for place in group]), x)
        return x


def _chain(layers: Sequence[Layer], x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


class _Enough(Exception):
    """Backward has all that it needs: the rest of the function is not run."""


class _Region:
    """What a function saves for backward, by number.

    Attributes:
        output: of the second run, where one asked for it.
    """

    def __init__(self, function: Callable[..., Any], inputs: tuple[Tensor, ...], keep: Keep) -> None:
        self.function = function
        self.inputs = [(keep(x), x.requires_grad) for x in inputs]
        self.num_saved = 0
        self.again: list[Tensor | None] = []
        self.output: Tensor | None = None

    def pack(self, tensor: Tensor) -> int | Tensor:
        if _is_given(tensor):
            return tensor
        self.num_saved += 1
        return self.num_saved - 1

    def unpack(self, packed: int | Tensor) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if not self.again:
            self.run_again(whole=False)
        tensor, self.again[packed] = self.again[packed], None
        assert tensor is not None, "a second backward through a recomputed region"
        return tensor

    def run_again(self, whole: bool) -> None:
        """Runs the function as far as its last saved tensor, or `whole`."""

        def collect(tensor: Tensor) -> None:
            if _is_given(tensor):
                return
            self.again.append(tensor.detach())
            if len(self.again) == self.num_saved and not whole:
                raise _Enough

        inputs = [x().detach().requires_grad_(requires_grad) for x, requires_grad in self.inputs]
        with torch.enable_grad(), saved_tensors_hooks(collect, _never), suppress(_Enough):
            self.output = _first(self.function(*inputs)).detach()
        assert len(self.again) == self.num_saved, "the second run saved other tensors than the first"


class _Output:
    """A region's output as its consumer saves it: by size and strides, whatever view of it that is."""

    def __init__(self, region: _Region, y: Tensor) -> None:
        self.region = region
        self.storage = y.untyped_storage()._cdata  # which one it is; data_ptr() is 0 for all meta tensors

    def pack(self, tensor: Tensor) -> Any:
        if tensor.untyped_storage()._cdata != self.storage:
            return tensor.detach()
        return tensor.size(), tensor.stride(), tensor.storage_offset()

    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if self.region.output is None:
            self.region.run_again(whole=True)
            assert self.region.output is not None
        return self.region.output.as_strided(*packed)


def _first(outputs: Tensor | tuple[Tensor, ...]) -> Tensor:
    return outputs if isinstance(outputs, Tensor) else outputs[0]


def _is_given(tensor: Tensor) -> bool:
    """Whether a saved tensor is no activation: sample numbers, which dropout saves, are the microbatch's own.

    Not waiting for them, a second run of a layer ends before the last collective, whose result nothing saves.
    """
    return tensor.dtype == torch.int64


def _never(_: None) -> Tensor:
    raise AssertionError("the second run has no backward of its own")
