"""Topology: this rank's coordinates on the axes pp, dp and tp over torch's DeviceMesh.

``rank = (pp.rank * dp.size + dp.rank) * tp.size + tp.rank``: ranks of one tensor-parallel group are
adjacent (they communicate most and share a node), pipeline stages are farthest apart.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous

from megalite.config import ParallelConfig
from megalite.distributed.agreement import REFUSED, RankRecord, check_agreement
from megalite.distributed.mesh import AXES, REPLICATE, SHARD, another_group, build_mesh
from megalite.distributed.network import choose_interface, is_this_machine, loopback_listener
from megalite.distributed.observer import DEVICE, STORE_BARRIER, EventStack, Observer, Wait, observed
from megalite.distributed.store_barrier import at_work, name_of_start, wait_for_all, wait_for_listener
from megalite.errors import UserError
from megalite.hardware.cpu import keep_freed_memory, limit_threads, schedule_as_batch
from megalite.hardware.cuda_environment import prepare_environment, settings_for

WORLD = "world"
"""Name of the axis of all ranks; it is not an axis of the mesh."""

_SECONDS_TO_REFUSE = 10.0
"""Seconds for which a rank that refuses its settings tries to report this to the others."""


@dataclass(frozen=True)
class Axis:
    """One mesh axis, seen from one rank.

    Attributes:
        size: number of ranks along the axis.
        rank: this rank's coordinate, in [0, size).
        ranks: global ranks along the axis, in order of their coordinate.
        group: process group of those ranks.
        backward_group: on the pipeline axis, a second group of the same ranks for gradients, so that their
            messages do not wait for messages with hidden states.
        sharded: on the data-parallel axis, this rank's group of neighbours that ZeRO shards over; None if
            ZeRO shards over the whole axis.
        replicate: ranks that hold the same shards as this rank, one from each group; None if there is one
            group. Observers of the axis observe both parts.
        observers: called at the beginning and end of each wait for other ranks.
    """

    name: str
    size: int
    rank: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup
    backward_group: dist.ProcessGroup | None = None
    sharded: Axis | None = None
    replicate: Axis | None = None
    observers: list[Observer[Wait]] = field(default_factory=list, compare=False, repr=False)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1

    @property
    def shard(self) -> Axis:
        """Return the ranks that ZeRO shards over."""
        return self.sharded or self

    @property
    def parts(self) -> tuple[Axis, ...]:
        """Return the axis, and the parts that ZeRO divides it into, if any."""
        return (self, *(part for part in (self.replicate, self.sharded) if part is not None))

    def wait_begins(self, what: str, of: object = "", peer: int | None = None) -> None:
        """Post that this rank begins to wait in a collective or for a message; see `Wait`."""
        for observer in self.observers:
            observer.begins(Wait(self.name, what, of, peer))

    def wait_ends(self, what: str, of: object = "", peer: int | None = None) -> None:
        """Post that this wait has ended."""
        for observer in self.observers:
            observer.ends(Wait(self.name, what, of, peer))

    def wait(self, what: str, of: object = "") -> AbstractContextManager[None]:
        """Post that this rank waits in the block."""
        return observed(self.observers, Wait(self.name, what, of))


@dataclass(frozen=True)
class Launch:
    """Identifies this process among the launched processes: by torchrun, or with the same variables set.

    Attributes:
        restarts: number of torchrun's restarts of the ranks, plus Slurm's restarts of the job.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    restarts: int = 0

    @staticmethod
    def from_environment() -> Launch:
        """Read RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and the counts of restarts.

        The restart counts are TORCHELASTIC_RESTART_COUNT and SLURM_RESTART_COUNT. If neither RANK nor
        WORLD_SIZE is set, there is one rank.

        Raises:
            UserError: only some of the variables that ``env://`` needs are set, or one is not valid.
        """
        needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        given = [name for name in needed if name in os.environ]
        restarts = sum(map(_environment_int, ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")))
        if not {"RANK", "WORLD_SIZE"} & set(given):
            return Launch(0, 1, 0, 1, restarts)
        if missing := [name for name in needed if name not in os.environ]:
            raise UserError(
                f"{', '.join(given)} set but not {', '.join(missing)}: set all four, or use torchrun"
            )
        rank, world_size, _ = map(_environment_int, ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        local_world_size = _environment_int("LOCAL_WORLD_SIZE", world_size)
        if rank >= world_size or local_world_size == 0:
            mistake = UserError(
                f"RANK={rank}, WORLD_SIZE={world_size}, LOCAL_WORLD_SIZE={local_world_size} are not valid: "
                "RANK must be below WORLD_SIZE, and LOCAL_WORLD_SIZE at least 1"
            )
            mistake.on_one_rank = rank >= world_size
            raise mistake
        local_rank = _environment_int("LOCAL_RANK", rank % local_world_size)
        return Launch(rank, world_size, local_rank, local_world_size, restarts)


def _environment_int(name: str, default: int = 0) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        mistake = UserError(f"environment variable {name}={text!r} is not a number: set it to an integer")
        mistake.on_one_rank = name in ("RANK", "LOCAL_RANK")
        raise mistake
    return int(text)


@dataclass(frozen=True)
class Topology:
    """Holds this rank's coordinate on every axis, its device and the mesh.

    Attributes:
        world: all ranks as one axis.
        events: this rank's open events, posted here and observed by the watchdog.
    """

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh
    pp: Axis
    dp: Axis
    tp: Axis
    world: Axis
    events: EventStack = field(default_factory=EventStack, init=False, compare=False, repr=False)

    @staticmethod
    @contextmanager
    def start(
        parallel: ParallelConfig,
        launch: Launch,
        init_file: Path | None = None,
        must_agree: RankRecord | None = None,
    ) -> Iterator[Topology]:
        """Join the process group of the run, and destroy it at the end of the block.

        Args:
            parallel: sizes of the axes, backend and time-out.
            launch: this process among the launched ones.
            init_file: file for the rendezvous, instead of MASTER_ADDR and MASTER_PORT.
            must_agree: settings that must be equal on every rank; not compared if `init_file` is set.

        Raises:
            UserError: world size is not tp * pp * dp (raised on every rank before any process group starts),
                or ranks were started with different settings.
        """
        sizes = _axis_sizes(parallel, launch.world_size)
        with refusal_reported() if init_file is None else nullcontext():  # nodes may differ
            shard_degree = _shard_degree(parallel, sizes[AXES.index("dp")], launch.local_world_size)
        if parallel.distributed_backend != "gloo":
            prepare_environment(settings_for(parallel.tp, parallel.zero_stage))
        device = _pick_device(parallel.distributed_backend, launch)
        if device.type == "cpu":
            if parallel.keep_freed_memory:
                keep_freed_memory()
            limit_threads(parallel.num_threads, launch.local_world_size)
            if launch.local_world_size > 1:
                schedule_as_batch()
        timeout = timedelta(minutes=parallel.distributed_timeout_minutes)
        if must_agree is not None:
            # Nodes may have different numbers of ranks.
            degree = str(shard_degree) if parallel.shards_within_node else ""
            must_agree = {**must_agree, "the size of the groups that ZeRO shards within": degree}
        _join(launch, device, timeout, init_file, must_agree)
        has_failed = True
        try:
            yield _from_mesh(sizes, shard_degree, launch.rank, device, timeout)
            has_failed = False
        except SystemExit:  # all ranks exit
            has_failed = False
            raise
        finally:
            # Destroying NCCL's group waits for collectives in flight, which ranks without the error never
            # join: this process would only report the error after the time-out.
            if not (has_failed and device.type == "cuda"):
                dist.destroy_process_group()

    @staticmethod
    @contextmanager
    def fake(
        parallel: ParallelConfig, world_size: int, rank: int, device: str = "meta"
    ) -> Iterator[Topology]:
        """Return any rank of any world in this one process; its collectives do nothing.

        Raises:
            UserError: world size is not tp * pp * dp.
        """
        sizes = _axis_sizes(parallel, world_size)
        shard_degree = _shard_degree(parallel, sizes[AXES.index("dp")], world_size)
        if "meta" not in (devices := dist.Backend.backend_capability["fake"]):
            devices.append("meta")  # not in torch's list
        dist.init_process_group("fake", rank=rank, world_size=world_size)
        try:
            yield _from_mesh(sizes, shard_degree, rank, torch.device(device), kind=FakeTopology)
        finally:
            dist.destroy_process_group()

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
        mistakes: list[str | None] = [None] * self.world_size
        with self.world.wait("all-gather", "errors"):
            dist.all_gather_object(mistakes, mistake)
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
    """A rank in a world whose other ranks do not exist."""

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Do nothing: no other rank waits."""
        yield

    def check_agreement(self, record: RankRecord | None, topic: str) -> None:
        """Do nothing: there are no other ranks."""


def _axis_sizes(parallel: ParallelConfig, world_size: int) -> tuple[int, int, int]:
    """Return the sizes in the order of AXES; dp defaults to world size / (tp * pp)."""
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    dp = parallel.data_parallel_size or max(1, world_size // (tp * pp))
    if tp * pp * dp != world_size:
        raise UserError(
            f"world size {world_size} is not tp {tp} x pp {pp} x dp {dp} = {tp * pp * dp}: "
            f"start {tp * pp * dp} ranks (torchrun --nproc-per-node), or change --tp, --pp or --dp"
        )
    return pp, dp, tp


def _shard_degree(parallel: ParallelConfig, dp: int, local_world_size: int) -> int:
    """Return how many of `dp` replicas ZeRO shards over, on nodes with `local_world_size` ranks."""
    degree = parallel.shard_degree_among(dp, local_world_size)
    if parallel.shards_within_node and degree == 1 < dp:
        raise UserError(
            f"--shard-within-node: the {local_world_size} ranks of a node do not hold two complete replicas "
            f"of --tp {parallel.tp} that divide the {dp} replicas: pass --data-parallel-shard-degree N, or "
            "remove it to shard over all of them"
        )
    if dp % degree:
        raise UserError(
            f"--data-parallel-shard-degree {degree} does not divide the data-parallel size {dp}: pass one of "
            "its divisors"
        )
    return degree


def _pick_device(backend: str, launch: Launch) -> torch.device:
    if backend != "gloo" and torch.cuda.is_available():
        count = torch.cuda.device_count()
        has_its_own = count == 1 and "CUDA_VISIBLE_DEVICES" in os.environ  # as Slurm assigns them
        if launch.local_world_size > count and not has_its_own:
            raise UserError(
                f"{launch.local_world_size} ranks on a machine with {count} GPU{'s'[: count > 1]}: start one "
                "rank per GPU, or pass --distributed-backend gloo to run on its CPU cores"
            )
        device = torch.device("cuda", launch.local_rank % count)
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


@contextmanager
def refusal_reported() -> Iterator[None]:
    """Report a UserError of this rank in this block to the other ranks, which also raise it.

    The block must run before any rank waits for another. If all ranks raise the error, rank 0 opens no store
    and nothing is reported: rank 0 prints it.
    """
    try:
        yield
    except UserError as error:
        with suppress(UserError, dist.DistError, TimeoutError):
            _report_refusal(Launch.from_environment(), error)
        raise


def _report_refusal(launch: Launch, error: UserError) -> None:
    if launch.rank > 0:
        wait_for_listener(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), _SECONDS_TO_REFUSE)
        store = _store_of_start(launch, timedelta(seconds=_SECONDS_TO_REFUSE))
        check_agreement(store, launch.rank, launch.world_size, {REFUSED: str(error)}, "start")


def _join(
    launch: Launch,
    device: torch.device,
    timeout: timedelta,
    init_file: Path | None,
    must_agree: RankRecord | None,
) -> None:
    """Start the process group after checking that the ranks' settings agree: otherwise they could hang."""
    if launch.world_size > 1:
        master = "localhost" if init_file else os.environ["MASTER_ADDR"]
        choose_interface(master, many_hosts=launch.local_world_size < launch.world_size)
    try:
        store = None if init_file else _store_of_start(launch, timeout)
        if store is not None and must_agree is not None:
            record = {**must_agree, "the device": device.type}
            check_agreement(store, launch.rank, launch.world_size, record, "start")
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            init_method=f"file://{init_file}" if init_file else None,
            store=store,
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
    except (dist.DistNetworkError, dist.DistStoreError, OSError) as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        mistake = UserError(
            f"rank {launch.rank}: no rendezvous at MASTER_ADDR:MASTER_PORT {address} "
            f"({str(error).splitlines()[0]}): every rank must name rank 0's host and a free port of it, and "
            "rank 0 must be running"
        )
        mistake.on_one_rank = True  # rank 0 may be gone, or may never have started
        raise mistake from None


def _store_of_start(launch: Launch, timeout: timedelta) -> Store:
    """Return the store for the rendezvous, without the keys of an earlier start."""
    if launch.world_size == 1:
        return HashStore()
    is_torchruns = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    master = os.environ["MASTER_ADDR"]
    if launch.rank == 0 and not is_torchruns and is_this_machine(master):
        listener = loopback_listener(master, int(os.environ["MASTER_PORT"]))
        address, port = listener.getsockname()[:2]
        store: Store = TCPStore(
            address,
            port,
            launch.world_size,
            is_master=True,
            timeout=timeout,
            master_listen_fd=listener.detach(),
            use_libuv=os.environ.get("USE_LIBUV", "1") == "1",
        )
    else:
        if launch.rank > 0:
            wait_for_listener(master, int(os.environ["MASTER_PORT"]), timeout.total_seconds())
        store, _, _ = next(rendezvous("env://", launch.rank, launch.world_size, timeout=timeout))
    store.set_timeout(timeout)
    if is_torchruns:  # torchrun's store and its keys outlive the ranks
        name = name_of_start(store, launch.rank, launch.world_size, timeout.total_seconds())
        return PrefixStore(name, store)
    return store


def _from_mesh(
    sizes: tuple[int, int, int],
    shard_degree: int,
    rank: int,
    device: torch.device,
    timeout: timedelta | None = None,
    kind: type[Topology] = Topology,
) -> Topology:
    mesh, lines = build_mesh(sizes, shard_degree, "cuda" if device.type == "cuda" else "cpu")
    axes = {name: _axis(lines[name], name) for name in AXES}
    if axes["pp"].size > 1:
        axes["pp"] = replace(axes["pp"], backward_group=another_group(mesh, "pp"))
    if shard_degree < axes["dp"].size:
        observers = axes["dp"].observers
        sharded, replicas = (
            replace(_axis(lines[name], name), observers=observers) for name in (SHARD, REPLICATE)
        )
        axes["dp"] = replace(axes["dp"], sharded=sharded, replicate=replicas)
    if timeout is not None:  # DeviceMesh gives its groups torch's default
        parts = [part for axis in axes.values() for part in axis.parts]
        for group in (*(part.group for part in parts), axes["pp"].backward_group):
            if group is not None:
                group.set_timeout(timeout)
    size = mesh.size()
    assert dist.group.WORLD is not None
    world = Axis(WORLD, size, rank, tuple(range(size)), dist.group.WORLD)
    return kind(rank=rank, world_size=size, device=device, mesh=mesh, world=world, **axes)


def _axis(line: DeviceMesh, name: str) -> Axis:
    ranks = tuple(line.mesh.tolist())
    return Axis(name, len(ranks), line.get_local_rank(), ranks, line.get_group())
