"""Each parallel layer computes, on 1, 2 and 4 ranks, what plain PyTorch computes, gradients included."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megalite.config import ParallelConfig
from megalite.distributed import collectives
from megalite.distributed.collectives import all_gather_from
from megalite.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from megalite.tensor_parallel.parameter_spec import LayerContext, gather_full, spec_of
from megalite.tensor_parallel.vocab_parallel import VocabParallelEmbedding, vocab_parallel_cross_entropy
from tests.live_ranks import run_ranks

S, B, WIDTH, ROWS = 5, 3, 8, 24
TOLERANCE = 1e-14
VOCABULARIES = {"whole": 24, "padded": 19, "two ranks of padding": 11, "one token": 1}  # of 24 rows


def full(name, *shape):
    """The same numbers on every rank and in the test."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def mine(tensor, dim, tp):
    return tensor.chunk(tp.size, dim)[tp.rank].clone()


def tokens(limit):
    return torch.randint(limit, (S, B), generator=torch.Generator().manual_seed(limit))


def leaf(tensor):
    return tensor.clone().requires_grad_()


def fill(module, topology):
    """Gives each parameter its slice of the full tensor of its name, cut here by hand."""
    for name, parameter in module.named_parameters():
        spec = spec_of(parameter)
        whole = full(name, *spec.full_shape)
        dim = spec.dim_cut_over("tp")
        parameter.data.copy_(whole if dim is None else mine(whole, dim, topology.tp))


def full_gradients(module, topology):
    return {
        name: gather_full(parameter.grad, spec_of(parameter), topology)
        for name, parameter in module.named_parameters()
    }


def column(topology, context, out_features):
    layer = ColumnParallelLinear(WIDTH, out_features, context)
    out_shape = out_features if isinstance(out_features, tuple) else (out_features,)
    fill(layer, topology)
    x = leaf(full("x", S, B, WIDTH))
    y = layer(x)
    y.backward(mine(full("dy", S, B, *out_shape), -1, topology.tp).flatten(2))
    y = all_gather_from(y.unflatten(-1, (*out_shape[:-1], -1)), topology.tp)
    return {"y": y, "x": x.grad, **full_gradients(layer, topology)}


def dense_column(out_features):
    out_shape = out_features if isinstance(out_features, tuple) else (out_features,)
    weight, bias = leaf(full("weight", *out_shape, WIDTH)), leaf(full("bias", *out_shape))
    x = leaf(full("x", S, B, WIDTH))
    y = torch.tensordot(x, weight, dims=([2], [len(out_shape)])) + bias
    y.backward(full("dy", S, B, *out_shape))
    return {"y": y, "x": x.grad, "weight": weight.grad, "bias": bias.grad}


def row(topology, context):
    layer = RowParallelLinear(WIDTH, 6, context)
    fill(layer, topology)
    x = leaf(mine(full("x", S, B, WIDTH), -1, topology.tp))
    y = layer(x)
    y.backward(full("dy", S, B, 6))
    return {"y": y, "x": all_gather_from(x.grad, topology.tp), **full_gradients(layer, topology)}


def dense_row():
    x, weight, bias = leaf(full("x", S, B, WIDTH)), leaf(full("weight", 6, WIDTH)), leaf(full("bias", 6))
    y = F.linear(x, weight, bias)
    y.backward(full("dy", S, B, 6))
    return {"y": y, "x": x.grad, "weight": weight.grad, "bias": bias.grad}


def embedding(topology, context):
    layer = VocabParallelEmbedding(ROWS, WIDTH, context, std=1.0)
    fill(layer, topology)
    y = layer(tokens(ROWS))
    y.backward(full("dy", S, B, WIDTH))
    return {"y": y, **full_gradients(layer, topology)}


def dense_embedding():
    table = leaf(full("weight", ROWS, WIDTH))
    y = F.embedding(tokens(ROWS), table)
    y.backward(full("dy", S, B, WIDTH))
    return {"y": y, "weight": table.grad}


def padded_logits(vocab_size):
    """What stands in the padding's columns must not matter, however bad."""
    logits = 5.0 * full("logits", S, B, ROWS)
    bad = torch.tensor([torch.inf, 1e300, torch.nan, -torch.inf])
    logits[..., vocab_size:] = bad.repeat(ROWS)[: ROWS - vocab_size]
    return logits


def cross_entropy(topology, context, vocab_size):
    logits = leaf(mine(padded_logits(vocab_size), -1, topology.tp))
    loss = vocab_parallel_cross_entropy(logits.clone(), tokens(vocab_size), vocab_size, topology.tp)
    loss.backward(full("dy", S, B))
    return {"y": loss, "logits": all_gather_from(logits.grad, topology.tp)}


def dense_cross_entropy(vocab_size):
    logits = leaf(padded_logits(vocab_size)[..., :vocab_size])
    loss = F.cross_entropy(logits.flatten(0, 1), tokens(vocab_size).flatten(), reduction="none")
    loss.backward(full("dy", S, B).flatten())
    return {"y": loss.view(S, B), "logits": F.pad(logits.grad, (0, ROWS - vocab_size))}


def to_whole(part, dim, tp):
    parts = [torch.empty_like(part) for _ in range(tp.size)]
    dist.all_gather(parts, part.detach().contiguous(), group=tp.group)
    return torch.cat(parts, dim)


def collective(topology, context, function):
    """A chain that ends as it begins: one function, and a use of its result.

    The use of a full result is the same on every rank. Where channels are cut, it differs, and the ranks'
    losses add up.
    """
    _, takes, returns, in_dim, out_dim = COLLECTIVES[function]
    tp, shape = topology.tp, (4, B, 12)
    if takes == "cut":
        x = leaf(mine(full("x", *shape), in_dim, tp).mT.contiguous().mT)  # of any strides
    else:
        x = leaf(full("x" if takes == "full" else f"x {tp.rank}", *shape).mT.contiguous().mT)
    y = getattr(collectives, function)(x, tp)
    use = full(f"use {tp.rank}" if returns == "used by cut channels" else "use", *shape)
    (y * (mine(use, out_dim, tp) if returns == "cut" else use)).sum().backward()
    return {
        "y": to_whole(y, out_dim, tp) if returns == "cut" else y,
        "x": to_whole(x.grad, in_dim, tp) if takes == "cut" else x.grad,
    }


COLLECTIVES = {
    name: (name, *kinds)
    for name, *kinds in (
        ("copy_to_tensor_parallel", "full", "used by cut channels", None, None),
        ("reduce_from_tensor_parallel", "partial", "full", None, None),
        ("scatter_to_tensor_parallel", "full", "cut", None, -1),
        ("gather_from_tensor_parallel", "cut", "full", -1, None),
        ("all_gather_from", "cut", "used by cut channels", -1, None),
        ("scatter_to_sequence_parallel", "full", "cut", None, 0),
        ("gather_from_sequence_parallel", "cut", "used by cut channels", 0, None),
        ("reduce_scatter_to_sequence_parallel", "partial", "cut", None, 0),
    )
}


def dense_collective(num_ranks, function):
    _, takes, returns, *_ = COLLECTIVES[function]
    names = [f"x {rank}" for rank in range(num_ranks)] if takes == "partial" else ["x"]
    parts = [leaf(full(name, 4, B, 12)) for name in names]
    y = sum(parts)
    uses = [f"use {rank}" for rank in range(num_ranks)] if returns == "used by cut channels" else ["use"]
    (y * sum(full(use, 4, B, 12) for use in uses)).sum().backward()
    return {"y": y, "x": parts[0].grad}


CASES = {
    "column": (column, dense_column, ((12,),)),
    "column of halves": (column, dense_column, ((2, 8),)),
    "column of a number": (column, dense_column, (12,)),
    "row": (row, dense_row, ()),
    "embedding": (embedding, dense_embedding, ()),
    **{f"loss, {name}": (cross_entropy, dense_cross_entropy, (size,)) for name, size in VOCABULARIES.items()},
}


def run_cases(topology):
    """Every case on these ranks: it starts no second world."""
    context = LayerContext(topology, torch.float64)
    results = {name: on_ranks(topology, context, *args) for name, (on_ranks, _, args) in CASES.items()}
    results |= {name: collective(topology, context, name) for name in COLLECTIVES}
    return {case: {name: x.detach() for name, x in result.items()} for case, result in results.items()}


@pytest.fixture(scope="module", params=[1, 2, 4])
def results(request):
    parallel = ParallelConfig(tensor_model_parallel_size=request.param)
    return run_ranks(run_cases, parallel.mesh, request.param)


@pytest.mark.parametrize("case", [*CASES, *COLLECTIVES])
def test_equals_dense(case, results):
    if case in COLLECTIVES:
        expected = dense_collective(len(results), case)
    else:
        _, dense, args = CASES[case]
        expected = dense(*args)
    for rank, result in enumerate(results):
        assert set(result[case]) == set(expected)
        for name, tensor in result[case].items():
            error = (tensor - expected[name]).abs().max() / expected[name].abs().max().clamp(min=1e-3)
            assert error <= TOLERANCE, (rank, name, error)


def test_padding_gets_exactly_no_gradient(results):
    for name, vocab_size in VOCABULARIES.items():
        for result in results:
            assert torch.count_nonzero(result[f"loss, {name}"]["logits"][..., vocab_size:]) == 0


def test_whole_gradients_are_the_same_bits_on_every_rank(results):
    """What is whole on each rank must stay so: nothing ever makes drifting copies equal again."""
    for case in results[0]:
        for name, tensor in results[0][case].items():
            assert all(torch.equal(result[case][name], tensor) for result in results), (case, name)


def twice(topology):
    """A second backward through the loss, whose first one has used up the logits."""
    logits = leaf(full("logits", S, B, ROWS)).clone()
    loss = vocab_parallel_cross_entropy(logits, tokens(ROWS), ROWS, topology.tp).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def test_second_backward_of_the_loss_is_refused(one_rank):
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        twice(one_rank)
