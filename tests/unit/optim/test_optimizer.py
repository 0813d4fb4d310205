"""One rank's optimizer against torch's AdamW on the parameters themselves."""

from __future__ import annotations

import copy
import dataclasses
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megalite.config import OptimizerConfig, ParallelConfig
from megalite.optim.optimizer import Optimizer
from megalite.tensor_parallel.parameter_spec import ParameterShard

CONFIG = OptimizerConfig(lr=1e-2, weight_decay=0.3, adam_beta2=0.95, clip_grad=1.0)
NUM_MICROBATCHES = 3


class Net(nn.Module):
    """A layer whose weight is used twice, a bias, a norm; as the model has them."""

    def __init__(self, make_parameter) -> None:
        super().__init__()
        self.table = make_parameter(16, 8, is_vocabulary=True)
        self.bias = make_parameter(16, decay=False)
        self.norm = make_parameter(8, decay=False)
        self.inner = make_parameter(16, 16)

    def forward(self, x):
        x = F.layer_norm(x, (8,), self.norm)
        x = torch.tanh(F.linear(x, self.table, self.bias)) @ self.inner
        return (x @ self.table).square().mean()


@pytest.fixture
def net(make_parameter):
    return Net(make_parameter)


def batches(iteration: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(iteration)
    return [torch.randn(4, 8, generator=generator, dtype=torch.float64) for _ in range(NUM_MICROBATCHES)]


def state_of(optimizer):
    """The optimizer's state in the parameters' shapes: views."""
    return {
        name: part.tensor.view(part.shape) if isinstance(part, ParameterShard) else part
        for name, part in optimizer.state().items()
    }


def optimizer_of(net, topology, config=CONFIG, bucket_size: int = 50) -> Optimizer:
    parallel = ParallelConfig(ddp_bucket_size=bucket_size)
    return Optimizer(net.named_parameters(), None, config, parallel, topology, net.table.dtype)


def train(
    net, optimizer: Optimizer, iterations: range, scale: float = 1.0, own_rate: float | None = None
) -> list[float]:
    """Trains; the rate changes with the iteration. Returns the norms."""
    norms = []
    for iteration in iterations:
        optimizer.begin(NUM_MICROBATCHES)
        for batch in batches(iteration):
            (scale * net(batch.to(net.table.dtype))).backward()
        norm = optimizer.finish_gradients()
        own = None if own_rate is None else own_rate / (1 + iteration)
        optimizer.step(1e-2 / (1 + iteration), CONFIG.weight_decay, norm, decoupled_learning_rate=own)
        norms.append(norm.item())
    return norms


def train_with_torch(
    net, iterations: range, clip: float, scale: float, own_rate: float = 1e-2
) -> list[float]:
    """The same with torch's parts, none of them fused or flat."""
    adamw = torch.optim.AdamW(
        [
            {"params": [net.table], "weight_decay": CONFIG.weight_decay, "peak": own_rate},
            {"params": [net.inner], "weight_decay": CONFIG.weight_decay, "peak": 1e-2},
            {"params": [net.bias, net.norm], "weight_decay": 0.0, "peak": 1e-2},
        ],
        betas=(CONFIG.adam_beta1, CONFIG.adam_beta2),
        eps=CONFIG.adam_eps,
        foreach=False,
    )
    return steps_of_torch(net, adamw, iterations, clip, scale)


def steps_of_torch(net, adamw, iterations: range, clip: float, scale: float = 1.0) -> list[float]:
    """Train; each group's rate falls from its `peak`. Returns the norms."""
    norms = []
    for iteration in iterations:
        adamw.zero_grad()
        for batch in batches(iteration):
            (scale * net(batch.to(net.table.dtype))).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(net.parameters(), clip or float("inf")).item())
        for group in adamw.param_groups:
            group["lr"] = group["peak"] / (1 + iteration)
        adamw.step()
    return norms


@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("scale", [1e-3, 1.0])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-5)])
def test_ten_iterations_as_torch_makes_them(make_parameter, topology, clip, scale, dtype, tolerance):
    """With gradients above the largest norm, below it, and with clipping turned off."""
    net = Net(partial(make_parameter, dtype=dtype))
    theirs = copy.deepcopy(net)
    config = dataclasses.replace(CONFIG, clip_grad=clip)
    norms = train(net, optimizer_of(net, topology, config), range(10), scale)
    assert norms == pytest.approx(train_with_torch(theirs, range(10), clip, scale), rel=tolerance)
    assert (min(norms) > 1.0) if scale == 1.0 else (max(norms) < 1.0)
    for name, weight in net.named_parameters():
        torch.testing.assert_close(weight, theirs.get_parameter(name), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("bucket_size", [50, 10**6])
def test_a_learning_rate_of_its_own_for_the_vocabulary(make_parameter, topology, bucket_size):
    net = Net(make_parameter)
    theirs = copy.deepcopy(net)
    optimizer = optimizer_of(net, topology, dataclasses.replace(CONFIG, decoupled_lr=1e-3), bucket_size)
    norms = train(net, optimizer, range(10), own_rate=1e-3)
    assert norms == pytest.approx(train_with_torch(theirs, range(10), 1.0, 1.0, 1e-3), rel=1e-13)
    for name, weight in net.named_parameters():
        torch.testing.assert_close(weight, theirs.get_parameter(name), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("offloads", [False, True])
def test_mup_divides_rate_and_epsilon_of_matrices_but_not_their_decay(make_parameter, topology, offloads):
    config = dataclasses.replace(CONFIG, adam_eps=1e-2, optimizer_cpu_offload=offloads)
    net = Net(lambda *shape, **spec: make_parameter(*shape, **spec, width_ratio=4.0 if spec == {} else 1.0))
    theirs = copy.deepcopy(net)
    optimizer = optimizer_of(net, topology, config)
    train(net, optimizer, range(5))
    optimizer.finish_weights()
    adamw = torch.optim.AdamW(
        [
            {"params": [theirs.table], "weight_decay": 0.3, "peak": 1e-2, "eps": 1e-2},
            {"params": [theirs.inner], "weight_decay": 1.2, "peak": 2.5e-3, "eps": 2.5e-3},
            {"params": [theirs.bias, theirs.norm], "weight_decay": 0.0, "peak": 1e-2, "eps": 1e-2},
        ],
        betas=(CONFIG.adam_beta1, CONFIG.adam_beta2),
    )
    steps_of_torch(theirs, adamw, range(5), CONFIG.clip_grad)
    for name, weight in net.named_parameters():
        torch.testing.assert_close(weight, theirs.get_parameter(name), rtol=1e-13, atol=1e-13)


def test_the_scale_of_the_loss_is_taken_out_of_the_gradients(make_parameter, topology):
    """Adam's weights would hardly show it; its moments do."""
    moments = []
    for scale in (1.0, 8.0):
        net = Net(partial(make_parameter, dtype=torch.float16))
        config = dataclasses.replace(CONFIG, loss_scale=scale, clip_grad=0.0)
        optimizer = optimizer_of(net, topology, config)
        train(net, optimizer, range(1), scale)
        moments.append(torch.cat([state.moments["exp_avg"] for state in optimizer.states]))
    torch.testing.assert_close(moments[1], moments[0], rtol=0.02, atol=1e-4)
    assert moments[0].abs().max() > 0.01


def test_biases_and_norms_do_not_decay(net, topology):
    before = copy.deepcopy(net)
    optimizer = optimizer_of(net, topology)
    optimizer.begin(1)
    optimizer.step(0.1, CONFIG.weight_decay, optimizer.finish_gradients())  # no gradient: the decay is all
    assert torch.equal(net.bias, before.bias)
    assert torch.equal(net.norm, before.norm)
    for name in ("table", "inner"):
        expected = before.get_parameter(name) * (1 - 0.1 * CONFIG.weight_decay)
        torch.testing.assert_close(net.get_parameter(name), expected, rtol=1e-15, atol=0.0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), "not allowed"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_an_update_that_is_left_out_changes_nothing(make_parameter, topology, bad, dtype):
    """For a gradient that is not finite, or because the caller says so; the next one goes on as if alone."""
    net = Net(partial(make_parameter, dtype=dtype))
    optimizer = optimizer_of(net, topology)
    train(net, optimizer, range(2))
    weights = copy.deepcopy(net)
    state = {name: tensor.clone() for name, tensor in state_of(optimizer).items()}
    optimizer.begin(1)
    net(batches(2)[0].to(dtype)).backward()
    if bad != "not allowed":
        optimizer.buffers[0].full[3] = bad
    gradients = [each.full.clone() for each in optimizer.buffers]
    norm = optimizer.finish_gradients()
    assert norm.isfinite().item() is (bad == "not allowed")
    optimizer.step(1e-2, CONFIG.weight_decay, norm, torch.tensor(bad != "not allowed"))
    for each, gradient in zip(optimizer.buffers, gradients, strict=True):
        torch.testing.assert_close(each.full, gradient, rtol=0.0, atol=0.0, equal_nan=True)
    assert all(torch.equal(weight, weights.get_parameter(name)) for name, weight in net.named_parameters())
    assert all(torch.equal(tensor, state[name]) for name, tensor in state_of(optimizer).items())
    train(net, optimizer, range(2, 3))
    straight = Net(partial(make_parameter, dtype=dtype))
    train(straight, optimizer_of(straight, topology), range(3))
    assert all(torch.equal(weight, straight.get_parameter(name)) for name, weight in net.named_parameters())


def test_a_parameter_without_a_gradient_has_zeros_in_place_of_the_last_iterations(net, topology):
    optimizer = optimizer_of(net, topology)
    train(net, optimizer, range(1))
    optimizer.begin(1)
    net.table.sum().backward()
    norm = optimizer.finish_gradients()
    assert norm == pytest.approx(net.table.numel() ** 0.5)
    gradients = {name: optimizer.gradient(name) for name, _ in net.named_parameters()}
    assert torch.equal(gradients.pop("table"), torch.ones_like(net.table))
    assert not any(gradient.any() for gradient in gradients.values())


def test_resumes_bitwise_from_copies_of_its_state(make_parameter, topology):
    straight, resumed = Net(make_parameter), Net(make_parameter)
    optimizer = optimizer_of(straight, topology)
    train(straight, optimizer, range(4))
    saved = {name: tensor.clone() for name, tensor in state_of(optimizer).items()}
    saved_weights = {name: weight.detach().clone() for name, weight in straight.named_parameters()}
    train(straight, optimizer, range(4, 8))

    restarted = optimizer_of(resumed, topology)
    with torch.no_grad():
        for name, tensor in state_of(restarted).items():
            tensor.copy_(saved[name])
        for name, weight in resumed.named_parameters():
            weight.copy_(saved_weights[name])
    train(resumed, restarted, range(4, 8))
    for name, weight in straight.named_parameters():
        assert torch.equal(weight, resumed.get_parameter(name))


def test_state_has_each_parameters_shape(net, topology):
    state = state_of(optimizer_of(net, topology))
    for name, weight in net.named_parameters():
        assert state.pop(f"{name}.exp_avg").shape == state.pop(f"{name}.exp_avg_sq").shape == weight.shape
    assert {name: tensor.shape for name, tensor in state.items()} == {"num_steps": ()}


def test_a_stage_without_parameters_takes_part(topology):
    optimizer = Optimizer([], None, CONFIG, ParallelConfig(), topology, torch.float32)
    optimizer.begin(1)
    norm = optimizer.finish_gradients()
    assert norm == 0.0
    optimizer.step(1e-2, 0.1, norm)
    assert optimizer.state()["num_steps"] == 1.0
    assert optimizer.state().keys() == {"num_steps"}
