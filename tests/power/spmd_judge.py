"""A second judge: check the types of a model's tensors with spmd_types, on one rank of any world.

A type says for each mesh axis how the ranks' values and their gradients are related. The types of parameters
follow from their specs, and each autograd function that communicates gets a rule. Other operators have
spmd_types' own rules. The forward of one rank then shows a value that varies between ranks where the ranks
must agree, and a parameter whose gradient would need a sum that its spec does not name.

python -m tests.power.spmd_judge     print which errors of the catalogue change a type
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import spmd_types
import torch
from spmd_types import I, P, R, S, SpmdTypeError, V, rules
from spmd_types.checker import typecheck
from torch import Tensor

from megalite.attention import kernels
from megalite.config import Config
from megalite.data.microbatch import Microbatch
from megalite.distributed import collectives
from megalite.distributed.topology import Topology
from megalite.kernels import norm, packed_heads
from megalite.model import recompute_region, recurrent_mixer
from megalite.model.stage import StageProvider
from megalite.model.transformer_stage import TransformerStage
from megalite.observe.verify.layouts import Layout
from megalite.tensor_parallel import linear, vocab_parallel
from megalite.tensor_parallel.parameter_spec import spec_of
from megalite.train.model_chunks import build_chunks
from tests.power.catalogue import CATALOGUE
from tests.power.injected_error import InjectedError
from tests.power.measure import config_of

Types = dict[str, Any]


def _column(
    outputs: Any, *, x: Any, weight: Any, bias: Any, parameters: Any, context: Any, epilogue: Any = None
) -> None:
    tp = context.tp.group
    is_cut = context.collectives.sequence_parallel
    full = rules.all_gather(x, tp, src=S(0), dst=R) if is_cut else rules.convert(x, tp, src=I, dst=R)
    y = rules.einsum("...k,nk->...n", full, weight)
    rules.output(outputs, y if bias is None else rules.einsum("...n,n->...n", y, bias))
    _ignore(*parameters)


def _row(
    outputs: Any,
    *,
    x: Any,
    weight: Any,
    bias: Any,
    parameters: Any,
    context: Any,
    before: Any,
    before_bias: Any,
) -> None:
    y = rules.einsum("...k,nk->...n", x, weight)
    rules.output(outputs, rules.reinterpret(y, context.tp.group, src=V, dst=P))
    _ignore(*parameters, bias, before, before_bias)


def _computed(*, stand_in: Any, compute: Any) -> Any:
    """Return the type of a row layer's sum; `compute` has the layer's context in its closure."""
    context = inspect.getclosurevars(compute).nonlocals["context"]
    if context.collectives.sequence_parallel:
        return rules.reduce_scatter(stand_in, context.tp.group, src=P, dst=S(0))
    return rules.all_reduce(stand_in, context.tp.group, src=P, dst=I)


def _cross_entropy(
    outputs: Any, *, logits: Any, targets: Any, vocab_size: Any, tp: Any, returns_sums: Any
) -> None:
    partial = rules.einsum("..._,...->...", logits, targets)
    loss = rules.all_reduce(partial, tp.group, src=V, dst=I)
    rules.output(outputs, (loss, None, rules.einsum("...->...", logits)))


def _ignore(*tensors: Any) -> None:
    rules.ignore(*(each for each in tensors if isinstance(each, Tensor)))


PAIRS: dict[tuple[Any, Any], Any] = {
    (collectives._itself, collectives._summed): lambda x, tp: rules.convert(x, tp, src=I, dst=R),
    (collectives._own_features, collectives._gathered_features): (
        lambda x, tp: rules.convert(x, tp, src=I, dst=S(x.ndim - 1))
    ),
    (collectives._gathered_features, collectives._own_features): (
        lambda x, tp: rules.all_gather(x, tp, src=S(x.ndim - 1), dst=I)
    ),
    (collectives._gathered_features, collectives._reduce_scattered_features): (
        lambda x, tp: rules.all_gather(x, tp, src=S(x.ndim - 1), dst=R)
    ),
    (collectives._own_positions, collectives._gathered_positions): (
        lambda x, tp: rules.convert(x, tp, src=I, dst=S(0))
    ),
    (collectives._gathered_positions, collectives._reduce_scattered_positions): (
        lambda x, tp: rules.all_gather(x, tp, src=S(0), dst=R)
    ),
    (collectives._reduce_scattered_positions, collectives._gathered_positions): (
        lambda x, tp: rules.reduce_scatter(x, tp, src=V, dst=S(0))
    ),
}
"""Types of the collectives of `with_conjugate`, by what forward and backward do."""
RULES: dict[Any, Any] = {
    collectives._WithConjugate: lambda *, x, axis, forward, backward: PAIRS[forward, backward](x, axis.group),
    collectives._Reduce: lambda *, x, tp: rules.all_reduce(x, tp.group, src=V, dst=I),
    linear._ColumnLinear: _column,
    linear._RowLinear: _row,
    linear._Computed: _computed,
    vocab_parallel._CrossEntropy: _cross_entropy,
}
"""Types of the functions that communicate: I is full with a full gradient, R is full with a partial gradient,
V varies between ranks, P is partial."""

LOCAL = (
    *(packed_heads.SplitHeads, norm._WithResidual, recompute_region._Keep, kernels._Attention),
    recurrent_mixer._Scan,
)
"""Functions without communication between the ranks of tp and dp."""


@contextmanager
def typed_functions() -> Iterator[None]:
    """Give megalite's autograd functions their types during the block."""
    with pytest.MonkeyPatch.context() as patch:
        for function, rule in RULES.items():
            patch.setattr(function, "spmd_typecheck", staticmethod(rule), raising=False)
        for function in LOCAL:
            spmd_types.register_local_autograd_function(function)
        yield


def parameter_types(parameter: Any) -> Types:
    """Return a parameter's types: its gradient is summed over replicas and over `partial_over`."""
    spec = spec_of(parameter)
    of_tp = V if spec.dim_cut_over("tp") is not None else R if "tp" in (spec.partial_over or ()) else I
    return {"tp": of_tp, "dp": R}


def loss_types(
    layout: str,
    model: str = "gpt",
    error: InjectedError | None = None,
    build_stage: StageProvider | None = None,
) -> Types:
    """Return the types of the loss of a microbatch on the last rank of a layout without a pipeline.

    Args:
        error: an error of the catalogue to inject.
        build_stage: builds another model; by default a stage of the config's architecture.

    Raises:
        SpmdTypeError: an operator of the forward has operands whose types do not fit.
    """
    parsed = Layout.parse(layout)
    applied = parsed.apply(config_of(model), global_batch_size=8 * parsed.num_sample_ranks)
    world_size = parsed.world_size
    with (
        typed_functions(),
        Topology.fake(applied.parallel.mesh, world_size, world_size - 1, device="cpu") as topology,
        error.injected(topology) if error else nullcontext(),
    ):
        (stage,) = build_chunks(applied, topology, build_stage=build_stage)
        axes = {n: spmd_types.MeshAxis.of(a.group) for n, a in topology.axes.items() if a.size > 1}

        def give(tensor: Tensor | None, **types: Any) -> None:
            if tensor is not None:
                spmd_types.assert_type(tensor, {name: types[name] for name in axes})

        microbatch = _microbatch(applied)
        with spmd_types.set_current_mesh(axes), typecheck(local=True):
            for parameter in stage.parameters():
                give(parameter, **parameter_types(parameter))
            if isinstance(stage, TransformerStage):
                _give_constants(stage.core, give)
            for each in vars(microbatch).values():
                give(each, tp=R, dp=V)
            types = spmd_types.get_local_type(_loss(stage(microbatch, None)))
        return {name: types.get(axis) for name, axis in axes.items()}


def _microbatch(config: Config) -> Microbatch:
    b, s = config.training.micro_batch_size, config.model.seq_length
    tokens = torch.arange(b * s).view(b, s) % 7
    microbatch = Microbatch(tokens, tokens.clone(), torch.arange(b))
    if config.model.is_causal:
        return microbatch.with_later_tokens(config.model.mtp_num_layers)
    return replace(
        microbatch,
        token_types=tokens % 2,
        loss_mask=tokens > 3,
        document_ids=torch.zeros_like(tokens),
        order_labels=torch.zeros(b, dtype=torch.int64),
    )


def _give_constants(core: Any, give: Any) -> None:
    """Type the constants of the attention core: rotary frequencies, and the slopes of this rank's heads."""
    for rotation in core.rotations.values():
        give(getattr(rotation, "frequencies", None), tp=R, dp=R)
    give(getattr(core, "slopes", None), tp=V, dp=R)


def _loss(result: Any) -> Tensor:
    if isinstance(result, Tensor):
        return result
    total: Tensor = sum(term.total for term in result.terms.values())
    return total


def type_error(error: InjectedError) -> str:
    """Return what the types show of an error; empty if nothing."""
    right = {"tp": I, "dp": V}
    try:
        types = loss_types(error.layout, error.model, error)
    except SpmdTypeError as mistake:
        return str(mistake).partition("\n")[0]
    wrong = {name: each for name, each in types.items() if each is not right[name]}
    return f"the loss has the types {wrong}" if wrong else ""


def judged() -> list[InjectedError]:
    """Return the errors of layouts whose stages hold a whole model with its weights, and of these models."""
    models = ("gpt", "llama", "bloom", "bert", "qwen", "olmo", "neox", "muon", "sliced", "later")
    without_rules = "pp", "cp", "zero3"
    layouts = {each.layout for each in CATALOGUE if not any(part in each.layout for part in without_rules)}
    errors = [each for each in CATALOGUE if not each.is_of_saves]
    return [each for each in errors if each.model in models and each.layout in layouts]


if __name__ == "__main__":
    errors = judged()
    found = {error.name: message for error in errors if (message := type_error(error))}
    for name, message in found.items():
        print(f"{name}: {message}")
    print(f"{len(found)} of {len(errors)}")
