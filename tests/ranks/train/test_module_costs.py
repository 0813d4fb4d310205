"""Costs of modules on several ranks: all ranks together have the model's, and the run does not change."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest

from megalite.config import Config, DataConfig, LoggingConfig, ModelConfig, OptimizerConfig, TrainingConfig
from megalite.config.model.model_config import flops_per_token_by_convention, padded_vocab_size
from megalite.distributed.topology import Topology
from megalite.observe.verify.layouts import Layout
from megalite.plan.rank_memory import stage_bytes
from megalite.plan.units import whole_model
from megalite.train.callbacks.module_profile import file_of_rank
from megalite.train.callbacks.profiler import profiler
from megalite.train.module_costs import ModuleCosts, Phase, module_costs
from megalite.train.trainer import start_trainer
from tests.live_bytes import wait_for_other_threads
from tests.live_ranks import run_ranks
from tests.unit.plan.test_parameters import run_of

MODEL = ModelConfig(
    num_layers=4,
    hidden_size=32,
    num_attention_heads=4,
    seq_length=32,
    vocab_size=128,
    pad_vocab_size_to=128,
    untie_embeddings_and_output_weights=True,
    params_dtype="fp64",
)
CONFIG = Config(
    model=MODEL,
    optimizer=OptimizerConfig(lr=1e-3),
    data=DataConfig(mock_data=True),
    training=TrainingConfig(train_iters=4, micro_batch_size=2, eval_iters=0),
)
QUICK = ("tp2+sp", "tp2+sp+full", "pp2zb", "dp2+zero2", "dp2+zero3")
SLOW = ("tp2", "pp2v2", "dp2", "dp2+zero1+gather")
TOKENS = 2 * MODEL.seq_length
SETTLING = SimpleNamespace(
    perf_counter_ns=time.perf_counter_ns,
    sleep=lambda _: wait_for_other_threads(),  # a fixed time may be too short on a busy machine
)


def costs_and_steps(topology: Topology, config: Config) -> tuple[dict[str, ModuleCosts], list[object]]:
    """Return the costs before the second iteration, and the iterations' results with and without them."""
    with start_trainer(config, topology) as trainer, start_trainer(config, topology) as plain:
        steps = [trainer.step()]
        with (
            mock.patch("megalite.train.module_costs.NUM_TIMED", 1),
            mock.patch("megalite.train.module_costs.time", SETTLING),
        ):
            costs = module_costs(trainer)
        steps += [trainer.step(), plain.step(), plain.step()]
    return costs, steps


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_all_ranks_together_have_the_models_costs(name: str) -> None:
    layout = Layout.parse(name)
    config = layout.apply(CONFIG, 2 * layout.size("dp") * layout.size("pp"))
    results = run_ranks(costs_and_steps, config.parallel.mesh, layout.world_size, config)
    flops, state_bytes = Counter[Phase](), Counter[str]()
    for costs, (*steps, first, second) in results:
        assert steps == [first, second]
        flops.update(costs[""].flops)
        state_bytes.update(costs[""].state_bytes)
        check_activations(costs, config, layout)
    check_flops(flops, layout)
    if layout.size("tp") == layout.size("pp") == 1:
        num_parameters, zero = whole_model(MODEL, 1).num_parameters, config.parallel.zero_stage
        assert state_bytes == {
            "weights": 8 * num_parameters * (1 if zero == 3 else 2),
            "gradients": 8 * num_parameters * (1 if zero >= 2 else 2),
            "optimizer": 16 * num_parameters * (1 if zero >= 1 else 2),
        }


def check_flops(flops: Counter[Phase], layout: Layout) -> None:
    """Compare the FLOPs of all ranks with the formula's."""
    formula = layout.size("dp") * TOKENS * flops_per_token_by_convention(MODEL, 1)["full_attention"]
    scores = layout.size("dp") * 2 * TOKENS * MODEL.seq_length * MODEL.hidden_size * MODEL.num_layers
    logits = layout.size("dp") * 2 * TOKENS * MODEL.hidden_size * padded_vocab_size(MODEL, 1)
    # A schedule that splits backward computes the linear layers' weight gradients outside of all modules.
    of_weights = formula / 3 - 2 * scores if layout.schedule == "zb" else 0
    assert flops[Phase.FORWARD] == formula / 3
    assert flops[Phase.BACKWARD] == formula * 2 / 3 + scores - of_weights
    # The second forward of a layer ends where nothing more is saved: before the MLP's last GEMM.
    last = layout.size("dp") * 2 * TOKENS * MODEL.hidden_size * MODEL.ffn_size * MODEL.num_layers
    assert flops[Phase.RECOMPUTED] == (formula / 3 - logits - last if "full" in layout.switches else 0)


def check_activations(costs: dict[str, ModuleCosts], config: Config, layout: Layout) -> None:
    """Compare each layer with the planner, and check what the other modules keep."""
    hidden = 8 * TOKENS * MODEL.hidden_size
    for layer in range(MODEL.num_layers):
        kept = kept_bytes(config, layout)
        if layout.schedule == "zb" and layer == 1:
            kept -= hidden  # the last of its stage: its output is sent, and counts as the next stage's input
        if f"layers.{layer}" in costs and layout.v is None:
            assert costs[f"layers.{layer}"].activation_bytes == pytest.approx(kept, rel=0.03), layer
    if layout.size("tp") == layout.size("pp") == 1 or (layout.schedule == "zb" and "layers.3" in costs):
        # The output of the embedding or of the first stage, the final norm's output, and the logits.
        rest = costs[""].activation_bytes - costs["layers"].activation_bytes
        expected = 2 * hidden + 8 * TOKENS * padded_vocab_size(MODEL, 1)
        assert expected < rest < 1.1 * expected


def kept_bytes(config: Config, layout: Layout) -> float:
    """Return what a layer keeps, by the plan of a GPU, which has no kernel of fused attention in fp64."""
    config = replace(config, model=replace(config.model, params_dtype="fp32"))
    return 2 * stage_bytes(replace(run_of(MODEL, layout.size("tp"), 1), config=config), (0,))


def trace_one_rank(topology: Topology, folder: str) -> str:
    config = LoggingConfig(
        tensorboard_dir=folder,
        profile=True,
        use_pytorch_profiler=True,
        profile_step_start=1,
        profile_step_end=2,
        profile_ranks=(1,),
    )
    with profiler(config, topology, range(1, 3)) as step:
        for _ in range(2):
            step()
    return str(file_of_rank("m.txt", topology))


def test_only_the_chosen_rank_writes_a_trace(tmp_path) -> None:
    layout = Layout.parse("pp2")
    config = layout.apply(CONFIG, 4)
    files = run_ranks(trace_one_rank, config.parallel.mesh, 2, str(tmp_path))
    (trace,) = (tmp_path / "profile").iterdir()
    assert trace.name.startswith("rank1.")
    assert files == ["m.txt", "m_rank1.txt"]
