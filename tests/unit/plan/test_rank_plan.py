"""Test that a failed allocation is explained, and that other errors stay as they are."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import get_args

import pytest
import torch

from megalite.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RecomputeConfig,
    TrainingConfig,
)
from megalite.config.training import Fp8Recipe
from megalite.distributed.topology import Topology
from megalite.kernels import dropout
from megalite.plan import rank_plan
from megalite.plan.advice import Device, planned_run_on
from megalite.plan.rank_memory import rank_memories
from megalite.plan.rank_plan import RankPlan, device_of
from megalite.utils.errors import UserError

CONFIG = Config(
    model=ModelConfig(
        num_layers=24,
        hidden_size=2048,
        num_attention_heads=16,
        seq_length=2048,
        vocab_size=50257,
        params_dtype="bf16",
        attention_dropout=0.0,
    ),
    parallel=ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2),
    optimizer=OptimizerConfig(lr=1e-3),
    data=DataConfig(mock_data=True),
    training=TrainingConfig(train_iters=3, micro_batch_size=8, global_batch_size=64),
)


@pytest.fixture
def rank_6():
    with Topology.fake(CONFIG.parallel.mesh, 8, 6, device="cpu") as topology:
        yield topology


def explained(topology: Topology) -> AbstractContextManager[None]:
    return RankPlan(CONFIG, topology).explains_out_of_memory()


def test_a_gpus_error_names_the_rank_the_memory_and_three_flags(rank_6: Topology) -> None:
    with pytest.raises(UserError) as caught, explained(rank_6):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total …")
    assert caught.value.on_one_rank
    first, estimate, *remedies = str(caught.value).splitlines()
    assert first.startswith(
        "rank 6 (pp 1 of 2, dp 1 of 2, tp 0 of 2) ran out of memory when it requested 2.68 GB more "
        "(RuntimeError: CPU out of memory)"
    )
    assert "the planned memory of this rank is" in estimate
    assert all(word in estimate for word in ("activations", "logits", "optimizer", "gradients", "weights"))
    assert len(remedies) == 3
    assert all(text.startswith("--") and " would save " in text for text in remedies)


def test_the_steps_tensors_are_free_before_the_plan(
    rank_6: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = list[weakref.ref[torch.Tensor]]()

    def step() -> None:
        activation = torch.zeros(4)
        held.append(weakref.ref(activation))
        raise torch.OutOfMemoryError("CUDA out of memory")

    def advise(*_: object) -> None:
        assert held[0]() is None
        raise UserError("it was called")

    monkeypatch.setattr(rank_plan, "advise", advise)
    with (
        pytest.raises(UserError, match="there is no advice: it was called"),
        explained(rank_6),
    ):
        step()


def test_a_real_allocation_that_fails(rank_6: Topology) -> None:
    with (
        pytest.raises(UserError, match=r"when it requested 1125899\.91 GB more"),
        explained(rank_6),
    ):
        torch.empty(1 << 50, dtype=torch.uint8)


@pytest.mark.parametrize("shape", [(2**31 - 1, 2**31 - 1), (2**31 - 1, 2**31 - 1, 2**31 - 1)])
def test_a_size_that_no_memory_has(rank_6: Topology, shape: tuple[int, ...]) -> None:
    with (
        pytest.raises(UserError, match="ran out of memory"),
        explained(rank_6),
    ):
        torch.empty(shape)


def test_one_of_a_compiled_kernel(rank_6: Topology) -> None:
    """Test an allocation through torch's stable ABI, whose error does not name the cause."""
    x = torch.empty(1, dtype=torch.float64).as_strided((1 << 24, 1, 1 << 24), (0, 0, 0))
    with (
        pytest.raises(UserError, match="ran out of memory"),
        explained(rank_6),
    ):
        dropout(x, 0.5, 1, torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize("error", [RuntimeError("shapes do not match"), ValueError("no"), KeyError("x")])
def test_other_errors_are_left_alone(rank_6: Topology, error: Exception) -> None:
    with pytest.raises(type(error)) as caught, explained(rank_6):
        raise error
    assert caught.value is error


def test_a_limit_of_the_process_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda _: (3 * 10**9, 3 * 10**9))
    assert device_of(torch.device("cpu")).memory_bytes == 3e9
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert device_of(torch.device("cpu")).memory_bytes > 3e9


def test_host_memory_for_offloaded_activations_is_checked_before_training(
    rank_6: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    offloading = replace(CONFIG, recompute=RecomputeConfig(cpu_offload_activations=12))
    monkeypatch.setattr("megalite.plan.rank_plan.free_bytes", lambda: 10_000_000_000)
    RankPlan(CONFIG, rank_6, num_local=4).check_host_memory()
    with pytest.raises(UserError) as caught:
        RankPlan(offloading, rank_6, num_local=4).check_host_memory()
    text = str(caught.value)
    assert text.startswith("--cpu-offload-activations 12 needs ")
    assert text.endswith("of a machine, of which 10.0 GB are free: pass a smaller --cpu-offload-activations")
    both = replace(offloading, optimizer=replace(CONFIG.optimizer, optimizer_cpu_offload=True))
    with pytest.raises(UserError) as caught:
        RankPlan(both, rank_6, num_local=4).check_host_memory()
    assert str(caught.value).startswith("--cpu-offload-activations 12 and offloaded optimizer state need ")
    monkeypatch.setattr("megalite.plan.rank_plan.free_bytes", lambda: 10**15)
    RankPlan(offloading, rank_6, num_local=4).check_host_memory()


@pytest.mark.parametrize(
    ("num_gigabytes", "layout", "warns"), [(40, "manual", True), (400, "manual", False), (40, "auto", False)]
)
def test_a_layout_that_does_not_fit_is_told_before_the_run(
    num_gigabytes: int,
    layout: str,
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    memory = float(num_gigabytes) * 4e9  # of 4 ranks
    monkeypatch.setattr(rank_plan, "device_of", lambda _: Device(memory, 0.0, is_host=True))
    config = replace(CONFIG, parallel=replace(CONFIG.parallel, layout=layout))
    config = replace(config, training=replace(config.training, micro_batch_size=32, global_batch_size=64))
    with Topology.fake(CONFIG.parallel.mesh, 8, 0, device="cpu") as topology:
        RankPlan(config, topology, num_local=4).warn_of_memory()
    planned = planned_run_on(config, 8, Device(memory, 0.0), None)
    total = max(each.total for each in rank_memories(planned)) / 1e9
    assert (f"planned {total:.1f} GB of {num_gigabytes}.0 per rank" in caplog.text) == warns
    assert bool(caplog.messages) == warns
    assert any("--micro-batch-size" in line for line in caplog.messages) == warns


def test_memory_is_planned_with_every_recipe_of_narrow_gemms() -> None:
    """A run that starts plans its memory before its model exists, without names and samples of GEMMs."""
    model = replace(CONFIG.model, num_layers=2, hidden_size=128, num_attention_heads=4, seq_length=128)
    for recipe in get_args(Fp8Recipe):
        options = {"fp8_format": "e2m1" if recipe == "nvfp4" else "hybrid", "fp8_recipe": recipe}
        training = replace(CONFIG.training, **options, emulate=True, micro_batch_size=1)
        config = replace(CONFIG, model=model, training=training, parallel=ParallelConfig())
        (memory,) = rank_memories(planned_run_on(config, 1, Device(8e10, 0.0)))
        assert memory.total > 0
