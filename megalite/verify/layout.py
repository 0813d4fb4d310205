"""Layouts by name: ``tp2pp2dp2``, ``dp4``, ``tp2mbs4``."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

from megalite.config import Config
from megalite.errors import UserError

_PART = re.compile(r"(tp|pp|dp|mbs)([1-9][0-9]*)")


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes, and the micro-batch size where it differs from the config's."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    mbs: int | None = None

    @staticmethod
    def parse(name: str) -> Layout:
        """Reads a name such as ``tp2pp2``: an axis that is not named has size 1.

        Raises:
            UserError: the name is made of anything else.
        """
        parts = _PART.findall(name)
        if not parts or "".join(axis + size for axis, size in parts) != name:
            raise UserError(
                f"layout {name!r} is not made of tp, pp, dp and mbs with a size: write tp2pp2, dp4, tp2mbs4"
            )
        return Layout(**{axis: int(size) for axis, size in parts})

    def __str__(self) -> str:
        sizes = {"tp": self.tp, "pp": self.pp, "dp": self.dp}
        name = "".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1)
        if self.mbs is not None:
            name += f"mbs{self.mbs}"
        return name or "one rank"

    @property
    def world_size(self) -> int:
        """Ranks of the layout."""
        return self.tp * self.pp * self.dp

    def apply(self, config: Config, global_batch_size: int) -> Config:
        """The same run in this layout.

        Raises:
            ConfigError: the config cannot run in it.
        """
        parallel = dataclasses.replace(
            config.parallel,
            tensor_model_parallel_size=self.tp,
            pipeline_model_parallel_size=self.pp,
            data_parallel_size=self.dp,
        )
        if parallel.pipeline_layers is not None and len(parallel.pipeline_layers) != self.pp:
            parallel = dataclasses.replace(parallel, pipeline_layers=None)
        training = dataclasses.replace(
            config.training,
            micro_batch_size=self.mbs or config.training.micro_batch_size,
            global_batch_size=global_batch_size,
        )
        applied = dataclasses.replace(config, parallel=parallel, training=training)
        applied.validate(self.world_size)
        return applied
