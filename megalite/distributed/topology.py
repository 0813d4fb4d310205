"""Topology: this rank's coordinates on the axes of the table in `axes.py`, over torch's DeviceMesh."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store
from torch.distributed.device_mesh import DeviceMesh

from megalite.distributed.agreement import RankRecord, at_work, check_agreement, wait_for_all
from megalite.distributed.axes import MODEL, MeshOptions, MeshSpec
from megalite.distributed.axis import (
    DEVICE,
    STORE_BARRIER,
    WORLD,
    Axis,
    AxisSet,
    EventStack,
    HeldPositions,
    Observer,
    build_axes,
)
from megalite.distributed.rendezvous import (
    Launch,
    check_start,
    choose_interface,
    open_store,
    refusal_reported,
    rendezvous_explained,
)
from megalite.utils.errors import UserError
from megalite.utils.hardware.process_settings import (
    check_nccl_shares_gpus,
    keep_freed_memory,
    limit_threads,
    prepare_environment,
    schedule_as_batch,
    settings_for,
)
from megalite.utils.torch_private import fake_backend_devices, fake_group


@dataclass(frozen=True)
class Topology:
    """Mesh of a run as one rank sees it: the rank's coordinate on every axis, and its device.

    It does not change, except between two iterations by `change_layout`, for all that refer to it.

    Attributes:
        mesh: the mesh of the model's axes.
        world: all ranks as one axis.
        meshes: axes of each mesh of the ranks by name, the model's first.
        is_zigzag: ranks hold positions in zigzag order; see `HeldPositions`.
        assigns_documents: each sample's documents are assigned to the ranks; see `HeldPositions`.
        events: this rank's open events, posted here and observed by the watchdog.
    """

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh
    world: Axis
    meshes: Mapping[str, AxisSet] = field(hash=False)
    is_zigzag: bool = False
    assigns_documents: bool = False
    events: EventStack = field(default_factory=EventStack, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        for each in self.meshes.values():
            for axis in (*each.axes.values(), *each.combined.values()):
                for part in axis.parts:
                    object.__setattr__(part, "observers", self.world.observers)  # one list for all axes

    @staticmethod
    @contextmanager
    def start(
        options: MeshOptions,
        launch: Launch,
        init_file: Path | None = None,
        must_agree: RankRecord | None = None,
        store: Store | None = None,
    ) -> Iterator[Topology]:
        """Join the process group of the run, and destroy it at the end of the block.

        Args:
            options: sizes of the axes, backend and time-out: `ParallelConfig.mesh`.
            launch: this process among the launched ones.
            init_file: file for the rendezvous, instead of MASTER_ADDR and MASTER_PORT.
            must_agree: settings that must be equal on every rank; not compared if `init_file` is set.
            store: store of this start, from `open_store`; by default it is opened here.

        Raises:
            UserError: world size is not the product of the axes' sizes (raised on every rank before any
                process group starts), or ranks were started with different settings.
        """
        sizes = options.sizes_in(launch.world_size)
        with refusal_reported() if init_file is None else nullcontext():  # nodes may differ
            shard_degree = options.shard_degree_in(sizes, launch.local_world_size)
        if options.backend != "gloo":
            prepare_environment(settings_for(options, sizes["tp"]))
        device = _pick_device(options, launch)
        if device.type == "cuda":
            _start_backward_thread(device)
        else:
            if options.keep_freed_memory:
                keep_freed_memory()
            limit_threads(options.num_threads, launch.local_world_size)
            if launch.local_world_size > 1:
                schedule_as_batch()
        timeout = timedelta(minutes=options.timeout_minutes)
        if store is None and init_file is None:
            store = open_store(launch, timeout)
        if store is not None and must_agree is not None:
            # Nodes may have different numbers of ranks.
            degree = str(shard_degree) if options.shards_within_node else ""
            check_start(launch, store, must_agree, device.type, degree)
        _join(launch, device, timeout, init_file, store)
        has_failed = True
        try:
            yield _from_mesh(options, sizes, shard_degree, launch.rank, device, timeout)
            has_failed = False
        except SystemExit:  # all ranks exit
            has_failed = False
            raise
        finally:
            # Destroying NCCL's group waits for collectives in flight, which ranks without the error never
            # join: this process would only report the error after the time-out.
            if not (has_failed and device.type == "cuda"):
                dist.destroy_process_group()

    def change_layout(self, options: MeshOptions) -> None:
        """End all process groups, and start those of another layout of the same ranks; every rank calls it.

        Nothing that was made from the old axes, such as a model, may be used afterwards.

        Raises:
            UserError: world size is not the product of the axes' sizes, or ranks shard within nodes; before
                anything has changed.
        """
        if options.shards_within_node:
            raise UserError("--shard-within-node: pass --data-parallel-shard-degree to change the layout")
        sizes = options.sizes_in(self.world_size)
        shard_degree = options.shard_degree_in(sizes, self.world_size)
        timeout = timedelta(minutes=options.timeout_minutes)
        # Groups of the same names have their addresses in the store, so the new ones have keys of their own.
        store, observers = dist.PrefixStore("layout", self.store), self.observers
        with self.world.wait(STORE_BARRIER):  # no rank may close a connection that another one still uses
            wait_for_all(self.store, self.world_size)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        dist.destroy_process_group()
        _start_groups(self.rank, self.world_size, self.device, timeout, store=store)
        changed = _from_mesh(options, sizes, shard_degree, self.rank, self.device, timeout)
        object.__setattr__(changed.world, "observers", observers)
        for name in ("mesh", "world", "meshes", "is_zigzag", "assigns_documents"):
            object.__setattr__(self, name, getattr(changed, name))
        self.__post_init__()

    @staticmethod
    @contextmanager
    def fake(options: MeshOptions, world_size: int, rank: int, device: str = "meta") -> Iterator[Topology]:
        """Return any rank of any world in this one process; its collectives do nothing.

        Raises:
            UserError: world size is not the product of the axes' sizes.
        """
        sizes = options.sizes_in(world_size)
        shard_degree = options.shard_degree_in(sizes, world_size)
        if "meta" not in (devices := fake_backend_devices()):
            devices.append("meta")  # not in torch's list
        dist.init_process_group("fake", rank=rank, world_size=world_size)
        try:
            yield _from_mesh(options, sizes, shard_degree, rank, torch.device(device), kind=FakeTopology)
        finally:
            dist.destroy_process_group()

    @staticmethod
    def alone() -> Topology:
        """Return a world of one rank that never communicates: it needs no process group."""
        no_group = cast(dist.ProcessGroup, None)
        axes = {name: Axis(name, 1, 0, (0,), no_group, spans=(name,)) for name in MODEL.names}
        world = Axis(WORLD, 1, 0, (0,), no_group, spans=MODEL.names)
        only = {MODEL.name: AxisSet(MODEL, axes, {})}
        return Topology(0, 1, torch.device("meta"), cast(DeviceMesh, None), world, only)

    @staticmethod
    def on_paper(sizes: Mapping[str, int], table: tuple[MeshSpec, ...] = (MODEL,)) -> Topology:
        """Return the first rank of a world with axes of these sizes, on meta tensors.

        Its groups exist in this process only, beside a running process group's. Their collectives do
        nothing.

        Args:
            sizes: sizes of the axes by name; 1 for axes that are missing.
            table: the meshes of the ranks, the model's first.
        """

        def axis_over(name: str, *spans: str) -> Axis:
            size = math.prod(sizes.get(each, 1) for each in spans)
            return Axis(name, size, 0, tuple(range(size)), fake_group(name, size), spans=spans)

        found = {}
        for mesh_spec in table:
            large = [
                tuple(each for each in names if sizes.get(each, 1) > 1) for names in mesh_spec.combinations()
            ]
            combined = {names: axis_over("_".join(names), *names) for names in large if len(names) > 1}
            axes = {name: axis_over(name, name) for name in mesh_spec.names}
            found[mesh_spec.name] = AxisSet(mesh_spec, axes, combined)
        world = axis_over(WORLD, *MODEL.names)
        return FakeTopology(0, world.size, torch.device("meta"), cast(DeviceMesh, None), world, found)

    @property
    def model(self) -> AxisSet:
        """Return the model's axes."""
        return next(iter(self.meshes.values()))

    @property
    def axes(self) -> Mapping[str, Axis]:
        """Return the model's axes by name, in the table's order."""
        return self.model.axes

    @property
    def sizes(self) -> dict[str, int]:
        """Return the size of each of the model's axes that messages name, in the table's order."""
        return {name: axis.size for name, axis in self.model.named.items()}

    @property
    def coordinates(self) -> dict[str, int]:
        """Return this rank's coordinate along each of the axes of `sizes`."""
        return self.model.coordinates

    def over(self, *names: str) -> Axis:
        """Return the ranks along several of the model's axes together; see `AxisSet.over`."""
        return self.model.over(*names)

    def is_first_outside(self, *axes: Axis) -> bool:
        """Return whether this rank is the first of the ranks that differ only along other axes than these.

        It is the rank that acts for all ranks that hold the same.
        """
        return self.model.is_first_outside(*axes)

    @property
    def sample_ranks(self) -> Axis:
        """Return the ranks that read different samples of a global batch."""
        return self.model.with_role("samples")

    @property
    def positions(self) -> HeldPositions:
        """Return the positions of each sample's tokens that this rank holds."""
        own = self.model.slice_along(*self.model.mesh_spec.with_role("positions"))
        return HeldPositions(own.index, own.count, self.is_zigzag, self.assigns_documents)

    @property
    def position_ranks(self) -> Axis:
        """Return the ranks that hold different tokens of the same samples."""
        return self.model.with_role("positions")

    @property
    def loss_ranks(self) -> Axis:
        """Return the ranks over which losses and token counts are summed for the global batch."""
        return self.model.with_role("losses")

    @property
    def replicas(self) -> Axis:
        """Return the ranks that hold the same parameters and sum their gradients; ZeRO shards over them."""
        return self.model.with_role("replicas")

    @property
    def pp(self) -> Axis:
        """Return the axis of pipeline stages."""
        return self.axes["pp"]

    @property
    def dp(self) -> Axis:
        """Return the data-parallel axis. Most code means one of its roles, such as `replicas`."""
        return self.axes["dp"]

    @property
    def tp(self) -> Axis:
        """Return the tensor-parallel axis."""
        return self.axes["tp"]

    def groups(self) -> tuple[Axis, ...]:
        """Return all that has a process group: axes, several axes as one, parts of an axis, and the world."""
        found: dict[str, Axis] = {}
        for each in self.meshes.values():
            for axis in (*each.axes.values(), *each.combined.values()):
                found |= {part.name: part for part in axis.parts}
        return (*found.values(), self.world)

    @property
    def observers(self) -> list[Observer]:
        """Return the observers of all events of this rank; see `observing`."""
        return self.world.observers

    @property
    def store(self) -> Store:
        """Return the store that all ranks of the run share."""
        return self.world.group.get_group_store()

    @property
    def is_reporter(self) -> bool:
        """Return whether this rank writes log lines and metrics: the last rank does, as in Megatron."""
        return self.rank == self.world_size - 1

    def to_host(self, tensor: Tensor) -> Tensor:
        """Wait for a tensor on the device and return it in host memory."""
        with self.events.during(DEVICE):
            return tensor.cpu()

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Raise a UserError on all ranks if some ranks raise it in this block.

        Otherwise the ranks without the error would hang in the next collective. The block must not contain a
        collective, and may take longer on some ranks than a collective's time-out.
        """
        mistake: str | None = None
        try:
            with at_work(self.store):
                yield
        except UserError as error:
            mistake = str(error)
        with self.world.wait(STORE_BARRIER):
            wait_for_all(self.store, self.world_size)
        mistakes = self.world.gather_objects(mistake, "errors")
        if first := next((text for text in mistakes if text), None):
            raise UserError(first)

    def check_agreement(self, record: RankRecord | None, topic: str) -> None:
        """Compare this rank's record with the records of all ranks; every rank must call it.

        Args:
            record: values to compare; None if this rank has none.

        Raises:
            UserError: records differ; raised on every rank.
        """
        if self.world_size > 1:
            with suppress(dist.DistError):  # a rank is gone; the next collective gives a better error
                check_agreement(self.store, self.rank, self.world_size, record, topic)


class FakeTopology(Topology):
    """Rank in a world whose other ranks do not exist."""

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Do nothing: no other rank waits."""
        yield

    def check_agreement(self, record: RankRecord | None, topic: str) -> None:
        """Do nothing: there are no other ranks."""


def _pick_device(options: MeshOptions, launch: Launch) -> torch.device:
    if options.backend == "gloo" or not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    has_its_own = count == 1 and "CUDA_VISIBLE_DEVICES" in os.environ  # as Slurm assigns them
    if launch.local_world_size > count:
        if options.ranks_share_gpus:
            check_nccl_shares_gpus()
        elif not has_its_own:
            raise UserError(
                f"{launch.local_world_size} ranks on a machine with {count} GPU{'s'[: count > 1]}: start one "
                "rank per GPU, pass --distributed-backend gloo to run on its CPU cores, or "
                "--ranks-share-gpus to try a layout over NCCL, slowly"
            )
    device = torch.device("cuda", launch.local_rank % count)
    torch.cuda.set_device(device)
    return device


def _start_backward_thread(device: torch.device) -> None:
    """Run a first kernel in autograd's thread of this GPU, which makes the CUDA context current there.

    torch warns if the first operator of that thread is a GEMM, as on the first stages of a pipeline.
    """
    torch.ones((), device=device, requires_grad=True).exp().backward()


def _join(
    launch: Launch, device: torch.device, timeout: timedelta, init_file: Path | None, store: Store | None
) -> None:
    """Start the process group over the store, or over a file."""
    if init_file is not None and launch.world_size > 1:
        choose_interface("localhost", many_hosts=False)
    with rendezvous_explained(launch):
        method = f"file://{init_file}" if init_file else None
        _start_groups(launch.rank, launch.world_size, device, timeout, store, method)


def _start_groups(
    rank: int,
    world_size: int,
    device: torch.device,
    timeout: timedelta,
    store: Store | None = None,
    init_method: str | None = None,
) -> None:
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        init_method=init_method,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )


def _from_mesh(
    options: MeshOptions,
    sizes: Mapping[str, int],
    shard_degree: int,
    rank: int,
    device: torch.device,
    timeout: timedelta | None = None,
    kind: type[Topology] = Topology,
) -> Topology:
    mesh, meshes = build_axes(options, sizes, shard_degree, rank, "cuda" if device.type == "cuda" else "cpu")
    size = mesh.size()
    assert dist.group.WORLD is not None
    world = Axis(WORLD, size, rank, tuple(range(size)), dist.group.WORLD, spans=options.model.names)
    topology = kind(rank, size, device, mesh, world, meshes, options.is_zigzag, options.assigns_documents)
    if timeout is not None:  # new groups have torch's default
        for axis in topology.groups():
            for group in (axis.group, axis.backward_group):
                if group is not None:
                    group.set_timeout(timeout)
    return topology
