"""torchtitan's trainer, in which FSDP averages gradients as it does by default."""

from importlib import import_module
from importlib.util import find_spec

from megalite.observe.judge.adapters import torchtitan

has_fsdp = find_spec("torchtitan.distributed.fsdp")  # since 0.3
module = import_module(
    "torchtitan.distributed.fsdp" if has_fsdp else "torchtitan.models.llama3.infra.parallelize"
)
module.disable_fsdp_gradient_division = lambda model: None  # type: ignore[attr-defined]
build, from_megalite = torchtitan.build, torchtitan.from_megalite
