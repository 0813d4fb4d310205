"""What a verification changes of the user's config before it runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megalite.config import Config
from megalite.verify.compare_runs import FP16_LOSS_SCALE, with_constant_loss_scale


@pytest.mark.parametrize(
    ("dtype", "given", "expected"),
    [("fp16", None, FP16_LOSS_SCALE), ("fp16", 8.0, 8.0), ("bf16", None, None)],
)
def test_only_a_dynamic_loss_scale_is_replaced(
    dtype: str, given: float | None, expected: float | None
) -> None:
    config = Config()
    config = replace(
        config,
        model=replace(config.model, params_dtype=dtype),
        optimizer=replace(config.optimizer, loss_scale=given),
    )
    assert with_constant_loss_scale(config).optimizer.loss_scale == expected
