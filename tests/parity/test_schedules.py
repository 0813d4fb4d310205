"""The layout table's rows of pipeline schedules and uneven stages: the same run as on one rank.

The core of the table has each schedule by itself.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from megalite.config import ParallelConfig, check_config
from megalite.observe.verify.compare_runs import TOLERANCES, compare
from tests.live_ranks import record_run
from tests.parity import test_layout_table as table
from tests.parity.models import NUM_ITERATIONS, config_of, reference

ALONE = ("pp2v2", "pp4zb", "pp2zbv", "pp2dpv")
COMBINED = (
    *("tp2pp2v2", "tp2pp2zb", "tp2pp2zbv", "pp2v2dp2", "pp2zbdp2", "pp2zbvdp2"),
    *("tp2pp2v2dp2", "tp2pp2zbvdp2", "tp2pp2dpvdp2"),
)
UNEVEN = {
    "given": {"pipeline_layers": (1, 3)},
    "ends": {"decoder_first_pipeline_num_layers": 3},
    "standalone": {
        "account_for_embedding_in_pipeline_split": True,
        "account_for_loss_in_pipeline_split": True,
        "num_virtual_stages_per_pipeline_rank": 3,
    },
}
"""Splits of four layers on two ranks; the last one has stages of the embedding or the loss alone."""


ROWS = [
    (model, dtype, name)
    for model in ("gpt-tiny", "llama-tiny")
    for dtype in ("fp64", "fp32")
    for name in (*ALONE, *COMBINED)
    if (model, dtype) != ("gpt-tiny", "fp64") or name not in ALONE  # the table's core has those
]
CORE = [("gpt-tiny", "fp64", "tp2pp2v2dp2"), ("llama-tiny", "fp64", "tp2pp2zbvdp2")]


@pytest.mark.parametrize(
    ("model", "dtype", "name"),
    [pytest.param(*row, marks=() if row in CORE else pytest.mark.slow) for row in ROWS],
)
def test_same_run(model: str, dtype: str, name: str, corpus: str) -> None:
    table.test_same_run(model, dtype, name, corpus)


@pytest.mark.parametrize("split", ["given", "standalone", pytest.param("ends", marks=pytest.mark.slow)])
def test_uneven_stages(split: str, corpus: str) -> None:
    parallel = ParallelConfig(pipeline_model_parallel_size=2, **UNEVEN[split])
    config = replace(config_of("gpt-tiny", "fp64", corpus), parallel=parallel)
    check_config(config, 2)
    run = record_run(config, NUM_ITERATIONS, 2)
    assert not compare(run, reference("gpt-tiny", "fp64", corpus)).excesses(TOLERANCES["fp64"])
