"""A training program as the judge sees it, on one rank: what an adapter or a user's own script defines.

A script defines one function, and a subclass of `Program`:

    def build(layout, config, options):
        return MyProgram(...)

The judge calls it on each rank of each layout, after torch.distributed has started with gloo. Then it loads
the same weights into all of them, and compares what they compute from the same samples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from megalite.config import Config, OptimizerConfig
from megalite.config.option import flag_with_value
from megalite.observe.verify.layouts import Layout
from megalite.utils.errors import UserError

_ADAM = ("lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad")
"""Options of the optimizer that every adapter passes on."""


class ProgramFault(UserError):
    """Raised for what a program does wrong in a layout, as opposed to what it refuses."""


class Piece(NamedTuple):
    """Part of a full tensor that a rank holds.

    Attributes:
        tensor: the rank's elements, in any shape.
        shape: shape of the full tensor, as one rank holds it.
        positions: index of each element in the flat full tensor, in the shape of `tensor`; -1 for padding.
            None if the rank holds the full tensor.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    positions: Tensor | None = None

    @staticmethod
    def whole(tensor: Tensor) -> Piece:
        """Return the piece of a rank that holds the full tensor."""
        return Piece(tensor, tuple(tensor.shape))

    @staticmethod
    def cut(tensor: Tensor, dim: int, index: int, count: int, num_parts: int = 1) -> Piece:
        """Return the piece of a rank that holds a slice of a dim.

        Args:
            index: the rank's index along the axis that cuts the dim.
            count: number of ranks along it.
            num_parts: number of equal parts of the dim that are each cut, and whose slices are joined: 2 for
                the gate and the up projection of SwiGLU in one matrix.
        """
        size = tensor.shape[dim] * count
        shape = (*tensor.shape[:dim], size, *tensor.shape[dim + 1 :])
        rows = torch.arange(size).view(num_parts, count, -1)[:, index].flatten()
        return Piece(tensor, shape, positions_in(shape).index_select(dim, rows))


def positions_in(shape: Sequence[int]) -> Tensor:
    """Return the index of each element in the flat tensor of this shape. Cut it as the tensor is cut."""
    return torch.arange(torch.Size(shape).numel()).view(*shape)


def part_of(full: Tensor, piece: Piece) -> Tensor:
    """Return the elements of a full tensor that a piece holds; zeros for padding."""
    if tuple(full.shape) != piece.shape:
        raise UserError(f"a tensor of shape {list(full.shape)} was given for one of {list(piece.shape)}")
    if piece.positions is None:
        return full.reshape(piece.tensor.shape)
    taken = full.reshape(-1)[piece.positions.clamp_min(0)]
    return taken.masked_fill(piece.positions < 0, 0).view(piece.tensor.shape)


class Program:
    """Training program on one rank. Its names are those of one rank, with the whole model's layer numbers.

    For each iteration the judge calls `backward`, `gradients` and `update`, in this order. All ranks make the
    same calls, so each method may communicate.
    """

    def weights(self) -> Mapping[str, Piece]:
        """Return this rank's pieces of all parameters that are trained, and of saved buffers.

        Together the ranks must hold every element. Several may hold the same one, if they must agree on it.
        """
        raise NotImplementedError

    def load(self, full: Mapping[str, Tensor]) -> None:
        """Set the weights to parts of full tensors. Override it if an optimizer keeps copies of them."""
        with torch.no_grad():
            for name, piece in self.weights().items():
                piece.tensor.copy_(part_of(full[name], piece))

    def backward(self, samples: Tensor) -> Mapping[str, float]:
        """Compute the gradients of a global batch, as the update needs them, and return what is logged.

        Args:
            samples: tokens of the global batch, ``[global batch, sequence + 1]``; the labels are the tokens
                one position later. The program takes the samples and positions of this rank. The samples
                are equal on all ranks, and the program must not change them.

        Returns:
            The terms of the loss by name, such as ``{"loss": 5.3}``: the numbers that the program reports
            for the global batch, on every rank that has them; empty on the others.
        """
        raise NotImplementedError

    def gradients(self) -> Mapping[str, Piece]:
        """Return this rank's pieces of the gradients that the update uses, by parameter."""
        raise NotImplementedError

    def update(self) -> Mapping[str, float]:
        """Update the weights, and return what is logged: ``gradient norm``, ``learning rate``."""
        raise NotImplementedError

    def modules(self) -> Mapping[str, nn.Module]:
        """Return this rank's modules by their names in the whole model. Their outputs are traced."""
        return {}

    def save(self, folder: Path) -> None:
        """Save a checkpoint as the program's users would."""
        raise UserError("the program saves no checkpoints")

    def resume(self, folder: Path) -> None:
        """Load what `save` has written, maybe in another layout."""
        raise UserError("the program loads no checkpoints")

    def close(self) -> None:
        """Free what outlives the program, such as its package's process groups."""


def refuse_unmapped(config: Config, package: str, *mapped: str) -> None:
    """Raise `UserError` for an option of the optimizer that an adapter does not pass on.

    Args:
        mapped: the options that it passes on, beside those of Adam with a constant learning rate.
    """
    plain = OptimizerConfig(lr_decay_style="constant")
    for name in (field.name for field in dataclasses.fields(plain)):
        value = getattr(config.optimizer, name)
        if value != getattr(plain, name) and name not in (*_ADAM, *mapped):
            raise UserError(f"{flag_with_value(name, value)} is not judged with {package}: leave it out")


def whole_number(name: str, text: str, least: int = 0) -> int:
    """Return the value of an option of --set, or raise `UserError` if it is no such number."""
    if not text.isdecimal() or int(text) < least:
        raise UserError(f"--set {name}={text}: write a whole number, {least} or more")
    return int(text)


class Adapter(Protocol):
    """Module that defines a program: one of `megalite.observe.judge.adapters`, or a user's script.

    A script needs `build` alone. An adapter of a package also has ``PACKAGE``, its name for pip;
    ``VERSIONS``, those that were tried; ``LAYOUTS``, the names of the layouts that are judged if none are
    named; and maybe ``DEFAULTS``, values of megalite's fields that no flag sets. It imports its package at
    the top, so that a missing one is reported before any rank starts.

    ``from_megalite(config, full)`` is optional. It returns full tensors of megalite's model by the names and
    in the shapes of this program on one rank. It must be linear and without loss, because gradients are
    passed through it too. With it, all programs start from megalite's weights and samples, and megalite's
    own run is compared as well, which shows an error that is equal in all layouts.
    """

    def build(self, layout: Layout, config: Config, options: Mapping[str, str]) -> Program:
        """Return the program of this rank.

        Args:
            layout: sizes of the axes, and switches.
            config: the model, the batch and the optimizer in megalite's words.
            options: NAME=VALUE of --set, for what megalite has no word for.

        Raises:
            UserError: the program has no such layout, model or option, by name.
        """
        ...


def piece_of(tensor: Tensor) -> Piece:
    """Return this rank's piece of a tensor, which is the full tensor if it is no DTensor.

    All ranks of its mesh call this, because partial sums are reduced first. Otherwise the piece shares the
    tensor's memory.
    """
    if not isinstance(tensor, DTensor):
        return Piece.whole(tensor.detach())
    with torch.no_grad():
        if any(placement.is_partial() for placement in tensor.placements):
            settled = [Replicate() if each.is_partial() else each for each in tensor.placements]
            tensor = tensor.redistribute(placements=settled)
        local = tensor.to_local().detach()
    positions = _positions(tensor)
    if positions.numel() != local.numel():
        raise RuntimeError(
            f"a rank holds {local.numel()} elements where {tensor.placements} name {positions.numel()}"
        )
    return Piece(local, tuple(tensor.shape), positions.view(local.shape))


def _positions(tensor: DTensor) -> Tensor:
    """Return the indices of a rank's elements in the flat full tensor, computed without DTensor's own code.

    A shard that is strided is cut after the shards of later mesh dims: FSDP cuts what tensor parallelism has
    left of a dim, although its mesh dim comes first. Without such shards, it cuts each of equal parts of the
    dim, such as the gate and the up projection in one matrix, and joins the slices.
    """
    mesh, found = tensor.device_mesh, positions_in(tensor.shape)
    coordinates = mesh.get_coordinate()
    if coordinates is None:  # a rank outside of the mesh holds nothing
        return found.flatten()[:0]
    shards: list[tuple[int, Any]] = [
        (dim, each) for dim, each in enumerate(tensor.placements) if not each.is_replicate()
    ]
    plain = [(dim, each) for dim, each in shards if type(each) is Shard]
    strided = [(dim, each) for dim, each in reversed(shards) if type(each) is not Shard]
    for mesh_dim, shard in (*plain, *strided):
        is_after = any(dim > mesh_dim and each.dim == shard.dim for dim, each in plain)
        num_parts = 1 if is_after else getattr(shard, "split_factor", 1)
        parts = found.chunk(num_parts, shard.dim)
        place = (shard.dim, coordinates[mesh_dim], mesh.size(mesh_dim))
        found = torch.cat([_chunk(part, *place) for part in parts], shard.dim)
    return found


def _chunk(tensor: Tensor, dim: int, index: int, count: int) -> Tensor:
    """Return one chunk of a dim; the last ones are shorter or empty if the size is not divisible."""
    chunks = tensor.chunk(count, dim)
    return chunks[index] if index < len(chunks) else tensor.narrow(dim, 0, 0)
