"""Flips of single bits in a rank's memory or messages during a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalite.distributed.collectives import Pending
from megalite.optim.flat_buffers import BucketEntry
from megalite.optim.gradient_buckets import GradientBuffer
from megalite.pipeline.executor import PointToPoint
from megalite.train.loop import Callback, TrainingLoop
from megalite.train.train_step import StepResult

_INTEGERS = {16: torch.int16, 32: torch.int32, 64: torch.int64}
_MIN_MESSAGE = 8
"""Elements of the smallest message in which a bit is flipped; smaller ones hold losses and norms."""


@dataclass(frozen=True)
class BitFlip:
    """A wrong bit on one rank.

    Attributes:
        kind: a key of `KINDS`.
        rank: global rank.
        iteration: iteration in which it happens, at least 2.
        seed: determines the place, the microbatch and the bit.
    """

    kind: str
    rank: int
    iteration: int
    seed: int


def flip(tensor: Tensor, seed: int) -> None:
    """Flip one bit of a tensor in place."""
    random = np.random.default_rng(seed)
    index = tuple(int(random.integers(size)) for size in tensor.shape)
    num_bits = 8 * tensor.element_size()
    bit = int(random.integers(num_bits))
    mask = -(1 << bit) if bit == num_bits - 1 else 1 << bit  # a signed number
    values = tensor.data  # without autograd's check of versions
    values[index] = (values[index].clone().view(_INTEGERS[num_bits]) ^ mask).view(tensor.dtype)


class Injection(Callback):
    """Injects a bit flip into a run of this rank. Put it after `Audit` in the list of callbacks.

    Iteration 1 counts the places where the flip can happen; the seed selects one of them.

    Attributes:
        num_nan: number of iterations whose update was skipped for a loss or gradient that is not finite.
    """

    def __init__(self, flip: BitFlip) -> None:
        self.flip = flip
        self.num_nan = 0
        self._iteration = 0
        self._num_seen = 0
        self._num_places = 0

    @contextmanager
    def running(self, loop: TrainingLoop) -> Iterator[None]:
        self._is_here = loop.trainer.topology.rank == self.flip.rank
        with pytest.MonkeyPatch.context() as patch:
            KINDS[self.flip.kind](self, loop, patch)
            yield

    def before_step(self, loop: TrainingLoop) -> None:
        self._iteration, self._num_seen = loop.next_iteration, 0
        if self._is_here and self._iteration == self.flip.iteration and self.flip.kind == "weights":
            parameters = [
                each for chunk in loop.trainer.chunks for each in chunk.parameters() if each.numel()
            ]
            flip(parameters[self.flip.seed % len(parameters)].data, self.flip.seed)

    def after_step(self, loop: TrainingLoop, result: StepResult) -> None:
        self.num_nan += result.anomaly is not None
        self._num_places = max(self._num_places, self._num_seen)
        self._iteration = 0  # not in an iteration

    def passes(self, tensor: Tensor) -> None:
        """Flip the bit if this is the place: call it with each tensor in which it could happen."""
        if not self._is_here or self._iteration == 0:
            return
        place, self._num_seen = self._num_seen, self._num_seen + 1
        if self._iteration == self.flip.iteration and place == self.flip.seed % self._num_places:
            flip(tensor, self.flip.seed)


def _first_tensor(output: Any) -> Tensor | None:
    if isinstance(output, Tensor):
        return output
    return _first_tensor(output[0]) if isinstance(output, tuple) and len(output) else None


def _in_weights(injection: Injection, loop: TrainingLoop, patch: pytest.MonkeyPatch) -> None:
    """Do nothing: `before_step` flips it."""


def _in_gradients(injection: Injection, loop: TrainingLoop, patch: pytest.MonkeyPatch) -> None:
    """Flip a bit of a parameter's gradient before its sum over the replicas."""
    original = GradientBuffer.accumulate

    def accumulate(self: GradientBuffer, entry: BucketEntry) -> None:
        original(self, entry)
        injection.passes(self.accumulated(entry))

    patch.setattr(GradientBuffer, "accumulate", accumulate)


def _in_sums(injection: Injection, loop: TrainingLoop, patch: pytest.MonkeyPatch) -> None:
    """Flip a bit of a bucket's complete gradient."""

    def before_update() -> None:
        for buffer in loop.trainer.optimizer.buffers:
            if buffer.owned_grad.numel():
                injection.passes(buffer.owned_grad)

    loop.trainer.train_step.before_update.append(before_update)


def _in_activations(injection: Injection, loop: TrainingLoop, patch: pytest.MonkeyPatch) -> None:
    """Flip a bit of a module's output in the forward pass."""

    def hook(module: nn.Module, inputs: object, output: Any) -> None:
        if (tensor := _first_tensor(output)) is not None and tensor.is_floating_point():
            injection.passes(tensor)

    for chunk in loop.trainer.chunks:
        for module in chunk.modules():
            module.register_forward_hook(hook)


def _always_in_activations(injection: Injection, loop: TrainingLoop, patch: pytest.MonkeyPatch) -> None:
    """Flip the same bit of a module's output whenever the module runs, in audits too."""
    called: list[nn.Module] = []

    def hook(module: nn.Module, inputs: object, output: Any) -> None:
        if (tensor := _first_tensor(output)) is not None and tensor.is_floating_point():
            flip(tensor, injection.flip.seed)

    def before_update() -> None:
        if loop.next_iteration + 1 == injection.flip.iteration:
            modules = list(dict.fromkeys(called))
            modules[injection.flip.seed % len(modules)].register_forward_hook(hook)

    if loop.trainer.topology.rank == injection.flip.rank:
        for chunk in loop.trainer.chunks:
            for each in chunk.modules():
                each.register_forward_hook(lambda module, *_: called.append(module))
        loop.trainer.train_step.before_update.append(before_update)


def _in_messages(injection: Injection, loop: TrainingLoop, patch: pytest.MonkeyPatch) -> None:
    """Flip a bit of a message that this rank has received."""

    def arrived(tensor: Tensor) -> None:
        if tensor.is_floating_point() and tensor.numel() >= _MIN_MESSAGE:
            injection.passes(tensor)

    def after(owner: Any, name: str, tensor_of: Callable[..., Tensor | None]) -> None:
        original = getattr(owner, name)

        def function(*args: Any, **more: Any) -> Any:
            result = original(*args, **more)
            if (tensor := tensor_of(result, *args, **more)) is not None:
                arrived(tensor)
            return result

        patch.setattr(owner, name, function)

    after(dist, "all_reduce", lambda result, x, *_, **more: None if more.get("async_op") else x)
    after(Pending, "wait", lambda result, pending: pending.tensor if pending.work is not None else None)
    after(PointToPoint, "received", lambda result, *_: result)


KINDS: dict[str, Callable[[Injection, TrainingLoop, pytest.MonkeyPatch], None]] = {
    "weights": _in_weights,
    "gradients": _in_gradients,
    "sums of gradients": _in_sums,
    "activations": _in_activations,
    "messages": _in_messages,
    "activations, always": _always_in_activations,
}
"""Where a bit is flipped; the function prepares it before the first iteration."""
