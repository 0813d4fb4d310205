"""Each term of the loss in training and evaluation from its formula, with masks and padding.

The tokens of the corpora are counted up from 1: a token alone tells its document, the token that follows, and
whether that one has a loss. 0 is padding. Logits and the routers' inputs are the model's, which other tests
compare with transformers'.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite import DatasetSplits, FieldSamples, Providers
from megalite.config import Config, DataConfig, TrainingConfig
from megalite.config.presets import PRESETS
from megalite.data.indexed_dataset import IndexedWriter
from megalite.distributed.topology import Topology
from megalite.model.experts import Router
from megalite.train.callbacks.metrics_logging import begin_counts, end_counts, loads_of_layers
from megalite.train.trainer import start_trainer

LENGTH, BATCH, EXPERTS, TOPK, DEPTH = 24, 8, 5, 2, 2
SIZES = np.array((9, 14, 24, 25, 3, 17, 20, 11, 40, 23, 13, 6, 19, 22, 7, 12, 16, 4, 21, 10) * 3)
"""Tokens of the documents: some fill a sample, and some are longer."""
LAST = SIZES.cumsum()
"""The last token of each document."""
EOD = int(LAST[-1]) + 1
NUM_ANSWERS = 5
"""Tokens at the end of a conversation that have a loss."""
CASES: dict[str, dict[str, Any]] = {
    "whole documents": {"document_packing": "best_fit"},
    "answers": {"sft": True},
    "answers without packing": {"sft": True, "sft_packing": False},
    "ends of documents": {"eod_mask_loss": True, "reset_attention_mask": True},
    "own fields": {"mock_data": True},
}
SCALES = {"lm_loss": 1.0, "z_loss": 0.1, "load_balancing_loss": 0.02, "router_z_loss": 0.03}
SCALES |= {f"mtp_{ahead}_loss": 0.3 / DEPTH for ahead in range(1, DEPTH + 1)}


def _corpus(case: str, folder: Path) -> str:
    """Write the documents, of which some kinds end with a token of their own; return the prefix."""
    prefix, ends = str(folder / "corpus"), [EOD] * (case == "ends of documents")
    with IndexedWriter(prefix, "uint16") as writer:
        for last, size in zip(LAST.tolist(), SIZES.tolist(), strict=True):
            writer.add_document([[*range(last - size + 1, last + 1), *ends]])
    if "sft" in CASES[case]:
        mask = np.concatenate([np.arange(size) >= size - NUM_ANSWERS for size in SIZES])
        Path(f"{prefix}.loss_mask").write_bytes(mask.astype(np.uint8).tobytes())
    return prefix


class Conversations:
    """Samples of a program of its own: a document each, cut off or with padding."""

    def __len__(self) -> int:
        return len(SIZES)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        tokens = np.arange(LENGTH + 1) + LAST[index] - SIZES[index] + 1
        is_real = tokens <= LAST[index]
        tokens[~is_real] = 0
        has_loss = is_real[1:] & (tokens[1:] > LAST[index] - NUM_ANSWERS)
        fields = {"tokens": tokens[:-1], "labels": tokens[1:], "is_real": is_real[:-1]}
        return {**fields, "loss_mask": has_loss}


OWN = Providers(
    datasets=lambda run: DatasetSplits(Conversations(), Conversations(), None),
    samples=FieldSamples(("tokens", "labels", "loss_mask", "is_real")),
)


def _config(case: str, has_experts: bool, folder: Path) -> Config:
    is_own = case == "own fields"
    more = {
        **{"num_experts": EXPERTS, "moe_router_topk": TOPK, "moe_layer_freq": (1, 1, 0)},
        **{"moe_router_score_function": "sigmoid" if case == "answers" else "softmax"},
        **{"moe_aux_loss_coeff": 0.02, "moe_z_loss_coeff": 0.03, "moe_ffn_hidden_size": 12},
        **{"mtp_num_layers": 0 if is_own else DEPTH, "mtp_loss_scaling_factor": 0.3},
    }
    model = replace(
        PRESETS["llama-tiny"],
        **{"num_layers": 3, "vocab_size": EOD + 1, "seq_length": LENGTH, "params_dtype": "fp64"},
        **{"init_method_std": 0.3, "z_loss_coeff": 0.1},
        **(more if has_experts else {}),
    )
    data = DataConfig(**CASES[case])
    if not is_own:
        data = replace(data, data_path=(_corpus(case, folder),), split="60,40,0")
    training = TrainingConfig(micro_batch_size=2, global_batch_size=BATCH, train_iters=2, eval_iters=5)
    return Config(model=model, data=data, training=training)


class Seen(NamedTuple):
    """What the model computed of a microbatch: its tokens ``[b, s]``, logits ``[s, (1 + d) b, v]``, and each
    router with its input ``[s, b, h]``."""

    tokens: Tensor
    logits: list[Tensor]
    routed: list[tuple[Router, Tensor]]


@contextmanager
def _seen(stage: Any) -> Iterator[list[Seen]]:
    """Collect what the stage computes in the block."""
    found: list[Seen] = []
    of_logits = stage.losses_of_logits

    def keep(logits: Tensor, targets: Tensor) -> Tensor:
        found[-1].logits.append(logits.clone())  # the loss overwrites them
        return of_logits(logits, targets)

    hooks = [stage.register_forward_pre_hook(lambda _, inputs: found.append(Seen(inputs[0].tokens, [], [])))]
    for module in stage.modules():
        if isinstance(module, Router):
            hooks.append(
                module.register_forward_pre_hook(lambda it, inputs: found[-1].routed.append((it, inputs[0])))
            )
    stage.losses_of_logits = keep
    yield found
    del stage.losses_of_logits
    for hook in hooks:
        hook.remove()


class Marked(NamedTuple):
    """What the tokens of a sample tell, ``[s]``."""

    is_real: np.ndarray
    documents: np.ndarray
    labels: np.ndarray
    has_loss: np.ndarray


def _marked(case: str, tokens: np.ndarray) -> Marked:
    ends_with_token = case == "ends of documents"
    is_real = (tokens > 0) | ends_with_token
    documents = np.searchsorted(LAST, tokens)
    is_last = np.isin(tokens, LAST)
    if ends_with_token:
        documents = np.cumsum(np.concatenate(([0], tokens[:-1] == EOD)))
        return Marked(is_real, documents, np.where(is_last, EOD, tokens + 1), tokens != EOD)
    has_loss = is_real & ~is_last
    if case != "whole documents":
        has_loss &= tokens + 1 > LAST[documents] - NUM_ANSWERS
    return Marked(is_real, documents, tokens + 1, has_loss)


def _expected(case: str, batch: list[Seen]) -> dict[str, Tensor]:
    """Return the terms of a batch by name: sums over all of it, divided by the numbers of their units."""
    sums: dict[str, Any] = dict.fromkeys(SCALES, 0.0)
    counts = dict.fromkeys(SCALES, 0)
    for seen in batch:
        logits = seen.logits[0][..., : EOD + 1].unflatten(1, (-1, len(seen.tokens)))  # [s, 1 + d, b, v]
        for sample, tokens in enumerate(seen.tokens.numpy()):
            of_sample = _marked(case, tokens)
            for ahead in range(logits.shape[1]):
                at = slice(ahead, None)  # where the predicting tokens' later ones are
                counted = of_sample.has_loss[at].copy()
                counted &= of_sample.documents[at] == of_sample.documents[: LENGTH - ahead]
                rows = logits[: LENGTH - ahead, ahead, sample][counted]
                labels = torch.from_numpy(of_sample.labels[at][counted])
                name = f"mtp_{ahead}_loss" if ahead else "lm_loss"
                log_sums = rows.exp().sum(-1).log()
                sums[name] += (log_sums - rows.gather(1, labels[:, None])[:, 0]).sum()
                counts[name] += len(labels)
                if not ahead:
                    sums["z_loss"] += log_sums.square().sum()
                    counts["z_loss"] += len(labels)
            num_real = int(of_sample.is_real.sum())
            counts["load_balancing_loss"] += num_real
            for router, x in seen.routed:
                scores, experts, log_sums = _routed(router, x[:, sample][of_sample.is_real])
                if num_real:
                    shares = F.one_hot(experts, EXPERTS).sum((0, 1)).double() / experts.numel()
                    sums["load_balancing_loss"] += EXPERTS * (shares * scores.sum(0)).sum()
                sums["router_z_loss"] += log_sums.square().sum()
    counts["router_z_loss"] = counts["load_balancing_loss"]
    return {name: SCALES[name] * sums[name] / counts[name] for name in SCALES if torch.is_tensor(sums[name])}


def _routed(router: Router, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the shares ``[n, e]``, experts ``[n, k]`` and log-sum-exps ``[n]`` of tokens ``[n, h]``."""
    logits = x @ router.weight.t()
    powers = logits.exp()
    scores = powers if router.config.moe_router_score_function == "softmax" else powers / (1 + powers)
    return scores / scores.sum(-1, keepdim=True), logits.topk(TOPK).indices, powers.sum(-1).log()


def _compare(found: Mapping[str, float], expected: Mapping[str, Tensor]) -> None:
    assert dict(found) == pytest.approx({name: each.item() for name, each in expected.items()}, rel=1e-12)


@pytest.mark.parametrize("has_experts", [True, False], ids=["experts and later tokens", "dense"])
@pytest.mark.parametrize("case", CASES)
def test_terms_are_means_over_their_own_units(
    case: str, has_experts: bool, one_rank: Topology, tmp_path: Path
) -> None:
    """With the gradient norm in training, and over all batches of an evaluation, of which some are empty."""
    providers = OWN if case == "own fields" else None
    with start_trainer(_config(case, has_experts, tmp_path), one_rank, providers=providers) as trainer:
        (stage,) = trainer.chunks
        names = trainer.train_step.loss_names
        with _seen(stage.train()) as seen:
            for index in range(BATCH // 2):
                stage(trainer.train_step.load(0, index), None)
        expected = _expected(case, seen)
        gradients = torch.autograd.grad(sum(expected.values()), [*stage.parameters()])
        begin_counts(trainer)  # of no router, if there is none
        plan = trainer.train_step.plan_iteration(trainer.progress)
        found, norm = trainer.train_step.compute_gradients(plan)
        _compare(dict(zip(names, found.tolist(), strict=True)), expected)
        flat = torch.cat([each.flatten() for each in gradients])
        assert norm.item() == pytest.approx(flat.norm().item(), rel=1e-11)
        if has_experts:
            _compare_loads(case, loads_of_layers(end_counts(trainer), trainer), seen)

        assert trainer.datasets.valid is not None
        with torch.no_grad(), _seen(stage) as seen:
            evaluated = trainer.evaluate(trainer.datasets.valid, 0)
        _compare(evaluated, _expected(case, seen))
        real = [case == "ends of documents" or bool(each.tokens.any()) for each in seen]
        assert len(seen) == 5 * BATCH // 2 and all(real) == (case in ("ends of documents", "own fields"))


def _compare_loads(case: str, loads: Mapping[str, Any], batch: list[Seen]) -> None:
    """Compare what is logged of the routers."""
    assert list(loads) == ["layers.0", "layers.1"]
    for layer, found in enumerate(loads.values()):
        tokens, entropies = torch.zeros(EXPERTS), []
        for seen in batch:
            router, x = seen.routed[layer]
            is_real = np.stack([_marked(case, each).is_real for each in seen.tokens.numpy()], 1)
            shares, experts, _ = _routed(router, x[is_real])
            tokens += experts.flatten().bincount(minlength=EXPERTS)
            entropies += (-(shares * shares.log()).sum(-1)).tolist()
        assert list(found.tokens) == tokens.tolist()
        assert found.entropy == pytest.approx(np.mean(entropies), rel=1e-12)
        assert found.max_violation == pytest.approx(tokens.max().item() / tokens.mean().item() - 1, rel=1e-6)
