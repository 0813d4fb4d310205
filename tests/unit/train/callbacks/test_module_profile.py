"""Test the tables of modules: operations and bytes are those of the formulas, and the run does not change."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megalite.config import (
    Config,
    DataConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    RecomputeConfig,
    TrainingConfig,
    check_config,
)
from megalite.config.model.model_config import (
    flops_per_token,
    flops_per_token_by_convention,
    padded_vocab_size,
)
from megalite.distributed.topology import Topology
from megalite.kernels import CausalSoftmax, flash_attention, recurrence
from megalite.kernels.weight_gradient import add_weight_gradient_
from megalite.plan.rank_memory import stage_bytes
from megalite.plan.units import whole_model
from megalite.train.callbacks.module_profile import check_file, log_module_profile, profile_tables
from megalite.train.module_costs import NUM_TIMED, FlopCounter, ModuleCosts, Phase, module_costs
from megalite.train.trainer import Trainer, start_trainer
from megalite.utils.errors import UserError
from tests.unit.plan.test_parameters import run_of

MODEL = ModelConfig(
    num_layers=3, hidden_size=64, num_attention_heads=4, seq_length=32, vocab_size=500, params_dtype="fp64"
)
CONFIG = Config(
    model=MODEL,
    optimizer=OptimizerConfig(lr=1e-2),
    data=DataConfig(mock_data=True),
    training=TrainingConfig(train_iters=4, micro_batch_size=2, global_batch_size=4, eval_iters=0),
)
TOKENS = 2 * MODEL.seq_length
FULL = RecomputeConfig(recompute_granularity="full")


def selective(*modules: str) -> RecomputeConfig:
    return RecomputeConfig(recompute_granularity="selective", recompute_modules=modules)


def trainer_of(
    topology: Topology,
    model: ModelConfig = MODEL,
    recompute: RecomputeConfig | None = None,
    logging: LoggingConfig | None = None,
    **training: object,
) -> Trainer:
    config = replace(
        CONFIG,
        model=model,
        recompute=recompute or RecomputeConfig(),
        logging=logging or LoggingConfig(),
        training=replace(CONFIG.training, **training),
    )
    check_config(config, 1)
    return start_trainer(config, topology)


def costs_of(trainer: Trainer) -> dict[str, ModuleCosts]:
    with trainer:
        return module_costs(trainer)


def score_flops(model: ModelConfig) -> int:
    """Return the FLOPs of one GEMM of all layers' attention: backward computes the scores again."""
    return 2 * TOKENS * model.seq_length * model.num_attention_heads * model.head_dim * model.num_layers


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention_dropout": 0.0},
        {"activation": "swiglu", "num_query_groups": 2, "position_embedding_type": "rope"},
    ],
    ids=["written out", "fused", "llama"],
)
def test_operations_are_those_of_the_formula(one_rank: Topology, changes: dict[str, object]) -> None:
    model = replace(MODEL, **changes)
    costs = costs_of(trainer_of(one_rank, model))
    whole, layers = costs[""], [costs[f"layers.{i}"] for i in range(model.num_layers)]
    formula = TOKENS * flops_per_token_by_convention(model, 1)["full_attention"]
    assert whole.flops[Phase.FORWARD] == formula / 3
    assert whole.flops[Phase.BACKWARD] == formula * 2 / 3 + score_flops(model)
    # The log's TFLOP/s count half of causal attention: a third of the pass is forward, with two GEMMs.
    assert formula - TOKENS * flops_per_token(model, 1) == 3 * 2 * score_flops(model) / 2
    logits = 2 * TOKENS * model.hidden_size * padded_vocab_size(model, 1)
    for phase, factor in ((Phase.FORWARD, 1), (Phase.BACKWARD, 2)):
        assert sum(layer.flops[phase] for layer in layers) == whole.flops[phase] - factor * logits
    for i, layer in enumerate(layers):
        assert layer.flops == costs[f"layers.{i}.attention"].flops + costs[f"layers.{i}.mlp"].flops
    assert whole.flops[Phase.RECOMPUTED] == 0
    assert whole.num_parameters == whole_model(model, 1).num_parameters


@pytest.mark.parametrize("fuses", [True, False])
def test_operations_are_those_of_the_formula_in_16_bits(one_rank: Topology, fuses: bool) -> None:
    """Check the GEMMs that add weight gradients to fp32 sums, or write them in bf16."""
    model = replace(MODEL, params_dtype="bf16")
    config = replace(CONFIG, model=model)
    config = replace(config, parallel=replace(config.parallel, gradient_accumulation_fusion=fuses))
    costs = costs_of(start_trainer(config, one_rank))
    formula = TOKENS * flops_per_token_by_convention(model, 1)["full_attention"]
    assert sum(costs[""].flops.values()) == formula + score_flops(model)
    num_bytes = costs[""].state_bytes
    parameters = whole_model(model, 1).num_parameters
    assert num_bytes == {
        "weights": 2 * parameters,
        "gradients": 4 * parameters,
        "optimizer": 12 * parameters,
    }


def test_a_recomputed_layer_counts_as_recomputed(one_rank: Topology) -> None:
    plain, again = (costs_of(trainer_of(one_rank, recompute=each)) for each in (RecomputeConfig(), FULL))
    # The second forward of a layer ends where nothing more is saved: before the MLP's last GEMM.
    last = 2 * TOKENS * MODEL.hidden_size * MODEL.ffn_size
    ends = [f"layers.{i}.mlp.down" for i in range(MODEL.num_layers)]
    for name, each in again.items():
        assert each.flops[Phase.FORWARD] == plain[name].flops[Phase.FORWARD]
        assert each.flops[Phase.BACKWARD] == plain[name].flops[Phase.BACKWARD]
        is_recomputed = name.startswith("layers")
        skipped = last * sum(f"{end}.".startswith(f"{name}.") for end in ends)
        if name:
            recomputed = each.flops[Phase.FORWARD] - skipped if is_recomputed else 0
            assert each.flops[Phase.RECOMPUTED] == recomputed, name
    formulas = flops_per_token_by_convention(MODEL, 1)
    expected = TOKENS * formulas["hardware"] + score_flops(MODEL) - last * len(ends)
    assert sum(again[""].flops.values()) == expected


def test_a_recomputed_part_without_a_module_counts_as_backward(one_rank: Topology) -> None:
    plain, again = (
        costs_of(trainer_of(one_rank, recompute=each)) for each in (RecomputeConfig(), selective("core_attn"))
    )
    assert again[""].flops[Phase.RECOMPUTED] == 0
    more = again[""].flops[Phase.BACKWARD] - plain[""].flops[Phase.BACKWARD]
    assert more == 2 * score_flops(MODEL)


@pytest.mark.parametrize(
    "recompute",
    [RecomputeConfig(), FULL, selective("mlp"), selective("core_attn", "mlp_act", "layernorm")],
    ids=["plain", "full", "mlp", "parts"],
)
def test_a_layer_keeps_what_the_planner_says(one_rank: Topology, recompute: RecomputeConfig) -> None:
    costs = costs_of(trainer_of(one_rank, recompute=recompute))
    run = run_of(MODEL, 1, 1)
    training = replace(run.config.training, micro_batch_size=2)
    run = replace(run, config=replace(run.config, recompute=recompute, training=training))
    # The plan is of a GPU, which has no kernel of fused attention in fp64.
    run = replace(run, config=replace(run.config, model=replace(MODEL, params_dtype="fp32")))
    planned = 2 * stage_bytes(run, (0,))
    for i in range(MODEL.num_layers):
        assert costs[f"layers.{i}"].activation_bytes == pytest.approx(planned, rel=0.02)
    parts = ("embedding", "layers.0", "layers.1", "layers.2", "final_norm")
    rest = costs[""].activation_bytes - sum(costs[part].activation_bytes for part in parts)
    logits = TOKENS * padded_vocab_size(MODEL, 1) * 8
    assert logits <= rest < 1.02 * logits


def test_operations_of_our_kernels_on_gpus_are_counted() -> None:
    b, n, g, s, d = 2, 4, 2, 16, 8
    q, k = torch.zeros(b, n, s, d, requires_grad=True), torch.zeros(b, g, s, d, requires_grad=True)
    with FlopCounter() as counter:
        out = flash_attention(q, k, k, CausalSoftmax(s, 1.0))
        assert counter.total == 2 * 2 * b * n * s * s * d
        out.sum().backward()
        assert counter.total == 7 * 2 * b * n * s * s * d
    of_token = torch.zeros(b, g, 2, s)
    for is_delta, num_products in ((True, 3), (False, 2)):
        with FlopCounter() as counter:
            out, _ = recurrence(
                k, k, k.unsqueeze(2).expand(-1, -1, 2, -1, -1), of_token, of_token, is_delta=is_delta
            )
            assert counter.total == num_products * 2 * b * n * s * d * d
            out.sum().backward()
            assert counter.total == 3 * num_products * 2 * b * n * s * d * d
    with FlopCounter() as counter:
        add_weight_gradient_(torch.zeros(2, 3, 5), torch.zeros(7, 6), torch.zeros(7, 5))
    assert counter.total == 2 * 7 * 6 * 5


def test_every_pass_is_timed_and_parts_take_no_longer_than_the_whole(one_rank: Topology) -> None:
    costs = costs_of(trainer_of(one_rank, recompute=FULL))
    layers = [f"layers.{i}" for i in range(MODEL.num_layers)]
    for number in range(NUM_TIMED):
        for phase, parts in (
            (Phase.FORWARD, ("embedding", *layers, "final_norm")),
            (Phase.BACKWARD, ("embedding", *layers, "final_norm")),
            (Phase.RECOMPUTED, layers),
        ):
            times = [costs[name].nanoseconds[number][phase] for name in parts]
            assert all(each > 0 for each in times), phase
            assert sum(times) <= costs[""].nanoseconds[number][phase]


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_run_continues_unchanged(
    one_rank: Topology, caplog: pytest.LogCaptureFixture, is_compiled: bool
) -> None:
    plain, profiled = (trainer_of(one_rank, compile=is_compiled) for _ in range(2))
    caplog.set_level(logging.INFO)
    for _ in range(3):
        log_module_profile(profiled)
        assert profiled.step() == plain.step()
    tables = [record.getMessage() for record in caplog.records if "modules of rank 0" in record.getMessage()]
    assert [text.split(" before ")[1].split(",")[0] for text in tables] == [
        "iteration 1",
        "iteration 2",
        "iteration 3",
    ]


def labels(costs: dict[str, ModuleCosts], **config: int) -> list[list[str]]:
    """Return the first word of the lines of each table."""
    text = "\n".join(profile_tables(costs, "title", LoggingConfig(**config)))
    return [[line.split()[0] for line in table.splitlines()] for table in text.split("\n\n")]


def test_tables_show_the_tree_to_a_depth_and_the_most_expensive(one_rank: Topology) -> None:
    costs = costs_of(trainer_of(one_rank))
    for each in costs.values():  # so that no measured time decides
        for run in each.nanoseconds:
            run[Phase.FORWARD] = each.num_parameters + 1
            run[Phase.BACKWARD] = 0
    for table in labels(costs):
        assert "layers" not in table
    computation, memory, by_layer = labels(costs)
    assert {"all", "embedding.word", "layers.*.mlp.down", "outside"} < set(computation)
    assert {"all", "embedding.word", "layers.*.mlp.down", "outside"} < set(memory)
    assert "layers.*.mlp.down" not in by_layer and by_layer.count("layers.0") == 1
    computation, *_ = labels(costs, profile_modules_depth=1)
    shown = ["all", "embedding", "layers.*", "final_norm", "output", "outside"]
    assert [word for word in computation if word in costs or word in shown] == shown
    computation, *_ = labels(costs, profile_modules_depth=0)
    assert [word for word in computation if word in costs or word in shown] == ["all", "outside"]
    computation, *_ = labels(costs, profile_modules_top=1)
    assert [word for word in computation if word.startswith(("layers", "embedding", "final"))] == [
        "layers.*",
        "layers.*.mlp",
        "layers.*.mlp.up",
    ]


def test_the_table_of_layers_joins_equal_ones() -> None:
    def layer(number: int, num_bytes: int) -> ModuleCosts:
        each = ModuleCosts(f"layers.{number}", activation_bytes=num_bytes)
        each.nanoseconds[0][Phase.FORWARD] = 1
        return each

    costs = {"": ModuleCosts("", activation_bytes=13 * 10**6)}
    costs[""].nanoseconds = tuple(type(run)({Phase.FORWARD: 1}) for run in costs[""].nanoseconds)
    costs |= {f"layers.{i}": layer(i, size * 10**6) for i, size in enumerate((4, 3, 3, 3))}
    *_, table = "\n".join(profile_tables(costs, "title", LoggingConfig())).split("\n\n")
    lines: Sequence[Sequence[str]] = [line.split() for line in table.splitlines()]
    assert [line[0] for line in lines] == ["layer", "layers.0", "layers.1"]
    assert lines[1][-1] == "4.000"
    assert lines[2][:4] == ["layers.1", "to", "layers.3,", "each"] and lines[2][-1] == "3.000"


def test_tables_are_written_to_a_file(one_rank: Topology, tmp_path: Path, caplog) -> None:
    file = tmp_path / "modules.txt"
    trainer = trainer_of(one_rank, logging=LoggingConfig(profile_modules=1, profile_modules_file=str(file)))
    caplog.set_level(logging.INFO)
    with trainer:
        log_module_profile(trainer)
    assert file.read_text() == f"{caplog.records[-1].getMessage()}\n"
    assert "layers.*.mlp.down" in file.read_text()


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--profile-modules-file in .*file cannot be written"):
        check_file(tmp_path / "file" / "modules.txt")
    with pytest.raises(UserError, match="is a folder: pass the name of a file"):
        check_file(tmp_path)
