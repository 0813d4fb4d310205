"""How long, in what batches, and from which seed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megalite.config.flags import flags

ExitSignal = Literal["SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP"]

Fp8Format = Literal["hybrid", "e4m3"]


@dataclass(frozen=True)
class TrainingConfig:
    """The loop: batches, iterations, evaluation and when to stop."""

    micro_batch_size: int = 1
    """Samples of one forward pass on one replica."""
    global_batch_size: int | None = None
    """Samples of one optimizer step over all replicas; by default micro batch x dp."""
    rampup_batch_size: tuple[int, ...] | None = None
    """START INCREMENT SAMPLES: START samples a step at first, INCREMENT more at a time, all after SAMPLES."""
    train_iters: int | None = None
    """Optimizer steps of the whole run; this or --train-samples must be given."""
    train_samples: int | None = None
    """Samples of the whole run, instead of its steps; what makes no whole batch at the end is left out."""
    eval_interval: int = 1000
    """Iterations between evaluations on the validation part."""
    eval_iters: int = 100
    """Global batches of one evaluation; 0 evaluates never."""
    exit_interval: int | None = None
    """Save and exit at the first iteration divisible by this."""
    exit_duration_in_mins: float | None = None
    """Save and exit after the first iteration that ends later than this many minutes after the start."""
    exit_signals: tuple[ExitSignal, ...] = field(
        default=("SIGTERM", "SIGUSR1"),
        metadata=flags(
            "--exit-signal",
            sets={"--exit-signal-handler": ("SIGTERM", "SIGUSR1"), "--no-exit-signal-handler": ()},
        ),
    )
    """Signals that save at the end of the iteration and exit with status 75; Ctrl-C does with 130."""
    kill_switch_path: str | None = None
    """File that keeps a run from starting where it exists, and makes a run save and exit once it appears."""
    seed: int = 1234
    """Seed of the weights, of dropout and of the order of samples."""
    check_for_nan_in_loss_and_grad: bool = True
    """Leave out an update whose loss or gradient is NaN or infinite, and tell the layer it began in."""
    check_for_spiky_loss: bool = False
    """Leave out an update whose loss is far above those before it, and tell where in the batch it is."""
    spiky_loss_factor: float = 10.0
    """A loss above this many times the median of the last 100 is spiky."""
    iterations_to_skip: tuple[str, ...] = ()
    """Iterations whose samples are passed over without training: FIRST:LAST, both included, or one number."""
    hang_timeout: float | None = None
    """Seconds without progress that end the run with a report (0: never); by default half of
    --distributed-timeout-minutes."""
    fp8_format: Fp8Format | None = field(
        default=None, metadata=flags(sets={"--fp8": "hybrid", "--fp8-hybrid": "hybrid", "--fp8-e4m3": "e4m3"})
    )
    """Multiply in 8 bits in the linear layers of a bf16 model: e4m3, or hybrid with gradients in e5m2."""
    compile: bool = False
    """Compile the transformer layers with torch.compile at their first calls (docs/precision.md)."""
    deterministic: bool = field(default=False, metadata=flags("--deterministic-mode"))
    """Use only operations whose result is bitwise the same from run to run."""

    @property
    def is_counted_in_samples(self) -> bool:
        """Whether the run's length and its schedules are given in samples, not in iterations."""
        return self.train_samples is not None

    @property
    def length(self) -> int:
        """Length of the run in the unit that it is counted in."""
        length = self.train_iters if self.train_samples is None else self.train_samples
        assert length is not None
        return length

    def position(self, iteration: int, consumed_samples: int) -> int:
        """How far the run is once `iteration` has consumed its samples, in the unit of `length`."""
        return consumed_samples if self.is_counted_in_samples else iteration

    def is_skipped(self, iteration: int) -> bool:
        """Whether --iterations-to-skip names this iteration, counted from 1."""
        ranges = (iteration_range(word) for word in self.iterations_to_skip)
        return any(found is not None and iteration in found for found in ranges)

    def skips_any(self, num_iterations: int) -> bool:
        """Whether --iterations-to-skip names any of the first iterations of a run."""
        ranges = (iteration_range(word) for word in self.iterations_to_skip)
        return any(found is None or found.start <= num_iterations for found in ranges)


def iteration_range(word: str) -> range | None:
    """The iterations that a word of --iterations-to-skip names; None where it is neither A:B nor A."""
    first, colon, last = word.partition(":")
    last = last if colon else first
    if not (first.isdecimal() and last.isdecimal()) or not 1 <= int(first) <= int(last):
        return None
    return range(int(first), int(last) + 1)
