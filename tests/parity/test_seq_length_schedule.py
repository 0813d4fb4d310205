"""Short sequences first: the same run in any layout, and the run that shorter samples would give."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from megalite.config import Config, DataConfig, OptimizerConfig, TrainingConfig
from megalite.config.presets import PRESETS
from megalite.data.samples import MockDataset
from megalite.distributed.topology import Topology
from megalite.observe.verify.compare_runs import TOLERANCES, compare
from megalite.observe.verify.record_run import RunRecord
from megalite.train.trainer import start_trainer
from tests.parity.models import run_alone, run_in

SHORT, LONG, GLOBAL_BATCH_SIZE, NUM_ITERATIONS = 16, 64, 8, 4
VOCABULARY = 200
SCHEDULE = ("0:16", f"{2 * GLOBAL_BATCH_SIZE * LONG}:32", f"{3 * GLOBAL_BATCH_SIZE * LONG}:64")
DOCUMENTS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
MODELS = {
    "gpt": replace(PRESETS["gpt-tiny"], hidden_dropout=0.1, attention_dropout=0.1),
    "bloom": PRESETS["bloom-tiny"],
    "llama": PRESETS["llama-tiny"],
    "later tokens": replace(PRESETS["llama-tiny"], mtp_num_layers=2),
    "experts": replace(
        PRESETS["llama-tiny"],
        num_experts=8,
        moe_router_topk=2,
        moe_ffn_hidden_size=40,
        moe_input_jitter_eps=0.1,
    ),
}


def _config(model: str, *options: str) -> Config:
    return Config(
        model=replace(MODELS[model], vocab_size=VOCABULARY, params_dtype="fp64", seq_length=LONG),
        optimizer=OptimizerConfig(lr=3e-3, lr_decay_style="constant"),
        data=DataConfig(mock_data=True, **dict.fromkeys(options, True)),
        training=TrainingConfig(
            micro_batch_size=2,
            global_batch_size=GLOBAL_BATCH_SIZE,
            train_iters=NUM_ITERATIONS,
            eval_iters=1,
            seq_length_schedule=SCHEDULE,
        ),
    )


@functools.cache
def _reference(model: str, *options: str) -> RunRecord:
    return run_alone(_config(model, *options), NUM_ITERATIONS)


@pytest.mark.parametrize(
    ("model", "name", "options"),
    [
        ("gpt", "tp2pp2dp2+sp", ()),
        ("gpt", "pp4", DOCUMENTS),
        ("llama", "pp2cp2+p2p", DOCUMENTS),
        pytest.param("bloom", "cp2dp2mbs1", DOCUMENTS, marks=pytest.mark.slow),
        pytest.param("later tokens", "pp2cp2mbs1", DOCUMENTS, marks=pytest.mark.slow),
        pytest.param("later tokens", "tp2dp2", (), marks=pytest.mark.slow),
        pytest.param("experts", "ep2dp2pp2", (), marks=pytest.mark.slow),
        pytest.param("experts", "cp2mbs1+p2p+dynamic", DOCUMENTS, marks=pytest.mark.slow),
        pytest.param("gpt", "pp2cp2+p2p+dynamic", DOCUMENTS, marks=pytest.mark.slow),
    ],
)
def test_same_run(model: str, name: str, options: tuple[str, ...]) -> None:
    run = run_in(name, _config(model, *options), NUM_ITERATIONS)
    assert not compare(run, _reference(model, *options)).excesses(TOLERANCES["fp64"])


def _short_sample(dataset: MockDataset, index: int) -> npt.NDArray[np.int64]:
    """Return a sequence of the long sample that holds it."""
    tokens = np.random.default_rng((7, index // (LONG // SHORT))).integers(0, VOCABULARY, LONG + 1)
    first = index % (LONG // SHORT) * SHORT
    return tokens[first : first + SHORT + 1]


def _long_sample(dataset: MockDataset, index: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng((7, index)).integers(0, VOCABULARY, LONG + 1)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("gpt", ()),
        ("later tokens", DOCUMENTS),
        pytest.param("gpt", DOCUMENTS, marks=pytest.mark.slow),
        pytest.param("later tokens", (), marks=pytest.mark.slow),
    ],
)
def test_its_first_iterations_train_on_short_samples(
    model: str, options: tuple[str, ...], one_rank: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit as with a short --seq-length, dropout included, and later no more."""
    config = _config(model, *options)
    short = replace(
        config,
        model=replace(config.model, seq_length=SHORT),
        training=replace(
            config.training,
            seq_length_schedule=None,
            micro_batch_size=config.training.micro_batch_size * LONG // SHORT,
            global_batch_size=GLOBAL_BATCH_SIZE * LONG // SHORT,
        ),
    )
    losses = []
    for each, sample in ((config, _long_sample), (short, _short_sample)):
        monkeypatch.setattr(MockDataset, "__getitem__", sample)
        with start_trainer(each, one_rank) as trainer:
            losses.append([(step.loss, step.grad_norm) for step in (trainer.step() for _ in range(3))])
    assert losses[0][:2] == losses[1][:2]
    assert losses[0][2] != losses[1][2]
