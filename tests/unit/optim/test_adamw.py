"""Updates with moments in 16 and 8 bits against AdamW in numpy, on one rank."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megalite.config import OptimizerConfig, ParallelConfig
from megalite.kernels import site_key
from megalite.kernels.moments import reference
from megalite.kernels.philox import signed64
from megalite.optim import adamw
from megalite.optim.optimizer import Optimizer

FP8 = OptimizerConfig(exp_avg_dtype="fp8", exp_avg_sq_dtype="bf16", clip_grad=0.0, weight_decay=0.3)
BF16 = OptimizerConfig(exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16", clip_grad=0.0, weight_decay=0.3)
SEED, RATE = 5, 1e-2
SHAPES = {"matrix": (24, 40), "bias": (7,)}


def optimizer_of(make_parameter, topology, config: OptimizerConfig) -> Optimizer:
    parameters = {
        "matrix": make_parameter(*SHAPES["matrix"], dtype=torch.float32),
        "bias": make_parameter(*SHAPES["bias"], dtype=torch.float32, decay=False),
    }
    parallel = ParallelConfig(ddp_bucket_size=10_000)
    return Optimizer(parameters.items(), None, config, parallel, topology, torch.float32, seed=SEED)


def gradients(iteration: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(iteration)
    return {name: 1e-3 * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def step(optimizer: Optimizer, values: dict[str, torch.Tensor]) -> None:
    optimizer.begin(1)
    for buffer in optimizer.buffers:
        for entry in buffer.bucket.entries:
            entry.parameter.backward(values[entry.name])
    norm = optimizer.finish_gradients()
    optimizer.step(RATE, FP8.weight_decay, norm)


def narrow(optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """The bits of the stored moments, by parameter."""
    return {
        f"{entry.name}.{kind}": state.parameter_shard(moment, entry).tensor.view(torch.uint8).clone()
        for state in optimizer.states
        for entry in state.entries
        for kind, moment in state.moments.items()
    }


def rounded_by_reference(name: str, mean: np.ndarray, square: np.ndarray, number: int, dtype: torch.dtype):
    wide = (torch.from_numpy(each.astype(np.float32)) for each in (mean, square))
    out, out_sq = torch.zeros(mean.size, dtype=dtype), torch.zeros(mean.size, dtype=torch.bfloat16)
    key = signed64(site_key(SEED, f"{name}.moments"))
    reference(*wide, out, out_sq, torch.tensor(float(number)), key, 0, 0, mean.size, mean.size)
    return out, out_sq


@pytest.mark.parametrize(("config", "dtype"), [(FP8, torch.float8_e4m3fn), (BF16, torch.bfloat16)])
def test_updates_are_those_of_numpy(make_parameter, topology, config, dtype: torch.dtype) -> None:
    """Each update from the stored moments; the stored moments of the next one are within a code."""
    optimizer = optimizer_of(make_parameter, topology, config)
    for number in (1, 2, 3):
        before = {name: optimizer.weight(name).double().numpy().flatten() for name in SHAPES}
        moments = {
            (entry.name, kind): state.parameter_shard(moment, entry).tensor.double().numpy()
            for state in optimizer.states
            for entry in state.entries
            for kind, moment in state.wide_moments(slice(0, None)).items()
        }
        values = gradients(number)
        step(optimizer, values)
        found = narrow(optimizer)
        for name, gradient in values.items():
            own = gradient.double().numpy().flatten()
            mean = 0.9 * moments[name, "exp_avg"] + 0.1 * own
            square = 0.999 * moments[name, "exp_avg_sq"] + 0.001 * own**2
            decay = FP8.weight_decay if name == "matrix" else 0.0
            root = np.sqrt(square / (1 - 0.999**number)) + 1e-8
            expected = before[name] * (1 - RATE * decay) - RATE * mean / (1 - 0.9**number) / root
            np.testing.assert_allclose(
                optimizer.weight(name).double().numpy().flatten(), expected, rtol=2e-6, atol=2e-7
            )
            for kind, stored in zip(
                ("exp_avg", "exp_avg_sq"),
                rounded_by_reference(name, mean, square, number, dtype),
                strict=True,
            ):
                same = found[f"{name}.{kind}"] == stored.view(torch.uint8)
                assert same.double().mean() > 0.99  # fp32's last bits decide about few elements


def test_moments_of_a_parameter_have_three_bytes(make_parameter, topology) -> None:
    optimizer = optimizer_of(make_parameter, topology, FP8)
    sizes = {
        name: sum(state.moments[name].element_size() for state in optimizer.states)
        for name in ("exp_avg", "exp_avg_sq")
    }
    assert sizes == {"exp_avg": len(optimizer.states), "exp_avg_sq": 2 * len(optimizer.states)}


def test_short_ranges_change_nothing(make_parameter, topology, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for size in (1 << 22, 64):
        monkeypatch.setattr(adamw, "RANGE_SIZE", size)
        optimizer = optimizer_of(make_parameter, topology, FP8)
        for number in (1, 2):
            step(optimizer, gradients(number))
        found.append(narrow(optimizer) | {name: optimizer.weight(name).clone() for name in SHAPES})
    for name, expected in found[0].items():
        assert torch.equal(found[1][name], expected), name


def test_a_skipped_update_changes_no_bit(make_parameter, topology) -> None:
    optimizer = optimizer_of(make_parameter, topology, FP8)
    step(optimizer, gradients(1))
    before = narrow(optimizer)
    step(optimizer, {name: value.fill_(torch.inf) for name, value in gradients(2).items()})
    assert all(torch.equal(bits, before[name]) for name, bits in narrow(optimizer).items())
    assert optimizer.adamw.num_steps == 1
    step(optimizer, gradients(2))
    assert not all(torch.equal(bits, before[name]) for name, bits in narrow(optimizer).items())


def test_a_checkpoint_has_the_moments_in_bf16_and_returns_them(make_parameter, topology) -> None:
    optimizer, other = (optimizer_of(make_parameter, topology, FP8) for _ in range(2))
    for number in (1, 2):
        step(optimizer, gradients(number))
    saved, taken = optimizer.state(), other.state()
    for name, shard in saved.items():
        if name.startswith(("matrix", "bias")):
            assert shard.tensor.dtype == torch.bfloat16
            taken[name].tensor.copy_(shard.tensor)
    other.seal_state(taken)
    for name, bits in narrow(optimizer).items():
        assert torch.equal(narrow(other)[name], bits), name
