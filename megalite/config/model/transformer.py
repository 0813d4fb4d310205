"""The transformer as a whole: its sizes, embeddings, norms and loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from megalite.config.model.feed_forward import GATED_ACTIVATIONS
from megalite.config.option import (
    FRACTION,
    NOT_NEGATIVE,
    OPEN_SHARE,
    POSITIVE,
    SIZE,
    Bound,
    Conflicts,
    OnResume,
    Setting,
    option,
    other_than,
)

Architecture = Literal["gpt", "bert"]
NUM_BERT_SPECIAL = 3
"""Tokens of a BERT's sample besides its segments: one before the first, one after each."""
PositionEmbedding = Literal["learned_absolute", "rope", "alibi", "none"]
Normalization = Literal["LayerNorm", "RMSNorm"]
NormPosition = Literal["pre", "post", "output", "sandwich"]
NORMALIZED: Mapping[NormPosition, tuple[Literal["input", "output", "sum"], ...]] = {
    "pre": ("input",),
    "output": ("output",),
    "sandwich": ("input", "output"),
    "post": ("sum",),
}
"""What a layer normalizes around each of its blocks, by --norm-position."""
ParamsDtype = Literal["fp32", "bf16", "fp16", "fp64"]

IS_BERT = Setting("architecture", ("bert",))
_NUMBER: dict[str, Any] = {"allowed": POSITIVE, "same_shapes": True, "in_megatron": False}


@dataclass(frozen=True)
class TransformerOptions:
    """Options of the model as a whole."""

    architecture: Architecture = option("gpt", in_megatron=False)
    """Kind of model: gpt predicts each next token (pretrain_gpt.py), bert predicts masked tokens from both
    sides (pretrain_bert.py, which sets it)."""
    bert_binary_head: bool = option(
        True, sets={"--bert-no-binary-head": False}, in_megatron=False, only_with=IS_BERT
    )
    """BERT: each sample has two segments, and the model also learns, from the first token, to predict whether
    they are in order."""
    mask_prob: float = option(
        0.15, allowed=OPEN_SHARE, on_resume=OnResume.DATA, in_megatron=False, only_with=IS_BERT
    )
    """BERT: share of the tokens to predict. 80% of these become the mask token, 10% a random token."""
    num_layers: int = option(12, allowed=SIZE)
    """Number of transformer layers in the whole model."""
    hidden_size: int = option(768, allowed=SIZE)
    """Width of the hidden states (the residual stream)."""
    hidden_size_per_layer_input: int | None = option(None, allowed=SIZE, in_megatron=False)
    """Size of the embedding of each token that a layer has of its own, and adds through a gate (Gemma 4 E2B).
    By default layers have none."""
    seq_length: int = option(1024, "--encoder-seq-length", allowed=SIZE, same_shapes=True)
    """Sequence length: tokens per sample."""
    max_position_embeddings: int | None = option(
        None, allowed=SIZE, only_with=Setting("position_embedding_type", ("learned_absolute", "rope", "none"))
    )
    """Rows of the learned position table, or the longest context that a converted model names. By default the
    sequence length, or the length that --rope-scaling reaches."""
    vocab_size: int | None = option(None, allowed=SIZE, in_megatron=False)
    """Vocabulary size before padding. By default the tokenizer's."""
    make_vocab_size_divisible_by: int = option(
        128, allowed=SIZE, on_resume=OnResume.FREE, only_with=Setting("pad_vocab_size_to", (None,))
    )
    """Pad the vocabulary to a multiple of this and of the tensor-parallel size."""
    pad_vocab_size_to: int | None = option(
        None, "--padded-vocab-size", allowed=SIZE, on_resume=OnResume.FREE, in_megatron=False
    )
    """Pad the vocabulary to exactly this size, instead of to a multiple."""
    position_embedding_type: PositionEmbedding = option(
        "learned_absolute",
        sets={"--use-rotary-position-embeddings": "rope"},
        choices={"rotary": "rope", "absolute": "learned_absolute"},
        same_shapes=("rope", "alibi", "none"),
    )
    """Position embedding: a learned table, rotary (rope), ALiBi's attention bias, or none."""
    normalization: Normalization = "LayerNorm"
    """Normalization layer."""
    norm_position: NormPosition = option("pre", in_megatron=False)
    """Normalize each block's input (pre: GPT-2), its output before the sum (output: OLMo 2), both (sandwich:
    Gemma 2), or the sum (post: the published BERT)."""
    parallel_residual: bool = option(False, only_with=Setting("norm_position", ("pre",)), in_megatron=False)
    """Compute attention and MLP of a layer from the same hidden states, each with its norm, and add both
    (GPT-NeoX), instead of one after the other."""
    parallel_shared_norm: bool = option(
        False, only_with=(Setting("parallel_residual"), Setting("norm_position", ("pre",))), in_megatron=False
    )
    """With --parallel-residual, attention and MLP share one norm (GPT-J)."""
    norm_epsilon: float = option(1e-5, "--layernorm-epsilon", allowed=NOT_NEGATIVE, same_shapes=True)
    """Epsilon of the normalization layers."""
    zero_centered_norms: bool = option(
        False, "--apply-layernorm-1p", "--layernorm-zero-centered-gamma", in_megatron=False
    )
    """Norms multiply by 1 + weight, as Gemma's do, instead of by the weight. Initial weights are then 0."""
    add_norm_bias: bool = option(True, only_with=Setting("normalization", ("LayerNorm",)), in_megatron=False)
    """Add a bias to each LayerNorm; Cohere does not."""
    embedding_multiplier: float = option(1.0, "--mup-embedding-mult", **_NUMBER)
    """Factor of the token embeddings. Gemma's is the square root of the hidden size."""
    residual_multiplier: float = option(1.0, **_NUMBER)
    """Factor of each block's output before it is added to the hidden states (Granite)."""
    logit_multiplier: float = option(1.0, **_NUMBER)
    """Factor of the output layer's input, and so of the logits."""
    final_logit_softcapping: float | None = option(None, **_NUMBER)
    """Replace each logit x by C tanh(x / C), as in Gemma 2."""
    mup_base_width: int | None = option(None, "--mup-base-hidden-size", **{**_NUMBER, "allowed": SIZE})
    """Use muP: initial weights, learning rates and logits are scaled so that hyperparameters tuned at this
    hidden size fit --hidden-size."""
    mup_base_head_dim: int | None = option(None, **{**_NUMBER, "allowed": SIZE}, only_with="mup_base_width")
    """With --mup-base-width: head size B of the base model. Scores are divided by d / sqrt(B), where d is the
    head size. By default B is d."""
    add_bias_linear: bool = option(True, sets={"--disable-bias-linear": False})
    """Add a bias to every linear layer."""
    add_output_bias: bool = option(False, only_with=Setting("architecture", ("gpt",)), in_megatron=False)
    """Add a bias to the logits, as GPT-J does. A BERT always does."""
    layer_output_scale: bool = option(False, in_megatron=False)
    """Multiply the hidden states after each layer by a learned number, which begins as 1 (Gemma 4)."""
    embed_layernorm: bool = False
    """Normalize the embeddings before the first layer, as BLOOM does."""
    untie_embeddings_and_output_weights: bool = False
    """Give the output layer its own weight instead of the token embedding's."""
    hidden_dropout: float = option(0.1, allowed=FRACTION, on_resume=OnResume.SETTING)
    """Dropout probability of the embeddings and of each block's output."""
    embedding_dropout: float | None = option(
        None, allowed=FRACTION, on_resume=OnResume.SETTING, in_megatron=False
    )
    """Dropout probability of the embeddings. By default --hidden-dropout."""
    mtp_num_layers: int = option(0, allowed=NOT_NEGATIVE, in_megatron=False)
    """Modules of multi-token prediction after the last layer: each is a layer that also predicts one token
    further ahead (DeepSeek-V3)."""
    mtp_loss_scaling_factor: float = option(
        0.1, allowed=NOT_NEGATIVE, on_resume=OnResume.SETTING, in_megatron=False, only_with="mtp_num_layers"
    )
    """Weight in the loss of the mean over the losses of --mtp-num-layers, logged as mtp_1_loss and so on."""
    z_loss_coeff: float = option(0.0, allowed=NOT_NEGATIVE, on_resume=OnResume.SETTING, in_megatron=False)
    """Add this times the mean square of the logarithm of each token's sum of exp(logits) to the loss (z-loss:
    PaLM's is 1e-4). It is logged as z_loss."""
    init_method_std: float = option(0.02, allowed=NOT_NEGATIVE, on_resume=OnResume.LOGGED)
    """Standard deviation of the initial weights, divided by sqrt(2 x layers) for output projections."""
    params_dtype: ParamsDtype = option(
        "fp32", sets={"--bf16": "bf16", "--fp16": "fp16"}, on_resume=OnResume.SETTING, in_megatron=False
    )
    """Precision of weights and activations. With bf16 and fp16, main weights, Adam's moments and gradient
    sums are in fp32."""

    conflicts: ClassVar[Conflicts] = {
        "add_bias_linear": {
            "multi_latent_attention": (
                ", whose projections from latents have no biases: pass --disable-bias-linear"
            ),
        },
        "mup_base_width": {
            "multi_latent_attention": ": muP has no rule for latents; remove it",
            IS_BERT: ", whose heads muP does not scale here: remove it",
        },
        Setting("position_embedding_type", ("alibi",)): {
            IS_BERT: ", whose attention is bidirectional: remove it",
        },
        "mtp_num_layers": {
            IS_BERT: ", which does not predict next tokens: remove it",
            Setting("position_embedding_type", ("learned_absolute",)): (
                ", whose positions are in the embedding: pass rope, alibi or none"
            ),
            "embed_layernorm": ": its modules normalize the embedding; remove one of them",
        },
        "hidden_size_per_layer_input": {
            IS_BERT: " is not supported: remove one",
            Setting("norm_position", other_than("sandwich")): (
                " is not supported: pass --norm-position sandwich"
            ),
            Setting("activation", other_than(*GATED_ACTIVATIONS)): (
                ": its gate has the function of a gated activation; pass a gated one, such as geglu or swiglu"
            ),
            ("mtp_num_layers", "mup_base_width"): " is not supported: remove one",
        },
        "mup_base_head_dim": {
            "query_pre_attn_scalar": ", which also sets the scale of attention scores: remove one",
        },
    }
    bounds: ClassVar[tuple[Bound, ...]] = (
        Bound("mtp_num_layers", "seq_length", ", the tokens of a sample: change one of them", is_strict=True),
        Bound(
            "seq_length",
            "max_position_embeddings",
            ": pass --max-position-embeddings {value}, or shorter samples",
        ),
        Bound("vocab_size", "pad_vocab_size_to", ": pass at least {value}, or remove it"),
    )
