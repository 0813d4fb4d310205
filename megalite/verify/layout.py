"""Layouts by name: ``tp2pp2dp2``, ``dp4``, ``tp2mbs4``, ``pp2v2``, ``pp4zb``, ``tp2dp2+sp+zero1``."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

from megalite.config import Config, ParallelConfig, check_config
from megalite.config.parallel import PipelineSchedule
from megalite.config.recompute import Granularity
from megalite.config.stages import num_stages
from megalite.errors import UserError

_SIZE = re.compile(r"(tp|pp|dp|mbs|v)([1-9][0-9]*)|(zbv|zb|gpipe)")
_SCHEDULES: dict[str, PipelineSchedule] = {"zb": "zb-h1", "zbv": "zb-v", "gpipe": "gpipe"}
_SWITCHES: dict[str, tuple[str, bool | int | str]] = {
    "sp": ("sp", True),
    "zero1": ("zero", 1),
    "zero2": ("zero", 2),
    "zero3": ("zero", 3),
    "gather": ("gather", True),
    "full": ("recompute", "full"),
    "selective": ("recompute", "selective"),
    "uneven": ("uneven", True),
}
"""Words after a plus, each with the attribute that it stands for."""

TABLE = (
    *("tp2", "tp4", "pp2", "pp4", "dp2", "dp4", "tp2pp2", "tp2dp2", "pp2dp2", "tp2pp2dp2", "mbs1"),
    *("tp2+sp", "tp4+sp", "pp2gpipe", "pp2v2", "pp4zb", "pp2zbv", "pp2+uneven"),
    *("dp4+zero1", "dp4+zero2", "dp4+zero3", "tp2pp2dp2+sp+zero1+gather"),
    *("tp1+full", "tp1+selective", "tp2+sp+full", "tp4+sp+selective", "pp2v2+full", "pp4zb+selective"),
    *("pp2zbv+full", "pp2+uneven+selective", "dp4+zero1+full", "dp4+zero2+selective", "dp4+zero3+full"),
    "tp2pp2dp2+sp+zero1+gather+full",
)
"""Every technique by itself, and the combinations that runs use: what ``--layouts all`` compares."""


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes, and what differs from the config.

    Attributes:
        mbs: micro-batch size; None for the config's.
        v: chunks a rank of an interleaved pipeline; None for the config's schedule.
        schedule: zb for ZB-H1, zbv for ZB-V, gpipe; None for the config's schedule.
        sp: whether sequences are cut over tp; the config may ask for it too.
        zero: ZeRO stage; None for the config's.
        gather: whether weights are gathered under forward; the config may ask for it too.
        recompute: full or selective; None for the config's.
        uneven: whether the pipeline's first rank has one layer alone.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    mbs: int | None = None
    v: int | None = None
    schedule: str | None = None
    sp: bool = False
    zero: int | None = None
    gather: bool = False
    recompute: Granularity | None = None
    uneven: bool = False

    @staticmethod
    def parse(name: str) -> Layout:
        """Reads a name such as ``tp2pp2``, with switches after a plus: an axis that is not named has size 1.

        Raises:
            UserError: the name is made of anything else.
        """
        sizes, *switches = name.split("+")
        parts = _SIZE.findall(sizes)
        is_made_of_parts = parts and "".join(map("".join, parts)) == sizes
        if not is_made_of_parts or not set(switches) <= _SWITCHES.keys():
            raise UserError(
                f"layout {name!r} is not made of tp, pp, dp, v and mbs with a size, zb, zbv or gpipe, and "
                f"perhaps +{' or +'.join(_SWITCHES)}: write tp2pp2, dp4, tp2mbs4, tp2+sp"
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
        if self.mbs is not None:
            name += f"mbs{self.mbs}"
        switches = [
            f"+{switch}" for switch, (what, value) in _SWITCHES.items() if getattr(self, what) == value
        ]
        return "".join((name or "one rank", *switches))

    def _with_schedule(self, parallel: ParallelConfig) -> ParallelConfig:
        """The same with this layout's pipeline schedule; one rank has no chunks."""
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
        """Ranks of the layout."""
        return self.tp * self.pp * self.dp

    def apply(self, config: Config, global_batch_size: int) -> Config:
        """The same run in this layout.

        Raises:
            ConfigError: the config cannot run in it.
        """
        first_layers = config.parallel.decoder_first_pipeline_num_layers
        parallel = dataclasses.replace(
            config.parallel,
            tensor_model_parallel_size=self.tp,
            pipeline_model_parallel_size=self.pp,
            data_parallel_size=self.dp,
            sequence_parallel=self.sp or config.parallel.sequence_parallel,
            zero_stage=config.parallel.zero_stage if self.zero is None else self.zero,
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
        recompute = dataclasses.replace(
            config.recompute, recompute_granularity=self.recompute or config.recompute.recompute_granularity
        )
        applied = dataclasses.replace(config, parallel=parallel, training=training, recompute=recompute)
        check_config(applied, self.world_size)
        return applied
