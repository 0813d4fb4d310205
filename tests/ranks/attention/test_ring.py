"""Attention of zigzag slices over 2 to 4 ranks is that of one rank with the whole sequence."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.attention.choice import build_core
from megalite.config import ModelConfig, ParallelConfig
from megalite.data.document_assignment import assign_documents
from megalite.distributed.axes import MeshOptions
from megalite.distributed.topology import Topology
from megalite.kernels import Drop
from megalite.observe.operator_log import Traffic, ring_bytes
from megalite.tensor_parallel.parameter_spec import LayerContext
from tests.live_ranks import run_ranks

S, B, HEADS, SIZE = 24, 2, 4, 16
LENGTHS = [[1, 5, 6, 4, 8], [23, 1]]
"""Tokens of the documents of each sample."""


@dataclass(frozen=True)
class Case:
    """A kind of attention.

    Attributes:
        options: fields of the model's config.
        window: largest number of keys before its own that a query sees.
        has_documents: samples are packed documents.
        value_size: size of a head of values.
    """

    options: dict[str, Any]
    window: int | None = None
    has_documents: bool = False
    value_size: int = SIZE
    p: float = 0.0

    @property
    def config(self) -> ModelConfig:
        return ModelConfig(
            num_attention_heads=HEADS,
            hidden_size=HEADS * SIZE,
            attention_dropout=self.p,
            seq_length=S,
            window_size=None if self.window is None else (self.window, 0),
            **self.options,
        )

    @property
    def num_groups(self) -> int:
        return int(self.options.get("num_query_groups", HEADS))

    @property
    def has_sinks(self) -> bool:
        return self.options.get("softmax_type") == "learnable"


_ALIBI = {"position_embedding_type": "alibi"}
_CAPPED = {"attn_logit_softcapping": 0.7, "num_query_groups": 2}
_SINKS = {"softmax_type": "learnable", "num_query_groups": 2}
_BERT = {"architecture": "bert"}
CASES = {
    "causal": Case({}),
    "grouped queries": Case({"num_query_groups": 1}),
    "values of another size": Case({"attention_backend": "unfused"}, value_size=8),
    "window": Case({}, window=5),
    "long window": Case({"num_query_groups": 2}, window=13),
    "documents": Case({}, has_documents=True),
    "window in documents": Case(_ALIBI, window=7, has_documents=True),
    "ALiBi": Case(_ALIBI),
    "capped": Case(_CAPPED),
    "sinks": Case(_SINKS),
    "sinks, window, documents, dropout": Case(_SINKS, window=5, has_documents=True, p=0.3),
    "dropout": Case({"num_query_groups": 2}, p=0.3),
    "dropout, cap, ALiBi": Case({**_CAPPED, **_ALIBI}, p=0.3),
    "bidirectional": Case(_BERT, has_documents=True),
    "bidirectional, dropout, ALiBi": Case({**_BERT, **_ALIBI}, has_documents=True, p=0.3),
}


def _inputs(case: Case, dtype: torch.dtype) -> list[Tensor]:
    """Return queries, keys, values, sinks and the output's gradient."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    of_keys = (random(B, case.num_groups, S, size) for size in (SIZE, case.value_size))
    return [random(B, HEADS, S, SIZE), *of_keys, random(HEADS), random(B, HEADS, S, case.value_size)]


def _documents(case: Case) -> Tensor | None:
    """Return ids of documents that end at cuts, before and after them, and are long and short."""
    ids = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in LENGTHS]
    return torch.stack(ids) if case.has_documents else None


def _attend(
    topology: Topology, name: str, dtype: torch.dtype, comm_type: str, of_triton: bool
) -> list[Tensor]:
    """Return the output, and gradients of queries, keys, values and sinks, of this rank's tokens.

    Args:
        comm_type: --cp-comm-type.
        of_triton: use the operators of a GPU's kernels, which are plain PyTorch on a CPU.
    """
    case = CASES[name]
    context = LayerContext(topology, dtype, has_documents=case.has_documents, cp_comm_type=comm_type)
    core = build_core(case.config, context, "triton" if of_triton else None)
    layer = core.for_layer(0, replace(core.config.head_specs[0], window=case.window))
    own, heads = topology.positions, context.attention_heads
    *leaves, sinks, grad = _inputs(case, dtype)
    q, k, v = (own.take(x, dim=2).clone().requires_grad_() for x in leaves)
    of_sinks = [sinks.requires_grad_()] if case.has_sinks else []
    visible = core.visible_keys((B, S), _documents(case), [case.window])[case.window]
    drop = Drop(case.p, 5, torch.arange(B) + 3, heads.index * HEADS // heads.count * S**2)
    entered = layer.enter(*(x.permute(2, 0, 1, 3) for x in (q, k, v)))
    own_sinks = [x.chunk(heads.count)[heads.index] for x in of_sinks]
    out = layer(*(x.permute(1, 2, 0, 3) for x in entered), visible, drop, *own_sinks)
    out = layer.leave(out.permute(2, 0, 1, 3)).permute(1, 2, 0, 3)
    grads = torch.autograd.grad(out, [q, k, v, *of_sinks], own.take(grad, dim=2))
    return [out.detach(), *grads]


def _mesh(num_ranks: int) -> MeshOptions:
    return MeshOptions({"cp": num_ranks, "dp": 1}, is_zigzag=True)


def _levels(heads: int, ring: int) -> MeshOptions:
    """Return the mesh of a ring of groups of neighbours that exchange heads."""
    parallel = ParallelConfig(
        context_parallel_size=heads * ring,
        cp_comm_type="a2a+p2p",
        hierarchical_context_parallel_sizes=(heads, ring),
    )
    return parallel.mesh


def _attend_all(
    topology: Topology, names: list[str], dtype: torch.dtype, comm_type: str = "p2p", of_triton: bool = False
) -> list[list[Tensor]]:
    return [_attend(topology, name, dtype, comm_type, of_triton) for name in names]


def _joined(ranks: list[list[Tensor]]) -> list[Tensor]:
    """Return the tensors of the whole sequence from those of the ranks."""
    slices = [[x.chunk(2, dim=2) for x in rank[:4]] for rank in ranks]
    whole = [
        torch.cat([*(rank[i][0] for rank in slices), *(rank[i][1] for rank in reversed(slices))], dim=2)
        for i in range(4)
    ]
    return [*whole, *(sum(each) for each in zip(*(rank[4:] for rank in ranks), strict=True))]  # type: ignore[list-item]


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max())


@pytest.fixture(scope="module")
def expected() -> dict[str, list[Tensor]]:
    """Return the results of one rank."""
    names = list(CASES)
    (found,) = run_ranks(_attend_all, _mesh(1), 1, names, torch.float64)
    return dict(zip(names, found, strict=True))


def _check(names: list[str], ranks: list[list[list[Tensor]]], expected: dict[str, list[Tensor]]) -> None:
    for name, of_ranks in zip(names, zip(*ranks, strict=True), strict=True):
        for found, whole in zip(_joined(list(of_ranks)), expected[name], strict=True):
            assert _error(found, whole) < 1e-13, name


@pytest.mark.parametrize(
    ("comm_type", "num_ranks", "of_triton"),
    [
        *(("p2p", num_ranks, False) for num_ranks in (2, 3, 4)),
        *(("p2p", 2, True), ("all_gather", 3, False), ("all_gather", 2, True)),
    ],
)
def test_every_kind_of_attention_is_that_of_one_rank(
    comm_type: str, num_ranks: int, of_triton: bool, expected: dict[str, list[Tensor]]
) -> None:
    names = list(CASES)
    ranks = run_ranks(_attend_all, _mesh(num_ranks), num_ranks, names, torch.float64, comm_type, of_triton)
    _check(names, ranks, expected)


@pytest.mark.parametrize(("ring", "names"), [(2, list(CASES)[::2]), (3, list(CASES)[1::2])], ids=[2, 3])
def test_a_ring_of_groups_that_exchange_heads_has_the_attention_of_one_rank(
    ring: int, names: list[str], expected: dict[str, list[Tensor]]
) -> None:
    ranks = run_ranks(_attend_all, _levels(2, ring), 2 * ring, names, torch.float64, "a2a+p2p")
    _check(names, ranks, expected)


def _attend_assigned(topology: Topology, names: list[str]) -> list[list[Tensor]]:
    """Return what `_attend` does, with a rank's assigned tokens at their positions, and zeros elsewhere."""
    own = topology.positions
    assignments = tuple(assign_documents(row, own.count) for row in LENGTHS)
    held = torch.tensor([assignment.positions_of(own.index) for assignment in assignments])[:, None, :, None]

    def take(x: Tensor) -> Tensor:
        return x.gather(2, held.expand(-1, x.shape[1], -1, x.shape[3]))

    def placed(x: Tensor) -> Tensor:
        index = held.expand(-1, x.shape[1], -1, x.shape[3])
        return x.new_zeros(*x.shape[:2], S, x.shape[3]).scatter(2, index, x)

    found = []
    for case in map(CASES.__getitem__, names):
        core = build_core(case.config, LayerContext(topology, torch.float64, cp_comm_type="p2p"))
        *leaves, sinks, grad = _inputs(case, torch.float64)
        q, k, v = (take(x).requires_grad_() for x in leaves)
        of_sinks = [sinks.requires_grad_()] if case.has_sinks else []
        visible = core.visible_keys((B, S), None, [case.window])[case.window]._replace(
            assignments=assignments
        )
        layer = core.for_layer(0, replace(core.config.head_specs[0], window=case.window))
        out = layer(q, k, v, visible, Drop(case.p, 5, torch.arange(B) + 3, 0), *of_sinks)
        grads = torch.autograd.grad(out, [q, k, v, *of_sinks], take(grad))
        found.append([*map(placed, (out.detach(), *grads[:3])), *grads[3:]])
    return found


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_assigned_documents_have_the_attention_of_one_rank(num_ranks: int, one_rank: Topology) -> None:
    names = [name for name, case in CASES.items() if case.has_documents and case.config.is_causal]
    expected = _attend_all(one_rank, names, torch.float64)
    mesh = MeshOptions({"cp": num_ranks, "dp": 1}, is_zigzag=True, assigns_documents=True)
    ranks = run_ranks(_attend_assigned, mesh, num_ranks, names)
    assert len(names) == 3
    for name, of_ranks, whole in zip(names, zip(*ranks, strict=True), expected, strict=True):
        for parts, each in zip(zip(*of_ranks, strict=True), whole, strict=True):
            assert _error(sum(parts), each) < 1e-13, name  # type: ignore[arg-type]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 3e-2)], ids=str)
def test_it_is_the_attention_of_torch(dtype: torch.dtype, bound: float) -> None:
    names = ["causal", "grouped queries"]
    ranks = run_ranks(_attend_all, _mesh(2), 2, names, dtype)
    for name, of_ranks in zip(names, zip(*ranks, strict=True), strict=True):
        *leaves, _, grad = (x.double() for x in _inputs(CASES[name], dtype))
        for leaf in leaves:
            leaf.requires_grad_()
        out = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
        expected = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
        for found, whole in zip(_joined(list(of_ranks)), expected, strict=True):
            assert _error(found, whole) < bound, name


def _bytes_sent(topology: Topology, window: int | None) -> dict[str, float]:
    """Return the bytes that forward, and forward with backward, send from this rank."""
    config = ModelConfig(
        num_attention_heads=HEADS, hidden_size=HEADS * SIZE, num_query_groups=2, seq_length=S
    )
    if window is not None:
        config = dataclasses.replace(config, window_size=(window, 0))
    context = LayerContext(topology, torch.float32, cp_comm_type="p2p")
    core, device, size = build_core(config, context), topology.device, context.cp.size
    q, k, v = (torch.randn(B, n, S // size, SIZE, device=device, requires_grad=True) for n in (HEADS, 2, 2))
    visible = core.visible_keys((B, S), None, [window])[window]
    found = {}
    with Traffic(topology) as traffic:
        layer = core.for_layer(0, replace(core.config.head_specs[0], window=window))
        out = layer(q, k, v, visible, Drop(0.0, 0, torch.arange(B, device=device)))
        found["forward"] = ring_bytes(traffic.calls, "cp", size)
        out.sum().backward()
        found["both"] = ring_bytes(traffic.calls, "cp", size)
    return found


def _expected_bytes(rank: int, num_ranks: int, window: int | None) -> dict[str, float]:
    """Return the formulas of docs/context_parallel.md.

    A rank sends its first slice to all ranks, and its last one to those before it in the ring's order. In
    backward it sends them again, and gradients of the slices that it received. A short window reaches into
    the slice before only: the last rank holds that of its second slice itself.
    """
    if window is None:
        sent, received = num_ranks - 1 + rank, 2 * (num_ranks - 1) - rank
    else:
        sent = received = 1 if rank in (0, num_ranks - 1) else 2
    of_slice = B * 2 * (SIZE + SIZE) * (S // num_ranks // 2) * 4
    return {"forward": sent * of_slice, "both": (2 * sent + received) * of_slice}


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_ring_sends_the_slices_that_are_needed(num_ranks: int, window: int | None) -> None:
    """On ranks, and on meta tensors as in a dry run."""
    mesh = _mesh(num_ranks)
    expected = [_expected_bytes(rank, num_ranks, window) for rank in range(num_ranks)]
    assert run_ranks(_bytes_sent, mesh, num_ranks, window) == expected
    for rank in range(num_ranks):
        with Topology.fake(mesh, num_ranks, rank) as topology:
            assert _bytes_sent(topology, window) == expected[rank]


def _bytes_of_levels(topology: Topology, num_groups: int) -> dict[str, float]:
    """Return the bytes that a rank sends in forward and backward, by axis."""
    config = ModelConfig(
        num_attention_heads=HEADS, hidden_size=HEADS * SIZE, num_query_groups=num_groups, seq_length=S
    )
    context = LayerContext(topology, torch.float32, cp_comm_type="a2a+p2p")
    core, device = build_core(config, context), topology.device
    layer = core.for_layer(0, core.config.head_specs[0])
    assert context.head_ranks is not None and context.ring is not None
    own = [
        torch.randn(S // context.cp.size, B, n, SIZE, device=device, requires_grad=True)
        for n in (HEADS, num_groups, num_groups)
    ]
    visible = core.visible_keys((B, S), None, [None])[None]
    with Traffic(topology) as traffic:
        q, k, v = (x.permute(1, 2, 0, 3) for x in layer.enter(*own))
        out = layer(q, k, v, visible, Drop(0.0, 0, torch.arange(B, device=device)))
        layer.leave(out.permute(2, 0, 1, 3)).sum().backward()
    axes = context.head_ranks, context.ring
    return {axis.name: ring_bytes(traffic.calls, axis.name, axis.size) for axis in axes}


@pytest.mark.parametrize("num_groups", [2, 1])
def test_levels_send_their_parts(num_groups: int) -> None:
    """On ranks, and on meta tensors as in a dry run, as the formulas of docs/context_parallel.md say."""
    heads, ring = 2, 2
    element = B * S * SIZE * 4
    of_keys = max(num_groups, heads)  # with copies
    exchanged = 2 * (2 * HEADS + 2 * of_keys) * element * (heads - 1) / heads / (heads * ring)
    of_slice = 2 * of_keys // heads * element // (2 * ring)
    expected = []
    for rank in range(heads * ring):
        place = rank // heads
        slices = 2 * (ring - 1 + place) + 2 * (ring - 1) - place
        expected.append({"cp_heads": exchanged, "cp_ring": slices * of_slice})
    mesh = _levels(heads, ring)
    assert run_ranks(_bytes_of_levels, mesh, heads * ring, num_groups) == expected
    for rank, of_rank in enumerate(expected):
        with Topology.fake(mesh, heads * ring, rank) as topology:
            assert _bytes_of_levels(topology, num_groups) == of_rank
