"""The MLP: its options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from megalite.config.option import (
    NOT_NEGATIVE,
    POSITIVE,
    SIZE,
    Setting,
    option,
)

PlainActivation = Literal["gelu", "gelu_exact", "relu", "squared_relu"]
GatedActivation = Literal["swiglu", "geglu", "geglu_exact", "quick_geglu", "reglu"]
Activation = Literal[PlainActivation, GatedActivation]

GATED_ACTIVATIONS = get_args(GatedActivation)
"""Activations whose input has two halves: a gate, and the values that it multiplies."""
_GATED: dict[str, Any] = {"same_shapes": True, "only_with": Setting("activation", GATED_ACTIVATIONS)}


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
    """Activation of the MLP. gelu is the tanh approximation, gelu_exact the erf form; swiglu, geglu (Gemma),
    geglu_exact, quick_geglu (GPT-OSS) and reglu are gated."""
    activation_func_clamp_value: float | None = option(None, allowed=POSITIVE, **_GATED)
    """Bound the gate of a gated activation from above, and the values that it multiplies from both sides
    (GPT-OSS: 7)."""
    glu_linear_offset: float = option(0.0, allowed=NOT_NEGATIVE, **_GATED)
    """Number to add to the values that the gate of a gated activation multiplies (GPT-OSS: 1)."""
    add_mlp_bias: bool = option(False, only_with=Setting("add_bias_linear", (False,)), in_megatron=False)
    """Add a bias to the linear layers of the MLP even with --disable-bias-linear, as GPT-J does."""

    @property
    def is_gated(self) -> bool:
        """Return whether the first GEMM of the MLP computes two halves: the gate and the values."""
        return self.activation in GATED_ACTIVATIONS
