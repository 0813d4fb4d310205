"""GELU in the GEMMs of the MLP: the results of the plain MLP, in every form of the linear layers' backward.

A CPU has no such GEMMs: their references run where a GPU would run them, in fp64.
"""

from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from megalite.config import ParallelConfig
from megalite.model.mlp import MLP
from megalite.tensor_parallel import linear
from megalite.tensor_parallel.gemm import MainGrad, WeightGradientStore, run_stored
from megalite.tensor_parallel.gemm_collectives import SEPARATE
from megalite.tensor_parallel.parameter_spec import LayerContext
from tests.live_ranks import run_ranks
from tests.ranks.model.test_recompute import MODEL, MODES, B, H, S, gradients, live_elements
from tests.ranks.tensor_parallel.test_linear import FORMS, PARTS, Cut, fill, full, gradients_of

TOLERANCE = 1e-12
KEEP_GELU = {"mlp_act", "all parts"}
"""Modes that recompute the activation alone: GELU stays an operator."""


@contextmanager
def gelu_in_gemms(is_on=True):
    """Let GEMMs compute GELU, and count their calls."""
    calls = Counter()

    def counted(name):
        function = getattr(linear, name)

        def call(*arguments):
            calls[name] += 1
            return function(*arguments)

        return call

    names = ("linear_gelu", "gelu_linear_backward")
    with patch.multiple(linear, has_linear_gelu=lambda *_: is_on, **{name: counted(name) for name in names}):
        yield calls


def mlp(topology, config, sequence_parallel, stored, fused, overlap=SEPARATE):
    """Two microbatches through an MLP: its output, and all gradients."""
    store = WeightGradientStore()
    context = LayerContext(
        topology,
        torch.float64,
        sequence_parallel=sequence_parallel,
        weight_gradient_store=store if stored else None,
        fuses_weight_gradients=fused,
        overlap=overlap,
    )
    module = MLP(config, context)
    fill(module, topology)
    totals = {}
    for layer in (module.up, module.down):
        if fused:
            totals[layer] = torch.zeros_like(layer.weight)
            claim = lambda total=totals[layer]: (total, False)  # noqa: E731
            layer.weight.main_grad = MainGrad(claim, lambda: None, None)
    cut, results = Cut(topology, sequence_parallel), {}
    for number in range(2):
        x = cut.mine(full(f"x{number}", S, B, H), cut.sequence_dim).requires_grad_()
        y = module(x).x
        with store.collect() as later:
            y.backward(cut.mine(full(f"dy{number}", S, B, H), cut.sequence_dim))
        run_stored(later)
        results |= {
            f"y{number}": cut.whole(y, cut.sequence_dim),
            f"dx{number}": cut.whole(x.grad, cut.sequence_dim),
        }
    for layer, total in totals.items():
        layer.weight.grad = total
    module.down.bias = None  # the kernel after the MLP adds it
    return results | gradients_of(module, topology, sequence_parallel)


def difference(found, expected):
    assert set(found) == set(expected)
    return max(
        ((found[name] - expected[name]).abs().max() / expected[name].abs().max()).item() for name in expected
    )


def on_ranks(topology):
    errors, num_calls = {}, {}
    for form in FORMS:
        bias = sum(form[:3]) % 2 == 0  # each value with each of the form's values
        config = replace(MODEL, add_bias_linear=bias)
        expected = mlp(topology, config, *form[:3])
        with gelu_in_gemms() as calls:
            found = mlp(topology, config, *form)
        errors[form, bias], num_calls[form, bias] = difference(found, expected), calls
    sequence_parallel = topology.tp.size > 1
    expected = gradients(topology, MODEL, sequence_parallel, None)
    cases = [("nothing", None, False), ("nothing", None, True), ("uniform", MODES["uniform"], True)]
    for mode, recompute, stored in [*cases, *((mode, MODES[mode], False) for mode in MODES)]:
        with gelu_in_gemms() as calls:
            found = gradients(topology, MODEL, sequence_parallel, recompute, stored)
        errors[stored, mode], num_calls[stored, mode] = difference(found, expected), calls
    kept = []
    for is_on in (False, True):
        with gelu_in_gemms(is_on):
            kept.append(live_elements(topology, MODEL, 2, sequence_parallel, None))
    return errors, num_calls, kept


@pytest.fixture(scope="module", params=[1, 2])
def results(request):
    parallel = ParallelConfig(tensor_model_parallel_size=request.param)
    return run_ranks(on_ranks, parallel.mesh, request.param)


def test_equals_the_plain_mlp(results):
    for errors, num_calls, _ in results:
        assert not {case: error for case, error in errors.items() if not error <= TOLERANCE}
        for case, calls in num_calls.items():
            form = case[0] if isinstance(case[0], tuple) else (False, SEPARATE)
            gathers_in_parts = len(results) > 1 and form[0] and form[-1] == PARTS
            keeps_gelu = case[1] in KEEP_GELU or gathers_in_parts
            assert (calls["linear_gelu"] == 0) == (calls["gelu_linear_backward"] == 0) == keeps_gelu, case


def test_keeps_as_much_for_backward(results):
    for _, _, (plain, in_gemms) in results:
        assert in_gemms == plain
