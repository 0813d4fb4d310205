"""PyTorch's FlexAttention: ALiBi, capped scores and documents inside the kernel, without a bias in memory.

Not measured: backward requires a GPU (torch 2.13), and we had none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from megalite.config import ModelConfig
from megalite.kernels import Drop, VisibleKeys, sink_factors
from megalite.model.attention_core import AttentionCore
from megalite.model.positions import local_slopes
from megalite.tensor_parallel.parameter_spec import LayerContext


class FlexCore(AttentionCore):
    """Computes attention in a kernel that torch.compile generates for the model's positions and documents.

    Args:
        compiled: replacement for the compiled `flex_attention`, for tests on a CPU.
    """

    def __init__(
        self, config: ModelConfig, context: LayerContext, compiled: Callable[..., Any] | None = None
    ) -> None:
        super().__init__(config, context)
        self.attend: Callable[..., Any] = compiled or torch.compile(flex_attention, dynamic=False)
        self.score_mod = self._capped(
            config.attn_logit_softcapping, self._alibi(local_slopes(config, context))
        )

    def _alibi(self, slopes: Tensor | None) -> Callable[..., Tensor] | None:
        if slopes is None:
            return None
        head_slopes = slopes.float()

        def bias(score: Tensor, b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return score + head_slopes[head] * (key - query)

        return bias

    def _capped(self, cap: float | None, bias: Callable[..., Tensor] | None) -> Callable[..., Tensor] | None:
        """Return the function that caps a scaled score and adds the bias."""
        if cap is None:
            return bias

        def capped(score: Tensor, *place: Tensor) -> Tensor:
            score = cap * torch.tanh(score / cap)
            return score if bias is None else bias(score, *place)

        return capped

    def translate(self, visible: VisibleKeys, s: int) -> VisibleKeys:
        """Return the keys as the blocks of keys that each block of queries sees."""
        starts, ends = visible.starts, visible.ends
        num_samples = 1 if starts is None else len(starts)

        def sees(b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            sample = b if num_samples > 1 else 0
            is_before = key <= query if ends is None else key < ends[sample, query]
            return is_before if starts is None else is_before & (key >= starts[sample, query])

        of_samples = num_samples if num_samples > 1 else None
        return VisibleKeys(blocks=create_block_mask(sees, of_samples, None, s, s, device=self.context.device))

    def exclude_from_graphs(self) -> None:
        """Compute attention in a graph of its own."""
        # The kernel is a separate graph: inside a layer's graph, after a rotary embedding, its forward
        # computed wrong numbers (torch 2.13 on a CPU).
        self.attend = torch.compiler.disable(self.attend, recursive=False)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        visible: VisibleKeys,
        drop: Drop,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Compute attention; see `LayerCore`."""
        assert drop.p == 0.0, "this backend does not support dropout of attention weights"
        found = self.attend(
            q,
            k,
            v,
            score_mod=self.score_mod,
            block_mask=visible.blocks,
            scale=self.scales[q.shape[-1]],
            enable_gqa=q.shape[1] != k.shape[1],
            return_aux=None if sinks is None else AuxRequest(lse=True),
        )
        if sinks is None:
            return found
        out, aux = found
        return (out * sink_factors(aux.lse, sinks)).to(q.dtype)
