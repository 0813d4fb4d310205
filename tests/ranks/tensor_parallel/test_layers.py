"""Each parallel layer computes, on 1, 2 and 4 ranks, what plain PyTorch computes, gradients included."""

import pytest
import torch
import torch.nn.functional as F

from megalite.config import ParallelConfig
from megalite.distributed.collectives import all_gather_from, reduce_from
from megalite.distributed.local_ranks import run_ranks
from megalite.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from megalite.tensor_parallel.parameter_spec import LayerContext, gather_full, spec_of
from megalite.tensor_parallel.vocab_cross_entropy import vocab_parallel_cross_entropy
from megalite.tensor_parallel.vocab_embedding import VocabParallelEmbedding

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
        parameter.data.copy_(whole if spec.shard is None else mine(whole, spec.shard.dim, topology.tp))


def full_gradients(module, topology):
    return {
        name: gather_full(parameter.grad, spec_of(parameter), topology)
        for name, parameter in module.named_parameters()
    }


def column(topology, context, out_shape):
    layer = ColumnParallelLinear(WIDTH, out_shape, context, bias=True, std=1.0)
    fill(layer, topology)
    x = leaf(full("x", S, B, WIDTH))
    y = layer(x)
    y.backward(mine(full("dy", S, B, *out_shape), -1, topology.tp).flatten(2))
    y = all_gather_from(y.unflatten(-1, (*out_shape[:-1], -1)), topology.tp)
    return {"y": y, "x": x.grad, **full_gradients(layer, topology)}


def dense_column(out_shape):
    weight, bias = leaf(full("weight", *out_shape, WIDTH)), leaf(full("bias", *out_shape))
    x = leaf(full("x", S, B, WIDTH))
    y = torch.tensordot(x, weight, dims=([2], [len(out_shape)])) + bias
    y.backward(full("dy", S, B, *out_shape))
    return {"y": y, "x": x.grad, "weight": weight.grad, "bias": bias.grad}


def row(topology, context):
    layer = RowParallelLinear(WIDTH, 6, context, bias=True, std=1.0)
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


def weighted(y, rank):
    """A use of the whole that differs from rank to rank."""
    return (y * full(f"use {rank}", *y.shape)).sum()


def collectives(topology, context):
    tp = topology.tp
    reduced = leaf(full(f"reduced {tp.rank}", S, WIDTH))
    gathered = leaf(mine(full("gathered", S, B, WIDTH), -1, tp).transpose(0, 1).contiguous()).transpose(0, 1)
    gathered.retain_grad()
    total = reduce_from(reduced.t(), tp)  # of any strides
    weighted(total, 0).backward()
    whole = all_gather_from(gathered, tp)
    weighted(whole, tp.rank).backward()
    return {
        "total": total,
        "reduced": reduced.grad,
        "whole": whole,
        "gathered": all_gather_from(gathered.grad, tp),
    }


def dense_collectives(num_ranks):
    reduced = [leaf(full(f"reduced {rank}", S, WIDTH)) for rank in range(num_ranks)]
    whole = leaf(full("gathered", S, B, WIDTH))
    total = sum(part.t() for part in reduced)
    weighted(total, 0).backward()
    for rank in range(num_ranks):
        weighted(whole, rank).backward()
    return {
        "total": total,
        "reduced": reduced[0].grad,
        "whole": whole,
        "gathered": whole.grad,
    }


CASES = {
    "column": (column, dense_column, ((12,),)),
    "column of halves": (column, dense_column, ((2, 8),)),
    "row": (row, dense_row, ()),
    "embedding": (embedding, dense_embedding, ()),
    **{f"loss, {name}": (cross_entropy, dense_cross_entropy, (size,)) for name, size in VOCABULARIES.items()},
}


def run_cases(topology):
    """Every case on these ranks: it starts no second world."""
    context = LayerContext(topology, torch.float64)
    results = {name: on_ranks(topology, context, *args) for name, (on_ranks, _, args) in CASES.items()}
    results["collectives"] = collectives(topology, context)
    return {case: {name: x.detach() for name, x in result.items()} for case, result in results.items()}


@pytest.fixture(scope="module", params=[1, 2, 4])
def results(request):
    parallel = ParallelConfig(tensor_model_parallel_size=request.param)
    return run_ranks(run_cases, parallel, request.param)


@pytest.mark.parametrize("case", [*CASES, "collectives"])
def test_equals_dense(case, results):
    if case == "collectives":
        expected = dense_collectives(len(results))
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
            if (case, name) != ("collectives", "reduced"):
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
