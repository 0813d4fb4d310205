"""The attention core of layers with different communication types of context parallelism."""

from __future__ import annotations

from collections.abc import Mapping

from megalite.config import LayerKind, ModelConfig
from megalite.config.cp_comm_type import CpCommType
from megalite.kernels import VisibleKeys
from megalite.model.attention_core import AttentionCore, LayerCore, StageCore
from megalite.tensor_parallel.parameter_spec import LayerContext


class CoreByCommType(StageCore):
    """Shares positions and visible keys among cores that compute attention, one for each --cp-comm-type.

    Args:
        cores: computes attention of the layers with a communication type.
    """

    def __init__(
        self, config: ModelConfig, context: LayerContext, cores: Mapping[CpCommType, AttentionCore]
    ) -> None:
        super().__init__(config, context)
        self.cores = cores
        self.choice = "; ".join(
            f"with --cp-comm-type {comm_type}, {core.choice}" for comm_type, core in cores.items()
        )

    def for_layer(self, layer: int, kind: LayerKind) -> LayerCore:
        """Return the core of one layer, by its communication type."""
        self.add_window(kind.window)
        return self.cores[self.context.of_layer(layer).layer_cp_comm_type].for_layer(layer, kind)

    def translate(self, visible: VisibleKeys, s: int) -> VisibleKeys:
        """Return the keys in the representations of all cores whose layers have their window."""
        found = visible
        for core in self.cores.values():
            if visible.window in core.windows:
                own = core.translate(visible, s)
                found = found if own.bias is None else found._replace(bias=own.bias)
                found = found if own.blocks is None else found._replace(blocks=own.blocks)
        return found

    def exclude_from_graphs(self) -> None:
        """Exclude attention from the graphs of compiled layers, where a core cannot be compiled."""
        for core in self.cores.values():
            core.exclude_from_graphs()
