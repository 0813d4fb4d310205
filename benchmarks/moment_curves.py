#!/usr/bin/env python
"""Train the quickstart's model with moments in 16 and 8 bits, and compare its losses with fp32 moments.

python benchmarks/moment_curves.py runs/quickstart/corpus_text_document

Each run trains the same iterations; all but the moments is in fp32.
"""

from __future__ import annotations

import argparse

from fp8_curves import losses

MOMENTS: dict[str, str] = {
    "fp32, fp32": "",
    "bf16, bf16": "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
    "fp8, bf16": "--exp-avg-dtype fp8 --exp-avg-sq-dtype bf16",
}


def main() -> None:
    """Train, and print a table."""
    parser = argparse.ArgumentParser(description="Compare losses with rounded moments with those of fp32.")
    parser.add_argument("corpus", help="prefix of the quickstart's corpus")
    parser.add_argument("--iterations", type=int, default=400)
    parser.add_argument("--flags", default="", help="further flags of every run")
    own = parser.parse_args()
    print(f"{'moments':<14}{'largest difference':>20}{'last':>10}{'validation loss':>18}{'difference':>12}")
    reference: tuple[list[float], float] | None = None
    for name, flags in MOMENTS.items():
        means, validation = losses(own.corpus, f"{flags} {own.flags}", own.iterations)
        reference = reference or (means, validation)
        differences = [one / other - 1.0 for one, other in zip(means, reference[0], strict=True)]
        shown = f"{max(differences, key=abs):>20.3%}{differences[-1]:>10.3%}{validation:>18.4f}"
        print(f"{name:<14}{shown}{validation / reference[1] - 1:>12.3%}", flush=True)


if __name__ == "__main__":
    main()
