"""The configuration of the model."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from megalite.config.flags import flags
from megalite.errors import UserError

Architecture = Literal["gpt", "bert"]
NUM_BERT_SPECIAL = 3
"""Tokens of a BERT's sample besides its segments: one before the first, one after each."""
PositionEmbedding = Literal["learned_absolute", "rope", "alibi", "none"]
Normalization = Literal["LayerNorm", "RMSNorm"]
NormPosition = Literal["pre", "post"]
Activation = Literal["gelu", "gelu_exact", "swiglu", "relu"]
ParamsDtype = Literal["fp32", "bf16", "fp16", "fp64"]
AttentionBackend = Literal[
    "auto", "flash", "cudnn", "efficient", "flex", "fused", "triton", "unfused", "local"
]

GATED_ACTIVATIONS = frozenset({"swiglu"})
"""Activations whose input has two halves: a gate, and the values that it multiplies."""
_GATED_FFN_MULTIPLE = 64


@dataclass(frozen=True)
class ModelConfig:
    """Describe a transformer; all options can be combined."""

    architecture: Architecture = "gpt"
    """Kind of model: gpt predicts each next token (pretrain_gpt.py), bert predicts masked tokens from both
    sides (pretrain_bert.py, which sets it)."""
    bert_binary_head: bool = field(default=True, metadata=flags(sets={"--bert-no-binary-head": False}))
    """BERT: each sample has two segments, and the model also learns, from the first token, to predict whether
    they are in order."""
    mask_prob: float = 0.15
    """BERT: share of the tokens to predict. 80% of these become the mask token, 10% a random token."""
    num_layers: int = 12
    """Number of transformer layers in the whole model."""
    hidden_size: int = 768
    """Width of the hidden states (the residual stream)."""
    ffn_hidden_size: int | None = None
    """Width of the MLP. By default 4 x hidden size; with SwiGLU 8/3 x hidden size, rounded up to a multiple
    of 64."""
    num_attention_heads: int = 12
    """Number of attention (query) heads."""
    num_query_groups: int | None = field(default=None, metadata=flags("--num-key-value-heads"))
    """Number of key/value heads (grouped-query attention). By default one for each query head."""
    kv_channels: int | None = None
    """Size of one attention head. By default hidden size / attention heads."""
    seq_length: int = field(default=1024, metadata=flags("--encoder-seq-length"))
    """Sequence length: tokens per sample."""
    max_position_embeddings: int | None = None
    """Rows of the learned position table. By default the sequence length."""
    vocab_size: int | None = None
    """Vocabulary size before padding. By default the tokenizer's."""
    make_vocab_size_divisible_by: int = 128
    """Pad the vocabulary to a multiple of this and of the tensor-parallel size."""
    pad_vocab_size_to: int | None = field(default=None, metadata=flags("--padded-vocab-size"))
    """Pad the vocabulary to exactly this size, instead of to a multiple."""
    position_embedding_type: PositionEmbedding = field(
        default="learned_absolute",
        metadata=flags(
            sets={"--use-rotary-position-embeddings": "rope"},
            choices={"rotary": "rope", "absolute": "learned_absolute"},
        ),
    )
    """Position embedding: a learned table, rotary (rope), ALiBi's attention bias, or none."""
    rotary_base: float = field(default=10000.0, metadata=flags("--rotary-position-embeddings-theta"))
    """Base of the rotary position embedding; only with rope."""
    normalization: Normalization = "LayerNorm"
    """Normalization layer."""
    norm_position: NormPosition = "pre"
    """Normalize the input of each block (pre: GPT-2, Megatron's BERT), or the sum of its input and output
    (post: the published BERT)."""
    norm_epsilon: float = field(default=1e-5, metadata=flags("--layernorm-epsilon"))
    """Epsilon of the normalization layers."""
    activation: Activation = field(default="gelu", metadata=flags(sets={"--swiglu": "swiglu"}))
    """Activation of the MLP. gelu is the tanh approximation, gelu_exact the erf form."""
    add_bias_linear: bool = field(default=True, metadata=flags(sets={"--disable-bias-linear": False}))
    """Add a bias to every linear layer."""
    embed_layernorm: bool = False
    """Normalize the embeddings before the first layer, as BLOOM does."""
    untie_embeddings_and_output_weights: bool = False
    """Give the output layer its own weight instead of the token embedding's."""
    hidden_dropout: float = 0.1
    """Dropout probability of the embeddings and of each block's output."""
    attention_dropout: float = 0.1
    """Dropout probability of the attention weights."""
    attention_backend: AttentionBackend = "auto"
    """Kernel that computes attention. fused: any of flash, cudnn and efficient. Attention dropout needs
    triton (CUDA GPUs), unfused or local (docs/attention.md)."""
    init_method_std: float = 0.02
    """Standard deviation of the initial weights, divided by sqrt(2 x layers) for output projections."""
    params_dtype: ParamsDtype = field(
        default="fp32", metadata=flags(sets={"--bf16": "bf16", "--fp16": "fp16"})
    )
    """Precision of weights and activations. With bf16 and fp16, main weights, Adam's moments and gradient
    sums are in fp32."""

    @property
    def is_causal(self) -> bool:
        """Return whether a token attends only to itself and earlier tokens."""
        return self.architecture == "gpt"

    @property
    def loss_names(self) -> tuple[str, ...]:
        """Return the names of the losses whose sum is minimized."""
        has_order = self.architecture == "bert" and self.bert_binary_head
        return ("lm_loss", "sop_loss") if has_order else ("lm_loss",)

    @property
    def predicted_share(self) -> float:
        """Return the share of tokens for which the model computes logits."""
        return self.mask_prob if self.architecture == "bert" else 1.0

    @property
    def num_token_types(self) -> int:
        """Return the number of rows of the token-type table: 2 for BERT's segments, 0 without a table."""
        return 2 if self.architecture == "bert" else 0

    @property
    def is_gated(self) -> bool:
        """Return whether the first GEMM of the MLP computes two halves: the gate and the values."""
        return self.activation in GATED_ACTIVATIONS

    @property
    def ffn_size(self) -> int:
        """Return the width of the MLP, resolved."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        if self.is_gated:
            # Three matrices of width 8/3 h have as many weights as two of width 4 h.
            return _round_up(-(-8 * self.hidden_size // 3), _GATED_FFN_MULTIPLE)
        return 4 * self.hidden_size

    @property
    def head_dim(self) -> int:
        """Return the size of one attention head, resolved."""
        return self.hidden_size // self.num_attention_heads if self.kv_channels is None else self.kv_channels

    @property
    def num_kv_heads(self) -> int:
        """Return the number of key/value heads, resolved."""
        return self.num_attention_heads if self.num_query_groups is None else self.num_query_groups

    @property
    def num_positions(self) -> int:
        """Return the number of rows of the learned position table, resolved."""
        return self.seq_length if self.max_position_embeddings is None else self.max_position_embeddings

    def padded_vocab_size(self, tp: int) -> int:
        """Return the padded vocabulary size, a multiple of `tp`.

        Raises:
            UserError: `vocab_size` is unknown, or --pad-vocab-size-to is too small or not divisible by `tp`.
        """
        if self.vocab_size is None:
            raise UserError("the vocabulary size is unknown: pass --vocab-size, or a tokenizer")
        if problems := vocab_padding_problems(self, tp):
            raise UserError(problems[0])
        if self.pad_vocab_size_to is not None:
            return self.pad_vocab_size_to
        return _round_up(self.vocab_size, math.lcm(self.make_vocab_size_divisible_by, tp))

    def num_padding_rows(self, tp: int) -> int:
        """Return the number of padding rows at the end of the padded vocabulary.

        Raises:
            UserError: see `padded_vocab_size`.
        """
        padded = self.padded_vocab_size(tp)
        assert self.vocab_size is not None  # otherwise padded_vocab_size raises
        return padded - self.vocab_size


def vocab_padding_problems(model: ModelConfig, tp: int) -> list[str]:
    """Return the errors in --pad-vocab-size-to."""
    target, problems = model.pad_vocab_size_to, list[str]()
    if target is None:
        return problems
    if model.vocab_size is not None and target < model.vocab_size:
        problems.append(
            f"--pad-vocab-size-to {target} is smaller than the vocabulary of {model.vocab_size} tokens: "
            f"pass at least {model.vocab_size}, or remove it"
        )
    if target % tp:
        problems.append(
            f"--pad-vocab-size-to {target} is not divisible by --tensor-model-parallel-size {tp}: "
            f"pass --pad-vocab-size-to {_round_up(target, tp)}"
        )
    return problems


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
