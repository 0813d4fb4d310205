"""The part of a GPT model that one pipeline stage holds.

Shapes: s sequence, b microbatch, h hidden size, v padded vocabulary, tp = tp.size. With sequence parallelism
every ``[s, b, h]`` is a rank's slice, ``[s/tp, b, h]``.
"""

from __future__ import annotations

from torch import Tensor

from megalite.microbatch import Microbatch
from megalite.model.transformer_stage import TransformerStage


class GPTStage(TransformerStage):
    """Predicts each token from the tokens before it (Radford et al. 2019)."""

    def losses(self, normed: Tensor, microbatch: Microbatch) -> Tensor:
        """Return the sum of the losses of the tokens that `loss_mask` selects, a scalar."""
        return self.masked_sum(self.losses_of(normed, microbatch.labels.t()), microbatch)

    def token_losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each token, ``[s, b]``.

        Args:
            hidden: ``[s, b, h]`` after the last layer.
            targets: ``[s, b]``, ids of the next tokens; the full sequence, even if sequence parallel.
        """
        return self.losses_of(self.final_norm(hidden), targets)

    def logits(self, hidden: Tensor) -> Tensor:
        """Map ``[s, b, h]`` after the last layer to this rank's logits, ``[s, b, v/tp]``.

        Columns from `vocab_size` on are padding.
        """
        return self.logits_of(self.final_norm(hidden))


GPT = GPTStage
"""Public name of `GPTStage`."""
