"""The loss in parts: the same numbers, and never the whole logits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megalite.config import RecomputeConfig
from megalite.config.presets import PRESETS
from megalite.data.microbatch import Microbatch, WithTerms
from megalite.distributed.topology import Topology
from megalite.model.recompute import losses_in_chunks
from tests.live_bytes import LargestTensor
from tests.stages import build_stage

B, S, V = 2, 96, 4096


def run(
    topology: Topology, num_chunks: int, tied: bool, z_loss_coeff: float = 0.0
) -> tuple[Tensor, dict[str, Tensor], int]:
    model = replace(
        PRESETS["gpt-tiny"],
        vocab_size=V - 3,
        seq_length=S,
        params_dtype="fp64",
        untie_embeddings_and_output_weights=not tied,
        z_loss_coeff=z_loss_coeff,
    )
    recompute = RecomputeConfig(cross_entropy_chunks=num_chunks)
    stage = build_stage(model, topology, range(1), seed=3, recompute=recompute)
    ids = torch.randint(V - 3, (B, S), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(B * S).view(B, S) % 5 > 0
    with LargestTensor() as largest:
        output = stage(Microbatch(ids, ids.flip(1), torch.arange(B), loss_mask=mask), None)
        loss = sum(term.value(1.0) for term in WithTerms.of_last(output).terms.values())
        loss.backward()
    return loss.detach(), {name: p.grad for name, p in stage.named_parameters()}, largest.num_elements


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("num_chunks", "z_loss_coeff"), [(2, 0.0), (5, 0.0), (5, 0.1), (S + 3, 0.0)])
def test_any_number_of_chunks_gives_the_same(
    num_chunks: int, z_loss_coeff: float, tied: bool, one_rank: Topology
) -> None:
    (loss, grads, _), (same, others, _) = (
        run(one_rank, count, tied, z_loss_coeff) for count in (1, num_chunks)
    )
    torch.testing.assert_close(same, loss, rtol=1e-13, atol=0)
    for name, grad in grads.items():
        torch.testing.assert_close(others[name], grad, rtol=1e-11, atol=1e-13)


def test_the_whole_logits_never_exist(one_rank: Topology) -> None:
    assert run(one_rank, 1, True)[2] == B * S * V
    weight = PRESETS["gpt-tiny"].hidden_size * V
    assert run(one_rank, 24, True)[2] <= max(weight, B * S * V // 24)


def test_no_chunk_is_empty() -> None:
    """A product of no tokens has no shape to be cut into ranks' parts."""
    lengths: list[int] = []

    def losses(hidden: Tensor, targets: Tensor) -> Tensor:
        lengths.append(len(hidden))
        return hidden.sum(-1)

    hidden, targets = torch.randn(5, 2, 3), torch.zeros(5, 2, dtype=torch.int64)
    assert torch.equal(losses_in_chunks(losses, hidden, targets, 64), hidden.sum(-1))
    assert lengths == [1] * 5


def test_slices_of_the_sequence_keep_their_targets() -> None:
    """Two ranks' slices, gathered by the function as sequence parallelism does."""
    whole = torch.arange(12.0).view(12, 1, 1).requires_grad_()
    targets = torch.arange(12)[:, None]
    first, second = whole.unflatten(0, (2, 6)).unbind(0)

    def losses(hidden: Tensor, targets: Tensor) -> Tensor:
        places = hidden[:, 0, 0].detach().long()
        both = torch.cat((hidden, second[places]))[..., 0]  # what the other rank holds of this chunk
        assert torch.equal(both, targets)
        return both * 1.0

    assert torch.equal(losses_in_chunks(losses, first, targets, 4, 2), targets)
