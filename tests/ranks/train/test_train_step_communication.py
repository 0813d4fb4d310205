"""What a rank communicates in an iteration, to the byte and to the call, is what the papers' formulas say.

Bytes are those that pass through a rank where collectives run in rings: of n bytes and t ranks,
n (t - 1) / t in an all-gather or a reduce-scatter, twice that in an all-reduce; a message passes whole.

Tensor parallelism: 8 b s h (t - 1) / t elements a layer and microbatch (Narayanan et al. 2021, section 3.2),
with sequence parallelism the same (Korthikanti et al. 2022, section 4.2.2). That count leaves out that
backward gathers the column-parallel inputs again, of which slices are saved: 2 b s h (t - 1) / t more, which
run under the input gradients' products and are counted apart here. The embedding and the logits together cost
as much as half a layer, the loss three numbers a token.

Pipeline: b s h each way over each boundary between two stages, cut by t with sequence parallelism.

Data parallelism: 2 P (d - 1) / d elements of P parameters, with the optimizer's state sharded or not
(Rajbhandari et al. 2020, section 7.2).
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace

import pytest

from megalite.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RecomputeConfig,
    TrainingConfig,
    check_config,
)
from megalite.train.trainer import start_trainer
from tests.live_ranks import run_ranks
from tests.traffic import Traffic, by_bytes, ring_bytes

S, B, H, LAYERS, MICROBATCHES, VOCAB = 16, 2, 64, 2, 2, 512
ELEMENT = 4
HIDDEN = S * B * H * ELEMENT
"""Bytes of a microbatch's hidden states."""
MODEL = ModelConfig(
    num_layers=LAYERS,
    hidden_size=H,
    num_attention_heads=4,
    seq_length=S,
    vocab_size=VOCAB,
    untie_embeddings_and_output_weights=True,
)


def config_of(world_size, recompute=None, num_layers=LAYERS, **parallel):
    layout = ParallelConfig(**parallel)
    dp = world_size // (layout.tp * layout.pp)
    return Config(
        model=replace(MODEL, num_layers=num_layers),
        parallel=layout,
        recompute=recompute or RecomputeConfig(),
        optimizer=OptimizerConfig(lr=1e-4),
        data=DataConfig(mock_data=True),
        training=TrainingConfig(
            micro_batch_size=B, global_batch_size=B * dp * MICROBATCHES, train_iters=5, eval_iters=0
        ),
    )


def second_iteration(topology, config):
    """The traffic of an iteration that has others before and after it."""
    check_config(config, topology.world_size)
    with start_trainer(config, topology) as trainer:
        trainer.step()
        with Traffic(topology) as traffic:
            trainer.step()
        num_parameters = sum(p.numel() for chunk in trainer.chunks for p in chunk.parameters())
        return {"calls": by_bytes(traffic.calls), "num_parameters": num_parameters}


@functools.cache
def ranks_of(world_size, **options):
    """What each rank communicates and holds: do not change it."""
    config = config_of(world_size, **options)
    return run_ranks(second_iteration, config.parallel.mesh, world_size, config)


LOSS = {
    ("tp", "all-reduce", S * B * ELEMENT): MICROBATCHES,  # a token's largest logit
    ("tp", "all-reduce", 2 * S * B * ELEMENT): MICROBATCHES,  # its sum of exponentials, its target's logit
}


NORM = {("tp", "all-reduce", 8): 1}
"""The gradient's squared norm, in fp64."""


def layer_bytes(calls, size):
    """What hidden states and their gradients cost on tp."""
    return ring_bytes({call: count for call, count in calls.items() if call[2] == HIDDEN}, "tp", size)


@pytest.mark.parametrize("t", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_tensor_parallel(t):
    for result in ranks_of(t, tensor_model_parallel_size=t):
        calls = result["calls"]
        hidden = {("tp", "all-reduce", HIDDEN): MICROBATCHES * (4 * LAYERS + 2)}
        assert calls == {**hidden, **LOSS, **NORM}
        assert layer_bytes(calls, t) == MICROBATCHES * (8 * LAYERS + 4) * HIDDEN * (t - 1) / t


@pytest.mark.parametrize("t", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_sequence_parallel(t):
    each, again = MICROBATCHES * (4 * LAYERS + 2), MICROBATCHES * (2 * LAYERS + 1)
    whole = LAYERS * 6 * H + 2 * H + S * H  # norms and row-parallel biases, final norm, positions
    for result in ranks_of(t, tensor_model_parallel_size=t, sequence_parallel=True):
        calls = Counter(result["calls"])
        assert calls == {
            ("tp", "all-gather", HIDDEN): each + again,
            ("tp", "reduce-scatter", HIDDEN): each,
            ("tp", "all-reduce", whole * ELEMENT): 1,  # the gradients of what is whole on every rank
            **LOSS,
            **NORM,
        }
        calls["tp", "all-gather", HIDDEN] -= again
        assert layer_bytes(calls, t) == MICROBATCHES * (8 * LAYERS + 4) * HIDDEN * (t - 1) / t


PARTS = 3
FULL = RecomputeConfig(recompute_granularity="full")


@pytest.mark.parametrize("recompute", [{}, {"recompute": FULL}], ids=["kept", "recomputed"])
@pytest.mark.parametrize("sequence", [{}, {"sequence_parallel": True}], ids=["tp", "sequence parallel"])
def test_collectives_in_parts(sequence, recompute):
    """The bytes are the same, in three times as many calls where only the layer's own GEMM hides them.

    In backward, GEMMs hide the sum of a column-parallel input's gradient, and the second all-gather of the
    input; the gradient of a row-parallel output is gathered at once. The embedding's sum has no GEMM.
    """
    apart, parts = (
        Counter(ranks_of(2, tensor_model_parallel_size=2, **sequence, **recompute, **chunks)[0]["calls"])
        for chunks in ({}, {"tp_comm_overlap_chunks": PARTS})
    )
    columns, rows, embedding, again = 2 * LAYERS + 1, 2 * LAYERS, 1, 2 * LAYERS + 1
    recomputed = bool(recompute)
    if sequence:
        whole = {"all-gather": rows + embedding + again, "reduce-scatter": columns + embedding}
        split = {
            "all-gather": columns + 2 * LAYERS * recomputed,
            "reduce-scatter": rows + LAYERS * recomputed,
        }
    else:
        whole = {"all-reduce": columns + embedding}
        split = {"all-reduce": rows + LAYERS * recomputed}
    for kind in whole:
        assert apart.pop(("tp", kind, HIDDEN)) == MICROBATCHES * (whole[kind] + split[kind])
        assert parts.pop(("tp", kind, HIDDEN)) == MICROBATCHES * whole[kind]
        of_parts = {call: count for call, count in parts.items() if call[1] == kind and call not in apart}
        assert sum(of_parts.values()) == MICROBATCHES * PARTS * split[kind]
        assert sum(call[2] * count for call, count in of_parts.items()) == MICROBATCHES * split[kind] * HIDDEN
        parts = Counter({call: count for call, count in parts.items() if call not in of_parts})
    assert parts == apart


@pytest.mark.parametrize(
    ("recompute", "more"),
    [
        (FULL, 1),  # not 2: nothing needs a layer's output again
        (RecomputeConfig(recompute_granularity="full", recompute_num_layers=2), 1.5),
        (RecomputeConfig(recompute_granularity="full", distribute_saved_activations=True), 1),
        (RecomputeConfig("selective", recompute_modules=("core_attn", "mlp_act", "layernorm")), 0),
        (RecomputeConfig("selective", recompute_modules=("mlp",)), 0),
    ],
    ids=["full", "full of two", "full and sliced", "parts", "mlp"],
)
def test_recomputation(recompute, more):
    """All-reduces of a layer that come to the four of forward and backward."""
    for result in ranks_of(2, tensor_model_parallel_size=2, recompute=recompute):
        gathers = MICROBATCHES * LAYERS if recompute.distribute_saved_activations else 0
        assert result["calls"]["tp", "all-reduce", HIDDEN] == MICROBATCHES * ((4 + more) * LAYERS + 2)
        assert result["calls"]["tp", "all-gather", HIDDEN] == gathers


@pytest.mark.parametrize(
    ("options", "boundaries", "t"),
    [
        ({}, [1, 1], 1),
        ({"num_virtual_stages_per_pipeline_rank": 2, "num_layers": 4}, [3, 3], 1),
        ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, [1, 1], 2),
    ],
    ids=["1f1b", "interleaved", "sequence parallel"],
)
def test_pipeline(options, boundaries, t):
    """Each stage sends a message over each of its boundaries, of which interleaved stages have more."""
    for rank, result in enumerate(ranks_of(2 * t, pipeline_model_parallel_size=2, **options)):
        calls = {call: n for call, n in result["calls"].items() if call[0] == "pp" and call[2] > 8}
        count = MICROBATCHES * boundaries[rank // t]
        assert calls == {("pp", kind, HIDDEN // t): count for kind in ("send", "receive")}


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_data_parallel(zero_stage):
    d, num_groups = 2, 4  # parameters with weight decay or without, cut over tp or not
    for result in ranks_of(d, zero_stage=zero_stage):
        calls = Counter(result["calls"])
        assert calls.pop(("dp", "all-reduce", 8)) == 2
        kinds = ("all-gather", "reduce-scatter") if zero_stage else ("all-reduce",)
        assert {kind for _, kind, _ in calls} == set(kinds)
        assert calls.total() <= num_groups * len(kinds)  # none is larger than a bucket
        assert ring_bytes(calls, "dp", d) == 2 * result["num_parameters"] * ELEMENT * (d - 1) / d
