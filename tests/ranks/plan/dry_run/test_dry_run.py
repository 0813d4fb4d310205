"""A dry run's counts of each rank are those of the same rank in a real run, to the byte."""

from __future__ import annotations

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
)
from megalite.distributed.rendezvous import Launch
from megalite.distributed.topology import Topology
from megalite.observe.verify.layouts import Layout
from megalite.plan.dry_run.counts import Counts, count_iteration
from megalite.plan.dry_run.dry_run import dry_run_of
from megalite.tensor_parallel.parameter_spec import spec_of
from megalite.train.model_chunks import build_chunks, named_parameters
from megalite.train.run_context import build_data, resolve_run
from tests.live_ranks import run_ranks

MICROBATCHES, B = 2, 2
LAYOUTS = [
    ("tp2+sp", "fp32", {"attention_dropout": 0.0}),
    ("pp2v2", "bf16", {"position_embedding_type": "alibi"}),
    ("pp2dp2+zero2", "fp16", {}),
    ("dp4shard2+zero2", "bf16", {}),
    ("dp4shard2+zero3", "bf16", {}),
    ("pp2dp2+zero3+kept", "bf16", {}),
    ("dp2+zero1+offload", "bf16", {"position_embedding_type": "rope", "activation": "swiglu"}),
    (
        "tp2pp2+sp+zero1+gather",
        "bf16",
        {"hidden_size_per_layer_input": 6, "norm_position": "sandwich", "activation": "geglu"},
    ),
]
SLOW = [
    ("tp1", "fp32", {}),
    ("tp2", "bf16", {}),
    ("dp4+zero1", "fp32", {}),
    ("pp2", "bf16", {"untie_embeddings_and_output_weights": True}),
    ("pp2zbv+selective", "bf16", {}),
    ("tp2dp2+sp+zero2+full", "bf16", {"num_query_groups": 1}),
    ("pp4zb", "fp32", {}),
    ("dp2+zero3", "fp32", {}),
    ("pp2zbvdp2+zero3+kept", "fp32", {}),
    ("tp4+sp+selective", "bf16", {}),
    ("tp2pp2dp2+sp+zero1+gather+full", "bf16", {}),
]


def config_of(layout: Layout, dtype: str, model: dict[str, object], **parallel: object) -> Config:
    config = Config(
        model=ModelConfig(
            num_layers=4,
            hidden_size=64,
            num_attention_heads=4,
            seq_length=16,
            vocab_size=500,
            params_dtype=dtype,
            **model,
        ),
        parallel=ParallelConfig(ddp_bucket_size=20_000, **parallel),
        # An iteration that overflows in fp16 would be skipped; a dry run's never overflows.
        optimizer=OptimizerConfig(lr=1e-3, initial_loss_scale=1.0),
        data=DataConfig(mock_data=True),
        training=TrainingConfig(train_iters=3, micro_batch_size=B, eval_iters=0),
    )
    return layout.apply(config, B * MICROBATCHES * layout.size("dp"))


def real(topology: Topology, config: Config) -> tuple[Counts, dict[str, int]]:
    """A rank's counts, and the elements of all parameters that it has a part of, over all ranks."""
    run = resolve_run(config, topology)
    counts = count_iteration(run, build_data(run))
    chunks = build_chunks(config, topology)
    sizes = {}
    for name, parameter in named_parameters(chunks):
        cut = topology.tp.size if spec_of(parameter).cuts else 1
        sizes[name] = parameter.numel() * cut
    return counts, sizes


@pytest.mark.parametrize(
    ("name", "dtype", "model"), [*LAYOUTS, *(pytest.param(*row, marks=pytest.mark.slow) for row in SLOW)]
)
def test_counts_are_those_of_a_real_run(name: str, dtype: str, model: dict[str, object]) -> None:
    layout = Layout.parse(name)
    config = config_of(layout, dtype, model)
    ran = run_ranks(real, config.parallel.mesh, layout.world_size, config)
    whole = {name: size for _, sizes in ran for name, size in sizes.items()}
    for rank, (counts, _) in enumerate(ran):
        dry = dry_run_of(config, layout.world_size, rank)
        assert dry.counts.num_parameters == counts.num_parameters
        assert dry.counts.buffers == counts.buffers
        assert dry.counts.offload == counts.offload
        assert (dry.counts.offload is not None) == ("offload" in layout.switches)
        assert dry.counts.calls == counts.calls
        assert dry.counts.copied == counts.copied
        assert dry.counts.actions == counts.actions
        assert dry.model_parameters == sum(whole.values())
        assert counts.calls or layout.world_size == 1


@pytest.mark.parametrize(
    ("dtype", "recompute"),
    [
        ("fp32", RecomputeConfig()),
        ("fp32", RecomputeConfig(cpu_offload_activations=2)),
        ("bf16", RecomputeConfig("full")),
        ("bf16", RecomputeConfig("selective", recompute_modules=("core_attn", "mlp_act", "layernorm"))),
    ],
    ids=["nothing", "offload", "full", "parts"],
)
def test_peak_is_that_of_a_real_run(dtype: str, recompute: RecomputeConfig) -> None:
    """One rank only: gloo's threads free tensors of messages at any time.

    The dry run is that of a GPU, whose 16-bit GEMMs accumulate to the gradient buffers; a CPU has none. Its
    norms save other statistics than a CPU's.
    """
    fuses = dtype == "fp32"
    config = config_of(Layout.parse("tp1"), dtype, {}, gradient_accumulation_fusion=fuses)
    config = replace(config, recompute=recompute)
    with Topology.start(config.parallel.mesh, Launch(0, 1, 0, 1)) as topology:
        ran, _ = real(topology, config)
    dry = dry_run_of(config, 1, 0)
    assert dry.counts.peak_bytes == pytest.approx(ran.peak_bytes, rel=0.01)
    assert dry.counts.peak_bytes > 100_000
    assert dry.counts.host_bytes == ran.host_bytes
    assert dry.counts.copied == ran.copied
    assert (ran.copied.down > 0) == (ran.copied.up > 0) == (recompute.cpu_offload_activations > 0)
    assert (ran.host_bytes > 100_000) == (recompute.cpu_offload_activations > 0)


@pytest.mark.parametrize("choice", ["always", "never"])
def test_peak_of_sharded_weights_is_that_of_a_real_run(choice: str) -> None:
    """Within the bytes of a layer, which gloo's threads may hold a little longer."""
    layout = Layout.parse("dp2+zero3")
    config = config_of(layout, "fp32", {}, fsdp_reshard_after_forward=choice)
    dry = dry_run_of(config, 2, 0).counts
    layer = 12 * 64 * 64 * 4
    for ran, _ in run_ranks(real, config.parallel.mesh, 2, config):
        assert ran.buffers == dry.buffers
        assert dry.peak_bytes == pytest.approx(ran.peak_bytes, abs=layer)
    other = {"always": "never", "never": "always"}[choice]
    config = config_of(layout, "fp32", {}, fsdp_reshard_after_forward=other)
    difference = dry_run_of(config, 2, 0).counts.peak_bytes - dry.peak_bytes
    assert 2 * layer < (difference if choice == "always" else -difference) < 4 * layer
