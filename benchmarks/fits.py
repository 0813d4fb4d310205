"""Check with the planner whether a step fits into this machine's memory, before anything is built."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import torch
from other_programs import PROGRAMS, OtherProgram, other_run

from megalite.config import Config
from megalite.plan.communication import Cluster
from megalite.plan.planned_run import PlannedRun
from megalite.plan.rank_memory import rank_memories
from megalite.utils.errors import UserError
from megalite.utils.hardware.gpus import GPUS

_GB = 1e9
PROCESS_BYTES = {"cpu": 0.5 * _GB, "cuda": 2.2 * _GB}
"""Memory of a process with torch, besides tensors."""
GAPS = 1.3
"""Factor on activations if glibc keeps freed memory: blocks of many sizes leave gaps."""
MAX_MICRO_BATCH = 16


def step_bytes(config: Config, device_type: str, program: OtherProgram | None = None) -> float:
    """Return the planned memory of a rank's training step.

    Args:
        program: the program that trains; by default megalite.
    """
    gpu = replace(GPUS["h200"], residual_gb=0.0)
    tp = config.parallel.tp
    cluster = Cluster(gpu, tp, gpu.gpus_per_node, gpu.node_gbps, gpu.network_gbps)
    run = PlannedRun(config, cluster) if program is None else other_run(program, config, cluster)
    planned = rank_memories(run)[0]
    held = planned.weights + planned.gradients + planned.optimizer
    has_gaps = device_type == "cpu" and program is None and config.parallel.keep_freed_memory
    return PROCESS_BYTES[device_type] + held + (planned.total - held) * (GAPS if has_gaps else 1.0)


def plain_step_bytes(config: Config, device_type: str) -> float:
    """Return the planned memory in plain PyTorch, with fused attention and logits copied to fp32."""
    return step_bytes(config, device_type, replace(PROGRAMS["plain-torch"], gradient_bytes=4))


def free_bytes(device_type: str) -> float:
    """Return the free memory of this machine's GPU, or of its host without a GPU."""
    if device_type == "cuda":
        return float(torch.cuda.mem_get_info()[0])
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return 1024 * next(float(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))


def largest_micro_batch(config_of: Callable[[int], Config], device_type: str, free: float) -> int:
    """Return the microbatch size: 1 on a CPU, on a GPU the largest power of two that leaves 10% free."""
    size = 1
    while device_type == "cuda" and size < MAX_MICRO_BATCH:
        if step_bytes(config_of(2 * size), device_type) > 0.9 * free:
            break
        size *= 2
    return size


def check_fits(
    name: str, config: Config, others: Iterable[tuple[str, Config]], device_type: str, free: float
) -> None:
    """Refuse a step that does not fit into this machine's memory.

    Args:
        name: name of the model.
        others: models to suggest instead, each with its step.

    Raises:
        UserError: it does not fit; the message says what would fit.
    """
    needed = step_bytes(config, device_type)
    if needed <= free:
        return
    fitting = [other for other, step in others if step_bytes(step, device_type) <= free]
    layers = range(config.model.num_layers - 1, 0, -1)
    most = next((n for n in layers if step_bytes(_with_layers(config, n), device_type) <= free), None)
    advice = [*fitting, *([f"{name} with --layers {most}"] if most else [])]
    raise UserError(
        f"--model {name} in {config.model.params_dtype} with --micro-batch-size "
        f"{config.training.micro_batch_size} needs {needed / _GB:.1f} GB by the plan, and "
        f"{free / _GB:.1f} GB are free: {', '.join(advice) or 'no model that has a name'} would fit"
    )


def _with_layers(config: Config, num_layers: int) -> Config:
    return replace(config, model=replace(config.model, num_layers=num_layers))
