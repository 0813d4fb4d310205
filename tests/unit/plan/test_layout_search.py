"""A search plans each layout as if it planned no other, and offloads activations where nothing else fits."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from megalite.config import ParallelConfig
from megalite.plan import layout_search
from megalite.plan.estimate import RunPlan
from megalite.plan.iteration_time import least_layer_seconds, least_seconds
from megalite.plan.layout_search import fastest, search
from megalite.plan.plan_report import answer
from megalite.plan.plan_request import read_request
from megalite.plan.planned_run import first_problem
from megalite.plan.rank_memory import host_activations, stage_bytes
from megalite.plan.units import units_of
from megalite.utils.errors import Problem

NUM_LAYERS = 48
LINE = (
    f"--num-layers {NUM_LAYERS} --hidden-size 1024 --num-attention-heads 16 --padded-vocab-size 1024 --bf16 "
    "--attention-dropout 0 --gpu a100-40 --world-size 2 --global-batch-size 4 --pp 1 --cp 1 "
    "--micro-batch-size 1 --recompute-granularity full --search --top 3"
)
LONG, SHORT = "--seq-length 262144", "--seq-length 131072"
"""With samples of the first length, the inputs of all layers do not fit beside the optimizer state."""


def layers_on_host(flags: str) -> set[int]:
    """Return the numbers of offloaded layers of the layouts that fit."""
    found = search(read_request(f"{LINE} {flags}".split()))
    return {plan.run.config.recompute.cpu_offload_activations for plan in found.fitting}


RACKS = (
    "--gpu gb200 --world-size 128 --search --num-layers 8 --hidden-size 1024 --padded-vocab-size 1024 --bf16 "
    "--global-batch-size 256"
)


def test_all_layers_are_offloaded_where_nothing_else_fits() -> None:
    assert layers_on_host(f"{LONG} --tp 1") == {NUM_LAYERS}
    assert layers_on_host(f"{SHORT} --tp 1") == {0}
    assert layers_on_host(f"{LONG} --tp 1 --cpu-offload-activations 0") == set()
    assert layers_on_host(f"{LONG} --tp 2 --sequence-parallel") == {0}
    assert layers_on_host(LONG) == {0}  # a layout of tp 2 is enough


def test_what_is_offloaded_fits_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    (plan, *_) = search(read_request(f"{LINE} {LONG} --tp 1".split())).fitting
    needed = 2 * stage_bytes(plan.run, (0,) * NUM_LAYERS) / 1e9  # of two GPUs
    assert needed == pytest.approx(2 * NUM_LAYERS * 2 * 262144 * 1024 / 1e9)
    for gigabytes, numbers in ((needed * 1.01, {NUM_LAYERS}), (needed * 0.99, set())):
        monkeypatch.setattr(layout_search, "NODE_MEMORY_GB", gigabytes)
        assert layers_on_host(f"{LONG} --tp 1") == numbers


def test_the_text_says_so_and_its_command_offloads() -> None:
    text = "\n".join(answer(f"{LINE} {LONG} --tp 1".split()))
    assert "note: no layout fits with all activations on the GPU: these keep them in host memory" in text
    assert "optimizer state" not in text
    assert f"--cpu-offload-activations {NUM_LAYERS}" in text.splitlines()[-1]


@pytest.mark.parametrize(
    "flags",
    [
        "--untie-embeddings-and-output-weights --pp 2 --micro-batch-size 1",
        "--cpu-offload-activations 1 --tp-comm-overlap-chunks 2 --sequence-parallel --tp 2",
        "--micro-batch-size 1 --optimizer-cpu-offload",
    ],
)
def test_layouts_share_only_what_is_the_same_in_each(flags: str) -> None:
    model = (
        "--num-layers 6 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --padded-vocab-size 1024"
    )
    cluster = "--gpu a100-40 --world-size 8 --gpus-per-node 4 --global-batch-size 16"
    found = search(read_request(f"{model} --seq-length 512 {cluster} {flags} --bf16 --search".split()))
    assert len(found.fitting) > 50
    for plan in found.fitting:
        units_of.cache_clear()
        alone = RunPlan(replace(plan.run))
        assert (plan.memories, plan.time) == (alone.memories, alone.time)
        assert host_activations(plan.run) == host_activations(alone.run)


UNEVEN = (
    "--num-layers 6 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --padded-vocab-size 1024 "
    "--attention-dropout 0 --bf16 --gpu a100-40 --world-size 8 --gpus-per-node 4 --global-batch-size 12 "
    "--tp 1 --recompute-granularity full --search"
)
"""Some layouts have stages that do not divide the layers, or replicas that do not divide the batch."""


@pytest.mark.parametrize(
    ("line", "field"),
    [
        (UNEVEN, "global_batch_size"),
        (f"{UNEVEN} --data-parallel-shard-degree 2", "zero_stage"),
        (
            f"{UNEVEN.replace('--tp 1', '--pp 1')} --num-attention-heads 6 --hidden-size 384",
            "num_attention_heads",
        ),
    ],
)
def test_layouts_are_rejected_by_the_rules_of_training(line: str, field: str) -> None:
    request = read_request(line.split())
    found, problems = search(request), list[Problem | None]()
    for layouts in layout_search._layouts(request, request.cluster):
        for sharding in layouts.shardings:
            config = replace(layouts.config, parallel=sharding.run.config.parallel)
            problems.append(first_problem(config, request.cluster))
    rejected, texts = Counter[tuple[str, ...]](), dict[tuple[str, ...], str]()
    for problem in filter(None, problems):
        rejected[problem.fields] += 1
        texts.setdefault(problem.fields, problem.text)
    assert found.rejected == {texts[fields]: count for fields, count in rejected.items()}
    assert len(found.fitting) + sum(found.too_large.values()) == problems.count(None) > 0
    assert any(field in fields for fields in rejected)


def test_the_fastest_are_those_of_all_simulated() -> None:
    plans = search(read_request(f"{UNEVEN} --pp 2".split())).fitting
    in_order = sorted(plans, key=lambda plan: plan.time.seconds)
    found = fastest([RunPlan(plan.run) for plan in plans], 5)
    assert [plan.time.seconds for plan in found] == [plan.time.seconds for plan in in_order[:5]]
    for plan in plans:
        assert least_layer_seconds(plan.run) <= least_seconds(plan.run) <= plan.time.seconds


CLUSTER = "--gpu h100-80 --world-size 8 --gpus-per-node 4 --global-batch-size 8"
SMALL = (
    f"--num-layers 2 --hidden-size 512 --num-attention-heads 8 --padded-vocab-size 1024 --bf16 {CLUSTER} "
    "--position-embedding-type rope --disable-bias-linear --hidden-dropout 0 --zero-stage 1 --pp 1 "
    "--recompute-granularity full --search"
)


def layouts(flags: str) -> list[ParallelConfig]:
    """Return the layouts that fit."""
    found = search(read_request(f"{SMALL} {flags}".split()))
    return [plan.run.config.parallel for plan in found.fitting]


def test_context_parallel_ranks_have_enough_tokens() -> None:
    found = layouts("--seq-length 32768 --tp 1")
    assert {each.cp for each in found} == {1, 2, 4}
    assert {each.cp_comm_type for each in found if each.cp > 1} == {"all_gather", "a2a", "p2p", "a2a+p2p"}
    of_levels = [each.hierarchical_context_parallel_sizes for each in found if "+" in each.cp_comm_type]
    assert set(of_levels) == {(2, 2)}
    assert {each.cp for each in layouts("--seq-length 8192 --tp 1")} == {1}
    assert {each.cp for each in layouts("--seq-length 4096 --tp 1 --cp 8")} == {8}


def test_experts_are_divided_among_half_a_node_and_more() -> None:
    experts = "--num-experts 16 --moe-ffn-hidden-size 256 --swiglu --seq-length 2048"
    found = layouts(experts)
    assert {(each.tp, each.ep, each.etp) for each in found} == {
        *((1, ep, 1) for ep in (1, 2, 4, 8)),
        *((2, 1, 2), (4, 1, 4)),
        *((tp, ep, 1) for tp in (2, 4) for ep in (2, 4, 8)),
    }
    assert all(each.sequence_parallel for each in found if each.tp > 1 and each.ep > 1)
    assert {each.ep for each in layouts(f"{experts} --tp 1 --ep 4")} == {4}


def test_a_rack_has_wider_groups_than_its_nodes() -> None:
    experts = (
        "--num-experts 128 --moe-ffn-hidden-size 256 --swiglu --seq-length 2048 --num-attention-heads 16"
    )
    racks = read_request(f"{RACKS} {experts}".split())
    sizes = list(layout_search._axis_sizes(racks, racks.cluster))
    assert {each["tensor_model_parallel_size"] for each in sizes} == {1, 2, 4, 8}
    assert {each["expert_model_parallel_size"] for each in sizes} == {1, 2, 4, 8, 16, 32, 64}
    trays = replace(racks.cluster, gpu=replace(racks.cluster.gpu, nvlink_gpus=0))
    sizes = list(layout_search._axis_sizes(racks, trays))
    assert {each["tensor_model_parallel_size"] for each in sizes} == {1, 2, 4}
    assert max(each["expert_model_parallel_size"] for each in sizes) == 32


def test_a_loss_of_a_microbatch_keeps_its_size() -> None:
    """Another size would train another run."""
    line = f"{SMALL} --num-experts 8 --moe-ffn-hidden-size 64 --swiglu --seq-length 2048 --dp 2"
    for kind, sizes in (("seq_aux_loss", {1, 2, 4}), ("aux_loss", {1})):
        found = search(read_request(f"{line} --moe-router-load-balancing-type {kind}".split()))
        assert {plan.run.config.training.micro_batch_size for plan in found.fitting} == sizes


def test_long_samples_are_cut_by_the_search_itself() -> None:
    run = "--preset llama3-8b --seq-length 131072 --bf16 --gpu h100 --world-size 64 --global-batch-size 64"
    fixed = "--pp 1 --tp 1 --recompute-granularity selective --recompute-modules layernorm mlp_act"
    lines = list(answer(f"{run} {fixed} --zero-stage 3 --search --top 1".split()))
    assert "cp8" in lines[2]
    command = " ".join(text.removesuffix("\\").strip() for text in lines)
    assert "--cp 8 --cp-comm-type a2a" in command
