"""Activation offload on a stage of one rank: the same bits, and the planned bytes leave the device.

The device is a simulated pool: the CPU tensors that operators make (`LiveBytes`). Memory of the host's
buffers is not made by operators.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megalite.config import ModelConfig, RecomputeConfig
from megalite.data.microbatch import Microbatch
from megalite.distributed.topology import Topology
from megalite.model import activation_offload
from megalite.model.activation_offload import ActivationOffload, _SavedGroup
from megalite.plan.rank_memory import host_activations, offloaded_bytes
from megalite.tensor_parallel.gemm import WeightGradientStore, run_stored
from megalite.utils.errors import UserError
from tests.live_bytes import LiveBytes
from tests.stages import build_stage
from tests.unit.plan.test_parameters import run_of

NUM_LAYERS, OFFLOADED = 3, 2
SEQ_LENGTH, MICRO_BATCH = 64, 2
GPT = ModelConfig(
    num_layers=NUM_LAYERS,
    hidden_size=64,
    num_attention_heads=4,
    seq_length=SEQ_LENGTH,
    vocab_size=100,
    hidden_dropout=0.1,
    attention_dropout=0.1,
    params_dtype="fp64",
)
LLAMA = replace(
    GPT, position_embedding_type="rope", activation="swiglu", add_bias_linear=False, attention_dropout=0.0
)
MODELS = {"gpt": GPT, "alibi": replace(GPT, position_embedding_type="alibi"), "llama": LLAMA}
PARTS = ("core_attn", "mlp_act", "layernorm")
RECOMPUTE = {
    "nothing": RecomputeConfig(),
    "full": RecomputeConfig("full"),
    "two": RecomputeConfig("full", recompute_num_layers=2),
    "block": RecomputeConfig("full", recompute_method="block"),
    "parts": RecomputeConfig("selective", recompute_modules=PARTS),
    "mlp": RecomputeConfig("selective", recompute_modules=("mlp",)),
}
SLACK = 0.02
"""Statistics of norms and of attention: too small to copy."""


class Outcome(NamedTuple):
    """What two microbatches in flight hold on the device, and their results."""

    device_bytes: int
    host_bytes: int
    loss: Tensor
    gradients: dict[str, Tensor]


def batch(number: int) -> Microbatch:
    ids = torch.randint(100, (MICRO_BATCH, SEQ_LENGTH + 1), generator=torch.Generator().manual_seed(number))
    return Microbatch(ids[:, :-1], ids[:, 1:], torch.arange(MICRO_BATCH) + number)


def outcome(topology: Topology, model: ModelConfig, config: RecomputeConfig, stored: bool) -> Outcome:
    """Run the forward of two microbatches, then their backwards, the last one first."""
    offload = ActivationOffload(topology.device) if config.cpu_offload_activations else None
    store = WeightGradientStore()
    stage: Any = build_stage(
        model,
        topology,
        range(NUM_LAYERS),
        seed=3,
        recompute=config,
        offload=offload,
        weight_gradient_store=store if stored else None,
    )
    with torch.no_grad():
        stage(batch(0), None)  # tables that are made once
    with LiveBytes() as memory:
        losses = [stage(batch(number), None) for number in (1, 2)]
        held = memory.settled_count()
    for loss in reversed(losses):
        with store.collect() as gradients:
            loss.backward()
        run_stored(gradients)
    found = {name: p.grad for name, p in stage.named_parameters()}
    return Outcome(held, offload.buffers.num_bytes if offload else 0, losses[0].detach(), found)


@pytest.mark.parametrize(
    ("name", "mode", "stored"),
    [
        *(("gpt", mode, False) for mode in RECOMPUTE),
        *(("llama", mode, True) for mode in ("nothing", "two", "parts")),
        ("alibi", "nothing", False),
    ],
)
def test_the_same_bits_with_fewer_bytes(name: str, mode: str, stored: bool, one_rank: Topology) -> None:
    model = MODELS[name]
    config = replace(RECOMPUTE[mode], cpu_offload_activations=OFFLOADED)
    before = outcome(one_rank, model, RECOMPUTE[mode], stored)
    after = outcome(one_rank, model, config, stored)
    assert after.loss.equal(before.loss)
    assert [key for key in before.gradients if not after.gradients[key].equal(before.gradients[key])] == []
    run = run_of(model, 1, 1)
    training = replace(run.config.training, micro_batch_size=MICRO_BATCH)
    # The plan is of a GPU, which has no kernel of fused attention in fp64.
    in_fp32 = replace(run.config.model, params_dtype="fp32")
    run = replace(run, config=replace(run.config, model=in_fp32, recompute=config, training=training))
    planned = 2 * 2 * sum(offloaded_bytes(run, run.stage_kinds[0]))  # two microbatches of fp64
    assert before.device_bytes - after.device_bytes == pytest.approx(planned, rel=SLACK)
    assert after.host_bytes == pytest.approx(planned, rel=SLACK)
    assert host_activations(run) == [planned / 4]  # one rank has one in flight


def test_the_last_layer_stays_until_the_next_forward_or_backward(one_rank: Topology) -> None:
    config = RecomputeConfig(cpu_offload_activations=NUM_LAYERS)
    some = replace(config, cpu_offload_activations=NUM_LAYERS - 1)
    all_layers, most = (outcome(one_rank, GPT, each, False) for each in (config, some))
    assert all(all_layers.gradients[key].equal(most.gradients[key]) for key in most.gradients)
    of_a_layer = all_layers.host_bytes - most.host_bytes  # of both microbatches
    assert most.device_bytes - all_layers.device_bytes == pytest.approx(of_a_layer / 2, rel=SLACK)


def saved_group(device: torch.device, kept: Tensor | None = None) -> tuple[_SavedGroup, ActivationOffload]:
    offload = ActivationOffload(device)
    stays = set() if kept is None else {kept.untyped_storage()._cdata}
    return _SavedGroup(offload, [], stays, None), offload


def test_a_storage_is_copied_once_and_comes_back_for_all_its_views() -> None:
    x = torch.randn(64, 64, dtype=torch.float64, requires_grad=True)
    group, offload = saved_group(x.device)
    twice = x * 2
    with group.hooks():
        y = (twice * twice).sum() + (twice[:32].exp() * twice.t()[:32]).sum()
    exponents = 32 * 64 * 8
    assert offload.buffers.num_bytes == x.nbytes + exponents
    offload.ran(group)
    offload.ran(None)
    del twice
    (found,) = torch.autograd.grad(y, x)
    (expected,) = torch.autograd.grad(((x * 2) ** 2).sum() + ((x * 2)[:32].exp() * (x * 2).t()[:32]).sum(), x)
    torch.testing.assert_close(found, expected)


def test_what_is_small_or_held_by_others_stays() -> None:
    x = torch.randn(64, 64, dtype=torch.float64, requires_grad=True)
    small = torch.randn(64, dtype=torch.float64, requires_grad=True)
    group, offload = saved_group(x.device, kept=x)
    with group.hooks():
        y = x.square().sum() + (small**3).sum()
    assert offload.buffers.num_bytes == 0
    y.backward()
    assert x.grad is not None and x.grad.equal(2 * x.detach())


def test_buffers_are_used_again(one_rank: Topology) -> None:
    offload = ActivationOffload(one_rank.device)
    config = RecomputeConfig(cpu_offload_activations=2)
    stage: Any = build_stage(GPT, one_rank, range(NUM_LAYERS), seed=3, recompute=config, offload=offload)
    sizes = []
    for number in range(3):
        stage(batch(number), None).backward()
        sizes.append(offload.buffers.num_bytes)
    assert sizes[0] == sizes[1] == sizes[2] > 0


def test_host_memory_that_cannot_be_had_is_one_line(
    one_rank: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(num_bytes: int) -> Tensor:
        raise RuntimeError("out of pages\nmore")

    monkeypatch.setattr("megalite.utils.hardware.host_memory.allocate_bytes", refuse)
    group, _ = saved_group(one_rank.device)
    x = torch.randn(64, 64, dtype=torch.float64, requires_grad=True)
    with group.hooks(), pytest.raises(UserError) as caught:
        x.exp()
    assert str(caught.value).startswith("--cpu-offload-activations: 32,768 bytes of host memory cannot be")
    assert "(out of pages): pass a smaller" in str(caught.value)
    assert x.nbytes > activation_offload.MIN_BYTES
