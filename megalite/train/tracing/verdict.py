"""What share of all ranks' time an iteration's parts are."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megalite.train.tracing.spans import DATA, ITERATION, OTHER_WAIT, Span

COMPUTE = "compute"
_TERM_OF_CATEGORY = {
    "pp wait": "bubble",
    "tp wait": "tp wait",
    "dp wait": "dp wait",
    DATA: "data",
    OTHER_WAIT: "other waits",
}
TERMS = (*_TERM_OF_CATEGORY.values(), COMPUTE)


@dataclass(frozen=True)
class Verdict:
    """Where the ranks' time went: shares of the traced iterations' time summed over all ranks.

        bubble       waiting along pp: for hidden states or gradients of another stage, for a message to
                     leave, and at the end of an iteration for stages that are not done
        tp wait      in collectives over tp, messages' own time included
        dp wait      waiting for collectives over dp: what of them does not run under other work
        data         waiting for the next microbatch's samples, and copying them to the device
        other waits  in collectives of all ranks (the gradient's norm)
        compute      all the rest: products, optimizer, and what the host does in between

    Attributes:
        shares: by these names; they add up to 1.
    """

    shares: Mapping[str, float]

    def __str__(self) -> str:
        """Whole percents, that add up to 100 too."""
        percents = {name: math.floor(100 * share) for name, share in self.shares.items()}
        by_rest = sorted(self.shares, key=lambda name: percents[name] - 100 * self.shares[name])
        for name in by_rest[: 100 - sum(percents.values())]:
            percents[name] += 1
        return ", ".join(f"{name} {percent}%" for name, percent in percents.items())


def verdict_of(spans_of_ranks: Iterable[Iterable[Span]]) -> Verdict:
    """Judges spans that hold whole iterations; waits and data lie in one, and apart from each other."""
    seconds: dict[str, float] = defaultdict(float)
    total = 0.0
    for spans in spans_of_ranks:
        for span in spans:
            if span.category == ITERATION:
                total += span.seconds
            elif span.category in _TERM_OF_CATEGORY:
                seconds[_TERM_OF_CATEGORY[span.category]] += span.seconds
    seconds[COMPUTE] = total - sum(seconds.values())
    return Verdict({name: seconds[name] / total if total else float(name == COMPUTE) for name in TERMS})
