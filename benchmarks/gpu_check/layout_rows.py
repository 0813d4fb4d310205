"""Stage 11: the rows of the layout table over NCCL, each against one rank on the same GPU, by their value."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from benchmarks.gpu_check.commands import run_python
from benchmarks.gpu_check.installation import outcome_of_tests
from benchmarks.gpu_check.results import Result, failed, info, passed, skipped
from benchmarks.gpu_check.runner import CheckContext
from benchmarks.gpu_check.several_ranks import RankHost, on_several_ranks
from megalite.config import Config, DataConfig
from megalite.distributed.local_ranks import LocalRanks, RankError
from megalite.observe.verify.compare_runs import TOLERANCES, compare
from megalite.observe.verify.layouts import Layout
from megalite.observe.verify.record_run import RunRecord, merge_stages, record_rank
from megalite.utils.errors import UserError
from tests.covering import by_new_pairs
from tests.parity import models
from tests.parity import test_layout_table as layout_table

NUM_ITERATIONS = models.NUM_ITERATIONS
MOST_FAILURES = 4
"""Failures in a row after which the check ends: the machine is at fault, not the layout."""
DEEP, FP8 = "llama-tiny, deepseek, 8 layers", "llama-tiny, fp8"
FP8_LOSS = 2e-2
"""Limit for a loss in fp8: scales are of the part of a tensor that a rank holds."""


class Row(NamedTuple):
    """A model in a layout, as in tests/parity/test_layout_table.py."""

    model: str
    dtype: str
    layout: str

    @property
    def name(self) -> str:
        return " ".join(self)

    @property
    def parts(self) -> dict[str, Any]:
        """Return what the row is made of: its model, dtype, and each option of its layout."""
        return {"model": self.model, "dtype": self.dtype, **Layout.parse(self.layout).parts}


FIRST = [Row("gpt-tiny", "fp64", "pp4zb"), Row(DEEP, "fp64", "pp4dpvdp2ep2mbs1")]
"""Pipelines with stages between the first and the last: they failed on the first GPU that they ran on."""
OTHER_DTYPES = [
    *(Row("gpt-tiny", "bf16", name) for name in ("tp2pp2dp2+sp+zero1+gather", "cp2+p2p")),
    *(Row("llama-tiny", "bf16", name) for name in ("tp2+sp", "dp2+zero3")),
    *(Row(FP8, "bf16", name) for name in ("tp2+sp", "dp2+zero3")),
]
"""Rows that the layout table does not have."""


def all_rows() -> list[Row]:
    """Return all rows, those of most value first."""
    table = itertools.starmap(Row, dict.fromkeys([*layout_table.CORE, *layout_table.ROWS]))
    by_value = by_new_pairs([*OTHER_DTYPES, *table], lambda row: row.parts)
    return list(dict.fromkeys([*FIRST, *(row for row, _ in by_value)]))


def config_of(row: Row, host: RankHost) -> Config:
    """Return a row's config on one rank, on mock data."""
    model = {FP8: "llama-tiny", DEEP: models.DEEPSEEK}.get(row.model, row.model)
    config = models.config_of(model, row.dtype, "unused")
    if row.model == DEEP:
        deep = replace(config.model, num_layers=8, moe_layer_freq=(0, 1, 1, 1, 1, 1, 1, 1))
        config = replace(config, model=deep)
    if row.model == FP8:  # sizes of GEMMs in fp8 are multiples of 16
        sizes = replace(config.model, hidden_size=64, num_attention_heads=4, ffn_hidden_size=128)
        config = replace(config, model=sizes, training=replace(config.training, fp8_format="hybrid"))
    backend = "nccl" if host.on_gpus else "gloo"
    parallel = replace(
        config.parallel, distributed_backend=backend, ranks_share_gpus=host.mps is not None, num_threads=1
    )
    return replace(config, data=DataConfig(mock_data=True), parallel=parallel)


class Table:
    """The rows on ranks that stay alive, with the runs of one rank that they are compared with."""

    def __init__(self, host: RankHost) -> None:
        self._host = host
        self._ranks = LocalRanks()
        self._alone: dict[tuple[str, str], RunRecord] = {}

    def __enter__(self) -> Table:
        return self

    def __exit__(self, *_: object) -> None:
        self._ranks.end()

    def result_of(self, row: Row) -> Result:
        """Run a row and compare it with one rank."""
        config = config_of(row, self._host)
        try:
            applied = Layout.parse(row.layout).apply(config, models.GLOBAL_BATCH_SIZE)
            if (row.model, row.dtype) not in self._alone:
                alone = Layout().apply(config, models.GLOBAL_BATCH_SIZE)
                self._alone[row.model, row.dtype] = self._run(alone, 1)
            found = self._run(applied, Layout.parse(row.layout).world_size)
        except UserError as error:
            return skipped(row.name, f"cannot run: {error}")
        except RankError as error:
            self._host.killed()  # after an error, all ranks were
            return failed(row.name, str(error).strip().splitlines()[-1])
        comparison = compare(found, self._alone[row.model, row.dtype])
        tolerance = TOLERANCES[row.dtype]
        excesses = comparison.excesses(tolerance)
        if row.model == FP8:
            tolerance = replace(tolerance, loss=FP8_LOSS)
            excesses = [] if comparison.loss <= FP8_LOSS else [f"loss differs by {comparison.loss:.1e}"]
        return passed(row.name, not excesses, comparison.loss, tolerance.loss, "; ".join(excesses))

    def _run(self, config: Config, num_ranks: int) -> RunRecord:
        return merge_stages(
            self._ranks.run(
                record_rank, config.mesh, num_ranks, config, NUM_ITERATIONS, timeout=self._host.row_seconds
            )
        )


@on_several_ranks("layout table")
def rows(context: CheckContext, host: RankHost) -> Iterator[Result]:
    """Run the rows that this machine's ranks can run, without those of an earlier command."""
    fitting = [row for row in all_rows() if host.fits(row.layout)]
    if context.is_small:
        fitting = fitting[:3]
    failures = 0
    with Table(host) as table:
        for row in fitting:
            if row.name in context.done:
                continue
            result = table.result_of(row)
            yield result
            failures = failures + 1 if result.verdict == "failed" else 0
            if failures == MOST_FAILURES:
                yield failed("layout table", f"ended after {failures} failures in a row")
                return
    yield info("layout table", float(len(fitting)), "rows", host.description)


@on_several_ranks("Triton's attention on several ranks")
def attention_on_ranks(context: CheckContext, host: RankHost) -> Iterator[Result]:
    """Run tests/gpu/test_layouts.py on several ranks: attention in Triton's kernels, against the formula."""
    several = ("tests/gpu/test_layouts.py", "-k", "tp2 or pp2 or dp2")
    done = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", "-rfE", *several)
    yield from outcome_of_tests("Triton's attention on several ranks", done.status, done.text)
