"""QK-clip on one rank against its formula; the layout table has its layouts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.checkpoint.progress import TrainingProgress
from megalite.config import Config, DataConfig, OptimizerConfig, TrainingConfig
from megalite.config.presets import PRESETS
from megalite.distributed.topology import Topology
from megalite.train.model_chunks import named_parameters
from megalite.train.trainer import Trainer, start_trainer
from tests.live_ranks import run_ranks

NUM_MICROBATCHES = 3


def config_of(optimizer: OptimizerConfig, has_documents: bool = False, **changes: Any) -> Config:
    return Config(
        model=replace(
            PRESETS["llama-tiny"],
            **changes,
            num_layers=2,
            vocab_size=256,
            seq_length=70,  # several blocks of queries
            hidden_dropout=0.0,
            attention_dropout=0.0,
            init_method_std=0.2,
            qk_clip=True,
        ),
        optimizer=optimizer,
        data=DataConfig(mock_data=True, reset_attention_mask=has_documents),
        training=TrainingConfig(
            micro_batch_size=2, global_batch_size=2 * NUM_MICROBATCHES, train_iters=2, eval_iters=0
        ),
    )


def largest_scores(trainer: Trainer) -> Tensor:
    """Run forward and backward of an iteration; return each head's largest visible score, ``[layers, n]``."""
    found = list[Tensor]()
    cores = [layer.attention.core for layer in trainer.chunks[0].layers.values()]
    original = type(cores[0]).__call__
    documents = list[Tensor]()  # ends of documents before each token, ``[b, s]``

    def note_documents(_: object, inputs: tuple[Any, ...]) -> None:
        is_end = (inputs[0].tokens == trainer.config.model.vocab_size - 1).long()
        documents.append(is_end.cumsum(1) - is_end)

    def measure(self: Any, q: Tensor, k: Tensor, *others: Any) -> Tensor:
        keys = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        scores = q @ keys.transpose(2, 3) * self.scales[q.shape[-1]]
        size = scores.shape[-1]
        hidden = torch.ones(size, size, dtype=torch.bool).triu(1)
        if (window := trainer.config.model.window_size) is not None:
            hidden |= torch.ones(size, size, dtype=torch.bool).tril(-window[0] - 1)
        if trainer.config.data.reset_attention_mask:
            hidden = hidden | (documents[-1][:, None, :, None] != documents[-1][:, None, None])
        found.append(scores.detach().masked_fill(hidden, -torch.inf).amax((0, 2, 3)))
        return original(self, q, k, *others)

    type(cores[0]).__call__ = measure
    hook = trainer.chunks[0].register_forward_pre_hook(note_documents)
    try:
        trainer.train_step.compute_gradients(trainer.train_step.plan_iteration(trainer.progress))
    finally:
        type(cores[0]).__call__ = original
        hook.remove()
    return torch.stack([torch.stack(found[layer :: len(cores)]).amax(0) for layer in range(len(cores))])


def compare_with_formula(topology: Topology, config: Config) -> None:
    """Take a step whose rate is 0, so that only the scores change the weights, and one with a rate."""
    model = config.model
    with start_trainer(config, topology) as trainer:
        scores = largest_scores(trainer)
        of_groups = scores.unflatten(1, (model.num_kv_heads, -1)).amax(2)
        threshold = 0.6 * of_groups[0].max().item() + 0.3 * of_groups[0].min().item()
        trainer.optimizer.post_step_hooks[0].config = replace(model, qk_clip_threshold=threshold)
        before = {name: weight.detach().clone() for name, weight in named_parameters(trainer.chunks)}
        trainer.step()
        for name, weight in named_parameters(trainer.chunks):
            if ".qkv." not in name:
                assert torch.equal(weight, before[name]), name
                continue
            layer, d = int(name.split(".")[1]), model.head_dim
            expected = before[name].unflatten(0, (model.num_kv_heads, -1, d)).clone()
            largest = scores[layer].unflatten(0, (model.num_kv_heads, -1)).amax(1).tolist()
            for group, score in enumerate(largest):
                factor = min(1.0, threshold / score)
                expected[group, :-2] *= factor**model.qk_clip_alpha
                expected[group, -2] *= factor ** (1 - model.qk_clip_alpha)
            torch.testing.assert_close(weight, expected.view_as(weight), rtol=1e-12, atol=0)
        assert (of_groups[0] > threshold).any()
        assert model.num_kv_heads == 1 or (of_groups[0] < threshold).any()
        trainer.progress = TrainingProgress()
        # The same samples again; only the first layer's input is the same.
        assert largest_scores(trainer)[0].max().item() == pytest.approx(threshold, rel=1e-12)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_query_groups": 4, "qk_clip_alpha": 0.25, "add_qkv_bias": True, "window_size": (9, 0)},
        {"num_query_groups": 1},
        {"has_documents": True},
    ],
    ids=["grouped", "multi-head", "multi-query", "documents"],
)
def test_weights_follow_the_formula(changes: dict[str, Any]) -> None:
    optimizer = OptimizerConfig(lr=0.0, weight_decay=0.0, lr_decay_style="constant")
    config = config_of(optimizer, **changes, params_dtype="fp64")
    run_ranks(compare_with_formula, config.parallel.mesh, 1, config)
