"""Choose the layout of a run for the hardware on which it starts: --layout auto."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megalite.config import Config, DataConfig
from megalite.config.config import LAYOUT_FIELDS
from megalite.config.fields import with_fields
from megalite.config.option import flag_with_value
from megalite.plan.calibrate import with_cpu_defaults
from megalite.plan.communication import Cluster
from megalite.plan.estimate import Costs, RunPlan, large
from megalite.plan.layout_fields import layout_flags, layout_name, layout_values, routing_line
from megalite.plan.layout_search import (
    NUM_NEAREST,
    SIMILAR,
    SearchResult,
    search,
    simplest,
)
from megalite.plan.plan_options import read_calibration
from megalite.plan.plan_request import Request
from megalite.plan.planned_run import first_problem
from megalite.plan.rank_memory import node_host_bytes
from megalite.utils.errors import UserError, counted, first_line
from megalite.utils.files import parse_json, read_regular, replace_file
from megalite.utils.hardware.gpus import CPU_CORE, GPUS, Gpu, gpu_of_device, peak_tflops_of
from megalite.utils.hardware.node_hardware import CPU, NodeHardware
from megalite.utils.object_store import ObjectFolder, is_object_url

_GB = 1e9
NOTE = "layout.json"
"""File in the --save folder with the layouts that ran out of memory."""
_MAX_NOTE_BYTES = 1_000_000
SMALLER = 0.8
"""Planned tensors of the next layout after one that ran out of memory, at most, as a share of its tensors."""
CPU_SHARE = 0.75
"""Share of a CPU rank's memory for a plan: an allocator that keeps freed memory needs a third more."""
SIMILAR_ON_CPU = 1.25
"""As `SIMILAR`, on a CPU: the plan's collectives are NCCL's, and its rates may not be this machine's."""


@dataclass(frozen=True)
class OutOfMemoryNote:
    """Note of a layout that ran out of memory.

    Attributes:
        device: name of the device, or cpu.
        memory_bytes: memory of the device.
        planned_bytes: memory that was planned for the layout.
        flags: the layout as flags.
    """

    device: str
    memory_bytes: float
    planned_bytes: float
    flags: str


@dataclass(frozen=True)
class LayoutChoice:
    """Layout that was chosen for a run, in a form that rank 0 can send to the other ranks.

    Attributes:
        values: the chosen options by field, with the global batch size.
        lines: three lines for the log: the layout, the reason, and the flags that keep it.
        note: what to record if the layout runs out of memory.
    """

    values: dict[str, Any]
    lines: tuple[str, ...]
    note: OutOfMemoryNote

    def apply(self, config: Config) -> Config:
        """Return the config in this layout."""
        return with_fields(config, layout="manual", **self.values)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> LayoutChoice:
        content = json.loads(text)
        values = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in content["values"].items()
        }
        return LayoutChoice(values, tuple(content["lines"]), OutOfMemoryNote(**content["note"]))


def choose_layout(
    config: Config,
    set_fields: Collection[str],
    world_size: int,
    hardware: NodeHardware,
    notes: Sequence[OutOfMemoryNote] = (),
    *,
    must_fit: bool = True,
) -> LayoutChoice:
    """Choose the layout of a run: the simplest of the fastest layouts that fit.

    The search changes no option that is set, and nothing that changes the run.

    Args:
        config: config with its vocabulary size and global batch size; layout options that are not set have
            their defaults.
        notes: layouts that ran out of memory.
        must_fit: raise an error if no layout is planned to fit; otherwise choose the defaults then.

    Raises:
        UserError: training rejects every layout, or no layout fits; it names the nearest ones.
    """
    cluster = _cluster(config, world_size, hardware, notes)
    request = _request(config, set_fields, cluster, is_cpu=hardware.device == CPU)
    found = search(request, host_bytes=hardware.host_bytes)
    defaults = RunPlan(request.planned_run())
    if found.fitting:
        ratio = SIMILAR_ON_CPU if hardware.device == CPU else SIMILAR
        plan, count = simplest(found.fitting, ratio), len(found.fitting)
        reason = "; ".join(filter(None, (_reason(plan, ratio, count), _comparison(plan, defaults))))
    elif must_fit:
        kept = [flag_with_value(name, config.values()[name]) for name in LAYOUT_FIELDS if name in set_fields]
        raise UserError("\n".join(_nothing_fits(found, cluster, hardware, kept)))
    else:
        plan, reason = defaults, "no layout is planned to fit, so all options keep their defaults"
    if routing := routing_line(plan.run.config):
        reason += f"; it assumes {routing}"
    if limits := _limits(cluster.gpu, hardware, notes):
        reason += f"; at most {_gb(min(limits))}, since a layout that needs more ran out of memory"
    return _described(plan, reason, hardware, names_batch="global_batch_size" not in set_fields)


def _described(plan: RunPlan, reason: str, hardware: NodeHardware, *, names_batch: bool) -> LayoutChoice:
    """Return the plan's layout as a choice, with its lines for the log.

    Args:
        names_batch: the flags that keep the layout need the global batch size too.
    """
    config = plan.run.config
    values = layout_values(config) | {"global_batch_size": config.training.global_batch_size}
    flags = shlex.join(layout_flags(config))
    if names_batch:
        flags += f" --global-batch-size {config.training.global_batch_size}"
    device = "CPU cores" if hardware.device == CPU else hardware.device
    if config.parallel.calibration is not None:
        device += f", with the rates of {config.parallel.calibration}"
    elif hardware.device == CPU:
        device += ", with the rates of a usual core"
    ranks, layout = counted(plan.run.cluster.world_size, "rank"), layout_name(plan.run)
    lines = (
        f"layout: chosen for {ranks} of {_gb(hardware.memory_bytes)} ({device}): {layout}",
        f"layout: {reason}",
        f"layout: to keep it, pass {flags}",
    )
    note = OutOfMemoryNote(hardware.device, hardware.memory_bytes, plan.memory_bytes, flags)
    return LayoutChoice(values, lines, note)


def _request(config: Config, set_fields: Collection[str], cluster: Cluster, *, is_cpu: bool) -> Request:
    """Return the request of a search that changes only options that are not set."""
    fixed = set(set_fields)
    if is_cpu:
        fixed |= {"cpu_offload_activations", "optimizer_cpu_offload"}  # all memory is the host's
        config = with_cpu_defaults(config)
    if config.parallel.dynamic_context_parallel:
        fixed.add("cp_comm_type")
    planned = replace(
        config,
        parallel=replace(config.parallel, layout="manual", dynamic_context_parallel=False),
        data=DataConfig(mock_data=True),  # a plan does not depend on it, and its rules take time
    )
    return Request(planned, cluster, Costs(), frozenset(fixed))


def _cluster(
    config: Config, world_size: int, hardware: NodeHardware, notes: Sequence[OutOfMemoryNote]
) -> Cluster:
    """Return the hardware as the planner describes it, with at most the memory that `notes` leave."""
    gpu = _rates(config, hardware)
    if hardware.device == CPU:
        keeps_freed = config.parallel.keep_freed_memory
        available = hardware.memory_bytes * (CPU_SHARE if keeps_freed else 1.0)
    else:
        available = replace(gpu, memory_gib=hardware.memory_bytes / 2**30).memory_bytes
    available = min([available, *_limits(gpu, hardware, notes)])
    reserved = GPUS["a100-80"].memory_gib * 2**30 - GPUS["a100-80"].memory_bytes
    gpu = replace(gpu, memory_gib=(available + reserved) / 2**30)
    network = hardware.network_gbps or gpu.network_gbps
    return Cluster(gpu, world_size, hardware.num_ranks, gpu.node_gbps, network)


def _limits(gpu: Gpu, hardware: NodeHardware, notes: Sequence[OutOfMemoryNote]) -> list[float]:
    """Return the most bytes of a layout after each of the notes that this hardware left."""
    here, residual = (hardware.device, hardware.memory_bytes), gpu.residual_gb * _GB
    known = [note.planned_bytes for note in notes if (note.device, note.memory_bytes) == here]
    return [residual + SMALLER * (planned - residual) for planned in known]  # the residual never shrinks


def _rates(config: Config, hardware: NodeHardware) -> Gpu:
    """Return the measured rates of --calibration, a usual core's, or the row of the GPU in `GPUS`.

    A GPU without a row has an A100's, with its own peak if it is known.
    """
    if config.parallel.calibration is not None:
        return read_calibration(config.parallel.calibration)
    if hardware.device == CPU:
        return CPU_CORE
    gpu, peak = gpu_of_device(hardware.device), peak_tflops_of(hardware.device)
    if gpu is None:
        gpu = replace(GPUS["a100-80"], tflops=peak or GPUS["a100-80"].tflops)
    if not hardware.has_peer_access:  # messages go through the host
        gpu = replace(gpu, node_gbps=gpu.host_link_bandwidth / 1e9)
    return replace(gpu, num_sms=hardware.num_sms)


def _reason(plan: RunPlan, ratio: float, count: int) -> str:
    available, config = plan.run.cluster.gpu.memory_bytes, plan.run.config
    samples, length = config.training.global_batch_size or 0, config.model.seq_length
    return (
        f"planned {plan.time.seconds:.3g} s per iteration of {large(samples * length)} tokens (samples of "
        f"{length:,}) and {_gb(plan.memory_bytes)} of {_gb(available)} per rank, the "
        f"simplest within {ratio - 1:.0%} of the fastest of {count} that fit"
    )


def _comparison(plan: RunPlan, defaults: RunPlan) -> str:
    """Compare the chosen layout with the defaults."""
    if layout_flags(plan.run.config) == layout_flags(defaults.run.config):
        return "the same as the defaults"
    if first_problem(defaults.run.config, defaults.run.cluster) is not None:
        return ""  # training would reject the defaults
    if not defaults.fits:
        return f"the defaults need {_gb(defaults.memory_bytes)}"
    return f"the defaults take {defaults.time.seconds:.3g} s"


def _nothing_fits(
    found: SearchResult, cluster: Cluster, hardware: NodeHardware, kept: Sequence[str]
) -> Iterator[str]:
    """Yield why no layout fits and what helps, and then a line for each of the nearest layouts.

    Args:
        kept: options of the layout that are set, as flags.
    """
    free = f"remove {', '.join(kept)} to let more be chosen, or " if kept else ""
    remedy = f"{free}use more ranks, a smaller model or shorter samples"
    ranks, available = counted(cluster.world_size, "rank"), cluster.gpu.memory_bytes
    nearest = found.nearest(NUM_NEAREST)
    if found.lacking_host:
        plan = min(found.lacking_host, key=lambda plan: node_host_bytes(plan.run))
        needed, host = _gb(node_host_bytes(plan.run)), _gb(hardware.host_bytes)
        yield (
            f"no layout of {ranks} fits {_gb(available)} per rank without offloading, and "
            f"{layout_name(plan.run)} needs {needed} of the {host} of a node's host memory; {remedy}"
        )
    elif nearest:
        yield f"no layout of {ranks} fits {_gb(available)} per rank; {remedy}; the nearest layouts:"
    else:
        reasons = "; ".join(text for text, _ in found.rejected.most_common(NUM_NEAREST))
        yield f"training rejects every layout of {ranks}: {reasons or 'none is possible'}"
    for plan in nearest:
        memory = plan.largest_memory
        sizes = sorted(memory._asdict().items(), key=lambda item: -item[1])[:2]
        parts = ", ".join(f"{_gb(size)} are {kind}" for kind, size in sizes)
        lacking = _gb(plan.memory_bytes - available)
        yield f"{layout_name(plan.run)} lacks {lacking}: of {_gb(plan.memory_bytes)}, {parts}"


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / _GB:.{1 if num_bytes >= 10 * _GB else 2}f} GB"


def read_notes(folder: str | None) -> list[OutOfMemoryNote]:
    """Return the layouts that ran out of memory in earlier starts of the run with this folder.

    Raises:
        UserError: the file of notes is damaged.
    """
    if folder is None:
        return []
    file = f"{folder}/{NOTE}"
    try:
        if is_object_url(folder):
            content = parse_json(ObjectFolder(folder).read(NOTE))
        else:
            content = parse_json(read_regular(Path(file), _MAX_NOTE_BYTES))
        return [OutOfMemoryNote(**note) for note in content["ran_out_of_memory"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{file} is damaged ({first_line(error)}): remove it, or pass --layout manual"
        ) from None


def add_note(folder: str | None, note: OutOfMemoryNote) -> str | None:
    """Record a layout that ran out of memory; return the file, or None if the run has no folder."""
    if folder is None:
        return None
    notes = [*read_notes(folder), note]
    content = json.dumps({"ran_out_of_memory": [asdict(each) for each in notes]}, indent=2).encode()
    if is_object_url(folder):
        ObjectFolder(folder).write(NOTE, content)
    else:
        with replace_file(Path(folder) / NOTE) as stream:
            stream.write(content)
    return f"{folder}/{NOTE}"
