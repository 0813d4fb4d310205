"""Flags of the tools that use a trained model."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from megalite.cli.tool import ToolParser, local_path, positive_int
from megalite.config import DataConfig, ParallelConfig
from megalite.data.tokenizer import TOKENIZER_TYPES
from megalite.model.stage import DTYPES

_TOKENIZER = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file", "tokenizer_name_or_path")


@dataclass(frozen=True)
class ModelFlags:
    """Which model, on what.

    Attributes:
        iteration: of the checkpoint; None for the latest.
        dtype: of the weights here; None for the run's.
        tokenizer: where it is not the one that the run names.
    """

    load: Path
    iteration: int | None
    dtype: str | None
    parallel: ParallelConfig
    tokenizer: DataConfig | None

    @staticmethod
    def add_to(parser: ToolParser) -> None:
        """Declares the flags."""
        model = parser.add_argument_group("the model")
        model.add_argument("--load", required=True, type=local_path, help="folder that a run saved to")
        model.add_argument(
            "--load-iteration", type=positive_int, help="which of its checkpoints (default the latest)"
        )
        model.add_argument("--dtype", choices=sorted(DTYPES), help="of the weights (default the run's)")
        model.add_argument(
            "--tp", type=positive_int, default=1, help="ranks that share each layer, under torchrun"
        )
        model.add_argument(
            "--distributed-backend",
            choices=("auto", "gloo", "nccl"),
            default="auto",
            help="gloo stays on the CPU (default auto: the GPU if there is one)",
        )
        files = parser.add_argument_group("the tokenizer, where it is not found at the place the run names")
        files.add_argument("--tokenizer-type", choices=TOKENIZER_TYPES)
        for name in _TOKENIZER[1:]:
            files.add_argument("--" + name.replace("_", "-"))

    @staticmethod
    def of(flags: argparse.Namespace) -> ModelFlags:
        """The flags as they were given."""
        tokenizer = {name: getattr(flags, name) for name in _TOKENIZER}
        return ModelFlags(
            flags.load,
            flags.load_iteration,
            flags.dtype,
            ParallelConfig(
                tensor_model_parallel_size=flags.tp, distributed_backend=flags.distributed_backend
            ),
            DataConfig(**tokenizer) if any(tokenizer.values()) else None,
        )
