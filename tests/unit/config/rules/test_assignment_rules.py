"""Documents are assigned where samples have documents, and not with random numbers by position."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megalite.config import Config, DataConfig, ParallelConfig
from megalite.config.presets import PRESETS
from megalite.config.rules.assignment_rules import assigned_documents

ASSIGNED = Config(
    model=PRESETS["llama-tiny"],
    data=DataConfig(reset_attention_mask=True),
    parallel=ParallelConfig(
        context_parallel_size=2, cp_comm_type="p2p", dynamic_context_parallel=True, zero_stage=1
    ),
)


def problems(config: Config) -> list[str]:
    return [problem.text for problem in assigned_documents(config, None)]


def test_packed_documents_can_be_assigned() -> None:
    best_fit = replace(ASSIGNED, data=DataConfig(document_packing="best_fit"))
    assert problems(ASSIGNED) == problems(best_fit) == []
    assert ASSIGNED.mesh.assigns_documents and not ASSIGNED.masks_documents


def test_one_rank_has_nothing_to_assign() -> None:
    alone = replace(ASSIGNED, data=DataConfig(), parallel=ParallelConfig(dynamic_context_parallel=True))
    assert not problems(alone) and not alone.mesh.assigns_documents


@pytest.mark.parametrize(
    ("part", "options", "text"),
    [
        ("parallel", {"cp_comm_type": "a2a"}, "pass --cp-comm-type p2p"),
        ("data", {"reset_attention_mask": False}, "pass --reset-attention-mask or --document-packing"),
        ("model", {"architecture": "bert"}, "without documents that a causal model attends within"),
        ("training", {"seq_length_schedule": ("16", "32:100")}, "--seq-length-schedule with"),
        ("training", {"eval_tasks": "arc_easy"}, "--eval-tasks arc_easy with --dynamic-context-parallel"),
        ("training", {"replay_routing_from": "f"}, "--replay-routing-from f with --dynamic-context-parallel"),
        ("logging", {"record_routing": "f"}, "--record-routing f with --dynamic-context-parallel"),
        ("model", {"recurrent_mixer": "gated_delta_net"}, "--dynamic-context-parallel with recurrent layers"),
        ("model", {"hidden_dropout": 0.1}, "--hidden-dropout 0.1 with --dynamic-context-parallel"),
        ("model", {"moe_input_jitter_eps": 0.1}, "--moe-input-jitter-eps 0.1 with"),
        ("model", {"moe_expert_capacity_factor": 1.0}, "--moe-expert-capacity-factor 1.0 with"),
        ("model", {"moe_router_force_load_balancing": True}, "--moe-router-force-load-balancing with"),
    ],
)
def test_another_option_is_refused(part: str, options: dict[str, Any], text: str) -> None:
    (found,) = problems(replace(ASSIGNED, **{part: replace(getattr(ASSIGNED, part), **options)}))
    assert text in found
