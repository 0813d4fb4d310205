"""GPT-2 in torch's own modules, as a careful user writes it without megalite.

Shapes: b microbatch, s sequence, h hidden size, n heads, d head size, v vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megalite.config import ModelConfig
from megalite.config.model.model_config import padded_vocab_size

# Where a parameter of megalite's stands here.
_NAMES = (
    (r"^embedding\.", ""),
    (r"\.attention_norm\.", ".norm1."),
    (r"\.mlp_norm\.", ".norm2."),
    (r"\.(attention|mlp)\.", "."),
    (r"^final_norm\.", "norm."),
)


class PlainLayer(nn.Module):
    """A pre-norm transformer layer, ``[b, s, h]``.

    The rows of `qkv` are ``[n, 3, d]``: a tensor-parallel rank's heads are one slice of them.
    """

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        h, eps = model.hidden_size, model.norm_epsilon
        self.head_dim = model.head_dim
        self.dropout = model.hidden_dropout
        self.attention_dropout = model.attention_dropout
        self.norm1, self.norm2 = nn.LayerNorm(h, eps), nn.LayerNorm(h, eps)
        self.qkv, self.projection = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.up, self.down = nn.Linear(h, model.ffn_size), nn.Linear(model.ffn_size, h)

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (-1, 3, self.head_dim))  # [b, s, n, 3, d]
        q, k, v = qkv.permute(3, 0, 2, 1, 4)  # [b, n, s, d] each
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.attention_dropout, is_causal=True)
        x = x + F.dropout(self.projection(y.transpose(1, 2).flatten(2)), self.dropout)
        y = self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return x + F.dropout(y, self.dropout)


class PlainGPT(nn.Module):
    """Some of the model's layers: with the first one the embeddings, with the last one the logits.

    Args:
        layers: numbers of the layers in the whole model; by default all.
    """

    def __init__(self, model: ModelConfig, layers: Iterable[int] | None = None) -> None:
        super().__init__()
        numbers = list(range(model.num_layers) if layers is None else layers)
        h, v = model.hidden_size, padded_vocab_size(model, 1)
        self.dropout = model.hidden_dropout
        self.is_first, self.is_last = 0 in numbers, model.num_layers - 1 in numbers
        if self.is_first:
            self.word, self.position = nn.Embedding(v, h), nn.Embedding(model.num_positions, h)
        self.layers = nn.ModuleDict({str(number): PlainLayer(model) for number in numbers})
        if self.is_last:
            self.norm = nn.LayerNorm(h, model.norm_epsilon)
            self.output = nn.Linear(h, v, bias=False)
        if self.is_first and self.is_last and not model.untie_embeddings_and_output_weights:
            self.output.weight = self.word.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=model.init_method_std)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens ``[b, s]`` or hidden states ``[b, s, h]`` -> hidden states or logits ``[b, s, v]``."""
        if self.is_first:
            x = F.dropout(self.word(x) + self._positions(x.shape[1]), self.dropout)
        for layer in self.layers.values():
            x = layer(x)
        return self.output(self.norm(x)) if self.is_last else x

    def _positions(self, seq_length: int) -> Tensor:
        """Return the table's first rows, or this rank's rows if sequence and table are cut over ranks."""
        table = self.position.weight
        return table.to_local() if isinstance(table, DTensor) else table[:seq_length]

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copy megalite's weights of the whole model, by megalite's names, into the parts that are here."""
        renamed = {_plain_name(name): weight for name, weight in weights.items()}
        for name, parameter in self.named_parameters():
            parameter.copy_(renamed[name])


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """``[b, s, v]`` and ``[b, s]`` -> the mean of the tokens' losses, in fp32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def _plain_name(name: str) -> str:
    for pattern, replacement in _NAMES:
        name = re.sub(pattern, replacement, name)
    return name
