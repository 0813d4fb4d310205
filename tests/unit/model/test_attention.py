"""Every attention backend that a CPU has, forward and backward, against the formula in fp64."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from megalite.attention import choice
from megalite.attention.choice import (
    BACKENDS,
    Case,
    build_core,
    by_speed,
    choose,
    cudnn_version,
    kernel_of,
    preference,
)
from megalite.attention.core import LayerCore, StageCore
from megalite.attention.kernels import FlexKernel, Kernel, SdpaKernel, TritonKernel
from megalite.attention.plain import Blocking, PlainKernel
from megalite.attention.positions import alibi_slopes
from megalite.config import ModelConfig
from megalite.config.parallel import CpCommType
from megalite.distributed.axis import HeldPositions
from megalite.distributed.topology import Topology
from megalite.kernels import Drop, VisibleKeys, dropout, site_key
from megalite.kernels.softmax import document_starts
from megalite.model.attention import Attention
from megalite.tensor_parallel.parameter_spec import LayerContext
from megalite.utils.errors import UserError
from tests.live_bytes import LiveBytes

HEADS, GROUPS = 4, 2
KEY = site_key(1, "layers.0.attention.weights")
ROUNDING = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 0.02, torch.float16: 2**-9}
CASES = {
    "causal": {},
    "alibi": {"position_embedding_type": "alibi"},
    "rope": {"position_embedding_type": "rope"},
    "gqa": {"num_query_groups": GROUPS},
    "gqa alibi": {"num_query_groups": GROUPS, "position_embedding_type": "alibi"},
    "both sides": {"architecture": "bert"},
    "both sides gqa": {"architecture": "bert", "num_query_groups": GROUPS},
    "capped": {"num_query_groups": GROUPS, "attn_logit_softcapping": 1.5, "query_pre_attn_scalar": 30.0},
    "capped alibi": {"attn_logit_softcapping": 0.7, "position_embedding_type": "alibi"},
    "scaled": {"query_pre_attn_scalar": 144.0},
    "big heads": {"kv_channels": 448, "position_embedding_type": "alibi"},
}


def config_of(**changes: object) -> ModelConfig:
    shape = {
        "num_attention_heads": HEADS,
        "hidden_size": 64 * HEADS,
        "attention_dropout": 0.0,
        "seq_length": 37,
    }
    return ModelConfig(**{**shape, **changes})


def context_of(
    topology: Topology, dtype: torch.dtype, device: str = "cpu", has_documents: bool = False
) -> LayerContext:
    topology = dataclasses.replace(topology, device=torch.device(device))
    return LayerContext(topology, dtype, has_documents=has_documents)


def inputs(config: ModelConfig, s: int, dtype: torch.dtype, b: int = 2) -> list[Tensor]:
    """Queries, keys and values as a layer hands them over, ``[b, n, s, d]``, and a gradient."""
    generator = torch.Generator().manual_seed(0)
    sizes = (config.head_dim, config.head_dim, config.value_dim, config.value_dim)
    heads = (config.num_attention_heads, config.num_kv_heads, config.num_kv_heads, config.num_attention_heads)
    return [
        torch.randn(s, b, n, size, generator=generator, dtype=torch.float64).to(dtype).permute(1, 2, 0, 3)
        for n, size in zip(heads, sizes, strict=True)
    ]


def document_ids(s: int) -> Tensor:
    """Two samples of several documents, one of them of one token, with a number that comes again."""
    ends = torch.tensor([[0.1, 0.13, 0.6, 0.9], [0.5, 0.55, 0.57, 2.0]]) * s
    return (torch.arange(s)[:, None] >= ends[:, None]).sum(-1)


def expected(
    config: ModelConfig,
    parts: list[Tensor],
    ids: Tensor | None,
    kept: Tensor | float = 1.0,
    window: int | None = None,
) -> list[Tensor]:
    """Output and gradients by the formula, whole and in fp64; `parts` may have sinks after the gradient."""
    q, k, v, grad, *sinks = (part.double().requires_grad_() for part in parts)
    leaves = q, k, v, *sinks
    s, shared = q.shape[2], config.num_attention_heads // config.num_kv_heads
    k, v = (x.repeat_interleave(shared, dim=1) for x in (k, v))
    distance = torch.arange(s) - torch.arange(s)[:, None]
    scores = q @ k.transpose(2, 3) / math.sqrt(config.query_pre_attn_scalar or config.head_dim)
    if (cap := config.attn_logit_softcapping) is not None:
        scores = cap * torch.tanh(scores / cap)
    if config.position_embedding_type == "alibi":
        slopes = torch.tensor(alibi_slopes(config.num_attention_heads), dtype=torch.float64)
        scores = scores + slopes[:, None, None] * distance
    hidden = distance > 0 if config.is_causal else torch.zeros_like(distance, dtype=torch.bool)
    if window is not None:
        hidden = hidden | (distance < -window)
    if ids is not None:
        hidden = hidden | (ids[:, None, :, None] != ids[:, None, None])
    scores = scores.masked_fill(hidden, -torch.inf)
    for sink in sinks:
        scores = torch.cat((scores, sink[:, None, None].expand(*scores.shape[:3], 1)), dim=-1)
    out = (torch.softmax(scores, dim=-1)[..., :s] * kept) @ v
    return [out, *torch.autograd.grad(out, leaves, grad.detach())]


def computed(
    core: StageCore,
    parts: list[Tensor],
    ids: Tensor | None,
    drop: Drop | None = None,
    window: int | None = None,
) -> list[Tensor]:
    """The same by a core."""
    q, k, v, grad, *sinks = (part.detach().requires_grad_() for part in parts)
    leaves = q, k, v, *sinks
    if ids is None and not core.config.is_causal:
        ids = torch.zeros(len(grad), grad.shape[2], dtype=torch.int64, device=grad.device)
    visible = core.visible_keys((len(grad), grad.shape[2]), ids, [window])[window]
    out = core.for_layer(0, replace(core.config.head_specs[0], window=window))(
        q, k, v, visible, drop or Drop(0.0, KEY, torch.arange(len(grad))), *sinks
    )
    return [out, *torch.autograd.grad(out, leaves, grad.detach())]


def kernel_in(core: StageCore) -> PlainKernel:
    """Return the only kernel of a core."""
    (layer,) = core.cores.values()
    assert isinstance(layer.kernel, PlainKernel)
    return layer.kernel


def assert_close(results: list[Tensor], references: list[Tensor], dtype: torch.dtype) -> None:
    names = ("output", "q", "k", "v", "sinks")[: len(references)]
    for name, result, reference in zip(names, results, references, strict=True):
        assert result.dtype == dtype
        error = (result.double() - reference).abs().max() / reference.abs().max().clamp_min(1.0)
        # A sink's gradient is a sum over all queries of rounded numbers.
        assert error < ROUNDING[dtype] * (4 if name == "sinks" else 1), (name, error)


@pytest.mark.parametrize(
    ("backend", "case", "packed", "dtype"),
    [
        (backend, case, (i + j) % 2 == 1, dtype)  # each case is whole in two dtypes, and packed in two
        for backend in ("flash", "fused", "unfused")
        for i, case in enumerate(CASES)
        for j, dtype in enumerate(ROUNDING)
        if backend == "unfused" or "capped" not in case
    ],
    ids=str,
)
def test_a_backend_is_the_formula(
    backend: str, case: str, packed: bool, dtype: torch.dtype, one_rank: Topology
) -> None:
    config = config_of(attention_backend=backend, **CASES[case])
    for s in (1, 37, 130):
        core = build_core(config, context_of(one_rank, dtype, has_documents=packed))
        parts, ids = inputs(config, s, dtype), document_ids(s) if packed else None
        assert_close(computed(core, parts, ids), expected(config, parts, ids), dtype)


LATENT = {
    **{"multi_latent_attention": True, "qk_head_dim": 20, "qk_pos_emb_head_dim": 4},
    "position_embedding_type": "rope",
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("size", [5, 24, 40])
@pytest.mark.parametrize("kernel", [SdpaKernel, PlainKernel, TritonKernel])
def test_values_of_another_size(
    kernel: type[Kernel], size: int, packed: bool, dtype: torch.dtype, one_rank: Topology
) -> None:
    config = config_of(**LATENT, v_head_dim=size)
    parts, ids = inputs(config, 37, dtype), document_ids(37) if packed else None
    context = context_of(one_rank, dtype, has_documents=packed)
    built = StageCore(config, context, {"p2p": LayerCore(config, context, kernel(config, context))})
    assert_close(computed(built, parts, ids), expected(config, parts, ids), dtype)


def test_flash_needs_values_of_the_size_of_keys(one_rank: Topology) -> None:
    context = context_of(one_rank, torch.float32)
    config = config_of(**LATENT, v_head_dim=5)
    assert choose(Case(config, context))[0] == "unfused"
    with pytest.raises(UserError, match="on a CPU it needs values of the size of keys"):
        choose(Case(dataclasses.replace(config, attention_backend="flash"), context))
    assert choose(Case(dataclasses.replace(config, v_head_dim=24), context))[0] == "flash"


@pytest.mark.parametrize(
    ("case", "window", "packed"),
    [
        (case, window, (i + j) % 2 == 1)
        for i, case in enumerate(("causal", "alibi", "gqa"))
        for j, window in enumerate((0, 1, 20, 129))
    ],
)
@pytest.mark.parametrize("backend", ["fused", "unfused", "triton"])
def test_a_window_is_the_formula(
    backend: str, case: str, packed: bool, window: int, one_rank: Topology
) -> None:
    s, config = 130, config_of(**CASES[case])
    parts, ids = inputs(config, s, torch.float64), document_ids(s) if packed else None
    result = computed(
        build_core(config, context_of(one_rank, torch.float64), backend), parts, ids, window=window
    )
    assert_close(result, expected(config, parts, ids, window=window), torch.float64)


SINKS = torch.tensor([-2.0, 0.0, 1.5, 4.0])
SMALL_DTYPES = [dtype for dtype in ROUNDING if dtype.itemsize < 8]


@pytest.mark.parametrize(
    ("kind", "case", "dtype", "packed"),
    [
        (kind, *each, (i + j) % 2 == 1)
        for i, each in enumerate([*product(CASES, [torch.float64]), *product(["gqa"], SMALL_DTYPES)])
        for j, kind in enumerate(("unfused", "triton"))
    ],
    ids=str,
)
def test_sinks_are_the_formula(
    kind: str, case: str, packed: bool, dtype: torch.dtype, one_rank: Topology
) -> None:
    """With dropout, which drops weights of keys and no sink, and with a window or documents."""
    config, numbers = config_of(attention_dropout=0.3, **CASES[case]), torch.tensor([2**40, 3])
    window = 9 if config.is_causal and not packed else None
    for s in (1, 37, 130):
        core = build_core(config, context_of(one_rank, dtype, has_documents=packed), kind)
        parts, ids = inputs(config, s, dtype), document_ids(s) if packed else None
        parts.append(SINKS.to(dtype))
        kept = dropout(torch.ones(1, 2, HEADS, s, s, dtype=torch.float64), 0.3, KEY, numbers)[0]
        result = computed(core, parts, ids, Drop(0.3, KEY, numbers), window)
        assert_close(result, expected(config, parts, ids, kept, window), dtype)


def test_a_window_drops_what_attention_without_it_drops(one_rank: Topology) -> None:
    s, config, numbers = 37, config_of(attention_dropout=0.3), torch.tensor([2**40, 3])
    core = build_core(config, context_of(one_rank, torch.float64), "unfused")
    kernel_in(core).blocking = Blocking(5, 1)
    parts, kept = (
        inputs(config, s, torch.float64),
        dropout(torch.ones(1, 2, HEADS, s, s, dtype=torch.float64), 0.3, KEY, numbers)[0],
    )
    result = computed(core, parts, None, Drop(0.3, KEY, numbers), window=9)
    assert_close(result, expected(config, parts, None, kept, window=9), torch.float64)


@pytest.mark.parametrize("window", [None, 100])
def test_blockwise_attention_skips_keys_that_no_query_of_a_block_sees(
    window: int | None, one_rank: Topology
) -> None:
    """By the FLOPs of its products: two in forward, five in backward."""
    config, s, m, d = config_of(), 1024, 128, 64
    core = build_core(config, context_of(one_rank, torch.float32), "unfused")
    assert kernel_in(core).blocking.step(s) == m
    with FlopCounterMode(display=False) as counter:
        computed(core, inputs(config, s, torch.float32, b=1), None, window=window)
    begins = [max(0, first - (s if window is None else window)) // 16 * 16 for first in range(0, s, m)]
    scores = sum(m * (first + m - begin) for first, begin in zip(range(0, s, m), begins, strict=True))
    assert counter.get_total_flops() == 7 * 2 * HEADS * d * scores


def test_fp16_overflows_no_earlier_than_the_scaled_scores(one_rank: Topology) -> None:
    """Products of queries and keys pass 65504, fp16's largest number, where scores are far below it."""
    config = config_of(kv_channels=128)
    q, k, v, grad = inputs(config, 37, torch.float64)
    parts = [part.half() for part in (24 * q, 24 * q + 0.01 * k, v, grad)]
    products = parts[0].double() @ parts[1].double().mT
    assert products.max() > 1.2 * 65504
    core = build_core(config, context_of(one_rank, torch.float16), "unfused")
    assert all(x.isfinite().all() for x in computed(core, parts, None))


@pytest.mark.parametrize("blocking", [Blocking(5, 1), Blocking(16, 12000), Blocking(1000, 1 << 30)], ids=str)
@pytest.mark.parametrize("case", ["alibi", "gqa alibi", "both sides gqa"])
def test_no_cut_changes_what_comes_out(case: str, blocking: Blocking, one_rank: Topology) -> None:
    """Blocks of some queries, tiles of some heads: with documents and dropout, whose indices count on."""
    s, config = 37, config_of(attention_dropout=0.3, **CASES[case])
    core = build_core(config, context_of(one_rank, torch.float64), "unfused")
    kernel_in(core).blocking = blocking
    parts, ids, numbers = inputs(config, s, torch.float64), document_ids(s), torch.tensor([2**40, 3])
    kept = dropout(torch.ones(1, 2, HEADS, s, s, dtype=torch.float64), 0.3, KEY, numbers)[0]
    assert_close(
        computed(core, parts, ids, Drop(0.3, KEY, numbers)), expected(config, parts, ids, kept), torch.float64
    )


@pytest.mark.parametrize("case", ["alibi", "gqa alibi"])
def test_ranks_drop_what_one_rank_drops(case: str, one_rank: Topology) -> None:
    """Each of two has its heads' slopes and masks."""
    s, config, numbers = 21, config_of(attention_dropout=0.5, **CASES[case]), torch.arange(2)
    parts = inputs(config, s, torch.float64)
    context = context_of(one_rank, torch.float64)
    whole = computed(build_core(config, context, "unfused"), parts, None, Drop(0.5, KEY, numbers))
    halves = []
    for rank in range(2):
        (model,) = one_rank.meshes.values()
        tp = dataclasses.replace(one_rank.tp, size=2, rank=rank)
        axes = dataclasses.replace(model, axes={**model.axes, "tp": tp})
        topology = dataclasses.replace(one_rank, meshes={"model": axes})
        core = build_core(config, context_of(topology, torch.float64), "unfused")
        mine = [part.chunk(2, dim=1)[rank] for part in parts]
        base = rank * HEADS // 2 * s * s
        halves.append(computed(core, mine, None, Drop(0.5, KEY, numbers, base)))
    for together, *apart in zip(whole, *halves, strict=True):
        torch.testing.assert_close(torch.cat(apart, dim=1), together, rtol=1e-12, atol=1e-12)


def with_cp(topology: Topology, size: int, rank: int) -> Topology:
    """Return the topology of one of several context-parallel ranks, with slices in zigzag order."""
    (model,) = topology.meshes.values()
    cp = dataclasses.replace(topology.axes["cp"], size=size, rank=rank)
    axes = dataclasses.replace(model, axes={**model.axes, "cp": cp})
    return dataclasses.replace(topology, meshes={"model": axes}, is_zigzag=True)


@pytest.mark.parametrize(
    ("backend", "case", "window", "packed"),
    [
        (backend, case, window, (i + j) % 2 == 1)
        for backend in ("unfused", "triton")
        for i, case in enumerate(CASES)
        for j, window in enumerate((None, 5))
        if window is None or CASES[case].get("architecture") != "bert"
    ],
)
def test_slices_of_the_queries_see_all_keys(
    backend: str, case: str, window: int | None, packed: bool, one_rank: Topology
) -> None:
    s, num_ranks, config = 36, 3, config_of(**CASES[case])
    parts, ids = inputs(config, s, torch.float64), document_ids(s) if packed else None
    p, numbers = 0.3, torch.tensor([2**40, 3])
    kept = dropout(torch.ones(1, 2, HEADS, s, s, dtype=torch.float64), p, KEY, numbers)[0]
    known = ids if config.is_causal or packed else torch.zeros(2, s, dtype=torch.int64)
    slices = []
    for rank in range(num_ranks):
        context = context_of(with_cp(one_rank, num_ranks, rank), torch.float64, has_documents=packed)
        core = build_core(config, context, backend)
        visible = core.visible_keys((2, s), known, [window])[window]
        slices.append(of_slices(core, parts, visible, Drop(p, KEY, numbers)))
    together = joined(slices)
    assert_close(together, expected(config, parts, ids, kept, window), torch.float64)


def of_slices(core: StageCore, parts: list[Tensor], visible: VisibleKeys, drop: Drop) -> list[Tensor]:
    """Return the output and gradients of the queries that a rank holds, and of all keys and values."""
    q, k, v, grad = parts
    own, grad = (core.own_positions.take(x, dim=2) for x in (q, grad))
    leaves = [x.detach().requires_grad_() for x in (own, k, v)]
    out = core.for_layer(0, core.config.head_specs[0])(*leaves, visible, drop)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def joined(ranks: list[list[Tensor]]) -> list[Tensor]:
    """Return what `of_slices` returns on one rank that holds all queries."""
    order = HeldPositions(0, len(ranks), is_zigzag=True)
    *of_queries, grads_k, grads_v = zip(*ranks, strict=True)
    whole = [order.in_position_order(torch.cat([x.movedim(2, 0) for x in each])) for each in of_queries]
    return [*(x.movedim(0, 2) for x in whole), torch.stack(grads_k).sum(0), torch.stack(grads_v).sum(0)]


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("case", "packed"), [("causal", True), *((case, i % 2 == 1) for i, case in enumerate(CASES))]
)
def test_flex_is_the_formula(case: str, packed: bool, one_rank: Topology) -> None:
    """Forward alone, and not compiled: that is all that FlexAttention has on a CPU."""
    config, s = config_of(**CASES[case]), 130
    context = context_of(one_rank, torch.float64)
    layer = LayerCore(config, context, FlexKernel(config, context, partial(flex_attention)))
    core = StageCore(config, context, {"all_gather": layer})
    parts, ids = inputs(config, s, torch.float64), document_ids(s) if packed else None
    if ids is None and not config.is_causal:
        ids = torch.zeros(2, s, dtype=torch.int64)
    # Each pair of a window, sinks and documents.
    pairs = ((None, []), (20, [SINKS])) if packed else ((None, [SINKS]), (20, []))
    for window, sinks in pairs if config.is_causal else ((None, []), (None, [SINKS])):
        visible = core.visible_keys((2, s), ids, [window])[window]
        drop = Drop(0.0, KEY, torch.arange(2))
        result = layer(*(part.detach() for part in parts[:3]), visible, drop, *sinks)
        with torch.enable_grad():
            reference = expected(config, [*parts, *sinks], ids, window=window)[0]
        torch.testing.assert_close(result, reference, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", ["fused", "unfused"])
def test_memory_does_not_grow_with_the_square(backend: str, one_rank: Topology) -> None:
    """Nor is anything kept but queries, keys, values, the output and a number or so a query."""
    config = config_of(attention_backend=backend)
    core = build_core(config, context_of(one_rank, torch.float32))
    parts = inputs(config, 1024, torch.float32, b=1)
    leaves = [part.detach().requires_grad_() for part in parts[:3]]
    with LiveBytes() as memory:
        out = core.for_layer(0, core.config.head_specs[0])(
            *leaves, VisibleKeys(), Drop(0.0, KEY, torch.arange(1))
        )
        assert memory.count() <= 1.1 * out.nbytes
        assert out.nbytes < 1024 * 1024 * HEADS * 4 / 4


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("case", CASES)
def test_triton_drops_what_unfused_drops(case: str, packed: bool, one_rank: Topology) -> None:
    """By the operator's reference: tests/unit/kernels/test_triton_interpreter.py has the kernels."""
    s, config = 37, config_of(attention_dropout=0.3, **CASES[case])
    context = context_of(one_rank, torch.float64, has_documents=packed)
    parts, ids = inputs(config, s, torch.float64), document_ids(s) if packed else None
    drop = Drop(0.3, KEY, torch.tensor([2**40, 3]), 4 * s * s)
    unfused = computed(build_core(config, context, "unfused"), parts, ids, drop)
    assert_close(computed(build_core(config, context, "triton"), parts, ids, drop), unfused, torch.float64)


@pytest.mark.parametrize("kind", ["unfused", "triton"])
def test_a_plan_runs_it_on_tensors_without_memory(kind: str, one_rank: Topology) -> None:
    config = config_of(attention_dropout=0.1, **CASES["gqa alibi"])
    core = build_core(config, context_of(one_rank, torch.bfloat16, "meta"), kind)
    parts = [part.to("meta") for part in inputs(config, 37, torch.bfloat16)]
    ids, numbers = document_ids(37).to("meta"), torch.arange(2, device="meta")
    out, *grads = computed(core, parts, ids, Drop(0.1, KEY, numbers))
    assert [x.shape for x in (out, *grads)] == [parts[3].shape, *(part.shape for part in parts[:3])]
    assert {x.dtype for x in (out, *grads)} == {torch.bfloat16}


def test_the_second_document_of_a_number_is_another_one() -> None:
    ids = torch.tensor([[3, 3, 1, 1, 1, 3], [0, 0, 0, 0, 0, 0]])
    assert document_starts(ids).tolist() == [[0, 0, 2, 2, 2, 5], [0] * 6]


class _Cats(TorchDispatchMode):
    """Records the number of dims of each cat."""

    def __init__(self) -> None:
        super().__init__()
        self.dims: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.ops.aten.cat.default:
            self.dims.append(args[0][0].dim())
        return func(*args, **(kwargs or {}))


def test_the_gradient_of_the_split_is_a_cat_of_four_dims(one_rank: Topology) -> None:
    """PyTorch's kernel for CUDA takes no more; the numbers are those of the split of 5 dims."""
    config, s, b, d = config_of(num_query_groups=GROUPS), 5, 2, 64
    context = context_of(one_rank, torch.float64)
    attention = Attention(config, context, build_core(config, context), 0, config.head_specs[0])
    qkv = torch.randn(s, b, (HEADS + 2 * GROUPS) * d, dtype=torch.float64, requires_grad=True)
    parts = attention.split(qkv)
    q, k, v = qkv.view(s, b, GROUPS, -1, d).split((HEADS // GROUPS, 1, 1), dim=3)
    expected_parts = q.flatten(2, 3), k.flatten(2, 3), v.flatten(2, 3)
    assert all(torch.equal(x, y) for x, y in zip(parts, expected_parts, strict=True))
    grads = [torch.randn_like(part) for part in parts]
    with _Cats() as cats:
        (grad,) = torch.autograd.grad(parts, qkv, grads)
    assert cats.dims == [4]
    assert torch.equal(grad, torch.autograd.grad(expected_parts, qkv, grads)[0])


def case_of(topology: Topology, dtype: torch.dtype, device: str = "cpu", **changes: object) -> Case:
    has_documents = bool(changes.pop("has_documents", False))
    return Case(config_of(**changes), context_of(topology, dtype, device, has_documents))


def test_scores_of_bidirectional_models_have_a_bias(one_rank: Topology) -> None:
    """It hides the padding: kernels that have no bias are refused."""
    assert case_of(one_rank, torch.float32, architecture="bert").has_bias
    assert not case_of(one_rank, torch.float32).has_bias


def test_flex_needs_all_queries(one_rank: Topology) -> None:
    config, topology = config_of(attention_backend="flex"), with_cp(one_rank, 2, 1)
    with pytest.raises(UserError, match=r"^--attention-backend flex .*--cp-comm-type a2a"):
        build_core(config, context_of(topology, torch.float32, "meta"))
    exchanged = dataclasses.replace(context_of(topology, torch.float32, "meta"), cp_comm_type="a2a")
    assert choose(Case(config, exchanged))[0] == "flex"


@pytest.mark.parametrize("comm_type", ["all_gather", "p2p"])
@pytest.mark.parametrize("backend", ["flex", "cudnn", "efficient", "fused"])
def test_kernels_without_blocks_are_refused_with_slices(
    backend: str, comm_type: str, one_rank: Topology
) -> None:
    config, context = (
        config_of(attention_backend=backend),
        slices_of(one_rank, torch.bfloat16, "meta", comm_type),
    )
    with pytest.raises(
        UserError,
        match=f"^--attention-backend {backend} .*(in blocks, as --cp-comm-type|--cp-comm-type a2a gives it)",
    ):
        choose(Case(config, context))


@pytest.mark.parametrize("comm_type", ["all_gather", "p2p"])
def test_auto_computes_blocks_of_slices(comm_type: str, one_rank: Topology) -> None:
    on_cpu, on_gpu = (
        slices_of(one_rank, dtype, device, comm_type)
        for dtype, device in ((torch.float32, "cpu"), (torch.bfloat16, "meta"))
    )
    for context in (on_cpu, on_gpu):
        assert choose(Case(config_of(), context))[0] == "flash"
        assert choose(Case(config_of(softmax_type="learnable"), context))[0] == "flash"
        for changes in ({"attention_dropout": 0.1}, {"window_size": (8, 0)}, CASES["capped"]):
            expected = "unfused" if context is on_cpu else "triton"
            assert choose(Case(config_of(**changes), context))[0] == expected
    twelve = {"kv_channels": 12}
    assert [choose(Case(config_of(**twelve), each))[0] for each in (on_cpu, on_gpu)] == ["flash", "triton"]
    in_fp64 = slices_of(one_rank, torch.float64, "meta", comm_type)
    assert choose(Case(config_of(window_size=(8, 0)), in_fp64))[0] == "unfused"


def test_each_comm_type_has_a_core_for_its_own_layers(one_rank: Topology) -> None:
    """Windows of layers that pass keys around do not keep layers that exchange heads from fused kernels."""
    config = config_of(num_layers=4, window_size=(8, 0), window_attn_skip_freq=(2,))
    comm_types: tuple[CpCommType, ...] = ("p2p", "a2a", "p2p", "a2a")
    context = context_of(with_cp(one_rank, 2, 1), torch.bfloat16, "meta")
    core = build_core(config, dataclasses.replace(context, cp_comm_type=comm_types))
    attention = [config.layer_spec(number).attention or config.head_specs[0] for number in range(5)]
    layers = [core.for_layer(number, spec) for number, spec in enumerate(attention)]
    ring, whole = core.cores["p2p"], core.cores["a2a"]
    assert layers == [ring, whole, ring, whole, whole]  # with one of multi-token prediction
    assert (ring.context.ring is None, whole.context.ring is None) == (False, True)
    assert (type(ring.kernel), type(whole.kernel)) == (TritonKernel, SdpaKernel)
    assert core.choice.startswith("with --cp-comm-type p2p, triton, chosen for meta in fp32; not flash: ")
    assert core.choice.endswith("with --cp-comm-type a2a, fused, chosen for meta in fp32")
    visible = core.visible_keys((2, 16), None, core.windows)
    assert visible[8].starts is not None and visible[8].bias is None
    assert visible[None] == VisibleKeys()
    documents = core.visible_keys((2, 16), torch.zeros(2, 16, dtype=torch.int64, device="meta"), core.windows)
    assert (documents[8].bias is None, documents[None].bias is None) == (True, False)
    assert documents[None].starts is not None
    flex = dataclasses.replace(config, attention_backend="flex")
    with pytest.raises(UserError, match=r"^--attention-backend flex .*--cp-comm-type a2a"):
        build_core(flex, dataclasses.replace(context, cp_comm_type=comm_types))


def test_comm_types_of_layers_without_attention_have_no_core(one_rank: Topology) -> None:
    context = context_of(with_cp(one_rank, 2, 1), torch.bfloat16, "meta")
    recurrent = {"recurrent_mixer": "gated_delta_net", "linear_attention_freq": (2,), "num_layers": 2}
    exchanged = dataclasses.replace(context, cp_comm_type=("p2p", "a2a"))
    assert list(build_core(config_of(**recurrent), exchanged).cores) == ["a2a"]
    passed = dataclasses.replace(context, cp_comm_type=("a2a", "p2p"))
    assert list(build_core(config_of(**recurrent), passed).cores) == ["p2p"]


def test_auto_prefers_our_kernels_for_gathered_keys_in_bf16_on_a_cpu(one_rank: Topology) -> None:
    context = slices_of(one_rank, torch.bfloat16, "cpu", "all_gather")
    assert choose(Case(config_of(), context))[0] == "unfused"


def slices_of(
    topology: Topology, dtype: torch.dtype, device: str, comm_type: str, num_ranks: int = 2, rank: int = 1
) -> LayerContext:
    context = context_of(with_cp(topology, num_ranks, rank), dtype, device)
    return dataclasses.replace(context, cp_comm_type=comm_type)


def test_auto_takes_what_is_fast_and_serves(one_rank: Topology) -> None:
    case = partial(case_of, one_rank)
    assert choose(case(torch.float32))[0] == "flash"
    assert choose(case(torch.float16))[0] == "flash"
    assert choose(case(torch.bfloat16))[0] == "unfused"
    for long_with_bias in ({"position_embedding_type": "alibi"}, {"has_documents": True}):
        assert choose(case(torch.float32, seq_length=1024, **long_with_bias))[0] == "unfused"
        assert choose(case(torch.float32, seq_length=1023, **long_with_bias))[0] == "flash"
    name, line = choose(case(torch.float32, attention_dropout=0.1))
    assert name == "unfused"
    assert line.startswith("unfused, chosen for cpu in fp32; not flash: ")
    on_gpu = partial(case, torch.bfloat16, "meta")
    assert choose(on_gpu())[0] == "fused"
    window = {"window_size": (8, 0), "window_attn_skip_freq": (2,)}
    for changes in ({"attention_dropout": 0.1}, {"has_documents": True}, window, CASES["gqa alibi"]):
        assert choose(on_gpu(**changes))[0] == "triton"
    assert choose(on_gpu(attention_dropout=0.1))[1].startswith("triton, chosen for meta in fp32; not fused: ")
    assert choose(on_gpu(attention_dropout=0.1, **CASES["big heads"]))[0] == "unfused"
    assert choose(case(torch.float64, "meta", attention_dropout=0.1))[0] == "unfused"
    assert choose(on_gpu(**CASES["capped"]))[0] == "triton"
    assert choose(case(torch.float32, **CASES["capped"]))[0] == "unfused"
    assert choose(case(torch.float32, softmax_type="off-by-one"))[0] == "unfused"
    assert choose(on_gpu(softmax_type="learnable"))[0] == "triton"


def test_auto_always_ends_with_what_serves_everything(one_rank: Topology) -> None:
    for device in ("cpu", "cuda", "meta"):
        assert preference(case_of(one_rank, torch.float32, device))[-1] == "unfused"


def test_megatrons_names_have_a_meaning(one_rank: Topology) -> None:
    assert choose(case_of(one_rank, torch.float32, attention_backend="local")) == (
        "unfused",
        "unfused, as requested by the name local",
    )
    assert choose(case_of(one_rank, torch.float32, attention_backend="fused"))[0] == "fused"


@pytest.mark.parametrize(
    ("backend", "changes", "why"),
    [
        ("cudnn", {}, "it runs only on CUDA GPUs; use auto, or flash, fused, unfused"),
        ("efficient", {}, "it runs only on CUDA GPUs; use auto, or flash, fused, unfused"),
        ("flex", {}, "FlexAttention has no backward on a CPU; use auto, or flash, fused, unfused"),
        ("triton", {"attention_dropout": 0.1}, "it runs only on CUDA GPUs; use auto, or unfused"),
        ("flash", {"attention_dropout": 0.1}, "no dropout .*; use auto, or unfused"),
        ("fused", {"attn_logit_softcapping": 2.0}, "cap scores .*; use auto, or unfused"),
        ("fused", {"softmax_type": "learnable"}, "no sinks .*; use auto, or unfused"),
        ("flex", {"attention_dropout": 0.1}, "no dropout .*; use auto, or unfused"),
    ],
)
def test_what_cannot_serve_is_refused_with_what_can(
    backend: str, changes: dict[str, float], why: str, one_rank: Topology
) -> None:
    config = config_of(attention_backend=backend, **changes)
    with pytest.raises(
        UserError, match=f"^--attention-backend {backend} does not support this run: .*{why}$"
    ):
        build_core(config, context_of(one_rank, torch.float32))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("capability", "first"),
    [((9, 0), "CUDNN_ATTENTION"), ((10, 0), "CUDNN_ATTENTION"), ((8, 0), "FLASH_ATTENTION")],
)
def test_cudnn_goes_first_where_it_is_fastest(
    capability: tuple[int, int], first: str, one_rank: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    kernels = BACKENDS["fused"].kernels
    order = by_speed(kernels, torch.device("cuda"))
    assert order[0].name == first and set(order) == set(kernels)
    assert by_speed(kernels, torch.device("cpu")) == list(kernels)


def test_the_line_names_the_kernel_that_pytorch_selects(
    one_rank: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is computed: the device is a CPU that says it is a GPU of compute capability 9.0."""
    flash = kernel_of(BACKENDS["fused"].kernels, case_of(one_rank, torch.float32, "cpu"))
    assert flash.startswith("FlashAttention 2 (")  # torch's name of the CPU's kernel is the same
    orders: list[tuple[object, ...]] = []

    def selected(*args: object, **kwargs: object) -> int:
        orders.append(tuple(torch._C._get_sdp_priority_order()[:1]))
        return int(SDPBackend.CUDNN_ATTENTION)

    monkeypatch.setattr(torch, "_fused_sdp_choice", selected)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(choice, "by_speed", lambda kernels, device: [SDPBackend.CUDNN_ATTENTION, *kernels])
    assert (
        kernel_of(BACKENDS["fused"].kernels, case_of(one_rank, torch.float32, "cpu"))
        == "cuDNN (cuDNN 9.19.0)"
    )
    assert orders == [(int(SDPBackend.CUDNN_ATTENTION),)]
    assert cudnn_version(8907) == "8.9.7"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_is_the_formula_on_a_gpu(backend: str, case: str, packed: bool, one_rank: Topology) -> None:
    torch._dynamo.reset()  # after eight recompilations FlexAttention would not be compiled any more
    config = config_of(attention_backend=backend, params_dtype="bf16", **CASES[case])
    context = context_of(one_rank, torch.bfloat16, "cuda", has_documents=packed)
    try:
        core = build_core(config, context)
    except UserError as error:
        pytest.skip(str(error))
    parts, ids = inputs(config, 130, torch.bfloat16), document_ids(130) if packed else None
    results = computed(core, [part.cuda() for part in parts], None if ids is None else ids.cuda())
    assert_close([result.cpu() for result in results], expected(config, parts, ids), torch.bfloat16)
