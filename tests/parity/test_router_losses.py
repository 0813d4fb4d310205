"""The terms, counts and gradients of routers under masks and padding, in any layout."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.config import Config, DataConfig, OptimizerConfig, TrainingConfig
from megalite.config.presets import PRESETS
from megalite.model.experts import BALANCE_LOSS, ROUTER_Z_LOSS
from megalite.observe.verify.compare_runs import TOLERANCES, compare
from megalite.observe.verify.record_run import RunRecord
from tests.chat import write_masked
from tests.parity.models import run_alone, run_in

LAYERS, EXPERTS = 4, 4
MASKS: dict[str, dict[str, Any]] = {
    "no mask": {},
    "ends of documents": {"eod_mask_loss": True},
    "answers": {"sft": True},
    "answers without packing": {"sft": True, "sft_packing": False},
}
COUNTED = {
    **{"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
    **{"moe_router_bias_update_rate": 0.05, "moe_router_load_balancing_type": "global_aux_loss"},
}
"""A model whose buffers follow the counts."""
LIMITED = {"moe_expert_capacity_factor": 1.0, "moe_input_jitter_eps": 0.1, "mtp_num_layers": 1}


def _config(data: DataConfig, seq_length: int = 64, **options: Any) -> Config:
    fields: dict[str, Any] = {
        **{"vocab_size": 300, "params_dtype": "fp64", "seq_length": seq_length, "num_layers": LAYERS},
        **{"num_experts": EXPERTS, "moe_router_topk": 2, "moe_ffn_hidden_size": 24, "moe_z_loss_coeff": 0.1},
    }
    return Config(
        model=replace(PRESETS["llama-tiny"], **{**fields, **options}),
        optimizer=OptimizerConfig(lr=3e-3, lr_decay_style="constant"),
        data=data,
        training=TrainingConfig(micro_batch_size=2, global_batch_size=8, train_iters=3, eval_iters=0),
    )


def _masked(mask: str, **model: Any) -> Config:
    return _config(DataConfig(mock_data=True, **MASKS[mask]), **model)


@pytest.mark.parametrize("mask", MASKS)
def test_the_balance_of_all_experts_is_the_coefficient_of_each_layer(mask: str) -> None:
    """If each token has all experts, the balance is 1 for each token, whatever has a loss or is padding."""
    config = _masked(mask, moe_router_topk=EXPERTS, moe_aux_loss_coeff=0.01, mtp_num_layers=2)
    (terms,) = run_in("dp2", config, 1).terms
    assert terms[BALANCE_LOSS] == pytest.approx(0.01 * LAYERS, rel=1e-13)
    # Of the tokens with a later one, which are fewer.
    assert [terms[f"mtp_{ahead}_{BALANCE_LOSS}"] for ahead in (1, 2)] == pytest.approx([0.01] * 2, rel=1e-13)


def test_the_gradient_of_a_router_does_not_depend_on_the_tokens_with_a_loss() -> None:
    def of_terms(*, eod_mask_loss: bool) -> dict[str, Tensor]:
        """Return the gradients of the routers' terms: with them, minus without them."""
        data = DataConfig(mock_data=True, reset_position_ids=True, eod_mask_loss=eod_mask_loss)
        with_terms, without = (
            run_alone(_config(data, moe_aux_loss_coeff=coeff, moe_z_loss_coeff=coeff), 1).gradients
            for coeff in (0.1, 0.0)
        )
        return {name: each - without[name] for name, each in with_terms.items()}

    plain, masked = (of_terms(eod_mask_loss=each) for each in (False, True))
    assert any("router" in name and each.abs().max() > 1e-3 for name, each in plain.items())
    for name, gradient in plain.items():
        torch.testing.assert_close(masked[name], gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("model", [{}, COUNTED | {"mtp_num_layers": 1}], ids=["loss", "loads and biases"])
def test_a_document_is_routed_as_without_its_padding(model: dict[str, Any], tmp_path: Path) -> None:
    """Documents of 40 tokens fill samples of 39 positions, and leave 25 of 64 to padding."""
    prefix = write_masked(str(tmp_path / "documents"), [40] * 40)
    runs = []
    for seq_length in (39, 64):
        data = DataConfig(data_path=(prefix,), split="100,0,0", document_packing="best_fit")
        # The order of samples is that of an epoch, which has as many samples.
        runs.append(run_alone(_config(data, seq_length, vocab_size=1600, **model), 2))
    short, padded = runs
    for terms, expected in zip(padded.terms, short.terms, strict=True):
        assert terms == pytest.approx(expected, rel=1e-12)
        assert expected.keys() >= {BALANCE_LOSS, ROUTER_Z_LOSS}
    for name in short.weights:
        torch.testing.assert_close(padded.weights[name], short.weights[name], rtol=1e-9, atol=1e-10)
    assert any("expert_bias" in name for name in short.weights) == bool(model)


def test_later_tokens_of_other_documents_count_nowhere(tmp_path: Path) -> None:
    """One document of 40 tokens fills a sample of 39 positions, and two fill one of 78."""
    prefix = write_masked(str(tmp_path / "documents"), [40] * 40)
    found = []
    for seq_length, global_batch_size in ((39, 40), (78, 20)):
        data = DataConfig(data_path=(prefix,), split="100,0,0", document_packing="best_fit")
        config = _config(data, seq_length, vocab_size=1600, mtp_num_layers=2)
        training = replace(config.training, global_batch_size=global_batch_size, train_iters=1)
        (terms,) = run_alone(replace(config, training=training), 1).terms
        # Balance is that of a sample, which has other documents.
        found.append({name: value for name, value in terms.items() if "balancing" not in name})
    assert found[0].keys() >= {ROUTER_Z_LOSS, f"mtp_1_{ROUTER_Z_LOSS}", f"mtp_2_{ROUTER_Z_LOSS}"}
    assert found[1] == pytest.approx(found[0], rel=1e-12)


@functools.cache
def _reference(mask: str, options: tuple[tuple[str, Any], ...]) -> RunRecord:
    return run_alone(_masked(mask, **dict(options)), 2)


@pytest.mark.parametrize(
    ("mask", "model", "name"),
    [
        ("answers without packing", COUNTED, "pp4mbs1"),  # stages that would read no samples
        ("answers", COUNTED, "tp2cp2+sp"),
        ("answers", LIMITED, "tp2dp2+sp"),
        ("ends of documents", COUNTED, "pp4"),
        *(
            pytest.param(mask, model, name, marks=pytest.mark.slow)
            for mask, model, name in (
                ("answers without packing", LIMITED, "cp2dp2ep4+p2p"),
                ("answers", COUNTED, "pp2dpvdp2ep2mbs1+zero2"),
                ("answers", COUNTED, "tp2dp2ep4etp1+sp+zero1+allgather"),
                ("answers", LIMITED, "pp2cp2+full+a2a"),
                ("answers", COUNTED, "cp2+p2p+dynamic"),
            )
        ),
    ],
)
def test_same_run(mask: str, model: dict[str, Any], name: str) -> None:
    run = run_in(name, _masked(mask, **model), 2)
    assert not compare(run, _reference(mask, tuple(model.items()))).excesses(TOLERANCES["fp64"])
