"""Time the GEMMs that compute GELU or the gradient of a bias against separate kernels, and choose.

A GEMM with such an epilogue is not always as fast as one without, so both forms run at the start on the run's
shapes. Their results differ in rounding, so all ranks use one choice for a shape.

Shapes: n tokens of a microbatch, i and o in and out features of a linear layer on one rank.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config import Config
from megalite.distributed.topology import Topology
from megalite.kernels import (
    add_weight_and_bias_gradient_,
    add_weight_gradient_,
    gelu_linear_backward,
    has_linear_gelu,
    linear_gelu,
)
from megalite.kernels.weight_gradient import has_bias_gradient_gemm
from megalite.model.stage import DTYPES
from megalite.optim.gradient_buckets import main_dtype
from megalite.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from megalite.utils.errors import first_line
from megalite.utils.log import log

MARGIN = 0.02
"""The form in GEMMs is chosen unless it is slower by more than this share, so that noise does not decide."""
ROUNDS = 5
"""Timed calls of each function, after one that is not timed."""

Linear = ColumnParallelLinear | RowParallelLinear
Timer = Callable[[Sequence[Callable[[], object]]], Sequence[float]]
"""Returns the seconds of a call of each function; see `seconds_in_turns`."""


class Shape(NamedTuple):
    """GEMMs that can have an epilogue.

    Attributes:
        epilogue: "GELU", with its derivative in backward, or "bias gradient".
        n, o, i: tokens, out and in features of the linear layer, whose weight is ``[o, i]``.
        has_bias: whether the layer has a bias.
    """

    epilogue: str
    n: int
    o: int
    i: int
    has_bias: bool

    def __str__(self) -> str:
        return f"{self.epilogue} of {self.n} x {self.i} -> {self.o}"


class Seconds(NamedTuple):
    """Seconds of both forms; those in GEMMs are infinite if the device does not have them."""

    in_gemms: float
    separate: float

    @property
    def prefers_gemms(self) -> bool:
        """Return whether the form in GEMMs should run."""
        return math.isfinite(self.in_gemms) and self.in_gemms <= (1 + MARGIN) * self.separate

    def __str__(self) -> str:
        form = "in GEMMs" if self.prefers_gemms else "in separate kernels"
        if not math.isfinite(self.in_gemms):
            return f"{form} (a rank does not have the GEMMs)"
        milliseconds = self.in_gemms * 1e3, self.separate * 1e3
        return "{} ({:.3f} ms in GEMMs, {:.3f} ms in separate kernels)".format(form, *milliseconds)


def seconds_in_turns(functions: Sequence[Callable[[], object]]) -> list[float]:
    """Return the median GPU seconds of a call of each function, all called in turns."""
    for function in functions:
        function()
    rounds = [
        [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in functions]
        for _ in range(ROUNDS)
    ]
    for events in rounds:
        for function, (start, end) in zip(functions, events, strict=True):
            start.record()
            function()
            end.record()
    torch.cuda.synchronize()
    return [
        median(start.elapsed_time(end) / 1e3 for start, end in turns) for turns in zip(*rounds, strict=True)
    ]


def choose_gemm_epilogues(
    chunks: Sequence[nn.Module], config: Config, topology: Topology, timer: Timer = seconds_in_turns
) -> str:
    """Choose the form of each linear layer's epilogue, and return the choice for the log.

    Every rank must call it. The slowest rank's times decide for all ranks.

    Args:
        chunks: this rank's model chunks; their layers are changed.
        timer: times functions on the device.
    """
    mode = config.training.gemm_epilogues
    if mode == "on":
        return ""
    layers = defaultdict[Shape, list[Linear]](list)
    for layer, shape in _candidates(chunks, config):
        layers[shape].append(layer)
    if mode == "off" or config.training.deterministic:
        for shape, found in layers.items():
            _separate(shape, found)
        reason = "--gemm-epilogues off" if mode == "off" else "--deterministic"
        return f"GELU and bias gradients in separate kernels ({reason})" if layers else ""
    dtype = DTYPES[config.model.params_dtype]
    own = {shape: _time(shape, dtype, topology.device, timer) for shape in layers}
    slowest = _slowest(own, topology)
    for shape, found in layers.items():
        if not slowest[shape].prefers_gemms:
            _separate(shape, found)
    return "; ".join(f"{shape}: {seconds}" for shape, seconds in slowest.items())


def _candidates(chunks: Sequence[nn.Module], config: Config) -> Iterator[tuple[Linear, Shape]]:
    """Yield the linear layers whose GEMMs can have an epilogue on some device."""
    if config.training.compile and config.parallel.tp == 1:
        return  # the layers' backward is in graphs of torch.compile
    n = config.microbatch_tokens
    for layer in (each for chunk in chunks for each in chunk.modules()):
        if not isinstance(layer, Linear):
            continue
        o, i = layer.weight.flatten(0, -2).shape
        if isinstance(layer, ColumnParallelLinear) and layer.fuses_gelu:
            yield layer, Shape("GELU", n, o, i, layer.bias is not None)
        elif _sums_bias_gradient(layer):
            yield layer, Shape("bias gradient", n, o, i, True)


def _sums_bias_gradient(layer: Linear) -> bool:
    """Return whether backward computes the gradient of the layer's bias together with its weight's."""
    adds_bias = layer.bias is not None and not layer.skip_bias_add
    if isinstance(layer, RowParallelLinear):
        adds_bias = adds_bias and layer.context.tp.size == 1  # otherwise it is added to the sum over tp
    return adds_bias and layer.context.fuses_weight_gradient and layer.context.store is None


def _separate(shape: Shape, layers: Sequence[Linear]) -> None:
    for layer in layers:
        if isinstance(layer, ColumnParallelLinear) and shape.epilogue == "GELU":
            layer.fuses_gelu = False
        else:
            layer.context = replace(layer.context, fuses_bias_gradient=False)


def _time(shape: Shape, dtype: torch.dtype, device: torch.device, timer: Timer) -> Seconds:
    """Time both forms on random tensors, without changing the state of torch's generators."""
    generator = torch.Generator(device).manual_seed(0)

    def numbers(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device=device, dtype=dtype)

    time = _gelu_seconds if shape.epilogue == "GELU" else _bias_gradient_seconds
    try:
        return time(shape, numbers, timer)
    except RuntimeError as error:  # the library may have no algorithm for a large shape
        log.warning("%s runs in separate kernels: %s", shape, first_line(error))
        return Seconds(math.inf, 0.0)


def _gelu_seconds(shape: Shape, numbers: Callable[..., Tensor], timer: Timer) -> Seconds:
    """Time the up GEMM with GELU, and the down GEMM of backward with its derivative."""
    _, n, o, i, has_bias = shape
    up = numbers(o, i)
    if not has_linear_gelu(up, has_bias):
        return Seconds(math.inf, 0.0)
    x, grad, down, before = numbers(n, i), numbers(n, i), numbers(i, o), numbers(n, o)
    bias = numbers(o) if has_bias else None
    gelu, gelu_backward = torch.ops.megalite.bias_gelu, torch.ops.megalite.bias_gelu_backward
    forward, backward, separate_forward, separate_backward = timer(
        (
            lambda: linear_gelu(x, up, bias),
            lambda: gelu_linear_backward(grad, down, before, has_bias),
            lambda: gelu(F.linear(x, up), bias),
            lambda: gelu_backward(grad @ down, before, bias),
        )
    )
    return Seconds(forward + backward, separate_forward + separate_backward)


def _bias_gradient_seconds(shape: Shape, numbers: Callable[..., Tensor], timer: Timer) -> Seconds:
    """Time the GEMM of a weight's gradient, which adds to the sum, with and without the bias' gradient."""
    _, n, o, i, _ = shape
    grad, x = numbers(n, o), numbers(n, i)
    total = torch.zeros(o, i, device=grad.device, dtype=main_dtype(grad.dtype))
    if not has_bias_gradient_gemm(total, grad, x):
        return Seconds(math.inf, 0.0)

    def separate() -> None:
        add_weight_gradient_(total, grad, x)
        grad.sum(0)

    return Seconds(*timer((lambda: add_weight_and_bias_gradient_(total, grad, x), separate)))


def _slowest(own: Mapping[Shape, Seconds], topology: Topology) -> dict[Shape, Seconds]:
    """Return the longest times of any rank, for the shapes of all ranks: stages can have different ones."""
    slowest: dict[Shape, Seconds] = {}
    for times in topology.world.gather_objects(own, "times of GEMMs"):
        for shape, seconds in times.items():
            slowest[shape] = Seconds(*map(max, seconds, slowest.get(shape, seconds)))
    return slowest
