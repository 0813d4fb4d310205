"""Compare the tensors that several ranks hold: weights, optimizer state and the state of the run.

A vote decides which ranks are wrong.
"""

from __future__ import annotations

import hashlib
import socket
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.distributed.axes import coordinates_text
from megalite.distributed.axis import Axis
from megalite.distributed.collectives import flat_all_gather
from megalite.distributed.topology import Topology
from megalite.tensor_parallel.parameter_spec import ParameterShard
from megalite.train.trainer import Trainer
from megalite.utils.errors import UserError, few
from megalite.utils.hardware.gpus import device_name

_WAIT = "audit"
RUN_STATE = "seed, iteration and number of samples"


class Finding(NamedTuple):
    """Difference that an audit found.

    Attributes:
        names: tensors that differ; those of a microbatch in the order in which they are computed.
        what: how they differ, as a clause for the message.
        suspects: global ranks of the devices.
        is_voted: whether a majority outvoted them; otherwise one of them is wrong.
    """

    names: tuple[str, ...]
    what: str
    suspects: tuple[int, ...]
    is_voted: bool

    def text(self, topology: Topology) -> str:
        """Return the difference and the devices as a clause; a collective."""
        mine = (
            f"rank {topology.rank} (host {socket.gethostname()}, {topology.device}, "
            f"{device_name(topology.device)}; {coordinates_text(topology.coordinates)})"
        )
        devices = topology.world.gather_objects(mine, "audit")
        named = few([devices[rank] for rank in self.suspects], 8)
        one_of = "" if self.is_voted or len(self.suspects) == 1 else "one of "
        return f"{few(self.names)} {self.what}; wrong: {one_of}{named}"


class AuditFailed(UserError):
    """Raised on every rank if an audit finds a difference: a device has computed wrongly.

    Attributes:
        finding: the difference.
    """

    finding: Finding | None = None


def outliers(values: Mapping[int, Hashable]) -> set[int] | None:
    """Return the ranks whose value is not that of the majority; None if no value has a majority."""
    (value, count), *_ = Counter(values.values()).most_common(1)
    if 2 * count <= len(values):
        return None
    return {rank for rank, other in values.items() if other != value}


class HeldTensor(NamedTuple):
    """Tensor of this rank.

    Attributes:
        key: identifies its elements among all tensors of the run: ranks with the same key must hold the same
            bits.
    """

    key: str
    tensor: Tensor


def held_tensors(trainer: Trainer) -> dict[str, HeldTensor]:
    """Return what this rank holds of the weights, buffers, optimizer state and the run's state, by name.

    Keys follow from the boxes of the tensors' specs, so they hold for any axis that cuts or replicates them.
    """
    progress = trainer.progress
    state = (trainer.config.training.seed, progress.iteration, progress.consumed_samples)
    tensors = {RUN_STATE: torch.tensor(state), **trainer.tensors()}
    held = {
        name: HeldTensor(_key(name, each, trainer.topology), _bits(each)) for name, each in tensors.items()
    }
    return {name: each for name, each in held.items() if each.tensor.numel()}


def _bits(held: Tensor | ParameterShard) -> Tensor:
    return held.tensor if isinstance(held, ParameterShard) else held


def _key(name: str, held: Tensor | ParameterShard, topology: Topology) -> str:
    if isinstance(held, Tensor):
        return name
    key = f"{name} {held.spec.box(topology)} {held.shape} {held.start} {held.tensor.numel()}"
    if not held.is_buffer:
        return key
    # Only the replicas of a buffer must have the same values; other ranks may have seen other activations.
    axes, replicas = held.spec.parameter_axes.axes(topology), held.spec.parameter_axes.replicas(topology)
    others = {axis: rank for axis, rank in axes.coordinates.items() if axis not in replicas.spans}
    return f"{key} {coordinates_text(others)}"


class ReplicaComparison:
    """Comparison of the tensors that this rank holds with the other ranks that hold the same.

    Tensors that the same set of ranks holds form a group, and each group has one checksum. An audit gathers
    these few numbers from all ranks. Only after a difference does it gather a checksum of each tensor.
    """

    def __init__(self, trainer: Trainer) -> None:
        """Find out which ranks hold the same tensors; every rank must call it."""
        self._trainer = trainer
        self._topology = topology = trainer.topology
        held = held_tensors(trainer)
        mine = torch.tensor([id_of(each.key) for each in held.values()]).unsqueeze(1)
        gathered = gather_rows(mine.to(topology.device), topology.world)
        groups, counts = _holders([rows[:, 0].cpu() for rows in gathered], topology.rank)
        self._groups: dict[int, list[str]] = {}
        self._num_elements: dict[tuple[str, bool], int] = {}
        for (name, each), group, count in zip(held.items(), groups.tolist(), counts.tolist(), strict=True):
            if count > 1:
                self._groups.setdefault(group, []).append(name)
            part = name.partition(".")[0], count > 1
            self._num_elements[part] = self._num_elements.get(part, 0) + each.tensor.numel()

    def compared_share(self, kind: str) -> float:
        """Return the share of this rank's elements that other ranks hold too.

        Args:
            kind: "model" or "optimizer", the first part of the tensors' names.
        """
        compared, alone = (self._num_elements.get((kind, is_compared), 0) for is_compared in (True, False))
        return compared / max(1, compared + alone)

    def find(self) -> Finding | None:
        """Return the first difference between ranks, the same on every rank; a collective."""
        device = self._topology.device
        held = held_tensors(self._trainer)
        sums = {
            group: {name: checksum(held[name].tensor) for name in sorted(names)}
            for group, names in self._groups.items()
        }
        totals = [checksum_of(each.values(), device) for each in sums.values()]
        ids = torch.tensor(list(sums), dtype=torch.int64, device=device)
        mine = torch.stack([ids, torch.stack(totals) if totals else ids], dim=1)
        gathered = [self._topology.to_host(rows) for rows in gather_rows(mine, self._topology.world)]
        table: dict[int, set[int]] = {}
        for rows in gathered:
            for group, total in rows.tolist():
                table.setdefault(group, set()).add(total)
        differing = {group for group, found in table.items() if len(found) > 1}
        return self._locate(sums, differing) if differing else None

    def _locate(self, sums: Mapping[int, Mapping[str, Tensor]], differing: set[int]) -> Finding:
        """Return which tensors differ, and on which ranks."""
        mine = {
            (group, name): int(each.item())
            for group in differing & sums.keys()
            for name, each in sums[group].items()
        }
        values: dict[tuple[int, str], dict[int, int]] = {}
        for rank, of_rank in enumerate(self._topology.world.gather_objects(mine, _WAIT)):
            for key, value in of_rank.items():
                values.setdefault(key, {})[rank] = value
        names: dict[str, None] = {}
        suspects: set[int] = set()
        is_voted = True
        for (_, name), by_rank in values.items():
            if len(set(by_rank.values())) > 1:
                names[name] = None
                minority = outliers(by_rank)
                is_voted = is_voted and minority is not None
                suspects |= by_rank.keys() if minority is None else minority
        what = "differs between the ranks that hold the same"
        return Finding(tuple(sorted(names)), what, tuple(sorted(suspects)), is_voted)


def gather_rows(rows: Tensor, axis: Axis) -> list[Tensor]:
    """Return the rows of every rank of the axis, int64 ``[n, k]``, where n may differ between ranks."""
    if axis.size == 1:
        return [rows]
    sizes = _gathered(torch.tensor([len(rows)], device=rows.device), axis).tolist()
    padded = rows.new_zeros(max(sizes), rows.shape[1])
    padded[: len(rows)] = rows
    whole = _gathered(padded.view(-1), axis).view(axis.size, *padded.shape)
    return [each[:size] for each, size in zip(whole, sizes, strict=True)]


def _gathered(mine: Tensor, axis: Axis) -> Tensor:
    pending = flat_all_gather(mine.new_empty(axis.size * len(mine)), mine, axis, of=_WAIT)
    pending.wait()
    return pending.tensor


def _holders(keys: Sequence[Tensor], rank: int) -> tuple[Tensor, Tensor]:
    """Return for each key of a rank a number that identifies the set of ranks with this key, and their count.

    Args:
        keys: keys of each rank, int64 ``[n]``.
    """
    numbers = torch.tensor([id_of(f"rank {each}") for each in range(len(keys))])
    sizes = torch.tensor([len(each) for each in keys])
    _, position, count = torch.cat(list(keys)).unique(return_inverse=True, return_counts=True)
    holders = torch.zeros_like(count).index_add_(0, position, numbers.repeat_interleave(sizes))
    own = position.split(sizes.tolist())[rank]
    return holders[own], count[own]


_WORDS_AT_ONCE = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Words that are hashed together, by the type of the device: a CPU's cache holds them."""


_STEP, _FIRST, _SECOND = (
    0x9E3779B97F4A7C15 - (1 << 64),
    0xBF58476D1CE4E5B9 - (1 << 64),
    0x94D049BB133111EB - (1 << 64),
)
"""Constants of splitmix64 (Steele et al. 2014), as int64."""


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """Return the checksum of a tensor's bits, an int64 scalar on its device.

    It is the sum of a hash of each 64-bit word and its position, modulo 2**64. For one position the hash is a
    permutation, so a change within one word always changes the sum. Swapped words change it too, but for a
    chance of about 2**-30 at most. Two tensors are compared with ``==`` of this number: NaNs are equal if
    their bits are, and 0 differs from -0.
    """
    words = _words(tensor)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    size = _WORDS_AT_ONCE.get(words.device.type, 1 << 24)
    for start in range(0, len(words), size):
        part = words[start : start + size]
        hashed = torch.arange(start, start + len(part), device=words.device).mul_(_STEP).bitwise_xor_(part)
        hashed.mul_(_FIRST)
        hashed ^= (hashed >> 32) & 0xFFFFFFFF  # a logical shift
        hashed.mul_(_SECOND)
        hashed ^= (hashed >> 29) & 0x7FFFFFFFF
        total += hashed.sum()
    return total


def _words(tensor: Tensor) -> Tensor:
    """Return the bits as int64 ``[n]``, with zeros at the end if they do not fill the last word."""
    as_bytes = tensor.detach().reshape(-1).view(torch.uint8)
    if (rest := -len(as_bytes) % 8) or as_bytes.data_ptr() % 8 or as_bytes.storage_offset() % 8:
        as_bytes = F.pad(as_bytes, (0, rest)) if rest else as_bytes.clone()
    return as_bytes.view(torch.int64)


def checksum_of(checksums: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return one checksum of several in order, an int64 scalar on `device`."""
    moved = [each.to(device) for each in checksums]
    return checksum(torch.stack(moved)) if moved else torch.zeros((), dtype=torch.int64, device=device)


def id_of(text: str) -> int:
    """Return an int64 that identifies a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
