"""MLPs and mixtures of experts: their options, and the spec of one layer's experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from megalite.config.option import (
    ABOVE_ONE,
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
    require_both,
)

PlainActivation = Literal["gelu", "gelu_exact", "relu", "squared_relu"]
LearnedActivation = Literal["xielu"]
GatedActivation = Literal["swiglu", "geglu", "geglu_exact", "quick_geglu", "reglu"]
Activation = Literal[PlainActivation, LearnedActivation, GatedActivation]

GATED_ACTIVATIONS = get_args(GatedActivation)
"""Activations whose input has two halves: a gate, and the values that it multiplies."""
_GATED: dict[str, Any] = {"same_shapes": True, "only_with": Setting("activation", GATED_ACTIVATIONS)}
RouterScores = Literal["softmax", "sigmoid"]
LoadBalancing = Literal["seq_aux_loss", "global_aux_loss", "aux_loss", "none"]
DropPolicy = Literal["probs", "position"]

HAS_EXPERTS = Setting("num_experts", ABOVE_ONE)
_EXPERTS: dict[str, Any] = {"only_with": HAS_EXPERTS, "in_megatron": False}
_ROUTER: dict[str, Any] = {"same_shapes": True, **_EXPERTS}


@dataclass(frozen=True)
class MLPOptions:
    """Options of the MLP."""

    section: ClassVar[str] = "mlp"

    ffn_hidden_size: int | None = option(None, allowed=SIZE)
    """Width of the MLP. By default 4 x hidden size; with a gated activation 8/3 x hidden size, rounded up
    to a multiple of 64."""
    kv_shared_ffn_hidden_size: int | None = option(None, allowed=SIZE, in_megatron=False)
    """Width of the MLP in layers of --num-kv-shared-layers. By default --ffn-hidden-size."""
    activation: Activation = option(
        "gelu",
        sets={"--swiglu": "swiglu", "--quick-geglu": "quick_geglu", "--squared-relu": "squared_relu"},
        same_shapes=get_args(PlainActivation),
        in_megatron=False,
    )
    """Activation of the MLP. gelu is the tanh approximation, gelu_exact the erf form; xielu has two learned
    numbers (Apertus); swiglu, reglu and all geglu are gated."""
    activation_func_clamp_value: float | None = option(None, allowed=POSITIVE, **_GATED)
    """Bound the gate of a gated activation from above, and the values that it multiplies from both sides
    (GPT-OSS: 7)."""
    glu_linear_offset: float = option(0.0, allowed=NOT_NEGATIVE, **_GATED)
    """Number to add to the values that the gate of a gated activation multiplies (GPT-OSS: 1)."""
    mlp_multipliers: tuple[float, ...] | None = option(None, allowed=POSITIVE, in_megatron=False, **_GATED)
    """Two factors, of the gate of a gated MLP before its activation, and of the MLP's output (Falcon-H1)."""
    add_mlp_bias: bool = option(False, only_with=Setting("add_bias_linear", (False,)), in_megatron=False)
    """Add a bias to the linear layers of the MLP even with --disable-bias-linear, as GPT-J does."""

    conflicts: ClassVar[Conflicts] = {
        "mlp_multipliers": {HAS_EXPERTS: ": experts have none; remove one of them"},
        Setting("activation", ("xielu",)): {
            HAS_EXPERTS: ": experts have no numbers of it; pass another activation",
            Setting("architecture", ("bert",)): ": BERT's head has no numbers of it; pass another activation",
        },
    }

    @property
    def is_gated(self) -> bool:
        """Return whether the first GEMM of the MLP computes two halves: the gate and the values."""
        return self.activation in GATED_ACTIVATIONS


@dataclass(frozen=True)
class ExpertOptions:
    """Options of experts and of their router."""

    section: ClassVar[str] = "experts"

    num_experts: int | None = option(None, allowed=SIZE, in_megatron=False)
    """Replace MLPs by this many experts each, of which a router selects some for each token
    (docs/experts.md). 1 is a dense model."""
    moe_router_topk: int = option(2, allowed=SIZE, **_ROUTER)
    """Number of experts for each token."""
    moe_ffn_hidden_size: int | None = option(None, allowed=SIZE, **_EXPERTS)
    """Width of one expert. By default that of the MLP."""
    moe_latent_size: int | None = option(None, allowed=SIZE, **_EXPERTS)
    """Width of the experts' inputs and outputs: each token is projected to it before the experts, and back
    after them (Nemotron 3). By default the hidden size."""
    moe_beside_mlp: bool = option(False, **_EXPERTS)
    """Let layers with experts have an MLP too: both outputs are normalized and added, and the router
    normalizes its input (Gemma 4)."""
    moe_layer_freq: tuple[int, ...] | None = option(None, allowed=NOT_NEGATIVE, **_EXPERTS)
    """Layers with experts: the first and every Nth after it. Or a list with 1 for each of them and 0 for each
    other layer, such as [0]+[1]*11. By default all layers."""
    moe_router_score_function: RouterScores = option("softmax", **_ROUTER)
    """Function of the router's logits."""
    moe_router_pre_softmax: bool = option(
        False, **{**_ROUTER, "only_with": (HAS_EXPERTS, Setting("moe_router_score_function", ("softmax",)))}
    )
    """Take the softmax over all experts (OLMoE), instead of over the selected ones (Mixtral)."""
    moe_router_num_groups: int | None = option(None, allowed=SIZE, **_ROUTER)
    """Groups of experts, of which a token's experts are in --moe-router-group-topk: those with the highest
    sums of their --moe-router-group-scores best scores (DeepSeek-V3)."""
    moe_router_group_topk: int | None = option(None, allowed=SIZE, **_ROUTER)
    """Number of groups of a token's experts."""
    moe_router_group_scores: int = option(
        2, allowed=SIZE, same_shapes=True, only_with="moe_router_num_groups", in_megatron=False
    )
    """Number of a group's highest scores whose sum is the group's: 2 in DeepSeek-V3, 1 in DeepSeek-V2."""
    moe_router_topk_scaling_factor: float = option(1.0, allowed=POSITIVE, **_ROUTER)
    """Factor of the weights of a token's experts."""
    moe_router_enable_expert_bias: bool = option(False, **_EXPERTS)
    """Add a bias to the scores that select experts, but not to their weights. Each update changes it to even
    out their use (DeepSeek-V3)."""
    moe_router_bias_update_rate: float = option(
        1e-3,
        allowed=NOT_NEGATIVE,
        on_resume=OnResume.SETTING,
        only_with="moe_router_enable_expert_bias",
        in_megatron=False,
    )
    """Amount by which an update changes the bias of each expert."""
    moe_shared_expert_intermediate_size: int | None = option(None, allowed=SIZE, **_EXPERTS)
    """Width of an MLP that computes all tokens beside the experts. By default there is none."""
    moe_shared_expert_gate: bool = option(False, **_EXPERTS)
    """Multiply the shared expert's output by the sigmoid of a gate, one number for each token (Qwen2-MoE)."""
    moe_router_load_balancing_type: LoadBalancing = option(
        "seq_aux_loss", on_resume=OnResume.SETTING, **_EXPERTS
    )
    """Loss against uneven use of the experts: of each sample (seq_aux_loss), by the loads of the last
    global batch (global_aux_loss), of each microbatch (aux_loss), or none."""
    moe_aux_loss_coeff: float = option(0.01, allowed=NOT_NEGATIVE, on_resume=OnResume.SETTING, **_EXPERTS)
    """Weight of that loss. Megatron-LM's default is 0."""
    moe_z_loss_coeff: float = option(0.0, allowed=NOT_NEGATIVE, on_resume=OnResume.SETTING, **_EXPERTS)
    """Weight of the squared log-sum-exp of the router's logits in the loss, which keeps them small."""
    moe_input_jitter_eps: float | None = option(
        None, allowed=OPEN_SHARE, on_resume=OnResume.SETTING, **_EXPERTS
    )
    """In training, multiply the router's input by random numbers from 1 - EPS to 1 + EPS."""
    moe_expert_capacity_factor: float | None = option(
        None, allowed=POSITIVE, on_resume=OnResume.SETTING, **_EXPERTS
    )
    """In training, limit an expert to this many times the mean number of tokens of an expert in a sample; it
    drops the others. By default no token is dropped."""
    moe_token_drop_policy: DropPolicy = option(
        "probs",
        on_resume=OnResume.SETTING,
        **{**_EXPERTS, "only_with": (HAS_EXPERTS, Setting("moe_expert_capacity_factor"))},
    )
    """Tokens that an expert keeps: those with the highest weights (probs), or the first ones (position)."""
    moe_router_force_load_balancing: bool = option(False, on_resume=OnResume.SETTING, **_EXPERTS)
    """In training, send tokens to random experts, for benchmarks: no expert has many more than others, and
    the model does not learn to route."""

    conflicts: ClassVar[Conflicts] = {
        **require_both("moe_router_num_groups", "moe_router_group_topk"),
        Setting("moe_imbalance", other_than(1.0)): {
            "moe_router_force_load_balancing": ", which makes tokens even: remove one"
        },
        "mup_base_width": {HAS_EXPERTS: ": muP has no rule for the router; remove it"},
        "moe_beside_mlp": {
            Setting("norm_position", other_than("sandwich")): (
                ", which does not normalize outputs of blocks: pass --norm-position sandwich, or remove it"
            ),
        },
        "moe_shared_expert_intermediate_size": {
            "moe_beside_mlp": ", whose MLP computes all tokens: remove one",
        },
        "moe_shared_expert_gate": {
            Setting("moe_shared_expert_intermediate_size", (None,)): ": pass it too, or remove the gate",
        },
        ("moe_shared_expert_gate", "moe_latent_size"): {
            ("add_bias_linear", "add_mlp_bias"): (
                ": it has no biases beside it; pass --disable-bias-linear without --add-mlp-bias"
            ),
        },
    }
    bounds: ClassVar[tuple[Bound, ...]] = (
        Bound("moe_router_topk", "num_experts"),
        Bound("moe_router_group_topk", "moe_router_num_groups"),
    )

    @property
    def has_experts(self) -> bool:
        """Return whether layers can have experts."""
        return self.num_experts is not None and self.num_experts > 1


@dataclass(frozen=True)
class ExpertsSpec:
    """Mixture of experts.

    Attributes:
        count: number of experts, e.
        top_k: experts of a token, k.
        width: width of an expert.
        latent_size: size of the experts' inputs and outputs; None for hidden states.
        shared_width: width of the shared expert; None without one.
        has_shared_gate: whether the shared expert's output has a gate.
    """

    count: int
    top_k: int
    width: int
    latent_size: int | None = None
    shared_width: int | None = None
    has_shared_gate: bool = False

    def num_weights(self, hidden_size: int, num_halves: int, *, active: bool) -> int:
        """Return the number of elements of the matrices, with the router's.

        Args:
            num_halves: matrices of an expert: 3 if it is gated, else 2.
            active: count of the experts only as many as each token has.
        """
        size = hidden_size if self.latent_size is None else self.latent_size
        experts = (self.top_k if active else self.count) * self.width * num_halves * size
        shared = (self.shared_width or 0) * num_halves + self.has_shared_gate
        return experts + hidden_size * (shared + self.count + 2 * (self.latent_size or 0))
