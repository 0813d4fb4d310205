"""Plan of a run as it starts: its layout, the memory of its ranks, and how long to keep gathered weights."""

from __future__ import annotations

import gc
import json
import os
import re
import resource
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta

import torch
from torch.distributed import Store

from megalite.config import Config
from megalite.distributed.collectives import all_reduce
from megalite.distributed.rendezvous import Launch, check_start, open_store
from megalite.distributed.topology import Topology
from megalite.model.stage import StageProvider, is_own_model
from megalite.optim.weight_gathering import WeightGathering
from megalite.plan.advice import Device, advise, advise_largest, planned_run_on
from megalite.plan.auto_layout import LayoutChoice, OutOfMemoryNote, add_note, choose_layout, read_notes
from megalite.plan.optimizer_update import offloaded_state
from megalite.plan.planned_run import PlannedRun
from megalite.plan.rank_memory import TIGHT_SHARE, choose_gathering, host_activations, rank_memories
from megalite.utils.errors import UserError
from megalite.utils.hardware.gpus import GPUS
from megalite.utils.hardware.host_memory import free_bytes
from megalite.utils.hardware.node_hardware import NodeHardware, inspect_node, weakest
from megalite.utils.log import log

_GB = 1e9
_KEEP_FLAG = "--fsdp-reshard-after-forward"
_MESSAGE = re.compile(
    "out of memory"
    "|DefaultCPUAllocator: (can't allocate|not enough) memory"
    "|Storage size calculation overflowed|integer multiplication overflow"
    r"|aten::(new_)?(empty|zeros|contiguous|clone)\b.* API call failed",
    re.IGNORECASE,
)
"""Matches torch's messages. A GPU's error has the type `OutOfMemoryError`; others are a plain `RuntimeError`,
which names only the call if a compiled kernel requested the memory."""
_REQUESTED = re.compile(r"tried to allocate ([\d.]+) ?(bytes|[KMG]iB)", re.IGNORECASE)
_UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_CPU_RESIDUAL_BYTES = 0.4 * _GB
"""Memory of a process on a CPU besides its tensors: Python, torch and gloo."""


class MemoryExhausted(UserError):
    """Raised on a rank that ran out of memory."""

    on_one_rank = True


@dataclass(frozen=True)
class LayoutTrial:
    """Layout that a start of a run trains in.

    Attributes:
        lines: why it was chosen, for the log.
        store: the store of this start.
    """

    config: Config
    lines: tuple[str, ...]
    launch: Launch
    store: Store


def train_in_chosen_layout(
    config: Config,
    set_fields: Collection[str],
    launch: Launch,
    settings: dict[str, str],
    with_vocabulary: Callable[[Config], Config],
    train: Callable[[LayoutTrial], int],
) -> int:
    """Train in the layout that the planner chooses, and return the exit status.

    If a rank runs out of memory, the next start chooses a smaller layout. A run of one rank starts again at
    once, but only once.

    Args:
        set_fields: fields that a flag or a file sets; they are not chosen.
        settings: what must agree on all ranks.
        with_vocabulary: sets the vocabulary size of a config from its tokenizer; called on rank 0.
        train: trains, and returns the exit status.
    """

    def choose(*notes: OutOfMemoryNote) -> tuple[LayoutChoice, Store]:
        def choose_for(node: NodeHardware) -> LayoutChoice:
            known, must_fit = [*notes, *read_notes(save)], "layout" in set_fields
            planned = with_vocabulary(config)
            return choose_layout(planned, set_fields, launch.world_size, node, known, must_fit=must_fit)

        store, hardware = _checked_start(config, launch, settings)
        return agreed_layout(launch, store, hardware, choose_for), store

    save = config.checkpoint.save
    choice, store = choose()
    try:
        return train(LayoutTrial(choice.apply(config), choice.lines, launch, store))
    except MemoryExhausted as error:
        explanation = str(error)
    # Here the traceback is gone, and with it the tensors of the trainer.
    gc.collect()
    torch.cuda.empty_cache()
    note_file = add_note(save, choice.note)
    if launch.world_size > 1:
        advice = (
            f"the next start chooses a layout that needs less memory ({note_file})"
            if note_file
            else "pass --save, so that the next start chooses a layout that needs less memory"
        )
        raise MemoryExhausted(f"{explanation}\n{advice}")
    for line in explanation.splitlines():
        log.warning("%s", line)
    log.warning("starting once more, in a layout that needs less memory")
    smaller, store = choose(choice.note)
    if smaller.values == choice.values:
        raise MemoryExhausted(explanation)
    again = replace(launch, restarts=launch.restarts + 1)  # resumes from this start's checkpoints
    try:
        return train(LayoutTrial(smaller.apply(config), smaller.lines, again, store))
    except MemoryExhausted:
        add_note(save, smaller.note)
        raise


def _checked_start(config: Config, launch: Launch, settings: dict[str, str]) -> tuple[Store, NodeHardware]:
    """Return the store of a start and this rank's node, and check that all ranks were started alike."""
    parallel = config.parallel
    store = open_store(launch, timedelta(minutes=parallel.distributed_timeout_minutes))
    hardware = inspect_node(
        parallel.distributed_backend,
        launch.local_rank,
        launch.local_world_size,
        shares_gpus=parallel.ranks_share_gpus,
    )
    check_start(launch, store, settings, hardware.device_type)
    return store, hardware


def agreed_layout(
    launch: Launch, store: Store, hardware: NodeHardware, choose: Callable[[NodeHardware], LayoutChoice]
) -> LayoutChoice:
    """Let rank 0 choose the layout for the hardware of all ranks, and return its choice on every rank.

    Args:
        hardware: this rank's node.
        choose: chooses the layout for the weakest hardware; called on rank 0.

    Raises:
        UserError: raised by `choose`; on every rank.
    """
    store.set(f"megalite/hardware/{launch.rank}", json.dumps(asdict(hardware)))
    if launch.rank == 0:
        keys = [f"megalite/hardware/{rank}" for rank in range(launch.world_size)]
        nodes = {text: NodeHardware(**json.loads(text)) for text in store.multi_get(keys)}
        try:
            answer = {"choice": choose(weakest(list(nodes.values()))).to_json()}
        except UserError as error:
            answer = {"mistake": str(error)}
        store.set("megalite/layout", json.dumps(answer))
    answer = json.loads(store.get("megalite/layout"))
    if mistake := answer.get("mistake"):
        raise UserError(mistake)
    return LayoutChoice.from_json(answer["choice"])


@dataclass(frozen=True)
class RankPlan:
    """Plan of a run on the device of one of its ranks.

    Attributes:
        provider: builds the stages of the program's own model.
        num_local: ranks of this machine. They are assumed to need as much as this rank, and share the memory
            of a CPU.
    """

    config: Config
    topology: Topology
    provider: StageProvider | None = None
    num_local: int = 1

    @property
    def planned_config(self) -> Config:
        """Return the config with the number of replicas of a node in place of `--shard-within-node`."""
        if not self.config.parallel.mesh.shards_within_node:
            return self.config
        degree = self.topology.replicas.shard.size
        return replace(self.config, parallel=replace(self.config.parallel, data_parallel_shard_degree=degree))

    @property
    def device(self) -> Device:
        """Return the memory of the device, or this rank's share of the host's."""
        device = device_of(self.topology.device)
        if device.is_host:
            device = replace(device, memory_bytes=device.memory_bytes / self.num_local)
        return device

    @property
    def run(self) -> PlannedRun:
        return planned_run_on(self.planned_config, self.topology.world_size, self.device, self.provider)

    def check_host_memory(self) -> None:
        """Check that the host has memory for the activations that its ranks offload, besides optimizer state.

        Optimizer state alone is checked where it is allocated. Nothing is checked if the program's own model
        cannot be planned.

        Raises:
            UserError: the host has too little memory; raised on every rank.
        """
        number, free = self.config.recompute.cpu_offload_activations, free_bytes()
        if number == 0 or free is None:
            return
        run, rank = self.run, self.topology.pp.rank
        try:
            state, activations = offloaded_state(run, run.ranks[rank]), host_activations(run)
        except UserError:
            return
        needed = self.num_local * (activations[rank] + (state.host if state else 0.0))
        also = " and offloaded optimizer state need" if state else " needs"
        with self.topology.agreed():
            if needed > free:
                raise UserError(
                    f"--cpu-offload-activations {number}{also} {needed / _GB:.1f} GB of host memory for the "
                    f"{self.num_local} ranks of a machine, of which {free / _GB:.1f} GB are free: pass a "
                    "smaller --cpu-offload-activations"
                )

    def warn_of_memory(self, where: str = "") -> None:
        """Warn if the plan of a layout that was passed needs more memory than a rank has.

        Rank 0 plans, without a collective. The program's own model is not planned.

        Args:
            where: beginning of the line.
        """
        is_passed = self.config.parallel.layout == "manual"
        if self.topology.rank != 0 or not is_passed or is_own_model(self.provider):
            return
        try:
            advice = advise_largest(self.planned_config, self.topology.world_size, self.device)
        except UserError:
            return  # it cannot be planned
        if advice is not None:
            log.warning(
                "%splanned %.1f GB of %.1f per rank: the run may run out of memory",
                where,
                advice.memory.total / _GB,
                self.device.memory_bytes / _GB,
            )
            for line in advice.lines():
                log.warning("%s", line)

    def weight_gathering(self) -> WeightGathering:
        """Resolve `fsdp_reshard_after_forward`; a collective with ZeRO stage 3 in a pipeline.

        Weights are kept only if the planned memory of every stage fits on every rank's device.
        """
        parallel, topology = self.config.parallel, self.topology
        if parallel.zero_stage_among(topology.replicas.shard.size) < 3:
            return WeightGathering(False, "weights are not sharded")
        if parallel.fsdp_reshard_after_forward != "default":
            return WeightGathering.configured(parallel)
        to_keep = f"pass {_KEEP_FLAG} never to keep them"
        if parallel.pp == 1:
            return WeightGathering(False, f"there is no pipeline; {to_keep}")
        if topology.device.type == "meta":
            return WeightGathering(False, f"a dry run has no GPU to measure; {to_keep}")
        run = self.run
        try:
            kept = rank_memories(replace(run, full_weights_fit=True))
        except UserError as error:  # on every rank
            return WeightGathering(False, f"{error}; {to_keep}")
        fits = torch.tensor(float(choose_gathering(run).gathers_once), device=topology.device)
        all_fit = all_reduce(fits, topology.world, of="the choice of gathered weights") == topology.world_size
        keeps_weights = bool(topology.to_host(all_fit))
        needed, available = max(memory.total for memory in kept) / _GB, run.cluster.gpu.memory_bytes / _GB
        relation = f"{'fits in' if keeps_weights else 'is more than'} {TIGHT_SHARE:.0%} of {available:.2f} GB"
        if not keeps_weights and needed <= TIGHT_SHARE * available:
            relation = "does not fit another rank's memory"
        return WeightGathering(
            keeps_weights, f"a stage with its full weights needs {needed:.2f} GB, which {relation}"
        )

    @contextmanager
    def explains_out_of_memory(self) -> Iterator[None]:
        """Explain an allocation failure in this block.

        Raises:
            MemoryExhausted: memory ran out; the message lists the estimated uses of this rank's memory and
                the flags to change.
        """
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            explained = MemoryExhausted("\n".join(self._explanation(error)))
            raise explained from None  # drops the traceback, which holds tensors

    def _explanation(self, error: BaseException) -> Iterator[str]:
        topology, limits = self.topology, device_of(self.topology.device)
        found = _REQUESTED.search(str(error))
        requested = ""
        if found is not None:
            num_bytes = float(found[1]) * _UNITS[found[2].lower()]
            requested = f" when it requested {num_bytes / _GB:.2f} GB more"
        coordinates = ", ".join(
            f"{axis.name} {axis.rank} of {axis.size}" for axis in topology.model.named.values()
        )
        if topology.device.type == "cuda":
            held = torch.cuda.memory_allocated(topology.device)
            free_blocks = torch.cuda.memory_reserved(topology.device) - held
            usage = (
                f"of {limits.memory_bytes / _GB:.2f} GB, tensors hold {held / _GB:.2f} GB, and the allocator "
                f"{free_blocks / _GB:.2f} GB more in blocks that were too small"
            )
        else:
            usage = f"the process can use {limits.memory_bytes / _GB:.2f} GB"
        # People search a log for "RuntimeError" and "CUDA out of memory".
        name = f"RuntimeError: {topology.device.type.upper()} out of memory"
        yield f"rank {topology.rank} ({coordinates}) ran out of memory{requested} ({name}): {usage}"
        traceback.clear_frames(error.__traceback__)  # frees the step's tensors: planning needs memory too
        try:
            advice = advise(self.planned_config, topology.world_size, topology.pp.rank, limits, self.provider)
            yield from advice.lines()
        except UserError as cannot_plan:
            yield f"there is no advice: {cannot_plan}"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception means that memory ran out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _MESSAGE.search(str(error)) is not None


def device_of(device: torch.device) -> Device:
    """Return the memory that a rank can use on a device of this machine."""
    if device.type == "cuda":
        residual = GPUS["a100-80"].residual_gb * _GB
        return Device(float(torch.cuda.get_device_properties(device).total_memory), residual)
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # shared by its ranks
    memory = machine if limit == resource.RLIM_INFINITY else min(machine, limit)
    return Device(float(memory), _CPU_RESIDUAL_BYTES, is_host=True)
