"""Read and write layers with Mamba-2, and patterns of layers with one block.

Shapes: g groups, r heads of a group, p head size, d state size. The rows of our input projection are grouped,
``[g, 2 r p + 2 d + r, ...]``; theirs are the gates of all groups, then x, B, C and time steps.
"""

from __future__ import annotations

from typing import Any

from megalite.checkpoint.convert.families.family import SAME, Module, Transform
from megalite.checkpoint.convert.families.hf_settings import HFSettings
from megalite.checkpoint.convert.families.rows_by_kind import by_kind, with_kernel_dim
from megalite.config import LayerKind, ModelConfig
from megalite.errors import UserError

_LETTERS = {
    **{"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"},
    **{"mamba": "M", "attention": "*"},
}
"""Our letter for each of their names of a layer's block; the last two are of older files."""
_BLOCKS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
"""Their name for each of our letters that they have."""
_SIZES = {
    **{"num_heads": "mamba_num_heads", "head_dim": "mamba_head_dim"},
    **{"num_groups": "n_groups", "state_dim": "ssm_state_size"},
}
"""Their name for each of our sizes of Mamba-2."""


def read_pattern(hf: HFSettings) -> str:
    """Return our letters of the layers, which newer files have as a list of names."""
    blocks = hf.first("layers_block_type", "layer_types", "hybrid_override_pattern")
    letters = [_LETTERS.get(block, str(block)) for block in blocks]  # of older files, a string of our letters
    if unknown := sorted({*letters} - _BLOCKS.keys()):
        raise UserError(f"nemotron_h with layers {', '.join(unknown)} cannot be converted: M, *, - and E can")
    return "".join(letters)


def write_pattern(config: ModelConfig) -> dict[str, Any]:
    """Return their settings for the letters of the layers; a model without letters has other layers."""
    pattern = config.hybrid_override_pattern or "-" * config.num_layers
    return {
        "layers_block_type": [_BLOCKS.get(letter, "mlp") for letter in pattern],
        "num_hidden_layers": len(pattern),
    }


def read_mamba(hf: HFSettings) -> dict[str, Any]:
    """Return our fields for the layers with Mamba-2."""
    hf.require("nemotron_h", use_conv_bias=True, mamba_hidden_act="silu")
    return {
        **{f"mamba_{ours}": hf[theirs] for ours, theirs in _SIZES.items()},
        "mamba_conv_kernel": hf.get("conv_kernel", 4),
        "mamba_bias": hf.switch("use_bias", False),
        "mamba_min_time_step": hf.get("time_step_min", 0.001),
    }


def write_mamba(config: ModelConfig) -> dict[str, Any]:
    """Return their settings for the layers with Mamba-2."""
    sizes = {theirs: getattr(config.mamba, ours) for ours, theirs in _SIZES.items()}
    return {
        **sizes,
        "conv_kernel": config.mamba.kernel,
        "use_bias": config.has_mamba_bias,
        "time_step_min": config.mamba.min_time_step,
    }


def _has_mamba(kind: LayerKind) -> bool:
    return kind.mixer == "mamba"


def mamba_modules(block: str) -> tuple[Module, ...]:
    """Return the modules of a layer with Mamba-2.

    Args:
        block: their name of the block, with ``{}`` for the layer.
    """

    def module(kind: Any, ours: str, theirs: str, transform: Transform = SAME) -> Module:
        names = (f"{block}.{theirs}",)
        return Module(kind, f"layers.{{}}.mamba.{ours}", names, transform, only_in=_has_mamba)

    return (
        module("mamba", "in_projection", "in_proj", _PROJECTED),
        module("vector", "convolution.weight", "conv1d.weight", _KERNELS),
        module("vector", "convolution.bias", "conv1d.bias", _MIXED),
        *(module("vector", name, name) for name in ("A_log", "D", "dt_bias")),
        module("vector", "norm", "norm.weight"),
        module("mamba", "projection", "out_proj"),
    )


def _by_kind(kinds: slice) -> Transform:
    """Return the transform of rows of some kinds, of those of `MambaSizes.group_rows`."""
    return by_kind(lambda config: (config.mamba.num_groups, config.mamba.group_rows[kinds]))


_PROJECTED, _MIXED = _by_kind(slice(None)), _by_kind(slice(1, 4))
_KERNELS = with_kernel_dim(_MIXED)
