"""Context-parallel ranks together compute attention over the whole sequence: against PyTorch's own."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.attention.choice import build_core
from megalite.config import CheckpointConfig, Config, DataConfig, ModelConfig, ParallelConfig, TrainingConfig
from megalite.config.presets import PRESETS
from megalite.distributed.axis import HeldPositions
from megalite.distributed.topology import Topology
from megalite.kernels import Drop
from megalite.tensor_parallel.parameter_spec import LayerContext
from tests.live_ranks import continued_losses, run_ranks

S, B, HEADS, SIZE = 24, 2, 4, 16


def _inputs(num_groups: int, dtype: torch.dtype) -> list[Tensor]:
    """Return queries, keys, values and the output's gradient, ``[s, b, n or g, d]``."""
    generator = torch.Generator().manual_seed(1)
    heads = HEADS, num_groups, num_groups, HEADS
    return [torch.randn(S, B, n, SIZE, generator=generator, dtype=torch.float64).to(dtype) for n in heads]


def _attend(topology: Topology, kind: str, num_groups: int, dtype: torch.dtype) -> list[Tensor]:
    """Return the output and the gradients of this rank's tokens."""
    config = ModelConfig(
        num_attention_heads=HEADS,
        hidden_size=HEADS * SIZE,
        num_query_groups=num_groups,
        attention_dropout=0.0,
        seq_length=S,
    )
    context = LayerContext(topology, dtype, cp_comm_type=kind)
    core = build_core(config, context)
    layer = core.for_layer(0, core.config.head_specs[0])
    q, k, v, grad = (topology.positions.take(x, dim=0) for x in _inputs(num_groups, dtype))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    q, k, v = (x.permute(1, 2, 0, 3) for x in layer.enter(*leaves))
    visible = core.visible_keys((B, S), None, [None])[None]
    y = layer(q, k, v, visible, Drop(0.0, 0, torch.arange(B))).permute(2, 0, 1, 3)
    out = layer.leave(y)
    return [x.detach() for x in (out, *torch.autograd.grad(out, leaves, grad))]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-6)], ids=str)
@pytest.mark.parametrize(("kind", "num_groups"), [("all_gather", 2), ("a2a", 4), ("a2a", 1)])
def test_attention_is_that_of_the_whole_sequence(
    kind: str, num_groups: int, dtype: torch.dtype, bound: float
) -> None:
    *leaves, grad = _inputs(num_groups, torch.float64)
    for leaf in leaves:
        leaf.requires_grad_()
    q, k, v = (x.permute(1, 2, 0, 3) for x in leaves)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).permute(2, 0, 1, 3)
    expected = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    parallel = ParallelConfig(context_parallel_size=2, cp_comm_type=kind)
    ranks = run_ranks(_attend, parallel.mesh, 2, kind, num_groups, dtype)
    order = HeldPositions(0, 2, is_zigzag=parallel.mesh.is_zigzag)
    for slices, whole in zip(zip(*ranks, strict=True), expected, strict=True):
        error = (order.in_position_order(torch.cat(slices)).double() - whole).abs().max() / whole.abs().max()
        assert error < bound


def test_a_checkpoint_continues_with_any_context_parallel_size(tmp_path: Path) -> None:
    model = dataclasses.replace(
        PRESETS["gpt-tiny"], num_layers=2, vocab_size=64, seq_length=16, params_dtype="fp64"
    )
    found: dict[str, list[float]] = {}
    for name, sizes in {"one": (1,), "others": (2, 1, 2)}.items():
        (tmp_path / name).mkdir()
        for size in sizes:
            parallel = ParallelConfig(context_parallel_size=size, zero_stage=1)
            config = Config(
                model=model,
                parallel=parallel,
                data=DataConfig(mock_data=True),
                training=TrainingConfig(global_batch_size=2, train_iters=6, eval_iters=0),
                checkpoint=CheckpointConfig(save=str(tmp_path / name), load=str(tmp_path / name)),
            )
            ranks = run_ranks(continued_losses, parallel.mesh, size, config, 6 // len(sizes))
            assert ranks == [ranks[0]] * size
            found[name] = [*found.get(name, []), *ranks[0]]
    assert found["others"] == pytest.approx(found["one"], rel=1e-12)
    names = {file.name for file in tmp_path.glob("one/iter_*/*.safetensors")}
    assert not any("cp" in name for name in names)
