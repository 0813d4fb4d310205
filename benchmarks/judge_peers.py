"""Judge random models and layouts of other frameworks: how often is a layout called another run?

python benchmarks/judge_peers.py megatron-core --draws 50 --seed 1

Each draw is a small model, a batch and four layouts of the adapter. A right layout must never be called
wrong: each one that is, is an error of the package, of the adapter or of the judge. Its command is printed.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Sequence

from megalite.cli.judge import judge_config, random_samples
from megalite.distributed.local_ranks import LocalRanks, RankError
from megalite.observe.judge.judge import ProgramJudge
from megalite.observe.judge.rank_record import Task, import_adapter
from megalite.observe.verify.layouts import Layout
from megalite.utils.errors import UserError, first_line
from megalite.utils.log import configure_logging


def drawn_model(random: random.Random) -> list[str]:
    """Return flags of a small Llama whose sizes, heads, biases and norms are drawn."""
    heads = random.choice((4, 8))
    flags = {
        "num-layers": random.choice((4, 8)),
        "hidden-size": heads * random.choice((4, 8, 16)),
        "num-attention-heads": heads,
        "num-query-groups": random.choice((2, 4)),
        "ffn-hidden-size": random.choice((32, 48, 64)),
        "seq-length": random.choice((8, 16, 24)),
        "vocab-size": random.choice((64, 128, 192)),
        "global-batch-size": 8,
        "micro-batch-size": random.choice((1, 2)),
        "seed": random.randrange(10**6),
    }
    pairs = [(f"--{name}", str(value)) for name, value in flags.items()]
    return ["--preset", "llama-tiny", *(text for pair in pairs for text in pair)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Judge the draws, and print how many layouts trained the same run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("program")
    parser.add_argument("--draws", type=int, default=10, help="number of models (default 10)")
    parser.add_argument("--layouts-per-draw", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    own = parser.parse_args(arguments)
    configure_logging(rank=0)
    module = import_adapter(own.program)
    draw = random.Random(own.seed)
    counts = Counter[str]()
    with LocalRanks() as ranks:
        for number in range(own.draws):
            flags = drawn_model(draw)
            names = draw.sample(module.LAYOUTS, min(own.layouts_per_draw, len(module.LAYOUTS)))
            command = f"megalite judge {own.program} {' '.join(flags)} --layouts {','.join(names)} --quick"
            print(f"draw {number}: {command}", flush=True)
            config = judge_config(flags, 2, module)
            task = Task(own.program, Layout(), config, {}, random_samples(config))
            try:
                verdict = ProgramJudge(module, task, ranks, None).run([Layout.parse(name) for name in names])
            except (UserError, RankError) as error:
                counts["no reference"] += 1
                print(f"  no reference: {first_line(error)}", flush=True)
                continue
            counts["same"] += len(verdict.same)
            counts["another"] += len(verdict.different)
            counts["refused"] += len(verdict.refused)
    print(dict(counts))


if __name__ == "__main__":
    main()
