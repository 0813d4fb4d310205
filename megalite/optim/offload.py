"""AdamW on states in host memory or in a file: the host updates one range of a state after the other."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from megalite.config import OptimizerConfig, ParallelConfig
from megalite.distributed.axis import HOST_UPDATE
from megalite.distributed.topology import FakeTopology, Topology
from megalite.kernels import adamw_
from megalite.optim import NUM_STAGED, RANGE_SIZE
from megalite.optim.ema import ema_share, update_ema_
from megalite.optim.staging import HostGradient, HostGradients, Staging, staging_bytes
from megalite.optim.state_storage import (
    FileStorage,
    HostStorage,
    StateSize,
    StateStorage,
    file_bytes,
    num_offloaded,
    ring_bytes,
)
from megalite.utils.errors import UserError
from megalite.utils.hardware.host_memory import free_bytes

T = TypeVar("T")


class OffloadedUpdate(NamedTuple):
    """Tensors and settings of one state's update, on the device.

    Attributes:
        gradient: unscaled and clipped gradient, ``[n]``; unused if it has been copied to the host.
        weight: receives the new main weights, ``[n]``, rounded to its dtype. If the storage has no main
            weights, it holds the old ones.
        epsilon: AdamW's epsilon for this state.
    """

    gradient: Tensor
    weight: Tensor
    learning_rate: float
    weight_decay: float
    epsilon: float


class OffloadBytes(NamedTuple):
    """Sizes in bytes of a rank's offloaded states.

    Attributes:
        host: host memory, buffers included.
        file: size of the file.
        down, up: bytes copied from the device to the host in an update, and back.
        read, written: bytes of the file read and written in an update.
    """

    host: int
    file: int
    down: int
    up: int
    read: int
    written: int


class OptimizerOffload:
    """AdamW states outside of the device, updated there while the next forward begins.

    It holds the first states, up to the config's share of all elements. A thread updates them in ranges with
    torch's CPU kernel, in the order in which forward uses their weights; forward waits for one state after
    the other. New weights are copied to the device after each range's update. If the host has the memory,
    gradients are copied to it as backward completes them; otherwise, and with a file, range by range in the
    update. Other threads read the file ahead of the update and write it behind.

    Attributes:
        count: number of states that are offloaded.
        gradients: gradients that are copied during backward; None if the update copies them.
        bytes: sizes of the states and of an update's copies.
    """

    def __init__(
        self,
        sizes: Sequence[StateSize],
        weight_dtype: torch.dtype,
        config: OptimizerConfig,
        parallel: ParallelConfig,
        topology: Topology,
        order: Sequence[int] | None = None,
    ) -> None:
        """Allocate the storage; every rank must call this.

        Args:
            sizes: sizes of all states in order, with equal dtypes and kinds. The kinds include main if main
                weights are separate from the model's weights.
            weight_dtype: dtype of the weights on the device that an update writes.
            order: order in which forward uses the states' weights; None for the order of `sizes`.

        Raises:
            UserError: there is too little host memory, or the file cannot be created; raised on every rank.
        """
        self.config = config
        self.count = num_offloaded(sizes, config.optimizer_offload_fraction)
        mine = sizes[: self.count]
        forward_order = range(len(sizes)) if order is None else order
        self._order = [state for state in forward_order if state < self.count]
        self._events = topology.events
        device = topology.device
        range_size = min(RANGE_SIZE, max((size.numel for size in mine), default=0))
        choices = [False] if config.optimizer_nvme_offload else [True, False]  # to keep gradients
        sizes_of = [
            _bytes_of(mine, weight_dtype, range_size, config, keeps_gradients=keeps) for keeps in choices
        ]
        choice, num_cores = 0, 1
        if not isinstance(topology, FakeTopology):
            hosts = [size.host for size in sizes_of]
            choice, num_cores = _choose_by_host_memory(hosts, config, topology)
        keeps_gradients, self.bytes = choices[choice], sizes_of[choice]
        with topology.agreed():
            self.storage = _new_storage(mine, config, device, range_size, self._order)
            self.gradients: HostGradients | None = None
            if keeps_gradients:
                dtype = mine[0].dtype if mine else weight_dtype
                self.gradients = HostGradients(device, [size.numel for size in mine], dtype)
            self._staging = Staging(device, range_size, _staged_dtypes(mine, weight_dtype, keeps_gradients))
        self._ranges: dict[int, list[int]] = {}  # by state
        for index, each in enumerate(self.storage.ranges):
            self._ranges.setdefault(each.state, []).append(index)
        is_cuda = device.type == "cuda"
        set_device = partial(torch.cuda.set_device, device) if is_cuda else None  # a new thread uses GPU 0
        self._thread: ThreadPoolExecutor | None = None
        if device.type != "meta":
            self._thread = ThreadPoolExecutor(1, "optimizer-update", set_device)
        self._num_threads: int | None = None
        if is_cuda:
            self._num_threads = parallel.num_threads or max(1, num_cores - 1)  # one starts kernels
        self._updated: dict[int, Future[torch.cuda.Event | None]] = {}  # by state; in the current update
        self._others: list[Future[None]] = []  # other work of the thread

    def begin(self) -> None:
        """Start an iteration: drop the previous gradients, and begin to read a file's first ranges."""
        if self.gradients is not None:
            self.gradients.forget()
        self._others.append(self._submit(self.storage.start))

    def start_update(
        self, states: Sequence[OffloadedUpdate], number: float, divisor: float | None = None
    ) -> None:
        """Start to update the offloaded states and their weights on the device.

        Args:
            number: number of this update, from 1.
            divisor: divisor of the gradients that have been copied to the host; None for 1.
        """
        self.finish()
        host = "cpu" if self._thread is not None else "meta"
        update = _HostUpdate(
            self.storage,
            self._staging,
            None if self.gradients is None else self.gradients.copied,
            states,
            self.config,
            torch.tensor(number, dtype=torch.float32, device=host),
            None
            if divisor is None or self.gradients is None
            else torch.tensor(divisor, dtype=torch.float64, device=host),
        )
        update.start()
        for state in self._order:
            self._updated[state] = self._submit(update.run, self._ranges.get(state, ()))
        self._others.append(self._submit(self.storage.finish))

    def wait(self, states: Iterable[int]) -> list[torch.cuda.Event]:
        """Wait until states are updated; the device's later work waits for the copies of their weights.

        Returns:
            The events of these copies.

        Raises:
            StateFileError: the update failed.
        """
        pending = [self._updated.pop(state) for state in states if state in self._updated]
        if not pending:
            return []
        with self._events.during(HOST_UPDATE):
            events = [event for each in pending if (event := each.result()) is not None]
        for event in events:
            torch.cuda.current_stream().wait_event(event)
        return events

    def finish(self) -> None:
        """Wait for the whole update, before states or weights are read or changed elsewhere.

        Raises:
            StateFileError: the update failed.
        """
        self.wait(self._order)
        others, self._others = self._others, []
        with self._events.during(HOST_UPDATE):
            for each in others:
                each.result()

    def check(self) -> None:
        """Check that `StateStorage.tensors` have not changed since the last update."""
        self.finish()
        self.storage.check()

    def seal(self, kinds: Collection[str] | None = None) -> None:
        """Accept new values of `StateStorage.tensors`, only of `kinds` if passed."""
        self.finish()
        self.storage.seal(kinds)

    def _submit(self, work: Callable[..., T], *arguments: Any) -> Future[T]:
        """Run the work in the thread; a dry run, which has no memory, runs it at once."""
        if self._thread is not None:
            return self._thread.submit(_with_threads, self._num_threads, work, *arguments)
        done: Future[T] = Future()
        done.set_result(work(*arguments))
        return done


class _HostUpdate(NamedTuple):
    """Update of all offloaded states, one state at a time."""

    storage: StateStorage
    staging: Staging
    gradients: Mapping[int, HostGradient] | None
    states: Sequence[OffloadedUpdate]
    config: OptimizerConfig
    number: Tensor
    divisor: Tensor | None

    def start(self) -> None:
        """Start to copy the first ranges, after the work that the device has queued so far."""
        self.staging.start()
        for index in range(NUM_STAGED - 1):
            self._copy_down(index)

    @torch.no_grad()
    def run(self, ranges: Sequence[int]) -> torch.cuda.Event | None:
        """Update the ranges of a state; return the event of the last copy of its weights to the device."""
        event = None
        self.storage.start()
        for index in ranges:
            self._copy_down(index + NUM_STAGED - 1)
            event = self._update_range(index)
        return event

    def _copy_down(self, index: int) -> None:
        if index >= len(self.storage.ranges):
            return
        state, start, stop = self.storage.ranges[index]
        update = self.states[state]
        sources = [update.gradient[start:stop]] if self.gradients is None else []
        if "main" not in self.storage.sizes[state].kinds:
            sources.append(update.weight[start:stop])
        self.staging.down(index, sources)

    def _update_range(self, index: int) -> torch.cuda.Event | None:
        number, start, stop = self.storage.ranges[index]
        state, stored = self.states[number], self.storage.take(index)
        self.staging.arrived(index)
        *staged, weight = self.staging.buffers(index, stop - start)
        gradient = staged[0] if self.gradients is None else self.gradients[number].wait()[start:stop]
        main = stored.get("main")
        adamw_(
            [weight if main is None else main],
            [stored["exp_avg"]],
            [stored["exp_avg_sq"]],
            [] if main is None else [weight],
            [gradient],
            number=self.number,
            divisor=self.divisor,
            is_good=torch.ones((), dtype=torch.bool, device=self.number.device),
            learning_rate=state.learning_rate,
            betas=(self.config.adam_beta1, self.config.adam_beta2),
            weight_decay=state.weight_decay,
            epsilon=state.epsilon,
        )
        if self.config.ema_decay is not None:
            share = ema_share(self.number, self.config.ema_decay)
            update_ema_(stored["ema"], weight if main is None else main, share)
        self.storage.put(index)
        return self.staging.up(index, weight, state.weight[start:stop])


def _new_storage(
    sizes: Sequence[StateSize],
    config: OptimizerConfig,
    device: torch.device,
    range_size: int,
    order: Sequence[int],
) -> StateStorage:
    folder, host = config.optimizer_nvme_offload, "meta" if device.type == "meta" else "cpu"
    if folder is None or host == "meta" or not sizes:
        return HostStorage(sizes, host, range_size, order)
    return FileStorage(Path(folder), sizes, range_size, order)


def _staged_dtypes(
    sizes: Sequence[StateSize], weight_dtype: torch.dtype, keeps_gradients: bool
) -> tuple[torch.dtype, ...]:
    """Return the dtypes of the tensors that pass through buffers for each range in an update."""
    if not sizes:
        return ()
    return (weight_dtype,) if keeps_gradients else (sizes[0].dtype, weight_dtype)


def _bytes_of(
    sizes: Sequence[StateSize],
    weight_dtype: torch.dtype,
    range_size: int,
    config: OptimizerConfig,
    *,
    keeps_gradients: bool,
) -> OffloadBytes:
    if not sizes:
        return OffloadBytes(0, 0, 0, 0, 0, 0)
    is_in_file = config.optimizer_nvme_offload is not None
    numel, state = sum(size.numel for size in sizes), sum(size.num_bytes for size in sizes)
    has_main, gradients = "main" in sizes[0].kinds, numel * sizes[0].dtype.itemsize
    host = staging_bytes(range_size, _staged_dtypes(sizes, weight_dtype, keeps_gradients))
    host += ring_bytes(sizes) if is_in_file else state
    return OffloadBytes(
        host=host + (gradients if keeps_gradients else 0),
        file=file_bytes(sizes) if is_in_file else 0,
        down=gradients + (0 if has_main else numel * weight_dtype.itemsize),
        up=numel * weight_dtype.itemsize,
        read=state if is_in_file else 0,
        written=state if is_in_file else 0,
    )


def _choose_by_host_memory(
    needed: Sequence[int], config: OptimizerConfig, topology: Topology
) -> tuple[int, int]:
    """Check that each machine has enough free host memory for its ranks; every rank must call it.

    Args:
        needed: bytes of this rank for each of several choices, the best first; as many on every rank.

    Returns:
        The first choice for which every machine has the memory, and the number of cores per rank of this
            machine.

    Raises:
        UserError: a machine has too little memory for the last choice; raised on every rank.
    """
    machine = socket.gethostname()
    mine: tuple[str, Sequence[int], int | None, set[int]] = machine, needed, free_bytes(), _cores()
    found = topology.world.gather_objects(mine, "host memory")
    machines = [name for name, *_ in found]
    choice = 0
    for name in dict.fromkeys(machines):
        totals = [
            sum(sizes) for sizes in zip(*(sizes for each, sizes, *_ in found if each == name), strict=True)
        ]
        total = totals[-1]
        free = min(
            (free for each, _, free, _ in found if each == name and free is not None), default=totals[0]
        )
        while choice < len(totals) - 1 and totals[choice] > free:
            choice += 1
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
    return choice, max(1, min(len(_cores()), len(cores) // machines.count(machine)))


def _cores() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _with_threads(number: int | None, work: Callable[..., T], *arguments: Any) -> T:
    """Run the work with this number of threads for torch's CPU kernels; None keeps the number."""
    if number is None:
        return work(*arguments)
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        return work(*arguments)
    finally:
        torch.set_num_threads(before)
