"""Flip bits at random places, and write how many of them audits find to docs/verification.md.

python -m tests.power.measure_audit     run from the repository root; takes some minutes
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np

from megalite.config import Config, DataConfig, ParallelConfig, TrainingConfig
from megalite.config.presets import PRESETS
from megalite.distributed.topology import Topology
from megalite.train.callbacks.audit import Audit
from megalite.train.loop import train
from megalite.train.replicas import AuditFailed, Finding
from megalite.train.stopping import RequeueNote, StopConditions, StopSignals
from megalite.train.trainer import start_trainer
from tests.live_ranks import RANKS, run_ranks
from tests.power.bit_flips import KINDS, BitFlip, Injection

NUM_FLIPS = 50
INTERVAL = 4
LAST_FLIP, NUM_ITERATIONS = 8, 12
NUM_MICROBATCHES = 2
LAYOUTS = {
    "dp3": ParallelConfig(data_parallel_size=3),
    "dp3, ZeRO 1": ParallelConfig(data_parallel_size=3, zero_stage=1),
    "dp2 tp2": ParallelConfig(data_parallel_size=2, tensor_model_parallel_size=2),
}


@dataclass(frozen=True)
class Outcome:
    """What became of a flip.

    Attributes:
        found_after: iterations from the flip to the audit that found it; None if none has.
        suspects: ranks that the audit names.
        num_nan: updates that were skipped because a number was not finite.
    """

    flip: BitFlip
    found_after: int | None
    suspects: tuple[int, ...]
    num_nan: int


def config_of(layout: str, interval: int | None = INTERVAL) -> Config:
    """Return the config of a small model with dropout in fp32."""
    parallel = LAYOUTS[layout]
    assert parallel.data_parallel_size is not None
    return Config(
        model=replace(
            PRESETS["gpt-tiny"],
            num_layers=2,
            hidden_size=32,
            seq_length=16,
            vocab_size=64,
            hidden_dropout=0.1,
            attention_dropout=0.1,
        ),
        parallel=parallel,
        data=DataConfig(mock_data=True),
        training=TrainingConfig(
            global_batch_size=NUM_MICROBATCHES * parallel.data_parallel_size,
            train_iters=NUM_ITERATIONS,
            eval_iters=0,
            audit_interval=interval,
        ),
    )


def outcome(topology: Topology, config: Config, flip: BitFlip) -> Outcome:
    """Train on this rank with a flip."""
    stop = StopConditions(config.training, topology, StopSignals(RequeueNote(None)))
    injection = Injection(flip)
    finding: Finding | None = None
    with start_trainer(config, topology) as trainer:
        try:
            train(trainer, stop, [Audit(), injection])
        except AuditFailed as error:
            finding = error.finding
    if finding is None:
        return Outcome(flip, None, (), injection.num_nan)
    audited = math.ceil(trainer.progress.iteration / INTERVAL) * INTERVAL
    return Outcome(flip, audited - flip.iteration, finding.suspects, injection.num_nan)


def outcomes(topology: Topology, config: Config, flips: Sequence[BitFlip]) -> list[Outcome]:
    """Train on this rank once with each flip."""
    return [outcome(topology, config, flip) for flip in flips]


def flips_of(kind: str, world_size: int) -> list[BitFlip]:
    """Return flips of one kind on random ranks, in random iterations and places."""
    random = np.random.default_rng([*kind.encode()])
    return [
        BitFlip(
            kind,
            int(random.integers(world_size)),
            int(random.integers(2, LAST_FLIP + 1)),
            int(random.integers(1 << 31)),
        )
        for _ in range(NUM_FLIPS)
    ]


def row(layout: str, kind: str) -> str:
    """Measure the flips of one kind in one layout, and return a row of the table."""
    config = config_of(layout)
    sizes = LAYOUTS[layout]
    world_size = (sizes.data_parallel_size or 1) * sizes.tp * sizes.pp
    ranks = run_ranks(
        outcomes, config.parallel.mesh, world_size, config, flips_of(kind, world_size), timeout=3600.0
    )
    found = [each for each in ranks[0] if each.found_after is not None]
    after = [each.found_after for each in found if each.found_after is not None]
    alone = sum(each.suspects == (each.flip.rank,) for each in found)
    among = sum(each.flip.rank in each.suspects for each in found) - alone
    not_finite = sum(each.found_after is None and each.num_nan > 0 for each in ranks[0])
    when = f"{median(after):g}, {max(after)}" if after else "-"
    numbers = f"{len(found)} | {when} | {alone} | {among} | {len(found) - alone - among} | {not_finite}"
    return f"| {layout} | {kind} | {numbers} |"


PAGE = Path(__file__).parents[2] / "docs" / "verification.md"
BEGIN, END = "<!-- begin: flipped bits -->", "<!-- end: flipped bits -->"


def write_page(rows: Sequence[str]) -> None:
    """Replace the table of the page."""
    columns = (
        "layout",
        f"bit flip in ({NUM_FLIPS} each)",
        "found",
        "iterations until then: median, largest",
        "its rank is named alone",
        "among others",
        "not named",
        "not found, but an update was skipped as not finite",
    )
    table = "\n".join([f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}", *rows])
    before, begin, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{begin}\n\n{table}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    rows = []
    with RANKS:
        for layout in LAYOUTS:
            for kind in KINDS:
                rows.append(row(layout, kind))
                print(rows[-1], flush=True)
    write_page(rows)
