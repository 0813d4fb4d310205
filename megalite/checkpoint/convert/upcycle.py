"""Make a model with experts from a dense checkpoint, with the same outputs, one tensor at a time.

Every expert is a copy of the layer's MLP (Komatsuzaki et al. 2023, arXiv 2212.05055), or one of G slices of
its width (He et al. 2024, arXiv 2410.07524). The slices of a copy have the same row of the router, so a token
goes to whole copies at the start.

Shapes: h hidden size, ffn width of the dense MLP, e experts, G slices of a copy (the granularity).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from torch import Tensor

from megalite.checkpoint.convert.formats import (
    ConversionPlan,
    MegaliteSource,
    size_text,
    whole_folder,
    write_megalite,
)
from megalite.checkpoint.convert.model_settings import Settings, check_model
from megalite.config import ModelConfig
from megalite.kernels import site_key
from megalite.utils.errors import UserError
from megalite.utils.log import log

_ROUTER = "router.weight"


@dataclasses.dataclass(frozen=True)
class ExpertSizes:
    """Number and sizes of the experts that replace an MLP.

    Attributes:
        granularity: number of slices of the MLP's width, each of which is an expert.
    """

    num_experts: int
    topk: int = 2
    granularity: int = 1

    def check(self, dense: ModelConfig) -> None:
        """Check that the experts can replace the MLPs of a model.

        Raises:
            UserError: they cannot.
        """
        slices, width = self.granularity, dense.ffn_size
        if dense.has_experts:
            raise UserError(f"the model has {dense.num_experts} experts already: pass a dense checkpoint")
        if dense.has_mlp_bias:
            raise UserError(
                "the model's MLPs have biases, which upcycling does not copy: pass a model without them"
            )
        if any(layer.ffn_size != width for layer in dense.layer_specs):
            raise UserError(
                "the model's layers differ in their MLPs: pass one whose layers all have the same"
            )
        if not dense.is_causal:
            raise UserError(f"the model is a {dense.architecture}: pass a causal language model")
        if width % slices:
            raise UserError(f"--granularity {slices} does not divide the MLP's width {width}: pass a divisor")
        for flag, number in (("--num-experts", self.num_experts), ("--moe-router-topk", self.topk)):
            if number % slices:
                raise UserError(
                    f"{flag} {number} is not divisible by --granularity {slices}, so a copy of the MLP would "
                    f"lack slices: pass {-(-number // slices) * slices}"
                )

    def expert_model(self, dense: ModelConfig) -> ModelConfig:
        """Return the config of the model with experts.

        The weights of a token's experts add up to 1. It needs each slice of the MLP once in all, so the
        weights are multiplied by the number of slices.
        """
        return dataclasses.replace(
            dense,
            num_experts=self.num_experts,
            moe_router_topk=self.topk,
            moe_ffn_hidden_size=dense.ffn_size // self.granularity,
            moe_router_topk_scaling_factor=float(self.granularity),
        )


def upcycle(checkpoint: Path, sizes: ExpertSizes, save: Path, seed: int) -> None:
    """Write a checkpoint of a model with experts whose outputs are those of a dense checkpoint.

    Args:
        checkpoint: folder of a run, of which the latest checkpoint is read, or of a single checkpoint.
        save: a new folder.
        seed: seed of the routers' weights.

    Raises:
        UserError: the checkpoint cannot be read, or its model cannot have such experts; nothing is written.
    """
    dense = MegaliteSource(checkpoint, None, Settings())
    sizes.check(dense.config.model)
    source = UpcycledSource(dense, sizes, seed)
    plan, model = ConversionPlan(source, save), source.config.model
    with whole_folder(save, plan.num_bytes) as folder:
        write_megalite(folder, plan)
    log.info(
        *("wrote %s: %d experts of width %d in each layer, %s in %s", save, sizes.num_experts),
        *(model.expert_ffn_size, size_text(plan.num_bytes), model.params_dtype),
    )


class UpcycledSource:
    """Dense model as one with experts.

    Raises:
        ConfigError: the model cannot have such experts.
    """

    hugging_face = None

    def __init__(self, dense: MegaliteSource, sizes: ExpertSizes, seed: int) -> None:
        self.dense, self.sizes, self.seed, self.progress = dense, sizes, seed, dense.progress
        self.config = dataclasses.replace(dense.config, model=sizes.expert_model(dense.config.model))
        check_model(self.config.model)

    def dtype_of(self, name: str) -> torch.dtype:
        return self.dense.dtype_of(
            f"{name.removesuffix(_ROUTER)}up.weight" if self._is_router(name) else name
        )

    def tensor(self, name: str) -> Tensor:
        if self._is_router(name):
            return self._router(name)
        if name.endswith(".mlp.up.weight"):
            return self._experts(self.dense.tensor(name), dim=-2)
        if name.endswith(".mlp.down.weight"):
            return self._experts(self.dense.tensor(name), dim=-1)
        return self.dense.tensor(name)

    def _is_router(self, name: str) -> bool:
        return name.endswith(f".mlp.{_ROUTER}")

    def _experts(self, weight: Tensor, dim: int) -> Tensor:
        """Return the experts ``[e, ...]`` of a weight of the MLP, whose width is in `dim`."""
        slices = torch.stack(weight.chunk(self.sizes.granularity, dim))  # [G, ...]
        num_copies = self.sizes.num_experts // self.sizes.granularity
        return slices.repeat(num_copies, *[1] * weight.dim())

    def _router(self, name: str) -> Tensor:
        """Return random rows ``[e, h]``, one for each copy of the MLP."""
        model, slices = self.config.model, self.sizes.granularity
        generator = torch.Generator().manual_seed(site_key(self.seed, name))
        shape = (self.sizes.num_experts // slices, model.hidden_size)
        rows = torch.randn(shape, generator=generator, dtype=torch.float64) * model.init_method_std
        return rows.to(self.dtype_of(name)).repeat_interleave(slices, dim=0)
