"""Options of a plan: the cluster and its measured rates, failures, scaling tables, options without effect."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import get_type_hints

from megalite.config import Config
from megalite.frontends.tool_parser import (
    ToolParser,
    duration,
    local_path,
    positive_int,
    positive_number,
    whole_number,
)
from megalite.plan.communication import Cluster
from megalite.plan.goodput import NODE_STORAGE_GBPS, REPAIR_DAYS, RESTART_MINUTES, Reliability
from megalite.utils.commands import command_name
from megalite.utils.errors import UserError, first_line, shortened
from megalite.utils.files import parse_json, read_regular, replace_file
from megalite.utils.hardware.gpus import GPUS, Gpu, find_gpu

ETHERNET_NODE_GBPS = 12.5
"""GB/s of the Ethernet of a node, one way, which its GPUs share: an adapter of 100 Gb/s."""
_MAX_CALIBRATION_BYTES = 100_000


def add_cluster(parser: ToolParser) -> None:
    """Add the flags of the cluster."""
    add = parser.add_argument
    add("--gpu", help=f"type of GPU: {', '.join(GPUS)}")
    add(
        "--gpu-set",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="change figures of the GPU, for example tflops=400 memory_gib=96",
    )
    add("--calibrate", action="store_true", help="measure this machine, and plan for it")
    add("--world-size", type=positive_int, help="number of GPUs (default: as many as the layout has)")
    add("--gpus-per-node", type=positive_int, help="GPUs per node (default: as in usual servers)")
    add(
        "--node-gbps",
        type=positive_number,
        help="gigabytes/s from a GPU to others in its node, one way (default: as in usual servers)",
    )
    add(
        "--network-gbps",
        type=positive_number,
        help="gigabytes/s from a GPU to other nodes, one way (default: as in usual servers)",
    )


def cluster_of(own: argparse.Namespace, config: Config) -> Cluster:
    """Return the requested cluster: GPUs of a table, of a calibration file, or of this machine."""
    file = config.parallel.calibration
    if own.calibrate:
        if own.gpu is not None:
            raise UserError(
                f"--calibrate plans for this machine, and --gpu {own.gpu} for another: remove one"
            )
        from megalite.plan.calibrate import measured_gpu  # imports torch

        gpu = measured_gpu(config.model.params_dtype)
        if file is not None:
            write_calibration(file, gpu)
    elif file is not None:
        if own.gpu is not None:
            raise UserError(f"--calibration {file} and --gpu {own.gpu} plan for different GPUs: remove one")
        gpu = read_calibration(file)
    elif own.gpu is None:
        raise UserError(
            f"--gpu is missing: pass one of {', '.join(GPUS)}, or --calibrate to measure this machine"
        )
    else:
        gpu = find_gpu(own.gpu)
    gpu = _changed(gpu, own.gpu_set)
    return Cluster(
        gpu,
        own.world_size or config.parallel.mesh.smallest_world,
        own.gpus_per_node or gpu.gpus_per_node,
        own.node_gbps or gpu.node_gbps,
        own.network_gbps or gpu.network_gbps,
    )


def _changed(gpu: Gpu, changes: Sequence[str]) -> Gpu:
    """Return the GPU with --gpu-set's changes, each NAME=VALUE."""
    kinds = {name: kind for name, kind in get_type_hints(Gpu).items() if kind in (int, float)}
    for change in changes:
        name, _, text = change.partition("=")
        if name not in kinds:
            raise UserError(
                f"--gpu-set {change}: {name!r} is not a figure of a GPU; choose one of {', '.join(kinds)}"
            )
        try:
            value = positive_number(text)
        except argparse.ArgumentTypeError as error:
            raise UserError(f"--gpu-set {change}: {error}") from None
        gpu = replace(gpu, **{name: kinds[name](value)})
    return gpu


def write_calibration(file: str, gpu: Gpu) -> None:
    """Write the figures as a JSON object.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        with replace_file(file) as stream:
            stream.write(json.dumps(asdict(gpu), indent=2).encode())
    except OSError as error:
        raise UserError(f"--calibration {file} cannot be written ({error.strerror}): pass another") from None


def read_calibration(file: str) -> Gpu:
    """Return the figures of a file that `write_calibration` wrote.

    Raises:
        UserError: the file cannot be read, or its figures are not all positive numbers.
    """
    write = f"{command_name('plan')} --calibrate --calibration {file} writes it"
    try:
        figures = parse_json(read_regular(Path(file), _MAX_CALIBRATION_BYTES, follow=True))
        kinds = get_type_hints(Gpu)
        may_be_0 = {each.name for each in fields(Gpu) if each.default == 0}
        if not isinstance(figures, dict) or not kinds.keys() - may_be_0 <= figures.keys() <= kinds.keys():
            raise ValueError("it does not have the figures of a GPU")
        for name, figure in figures.items():
            allowed = (int, float) if kinds[name] is float else (kinds[name],)
            if type(figure) not in allowed or not (
                0 < figure < float("inf") or (figure == 0 and (name in may_be_0 or kinds[name] is bool))
            ):
                raise ValueError(f"{name} is {figure!r}")
        return Gpu(**figures)
    except OSError as error:
        raise UserError(f"--calibration {file} cannot be read ({error.strerror}): {write}") from None
    except ValueError as error:
        raise UserError(f"--calibration {file} is damaged ({first_line(error)}): {write}") from None


@dataclass(frozen=True)
class Scaling:
    """Request of --scaling.

    Attributes:
        nodes: numbers of nodes, ascending.
        ethernet_gbps: gigabytes per second from a GPU to other nodes over Ethernet, one way.
        svg: file for a picture.
    """

    nodes: tuple[int, ...]
    ethernet_gbps: float
    svg: Path | None = None


RELIABILITY_FLAGS = ("storage_gbps", "restart_minutes", "node_repair", "spare_nodes")
"""Flags, as fields of `Reliability`, that have an effect only with --node-mtbf."""


def add_failures(parser: ToolParser) -> None:
    """Add the flags of a run whose nodes fail."""
    add = parser.add_argument
    add(
        "--node-mtbf",
        type=duration,
        metavar="TIME",
        help="mean time between failures of a node, such as 26000h, 1000d or 3y, to plan failures, the save "
        "interval and spare nodes",
    )
    add(
        "--storage-gbps",
        type=positive_number,
        help="gigabytes/s at which all ranks together save or load a checkpoint (default: "
        f"{NODE_STORAGE_GBPS:g} per node)",
    )
    add(
        "--restart-minutes",
        type=positive_number,
        help="minutes from a node's failure until the ranks load the checkpoint (default: "
        f"{RESTART_MINUTES:g})",
    )
    add(
        "--node-repair",
        type=duration,
        metavar="TIME",
        help=f"time until a failed node can be used again, such as 12h (default: {REPAIR_DAYS:g}d)",
    )
    add(
        "--spare-nodes",
        type=whole_number,
        help="nodes that wait to replace failed ones (default: enough for 99%% of the failures)",
    )


def reliability_of(own: argparse.Namespace) -> Reliability | None:
    """Return how often nodes fail; None without --node-mtbf."""
    if own.node_mtbf is None:
        return None
    return Reliability(own.node_mtbf, **{name: getattr(own, name) for name in RELIABILITY_FLAGS})


SCALING_FLAGS = ("--scaling", "--ethernet-gbps", "--svg")


def refuse_options(
    tokens: Sequence[str], flags: Sequence[str], commands: Sequence[str] = ("plan",), reason: str = ""
) -> None:
    """Refuse options of a plan in a command line of another command.

    Args:
        commands: megalite's commands that have the options.
        reason: why they have no meaning here, after a comma.

    Raises:
        UserError: one of them is there.
    """
    for token in tokens:
        if (flag := token.partition("=")[0]) in flags:
            names = " and ".join(map(command_name, commands))
            raise UserError(f"{flag} is an option of {names}: remove it{reason}")


def add_scaling(parser: ToolParser) -> None:
    """Add the flags of a scaling table."""
    add = parser.add_argument
    add(
        "--scaling",
        type=_node_counts,
        metavar="N,N",
        help="numbers of nodes, such as 1,2,4,8: print the efficiency of weak and strong scaling",
    )
    add(
        "--ethernet-gbps",
        type=positive_number,
        help="gigabytes/s from a GPU to other nodes over Ethernet, one way, which --scaling compares with "
        f"--network-gbps (default: {ETHERNET_NODE_GBPS:g} per node)",
    )
    add("--svg", type=local_path, metavar="FILE", help="also draw --scaling's table to this SVG file")


def _node_counts(text: str) -> tuple[int, ...]:
    """Parse two or more numbers of nodes; an argparse `type`."""
    parts = text.split(",")
    if len(parts) < 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(
            f"{shortened(text)!r} is not a list of two or more numbers of nodes, such as 1,2,4"
        )
    return tuple(sorted({positive_int(part) for part in parts}))


def scaling_of(own: argparse.Namespace, config: Config, cluster: Cluster) -> Scaling | None:
    """Return what --scaling requests, and refuse flags that contradict it."""
    if own.scaling is None:
        return None
    counts = f"--scaling {','.join(map(str, own.scaling))}"
    if config.training.global_batch_size is None:
        raise UserError(f"{counts} needs --global-batch-size, the batch on {own.scaling[-1]} nodes")
    both = "both set the number of GPUs: remove"
    if own.world_size is not None:
        raise UserError(f"{counts} and --world-size {own.world_size} {both} --world-size")
    if (dp := config.parallel.data_parallel_size) is not None:
        raise UserError(f"{counts} and --dp {dp} {both} --dp")
    if own.search:
        raise UserError(
            f"{counts} plans one layout, and --search many: pass --tp, --pp … instead of --search"
        )
    ethernet = own.ethernet_gbps or ETHERNET_NODE_GBPS / cluster.gpus_per_node
    return Scaling(own.scaling, ethernet, own.svg)


COSTS = ("train_tokens", "watts", "price_per_gpu_hour", "node_mtbf")
"""Options that describe a whole run."""
NEEDED = {
    **dict.fromkeys(RELIABILITY_FLAGS, "node_mtbf"),
    **dict.fromkeys(("ethernet_gbps", "svg"), "scaling"),
    "top": "search",
}
"""Options that have an effect only with another one."""


def unused_options(own: argparse.Namespace, config: Config) -> list[str]:
    """Return a line for each option of the plan that has no effect because of other options."""
    training, lines = config.training, list[str]()
    lengths = {"--train-iters": training.train_iters, "--train-samples": training.train_samples}
    other = [f"{flag} {value}" for flag, value in lengths.items() if value is not None]
    if own.train_tokens is not None and other:
        lines.append(f"{other[0]} has no effect on the plan: --train-tokens is the length of the run")
    elif own.train_tokens is None and not other:
        costs = {"--watts": own.watts, "--price-per-gpu-hour": own.price_per_gpu_hour}
        lines += [
            f"{flag} {value:g} has no effect: the run has no length, pass --train-tokens or --train-iters"
            for flag, value in costs.items()
            if value is not None
        ]
    for name, needed in NEEDED.items():
        if getattr(own, name) is not None and not getattr(own, needed):
            lines.append(f"{_flag(name)} has no effect without {_flag(needed)}")
    if own.scaling is not None:
        passed = [name for name in COSTS if getattr(own, name) is not None]
        lines += [f"{_flag(name)} has no effect with --scaling" for name in passed]
    return lines


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
