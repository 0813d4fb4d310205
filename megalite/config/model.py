"""The model's shape and its switches."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from megalite.config.flags import flags
from megalite.errors import UserError

PositionEmbedding = Literal["learned_absolute", "rope", "alibi", "none"]
Normalization = Literal["LayerNorm", "RMSNorm"]
Activation = Literal["gelu", "gelu_exact", "swiglu", "relu"]
ParamsDtype = Literal["fp32", "bf16", "fp16", "fp64"]
AttentionBackend = Literal["auto", "flash", "cudnn", "efficient", "flex", "fused", "unfused", "local"]

_SWIGLU_FFN_MULTIPLE = 64


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer; every switch combines with every other."""

    num_layers: int = 12
    """Transformer layers of the whole model."""
    hidden_size: int = 768
    """Width of the residual stream."""
    ffn_hidden_size: int | None = None
    """Width inside the MLP; by default 4 x hidden size, for SwiGLU 8/3 x rounded up to a multiple of 64."""
    num_attention_heads: int = 12
    """Query heads of an attention."""
    num_query_groups: int | None = None
    """Key/value heads, each shared by a group of query heads; by default one for each query head."""
    kv_channels: int | None = None
    """Size of one head; by default hidden size / attention heads."""
    seq_length: int = field(default=1024, metadata=flags("--encoder-seq-length"))
    """Tokens of one sample."""
    max_position_embeddings: int | None = None
    """Rows of the learned position table; by default the sequence length."""
    vocab_size: int | None = None
    """Tokens of the vocabulary before padding; by default the tokenizer's."""
    make_vocab_size_divisible_by: int = 128
    """The vocabulary is padded to a multiple of this and of the tensor-parallel size."""
    pad_vocab_size_to: int | None = None
    """Pad the vocabulary to exactly this many rows instead."""
    position_embedding_type: PositionEmbedding = field(
        default="learned_absolute", metadata=flags(sets={"--use-rotary-position-embeddings": "rope"})
    )
    """How a token's position enters: learned table, rotary (rope), ALiBi's attention bias, or not at all."""
    rotary_base: float = 10000.0
    """Base of the rotary angles (rope only)."""
    normalization: Normalization = "LayerNorm"
    """Normalisation of every block."""
    norm_epsilon: float = field(default=1e-5, metadata=flags("--layernorm-epsilon"))
    """Added to the variance (LayerNorm) or mean square (RMSNorm) before its root."""
    activation: Activation = field(default="gelu", metadata=flags(sets={"--swiglu": "swiglu"}))
    """The MLP's activation; gelu is the tanh form, gelu_exact the erf form, swiglu gates by SiLU."""
    add_bias_linear: bool = field(default=True, metadata=flags(sets={"--disable-bias-linear": False}))
    """Give every linear layer a bias."""
    embed_layernorm: bool = False
    """Normalise the embeddings before the first layer, as BLOOM does."""
    untie_embeddings_and_output_weights: bool = False
    """Give the output layer a weight of its own instead of the token embedding's."""
    hidden_dropout: float = 0.1
    """Probability of dropping an element of the embeddings and of each block's output."""
    attention_dropout: float = 0.1
    """Probability of dropping an attention weight."""
    attention_backend: AttentionBackend = field(
        default="auto", metadata=flags(sets={"--use-flash-attn": "flash", "--use-flash-attn-v2": "flash"})
    )
    """What computes attention; fused: any of flash, cudnn, efficient; local: unfused, which alone has dropout
    (docs/attention.md)."""
    init_method_std: float = 0.02
    """Standard deviation of the initial weights; output projections take it / sqrt(2 x layers)."""
    params_dtype: ParamsDtype = field(
        default="fp32", metadata=flags(sets={"--bf16": "bf16", "--fp16": "fp16"})
    )
    """Precision of weights and activations; bf16 and fp16 keep sums, main weights and moments in fp32."""

    @property
    def ffn_size(self) -> int:
        """Width inside the MLP, resolved."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        if self.activation == "swiglu":
            # Three matrices of 8/3 h hold as many weights as two of 4 h.
            return _round_up(-(-8 * self.hidden_size // 3), _SWIGLU_FFN_MULTIPLE)
        return 4 * self.hidden_size

    @property
    def head_dim(self) -> int:
        """Size of one attention head, resolved."""
        return self.hidden_size // self.num_attention_heads if self.kv_channels is None else self.kv_channels

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads, resolved."""
        return self.num_attention_heads if self.num_query_groups is None else self.num_query_groups

    @property
    def num_positions(self) -> int:
        """Rows of the learned position table, resolved."""
        return self.seq_length if self.max_position_embeddings is None else self.max_position_embeddings

    def padded_vocab_size(self, tp: int) -> int:
        """The vocabulary's rows including padding, a multiple of `tp`.

        Raises:
            UserError: `vocab_size` is not known yet, or --pad-vocab-size-to is too small or indivisible.
        """
        if self.vocab_size is None:
            raise UserError("the vocabulary's size is not known: give a tokenizer or --vocab-size")
        if problems := vocab_padding_problems(self, tp):
            raise UserError(problems[0])
        if self.pad_vocab_size_to is not None:
            return self.pad_vocab_size_to
        return _round_up(self.vocab_size, math.lcm(self.make_vocab_size_divisible_by, tp))

    def num_padding_rows(self, tp: int) -> int:
        """How many of the padded vocabulary's rows, the last ones, stand for no token.

        Raises:
            UserError: as `padded_vocab_size`.
        """
        padded = self.padded_vocab_size(tp)
        assert self.vocab_size is not None  # else there is no padded size
        return padded - self.vocab_size


def vocab_padding_problems(model: ModelConfig, tp: int) -> list[str]:
    """What is wrong with --pad-vocab-size-to, in words; nothing where it is not given."""
    target, problems = model.pad_vocab_size_to, list[str]()
    if target is None:
        return problems
    if model.vocab_size is not None and target < model.vocab_size:
        problems.append(
            f"--pad-vocab-size-to {target} is smaller than the vocabulary of {model.vocab_size} tokens: "
            "give at least that, or leave it out"
        )
    if target % tp:
        problems.append(
            f"--pad-vocab-size-to {target} is not divisible by --tensor-model-parallel-size {tp}: "
            f"the next size that is is {_round_up(target, tp)}"
        )
    return problems


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
