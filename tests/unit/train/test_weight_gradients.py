"""Who adds the weights' gradients to their sums."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megalite.config import Config, ModelConfig, ParallelConfig, TrainingConfig
from megalite.topology import Topology
from megalite.train import weight_gradients
from megalite.train.weight_gradients import fusion_of

ON_GPU = "added by the products themselves"


@pytest.fixture
def topology() -> Iterator[Topology]:
    with Topology.fake(ParallelConfig(data_parallel_size=2), 2, 0, device="cpu") as topology:
        yield topology


def told(
    topology: Topology, dtype: str = "fp32", compile: bool = False, **parallel: object
) -> tuple[bool, str]:
    return fusion_of(
        Config(
            model=ModelConfig(params_dtype=dtype),
            parallel=ParallelConfig(**parallel),
            training=TrainingConfig(compile=compile),
        ),
        topology,
    )


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_where_weights_are_as_wide_as_the_sums(topology: Topology, dtype: str) -> None:
    assert told(topology, dtype) == (True, ON_GPU)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_where_the_device_multiplies_into_a_wider_sum(
    topology: Topology, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_on, why = told(topology, dtype)
    assert not is_on
    assert "adds to float32 on cpu" in why
    monkeypatch.setattr(weight_gradients, "has_widening_product", lambda *_: True)
    assert told(topology, dtype) == (True, ON_GPU)


def test_where_it_is_left_to_autograd(topology: Topology) -> None:
    is_on, why = told(topology, gradient_accumulation_fusion=False)
    assert (is_on, "--no-gradient-accumulation-fusion" in why) == (False, True)
    is_on, why = told(topology, zero_stage=3)
    assert (is_on, "--zero-stage 3" in why) == (False, True)


def test_compiled_layers_leave_it_to_autograd(topology: Topology) -> None:
    is_on, why = told(topology, compile=True)
    assert is_on
    assert "--compile's layers by autograd" in why
