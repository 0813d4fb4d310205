"""The terms of an iteration's time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megalite.config import Config, ModelConfig, ParallelConfig, RecomputeConfig, TrainingConfig
from megalite.pipeline.schedules import ActionKind
from megalite.plan.communication import CONTENTION, PROTOCOLS, Cluster, Group
from megalite.plan.iteration_time import (
    _stages,
    exchange_seconds,
    gradient_bytes,
    least_seconds,
    makespan,
    offload_work,
    replicas_of,
    sharing_of,
    time_iteration,
    time_step,
    zero3_communication,
)
from megalite.plan.kernel_time import alignment_rate, gemm_seconds
from megalite.plan.kernel_time import attention_seconds as seconds_of_call
from megalite.plan.layer_time import MicrobatchWork, WorkSeconds, model_work
from megalite.plan.plan_request import read_request
from megalite.plan.planned_run import Kernels, PlannedRun
from megalite.plan.rank_memory import stage_bytes
from megalite.plan.units import Sizes
from megalite.utils.hardware.gpus import GPUS

GPU = GPUS["a100-80"]
CLUSTER = Cluster(GPU, 64, 8, 300.0, 25.0)
MODEL = ModelConfig(
    num_layers=16, hidden_size=2048, num_attention_heads=16, vocab_size=51200, params_dtype="bf16"
)


def run_of(cluster: Cluster = CLUSTER, batch: int = 256, **parallel) -> PlannedRun:
    config = Config(
        model=MODEL,
        parallel=ParallelConfig(**parallel),
        training=TrainingConfig(train_iters=1, global_batch_size=batch),
    )
    return PlannedRun(config, cluster)


def with_kernels(run: PlannedRun, kernels: Kernels) -> PlannedRun:
    """Return the run as if its GPU ran these kernels."""
    run = replace(run)
    vars(run)["kernels"] = kernels
    return run


def attention_seconds(run: PlannedRun) -> tuple[float, float]:
    """Return the seconds of core attention in forward and backward of a layer."""
    layer = run.units.layers[0]
    forward, backward = (
        sum(seconds_of_call(run, call) for call in phase.attention)
        for phase in (layer.forward, layer.backward)
    )
    return forward, backward


def layer_work(run: PlannedRun) -> MicrobatchWork:
    return model_work(run).layers[0]


def test_large_products_come_near_the_gpus_rate() -> None:
    size = 16384
    rate = 2 * size**3 / gemm_seconds(GPU, size, size, size) / 1e12
    assert 0.9 * GPU.product_share * GPU.tflops < rate <= GPU.product_share * GPU.tflops


def test_one_tile_more_than_a_wave_costs_a_wave() -> None:
    rows = 128 * GPU.num_sms
    one, more = (gemm_seconds(GPU, m, 256, 8192) for m in (rows, rows + 128))
    assert more > 1.3 * one


def test_thin_products_are_bound_by_memory() -> None:
    moved = 2 * (8 * 8192 + 8192 * 8192 + 8 * 8192)
    assert gemm_seconds(GPU, 8, 8192, 8192) >= moved / (GPU.memory_gbps * 1e9)


def test_rows_that_start_anywhere_are_slow() -> None:
    assert alignment_rate(150) < alignment_rate(1800) < alignment_rate(1792) == 1.0


def test_rings_over_nodes_share_the_adapters() -> None:
    inside, rails, whole = (Group(CLUSTER, size, stride) for size, stride in ((8, 1), (8, 8), (64, 1)))
    assert inside.bytes_per_second > whole.bytes_per_second > rails.bytes_per_second
    assert whole.bytes_per_second == 8 * rails.bytes_per_second
    assert Group(CLUSTER, 1, 1).reduce_seconds(1e9) == 0.0
    assert inside.reduce_seconds(1e9) == pytest.approx(2 * inside.gather_seconds(1e9), rel=0.02)


@pytest.mark.parametrize(
    "parallel",
    [
        {"pipeline_model_parallel_size": 4},
        {"pipeline_model_parallel_size": 4, "pipeline_schedule": "gpipe"},
        {"pipeline_model_parallel_size": 4, "pipeline_schedule": "zb-h1"},
        {"pipeline_model_parallel_size": 4, "pipeline_schedule": "zb-v"},
        {"pipeline_model_parallel_size": 4, "pipeline_schedule": "dualpipev"},
        {"pipeline_model_parallel_size": 4, "num_virtual_stages_per_pipeline_rank": 2},
        {"pipeline_model_parallel_size": 8, "num_virtual_stages_per_pipeline_rank": 2},
    ],
)
def test_many_microbatches_cost_what_the_whole_simulation_says(parallel) -> None:
    run = run_of(replace(CLUSTER, world_size=8), batch=64, **parallel)
    stages = _stages(run)
    assert makespan(run, stages) == pytest.approx(makespan(run, stages, max_rounds=1000), rel=0.01)
    assert least_seconds(run) <= makespan(run, stages) * 1.001


def test_an_extrapolated_step_takes_at_least_the_work_of_the_busiest_rank() -> None:
    """The last microbatches that are simulated may cost less than those that are not."""
    flags = "--preset llama2-7b --gpu h100 --world-size 64 --global-batch-size 1024 --bf16 --zero-stage 1"
    run = read_request(f"{flags} --pp 2 --pipeline-schedule zb-v --micro-batch-size 2".split()).planned_run()
    whole = makespan(run, _stages(run), max_rounds=1000)
    assert makespan(run, _stages(run)) < least_seconds(run) <= whole * (1 + 1e-9)
    assert time_step(run).seconds == pytest.approx(whole)


def test_the_bubble_is_the_papers() -> None:
    run = run_of(replace(CLUSTER, world_size=4), batch=16, pipeline_model_parallel_size=4)
    alike = [{kind: work * 1.0 for kind, work in _stages(run)[1].items()}] * 4
    work = sum(each.seconds for each in alike[0].values()) * 16
    assert makespan(run, alike) / work - 1 == pytest.approx(3 / 16)


def test_choices_change_time_as_they_should() -> None:
    base = time_iteration(run_of()).seconds
    assert time_iteration(run_of(overlap_grad_reduce=False)).seconds > base
    assert time_iteration(run_of(replace(CLUSTER, network_gbps=2.0))).seconds > base
    assert time_iteration(run_of(zero_stage=3)).seconds > base
    assert time_iteration(run_of(tensor_model_parallel_size=8)).work.tp > 0
    written_out = with_kernels(run_of(), Kernels("unfused"))
    assert time_iteration(written_out).work.attention > time_iteration(run_of()).work.attention


def test_parts_and_bubble_make_up_the_iteration() -> None:
    time = time_iteration(run_of(pipeline_model_parallel_size=4, tensor_model_parallel_size=2))
    assert time.work.seconds + time.waiting == pytest.approx(time.seconds)
    assert 0 < time.bubble_fraction < 1


H100 = GPUS["h100-80"]
H100_CLUSTER = Cluster(H100, 512, 8, H100.node_gbps, H100.network_gbps)


def _bus_gbps(seconds: float, num_bytes: float, size: int, turns: int = 1) -> float:
    """Return the bus bandwidth as nccl-tests counts it."""
    return turns * num_bytes * (size - 1) / size / seconds / 1e9


@pytest.mark.parametrize(
    ("group", "measured"),
    [
        (Group(CLUSTER, 8, 1), 235),  # 8 A100, and 8 H200 in a ring: stas00/ml-engineering, network/README.md
        (Group(H100_CLUSTER, 8, 1), 366),
        (Group(H100_CLUSTER, 256, 1), 340),  # NVIDIA/nccl#1218
    ],
)
def test_all_reduce_has_the_measured_bandwidth(group: Group, measured: float) -> None:
    planned = _bus_gbps(group.reduce_seconds(2**32), 2**32, group.size, turns=2)
    assert planned == pytest.approx(measured, rel=0.15)


def test_small_messages_take_the_protocol_of_least_latency() -> None:
    """Compare with the formula of NCCL's src/graph/tuning.cc, computed by hand."""
    group = Group(H100_CLUSTER, 512, 1)
    assert (group.num_nodes, group.ranks_per_node) == (64, 8)
    low = 6.6e-6 + 448 * 1.0e-6 + 63 * 2.7e-6
    assert group.gather_seconds(1.0) == pytest.approx(low, rel=1e-3)
    simple = PROTOCOLS[-1]
    latency = 8.4e-6 + 448 * 3.4e-6 + 63 * 14e-6
    rate = 8 * 50e9 * H100.link_share * simple.bandwidth
    assert group.gather_seconds(1e11) == pytest.approx(latency + 1e11 * 511 / 512 / rate, rel=1e-3)
    assert group.reduce_seconds(1.0) < group.gather_seconds(1.0)  # a tree is not as deep as a ring is long
    assert group.gather_seconds(1e8, 10) > group.gather_seconds(1e8)


def test_two_nodes_sum_over_trees_at_twice_a_ring_s_rate() -> None:
    """Check that each byte is sent once in each direction; a ring over more nodes sends it twice."""
    two, four = (Group(H100_CLUSTER, size, 1).reduce_seconds(1e10) for size in (16, 32))
    assert 1.7 * two < four < 2.0 * two


@pytest.mark.parametrize(("length", "measured"), [(2048, 298), (4096, 319), (8192, 333)])
def test_fused_attention_has_the_measured_rate(length: int, measured: float) -> None:
    """Compare with FlashAttention-2's causal forward on an H100, heads of 128: Shah et al. 2024, figure 5."""
    run = run_of(H100_CLUSTER)
    config = with_model(run, seq_length=length, attention_backend="flash").config
    forward, backward = attention_seconds(replace(run, config=config))
    operations = 4 * MODEL.num_attention_heads * length**2 * MODEL.head_dim / 2
    assert operations / forward / 1e12 == pytest.approx(measured, rel=0.15)
    assert backward == 2.5 * forward


def test_short_samples_do_not_reach_the_rate_of_fused_attention() -> None:
    def rate(length: int) -> float:
        run = run_of(H100_CLUSTER)
        config = with_model(run, seq_length=length, attention_backend="flash").config
        return length**2 / attention_seconds(replace(run, config=config))[0]

    assert rate(512) / rate(16384) == pytest.approx(191 / 335, rel=0.15)  # as in figure 5


@pytest.mark.parametrize(
    ("world_size", "expected", "nearby"),
    [
        *((8, 8, 8), (64, 64, 64), (72, 72, 64), (76, 40, 8), (144, 72, 8), (148, 52, 4), (256, 64, 64)),
        *((384, 64, 64), (1024, 64, 64)),
    ],
)
def test_nvlink_reaches_the_ranks_of_a_rack(world_size: int, expected: int, nearby: int) -> None:
    """The racks are about as full; some groups of 64 of 144 ranks, or 16 of 76, straddle two of them."""
    gpu = GPUS["gb200"]
    cluster = Cluster(gpu, world_size, gpu.gpus_per_node, gpu.node_gbps, gpu.network_gbps)
    assert cluster.ranks_per_domain == expected
    size = min(64 if expected > 60 else 16, world_size)
    group, whole = Group(cluster, size, 1), Group(cluster, world_size, 1)
    assert group.ranks_per_node == nearby and group.is_inside_node == (size == nearby)
    bandwidth = min(900.0, gpu.network_gbps * (nearby if size > nearby else 1000))
    assert group.bytes_per_second == pytest.approx(1e9 * bandwidth * gpu.link_share)
    assert whole.is_inside_node == (world_size <= 72)
    tray = replace(cluster, gpu=replace(gpu, nvlink_gpus=4))
    assert tray.ranks_per_domain == 4 and not Group(tray, 8, 1).is_inside_node


def test_cudnn_is_faster_on_hopper_alone() -> None:
    """An MI300X has a higher peak, but no cuDNN."""
    amd = replace(H100_CLUSTER, gpu=GPUS["mi300x"])
    for cluster, gain in ((CLUSTER, 1.0), (H100_CLUSTER, 1.6), (amd, 1.0)):
        run = run_of(cluster)
        flash, cudnn = (with_kernels(run, Kernels(name)) for name in ("flash", "cudnn"))
        assert attention_seconds(flash)[0] == pytest.approx(gain * attention_seconds(cudnn)[0])


def with_model(run: PlannedRun, **fields: object) -> PlannedRun:
    """Megalite's own run of a changed model."""
    model = replace(MODEL, max_position_embeddings=None, **{"attention_dropout": 0.0, **fields})
    return replace(run, config=replace(run.config, model=model))


def test_megalite_runs_cudnn_on_hopper() -> None:
    """As `_CUDNN_FIRST` of the attention backends has it, unless a backend without it is requested."""
    run = run_of(H100_CLUSTER)
    flash, cudnn = (attention_seconds(with_model(run, attention_backend=name)) for name in ("flash", "auto"))
    assert flash == pytest.approx([1.6 * seconds for seconds in cudnn])


def test_attention_with_dropout_is_the_kernel_with_dropout() -> None:
    """Two or three more GEMMs in backward than FlashAttention-2, and random numbers."""
    run = run_of(H100_CLUSTER)
    plain = attention_seconds(with_model(run, attention_backend="flash"))
    for backend in ("auto", "triton"):
        dropped = attention_seconds(with_model(run, attention_dropout=0.1, attention_backend=backend))
        forward, backward = dropped[0] - plain[0], dropped[1] - 3.5 * plain[0]
        assert backward == pytest.approx((30.9 + 24.2) / 23.0 * forward)
        assert 1.2 * plain[0] < dropped[0] < 2.5 * plain[0]
    without, longer = [
        attention_seconds(with_model(run, attention_dropout=p, attention_backend=name, kv_channels=256))
        for p, name in ((0.0, "flash"), (0.1, "auto"))
    ]
    assert longer[0] - without[0] == pytest.approx(23.5 / 23.0 * forward)
    # Eight GEMMs in backward: the gradients of values are a third kernel, which computes the scores too.
    third = (34.6 + 29.1 + 26.6) / 23.0 * forward
    assert longer[1] == pytest.approx(4.0 * without[0] + third)
    assert without[0] > 1.9 * plain[0]
    assert 5 * sum(plain) > sum(attention_seconds(written_out(run))) > sum(dropped)


def written_out(run: PlannedRun) -> PlannedRun:
    return with_model(run, attention_dropout=0.1, attention_backend="unfused")


@pytest.mark.parametrize(
    "fields",
    [{"params_dtype": "fp64"}, {"kv_channels": 512}, {"attention_backend": "local"}],
    ids=["fp64", "large heads", "as requested"],
)
def test_attention_is_written_out_where_the_kernel_does_not_serve(fields: dict[str, object]) -> None:
    own = with_model(run_of(), attention_dropout=0.1, **fields)
    assert own.kernels.attention == "unfused"
    assert attention_seconds(own) == attention_seconds(with_kernels(own, Kernels("unfused")))


def test_a_gpu_that_cannot_run_triton_writes_attention_with_dropout_out() -> None:
    run = run_of(replace(H100_CLUSTER, gpu=GPUS["v100-32"]))
    assert with_model(run).kernels.attention == "cudnn"
    assert with_model(run, attention_dropout=0.1).kernels.attention == "unfused"


def test_attention_to_both_sides_computes_all_scores() -> None:
    run = with_model(run_of(H100_CLUSTER))
    both = replace(run, config=replace(run.config, model=replace(run.config.model, architecture="bert")))
    both = with_kernels(both, replace(run.kernels, has_triton=False))
    assert attention_seconds(both)[0] == pytest.approx(2 * attention_seconds(run)[0])


@pytest.mark.parametrize(
    ("gpu", "shape", "measured"),
    [("a100-80", (1024, 10240, 5120), 271.2), ("h100-80", (2048, 2048, 13312), 794.5)],
)
def test_no_product_is_faster_than_the_best_that_was_measured(gpu: str, shape, measured: float) -> None:
    """Compare with GEMMs alone, on a cool GPU: stas00/ml-engineering, compute/accelerator/README.md."""
    m, n, k = shape
    planned = 2 * m * n * k / gemm_seconds(GPUS[gpu], m, n, k) / 1e12
    assert 0.75 * measured < planned < measured


def test_a_short_sum_costs_a_fast_gpu_more() -> None:
    """Check that the start and end of a tile do not get faster with the multiplications."""

    def rate(gpu: str, k: int) -> float:
        return k / gemm_seconds(GPUS[gpu], 16384, 6144, k)

    h100, a100 = (rate(gpu, 1536) / rate(gpu, 16384) for gpu in ("h100-80", "a100-80"))
    assert 0.7 < h100 < a100 - 0.03 < 0.95


def test_sums_of_gradients_hide_under_the_product_that_makes_them() -> None:
    fused, plain = (
        layer_work(run_of(gradient_accumulation_fusion=is_fused)).backward_weight.memory_bound
        for is_fused in (True, False)
    )
    assert fused < 0.01 * plain  # biases and norms are left


@pytest.mark.parametrize(
    ("dp", "zero_stage", "num_bytes"),
    [
        (4, 1, 2 + 4 + 4),  # read the gradient, read and write the sum
        (4, 3, 2 + 4),  # copied into the message of each microbatch
        (64, 1, 2 + 4),  # one microbatch
    ],
)
def test_no_gemm_adds_the_gradient_of_an_embedding(dp: int, zero_stage: int, num_bytes: int) -> None:
    run = run_of(replace(CLUSTER, world_size=dp), 64, zero_stage=zero_stage)
    size = sum(weight.size for weight in run.units.embedding.weights)
    expected = num_bytes * size / (2039e9 * 0.8)
    assert model_work(run).embedding.backward_weight.memory_bound == pytest.approx(expected)


def test_the_last_bucket_is_never_hidden() -> None:
    run = run_of()
    one = replace(run, config=run_of(ddp_bucket_size=10**12).config)
    assert exchange_seconds(one, 1e9).dp > exchange_seconds(run, 1e9).dp > 0


def test_megalite_hides_the_gathering_of_weights_unless_it_is_told() -> None:
    run = run_of(zero_stage=1)
    hidden, exposed = (
        exchange_seconds(run_of(zero_stage=1, overlap_param_gather=on), 1.0).dp for on in (True, False)
    )
    assert exchange_seconds(run, 1.0).dp == hidden < exposed


def test_weights_gathered_in_8_bits_take_half_the_time() -> None:
    run = run_of(zero_stage=1, overlap_param_gather=False)
    narrow = replace(run.config.training, fp8_format="hybrid")
    seconds = {
        gathers: exchange_seconds(
            replace(run, config=replace(run.config, training=replace(narrow, fp8_param_gather=gathers))), 1.0
        ).dp
        for gathers in (False, True)
    }
    in_8_bits = MODEL.num_layers * 12 * MODEL.hidden_size**2
    assert seconds[False] - seconds[True] == pytest.approx(
        sharing_of(run, "model")[0].gather_seconds(in_8_bits), rel=0.05
    )


def test_recomputation_hides_the_gathering_of_weights() -> None:
    run = run_of(replace(CLUSTER, network_gbps=2.0), zero_stage=3)
    config = replace(run.config, recompute=RecomputeConfig(recompute_granularity="full"))
    assert time_iteration(replace(run, config=config)).work.dp < time_iteration(run).work.dp


def test_the_first_gathering_is_never_hidden() -> None:
    run = run_of(zero_stage=3)
    group, layer = replicas_of(run), run.units.largest_layer
    edges = run.ranks[0].edges
    rest = edges.total()
    first, layers = group.gather_seconds(2 * rest), MODEL.num_layers * group.gather_seconds(2 * layer)
    forward = zero3_communication(run, (0,) * MODEL.num_layers, edges).exposed(
        ActionKind.FORWARD, WorkSeconds(gemms=1e6)
    )
    assert forward.dp == pytest.approx(first + CONTENTION * layers)


def offloading(num_layers: int, **gpu) -> PlannedRun:
    run = run_of(replace(CLUSTER, gpu=replace(GPU, **gpu)))
    recompute = RecomputeConfig(cpu_offload_activations=num_layers)
    return replace(run, config=replace(run.config, recompute=recompute))


def test_copies_to_a_fast_host_cost_only_those_of_the_last_layer() -> None:
    some, every = (offloading(num, host_link_bandwidth=450e9) for num in (15, 16))
    down, up = offload_work(some, (0,) * 16, {0: layer_work(some)})
    assert down.seconds == up.seconds == 0.0
    down, up = offload_work(every, (0,) * 16, {0: layer_work(every)})
    assert down.seconds == 0.0
    assert up.offload == pytest.approx(stage_bytes(every, (0,)) / (450e9 * GPU.link_share))


def test_copies_to_a_slow_host_cost_what_computation_does_not_hide() -> None:
    run = offloading(4, host_link_bandwidth=1e9)
    layer = layer_work(run)
    copy = stage_bytes(run, (0,)) / (1e9 * GPU.link_share)
    down, up = offload_work(run, (0,) * 16, {0: layer})
    assert down.offload == pytest.approx(4 * (copy - layer.forward.seconds))
    assert up.offload == pytest.approx(4 * (copy - layer.backward.seconds))
    waits = time_iteration(run).work.offload
    assert waits == pytest.approx(run.num_microbatches * (down.offload + up.offload))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_kept_weights_are_gathered_once_an_iteration(schedule: str) -> None:
    pipeline = {"pipeline_model_parallel_size": 4, "pipeline_schedule": schedule, "zero_stage": 3}
    often, once = (
        run_of(replace(CLUSTER, network_gbps=2.0), fsdp_reshard_after_forward=choice, **pipeline)
        for choice in ("always", "never")
    )
    assert time_iteration(once).work.dp < time_iteration(often).work.dp
    layers = MODEL.num_layers // 4
    sharding = zero3_communication(once, (0,) * layers, Sizes())
    assert sharding.exposed(ActionKind.FORWARD, WorkSeconds(gemms=1.0)).dp == 0.0
    assert sharding.exposed(ActionKind.BACKWARD, WorkSeconds(gemms=1e-9)).dp == pytest.approx(
        layers * replicas_of(once).gather_seconds(4 * once.units.largest_layer), rel=1e-3
    )
    one_gathering = layers * replicas_of(once).gather_seconds(2 * once.units.largest_layer)
    assert exchange_seconds(once, 1e-9).dp - exchange_seconds(often, 1e-9).dp == pytest.approx(one_gathering)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("messages", [None, "bf16"])
def test_groups_reduce_their_shards_after_the_last_microbatch(messages: str | None, schedule: str) -> None:
    """Within a group, they are reduced in each microbatch."""
    pipeline = {"pipeline_model_parallel_size": 4, "pipeline_schedule": schedule, "zero_stage": 3}
    run = run_of(data_parallel_shard_degree=8, grad_communication_dtype=messages, **pipeline)
    size = run.units.largest_layer * gradient_bytes(run)
    of_layer = zero3_communication(run, (0,), Sizes()).layer_gradients
    assert of_layer == pytest.approx(sharing_of(run)[0].gather_seconds(size))
    edges = Sizes({"model": run.units.largest_layer})
    of_edge = zero3_communication(run, (), edges).edge_gradients
    assert of_edge == pytest.approx(of_layer)
    slow = replace(run, cluster=replace(CLUSTER, network_gbps=2.5))  # only what is between nodes takes longer
    extra = exchange_seconds(slow, 0.0).seconds - exchange_seconds(run, 0.0).seconds
    of_rank = run.ranks[0].size * gradient_bytes(run) / 8
    assert extra > sharing_of(slow)[1].reduce_seconds(of_rank) / 2
