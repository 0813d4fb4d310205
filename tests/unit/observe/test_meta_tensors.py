"""Bytes of a record by part, compared with what autograd saves in a real layer."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megalite.config.recompute import Module
from megalite.data.microbatch import LayerState, Microbatch
from megalite.distributed.topology import Topology
from megalite.model.stage import Stage
from megalite.observe.meta_tensors import OTHER, LiveBytes, watch_parts
from megalite.observe.record_unit import record_unit
from megalite.observe.unit_record import INPUT
from tests.stages import build_stage
from tests.unit.observe import own_models
from tests.unit.observe.test_records import LLAMA, B, key_of

# As on a GPU: torch on a CPU keeps more of an RMSNorm, and copies shared keys and values.
MODELS = {
    "gpt": replace(LLAMA, num_query_groups=None, normalization="LayerNorm", activation="gelu"),
    "dropout": replace(LLAMA, num_query_groups=None, normalization="LayerNorm", hidden_dropout=0.1),
}


SLACK = 0.04
"""Statistics of norms and of fused attention."""


def saved_by_autograd(stage: Stage, microbatch: Microbatch, x: Tensor) -> Counter[str]:
    """Return the bytes of the storages that a layer's forward saves, by the part that makes them."""
    found, seen = Counter[str](), {parameter.untyped_storage().data_ptr() for parameter in stage.parameters()}
    (layer,) = stage.layers.values()
    inputs = stage.layer_inputs(microbatch)
    tables = {each.untyped_storage().data_ptr() for each in stage.tables()}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen | tables and tensor.is_floating_point():
            seen.add(storage.data_ptr())
            found[INPUT if storage.data_ptr() == x.data_ptr() else live.part_of(tensor)] += storage.nbytes()
        return tensor

    with LiveBytes() as live, saved_tensors_hooks(note, lambda tensor: tensor):
        watch_parts(stage, live)
        output = stage.run_layers([layer], LayerState(x), *inputs)
    del output
    return found


@pytest.mark.parametrize("name", MODELS)
def test_a_record_has_the_tensors_that_autograd_saves(name: str, one_rank: Topology) -> None:
    model = replace(MODELS[name], params_dtype="fp32")
    stage = build_stage(model, one_rank, [0], seed=3)
    ids = torch.zeros(B, model.seq_length, dtype=torch.int64)
    x = torch.randn(model.seq_length, B, model.hidden_size, requires_grad=True)
    microbatch = Microbatch(ids, ids, torch.arange(B))
    stage.prepare_tables(model.seq_length)
    real = saved_by_autograd(stage, microbatch, x)
    record = dict(record_unit(key_of(model)).saved)
    assert OTHER not in record
    assert record.keys() == real.keys()
    assert record.keys() >= {*get_args(Module)} - {"mla_up_proj"}  # whose tensors are of "attention"
    for part, num_bytes in record.items():
        assert num_bytes == pytest.approx(real[part], rel=SLACK), part


def test_parts_of_a_layer_of_your_own_are_its_modules() -> None:
    layer = record_unit(key_of(provider=own_models.MixedModel))
    tokens = B * LLAMA.seq_length
    assert dict(layer.saved) == {"input": 2 * tokens * LLAMA.hidden_size, "OwnLayer": 2 * tokens * 32}
