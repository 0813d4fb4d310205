"""Fine-tuning on conversations: the same run in any layout, and the same loss with and without packing."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from megalite.config import Config, DataConfig, OptimizerConfig, TrainingConfig
from megalite.config.presets import PRESETS
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.loss_mask import LossMask
from megalite.data.microbatch import Microbatch
from megalite.distributed.topology import Topology
from megalite.observe.verify.compare_runs import TOLERANCES, compare
from megalite.observe.verify.record_run import RunRecord
from megalite.train.trainer import start_trainer
from tests.chat import VOCABULARY, conversations, preprocess_chat
from tests.parity.models import run_alone, run_in

NUM_ITERATIONS, GLOBAL_BATCH_SIZE, SEQ_LENGTH = 2, 8, 128
DROPOUT = {"gpt-tiny": 0.1, "bloom-tiny": 0.0, "llama-tiny": 0.0}
NUM_CONVERSATIONS = 140
EVALUATED = range(112, 140)
"""Conversations of the validation split, a fifth."""


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prefix of the conversations, some of which do not fit a sample."""
    return preprocess_chat(tmp_path_factory.mktemp("chat"), conversations(NUM_CONVERSATIONS))


def _config(prefix: str, model: str, dropout: float = 0.0, **options: object) -> Config:
    return Config(
        model=replace(
            PRESETS[model],
            hidden_dropout=dropout,
            attention_dropout=dropout,
            vocab_size=VOCABULARY,
            params_dtype="fp64",
            seq_length=SEQ_LENGTH,
        ),
        optimizer=OptimizerConfig(lr=3e-3, lr_decay_style="constant"),
        data=DataConfig(data_path=(prefix,), split="80,20,0", sft=True, **options),  # type: ignore[arg-type]
        training=TrainingConfig(
            micro_batch_size=2, global_batch_size=GLOBAL_BATCH_SIZE, train_iters=NUM_ITERATIONS, eval_iters=4
        ),
    )


@functools.cache
def _reference(prefix: str, model: str, packs: bool) -> RunRecord:
    return run_alone(_config(prefix, model, DROPOUT[model], sft_packing=packs), NUM_ITERATIONS)


@pytest.mark.parametrize(
    ("model", "name", "packs"),
    [
        ("llama-tiny", "tp2pp2dp2", True),
        ("llama-tiny", "dp4mbs1", True),
        ("llama-tiny", "pp4", True),  # between the first and the last stage
        pytest.param("llama-tiny", "cp4", False, marks=pytest.mark.slow),  # padding fills whole slices
        pytest.param("bloom-tiny", "tp2pp2dp2", True, marks=pytest.mark.slow),
        pytest.param("gpt-tiny", "tp2pp2dp2", True, marks=pytest.mark.slow),
        pytest.param("gpt-tiny", "tp2pp2dp2+sp+zero1", False, marks=pytest.mark.slow),
    ],
)
def test_same_run(model: str, name: str, packs: bool, chat: str) -> None:
    run = run_in(name, _config(chat, model, DROPOUT[model], sft_packing=packs), NUM_ITERATIONS)
    assert not compare(run, _reference(chat, model, packs)).excesses(TOLERANCES["fp64"])
    assert run.losses[-1] < run.losses[0]


def _answer_loss(stage: object, prefix: str) -> float:
    """The mean loss of the answers' tokens, from one forward pass for each conversation."""
    corpus = IndexedDataset(prefix)
    mask, total, number = LossMask(corpus), 0.0, 0
    for i in EVALUATED:
        text = torch.from_numpy(corpus[i][: SEQ_LENGTH + 1].astype("int64"))[None]
        is_answer = torch.from_numpy(mask[i][1 : SEQ_LENGTH + 1].copy())
        padded = F.pad(text, (0, SEQ_LENGTH + 1 - text.shape[1]))
        hidden = stage.hidden_states(Microbatch.of(padded, torch.zeros(1, dtype=torch.int64)), None)  # type: ignore[attr-defined]
        logits = stage.logits(hidden)[: text.shape[1] - 1, 0, :VOCABULARY]  # type: ignore[attr-defined]
        losses = F.cross_entropy(logits, text[0, 1:], reduction="none")
        total += losses[is_answer].sum().item()
        number += int(is_answer.sum())
    return total / number


@pytest.mark.parametrize("model", DROPOUT)
def test_packed_and_unpacked_evaluations_are_the_mean_over_answers(
    model: str, chat: str, one_rank: Topology
) -> None:
    """Both read each conversation of the split once, whatever the number of samples."""
    losses = {}
    for packs in (True, False):
        trainer = start_trainer(_config(chat, model, sft_packing=packs), one_rank)
        (stage,) = trainer.chunks
        assert trainer.datasets.valid is not None
        with torch.no_grad():
            expected = _answer_loss(stage.eval(), chat)
        first = trainer.evaluator.first_sample("valid", 5000)
        losses[packs] = trainer.evaluate(trainer.datasets.valid, first)["lm_loss"]
        assert losses[packs] == pytest.approx(expected, abs=1e-10)
    assert losses[True] == pytest.approx(losses[False], abs=1e-6)


def test_the_training_loss_is_the_mean_over_the_answers_of_the_global_batch(
    chat: str, one_rank: Topology
) -> None:
    """In a batch of many microbatches with different numbers of answers, against one pass over it."""
    trainer = start_trainer(_config(chat, "llama-tiny"), one_rank)
    (stage,) = trainer.chunks
    loader = trainer.train_step.load
    batches = [loader(0, index) for index in range(GLOBAL_BATCH_SIZE // 2)]
    counts = [int(batch.loss_mask.sum()) for batch in batches if batch.loss_mask is not None]
    assert len(set(counts)) > 1
    losses = []
    for batch in batches:
        logits = stage.logits(stage.hidden_states(batch, None)).transpose(0, 1)[..., :VOCABULARY]
        losses.append(
            F.cross_entropy(logits[batch.loss_mask], batch.labels[batch.loss_mask], reduction="sum")
        )
    mean = torch.stack(losses).sum() / sum(counts)
    gradients = torch.autograd.grad(mean, list(stage.parameters()))
    plan = trainer.train_step.plan_iteration(trainer.progress)
    loss, grad_norm = trainer.train_step.compute_gradients(plan)
    assert loss.item() == pytest.approx(mean.item(), rel=1e-13)
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm().item()
    assert grad_norm.item() == pytest.approx(norm, rel=1e-10)
