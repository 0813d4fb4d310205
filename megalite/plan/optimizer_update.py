"""Estimate the update: Muon's matrices, and optimizer state outside of the GPU, by bytes and seconds."""

from __future__ import annotations

from dataclasses import dataclass

from megalite.optim import NUM_SLOTS, NUM_STAGED, RANGE_SIZE
from megalite.plan.communication import Group
from megalite.plan.kernel_time import gemm_seconds
from megalite.plan.layer_time import WorkSeconds
from megalite.plan.planned_run import PlannedRun
from megalite.plan.units import RankUnits, sizes_of

NODE_MEMORY_GB = 1000.0
"""Host memory of a usual node with 8 GPUs, in GB. A search does not offload more."""
NODE_MEMORY_GBPS = 200.0
"""GB/s at which a node's cores read and write memory in an update. Two sockets with 8 channels of DDR4-3200
have 410 on paper, and streams reach half of that."""
NODE_DISK_GBPS = 6.0
"""GB/s of a node's disks, read and written together: one NVMe disk on PCIe 4.0."""


@dataclass(frozen=True)
class OffloadedState:
    """Bytes of a rank's offloaded state, and the bytes that an update moves.

    Attributes:
        elements: parameters whose state is offloaded.
        state: bytes that the GPU does not hold.
        host: bytes of host memory, with buffers, and with gradients if a node has enough memory.
        file: bytes on the disk.
        gradients: bytes copied from the GPU to the host under backward.
        down, up: bytes copied from the GPU to the host in an update, and back.
        disk: bytes read from and written to the disk.
    """

    elements: float
    state: float
    host: float
    file: float
    gradients: float
    down: float
    up: float
    disk: float


def offloaded_state(run: PlannedRun, units: RankUnits) -> OffloadedState | None:
    """Return the offloaded state of a pipeline rank; None if it offloads none.

    Gradients are kept in host memory if they fit in a node's `NODE_MEMORY_GB`.
    Main weights are offloaded if they are separate from the model's weights: in 16 bits, without ZeRO 3.
    """
    optimizer = run.config.optimizer
    if not optimizer.offloads_optimizer:
        return None
    elements = optimizer.optimizer_offload_fraction * run.sharded(units.sizes, from_stage=1)
    main = max(4, run.element_bytes)
    has_main = run.element_bytes == 2 and run.zero_stage != 3
    weight = main if run.zero_stage == 3 else run.element_bytes
    each = main * (3 if has_main else 2) + run.average_bytes
    is_in_file = optimizer.optimizer_nvme_offload is not None
    keeps_gradients = (
        not is_in_file and run.cluster.ranks_per_node * (each + main) * elements <= NODE_MEMORY_GB * 1e9
    )
    kept = main if keeps_gradients else 0
    staged = NUM_STAGED * min(RANGE_SIZE, elements) * (weight + main - kept)
    ring = NUM_SLOTS * min(RANGE_SIZE, elements) * each
    return OffloadedState(
        elements=elements,
        state=each * elements,
        host=staged + kept * elements + (ring if is_in_file else each * elements),
        file=each * elements if is_in_file else 0.0,
        gradients=elements * kept,
        down=elements * (main - kept + (0 if has_main else weight)),
        up=elements * weight,
        disk=2 * each * elements if is_in_file else 0.0,
    )


def largest_offloaded_state(run: PlannedRun) -> OffloadedState | None:
    """Return the offloaded state of the rank with the most parameters."""
    return offloaded_state(run, run.largest_rank)


@dataclass(frozen=True)
class OffloadSeconds:
    """Seconds of each part of an update on the host.

    Attributes:
        gradients: copies to the host under backward.
        down, up: copies over the GPU's link to the host in the update, each way.
        update: the update on the CPU: it reads gradient, main weight, moments and average, and writes all
            but the gradient.
        disk: reads and writes.
    """

    gradients: float
    down: float
    up: float
    update: float
    disk: float

    def exposed(self, backward_seconds: float, forward_seconds: float) -> float:
        """Return the seconds that no computation hides.

        The slowest part limits the update. The next forward overlaps with it, layer by layer.
        """
        update = max(self.down, self.up, self.update, self.disk)
        return max(0.0, self.gradients - backward_seconds) + max(0.0, update - forward_seconds)


def updates_under_forward(run: PlannedRun) -> bool:
    """Return whether the next forward begins before all weights are updated.

    It does not if weights are all-gathered before it.
    """
    return run.zero_stage in (0, 3) or run.gathers_under_forward


def offload_seconds(run: PlannedRun, state: OffloadedState) -> OffloadSeconds:
    """Return the times of a rank's update. The ranks of a node share its memory and its disks."""
    gpu, ranks = run.cluster.gpu, run.cluster.ranks_per_node
    main, link = max(4, run.element_bytes), gpu.host_link_bandwidth * gpu.link_share
    rounded = run.element_bytes if run.element_bytes == 2 else 0
    update_bytes = state.elements * (7 * main + rounded + 2 * run.average_bytes)
    return OffloadSeconds(
        gradients=state.gradients / link,
        down=state.down / link,
        up=state.up / link,
        update=update_bytes * ranks / (NODE_MEMORY_GBPS * 1e9),
        disk=state.disk * ranks / (NODE_DISK_GBPS * 1e9),
    )


def muon_seconds(run: PlannedRun) -> WorkSeconds:
    """Return the time to exchange and orthogonalize the matrices of the pipeline rank with the most of them.

    The ranks of a stage share the matrices out, so no rank is faster than the largest matrix. Two all-to-alls
    move the elements that a rank updates.
    """
    weights = max((run.matrices_of(units) for units in run.ranks), key=len)
    if not weights:
        return WorkSeconds()
    group = Group(run.cluster, run.tp * run.num_sharing, 1)
    seconds = [_orthogonalization_seconds(run, *shape) for each in weights for shape in each.matrices]
    elements = run.sharded(sizes_of(weights), from_stage=1)
    return WorkSeconds(
        gemms=max(sum(seconds) / group.size, *seconds),
        dp=2 * group.gather_seconds(elements * run.element_bytes) if group.size > 1 else 0.0,
    )


def _orthogonalization_seconds(run: PlannedRun, rows: int, columns: int) -> float:
    """Return the seconds of the three GEMMs of each step of Newton-Schulz iteration."""
    small, large = sorted((rows, columns))
    sizes = (small, small, large), (small, small, small), (small, large, small)
    gemms = sum(gemm_seconds(run.cluster.gpu, *each, element_bytes=run.element_bytes) for each in sizes)
    return run.config.optimizer.muon_num_ns_steps * gemms
