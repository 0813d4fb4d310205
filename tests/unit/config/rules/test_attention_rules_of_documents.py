"""Documents are assigned where samples have documents, and messages depend on them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megalite.config import Config, DataConfig, ParallelConfig
from megalite.config.presets import PRESETS
from megalite.config.rules.attention_rules import assigned_documents
from megalite.config.validate import conflicts

ASSIGNED = Config(
    model=PRESETS["llama-tiny"],
    data=DataConfig(reset_attention_mask=True),
    parallel=ParallelConfig(
        context_parallel_size=2, cp_comm_type="p2p", dynamic_context_parallel=True, zero_stage=1
    ),
)


def problems(config: Config) -> list[str]:
    return [problem.text for rule in (conflicts, assigned_documents) for problem in rule(config, None)]


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
    ],
)
def test_another_option_is_refused(part: str, options: dict[str, Any], text: str) -> None:
    found = problems(replace(ASSIGNED, **{part: replace(getattr(ASSIGNED, part), **options)}))
    assert sum(text in each for each in found) == 1
