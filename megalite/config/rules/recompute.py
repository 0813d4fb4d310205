"""Rules of what backward computes again."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.config import Config
from megalite.config.problem import Problem


def num_layers(config: Config, world_size: int | None) -> Iterator[Problem]:
    """No group has more layers than there are."""
    recompute, layers = config.recompute, config.model.num_layers
    if recompute.recompute_granularity == "full" and recompute.recompute_num_layers > layers:
        yield Problem(
            ("recompute_num_layers", "num_layers"),
            f"--recompute-num-layers {recompute.recompute_num_layers} is more than --num-layers {layers}: "
            "give the layers of a group (--recompute-method uniform) or of a stage (block)",
        )


def modules(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Nothing is recomputed twice."""
    recompute = config.recompute
    if {"mlp", "mlp_act"} <= recompute.modules:
        yield Problem(
            ("recompute_modules",),
            f"--recompute-modules {' '.join(recompute.recompute_modules)} names mlp_act, which is a part of "
            "mlp: leave one out",
        )


def saved_slices(config: Config, world_size: int | None) -> Iterator[Problem]:
    """A saved input is cut into equal slices."""
    recompute, tp, seq_length = config.recompute, config.parallel.tp, config.model.seq_length
    is_cut = recompute.distribute_saved_activations and recompute.recompute_granularity == "full"
    if is_cut and not config.parallel.sequence_parallel and seq_length % tp:
        yield Problem(
            ("distribute_saved_activations", "seq_length", "tensor_model_parallel_size"),
            f"--distribute-saved-activations with --seq-length {seq_length}, which is not divisible by "
            f"--tp {tp}: change one, or leave the inputs whole",
        )
