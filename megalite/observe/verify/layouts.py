"""Parse the names of layouts: ``tp2pp2dp2``, ``tp2mbs4``, ``pp2v2``, ``pp4zb``, ``tp2dp2+sp+zero1``."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megalite.config import Config, check_config
from megalite.config.config import LAYOUT_SWITCHES, num_stages
from megalite.config.fields import with_fields
from megalite.distributed.axes import EXPERTS, MODEL
from megalite.pipeline.schedules import SCHEDULES
from megalite.utils.errors import ConfigError, UserError
from megalite.utils.log import log

_SCHEDULES = {entry.layout_suffix: name for name, entry in SCHEDULES.items() if entry.layout_suffix}
"""Schedules by their suffix in a layout name; the number of chunks selects an interleaved schedule."""
_SUFFIXES = sorted(_SCHEDULES, reverse=True)  # match zbv before its prefix zb
_NAMES = [
    *(axis.name for axis in MODEL.by_flag),
    *(axis.name for axis in EXPERTS.axes if axis.name in ("ep", "etp")),
]
_SIZE = re.compile(rf"({'|'.join(_NAMES)}|shard|mbs|v)([1-9][0-9]*)|({'|'.join(_SUFFIXES)})")
_SWITCH = re.compile(r"\+(a2a\+p2p|[^+]*)")

DEFAULT = (
    ("tp4", "tp2"),
    ("pp4", "pp3", "pp3+uneven", "pp2", "pp2+uneven"),
    ("dp2",),
    ("mbs1", "mbs2"),
    ("tp2+sp",),
    ("tp2+overlap",),
    ("cp2",),
    ("cp2+p2p",),
    ("dp2+zero2",),
    ("dp4+zero2",),
    ("dp2+zero3",),
    ("pp2v2", "pp2v3"),
    ("pp2zbv",),
    ("tp1+full",),
    ("tp1+offload",),
)
"""The layouts that are verified if none are named: of each row, the first one that the config can run and
that changes it.

Four ranks share the keys and values of two groups, and a pipeline of three or more has a stage that is
neither first nor last. Only another micro-batch size shows a mean over a microbatch, or numbers that depend
on the index in it, and only sequence parallelism shows a gradient that is partial over tp. With two shards,
an order of the shards that is wrong may be its own inverse.
"""

WITH_EXPERTS = (("dp2ep2",), ("tp2dp2ep4etp1+sp",))
"""Further rows for models with experts; in the second, the experts are on more ranks than the replicas."""

TABLE = (
    *("tp2", "tp4", "pp2", "pp4", "dp2", "dp4", "tp2pp2", "tp2dp2", "pp2dp2", "tp2pp2dp2", "mbs1"),
    *("tp2+sp", "tp4+sp", "pp2gpipe", "pp2v2", "pp4zb", "pp2zbv", "pp2dpv", "pp2+uneven"),
    *("dp4+zero1", "dp4+zero2", "dp4+zero3", "tp2pp2dp2+sp+zero1+gather", "tp2pp2dp2+sp+zero3"),
    *("dp4shard2+zero1+gather", "dp4shard2+zero2", "dp4shard2+zero3"),
    *("pp2gpipedp2+zero3", "pp2v2dp2+zero3", "pp2zbdp2+zero3", "pp2zbvdp2+zero3", "pp2dp2+zero3+kept"),
    *("tp1+full", "tp1+selective", "tp2+sp+full", "tp4+sp+selective", "pp2v2+full", "pp4zb+selective"),
    *("pp2zbv+full", "pp2+uneven+selective", "dp4+zero1+full", "dp4+zero2+selective", "dp4+zero3+full"),
    *("tp2pp2dp2+sp+zero1+gather+full", "tp2pp2+sp+offload", "dp4+zero2+offload", "dp4+zero3+offload"),
    *("pp4zb+selective+offload", "pp2v2+full+offload"),
    *("tp2+overlap+full", "tp4+sp+overlap", "tp2pp2zb+sp+overlap"),
    *("tp2cp2+sp+selective", "dp2cp2+zero1+a2a"),
)
"""The layouts of ``--layouts all``: each technique alone, and common combinations."""


def layouts_named(names: str, config: Config) -> list[Layout]:
    """Return the layouts in a list such as ``tp2,pp2+sp``; ``default`` and ``all`` name several.

    Raises:
        UserError: a name is not a layout, or the config can run no default layout.
    """
    if names == "default":
        return default_layouts(config)
    return [Layout.parse(name) for name in (TABLE if names == "all" else names.split(","))]


def default_layouts(config: Config) -> list[Layout]:
    """Return the default layouts of a config, and log the rows of `DEFAULT` that it cannot run.

    Raises:
        ConfigError: it can run none of them.
    """
    names = (*DEFAULT, *(WITH_EXPERTS if config.model.has_experts else ()))
    rows = [[Layout.parse(name) for name in row] for row in names]
    batch_size = common_batch_size(config, [layout for row in rows for layout in row])
    known = [Layout().apply(config, batch_size)]
    chosen: list[Layout] = []
    problems: list[str] = []
    for row in rows:
        refused = ""
        for layout in row:
            try:
                applied = layout.apply(config, batch_size)
                _check_num_gpus(config, layout)
            except ConfigError as error:
                refused = f"layout {layout}: {error.problems[0]}"
                continue
            refused = ""
            if applied not in known:
                known.append(applied)
                chosen.append(layout)
                break
        problems += [refused] * bool(refused)
    if not chosen:
        raise ConfigError(problems)
    for problem in problems:
        log.info("not verified: %s", problem)
    return chosen


def _check_num_gpus(config: Config, layout: Layout) -> None:
    """Raise `ConfigError` if ranks use NCCL, are more than the GPUs, and may not share them."""
    num_gpus, parallel = torch.cuda.device_count(), config.parallel
    enough = 1 if parallel.ranks_share_gpus else layout.world_size
    if parallel.distributed_backend == "nccl" and enough > num_gpus:
        raise ConfigError(
            [
                f"--distributed-backend nccl needs {enough} GPUs, and there are {num_gpus}"
                + ("; --ranks-share-gpus lets ranks share them" if num_gpus > 0 else "")
            ]
        )


def common_batch_size(config: Config, layouts: Sequence[Layout]) -> int:
    """Return the config's global batch size, or one that all layouts can divide."""
    return config.training.global_batch_size or (
        config.training.micro_batch_size * max(layout.num_sample_ranks for layout in layouts)
    )


def _refuse_repeats(name: str, parts: Sequence[tuple[str, str, str]], switches: Sequence[str]) -> None:
    """Raise `UserError` if two parts of a layout's name set the same option: the first would be ignored.

    Args:
        parts: name and size of each axis, or the suffix of a schedule.
    """
    first: dict[str, str] = {}
    named = [(axis if axis not in ("", "v") else "schedule", "".join((axis, *rest))) for axis, *rest in parts]
    for option, text in (*named, *((LAYOUT_SWITCHES[each].option, f"+{each}") for each in switches)):
        if option in first:
            raise UserError(
                f"layout {name!r} has both {first[option]} and {text}, which set the same option: remove one"
            )
        first[option] = text


def _refuse_without_effect(
    name: str, sizes: Mapping[str, int], schedule: str | None, switches: Sequence[str]
) -> None:
    """Raise `UserError` if a schedule or a switch of a layout's name needs ranks that the layout lacks."""
    if schedule is not None and sizes.get("pp", 1) == 1:
        raise UserError(f"layout {name!r} has the schedule {schedule} and no pipeline: write pp2{schedule}")
    for switch in switches:
        if not LAYOUT_SWITCHES[switch].has_effect(sizes):
            needed = " or ".join(f"{axis}2" for axis in LAYOUT_SWITCHES[switch].axes)
            raise UserError(f"layout {name!r} has +{switch} without effect: write {needed} too")


@dataclass(frozen=True)
class Layout:
    """Sizes of the mesh axes, and options that override the config.

    None leaves an option as it is in the config.

    Attributes:
        sizes: size of each axis with more than one rank, by its name; also of etp with one, which is not its
            default.
        shard: number of replicas that ZeRO shards over; None for all of them.
        mbs: micro-batch size.
        v: chunks per rank of an interleaved pipeline.
        schedule: zb for ZB-H1, zbv for ZB-V, dpv for DualPipeV, or gpipe.
        switches: names after plus signs, in the order of `LAYOUT_SWITCHES`. With offload, the activations of
            at least the first layer of each stage are in host memory, and so is the state of AdamW, unless
            the config keeps it in a file.
    """

    sizes: Mapping[str, int] = field(default_factory=dict, hash=False)
    shard: int | None = None
    mbs: int | None = None
    v: int | None = None
    schedule: str | None = None
    switches: tuple[str, ...] = ()

    @staticmethod
    def parse(name: str) -> Layout:
        """Parse a name such as ``tp2pp2+sp``: sizes of axes (1 if not named), then switches after plus signs.

        Raises:
            UserError: the name has a different form, or a part without effect.
        """
        sizes, switches = name.partition("+")[0], _SWITCH.findall(name)
        parts = _SIZE.findall(sizes)
        is_made_of_parts = parts and "".join(map("".join, parts)) == sizes
        if not is_made_of_parts or not set(switches) <= LAYOUT_SWITCHES.keys():
            raise UserError(
                f"layout {name!r} must consist of {', '.join(_NAMES)}, shard, v and mbs with a size, "
                f"{' or '.join(_SUFFIXES)}, and optionally +{' or +'.join(LAYOUT_SWITCHES)}: "
                "write tp2pp2, dp4, tp2mbs4, tp2+sp"
            )
        _refuse_repeats(name, parts, switches)
        named: dict[str, Any] = {name: int(size) for name, size, _ in parts if name}
        named_sizes = {axis: named.pop(axis) for axis in _NAMES if axis in named}
        axis_sizes = {axis: size for axis, size in named_sizes.items() if size > 1 or axis == "etp"}
        schedule = next((schedule for _, _, schedule in parts if schedule), None)
        _refuse_without_effect(name, axis_sizes, schedule, switches)
        in_order = tuple(switch for switch in LAYOUT_SWITCHES if switch in switches)
        return Layout(axis_sizes, **named, schedule=schedule, switches=in_order)

    def __str__(self) -> str:
        chunks = f"v{self.v}" if self.v else self.schedule or ""
        names = [f"{axis}{self.size(axis)}{chunks * (axis == 'pp')}" for axis in _NAMES if axis in self.sizes]
        name = "".join(names)
        if self.shard is not None:
            name += f"shard{self.shard}"
        if self.mbs is not None:
            name += f"mbs{self.mbs}"
        return "+".join((name or ("tp1" if self.switches else "one rank"), *self.switches))

    @property
    def parts(self) -> dict[str, Any]:
        """Return what it sets: sizes, numbers, the schedule, and switches by their first option."""
        fields = {name: getattr(self, name) for name in ("shard", "mbs", "v", "schedule")}
        switches = {LAYOUT_SWITCHES[switch].option: switch for switch in self.switches}
        return {**self.sizes, **{name: each for name, each in fields.items() if each is not None}} | switches

    def size(self, axis: str) -> int:
        """Return the number of ranks along an axis."""
        return self.sizes.get(axis, 1)

    @property
    def num_sample_ranks(self) -> int:
        """Return the number of ranks that read different samples."""
        return math.prod(self.size(axis) for axis in MODEL.with_role("samples"))

    @property
    def world_size(self) -> int:
        return math.prod(self.size(axis) for axis in MODEL.names)

    def apply(self, config: Config, global_batch_size: int) -> Config:
        """Return the config of the same run in this layout.

        Raises:
            ConfigError: the config cannot run in this layout.
        """
        if config.depends_on_micro_batch and self.mbs not in (None, config.training.micro_batch_size):
            is_router = config.model.depends_on_micro_batch
            flag = "--moe-router-load-balancing-type aux_loss" if is_router else "--fp8-recipe tensorwise"
            raise ConfigError([f"another micro-batch size trains another run with {flag}"])
        options: dict[str, Any] = {}
        for switch in self.switches:
            options |= LAYOUT_SWITCHES[switch].options
        if "offload" in self.switches:
            options["cpu_offload_activations"] = max(1, config.recompute.cpu_offload_activations)
            if config.optimizer.optimizer == "adam" and config.optimizer.optimizer_nvme_offload is None:
                options["optimizer_cpu_offload"] = True
        if self.mbs is not None:
            options["micro_batch_size"] = self.mbs
        if self.v is not None or self.schedule is not None or self.size("pp") == 1:
            chosen = "interleaved" if self.v is not None else _SCHEDULES.get(self.schedule or "")
            options["pipeline_schedule"] = chosen or config.parallel.pipeline_schedule
            options["num_virtual_stages_per_pipeline_rank"] = self.v  # none without a pipeline
            options["num_layers_per_virtual_pipeline_stage"] = None
        sized = dataclasses.replace(config, parallel=config.parallel.with_sizes(self.sizes))
        applied = with_fields(
            sized,
            data_parallel_shard_degree=self.shard,
            num_distributed_optimizer_instances=None,
            global_batch_size=global_batch_size,
            **options,
        )
        if (layers := applied.parallel.pipeline_layers) is not None:
            even = with_fields(applied, pipeline_layers=None)
            applied = applied if len(layers) == num_stages(even) else even
        check_config(applied, self.world_size)
        return applied
