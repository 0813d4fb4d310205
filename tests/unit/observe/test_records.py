"""What a record of a unit contains, by the sizes of the model."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from megalite.config import ModelConfig
from megalite.config.presets import PRESETS
from megalite.observe import records
from megalite.observe.record_unit import layer_kinds, record_unit
from megalite.observe.records import kinds_of_layers, unit_record
from megalite.observe.unit_record import EMBEDDING, HEAD, PhaseRecord, UnitKey, UnitRecord, from_json
from megalite.plan.plan_request import model_of
from megalite.utils.errors import UserError
from tests.unit.observe import own_models

LLAMA = ModelConfig(
    num_layers=2,
    hidden_size=64,
    ffn_hidden_size=96,
    num_attention_heads=4,
    num_query_groups=2,
    seq_length=32,
    vocab_size=256,
    params_dtype="bf16",
    position_embedding_type="rope",
    activation="swiglu",
    normalization="RMSNorm",
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
H, D, S, B = 64, 16, 32, 2


def key_of(model: ModelConfig = LLAMA, unit: str | int = 0, tp: int = 1, **fields) -> UnitKey:
    settings = {"micro_batch_size": B, "sequence_parallel": tp > 1, "splits_backward": False, **fields}
    has_documents = model.architecture == "bert"
    return UnitKey(model, unit, tp, positions=model.seq_length, has_documents=has_documents, **settings)


def gemms(phase: PhaseRecord) -> list[tuple[int, int, int]]:
    return [(gemm.m, gemm.n, gemm.k) for gemm in phase.gemms]


@pytest.mark.parametrize("splits_backward", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_layer_of_llama(tp: int, splits_backward: bool) -> None:
    layer = record_unit(key_of(tp=tp, splits_backward=splits_backward))
    tokens = B * S
    weights = [(4 + 2 * 2) * D // tp, H // tp, 2 * 96 // tp, 96 // tp]
    forward = [
        (tokens, weights[0], H),
        (tokens, H, weights[1]),
        (tokens, weights[2], H),
        (tokens, H, weights[3]),
    ]
    assert gemms(layer.forward) == forward
    inputs = [(m, k, n) for m, n, k in reversed(forward)]
    outer = [(n, k, m) for m, n, k in reversed(forward)]
    if splits_backward:
        assert (gemms(layer.backward), gemms(layer.weight)) == (inputs, outer)
    else:
        assert gemms(layer.backward) == [each for pair in zip(inputs, outer, strict=True) for each in pair]
        assert gemms(layer.weight) == []
    assert [(call.heads, call.kv_heads, call.keys, call.size) for call in layer.forward.attention] == [
        (B * 4 // tp, B * 2 // tp, S, D)
    ]
    assert sum(weight.size for weight in layer.weights) == sum(n * k for _, n, k in forward) + 2 * H
    elements = {
        "input": H,
        "layernorm": 3 * H,  # both outputs, and the sum of the residual connection
        "attention": 8 * D,  # queries, keys and values
        "core_attn": (6 + 4) * D,  # rotated queries and keys, and the output
        "mlp": 2 * 96,
        "mlp_act": 96,
    }
    statistics = 4 * tokens * 4 / tp
    assert dict(layer.saved).keys() == elements.keys()
    for part, num_bytes in layer.saved:
        assert num_bytes == pytest.approx(2 * tokens * elements[part] / tp, abs=statistics + 200), part
    assert layer.saved_bytes == pytest.approx(2 * tokens * sum(elements.values()) / tp + statistics, abs=200)


def test_collectives_of_a_layer_know_their_gemms() -> None:
    whole, split = (record_unit(key_of(tp=2, splits_backward=is_split)) for is_split in (False, True))
    kinds = [(each.call.kind, each.gemm, each.is_hidden) for each in whole.forward.collectives]
    assert kinds == [
        ("all-gather", 0, False),
        ("reduce-scatter", 1, False),
        ("all-gather", 2, False),
        ("reduce-scatter", 3, False),
    ]
    assert {each.call.num_bytes for each in whole.forward.collectives} == {2 * B * S * H}
    hidden = [each.gemm for each in whole.backward.collectives if each.is_hidden]
    assert hidden == [3, 7]  # the inputs of up and qkv, for the gradients of their weights
    assert not [each for each in split.backward.collectives if each.is_hidden]
    assert [each.call.kind for each in split.weight.collectives] == ["all-gather"] * 2
    plain = record_unit(key_of(tp=2, sequence_parallel=False))
    assert [each.call.kind for each in plain.forward.collectives] == ["all-reduce"] * 2
    assert [each.call.axis for each in plain.backward.collectives] == ["tp"] * 2


@pytest.mark.parametrize(
    "model", [LLAMA, PRESETS["gpt2-124m"], replace(PRESETS["bert-tiny"], vocab_size=301)]
)
@pytest.mark.parametrize("unit", [EMBEDDING, 0, HEAD])
def test_larger_microbatches_follow_from_those_of_one_and_two_samples(
    model: ModelConfig, unit: str | int
) -> None:
    model = replace(model, vocab_size=301, seq_length=32, params_dtype="bf16")
    key = key_of(model, unit, tp=2, micro_batch_size=5)
    assert unit_record(key) == record_unit(key)


def test_recomputation_saves_less_and_runs_more() -> None:
    plain, again = (record_unit(key_of(recomputed_modules=modules)) for modules in ((), ("core_attn",)))
    assert [call.is_backward for call in plain.backward.attention] == [True]
    assert [call.is_backward for call in again.backward.attention] == [False, True]
    assert again.saved_bytes < plain.saved_bytes
    assert again.forward == replace(plain.forward, num_operators=again.forward.num_operators)


def _long_head(num_chunks: int) -> UnitKey:
    return key_of(unit=HEAD, micro_batch_size=64, cross_entropy_chunks=num_chunks)


def test_a_head_in_chunks_needs_less_memory() -> None:
    whole, chunks = (record_unit(_long_head(number)) for number in (1, 8))
    logits = 2 * 64 * S * 256
    assert logits < whole.saved_bytes < 1.6 * logits
    assert chunks.saved_bytes + chunks.workspace_bytes < 0.7 * (whole.saved_bytes + whole.workspace_bytes)


def test_the_loss_reads_the_logits_and_overwrites_them_with_their_gradient() -> None:
    model = replace(LLAMA, vocab_size=8192, pad_vocab_size_to=8192)
    head, logits = record_unit(key_of(model, HEAD)), 2 * B * S * 8192
    assert head.forward.kernel_bytes == pytest.approx(logits, rel=0.1)
    assert head.backward.kernel_bytes == pytest.approx(2 * logits, rel=0.1)


def test_gemms_of_weight_gradients_add_to_their_sums() -> None:
    layer = record_unit(key_of())
    added = sum(gemm.m * gemm.n for gemm in layer.backward.gemms if gemm.adds)
    assert added == sum(weight.size for weight in layer.weights if len(weight.shape) > 1)
    assert not any(gemm.adds for gemm in layer.forward.gemms)


def test_a_tied_weight_is_in_both_ends() -> None:
    tied = replace(LLAMA, untie_embeddings_and_output_weights=False)
    for unit in (EMBEDDING, HEAD):
        names = {weight.name for weight in record_unit(key_of(tied, unit)).weights if weight.is_tied}
        assert names == {"embedding.word.weight"}
        assert not [weight for weight in record_unit(key_of(LLAMA, unit)).weights if weight.is_tied]


def test_records_survive_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = record_unit(key_of(tp=2, splits_backward=True))
    assert from_json(UnitRecord, json.loads(json.dumps(asdict(record)))) == record
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for function in (records._path, records._known, records.unit_record):
        monkeypatch.setattr(records, function.__name__, getattr(function, "__wrapped__", function))
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    for rank in (1, 0):
        monkeypatch.setattr("torch.distributed.get_rank", lambda rank=rank: rank)
        assert records.unit_record(key_of()) == record_unit(key_of())
        assert any(tmp_path.rglob("*.jsonl")) == (rank == 0)  # a thousand ranks would write it at once
    (path,) = tmp_path.rglob("*.jsonl")
    path.write_text("{damaged\n" + path.read_text())
    monkeypatch.setattr("megalite.observe.record_unit.record_unit", None)  # not called again
    assert records.unit_record(key_of()).saved_bytes > 0


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (0, 0, 0, 0)),
        ({"num_experts": 4, "moe_layer_freq": (0, 1, 1, 0)}, (0, 1, 1, 0)),
        ({"window_size": (9, 0), "window_attn_skip_freq": (3,), "no_rope_freq": (2,)}, (0, 1, 2, 1)),
        (
            {"window_size": (9, 0), "window_attn_skip_freq": (2,), "full_attention_kv_channels": 8},
            (0, 1, 0, 1),
        ),
        ({"num_kv_shared_layers": 1, "kv_shared_ffn_hidden_size": 64}, (0, 0, 2, 3)),
        (
            {"recurrent_mixer": "gated_delta_net", "linear_attention_freq": (2,), "linear_num_key_heads": 4}
            | {"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
            (0, 1, 0, 1),
        ),
    ],
)
def test_the_config_names_the_kinds_of_our_layers(fields: dict[str, Any], expected: tuple[int, ...]) -> None:
    """Building all layers of a large model to compare them would take seconds."""
    key = key_of(replace(LLAMA, num_layers=4, **fields))
    assert kinds_of_layers(key) == layer_kinds(key) == expected


def test_reads_of_values_are_refused_by_line() -> None:
    line = r"own_models.py, line \d+, in forward,"
    with pytest.raises(UserError, match=f"{line} reads a value from the device"):
        record_unit(key_of(provider=own_models.ReadingModel))
    with pytest.raises(UserError, match=f"{line} raises .*a plan runs the model"):
        record_unit(key_of(provider=own_models.SelectingModel))


def test_layers_of_several_kinds() -> None:
    key = key_of(replace(LLAMA, num_layers=5), provider=own_models.MixedModel)
    assert layer_kinds(key) == (0, 1, 0, 1, 4)


def test_one_sample_in_another_order_is_one_gemm() -> None:
    """Permuting dims can leave a dim of size 1 with a stride for which torch multiplies row by row."""
    own = model_of(Path(__file__).parents[3] / "examples" / "own_model.py")
    key = key_of(replace(LLAMA, activation="gelu"), micro_batch_size=1, provider=own)
    assert [(gemm.m, gemm.batch) for gemm in record_unit(key).forward.gemms] == [(S, 1), (S, 1)]
