"""Name the part of a model that runs, so that the bytes that it saves for backward can be counted apart."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from megalite.model.layer import TransformerLayer
from megalite.model.stage import Stage
from megalite.recording.live_bytes import LiveBytes
from megalite.wrapping import wrap

RESIDUAL = "residual"
"""Sums of residual connections."""
MODULES = {"attention_norm": "layernorm", "mlp_norm": "layernorm"}
"""Parts of modules whose part is not their name in the layer."""
METHODS = {"attend": "core_attn", "activate": "mlp_act", "losses_of": "loss"}
"""Parts of methods that are wrap points. The names are those of --recompute-modules."""


def watch_parts(stage: Stage, live: LiveBytes) -> None:
    """Let `live` count the tensors of each part of a stage: call it before `apply_recompute`.

    A layer's parts are its modules. What else the layer computes counts as residual, or under the name of its
    class if it is a layer of your own.
    """
    for layer in stage.all_layers():
        _watch_module(layer, RESIDUAL if isinstance(layer, TransformerLayer) else type(layer).__name__, live)
        for name, module in layer.named_children():
            _watch_module(module, MODULES.get(name, name), live)
    if stage.is_first:
        _watch_module(stage.embedding, "embedding", live)
    if stage.is_last:
        _watch_module(stage.last_module, "head", live)
    for module in stage.modules():
        for method, part in METHODS.items():
            if hasattr(getattr(type(module), method, None), "communicates"):
                wrap(module, method, partial(_watched, live, part))


def _watch_module(module: nn.Module, part: str, live: LiveBytes) -> None:
    module.register_forward_pre_hook(lambda *_: live.enter(part))
    # Recomputation ends a forward with an exception.
    module.register_forward_hook(lambda *_: live.leave(), always_call=True)


def _watched(live: LiveBytes, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def watched(*args: Any, **kwargs: Any) -> Any:
        with live.part(part):
            return function(*args, **kwargs)

    return watched
