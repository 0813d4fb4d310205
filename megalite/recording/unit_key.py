"""The key of a record: everything that the work of a unit depends on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megalite.config import ModelConfig
from megalite.config.recompute import Module

EMBEDDING, HEAD = "embedding", "head"


@dataclass(frozen=True)
class UnitKey:
    """Holds everything that the work of a unit on one microbatch depends on.

    Attributes:
        unit: EMBEDDING, HEAD or the number of a layer.
        tp: tensor-parallel size.
        positions: positions of a sample on a rank.
        cp: number of ranks that hold the positions of a sample, if the unit exchanges tokens for heads with
            them, as recurrent layers do; otherwise 1.
        has_documents: attention stays within documents.
        splits_backward: weight gradients are computed after the rest of backward.
        recomputed_modules: parts of a layer that backward recomputes.
        recomputes_head: backward recomputes whole modules of multi-token prediction, which the head runs.
        cross_entropy_chunks: number of parts in which the head computes the loss.
        ep, etp: sizes of the axes of experts; without such axes, ep is 1 and etp is None.
        moe_imbalance: rows for the rank's experts, relative to even ones.
        moe_token_dispatcher_type: how tokens reach experts that are on axes of their own.
        mlp_chunks: number of parts of the sequence in which a layer computes its MLP.
        triton_recurrence: megalite's kernels compute recurrences, as on a GPU; otherwise plain PyTorch.
        provider: builds the stages of the program's own model; None for the model of the architecture.
    """

    model: ModelConfig
    unit: str | int
    tp: int
    positions: int
    micro_batch_size: int
    sequence_parallel: bool
    has_documents: bool
    splits_backward: bool
    recomputed_modules: tuple[Module, ...] = ()
    recomputes_head: bool = False
    cross_entropy_chunks: int = 1
    ep: int = 1
    etp: int | None = None
    moe_imbalance: float = 1.0
    moe_token_dispatcher_type: str = "alltoall"
    mlp_chunks: int = 1
    cp: int = 1
    triton_recurrence: bool = False
    provider: Callable[..., Any] | None = None
