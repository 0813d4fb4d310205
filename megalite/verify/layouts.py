"""Parse the names of layouts: ``tp2pp2dp2``, ``tp2mbs4``, ``pp2v2``, ``pp4zb``, ``tp2dp2+sp+zero1``."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

from megalite.config import Config, ParallelConfig, check_config
from megalite.config.recompute import Granularity
from megalite.config.stage_layers import num_stages
from megalite.errors import UserError
from megalite.pipeline.schedules import SCHEDULES

_SCHEDULES = {entry.layout_suffix: name for name, entry in SCHEDULES.items() if entry.layout_suffix}
"""Schedules by their suffix in a layout name; the number of chunks selects an interleaved schedule."""
_SUFFIXES = sorted(_SCHEDULES, reverse=True)  # match zbv before its prefix zb
_SIZE = re.compile(rf"(tp|pp|dp|shard|mbs|v)([1-9][0-9]*)|({'|'.join(_SUFFIXES)})")
_SWITCHES: dict[str, tuple[str, bool | int | str]] = {
    "sp": ("sp", True),
    "zero1": ("zero", 1),
    "zero2": ("zero", 2),
    "zero3": ("zero", 3),
    "kept": ("kept", True),
    "gather": ("gather", True),
    "full": ("recompute", "full"),
    "selective": ("recompute", "selective"),
    "uneven": ("uneven", True),
    "offload": ("offload", True),
}
"""Names after a plus sign, each with the attribute and value that it sets."""

TABLE = (
    *("tp2", "tp4", "pp2", "pp4", "dp2", "dp4", "tp2pp2", "tp2dp2", "pp2dp2", "tp2pp2dp2", "mbs1"),
    *("tp2+sp", "tp4+sp", "pp2gpipe", "pp2v2", "pp4zb", "pp2zbv", "pp2+uneven"),
    *("dp4+zero1", "dp4+zero2", "dp4+zero3", "tp2pp2dp2+sp+zero1+gather", "tp2pp2dp2+sp+zero3"),
    *("dp4shard2+zero1+gather", "dp4shard2+zero2", "dp4shard2+zero3"),
    *("pp2gpipedp2+zero3", "pp2v2dp2+zero3", "pp2zbdp2+zero3", "pp2zbvdp2+zero3", "pp2dp2+zero3+kept"),
    *("tp1+full", "tp1+selective", "tp2+sp+full", "tp4+sp+selective", "pp2v2+full", "pp4zb+selective"),
    *("pp2zbv+full", "pp2+uneven+selective", "dp4+zero1+full", "dp4+zero2+selective", "dp4+zero3+full"),
    *("tp2pp2dp2+sp+zero1+gather+full", "tp2pp2+sp+offload", "dp4+zero2+offload", "dp4+zero3+offload"),
    *("pp4zb+selective+offload", "pp2v2+full+offload"),
)
"""The layouts of ``--layouts all``: each technique alone, and common combinations."""


def layouts_named(names: str) -> list[Layout]:
    """Return the layouts in a list such as ``tp2,pp2+sp``, or all layouts of the table for ``all``.

    Raises:
        UserError: a name is not a layout.
    """
    return [Layout.parse(name) for name in (TABLE if names == "all" else names.split(","))]


@dataclass(frozen=True)
class Layout:
    """Holds the sizes of the mesh axes, and options that override the config.

    None and False leave an option as it is in the config.

    Attributes:
        shard: number of replicas that ZeRO shards over; None for all of them.
        mbs: micro-batch size.
        v: chunks per rank of an interleaved pipeline.
        schedule: zb for ZB-H1, zbv for ZB-V, or gpipe.
        sp: turn on sequence parallelism.
        zero: ZeRO stage.
        kept: keep gathered weights for a whole iteration.
        gather: turn on `overlap_param_gather`.
        recompute: full or selective.
        uneven: give the first pipeline rank a single layer.
        offload: keep the activations of at least the first layer of each stage in host memory, and the
            optimizer state, unless the config keeps it in a file.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    shard: int | None = None
    mbs: int | None = None
    v: int | None = None
    schedule: str | None = None
    sp: bool = False
    zero: int | None = None
    kept: bool = False
    gather: bool = False
    recompute: Granularity | None = None
    uneven: bool = False
    offload: bool = False

    @staticmethod
    def parse(name: str) -> Layout:
        """Parse a name such as ``tp2pp2+sp``: sizes of axes (1 if not named), then switches after plus signs.

        Raises:
            UserError: the name has a different form.
        """
        sizes, *switches = name.split("+")
        parts = _SIZE.findall(sizes)
        is_made_of_parts = parts and "".join(map("".join, parts)) == sizes
        if not is_made_of_parts or not set(switches) <= _SWITCHES.keys():
            raise UserError(
                f"layout {name!r} must consist of tp, pp, dp, shard, v and mbs with a size, "
                f"{' or '.join(_SUFFIXES)}, and optionally +{' or +'.join(_SWITCHES)}: "
                "write tp2pp2, dp4, tp2mbs4, tp2+sp"
            )
        named: dict[str, Any] = {axis: int(size) for axis, size, _ in parts if axis}
        schedule = next((schedule for _, _, schedule in parts if schedule), None)
        switched = dict(_SWITCHES[switch] for switch in switches)
        return Layout(**named, schedule=schedule, **switched)  # type: ignore[arg-type]

    def __str__(self) -> str:
        chunks = f"v{self.v}" if self.v else self.schedule or ""
        sizes = {"tp": self.tp, "pp": self.pp, "dp": self.dp}
        names = {axis: f"{axis}{size}" for axis, size in sizes.items() if size > 1}
        name = "".join(text + chunks * (axis == "pp") for axis, text in names.items())
        if self.shard is not None:
            name += f"shard{self.shard}"
        if self.mbs is not None:
            name += f"mbs{self.mbs}"
        switches = [
            f"+{switch}" for switch, (field, value) in _SWITCHES.items() if getattr(self, field) == value
        ]
        return "".join((name or "one rank", *switches))

    def _with_schedule(self, parallel: ParallelConfig) -> ParallelConfig:
        """Return the config with this layout's schedule; without a pipeline, without chunks."""
        if self.v is None and self.schedule is None and self.pp > 1:
            return parallel
        schedule = parallel.pipeline_schedule
        if self.v is not None:
            schedule = "interleaved"
        elif self.schedule is not None:
            schedule = _SCHEDULES[self.schedule]
        return dataclasses.replace(
            parallel,
            pipeline_schedule=schedule,
            num_virtual_stages_per_pipeline_rank=self.v,
            num_layers_per_virtual_pipeline_stage=None,
        )

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    def apply(self, config: Config, global_batch_size: int) -> Config:
        """Return the config of the same run in this layout.

        Raises:
            ConfigError: the config cannot run in this layout.
        """
        first_layers = config.parallel.decoder_first_pipeline_num_layers
        parallel = dataclasses.replace(
            config.parallel,
            tensor_model_parallel_size=self.tp,
            pipeline_model_parallel_size=self.pp,
            data_parallel_size=self.dp,
            data_parallel_shard_degree=self.shard,
            num_distributed_optimizer_instances=None,
            sequence_parallel=self.sp or config.parallel.sequence_parallel,
            zero_stage=config.parallel.zero_stage if self.zero is None else self.zero,
            fsdp_reshard_after_forward=("never" if self.kept else config.parallel.fsdp_reshard_after_forward),
            overlap_param_gather=self.gather or config.parallel.overlap_param_gather,
            decoder_first_pipeline_num_layers=1 if self.uneven else first_layers,
        )
        parallel = self._with_schedule(parallel)
        if parallel.pipeline_layers is not None:
            even = dataclasses.replace(parallel, pipeline_layers=None)
            if len(parallel.pipeline_layers) != num_stages(dataclasses.replace(config, parallel=even)):
                parallel = even
        training = dataclasses.replace(
            config.training,
            micro_batch_size=self.mbs or config.training.micro_batch_size,
            global_batch_size=global_batch_size,
        )
        offloaded = config.recompute.cpu_offload_activations
        recompute = dataclasses.replace(
            config.recompute,
            recompute_granularity=self.recompute or config.recompute.recompute_granularity,
            cpu_offload_activations=max(1, offloaded) if self.offload else offloaded,
        )
        in_memory = self.offload and config.optimizer.optimizer_nvme_offload is None
        optimizer = dataclasses.replace(
            config.optimizer, optimizer_cpu_offload=in_memory or config.optimizer.optimizer_cpu_offload
        )
        applied = dataclasses.replace(
            config, parallel=parallel, training=training, recompute=recompute, optimizer=optimizer
        )
        check_config(applied, self.world_size)
        return applied
