"""Weights that are shared out: a rank's memory and traffic are the formulas', however the rows fall.

Rajbhandari et al. 2020: of P parameters and d ranks, a rank keeps 16 P / d bytes (section 5.3, but that the
weights to compute with are made from the main ones each time), and moves 3 P (d - 1) / d elements a
microbatch (section 7.2.2): weights are gathered for forward and for backward, gradients scattered. What is in
no layer stays whole from forward to backward, and is gathered once. In a pipeline that once is of an
iteration; and so it is of every weight if gathered weights are kept.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import nn

from megalite.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainingConfig,
    check_config,
)
from megalite.config.training import Fp8Recipe
from megalite.data.microbatch import Microbatch
from megalite.distributed.axis import observing
from megalite.distributed.topology import Topology
from megalite.observe.verify.compare_runs import TOLERANCES, compare
from megalite.optim.flat_buffers import ALIGNMENT
from megalite.pipeline.schedules import Action
from megalite.plan.rank_plan import RankPlan
from megalite.tensor_parallel.fp8 import gathered_gemm_of
from megalite.train.trainer import Trainer, start_trainer
from tests.live_bytes import LiveBytes
from tests.live_ranks import record_run, run_ranks
from tests.traffic import Traffic, by_bytes, ring_bytes

LAYERS, H, VOCAB, S, MICROBATCHES = 3, 64, 512, 16, 2
MODEL = ModelConfig(
    num_layers=LAYERS,
    hidden_size=H,
    num_attention_heads=4,
    seq_length=S,
    vocab_size=VOCAB,
    activation="swiglu",  # its weight's first dim is 2, which four ranks share none the less
)


def config_of(dp: int, model: ModelConfig = MODEL, batch: int | None = None, **parallel) -> Config:
    return Config(
        model=model,
        parallel=ParallelConfig(data_parallel_size=dp, zero_stage=3, **parallel),
        optimizer=OptimizerConfig(lr=1e-2),
        data=DataConfig(mock_data=True),
        training=TrainingConfig(
            micro_batch_size=1, global_batch_size=batch or dp * MICROBATCHES, train_iters=5, eval_iters=0
        ),
    )


def trainer_of(topology: Topology, config: Config) -> Trainer:
    check_config(config, topology.world_size)
    return start_trainer(config, topology)


def is_full(module: nn.Module) -> bool:
    """Return whether the module's weights have memory."""
    return next(module.parameters()).untyped_storage().nbytes() > 0


def padded(parameters: Iterable[nn.Parameter], dp: int) -> int:
    """Return the number of elements of one bucket with these parameters."""
    number = sum(-(-parameter.numel() // ALIGNMENT) * ALIGNMENT for parameter in parameters)
    return -(-number // (dp * ALIGNMENT)) * dp * ALIGNMENT


def num_parameters(trainer: Trainer) -> tuple[int, list[int]]:
    """Of a layer, and of the embedding and the head, with padding."""
    (chunk,), dp = trainer.chunks, trainer.topology.dp.size
    edges = chunk.embedding, chunk.final_norm
    return padded(chunk.layers["0"].parameters(), dp), [padded(edge.parameters(), dp) for edge in edges]


def memory(topology: Topology, config: Config) -> tuple[int, int, int, list[int]]:
    """Bytes of all tensors before and after a step, parameters, and layers that are whole at a time."""
    with LiveBytes() as live, trainer_of(topology, config) as trainer:
        before = live.settled_count()
        blocks = list(trainer.chunks[0].layers.values())
        seen: list[int] = []

        def look(*_: object) -> None:
            seen.append(sum(is_full(block) for block in blocks))

        for block in blocks:
            block.mlp.register_forward_hook(look)
            block.mlp.register_full_backward_hook(look)
        trainer.step()
        after = live.settled_count()
    layer, rest = num_parameters(trainer)
    return before, after, LAYERS * layer + sum(rest), seen


@pytest.mark.parametrize(("dp", "dtype"), [(2, "bf16"), (4, "fp32")])
def test_memory_is_what_the_formula_says(dp: int, dtype: str) -> None:
    config = config_of(dp, replace(MODEL, params_dtype=dtype))
    for before, after, num, seen in run_ranks(memory, config.parallel.mesh, dp, config):
        assert before == pytest.approx(16 * num / dp, rel=0.01)
        assert after == pytest.approx(16 * num / dp, rel=0.01)
        # A layer's weights, and those of the next one, which are being gathered.
        assert seen == MICROBATCHES * [2, 2, 1, 2, 2, 1]


def traffic(topology: Topology, config: Config) -> tuple[Counter, float, int, list[int]]:
    with trainer_of(topology, config) as trainer:
        trainer.step()
        with Traffic(topology) as counted:
            trainer.step()
        calls = by_bytes(counted.calls)
        moved = ring_bytes(calls, "dp", topology.dp.size)
        return calls, moved, *num_parameters(trainer)


@pytest.mark.parametrize(
    ("dp", "dtype", "messages", "weight", "gradient"),
    [(2, "fp32", None, 4, 4), (2, "bf16", None, 2, 4), (2, "bf16", "bf16", 2, 2), (4, "fp32", "bf16", 4, 2)],
)
def test_traffic_is_what_the_formula_says(dp, dtype, messages, weight, gradient) -> None:
    """In bytes of a weight and of a gradient on their way."""
    config = config_of(dp, replace(MODEL, params_dtype=dtype), grad_communication_dtype=messages)
    for calls, moved, layer, rest in run_ranks(traffic, config.parallel.mesh, dp, config):
        del calls["world", "all-reduce", 8]  # the norm
        of_loss = {call: count for call, count in calls.items() if call[1] == "all-reduce"}
        assert set(of_loss) == {("dp", "all-reduce", 8)}
        assert calls == {
            ("dp", "all-gather", layer * weight): 2 * LAYERS * MICROBATCHES,
            ("dp", "reduce-scatter", layer * gradient): LAYERS * MICROBATCHES,
            **{("dp", "all-gather", size * weight): MICROBATCHES for size in rest},
            **{("dp", "reduce-scatter", size * gradient): MICROBATCHES for size in rest},
            **of_loss,
        }
        gathered = LAYERS * layer * 2 + sum(rest)
        scattered = LAYERS * layer + sum(rest)
        each = (gathered * weight + scattered * gradient) * (dp - 1) / dp
        assert moved - ring_bytes(of_loss, "dp", dp) == MICROBATCHES * each


def traffic_in_8_bits(topology: Topology, config: Config) -> tuple[Counter, int, int, int, int]:
    """Calls of a step, sizes of a layer's matrices and others, bytes after the step, number of matrices."""
    with trainer_of(topology, config) as trainer:
        trainer.step()
        with Traffic(topology) as counted:
            trainer.step()
        layer, dp = trainer.chunks[0].layers["0"], topology.dp.size
        named = {name: each for name, each in layer.named_parameters() if not name.endswith("norm.weight")}
        matrices = [each for name, each in named.items() if name.endswith("weight")]
        vectors = [each for each in layer.parameters() if all(each is not matrix for matrix in matrices)]
        buckets = [buffer.bucket for buffer in trainer.optimizer.buffers]
        held = [each.weight if each.numbers is None else each.numbers for each in buckets]
        left = sum(each.untyped_storage().nbytes() for each in held)
        calls = {call: count for call, count in by_bytes(counted.calls).items() if call[0] == "dp"}
    planned = RankPlan(config, topology, None, dp).run.gathered_in_8_bits(0)
    assert planned == sum(each.numel() for each in matrices)
    sizes = [gathered_gemm_of(each).scale_shape(each.shape) for each in matrices]
    return Counter(calls), padded(matrices, dp), padded(vectors, dp), left, sum(map(math.prod, sizes))


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "delayed"])
def test_matrices_in_8_bits_are_half_the_bytes(recipe: Fp8Recipe) -> None:
    config = config_of(2, replace(MODEL, params_dtype="bf16"))
    in_8_bits = {"fp8_format": "hybrid", "emulate": True, "fp8_param_gather": True}
    config = replace(config, training=replace(config.training, **in_8_bits, fp8_recipe=recipe))
    for calls, matrices, vectors, left, count in run_ranks(traffic_in_8_bits, config.mesh, 2, config):
        assert calls["dp", "all-gather", matrices] == 2 * LAYERS * MICROBATCHES
        assert calls["dp", "all-gather", vectors * 2] == 2 * LAYERS * MICROBATCHES
        assert calls["dp", "all-gather", matrices * 2] == 0
        assert calls["dp", "all-reduce", 4 * count] == LAYERS  # what sets the scales, once an iteration
        assert left == 0


def traffic_of_updates(topology: Topology, config: Config) -> tuple[Counter, int, int, int]:
    """All-gathers of a step, sizes of the matrices of all layers and of the rest, bytes after the step."""
    with trainer_of(topology, config) as trainer:
        trainer.step()
        with Traffic(topology) as counted:
            trainer.step()
        chunk, dp = trainer.chunks[0], topology.dp.size
        of_layers = [pair for layer in chunk.layers.values() for pair in layer.named_parameters()]
        matrices = [each for name, each in of_layers if name.endswith("weight") and "norm" not in name]
        rest = [each for each in chunk.parameters() if all(each is not matrix for matrix in matrices)]
        left = sum(each.untyped_storage().nbytes() for each in matrices)
        buckets = [buffer.bucket for buffer in trainer.optimizer.buffers]
        left += sum(each.numbers.untyped_storage().nbytes() for each in buckets if each.numbers is not None)
        calls = {call: count for call, count in by_bytes(counted.calls).items() if call[1] == "all-gather"}
    return Counter(calls), padded(matrices, dp), padded(rest, dp), left


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_updated_matrices_travel_once_in_8_bits(zero_stage: int) -> None:
    config = config_of(2, replace(MODEL, params_dtype="bf16"))
    in_8_bits = {"fp8_format": "hybrid", "emulate": True, "fp8_param_gather": True}
    config = replace(
        config,
        training=replace(config.training, **in_8_bits),
        parallel=replace(config.parallel, zero_stage=zero_stage, ddp_bucket_size=10**9),
    )
    for calls, matrices, rest, left in run_ranks(traffic_of_updates, config.mesh, 2, config):
        assert calls.pop(("dp", "all-gather", matrices)) == 1
        assert sum(size * count for (_, _, size), count in calls.items()) == pytest.approx(2 * rest, rel=0.05)
        assert left == 0


@pytest.mark.parametrize(("messages", "gradient"), [(None, 4), ("bf16", 2)])
def test_groups_all_reduce_their_shards_once_an_iteration(messages, gradient) -> None:
    config = config_of(4, grad_communication_dtype=messages, data_parallel_shard_degree=2)
    for calls, _, layer, rest in run_ranks(traffic, config.parallel.mesh, 4, config):
        del calls["world", "all-reduce", 8]  # the norm
        del calls["dp", "all-reduce", 8]  # the loss
        assert calls == {
            ("dp_shard", "all-gather", layer * 4): 2 * LAYERS * MICROBATCHES,
            ("dp_shard", "reduce-scatter", layer * gradient): LAYERS * MICROBATCHES,
            ("dp_replicate", "all-reduce", layer * gradient // 2): LAYERS,
            **{("dp_shard", "all-gather", size * 4): MICROBATCHES for size in rest},
            **{("dp_shard", "reduce-scatter", size * gradient): MICROBATCHES for size in rest},
            **{("dp_replicate", "all-reduce", size * gradient // 2): 1 for size in rest},
        }


class Piece(NamedTuple):
    """The padded sizes of a chunk's buckets: of its layers, and of the rest."""

    layers: list[int]
    rest: list[int]


def pieces(trainer: Trainer, *, splits: bool) -> list[Piece]:
    """A zero bubble has the matrices in buckets of their own, and a tied embedding always has one."""

    def sizes(parameters: Iterable[nn.Parameter], tied: nn.Parameter | None) -> list[int]:
        parts: dict[tuple[bool, bool], list[nn.Parameter]] = {}
        for each in parameters:
            parts.setdefault((each is tied, splits and each.dim() > 1), []).append(each)
        return [padded(part, trainer.topology.dp.size) for part in parts.values()]

    found = []
    for chunk in trainer.chunks:
        layers = list(chunk.layers.values())
        in_layers = {parameter for layer in layers for parameter in layer.parameters()}
        rest = [parameter for parameter in chunk.parameters() if parameter not in in_layers]
        of_layers = [size for layer in layers for size in sizes(layer.parameters(), None)]
        found.append(Piece(of_layers, sizes(rest, chunk.tied_weight)))
    return found


def pipeline_traffic(topology: Topology, config: Config) -> tuple[Counter, list[Piece]]:
    with trainer_of(topology, config) as trainer:
        trainer.step()
        with Traffic(topology) as counted:
            trainer.step()
        calls = by_bytes(counted.calls)
        splits = config.parallel.schedule.startswith("zb")
        return Counter({call: count for call, count in calls.items() if call[0] == "dp"}), pieces(
            trainer, splits=splits
        )


def expected_traffic(pieces: list[Piece], number: int, *, keeps: bool) -> Counter:
    """In fp32: all-gathers once an iteration or twice a microbatch, reduce-scatters in every microbatch."""
    expected: Counter = Counter()
    for piece in pieces:
        for size in piece.layers:
            expected["dp", "all-gather", 4 * size] += 1 if keeps else 2 * number
            expected["dp", "reduce-scatter", 4 * size] += number
        for size in piece.rest:
            expected["dp", "all-gather", 4 * size] += 1
            expected["dp", "reduce-scatter", 4 * size] += number
    return expected


@pytest.mark.parametrize("choice", ["always", "never"])
@pytest.mark.parametrize(
    "schedule", [pytest.param("gpipe", marks=pytest.mark.slow), "1f1b", "interleaved", "zb-h1"]
)
def test_traffic_in_a_pipeline(schedule: str, choice: str) -> None:
    """A stage has two layers or more, also one with layers alone; nothing is gathered that is not used."""
    config = config_of(
        2,
        replace(MODEL, num_layers=8 if schedule == "interleaved" else 4),
        batch=2 * MICROBATCHES,
        pipeline_model_parallel_size=2,
        pipeline_schedule=schedule,
        fsdp_reshard_after_forward=choice,
    )
    for calls, held in run_ranks(pipeline_traffic, config.parallel.mesh, 4, config):
        of_loss = {call: count for call, count in calls.items() if call[1] == "all-reduce"}
        assert set(of_loss) == {("dp", "all-reduce", 8)}
        assert calls - Counter(of_loss) == expected_traffic(held, MICROBATCHES, keeps=choice == "never")


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_kept_weights_train_bitwise_alike(schedule: str) -> None:
    base = config_of(
        2,
        replace(MODEL, num_layers=4, hidden_dropout=0.1),
        pipeline_model_parallel_size=2,
        pipeline_schedule=schedule,
        batch=2 * MICROBATCHES,
    )
    runs = [
        record_run(replace(base, parallel=replace(base.parallel, fsdp_reshard_after_forward=choice)), 2, 4)
        for choice in ("always", "never")
    ]
    assert runs[0].losses == runs[1].losses
    assert all(runs[0].weights[name].equal(weight) for name, weight in runs[1].weights.items())


def kept(topology: Topology, config: Config) -> dict[str, list[bool]]:
    """Return whether a trainer keeps weights by each choice, without a plan and with one."""
    found = {}
    for choice in ("always", "never", "default"):
        chosen = replace(config, parallel=replace(config.parallel, fsdp_reshard_after_forward=choice))
        plans = None, RankPlan(chosen, topology).weight_gathering()
        trainers = [start_trainer(chosen, topology, gathering=plan) for plan in plans]
        found[choice] = [trainer.optimizer.gatherer.keeps_layers for trainer in trainers]
    return found


def test_only_a_plan_keeps_weights_by_default() -> None:
    config = config_of(2, replace(MODEL, num_layers=2), pipeline_model_parallel_size=2)
    expected = {"always": [False, False], "never": [True, True], "default": [False, True]}
    assert run_ranks(kept, config.parallel.mesh, 4, config) == [expected] * 4


def weights_in_use(topology: Topology, config: Config) -> tuple[list[int], int]:
    """Layers of this rank that are whole at each action's end, and after the step."""
    with trainer_of(topology, config) as trainer:
        blocks = [block for chunk in trainer.chunks for block in chunk.layers.values()]
        seen: list[int] = []

        def count() -> int:
            return sum(is_full(block) for block in blocks)

        class Look:
            def begins(self, what: object) -> None:
                pass

            def ends(self, what: object) -> None:
                if isinstance(what, Action):
                    seen.append(count())

        with observing(topology.observers, Look()):
            trainer.step()
            after_step = count()
            trainer.evaluate(trainer.datasets.train, 0)
            trainer.step()
        return seen, after_step


@pytest.mark.parametrize(("choice", "num_whole"), [("always", 0), ("never", 2)])
def test_layers_are_whole_as_long_as_it_is_chosen(choice: str, num_whole: int) -> None:
    config = config_of(
        2,
        replace(MODEL, num_layers=4),
        batch=2 * MICROBATCHES,
        pipeline_model_parallel_size=2,
        fsdp_reshard_after_forward=choice,
    )
    config = replace(config, training=replace(config.training, eval_iters=1))
    for seen, after_step in run_ranks(weights_in_use, config.parallel.mesh, 4, config):
        assert set(seen) == {num_whole}
        assert after_step == 0


@pytest.mark.parametrize("hidden_size", [20, 4], ids=["uneven rows", "a rank without rows"])
def test_rows_need_not_divide(hidden_size: int) -> None:
    """Three ranks have 7, 7 and 6 of 20 rows, and 2, 2 and none of 4."""
    model = replace(MODEL, num_layers=2, hidden_size=hidden_size, num_attention_heads=2, params_dtype="fp64")
    run = record_run(config_of(3, model, batch=6), 2, 3)
    one = config_of(1, model, batch=6)
    reference = record_run(replace(one, training=replace(one.training, micro_batch_size=2)), 2, 1)
    assert not compare(run, reference).excesses(TOLERANCES["fp64"])


def figures(topology: Topology, config: Config) -> tuple[float, int, list[str], list[str]]:
    """Norm and zeros of a step, and which gradients are bad and are reported, one on the last rank."""
    with trainer_of(topology, config) as trainer:
        trainer.step()
        norm, zeros = trainer.optimizer.params_norm(), trainer.optimizer.num_zeros()
        spoilt = []
        if topology.dp.is_last:
            name, gradient = next(pair for pair in trainer.optimizer._named_gradients() if pair[1].numel())
            gradient[0] = torch.nan
            spoilt.append(name)
        return norm, zeros, spoilt, trainer.optimizer.bad_gradients()


@pytest.mark.parametrize(("dp", "shard"), [(3, None), (4, 2)])
def test_figures_are_those_of_whole_weights(dp: int, shard: int | None) -> None:
    model = replace(
        MODEL, max_position_embeddings=24, hidden_size=20, add_bias_linear=False, params_dtype="fp64"
    )
    config, one = config_of(dp, model, dp, data_parallel_shard_degree=shard), config_of(1, model, dp)
    ((norm, zeros, spoilt, bad),) = run_ranks(figures, ParallelConfig().mesh, 1, one)
    assert zeros >= 8 * 20  # positions that no sample has
    assert bad == spoilt
    assert len(bad) == 1
    told = run_ranks(figures, config.parallel.mesh, dp, config)
    for rank_norm, rank_zeros, spoilt, bad in told:
        assert bad == spoilt
        assert rank_norm == pytest.approx(norm, rel=1e-12)
        assert rank_zeros == zeros
    assert [len(names) for *_, names in told] == [*[0] * (dp - 1), 1]


def meet_overflow(topology: Topology, config: Config) -> list[tuple[bool, float]]:
    """In fp16, one rank's loss is scaled beyond its range in the second of three iterations."""
    with trainer_of(topology, config) as trainer:
        told = []
        for iteration in range(3):
            trainer.optimizer.begin(1)
            scale = trainer.optimizer.scaler.scale
            if iteration == 1 and topology.dp.is_last:
                scale *= 1e30
            (model,) = trainer.chunks
            tokens = torch.arange(S)[None]
            before = trainer.optimizer.weight("layers.0.mlp.up.weight")
            microbatch = Microbatch(tokens, tokens, torch.zeros(1, dtype=torch.int64))
            (model(microbatch, None) * scale).backward()
            norm = trainer.optimizer.finish_gradients()
            trainer.optimizer.step(1e-2, 0.1, norm)
            trainer.optimizer.scaler.update(overflowed=not norm.isfinite())
            updated = not torch.equal(before, trainer.optimizer.weight("layers.0.mlp.up.weight"))
            told.append((updated, trainer.optimizer.scaler.scale))
        return told


def test_an_overflow_on_one_rank_brings_the_scale_down_on_all() -> None:
    config = config_of(2, replace(MODEL, params_dtype="fp16"))
    adam = OptimizerConfig(lr=1e-2, initial_loss_scale=64.0, hysteresis=1, min_loss_scale=1.0)
    config = replace(config, optimizer=adam)
    expected = [(True, 64.0), (False, 32.0), (True, 32.0)]
    assert run_ranks(meet_overflow, config.parallel.mesh, 2, config) == [expected] * 2
