"""How long, in what batches, and from which seed."""

from __future__ import annotations

from dataclasses import dataclass, field

from megalite.config.flags import flags


@dataclass(frozen=True)
class TrainingConfig:
    """The loop: batches, iterations, evaluation and when to stop."""

    micro_batch_size: int = 1
    """Samples of one forward pass on one replica."""
    global_batch_size: int | None = None
    """Samples of one optimizer step over all replicas; by default micro batch x dp."""
    train_iters: int | None = None
    """Optimizer steps of the whole run; must be given."""
    eval_interval: int = 1000
    """Iterations between evaluations on the validation part."""
    eval_iters: int = 100
    """Global batches of one evaluation; 0 evaluates never."""
    exit_interval: int | None = None
    """Save and exit at the first iteration divisible by this."""
    exit_duration_in_mins: float | None = None
    """Save and exit after the first iteration that ends later than this many minutes after the start."""
    seed: int = 1234
    """Seed of the weights, of dropout and of the order of samples."""
    deterministic: bool = field(default=False, metadata=flags("--deterministic-mode"))
    """Use only operations whose result is bitwise the same from run to run."""
