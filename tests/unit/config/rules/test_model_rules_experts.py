"""The axes of experts divide the experts and their width; what does not is refused with numbers that fit."""

from __future__ import annotations

import re
from typing import Any

import pytest

from megalite.config import Config, LoggingConfig, ModelConfig, ParallelConfig, TrainingConfig
from megalite.config.rules.model_rules import (
    audited_experts,
    expert_groups,
    expert_parallel,
    imbalance,
)
from megalite.config.rules.parallel_rules import tensor_parallel, world
from megalite.config.validate import conflicts, unused_options
from megalite.utils.errors import Problem


def _problems(config: Config) -> list[Problem]:
    rules = (conflicts, imbalance)
    return [problem for rule in rules for problem in rule(config, None)]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ""),
        ({"expert_model_parallel_size": 4}, ""),
        ({"expert_model_parallel_size": 8, "expert_tensor_parallel_size": 3}, ""),
        (
            {"expert_model_parallel_size": 5},
            "--num-experts 8 is not divisible by --ep 5: pass --ep 4 or 8; each rank takes whole experts",
        ),
        ({"expert_tensor_parallel_size": 5}, "size 12 is not divisible by --etp 5: .* such as 15"),
        ({"tensor_model_parallel_size": 8}, "size 12 is not divisible by --tp 8: .* such as 16"),
        (
            {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2},
            "--ep 2 and --etp 2 with --tp 2 need --sequence-parallel",
        ),
        (
            {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1, "sequence_parallel": True},
            "",
        ),
    ],
)
def test_experts_are_divided(changes: dict[str, Any], expected: str) -> None:
    model = ModelConfig(num_attention_heads=16, num_experts=8, moe_ffn_hidden_size=12)
    config = Config(model=model, parallel=ParallelConfig(**changes))
    problems = [problem.text for problem in (*expert_parallel(config, None), *tensor_parallel(config, None))]
    assert len(problems) == bool(expected)
    assert all(re.search(expected, problem) for problem in problems)


@pytest.mark.parametrize(
    ("scores", "num_groups", "expected"),
    [
        (2, 8, ""),
        (2, 4, ""),
        (3, 4, "--moe-router-group-scores 3 is more than the 2 experts of a group: .* 2"),
    ],
)
def test_a_group_has_the_scores_of_its_experts(scores: int, num_groups: int, expected: str) -> None:
    groups = {"moe_router_num_groups": num_groups, "moe_router_group_topk": 2}
    model = ModelConfig(num_experts=8, **groups, moe_router_group_scores=scores)
    problems = [problem.text for problem in expert_groups(Config(model=model), None)]
    assert len(problems) == bool(expected)
    assert all(re.search(expected, problem) for problem in problems)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"moe_beside_mlp": True, "norm_position": "sandwich"}, ""),
        (
            {"moe_beside_mlp": True},
            "--moe-beside-mlp with --norm-position pre, .* pass --norm-position sandwich",
        ),
        (
            {
                **{"moe_beside_mlp": True, "norm_position": "sandwich"},
                "moe_shared_expert_intermediate_size": 8,
            },
            "--moe-shared-expert-intermediate-size 8 with --moe-beside-mlp, .* remove one",
        ),
        ({"moe_latent_size": 8}, ""),
        (
            {
                **{"moe_shared_expert_intermediate_size": 8, "moe_shared_expert_gate": True},
                "add_bias_linear": True,
            },
            "--moe-shared-expert-gate with --add-bias-linear: .* pass --disable-bias-linear",
        ),
        ({"moe_latent_size": 8, "add_mlp_bias": True}, "--moe-latent-size 8 with --add-mlp-bias: it"),
    ],
)
def test_experts_have_these_options(changes: dict[str, Any], expected: str) -> None:
    model = ModelConfig(num_experts=8, **{"add_bias_linear": False, **changes})
    problems = [problem.text for problem in _problems(Config(model=model))]
    assert len(problems) == bool(expected)
    assert all(re.search(expected, problem) for problem in problems)


def test_a_folding_whose_ranks_do_not_multiply_is_refused() -> None:
    parallel = ParallelConfig(expert_model_parallel_size=4, data_parallel_size=6)
    (problem,) = world(Config(model=ModelConfig(num_experts=8), parallel=parallel), 6)
    assert "world size 6 is not a multiple of " in problem.text and "--ep 4" in problem.text


def test_expert_parallelism_of_a_dense_model_is_refused() -> None:
    (problem,) = expert_parallel(Config(parallel=ParallelConfig(expert_model_parallel_size=2)), None)
    assert problem.text.startswith("--expert-model-parallel-size 2 without experts: pass --num-experts")


def test_even_tokens_are_not_planned_as_uneven() -> None:
    model = ModelConfig(num_experts=8, moe_router_force_load_balancing=True)
    for factor, number in ((1.0, 0), (1.5, 1)):
        config = Config(
            model=model, parallel=ParallelConfig(moe_imbalance=factor, expert_model_parallel_size=2)
        )
        problems = [problem.text for problem in _problems(config)]
        assert len(problems) == number
        assert all(text.startswith("--moe-imbalance 1.5 with --moe-router-force") for text in problems)


@pytest.mark.parametrize(("capacity", "number"), [(1.25, 1), (1.5, 0), (None, 0)])
def test_no_expert_is_planned_above_its_capacity(capacity: float | None, number: int) -> None:
    model = ModelConfig(num_experts=8, moe_expert_capacity_factor=capacity)
    config = Config(model=model, parallel=ParallelConfig(moe_imbalance=1.5))
    problems = [problem.text for problem in imbalance(config, None)]
    assert len(problems) == number
    assert all(text.endswith("limits every expert: pass at most --moe-imbalance 1.25") for text in problems)


@pytest.mark.parametrize(("ep", "number"), [(1, 1), (2, 0)])
def test_an_imbalance_between_ranks_needs_several(ep: int, number: int) -> None:
    parallel = ParallelConfig(moe_imbalance=1.5, expert_model_parallel_size=ep)
    config = Config(model=ModelConfig(num_experts=8), parallel=parallel)
    found = [line for line in unused_options(config) if line.startswith("--moe-imbalance 1.5 has no effect")]
    assert len(found) == number


def test_a_gate_needs_a_shared_expert() -> None:
    model = ModelConfig(num_experts=8, moe_shared_expert_gate=True, add_bias_linear=False)
    (problem,) = _problems(Config(model=model))
    assert problem.text.startswith(
        "--moe-shared-expert-gate without --moe-shared-expert-intermediate-size: pass"
    )


@pytest.mark.parametrize(
    ("logs", "replayed", "has_forced", "expected"),
    [
        ({"record_routing": "a", "record_routing_iterations": "5:6"}, None, True, ""),
        ({}, "a", False, ""),
        (
            {"record_routing": "a"},
            "b",
            False,
            "--record-routing a with --replay-routing-from b: ",
        ),
        ({}, "b", True, "b with --moe-router-force-load-balancing: both select the experts of tokens"),
    ],
)
def test_a_run_has_one_source_of_experts(
    logs: dict[str, Any], replayed: str | None, has_forced: bool, expected: str
) -> None:
    config = Config(
        model=ModelConfig(num_experts=8, moe_router_force_load_balancing=has_forced),
        logging=LoggingConfig(**logs),
        training=TrainingConfig(replay_routing_from=replayed),
    )
    problems = [problem.text for problem in _problems(config)]
    assert len(problems) == bool(expected)
    assert all(re.search(expected, problem) for problem in problems)


def test_iterations_without_a_folder_have_no_effect() -> None:
    config = Config(logging=LoggingConfig(record_routing_iterations="5"))
    assert unused_options(config) == [
        "--record-routing-iterations 5 has no effect: --record-routing is not set"
    ]


def test_files_have_no_experts_of_cut_samples() -> None:
    config = Config(
        model=ModelConfig(num_experts=8),
        training=TrainingConfig(replay_routing_from="a", seq_length_schedule=("0:512", "1M:1024")),
    )
    (problem,) = _problems(config)
    assert (
        "--replay-routing-from a with --seq-length-schedule 0:512 1M:1024, which cuts samples" in problem.text
    )


@pytest.mark.parametrize(
    ("parallel", "is_refused"),
    [
        (ParallelConfig(expert_model_parallel_size=2), True),
        (
            ParallelConfig(
                tensor_model_parallel_size=2, expert_model_parallel_size=2, expert_tensor_parallel_size=1
            ),
            False,
        ),
    ],
)
def test_an_audit_needs_experts_that_sum_tokens_of_one_replica(
    parallel: ParallelConfig, is_refused: bool
) -> None:
    training = TrainingConfig(audit_interval=3)
    config = Config(model=ModelConfig(num_experts=8), parallel=parallel, training=training)
    problems = [problem.text for problem in audited_experts(config, None)]
    assert [each.split(":")[0] for each in problems] == ["--audit-interval 3 with --ep 2"] * is_refused
