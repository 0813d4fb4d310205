"""Options of linear layers whose GEMMs have operands in 8 or 4 bits."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar, Literal, NamedTuple

from megalite.config.model.recurrence import HAS_DELTA_NET, HAS_MAMBA
from megalite.config.option import ABOVE_ONE, NOT_NEGATIVE, Conflicts, OnResume, Setting, option, other_than

Fp8Format = Literal["hybrid", "e4m3", "e2m1"]
Fp8Recipe = Literal["tensorwise", "blockwise", "mxfp8", "nvfp4"]


class Blocks(NamedTuple):
    """Sizes of the blocks of a recipe, whose elements have one scale.

    Attributes:
        size: elements along the dimension that a GEMM sums over.
        weight_rows: elements of a weight's block along its other dimension.
    """

    size: int
    weight_rows: int


FP8_BLOCKS = {"blockwise": Blocks(128, 128), "mxfp8": Blocks(32, 1), "nvfp4": Blocks(16, 16)}
"""Blocks by fp8_recipe; tensorwise has none."""

EXPERT_NOTES = {
    "tensorwise": "GEMMs in the dtype of the model; --fp8-recipe blockwise and mxfp8 round operands too",
    "nvfp4": "gradients are rounded to the nearest, and not at random",
}
"""Differences of the GEMMs of experts, by fp8_recipe, for the log."""


@dataclass(frozen=True)
class Fp8Options:
    """Which linear layers multiply numbers of 8 or 4 bits, and which numbers share a scale."""

    section: ClassVar[str] = "fp8"

    fp8_format: Fp8Format | None = option(
        None, "--fp4-format", sets={"--fp8": "hybrid", "--fp8-hybrid": "hybrid", "--fp8-e4m3": "e4m3"}
    )
    """Use 8-bit GEMMs, or with e2m1 4-bit ones, in the linear layers of a bf16 model. hybrid is e4m3 with
    gradients in e5m2."""
    fp8_recipe: Fp8Recipe = option(
        "tensorwise",
        "--fp4-recipe",
        only_with="fp8_format",
        missing={
            "delayed": "pass tensorwise, whose scales are of the tensor itself",
            "custom": "pass another",
        },
    )
    """Numbers that share a scale: tensorwise, those of a tensor; blockwise, 128 and 128 x 128 of a weight;
    mxfp8, 32; nvfp4 (of e2m1), 16 and 16 x 16 (docs/precision.md)."""
    fp8_wgrad: bool = option(True, only_with=Setting("fp8_recipe", tuple(FP8_BLOCKS)))
    """With recipes of blocks: round the operands of weight gradients too, except those of experts."""
    first_last_layers_bf16: bool = option(False, only_with="fp8_format")
    """Compute the first and last layers in 16 bits."""
    num_layers_at_start_in_bf16: int = option(1, allowed=NOT_NEGATIVE, only_with="first_last_layers_bf16")
    """Number of first layers in 16 bits."""
    num_layers_at_end_in_bf16: int = option(1, allowed=NOT_NEGATIVE, only_with="first_last_layers_bf16")
    """Number of last layers in 16 bits."""
    emulate: bool = option(False, on_resume=OnResume.LOGGED, only_with="fp8_format")
    """Round numbers as for 8-bit GEMMs, but multiply them in the dtype of the model, on any device. Slower
    than without fp8; with --params-dtype fp64 it verifies layouts."""
    fp8_weight_cache: bool = option(True, on_resume=OnResume.FREE, only_with="fp8_format")
    """Keep FP8 copies of weights for all microbatches of an iteration, 2 bytes per linear layer's weight."""
    fp8_param_gather: bool = option(False, on_resume=OnResume.FREE, only_with="fp8_format")
    """Gather linear layers' weights in 8 bits with --zero-stage 3: half the bytes and memory, and the same
    results."""

    conflicts: ClassVar[Conflicts] = {
        Setting("fp8_recipe", ("tensorwise",)): {
            "multi_latent_attention": (
                ": latents have no scale for a tensor; pass --fp8-recipe blockwise or mxfp8"
            ),
        },
        "fp8_format": {(HAS_DELTA_NET, HAS_MAMBA): ": its decays need more than 8 bits; remove it"},
        Setting("fp8_format", ("e2m1",)): {
            Setting("fp8_recipe", other_than("nvfp4")): (
                ": for 4 bits pass --fp4-format e2m1 --fp4-recipe nvfp4"
            ),
        },
        Setting("fp8_format", other_than("e2m1")): {
            Setting("fp8_recipe", ("nvfp4",)): ": for 4 bits pass --fp4-format e2m1 --fp4-recipe nvfp4",
        },
        Setting("fp8_recipe", tuple(FP8_BLOCKS)): {
            Setting("mlp_chunks", ABOVE_ONE): (
                ", which cuts a sample within blocks of its tokens: remove it, or pass --fp8-recipe "
                "tensorwise"
            ),
        },
        "fp8_param_gather": {
            Setting("fp8_recipe", other_than("tensorwise")): (
                ", whose blocks the ranks that share a weight may cut: remove it, or pass --fp8-recipe "
                "tensorwise"
            ),
            "compile": ", whose graphs round weights of 16 bits: remove one",
        },
    }

    @property
    def fp8_description(self) -> str:
        """Return the precision for the log: `8-bit GEMMs (hybrid, mxfp8, emulated)`."""
        bits, emulated = 4 if self.fp8_format == "e2m1" else 8, ", emulated" if self.emulate else ""
        return f"{bits}-bit GEMMs ({self.fp8_format}, {self.fp8_recipe}{emulated})"

    @property
    def depends_on_micro_batch(self) -> bool:
        """Return whether another micro-batch size rounds to other numbers: a scale is of a whole tensor."""
        return self.fp8_format is not None and self.fp8_recipe not in FP8_BLOCKS

    @property
    def fp8_copies(self) -> int:
        """Return the number of 8-bit copies of a weight: one if both its GEMMs have the same blocks."""
        blocks = FP8_BLOCKS.get(self.fp8_recipe)
        return 1 if blocks is not None and blocks.size == blocks.weight_rows else 2

    @property
    def fp8_options(self) -> Fp8Options | None:
        """Return these options alone; None without 8-bit GEMMs."""
        if self.fp8_format is None:
            return None
        return Fp8Options(**{each.name: getattr(self, each.name) for each in fields(Fp8Options)})

    def is_layer_in_fp8(self, number: int, num_layers: int) -> bool:
        """Return whether a layer of a model with this many has 8-bit GEMMs, by its number."""
        if self.fp8_format is None or not self.first_last_layers_bf16:
            return self.fp8_format is not None
        return self.num_layers_at_start_in_bf16 <= number < num_layers - self.num_layers_at_end_in_bf16
