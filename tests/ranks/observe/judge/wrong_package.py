"""Adapters of packages, with an error in the package that --set error=NAME chooses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megalite.observe.judge.rank_record import import_adapter


def partial_norms() -> str:
    """Leave the gradients of the norms of queries and keys partial, in transformers."""
    from transformers.distributed import tensor_parallel

    layer = tensor_parallel.TensorParallelLayer
    tensor_parallel.ReplicatedWithGradAllReduce.install_forward = layer.install_forward  # type: ignore
    return "transformers"


def not_averaged() -> str:
    """Sum the gradients over replicas and do not divide them, in DeepSpeed's ZeRO 1."""
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    initialize = DeepSpeedZeroOptimizer.__init__

    def wrong(self: Any, *args: Any, **more: Any) -> None:
        initialize(self, *args, **more | {"gradient_average": False})

    DeepSpeedZeroOptimizer.__init__ = wrong
    return "deepspeed"


_ERRORS: Mapping[str, Callable[[], str]] = {
    function.__name__: function for function in (partial_norms, not_averaged)
}


def build(layout: Any, config: Any, options: Mapping[str, str]) -> Any:
    own = dict(options)
    return import_adapter(_ERRORS[own.pop("error")]()).build(layout, config, own)
