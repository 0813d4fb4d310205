"""Test the packed layout of queries, keys and values, and that attention writes gradients into it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.attention.choice import build_core
from megalite.attention.positions import PositionInfo
from megalite.config import ModelConfig
from megalite.distributed.topology import Topology
from megalite.kernels.packed_heads import Heads, empty_gradients, gradients_of, join_heads, split_heads
from megalite.model.attention import Attention
from megalite.tensor_parallel.parameter_spec import LayerContext

S, B, D = 5, 2, 4
KINDS = {"multi-head": (3, 3), "multi-query": (3, 1), "grouped": (4, 2)}
"""Numbers of query heads and of key/value heads."""


class Operators(TorchDispatchMode):
    """Counts operators that copy, or fill a tensor with zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("cat", "clone", "copy_", "zeros"):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def heads_of(kind: str) -> Heads:
    n, g = KINDS[kind]
    q, k, v = (torch.randn(S, B, heads, D) for heads in (n, g, g))
    return q, k, v


def plainly_joined(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    g = k.shape[2]
    return torch.cat((q.unflatten(2, (g, -1)), k[:, :, :, None], v[:, :, :, None]), dim=3)


@pytest.mark.parametrize("kind", KINDS)
def test_joining_undoes_splitting(kind: str) -> None:
    packed = plainly_joined(*heads_of(kind))
    heads = split_heads(packed)
    with Operators() as operators:
        joined = join_heads(*heads)
    assert torch.equal(joined, packed)
    assert operators.counts == ({"cat": 1} if kind == "grouped" else {})
    assert (joined.data_ptr() == packed.data_ptr()) == (kind != "grouped")


@pytest.mark.parametrize("kind", KINDS)
def test_other_tensors_are_concatenated(kind: str) -> None:
    separate = heads_of(kind)
    transposed = tuple(x.transpose(0, 1).contiguous().transpose(0, 1) for x in separate)
    q, k, v = split_heads(plainly_joined(*separate))
    in_wrong_order = q, v, k
    of_several = (split_heads(plainly_joined(*heads_of(kind)))[number] for number in range(3))
    only_two = (separate[0], k, v)
    for heads in (separate, transposed, in_wrong_order, tuple(of_several), only_two):
        assert torch.equal(join_heads(*heads), plainly_joined(*heads))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_have_the_shapes_of_their_tensors(kind: str) -> None:
    q, k, v = (x.permute(1, 2, 0, 3) for x in heads_of(kind))
    allocated = empty_gradients(q, k, v)
    assert len(allocated) == (3 if kind == "grouped" else 1)
    for gradient, x in zip(gradients_of(allocated), (q, k, v), strict=True):
        assert gradient.shape == x.shape
        gradient.copy_(x)
    sequences = (x.permute(2, 0, 1, 3) for x in gradients_of(allocated))
    assert torch.equal(join_heads(*sequences), plainly_joined(*(x.permute(2, 0, 1, 3) for x in (q, k, v))))


CATS = [
    ("multi-head", "unfused", 0),
    ("multi-query", "unfused", 0),
    ("grouped", "unfused", 1),
    ("multi-head", "triton", 0),  # its reference on a CPU
    ("multi-head", "fused", 1),  # PyTorch's kernels return three tensors
]


@pytest.mark.parametrize(("kind", "backend", "num_cats"), CATS)
def test_backward_concatenates_only_where_it_must(
    kind: str, backend: str, num_cats: int, one_rank: Topology
) -> None:
    n, g = KINDS[kind]
    config = ModelConfig(
        num_layers=1, hidden_size=n * D, num_attention_heads=n, num_query_groups=g, seq_length=S,
        attention_dropout=0.0, position_embedding_type="alibi",
    )  # fmt: skip
    context = LayerContext(one_rank, torch.float32)
    core = build_core(config, context, backend)
    attention = Attention(config, context, core, 0, config.head_specs[0])
    packed = torch.randn(S, B, (n + 2 * g) * D, requires_grad=True)
    numbers = torch.arange(B)
    positions = PositionInfo(core.visible_keys((B, S), None, [None]))

    def attend(heads: Heads) -> Tensor:
        return attention.attend(*heads, numbers, positions)

    y = attend(attention.split(packed))
    grad = torch.randn_like(y)
    with Operators() as operators:
        (found,) = torch.autograd.grad(y, packed, grad)
    assert operators.counts["cat"] == num_cats
    assert not operators.counts["zeros"]
    plain = attend(split_heads(packed.view(S, B, g, -1, D)))
    assert torch.equal(found, torch.autograd.grad(plain, packed, grad)[0])
