"""Runs with moments in 8 and 16 bits round to the same codes in every layout.

In fp64, one moment that rounds to another code changes a weight by more than 1e-6 of the learning rate.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from megalite.config import Config
from megalite.observe.verify.compare_runs import TOLERANCES, compare
from megalite.observe.verify.record_run import RunRecord
from tests.parity.models import MIXTRAL, MUON, config_of, run_alone, run_in

NUM_ITERATIONS = 3


def _config(model: str, corpus: str, exp_avg_dtype: str = "fp8") -> Config:
    config = config_of(model, "fp64", corpus)
    exp_avg_sq_dtype = "fp32" if exp_avg_dtype == "fp32" else "bf16"
    optimizer = replace(config.optimizer, exp_avg_dtype=exp_avg_dtype, exp_avg_sq_dtype=exp_avg_sq_dtype)
    return replace(config, optimizer=optimizer)


@functools.cache
def _reference(model: str, corpus: str, exp_avg_dtype: str = "fp8") -> RunRecord:
    return run_alone(_config(model, corpus, exp_avg_dtype), NUM_ITERATIONS)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("gpt-tiny", "tp2"),  # with dropout, and a tied embedding
        ("gpt-tiny", "dp2+zero3"),
        (MIXTRAL, "dp2ep2"),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                ("gpt-tiny", "pp2"),
                ("gpt-tiny", "dp2mbs1"),
                ("gpt-tiny", "dp2+zero1"),
                ("gpt-tiny", "dp4+zero2"),
                ("gpt-tiny", "cp2"),
                ("gpt-tiny", "tp2pp2dp2+sp+zero1"),
                (MIXTRAL, "tp2dp2ep4etp1+sp+zero1"),
                (MUON, "tp2pp2dp2+sp+zero1"),
            )
        ),
    ],
)
def test_same_codes(model: str, name: str, corpus: str) -> None:
    run = run_in(name, _config(model, corpus), NUM_ITERATIONS)
    assert not compare(run, _reference(model, corpus)).excesses(TOLERANCES["fp64"])
    wide = _reference(model, corpus, "fp32")
    assert abs(run.losses[-1] / wide.losses[-1] - 1.0) > 1e-7  # they are rounded
