"""A trial axis: an entry in the table of axes alone, whose ranks only repeat each other."""

from __future__ import annotations

from dataclasses import replace

from megalite.config import ParallelConfig
from megalite.distributed.axes import MODEL, AxisEntry, MeshOptions, MeshSpec

TRIAL = AxisEntry("trial", "trial-parallel", "trial")
INNERMOST = replace(MODEL, axes=(*MODEL.axes, TRIAL))
OUTSIDE_TP = replace(MODEL, axes=(*MODEL.axes[:-1], TRIAL, MODEL.axes[-1]))
OUTERMOST = replace(MODEL, axes=(TRIAL, *MODEL.axes))

SECOND_TP = AxisEntry("tq", "second tensor-parallel", "tq", frozenset({"weights"}))
TWO_CUTTING_AXES = replace(
    MODEL, axes=(*MODEL.axes[:-1], SECOND_TP, MODEL.axes[-1]), groups=((SECOND_TP.name, "tp"),)
)
"""Parameters may be cut over tq and tp."""
EXPERTS = MeshSpec(
    "experts",
    (
        MODEL.axes[0],
        AxisEntry("ep", "expert-parallel", "ep", frozenset({"weights"})),
        AxisEntry("edp", "replicas of experts", "edp", frozenset({"replicas"}), takes_rest=True),
    ),
)
"""A second mesh: experts are cut over ranks that replicate other parameters, and the other way round."""


def with_trial(mesh: MeshOptions, mesh_spec: MeshSpec, size: int = 2) -> MeshOptions:
    """Return the options with a trial axis of this size."""
    return replace(mesh, table=(mesh_spec,), sizes={**mesh.sizes, TRIAL.name: size})


SECOND_DP = AxisEntry("dpx", "further data-parallel", "dpx", frozenset({"samples", "losses", "replicas"}))


class TwoDataAxesConfig(ParallelConfig):
    """A layout in which a second axis of two ranks, inside of tp, has all roles of dp."""

    @property
    def mesh(self) -> MeshOptions:
        mesh = super().mesh
        table = (replace(MODEL, axes=(*MODEL.axes, SECOND_DP)),)
        return replace(mesh, table=table, sizes={**mesh.sizes, SECOND_DP.name: 2})


class TrialConfig(ParallelConfig):
    """A layout in which two ranks stand in each place of another; `mesh_spec` says where the axis is."""

    mesh_spec = OUTSIDE_TP

    @property
    def mesh(self) -> MeshOptions:
        return with_trial(super().mesh, self.mesh_spec)


class OutermostTrialConfig(TrialConfig):
    """The same with the trial axis outermost."""

    mesh_spec = OUTERMOST
