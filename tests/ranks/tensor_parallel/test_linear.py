"""Linear layers with whole and cut sequences, with weight gradients in backward, stored, and fused.

Collectives run before or after their GEMMs, or overlap with them in parts. On 2 and 4 ranks the parts have
unequal sizes, and there are fewer positions than parts.
"""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megalite.config import ParallelConfig
from megalite.tensor_parallel.gemm import MainGrad, WeightGradientStore, run_stored
from megalite.tensor_parallel.gemm_collectives import SEPARATE, ChunkedCollectives, Overlap
from megalite.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from megalite.tensor_parallel.parameter_spec import LayerContext, gather_full, spec_of
from megalite.tensor_parallel.vocab_parallel import VocabParallelEmbedding
from tests.live_ranks import run_ranks

S, B, WIDTH, OUT = 8, 3, 8, 12
NUM_MICROBATCHES = 2
PARTS = Overlap("chunks", 3)
FORMS = list(itertools.product((False, True), (False, True), (False, True), (SEPARATE, PARTS)))
"""Whether sequence parallel, whether weight gradients are stored for later, whether added to main_grad, and
how collectives overlap."""


def full(name, *shape):
    """The same numbers on every rank and in the test."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def tokens(microbatch):
    return torch.randint(OUT, (S, B), generator=torch.Generator().manual_seed(microbatch))


def fill(module, topology):
    for name, parameter in module.named_parameters():
        spec = spec_of(parameter)
        whole = full(name, *spec.full_shape)
        parameter.data.copy_(spec.box(topology).of(whole))


class Cut:
    """How a rank sees tensors of one form."""

    def __init__(self, topology, sequence_parallel):
        self.tp = topology.tp
        self.sequence_dim = 0 if sequence_parallel else None

    def mine(self, tensor, dim):
        return tensor if dim is None else tensor.chunk(self.tp.size, dim)[self.tp.rank].clone()

    def whole(self, tensor, dim):
        if dim is None or self.tp.size == 1:
            return tensor.detach().clone()
        slices = [torch.empty_like(tensor) for _ in range(self.tp.size)]
        dist.all_gather(slices, tensor.detach().contiguous(), group=self.tp.group)
        return torch.cat(slices, dim)


def gradients_of(layer, topology, sequence_parallel):
    """Full gradients, those of whole parameters summed over the ranks' positions where these are cut."""
    found = {}
    for name, parameter in layer.named_parameters():
        spec = spec_of(parameter)
        if spec.parameter_axes.partial_over:
            dist.all_reduce(parameter.grad, group=topology.tp.group)
        found[name] = gather_full(parameter.grad, spec, topology)
    return found


def linear(kind, topology, sequence_parallel, stored, fused, overlap):
    """Two microbatches through a layer, their weight gradients in backward or after it."""
    store = WeightGradientStore()
    context = LayerContext(
        topology,
        torch.float64,
        sequence_parallel=sequence_parallel,
        weight_gradient_store=store if stored else None,
        fuses_weight_gradients=fused,
        overlap=overlap,
    )
    layer = kind(WIDTH, (2, OUT) if kind is ColumnParallelLinear else OUT, context, bias=True, std=1.0)
    fill(layer, topology)
    cut = Cut(topology, sequence_parallel)
    x_dim, y_dim = (cut.sequence_dim, -1) if kind is ColumnParallelLinear else (-1, cut.sequence_dim)
    hooks = []
    layer.weight.register_post_accumulate_grad_hook(lambda _: hooks.append("weight"))
    total = torch.full_like(layer.weight, torch.nan)  # the first gradient overwrites it
    if fused:
        claims = iter([(total, True)] + [(total, False)] * (NUM_MICROBATCHES - 1))
        layer.weight.main_grad = MainGrad(lambda: next(claims), lambda: hooks.append("weight"), None)

    results = {}
    for number in range(NUM_MICROBATCHES):
        x = cut.mine(full(f"x{number}", S, B, WIDTH), x_dim).requires_grad_()
        y = layer(x)
        halves = (2, OUT) if kind is ColumnParallelLinear else (OUT,)
        grad = cut.mine(full(f"dy{number}", S, B, *halves), y_dim).flatten(2)
        with store.collect() as gradients:
            y.backward(grad)
        assert len(hooks) == number + (not stored)
        run_stored(gradients)
        assert len(hooks) == number + 1
        y = y.unflatten(-1, (*halves[:-1], -1))
        results |= {f"y{number}": cut.whole(y, y_dim), f"dx{number}": cut.whole(x.grad, x_dim)}
    if fused:
        assert layer.weight.grad is None
        layer.weight.grad = total
    return results | gradients_of(layer, topology, sequence_parallel)


def dense(kind):
    halves = (2, OUT) if kind is ColumnParallelLinear else (OUT,)
    weight, bias = full("weight", *halves, WIDTH), full("bias", *halves)
    weight.requires_grad_(), bias.requires_grad_()
    results = {}
    for number in range(NUM_MICROBATCHES):
        x = full(f"x{number}", S, B, WIDTH).requires_grad_()
        y = F.linear(x, weight.flatten(0, -2), bias.flatten()).unflatten(-1, halves)
        y.backward(full(f"dy{number}", S, B, *halves))
        results |= {f"y{number}": y.detach(), f"dx{number}": x.grad}
    return results | {"weight": weight.grad, "bias": bias.grad}


def embedding(topology, sequence_parallel):
    context = LayerContext(topology, torch.float64, sequence_parallel=sequence_parallel)
    layer = VocabParallelEmbedding(OUT, WIDTH, context, std=1.0)
    fill(layer, topology)
    cut = Cut(topology, sequence_parallel)
    y = layer(tokens(0))
    y.backward(cut.mine(full("dy", S, B, WIDTH), cut.sequence_dim))
    return {"y": cut.whole(y, cut.sequence_dim), **gradients_of(layer, topology, sequence_parallel)}


def dense_embedding():
    table = full("weight", OUT, WIDTH).requires_grad_()
    y = F.embedding(tokens(0), table)
    y.backward(full("dy", S, B, WIDTH))
    return {"y": y.detach(), "weight": table.grad}


def on_ranks(topology):
    forms = {}
    for form in FORMS:
        forms["column", form] = linear(ColumnParallelLinear, topology, *form)
        forms["row", form] = linear(RowParallelLinear, topology, *form)
        forms["embedding", form] = embedding(topology, form[0])
    return forms


@pytest.fixture(scope="module", params=[1, 2, 4])
def results(request):
    parallel = ParallelConfig(tensor_model_parallel_size=request.param)
    return run_ranks(on_ranks, parallel.mesh, request.param)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layer", ["column", "row", "embedding"])
def test_equals_dense(layer, form, results):
    kinds = {"column": ColumnParallelLinear, "row": RowParallelLinear}
    expected = dense_embedding() if layer == "embedding" else dense(kinds[layer])
    for result in results:
        assert set(result[layer, form]) == set(expected)
        for name, tensor in result[layer, form].items():
            error = (tensor - expected[name]).abs().max()
            assert error <= 1e-13, (name, error)


@pytest.mark.parametrize("layer", ["column", "row"])
def test_stored_is_bitwise_the_same(layer, results):
    for result, cut, fused in itertools.product(results, (False, True), (False, True)):
        at_once, stored = (result[layer, (cut, later, fused, SEPARATE)] for later in (False, True))
        for name, tensor in at_once.items():
            assert torch.equal(stored[name], tensor), name


@pytest.mark.parametrize("layer", ["column", "row"])
def test_parts_are_summed_in_the_same_order(layer, results):
    """Weight and bias gradients are computed from the whole tensors: they have the same bits."""
    for result, (*form, overlap) in itertools.product(results, FORMS):
        if overlap == PARTS:
            apart, parts = (result[layer, (*form, each)] for each in (SEPARATE, PARTS))
            assert torch.equal(parts["weight"], apart["weight"]), form
            assert torch.equal(parts["bias"], apart["bias"]), form


@pytest.mark.parametrize(
    ("num_positions", "sizes"), [(8, [2, 3, 3]), (3, [1, 1, 1]), (2, [1, 1]), (1, [1]), (0, [0])]
)
def test_sizes_of_parts(num_positions, sizes, one_rank):
    parts = ChunkedCollectives(None, one_rank.tp, False, 3)._parts(num_positions)
    assert [part.stop - part.start for part in parts] == sizes
