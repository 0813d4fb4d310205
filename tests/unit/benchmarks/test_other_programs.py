"""Plans of other programs: what each term of `OtherProgram` changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from benchmarks.other_programs import (
    PROGRAMS,
    OneAdapterCluster,
    OtherPlan,
    OtherProgram,
    OtherRun,
    in_dtype,
    main,
    other_run,
    request_of,
    time_of,
)
from megalite.config import Config, ModelConfig, ParallelConfig, TrainingConfig
from megalite.config.model.model_config import padded_vocab_size
from megalite.plan.communication import Cluster, Group
from megalite.plan.estimate import RunPlan
from megalite.plan.iteration_time import time_iteration
from megalite.plan.kernel_time import attention_seconds
from megalite.plan.layer_time import ep_seconds, model_work
from megalite.plan.plan_request import read_request
from megalite.plan.planned_run import Kernels, PlannedRun
from megalite.plan.rank_memory import rank_memories
from megalite.utils.errors import UserError
from megalite.utils.hardware.gpus import GPUS
from tests.unit.plan.test_layer_time_exchange import GPU, MODEL, config_of

CLUSTER = Cluster(GPUS["a100-80"], 64, 8, 300.0, 25.0)
DENSE = ModelConfig(
    num_layers=16, hidden_size=2048, num_attention_heads=16, vocab_size=51200, params_dtype="bf16"
)
SMALL = (
    "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --padded-vocab-size 51200 "
    "--global-batch-size 64 --gpu a100-80 --world-size 16 --bf16"
)
FP32_LOSS = OtherProgram(logit_copy_bytes=4)


def run_of(
    program: OtherProgram, cluster: Cluster = CLUSTER, model: ModelConfig = DENSE, **parallel: Any
) -> OtherRun:
    config = Config(
        model=model,
        parallel=ParallelConfig(**parallel),
        training=TrainingConfig(train_iters=1, global_batch_size=256),
    )
    return other_run(program, config, cluster)


def test_a_ring_over_one_adapter_has_its_rate() -> None:
    run = run_of(OtherProgram(one_adapter=True))
    assert isinstance(run.cluster, OneAdapterCluster)
    whole, one = (Group(cluster, 64, 1) for cluster in (CLUSTER, run.cluster))
    assert whole.bytes_per_second == 8 * one.bytes_per_second
    inside = (Group(cluster, 8, 1).bytes_per_second for cluster in (CLUSTER, run.cluster))
    assert len(set(inside)) == 1


def test_messages_between_stages_are_split_over_tp() -> None:
    split, whole = OtherProgram(splits_messages=True), OtherProgram()
    layout = {"tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 4}
    parts, full = (time_iteration(run_of(each, **layout)) for each in (split, whole))
    assert parts.work.pp < full.work.pp / 4
    assert parts.work.tp > full.work.tp  # they are gathered again
    del layout["pipeline_model_parallel_size"]
    one = {time_iteration(run_of(each, **layout)).seconds for each in (split, whole)}
    assert len(one) == 1


def test_collectives_and_sums_of_gradients() -> None:
    """A program overlaps and fuses only what its flags say."""
    layout = {"tensor_model_parallel_size": 8}
    old, new = (
        model_work(run_of(OtherProgram(tp_hidden_share=share), **layout)).layers[0] for share in (0.0, 0.5)
    )
    assert old.backward_input.tp == pytest.approx(2 * new.backward_input.tp)
    assert run_of(OtherProgram(), **layout).tp_comm_chunks == 1
    fused, plain = (
        model_work(run_of(OtherProgram(fused_accumulation=is_fused))).layers[0].backward_weight.memory_bound
        for is_fused in (True, False)
    )
    assert fused < 0.01 * plain
    assert not run_of(OtherProgram()).gathers_under_forward
    assert run_of(OtherProgram(), overlap_param_gather=True).gathers_under_forward


def test_sums_of_16_bits_take_less_time_and_memory() -> None:
    half, single = (run_of(OtherProgram(gradient_bytes=size), zero_stage=1) for size in (2, 4))
    size = sum(weight.size for weight in half.units.embedding.weights)
    seconds = [model_work(run).embedding.backward_weight.memory_bound for run in (half, single)]
    assert seconds[0] == pytest.approx((2 + 2 + 2) * size / (2039e9 * 0.8))
    assert seconds[1] == pytest.approx((2 + 4 + 4) * size / (2039e9 * 0.8))
    gradients = [rank_memories(run)[0].gradients for run in (half, single)]
    assert gradients[1] == 2 * gradients[0]


def test_slices_for_every_replica_cost_the_host() -> None:
    whole, slices = (run_of(OtherProgram(copies_slices=copies), zero_stage=1) for copies in (False, True))
    tensors = 12 * DENSE.num_layers  # weights and biases of four linear layers and two norms
    more = time_of(slices).seconds - time_of(whole).seconds
    assert more == pytest.approx(tensors * 64 * 14e-6)
    assert time_of(slices).work.launch - time_of(whole).work.launch == pytest.approx(more)


def test_a_loss_in_fp32_replaces_megalites_own() -> None:
    fused, plain = (run_of(each).units.head for each in (OtherProgram(), FP32_LOSS))
    logits = fused.forward.gemms[0].m * fused.forward.gemms[0].n
    assert plain.forward.kernel_bytes - fused.forward.kernel_bytes == (14 - 2) * logits
    assert plain.backward.kernel_bytes - fused.backward.kernel_bytes == (22 - 4) * logits


def test_the_loss_holds_copies_of_the_logits() -> None:
    logits = [rank_memories(run_of(OtherProgram(logit_copy_bytes=size)))[0].logits for size in (0, 4, 8)]
    elements = DENSE.seq_length * padded_vocab_size(DENSE, 1)
    assert [size - logits[0] for size in logits] == [0, 4 * elements, 8 * elements]


@pytest.mark.parametrize(("dtype", "dp", "expected"), [("fp16", 2, 6), ("bf16", 2, 10), ("bf16", 1, 6)])
def test_buckets_are_no_larger_than_the_gradients(dtype: str, dp: int, expected: int) -> None:
    """Check DeepSpeed's three buckets, and one more of fp32 sums with weights in bf16."""
    model = replace(DENSE, num_layers=2, hidden_size=512, params_dtype=dtype)
    program, cluster = in_dtype(PROGRAMS["megatron-deepspeed"], dtype), replace(CLUSTER, world_size=dp)
    run = run_of(program, cluster, model)
    without = run_of(replace(program, buffer_bytes=0.0, sum_buffer_bytes=0.0), cluster, model)
    workspace, least = (rank_memories(each)[0].workspace for each in (run, without))
    assert workspace - least == pytest.approx(expected * run.ranks[0].size)


def expert_run(program: str = "megatron-core-deepep", layout: str = "dp4ep4", topk: int = 3) -> OtherRun:
    """Return two nodes of two ranks, which divide 8 experts."""
    config = config_of(layout, model=replace(MODEL, moe_router_topk=topk))[0]
    return other_run(PROGRAMS[program], config, Cluster(GPU, 4, 2, 450.0, 50.0))


@pytest.mark.parametrize("topk", [1, 3, 6])
@pytest.mark.parametrize("num_parts", [1, 2, 4])
def test_the_mean_over_all_choices_of_experts(num_parts: int, topk: int) -> None:
    choices = list(combinations(range(8), topk))
    holders = [len({expert * num_parts // 8 for expert in choice}) for choice in choices]
    assert expert_run(topk=topk).num_holders(num_parts) == pytest.approx(sum(holders) / len(choices))


def test_consecutive_experts_have_few_holders() -> None:
    run = expert_run("automodel-benchmark", topk=4)
    assert [run.num_holders(parts) for parts in (1, 2, 4, 8)] == [1.0, 1.0, 2.0, 4.0]


def test_bytes_inside_the_node_and_over_the_network() -> None:
    """A token of k rows goes to half of its nodes over the network, and half of its ranks over NVLink."""
    run, rows = expert_run("automodel-benchmark", topk=4), 4e9
    group = Group(run.cluster, 4, 1)
    assert run.expert_bytes(group, rows) == (1e9 * 2 / 2, 1e9 * 1 / 2)
    assert group.exchange_seconds(*run.expert_bytes(group, rows)) < group.all_to_all_seconds(rows) / 3


@pytest.mark.parametrize(("layout", "is_shorter"), [("dp4ep4", True), ("tp2dp2ep2etp2+sp", False)])
def test_a_rank_of_a_part_of_an_expert_gets_all_rows(layout: str, is_shorter: bool) -> None:
    run, other = expert_run(layout=layout), expert_run("megatron-core", layout)
    phase = run.units.layers[1].forward
    assert (ep_seconds(run, phase) < ep_seconds(other, phase)) == is_shorter
    assert ep_seconds(other, phase) > 0.0


def test_context_parallel_messages_are_hidden() -> None:
    run = run_of(OtherProgram(kernels=Kernels("cudnn")), context_parallel_size=8)
    (call,) = run.units.layers[0].forward.attention
    assert (call.queries, call.keys, call.exchange) == (128, 1024, None)
    assert time_iteration(run).work.cp == 0.0 < time_iteration(PlannedRun(run.config, CLUSTER)).work.cp
    alone = run_of(run.program)
    (whole,) = alone.units.layers[0].forward.attention
    assert attention_seconds(run, call) == pytest.approx(attention_seconds(alone, whole) / 8)


def plan(program: str | None, flags: str) -> RunPlan:
    if program is None:
        return RunPlan(read_request(flags.split()).planned_run())
    return request_of(PROGRAMS[program], flags.split())[1]


def _kinds(plan: RunPlan) -> Mapping[str, float]:
    return plan.memories[0]._asdict()


def test_scores_in_memory_cost_memory() -> None:
    """Check that Megatron-LM of 2021 saves the scores for backward; megalite recomputes them in blocks."""
    theirs, ours = plan("megatron-2021", SMALL), plan(None, f"{SMALL} --attention-dropout 0.1")
    assert _kinds(theirs)["activations"] > 1.2 * _kinds(ours)["activations"]


def test_deepspeed_has_two_gradients_and_buffers() -> None:
    own, other = plan(None, f"{SMALL} --tp 2 --pp 2"), plan("megatron-deepspeed", f"{SMALL} --tp 2 --pp 2")
    assert _kinds(other)["gradients"] == pytest.approx(6 / 4 * _kinds(own)["gradients"])
    assert own.memory_bytes + 3e9 < other.memory_bytes


def test_the_command_prints_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    main(["megatron-deepspeed", *SMALL.split(), "--tp", "2"])
    text = capsys.readouterr().out
    _, found = request_of(PROGRAMS["megatron-deepspeed"], [*SMALL.split(), "--tp", "2"])
    assert isinstance(found, OtherPlan)
    assert f"{found.time.seconds:.3f} s" in text and "torchrun" not in text
    with pytest.raises(UserError, match="'megatron' is none of megatron-2021, "):
        main(["megatron", *SMALL.split()])
