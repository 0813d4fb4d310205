"""Linear layers whose collectives overlap with GEMMs in symmetric memory, and what a group can use.

A CPU has no kernels of torch's operators on symmetric memory. Stand-ins with gloo are registered under the
same schemas, so that torch checks the arguments; they check the rest.
"""

import itertools
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory  # defines the operators

from megalite.config import ParallelConfig
from megalite.config.training import Fp8Options
from megalite.tensor_parallel.gemm_collectives import Overlap, choose_overlap, trial_problem
from megalite.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from megalite.utils import torch_private
from tests.live_ranks import run_ranks
from tests.ranks.tensor_parallel.test_linear import dense, linear

KINDS = {"column": ColumnParallelLinear, "row": RowParallelLinear}
FORMS = list(itertools.product((False, True), (False, True)))
"""Whether weight gradients are stored for later, and whether they are added to main_grad."""


@contextmanager
def operators_on_cpu(tp, sums=True):
    """Register the operators for CPU tensors, and yield the names of those that are called."""
    calls = []

    def all_gather_matmul(x, matrices, gather_dim, group_name, *, return_A=True):
        check(x, *matrices, dim=gather_dim, group_name=group_name)
        calls.append("all-gather")
        gathered = x.new_empty(tp.size * len(x), *x.shape[1:])
        dist.all_gather_into_tensor(gathered, x, group=tp.group)
        # torch's result is a view
        return gathered if return_A else None, [(gathered @ matrices[0])[None].flatten(0, 1)]

    def matmul_reduce_scatter(x, matrix, reduce_op, scatter_dim, group_name):
        check(x, matrix, dim=scatter_dim, group_name=group_name)
        assert reduce_op == "sum"
        calls.append("reduce-scatter")
        y = x @ matrix
        if sums:
            dist.all_reduce(y, group=tp.group)
        return y.chunk(tp.size)[tp.rank].clone()

    def check(x, *matrices, dim, group_name):
        assert x.is_contiguous() and dim == 0 and group_name == tp.group.group_name
        assert [matrix.dim() for matrix in matrices] == [2]

    with torch_private.scoped_library("symm_mem", "IMPL") as library:
        library.impl("fused_all_gather_matmul", all_gather_matmul, "CPU")
        library.impl("fused_matmul_reduce_scatter", matmul_reduce_scatter, "CPU")
        yield calls


def on_ranks(topology):
    tp, cpu = topology.tp, torch.device("cpu")
    results, problems = {}, {}
    problems["no operators"] = trial_problem(tp, cpu, torch.float32)
    with operators_on_cpu(tp) as calls:
        problems["operators"] = trial_problem(tp, cpu, torch.bfloat16)
        for (name, kind), form in itertools.product(KINDS.items(), FORMS):
            calls.clear()
            found = linear(kind, topology, True, *form, Overlap("symmetric_memory"))
            results[name, form] = found, set(calls)
    with operators_on_cpu(tp, sums=False):
        problems["no sum"] = trial_problem(tp, cpu, torch.float32)
    choices = {}
    for sequence_parallel, method, num_chunks in CHOICES:
        parallel = ParallelConfig(
            tensor_model_parallel_size=tp.size,
            sequence_parallel=sequence_parallel,
            tp_comm_overlap_method=method,
            tp_comm_overlap_chunks=num_chunks,
        )
        choice = choose_overlap(parallel, topology, 64, torch.float32)
        choices[sequence_parallel, method, num_chunks] = choice
    return results, problems, choices


CHOICES = {
    (True, "chunks", None): (None, 1, "on CPUs only with --tp-comm-overlap"),
    (True, "chunks", 3): ("chunks", 3, "64 tokens in a microbatch"),
    (True, "symmetric_memory", None): ("chunks", 2, "not in symmetric memory: the ranks run on cpu"),
    (False, "symmetric_memory", 4): ("chunks", 4, "torch has no such operator for the all-reduces"),
}


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request):
    parallel = ParallelConfig(tensor_model_parallel_size=request.param)
    return run_ranks(on_ranks, parallel.mesh, request.param)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layer", KINDS)
def test_equals_dense(layer, form, ranks):
    expected, stored = dense(KINDS[layer]), form[0]
    for results, *_ in ranks:
        found, calls = results[layer, form]
        assert calls == {"all-gather", "reduce-scatter"} - (
            {"reduce-scatter"} if is_hidden(layer, stored) else set()
        )
        assert set(found) == set(expected)
        for name, tensor in found.items():
            assert (tensor - expected[name]).abs().max() <= 1e-13, name


def is_hidden(layer, stored):
    """Whether the GEMM of the weight's gradient hides the sum of the input's gradient."""
    return layer == "column" and not stored


def test_a_trial_finds_what_is_wrong(ranks):
    for _, problems, _ in ranks:
        assert problems["no operators"].startswith(f"torch {torch.__version__} cannot: ")
        assert problems["operators"] == ""
        assert problems["no sum"] == "the sum of a trial differ from GEMM and collective"


def test_choices(ranks):
    for *_, choices in ranks:
        for case, (method, num_chunks, reason) in CHOICES.items():
            assert (choices[case].method, choices[case].num_chunks) == (method, num_chunks)
            assert reason in choices[case].description


@pytest.mark.parametrize(
    ("options", "num_tokens", "device", "expected"),
    [
        ({}, 8192, "cuda", 2),
        ({}, 8191, "cuda", 1),
        ({}, 32768, "cuda", 4),
        ({}, 1 << 20, "cpu", 1),
        ({"tp_comm_overlap": True}, 64, "cpu", 2),
        ({"tp_comm_overlap": True, "tp_comm_overlap_chunks": 4}, 64, "cuda", 4),
        ({"tp_comm_overlap_chunks": 4}, 64, "cpu", 4),
        ({"tp_comm_overlap": False, "tp_comm_overlap_chunks": 4}, 8192, "cuda", 1),
        ({"tensor_model_parallel_size": 1, "tp_comm_overlap": True}, 8192, "cuda", 1),
    ],
)
def test_number_of_parts(options, num_tokens, device, expected):
    parallel = ParallelConfig(**{"tensor_model_parallel_size": 2, **options})
    assert parallel.tp_comm_chunks(num_tokens, device) == expected


def recipes_on_ranks(topology, parallel):
    recipes = {"e4m3": ("tensorwise", "delayed", "blockwise", "mxfp8"), "e2m1": ("nvfp4",)}
    return {
        recipe: choose_overlap(parallel, topology, 8192, torch.float32, Fp8Options(each, recipe))
        for each, names in recipes.items()
        for recipe in names
    }


def test_gemms_of_blocks_are_split():
    parallel = ParallelConfig(tensor_model_parallel_size=2, tp_comm_overlap=True)
    for choices in run_ranks(recipes_on_ranks, parallel.mesh, 2, parallel):
        for recipe in ("blockwise", "mxfp8", "nvfp4"):
            assert choices[recipe].method == "chunks"
        for recipe in ("tensorwise", "delayed"):
            assert choices[recipe].method is None
            assert f"--fp8-recipe {recipe} are not split" in choices[recipe].description
