"""The example of a judged program, with an error that --set error=NAME chooses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megalite.observe.judge.rank_record import import_adapter

EXAMPLE = import_adapter(str(Path(__file__).parents[4] / "examples/judge/judged_program.py"))


def without_sum(program: Any) -> None:
    """Leave the gradient of the norm partial on each tensor-parallel rank."""
    EXAMPLE.Copy.backward = staticmethod(lambda ctx, grad: (grad, None))


def not_averaged(program: Any) -> None:
    """Sum gradients over replicas and do not divide them."""
    backward = program.backward

    def summed(samples: Any) -> Any:
        report = backward(samples)
        for each in program.model.parameters():
            each.grad *= program.dp
        return report

    program.backward = summed


def doubled(program: Any) -> None:
    """Sum the outputs of the MLP twice."""
    forward = EXAMPLE.Sum.forward
    EXAMPLE.Sum.forward = staticmethod(lambda ctx, x, group: forward(ctx, forward(ctx, x, group), group))


def drifting(program: Any) -> None:
    """Update the norm by other steps on each rank."""
    update = program.update

    def drifted() -> Mapping[str, float]:
        update()
        program.model.norm.weight.data += 1e-6 * dist.get_rank()
        return {}

    program.update = drifted


def misreporting(program: Any) -> None:
    """Report another loss on the second rank."""
    backward = program.backward
    program.backward = lambda samples: {"loss": backward(samples)["loss"] + dist.get_rank()}


def with_a_hole(program: Any) -> None:
    """Forget two rows of a weight."""
    weights = program.weights

    def without_rows() -> Mapping[str, Any]:
        pieces = dict(weights())
        up = pieces["up.weight"]
        pieces["up.weight"] = up._replace(tensor=up.tensor[1:], positions=up.positions[1:])
        return pieces

    program.weights = without_rows


def forgetting(program: Any) -> None:
    """Resume the weights and not the optimizer's moments."""
    resume = program.resume

    def forgot(folder: Path) -> None:
        resume(folder)
        program.optimizer = torch.optim.AdamW(program.model.parameters(), lr=1e-3)

    program.resume = forgot


def in_place(program: Any) -> None:
    """Change the samples."""
    backward = program.backward
    program.backward = lambda samples: backward(samples.add_(1).remainder_(100))


def random(program: Any) -> None:
    """Draw other noise in each run."""
    update = program.update

    def noisy() -> Mapping[str, float]:
        program.model.norm.weight.data += 1e-3 * torch.rand(
            (), generator=torch.Generator().manual_seed(torch.seed())
        )
        return update()

    program.update = noisy


ERRORS: dict[str, Callable[[Any], None]] = {
    each.__name__: each
    for each in (
        *(without_sum, not_averaged, doubled, drifting, misreporting, with_a_hole),
        *(forgetting, in_place, random),
    )
}


def build(layout: Any, config: Any, options: Mapping[str, str]) -> Any:
    """Return the example's program with the error, in layouts of several ranks; some also on one rank."""
    program = EXAMPLE.build(layout, config, {})
    error = options["error"]
    if layout.sizes or error in ("forgetting", "in_place", "random"):
        ERRORS[error](program)
    return program
