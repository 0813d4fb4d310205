"""Packed documents in any layout: positions, attention and loss that end with a document.

Random tokens hold four ends of documents a sample; every rank has other documents, so that a mean over a
microbatch's or a rank's own tokens would show.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F

from megalite.config import (
    Config,
    DataConfig,
    OptimizerConfig,
    ParallelConfig,
    RecomputeConfig,
    TrainingConfig,
)
from megalite.config.parallel import CpCommType
from megalite.config.presets import PRESETS
from megalite.data.microbatch import Microbatch
from megalite.data.samples import MockDataset, random_tokens
from megalite.distributed.topology import Topology
from megalite.observe.verify.compare_runs import TOLERANCES, compare
from megalite.observe.verify.layouts import Layout
from megalite.observe.verify.record_run import RunRecord
from megalite.train.trainer import start_trainer
from tests.live_ranks import record_run, run_ranks
from tests.parity.models import config_in, run_alone, run_in

NUM_ITERATIONS, GLOBAL_BATCH_SIZE = 2, 8
VOCABULARY = 200
EOD = VOCABULARY - 1
DRAW = functools.partial(random_tokens, seq_length=32, vocab_size=VOCABULARY, eod=EOD)
HYBRID, LATER = "llama-tiny, recurrent", "llama-tiny, later tokens"
KIMI = "llama-tiny, kimi delta attention"
CONVOLVED = "llama-tiny, gated convolutions"
SCALED = "llama-tiny, queries scaled by position"
SIX_KEYS, SIX_GROUPS = "llama-tiny, six key heads", "nemotron-h-tiny, six groups"
"""Recurrent layers that three context-parallel ranks divide, in samples of 48 tokens."""
LEARNED, EXPERTS = "gpt-tiny, dropout of weights", "llama-tiny, experts"
LIMITED, BALANCED = "llama-tiny, jitter and capacity", "llama-tiny, random experts"
OF_EXPERTS = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24}
SWITCHES = {
    HYBRID: {
        **{"recurrent_mixer": "gated_delta_net", "linear_attention_freq": (3,), "linear_key_head_dim": 4},
        **{"linear_value_head_dim": 6, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    },
    KIMI: {
        **{
            "recurrent_mixer": "kimi_delta_attention",
            "linear_attention_freq": (3,),
            "linear_key_head_dim": 4,
        },
        "linear_num_key_heads": 4,
    },
    CONVOLVED: {"recurrent_mixer": "gated_convolution", "linear_attention_freq": (3,)},
    LATER: {"mtp_num_layers": 2},
    SCALED: {
        **{"rope_scaling": "llama3", "original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.5},
    },
    SIX_KEYS: {
        **{"recurrent_mixer": "gated_delta_net", "linear_attention_freq": (3,), "linear_key_head_dim": 4},
        **{"linear_value_head_dim": 6, "linear_num_key_heads": 6, "linear_num_value_heads": 12},
    },
    SIX_GROUPS: {"mamba_num_groups": 6, "mamba_num_heads": 12},
    LEARNED: {"hidden_dropout": 0.0, "attention_dropout": 0.1},
    EXPERTS: OF_EXPERTS,
    LIMITED: {
        **OF_EXPERTS,
        **{"moe_input_jitter_eps": 0.1, "moe_expert_capacity_factor": 1.0},
        "moe_token_drop_policy": "position",
    },
    BALANCED: {**OF_EXPERTS, "moe_router_force_load_balancing": True},
}
MODELS = ("gpt-tiny", "bloom-tiny", "llama-tiny")
DROPOUT = {"gpt-tiny": 0.1}
REQUIRED = ("reset_attention_mask",)
OPTIONS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
ADDED = (
    ("reset_position_ids", "eod_mask_loss"),
    ("reset_attention_mask", "eod_mask_loss"),
    ("eod_mask_loss", "reset_attention_mask"),
)
"""Each option, and one that it is added to: with one at least, random tokens have documents."""


def _config(model: str, dropout: float, *options: str) -> Config:
    return Config(
        model=replace(
            PRESETS[model.partition(", ")[0]],
            **{
                **{"hidden_dropout": dropout, "attention_dropout": dropout},
                **SWITCHES.get(model, {}),
                **{"vocab_size": VOCABULARY, "params_dtype": "fp64"},
                **{"seq_length": 48 if model in (SIX_KEYS, SIX_GROUPS) else 32},
            },
        ),
        optimizer=OptimizerConfig(lr=3e-3, lr_decay_style="constant"),
        data=DataConfig(mock_data=True, **dict.fromkeys(options, True)),
        training=TrainingConfig(
            micro_batch_size=2, global_batch_size=GLOBAL_BATCH_SIZE, train_iters=NUM_ITERATIONS, eval_iters=2
        ),
    )


@functools.cache
def _reference(model: str, *options: str) -> RunRecord:
    return run_alone(_config(model, DROPOUT.get(model, 0.0), *options), NUM_ITERATIONS)


@pytest.mark.parametrize(
    ("model", "name", "options"),
    [
        *((model, layout, OPTIONS) for model in MODELS for layout in ("tp2pp2dp2", "dp4mbs1")),
        (LATER, "pp2dp2cp2mbs1", OPTIONS),
        pytest.param(LATER, "tp2pp2dp2", ("reset_attention_mask",), marks=pytest.mark.slow),
        pytest.param(LATER, "dp4mbs1", ("eod_mask_loss",), marks=pytest.mark.slow),
        # Between the first and the last stage, for attention's mask alone and for rotary angles alone.
        ("gpt-tiny", "pp4", ("reset_attention_mask",)),
        ("llama-tiny", "pp4", ("reset_position_ids",)),
        # A recurrence starts anew with each document.
        pytest.param(HYBRID, "tp2pp2dp2", OPTIONS, marks=pytest.mark.slow),
        pytest.param("nemotron-h-tiny", "tp2pp2dp2", OPTIONS, marks=pytest.mark.slow),
        pytest.param(HYBRID, "pp2cp2+p2p", OPTIONS, marks=pytest.mark.slow),
        pytest.param(KIMI, "pp2cp2+p2p+dynamic", OPTIONS, marks=pytest.mark.slow),
        pytest.param(KIMI, "tp2cp2+sp+p2p", OPTIONS, marks=pytest.mark.slow),
        pytest.param(CONVOLVED, "pp2cp2+p2p", OPTIONS, marks=pytest.mark.slow),
        pytest.param(CONVOLVED, "tp2cp2+sp+p2p+dynamic", OPTIONS, marks=pytest.mark.slow),
        pytest.param(SIX_KEYS, "cp3+p2p", OPTIONS, marks=pytest.mark.slow),
        pytest.param(SIX_KEYS, "tp2cp3+sp+zero1", OPTIONS, marks=pytest.mark.slow),
        pytest.param(SIX_GROUPS, "cp3", OPTIONS, marks=pytest.mark.slow),
        pytest.param(SIX_GROUPS, "pp2cp3+zero3+p2p", OPTIONS, marks=pytest.mark.slow),
        pytest.param("nemotron-h-tiny", "tp2cp2+sp", OPTIONS, marks=pytest.mark.slow),
        # Slices of samples, whose documents begin on other ranks.
        ("llama-tiny", "cp4", OPTIONS),
        pytest.param("bloom-tiny", "tp2cp2+sp", OPTIONS, marks=pytest.mark.slow),
        pytest.param("gpt-tiny", "pp2cp2+a2a", OPTIONS, marks=pytest.mark.slow),
        pytest.param("gpt-tiny", "tp2cp2+sp+p2p", OPTIONS, marks=pytest.mark.slow),
        pytest.param("bloom-tiny", "cp4+p2p", OPTIONS, marks=pytest.mark.slow),
        pytest.param(LATER, "pp2cp2+p2p", OPTIONS, marks=pytest.mark.slow),
        pytest.param("gpt-tiny", "tp2cp4+sp+a2a+p2p", OPTIONS, marks=pytest.mark.slow),
        pytest.param("bloom-tiny", "cp4+a2a+p2p", OPTIONS, marks=pytest.mark.slow),
        pytest.param(LATER, "pp2cp4+full+a2a+p2p", REQUIRED, marks=pytest.mark.slow),
        # Documents that are assigned to ranks.
        ("gpt-tiny", "cp2+p2p+dynamic", OPTIONS),
        (SCALED, "cp2+p2p+dynamic", OPTIONS),
        pytest.param("gpt-tiny", "tp2cp2mbs1+sp+p2p+dynamic", OPTIONS, marks=pytest.mark.slow),
        pytest.param("llama-tiny", "cp2+p2p+dynamic", OPTIONS, marks=pytest.mark.slow),
        pytest.param("llama-tiny", "tp2cp2+sp+full+p2p+dynamic", REQUIRED, marks=pytest.mark.slow),
        pytest.param("bloom-tiny", "cp4mbs1+p2p+dynamic", OPTIONS, marks=pytest.mark.slow),
        pytest.param(LATER, "pp2v2cp2+zero1+p2p+dynamic", OPTIONS, marks=pytest.mark.slow),
        pytest.param(LEARNED, "dp2cp2+zero3+p2p+dynamic", REQUIRED, marks=pytest.mark.slow),
        pytest.param(EXPERTS, "tp2cp2+sp+p2p+dynamic", OPTIONS, marks=pytest.mark.slow),
        pytest.param(LIMITED, "tp2cp2+sp+p2p+dynamic", OPTIONS, marks=pytest.mark.slow),
        pytest.param(BALANCED, "cp2+p2p+dynamic", OPTIONS, marks=pytest.mark.slow),
        pytest.param(EXPERTS, "pp2dpvcp2ep2mbs1+p2p+dynamic", OPTIONS, marks=pytest.mark.slow),
        pytest.param(LIMITED, "dp2cp2ep4mbs1+zero1+p2p+dynamic", OPTIONS, marks=pytest.mark.slow),
        pytest.param(LIMITED, "tp2cp2ep4etp1+sp+p2p+dynamic", REQUIRED, marks=pytest.mark.slow),
        pytest.param(HYBRID, "pp2cp2+p2p+dynamic", OPTIONS, marks=pytest.mark.slow),
        pytest.param(SIX_KEYS, "cp3mbs1+full+p2p+dynamic", OPTIONS, marks=pytest.mark.slow),
        pytest.param(SIX_GROUPS, "tp2cp3+sp+zero1+p2p+dynamic", REQUIRED, marks=pytest.mark.slow),
    ],
)
def test_same_run(model: str, name: str, options: tuple[str, ...]) -> None:
    run = run_in(name, _config(model, DROPOUT.get(model, 0.0), *options), NUM_ITERATIONS)
    assert not compare(run, _reference(model, *options)).excesses(TOLERANCES["fp64"])


@pytest.mark.parametrize(
    "name", ["cp2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("cp4", "tp2pp2cp2+sp+full"))]
)
@pytest.mark.parametrize("model", ["gpt-tiny", pytest.param("bloom-tiny", marks=pytest.mark.slow)])
def test_same_run_with_a_comm_type_for_each_layer(model: str, name: str) -> None:
    config = _config(model, DROPOUT.get(model, 0.0), *OPTIONS)
    comm_types: tuple[CpCommType, ...] = ("a2a", "p2p", "all_gather", "a2a")
    config = replace(config, parallel=ParallelConfig(cp_comm_type=comm_types))
    run = run_in(name, config, NUM_ITERATIONS)
    assert not compare(run, _reference(model, *OPTIONS)).excesses(TOLERANCES["fp64"])


def _short_sample(dataset: MockDataset, index: int) -> npt.NDArray[np.int64]:
    """Return two documents that end where slices do, and then tokens without a loss."""
    generator = np.random.default_rng((len(dataset), index))
    tokens = generator.integers(0, EOD, 33, dtype=np.int64)
    tokens[[7, *range(15, 33)]] = EOD
    return tokens


def _evaluated(topology: Topology, config: Config) -> list[float]:
    short = mock.patch.object(MockDataset, "__getitem__", _short_sample)
    with short, start_trainer(config, topology) as trainer:
        steps = [trainer.step() for _ in range(2)]
        assert trainer.datasets.valid is not None
        evaluated = trainer.evaluate(trainer.datasets.valid, 0)["lm_loss"]
    return [value for step in steps for value in (step.loss, step.grad_norm)] + [evaluated]


def _of_slices() -> Config:
    config = _config("gpt-tiny", 0.1, *OPTIONS)
    return replace(config, training=replace(config.training, eval_iters=1))


@functools.cache
def _evaluated_alone() -> list[float]:
    config = _of_slices()
    (values,) = run_ranks(_evaluated, config.parallel.mesh, 1, config)
    return values


@pytest.mark.parametrize("name", ["cp4", "cp2+a2a", "cp2+p2p", "cp4+p2p+dynamic"])
def test_slices_without_a_loss(name: str) -> None:
    """In training and evaluation; two of four ranks have no token with a loss."""
    cut = config_in(name, _of_slices())
    one = _evaluated_alone()
    assert all(math.isfinite(value) for value in one)
    for values in run_ranks(_evaluated, cut.parallel.mesh, cut.parallel.mesh.smallest_world, cut):
        assert values == pytest.approx(one, rel=1e-12)


def test_same_run_beside_all_that_cuts_or_recomputes() -> None:
    """Hidden states are cut by the sequence and documents are not; rank 0 has the first stage and last."""
    config = _config("gpt-tiny", 0.1, *OPTIONS)
    cut = Layout.parse("tp2pp2dp2").apply(config, GLOBAL_BATCH_SIZE)
    cut = replace(
        cut,
        parallel=replace(cut.parallel, sequence_parallel=True, pipeline_schedule="zb-v", zero_stage=2),
        recompute=RecomputeConfig(recompute_granularity="full", recompute_method="uniform"),
    )
    run = record_run(cut, NUM_ITERATIONS, 8)
    assert not compare(run, _reference("gpt-tiny", *OPTIONS)).excesses(TOLERANCES["fp64"])


@pytest.mark.parametrize("model", MODELS)
def test_each_option_changes_the_run(model: str) -> None:
    """But restarting positions for ALiBi, whose distances stay what they were."""
    for option, beside in ADDED:
        plain, with_option = (
            run_alone(_config(model, DROPOUT.get(model, 0.0), *options), 1).losses[0]
            for options in ((beside,), (option, beside))
        )
        difference = with_option - plain
        if model == "bloom-tiny" and option == "reset_position_ids":
            assert difference == 0.0
        else:
            assert abs(difference) > 1e-5


@pytest.mark.parametrize("model", MODELS)
def test_losses_are_means_over_the_tokens_that_count(model: str, one_rank: Topology) -> None:
    """In training and evaluation: against one pass over the whole batch and torch's mean."""
    config = _config(model, 0.0, "eod_mask_loss")
    trainer = start_trainer(config, one_rank)
    (stage,) = trainer.chunks
    training, validation = (
        MockDataset(2 * GLOBAL_BATCH_SIZE, config.training.seed, split, DRAW) for split in (0, 1)
    )

    def expected(dataset: MockDataset, num_samples: int) -> torch.Tensor:
        text = torch.stack([torch.from_numpy(dataset[i]) for i in range(num_samples)])
        tokens, labels = text[:, :-1], text[:, 1:]
        hidden = stage.hidden_states(Microbatch(tokens, labels, torch.arange(num_samples)), None)
        logits = stage.logits(hidden).transpose(0, 1)[..., :VOCABULARY]
        return F.cross_entropy(logits[tokens != EOD], labels[tokens != EOD])

    weights = dict(stage.named_parameters())
    mean = expected(training, GLOBAL_BATCH_SIZE)
    gradients = torch.autograd.grad(mean, list(weights.values()))
    plan = trainer.train_step.plan_iteration(trainer.progress)
    loss, grad_norm = trainer.train_step.compute_gradients(plan)
    assert loss.item() == pytest.approx(mean.item(), rel=1e-13)
    assert grad_norm.item() == pytest.approx(
        torch.cat([g.flatten() for g in gradients]).norm().item(), rel=1e-12
    )
    for name, gradient in zip(weights, gradients, strict=True):
        torch.testing.assert_close(
            trainer.optimizer.gradient(name), gradient, rtol=1e-9, atol=1e-14, msg=name
        )

    assert trainer.datasets.valid is not None
    evaluated = trainer.evaluate(trainer.datasets.valid, 0)["lm_loss"]
    assert evaluated == pytest.approx(expected(validation, 2 * GLOBAL_BATCH_SIZE).item(), rel=1e-13)


def test_later_losses_are_means_over_their_own_tokens(one_rank: Topology) -> None:
    """Of two modules, in training: tokens after a sample or an end of document do not count."""
    config = _config(LATER, 0.0, *OPTIONS)
    trainer = start_trainer(config, one_rank)
    (stage,) = trainer.chunks
    dataset = MockDataset(GLOBAL_BATCH_SIZE, config.training.seed, 0, DRAW)
    text = torch.stack([torch.from_numpy(dataset[i]) for i in range(GLOBAL_BATCH_SIZE)])
    plain = Microbatch.of(text, torch.arange(GLOBAL_BATCH_SIZE))
    batch = trainer.train_step.load.samples.marked(plain)
    assert batch.loss_mask is not None and batch.document_ids is not None
    terms: Any = stage(batch.with_later_tokens(2), None).terms
    documents, has_loss = batch.document_ids, text[:, :-1] != EOD
    assert has_loss.equal(batch.loss_mask)
    means = [terms["lm_loss"].total / has_loss.sum()]
    for ahead in (1, 2):
        counts = has_loss[:, ahead:] & (documents[:, ahead:] == documents[:, :-ahead])
        means.append(0.1 / 2 * terms[f"mtp_{ahead}_loss"].total / counts.sum())
    gradients = torch.autograd.grad(sum(means), [*stage.parameters()])
    losses, norm = trainer.train_step.compute_gradients(trainer.train_step.plan_iteration(trainer.progress))
    assert losses.tolist() == pytest.approx([mean.item() for mean in means], rel=1e-12)
    assert norm.item() == pytest.approx(torch.cat([g.flatten() for g in gradients]).norm().item(), rel=1e-12)
