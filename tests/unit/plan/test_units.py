"""Records of layers with attention and a recurrence side by side, on ranks that share a sample."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest

from megalite.config import ModelConfig, ParallelConfig
from megalite.config.parallel import CpCommType
from megalite.config.presets import PRESETS
from megalite.observe.unit_record import PhaseRecord, UnitKey, UnitRecord
from megalite.plan.units import UnitsKey, units_of

MODEL = replace(
    PRESETS["nemotron-h-tiny"],
    **{"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "mamba_num_groups": 8},
    **{"seq_length": 64, "vocab_size": 256, "params_dtype": "bf16"},
)


def layer_of(
    pattern: str, cp: int, comm_type: CpCommType, model: ModelConfig = MODEL, has_documents: bool = False
) -> UnitRecord:
    """Return the record of the first layer of a pattern."""
    key = UnitKey(
        replace(model, hybrid_override_pattern=pattern),
        *(0, 1, model.seq_length // cp, 2),
        sequence_parallel=False,
        has_documents=has_documents,
        splits_backward=False,
    )
    parallel = ParallelConfig(context_parallel_size=cp, cp_comm_type=(comm_type,))
    return units_of(UnitsKey(key, parallel.key_exchanges)).layers[0]


def work_of(phase: PhaseRecord) -> Counter[object]:
    """Return the GEMMs, attention and messages of a phase."""
    return Counter([*phase.gemms, *phase.attention, *(each.call for each in phase.collectives)])


@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize(
    ("cp", "comm_type"), [(2, "a2a"), (2, "p2p"), (2, "all_gather"), (8, "p2p")], ids=str
)
def test_both_mixers_do_and_save_what_each_does_alone(
    cp: int, comm_type: CpCommType, has_documents: bool
) -> None:
    """Eight ranks are more than the attention heads, and exchange the heads of Mamba-2 alone."""
    record = partial(layer_of, cp=cp, comm_type=comm_type, has_documents=has_documents)
    both, attention, mamba = (record(pattern) for pattern in ("B-", "*-", "M-"))
    for found, first, second in zip(both.phases(), attention.phases(), mamba.phases(), strict=True):
        assert work_of(found) == work_of(first) + work_of(second)
    assert len(both.forward.attention) == 1
    assert len(both.forward.collectives) == 2
    saved, first, second = (dict(each.saved) for each in (both, attention, mamba))
    assert saved["core_attn"] == first["core_attn"]
    assert saved["mixers"] == first["attention"] + second["mamba"]
