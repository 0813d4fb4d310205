"""AdamW on states in host memory or in a file: ranges of them are updated one after the other on the host."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.config import OptimizerConfig, ParallelConfig
from megalite.distributed.topology import FakeTopology, Topology
from megalite.errors import UserError
from megalite.hardware.host_memory import free_bytes
from megalite.kernels import adamw_
from megalite.optim.offload_sizes import NUM_STAGED, RANGE_SIZE
from megalite.optim.staging import Staging, staging_bytes
from megalite.optim.state_file import FileStorage, file_bytes, ring_bytes
from megalite.optim.state_storage import HostStorage, StateSize, StateStorage, num_offloaded


class OffloadedUpdate(NamedTuple):
    """Hold what an update needs of one state, on the device.

    Attributes:
        gradient: unscaled and clipped, ``[n]``.
        weight: gets the new main weights, ``[n]``, rounded to its dtype; has the old ones if the storage has
            no main weights.
        learning_rate: of this state.
        weight_decay: of this state.
    """

    gradient: Tensor
    weight: Tensor
    learning_rate: float
    weight_decay: float


class OffloadBytes(NamedTuple):
    """Hold the bytes of a rank's offloaded states.

    Attributes:
        host: host memory, buffers included.
        file: size of the file.
        down, up: copied from the device to the host in an update, and back.
        read, written: of the file, in an update.
    """

    host: int
    file: int
    down: int
    up: int
    read: int
    written: int


class Offload:
    """Hold states of AdamW outside of the device, and update them there.

    Those are the first states, until they have the config's share of all elements. Gradients are copied to
    the host in ranges, torch's CPU kernel updates each range, and its new weights are copied back. The copy
    of the next range and of the one before run meanwhile; with a file, threads read ahead and write behind.

    Attributes:
        count: number of states that are offloaded.
        bytes: sizes, and what an update moves.
    """

    def __init__(
        self,
        sizes: Sequence[StateSize],
        weight_dtype: torch.dtype,
        config: OptimizerConfig,
        parallel: ParallelConfig,
        topology: Topology,
    ) -> None:
        """Allocate the storage; every rank must call this.

        Args:
            sizes: of all states in order, with equal dtypes and kinds; main is among the kinds if main
                weights are separate from the model's weights.
            weight_dtype: of the weights on the device that an update writes.

        Raises:
            UserError: there is too little host memory, or no file can be made; on every rank.
        """
        self.config = config
        self.count = num_offloaded(sizes, config.optimizer_offload_fraction)
        mine = sizes[: self.count]
        range_size = min(RANGE_SIZE, max((size.numel for size in mine), default=0))
        dtypes = (mine[0].dtype, weight_dtype) if mine else ()
        self._host = "meta" if topology.device.type == "meta" else "cpu"
        self._num_threads: int | None = None
        folder = config.optimizer_nvme_offload
        self.bytes = _bytes_of(mine, weight_dtype, folder is not None, staging_bytes(range_size, dtypes))
        if not isinstance(topology, FakeTopology):
            num_cores = check_host_memory(self.bytes.host, config, topology)
            if topology.device.type == "cuda":
                self._num_threads = parallel.num_threads or num_cores
        with topology.agreed():
            self.storage: StateStorage
            if folder is None or self._host == "meta" or not mine:
                self.storage = HostStorage(mine, self._host, range_size)
            else:
                self.storage = FileStorage(Path(folder), mine, range_size)
            self.staging = Staging(topology.device, range_size, dtypes)

    def tensors(self, state: int) -> dict[str, Tensor]:
        """Return a state's tensors by kind; see `StateStorage.tensors`."""
        return self.storage.tensors(state)

    @torch.no_grad()
    def update(self, states: Sequence[OffloadedUpdate], number: float) -> None:
        """Update the offloaded states and their weights on the device.

        The host waits until it has updated the last range; the device's later work waits for the weights.

        Args:
            number: of this update, from 1.
        """
        storage, staging = self.storage, self.staging
        scalars = {
            "number": torch.tensor(number, dtype=torch.float32, device=self._host),
            "is_good": torch.tensor(True, device=self._host),
        }
        storage.start()
        staging.start()
        with _threads(self._num_threads):
            for index in range(-NUM_STAGED + 1, len(storage.ranges)):
                if (ahead := index + NUM_STAGED - 1) < len(storage.ranges):
                    self._copy_down(ahead, states)
                if index >= 0:
                    self._update_range(index, states, scalars)
        staging.finish()
        storage.finish()

    def _copy_down(self, index: int, states: Sequence[OffloadedUpdate]) -> None:
        state, start, stop = self.storage.ranges[index]
        sources = [states[state].gradient[start:stop]]
        if "main" not in self.storage.sizes[state].kinds:
            sources.append(states[state].weight[start:stop])
        self.staging.down(index, sources)

    def _update_range(
        self, index: int, states: Sequence[OffloadedUpdate], scalars: Mapping[str, Tensor]
    ) -> None:
        number, start, stop = self.storage.ranges[index]
        state, stored = states[number], self.storage.take(index)
        self.staging.arrived(index)
        gradient, weight = self.staging.buffers(index, stop - start)
        main = stored.get("main")
        adamw_(
            [weight if main is None else main],
            [stored["exp_avg"]],
            [stored["exp_avg_sq"]],
            [] if main is None else [weight],
            [gradient],
            number=scalars["number"],
            divisor=None,
            is_good=scalars["is_good"],
            learning_rate=state.learning_rate,
            betas=(self.config.adam_beta1, self.config.adam_beta2),
            weight_decay=state.weight_decay,
            epsilon=self.config.adam_eps,
        )
        self.storage.put(index)
        self.staging.up(index, weight, state.weight[start:stop])


def open_offload(
    numels: Sequence[int],
    kinds: tuple[str, ...],
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    config: OptimizerConfig,
    parallel: ParallelConfig,
    topology: Topology,
) -> Offload | None:
    """Return the storage of the states that the config offloads; None if it offloads none.

    Args:
        numels: elements of each state.
        kinds: of its tensors; dtype: of each.

    Raises:
        UserError: see `Offload`.
    """
    if not config.offloads_optimizer:
        return None
    sizes = [StateSize(numel, dtype, kinds) for numel in numels]
    return Offload(sizes, weight_dtype, config, parallel, topology)


def _bytes_of(
    sizes: Sequence[StateSize], weight_dtype: torch.dtype, is_in_file: bool, staged: int
) -> OffloadBytes:
    if not sizes:
        return OffloadBytes(0, 0, 0, 0, 0, 0)
    numel, state = sum(size.numel for size in sizes), sum(size.num_bytes for size in sizes)
    has_main = "main" in sizes[0].kinds
    return OffloadBytes(
        host=staged + (ring_bytes(sizes) if is_in_file else state),
        file=file_bytes(sizes) if is_in_file else 0,
        down=numel * (sizes[0].dtype.itemsize + (0 if has_main else weight_dtype.itemsize)),
        up=numel * weight_dtype.itemsize,
        read=state if is_in_file else 0,
        written=state if is_in_file else 0,
    )


def check_host_memory(needed: int, config: OptimizerConfig, topology: Topology) -> int:
    """Check that each machine has enough free host memory for its ranks; every rank must call it.

    Returns:
        Number of cores for each rank of this machine.

    Raises:
        UserError: a machine has too little; on every rank.
    """
    machine = socket.gethostname()
    mine: tuple[str, int, int | None, set[int]] = machine, needed, free_bytes(), _cores()
    found = [mine] * topology.world_size
    with topology.world.wait("all-gather", "host memory"):
        dist.all_gather_object(found, mine)
    machines = [name for name, *_ in found]
    for name in dict.fromkeys(machines):
        total = sum(size for each, size, *_ in found if each == name)
        free = min((free for each, _, free, _ in found if each == name and free is not None), default=total)
        if total > free:
            flag, smaller = "--optimizer-cpu-offload", "--optimizer-nvme-offload DIR"
            if config.optimizer_nvme_offload is not None:
                flag, smaller = "--optimizer-nvme-offload", "fewer ranks on this machine"
            raise UserError(
                f"{flag} needs {total / 1e9:.2f} GB of host memory for {machines.count(name)} rank"
                f"{'s'[: machines.count(name) > 1]} on {name}, where {free / 1e9:.2f} GB are free: pass "
                f"{smaller}, or a smaller --optimizer-offload-fraction"
            )
    cores = set[int]().union(*(cores for name, *_, cores in found if name == machine))
    return max(1, min(len(_cores()), len(cores) // machines.count(machine)))


def _cores() -> set[int]:
    """Return the cores that this process may run on."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    """Let torch's CPU kernels use this many threads in the block; None changes nothing."""
    before = torch.get_num_threads()
    if number is not None:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        if number is not None:
            torch.set_num_threads(before)
