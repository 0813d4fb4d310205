"""The configuration of the model, its padded vocabulary, its model FLOPs, and the weights of its layers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from megalite.config.model.attention import AttentionOptions, AttentionSpec, LatentOptions, RopeOptions
from megalite.config.model.feed_forward import ExpertOptions, ExpertsSpec, MLPOptions
from megalite.config.model.layers import LayerSpec, RecurrentSpec, attention_spec, layer_spec
from megalite.config.model.recurrence import MambaSpec, RecurrentOptions
from megalite.config.model.transformer import TransformerOptions
from megalite.config.option import OnResume
from megalite.utils.errors import UserError

MOST_LAYERS = 10_000
"""Layers up to which a model's layers are compared: a damaged checkpoint may name any number of them."""
_GATED_FFN_MULTIPLE = 64


# A dataclass has the fields of its last base first.
@dataclass(frozen=True)
class ModelConfig(
    ExpertOptions,
    RecurrentOptions,
    MLPOptions,
    RopeOptions,
    LatentOptions,
    AttentionOptions,
    TransformerOptions,
):
    """Options of a transformer; all can be combined."""

    default_on_resume: ClassVar[OnResume] = OnResume.MODEL

    @property
    def is_causal(self) -> bool:
        """Return whether a token attends only to itself and earlier tokens."""
        return self.architecture == "gpt"

    def layer_spec(self, number: int) -> LayerSpec:
        """Return a layer by its number in the whole model."""
        specs = self._specs
        if number not in specs:
            specs[number] = layer_spec(self, number)
        return specs[number]

    @cached_property
    def _specs(self) -> dict[int, LayerSpec]:
        """Return the layers that have been computed, by their numbers."""
        return {}

    @property
    def layer_specs(self) -> tuple[LayerSpec, ...]:
        """Return all layers."""
        return tuple(map(self.layer_spec, range(self.num_layers)))

    @cached_property
    def head_specs(self) -> tuple[AttentionSpec, ...]:
        """Return the attention of layers with keys of their own, one for each size of heads.

        A model without attention has an attention core too, with the sizes of the flags.
        """
        found: dict[tuple[int, ...], AttentionSpec] = {}
        for number in range(min(self.num_layers, MOST_LAYERS)):
            spec = self.layer_spec(number).attention
            if spec is not None and spec.key_source is None:
                found.setdefault((spec.head_dim, spec.num_kv_heads, *spec.group_heads), spec)
        return tuple(found.values()) or (attention_spec(self, 0),)

    @cached_property
    def recurrences(self) -> tuple[RecurrentSpec, ...]:
        """Return the recurrent mixers of the layers, each once."""
        specs = (self.layer_spec(number).recurrence for number in range(min(self.num_layers, MOST_LAYERS)))
        return tuple(dict.fromkeys(spec for spec in specs if spec is not None))

    @property
    def mlp_widths(self) -> dict[str, int]:
        """Return the widths of the MLPs, by their fields."""
        widths = {"ffn_hidden_size": self.ffn_size}
        if self.kv_shared_ffn_hidden_size is not None:
            widths["kv_shared_ffn_hidden_size"] = self.kv_shared_ffn_hidden_size
        return widths

    @property
    def max_head_dim(self) -> int:
        """Return the largest size of an attention head in any layer."""
        return max(spec.head_dim for spec in self.head_specs)

    @property
    def latent_epsilon(self) -> float:
        """Return the epsilon of the norms of latents."""
        return self.norm_epsilon if self.latent_norm_epsilon is None else self.latent_norm_epsilon

    @property
    def embedding_drop(self) -> float:
        """Return the dropout probability of the embeddings, resolved."""
        return self.hidden_dropout if self.embedding_dropout is None else self.embedding_dropout

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks that add to the hidden states: one or two for each layer."""
        return self.num_layers if self.hybrid_override_pattern is not None else 2 * self.num_layers

    @property
    def depends_on_micro_batch(self) -> bool:
        """Return whether another micro-batch size trains another run."""
        return self.has_experts and self.moe_router_load_balancing_type == "aux_loss"

    @property
    def mamba(self) -> MambaSpec:
        """Return Mamba-2, which --hybrid-override-pattern gives to layers."""
        heads = self.mamba_num_heads or 2 * self.hidden_size // self.mamba_head_dim
        return MambaSpec(
            self.mamba_state_dim,
            self.mamba_head_dim,
            self.mamba_num_groups,
            heads,
            self.mamba_conv_kernel,
            self.mamba_min_time_step,
        )

    @property
    def experts(self) -> ExpertsSpec:
        """Return the experts, which --num-experts gives to layers."""
        return ExpertsSpec(
            self.num_experts or 0,
            self.moe_router_topk,
            self.expert_ffn_size,
            self.moe_latent_size,
            self.moe_shared_expert_intermediate_size,
            self.moe_shared_expert_gate,
        )

    @property
    def predicted_share(self) -> float:
        """Return the share of tokens for which the model computes logits."""
        return self.mask_prob if self.architecture == "bert" else 1.0

    @property
    def num_token_types(self) -> int:
        """Return the number of rows of the token-type table: 2 for BERT's segments, 0 without a table."""
        return 2 if self.architecture == "bert" else 0

    @property
    def has_qkv_bias(self) -> bool:
        """Return whether queries, keys and values have a bias."""
        return self.add_bias_linear or self.add_qkv_bias

    @property
    def has_attention_output_bias(self) -> bool:
        """Return whether the output of attention has a bias."""
        return self.add_bias_linear or self.add_attention_output_bias

    @property
    def has_mamba_bias(self) -> bool:
        """Return whether the projections of Mamba-2 have a bias."""
        return self.add_bias_linear or self.mamba_bias

    @property
    def has_mlp_bias(self) -> bool:
        """Return whether the linear layers of the MLP have a bias."""
        return self.add_bias_linear or self.add_mlp_bias

    @property
    def ffn_size(self) -> int:
        """Return the width of the MLP, resolved."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        if self.is_gated:
            # Three matrices of width 8/3 h have as many weights as two of width 4 h.
            return round_up(-(-8 * self.hidden_size // 3), _GATED_FFN_MULTIPLE)
        return 4 * self.hidden_size

    @property
    def expert_ffn_size(self) -> int:
        """Return the width of one expert, resolved."""
        return self.ffn_size if self.moe_ffn_hidden_size is None else self.moe_ffn_hidden_size

    @property
    def head_dim(self) -> int:
        """Return the size of one head of queries and keys, resolved."""
        if self.multi_latent_attention:
            return self.qk_head_dim + self.qk_pos_emb_head_dim
        return self.hidden_size // self.num_attention_heads if self.kv_channels is None else self.kv_channels

    @property
    def value_dim(self) -> int:
        """Return the size of one head of values."""
        return self.v_head_dim if self.multi_latent_attention else self.head_dim

    def squared_score_divisor(self, head_dim: int) -> float:
        """Return --query-pre-attn-scalar, resolved: d by default, d^2 / B with muP's base head size B."""
        if self.query_pre_attn_scalar is not None:
            return self.query_pre_attn_scalar
        if self.mup_base_width is None or self.mup_base_head_dim is None:
            return head_dim
        return head_dim**2 / self.mup_base_head_dim

    @property
    def stage_output_size(self) -> int:
        """Return the features of each token that a pipeline stage sends to the next one.

        These are the hidden states and, with --hidden-size-per-layer-input, the embeddings for all layers.
        """
        return self.hidden_size + self.num_layers * (self.hidden_size_per_layer_input or 0)

    @property
    def width_ratio(self) -> float:
        """Return how many times wider the model is than the base model of muP; 1 without muP."""
        return 1.0 if self.mup_base_width is None else self.hidden_size / self.mup_base_width

    @property
    def num_kv_heads(self) -> int:
        """Return the number of key/value heads, resolved."""
        return self.num_attention_heads if self.num_query_groups is None else self.num_query_groups

    @property
    def num_positions(self) -> int:
        """Return the rows of the learned position table, or the longest context of a model without one."""
        if self.max_position_embeddings is not None:
            return self.max_position_embeddings
        is_scaled = self.position_embedding_type == "rope" and self.rope_scaling in ("llama3", "yarn")
        reached = self.original_max_position_embeddings * self.rope_scaling_factor if is_scaled else 0
        return max(self.seq_length, int(reached))


def round_up(value: int, multiple: int) -> int:
    """Return the least multiple that is not below the value."""
    return -(-value // multiple) * multiple


def padded_vocab_size(model: ModelConfig, tp: int) -> int:
    """Return the padded vocabulary size, a multiple of `tp`.

    Raises:
        UserError: `vocab_size` is unknown, or --pad-vocab-size-to is smaller.
    """
    if model.vocab_size is None:
        raise UserError("the vocabulary size is unknown: pass --vocab-size, or a tokenizer")
    if model.pad_vocab_size_to is not None:
        if model.pad_vocab_size_to < model.vocab_size:
            raise UserError(
                f"--pad-vocab-size-to {model.pad_vocab_size_to} is smaller than the vocabulary of "
                f"{model.vocab_size} tokens: pass at least {model.vocab_size}, or remove it"
            )
        return model.pad_vocab_size_to
    return round_up(model.vocab_size, math.lcm(model.make_vocab_size_divisible_by, tp))


def num_padding_rows(model: ModelConfig, tp: int) -> int:
    """Return the number of padding rows at the end of the padded vocabulary.

    Raises:
        UserError: see `padded_vocab_size`.
    """
    padded = padded_vocab_size(model, tp)
    assert model.vocab_size is not None  # otherwise padded_vocab_size raises
    return padded - model.vocab_size


CONVENTION = "model FLOPs, causal attention halved, recomputation not counted"
"""The convention for TFLOP/s and MFU, in plans and in training's log."""


def flops_per_token(model: ModelConfig, tp: int) -> float:
    """Return the floating-point operations of the whole model per token, forward and backward.

    By the convention of "model FLOPs", a multiply-add is two operations. Only GEMMs count, and backward
    counts twice the forward. Causal attention counts half of the scores, and with a window the scores within
    it. A recurrent layer counts its convolution, and its recurrence token by token. Of a layer's experts,
    those of one token count. Recomputation does not count. Logits count with the padded vocabulary, which
    depends on `tp`; in BERT they count for the predicted tokens only. A module of multi-token prediction
    counts as a layer, its projection and logits.
    This is the convention of Narayanan et al. 2021 (arXiv 2104.04473, appendix), without their recomputed
    forward, and with half of the attention scores as in FlashAttention-2 (arXiv 2307.08691, section 4.1).
    """
    hidden = model.hidden_size
    head = hidden * padded_vocab_size(model, tp) + (hidden * hidden if model.architecture == "bert" else 0)
    specs = _all_layers(model)
    attention = [spec.attention for spec in specs if spec.attention is not None]
    scores_and_context = sum(_features(spec) * mean_visible_keys(model, spec) for spec in attention)
    layers = sum(layer_weights(model, spec, active=True) for spec in specs)
    recurrences = sum(spec.recurrence.multiply_adds for spec in specs if spec.recurrence is not None)
    joining = 2 * hidden * hidden * model.mtp_num_layers
    joining += hidden * (model.hidden_size_per_layer_input or 0) * model.num_layers
    multiply_adds = layers + recurrences + joining + scores_and_context + head * _logits_per_token(model)
    return 3 * 2 * multiply_adds


def flops_per_token_by_convention(model: ModelConfig, tp: int) -> dict[str, float]:
    """Return the floating-point operations per token by each convention of the literature.

    `causal` is the convention of `flops_per_token`. `full_attention` counts all scores (Korthikanti et al.
    2022). `hardware` also counts the layers' forward that full recomputation repeats, whether or not the run
    recomputes (Narayanan et al. 2021, whose formula begins with 96 B s l h^2).
    """
    causal = flops_per_token(model, tp)
    attention = [spec.attention for spec in _all_layers(model) if spec.attention is not None]
    scores = 6 * sum(
        _features(spec) * (model.seq_length - mean_visible_keys(model, spec)) for spec in attention
    )
    logits = 6 * model.hidden_size * padded_vocab_size(model, tp) * _logits_per_token(model)
    full = causal + scores
    return {"causal": causal, "full_attention": full, "hardware": (full - logits) * 4 / 3 + logits}


def mean_visible_keys(model: ModelConfig, spec: AttentionSpec) -> float:
    """Return how many keys a query sees in the mean over a sample; half of them in causal attention.

    Documents are not considered.
    """
    if not model.is_causal:
        return model.seq_length
    most = model.seq_length if spec.window is None else min(spec.window + 1, model.seq_length)
    return most - most**2 / (2 * model.seq_length)


def _features(spec: AttentionSpec) -> int:
    """Return the number of features of the query heads and of the outputs of all heads of a layer."""
    return spec.num_heads * (spec.head_dim + spec.value_dim)


def _all_layers(model: ModelConfig) -> tuple[LayerSpec, ...]:
    """Return all layers, also those of multi-token prediction."""
    return tuple(map(model.layer_spec, range(model.num_layers + model.mtp_num_layers)))


def _logits_per_token(model: ModelConfig) -> float:
    """Return how many tokens the model predicts for each token of a sample."""
    return model.predicted_share + model.mtp_num_layers


def layer_weights(model: ModelConfig, spec: LayerSpec, *, active: bool = False) -> int:
    """Return the number of elements of a layer's matrices.

    Args:
        active: count of the experts only as many as each token has.
    """
    hidden, num_halves = model.hidden_size, 3 if model.is_gated else 2
    rows = (spec.ffn_size or 0) * num_halves
    rows += 2 * (model.hidden_size_per_layer_input or 0)  # of the gate of the layer's own embedding
    mixer = 0 if spec.mixer is None else spec.mixer.num_weights(hidden)
    experts = 0 if spec.experts is None else spec.experts.num_weights(hidden, num_halves, active=active)
    return mixer + experts + hidden * rows


def mtp_weights(model: ModelConfig) -> int:
    """Return the number of elements of the matrices of all modules of multi-token prediction."""
    layer = layer_weights(model, model.layer_spec(model.num_layers))
    return model.mtp_num_layers * (layer + 2 * model.hidden_size**2)
