"""torchtitan's trainer, in which FSDP averages gradients as it does by default."""

from torchtitan.models.llama3.infra import parallelize

from megalite.observe.judge.adapters import torchtitan

parallelize.disable_fsdp_gradient_division = lambda model: None
build, from_megalite = torchtitan.build, torchtitan.from_megalite
