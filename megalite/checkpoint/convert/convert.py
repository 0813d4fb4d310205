"""Convert a model between programs' file formats, one tensor at a time: memory holds about one layer."""

from __future__ import annotations

import importlib.util
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from megalite.checkpoint.convert.formats import (
    KINDS,
    TARGETS,
    ConversionPlan,
    ConversionSource,
    MegaliteSource,
    kind_of,
    size_text,
    whole_folder,
)
from megalite.checkpoint.convert.hf_folder import HFFolder
from megalite.checkpoint.convert.model_check import (
    CheckInput,
    ModelOutputs,
    check_same,
    load_in_transformers,
    run_megalite,
    run_transformers,
)
from megalite.checkpoint.convert.model_settings import Settings, loses_digits
from megalite.frontends.huggingface.families import family_of
from megalite.utils.errors import UserError
from megalite.utils.log import log


class FoldedMup:
    """Model of a source with muP as the same model without muP.

    The logits of muP are those of the final norm's output, divided by the width ratio. So the norm's weight
    and bias are divided by it. A tied word embedding keeps its values. The scale of attention scores becomes
    --query-pre-attn-scalar.
    """

    def __init__(self, source: ConversionSource) -> None:
        self.source, self.progress, self.hugging_face = source, source.progress, source.hugging_face
        model = source.config.model
        divisor = model.squared_score_divisor(model.head_dim)
        folded = replace(
            model,
            mup_base_width=None,
            mup_base_head_dim=None,
            query_pre_attn_scalar=None if divisor == model.head_dim else divisor,
        )
        self.config = replace(source.config, model=folded)

    def dtype_of(self, name: str) -> torch.dtype:
        return self.source.dtype_of(name)

    def tensor(self, name: str) -> Tensor:
        full, model = self.source.tensor(name), self.source.config.model
        if not name.startswith("final_norm."):
            return full
        if name == "final_norm.weight" and model.zero_centered_norms:
            return (full + 1.0) / model.width_ratio - 1.0
        return full / model.width_ratio


@dataclass(frozen=True)
class Conversion:
    """Conversion.

    Attributes:
        source, target: names in KINDS and TARGETS. None detects the source from its folder, and makes the
            target the other format.
        iteration: iteration of a source that has several; None for the latest.
        max_bytes: maximum size of one of Hugging Face's files.
        settings: the user's changes to the model and tokenizer.
        check: compare what the models compute before and after the conversion.
        ema: convert the average of the weights, which only our own checkpoints can hold.
    """

    load: Path
    save: Path
    source: str | None = None
    target: str | None = None
    iteration: int | None = None
    max_bytes: int = 5 * 10**9
    settings: Settings = field(default_factory=Settings)
    check: bool = True
    ema: bool = False

    def run(self) -> None:
        """Convert, and log what was done.

        Raises:
            UserError: the source is damaged, of an unknown kind or a model that cannot be converted, or the
                target exists already or cannot be written, or the converted model computes something else.
        """
        kind = self.source or kind_of(self.load)
        target = self.target or ("hf" if kind == "megalite" else "megalite")
        source = original = self._open(kind)
        if target == "hf":
            if source.config.model.mup_base_width is not None:
                source = FoldedMup(original)
            family_of(source.config.model)
        plan = ConversionPlan(source, self.save, self.max_bytes)
        log.info(
            "%s (%s): %d tensors, %s in %s",
            *(self.load, KINDS[kind].title, len(plan.specs)),
            *(size_text(plan.num_bytes), source.config.model.params_dtype),
        )
        for dtype, count in Counter(source.dtype_of(name) for name in plan.specs).items():
            if loses_digits(dtype, plan.dtype):
                log.warning("%d tensors of %s are rounded to %s", count, dtype, plan.dtype)
        with whole_folder(self.save, plan.num_bytes) as folder:
            TARGETS[target](folder, plan)
            if self.check:
                self._check(kind, target, original, plan, folder)
        log.info("wrote %s", self.save)

    def _open(self, kind: str) -> ConversionSource:
        if not self.ema:
            return KINDS[kind].open(self.load, self.iteration, self.settings)
        if kind != "megalite":
            raise UserError(
                f"--ema: only checkpoints of megalite hold an average of the weights, and {self.load} is of "
                f"{KINDS[kind].title}: remove --ema"
            )
        return MegaliteSource(self.load, self.iteration, self.settings, ema=True)

    def _check(
        self, kind: str, target: str, source: ConversionSource, plan: ConversionPlan, folder: Path
    ) -> None:
        """Compare the source's model with the written one; at least one of them is transformers'.

        Args:
            folder: folder of the written files.
        """
        if "hf" not in (kind, target):
            log.info(
                "check: skipped, because %s to megalite leaves no model of another program to compare with",
                KINDS[kind].title,
            )
            return
        if importlib.util.find_spec("transformers") is None:
            log.warning("check: skipped, because it needs transformers: pip install transformers")
            return
        if target == "hf" and importlib.util.find_spec("accelerate") is not None:
            load_in_transformers(folder, plan.config.model)
        elif target == "hf":
            log.info("check: transformers does not load the folder by itself: pip install accelerate")
        check_input = CheckInput.of(plan.config.model, plan.dtype)
        model_type = HFFolder(self.load if kind == "hf" else folder).config.get("model_type")
        per_layer = family_of(plan.config.model, model_type).layer[0].per_layer

        def outputs_of(model: str, its_folder: Path, its_source: ConversionSource) -> ModelOutputs:
            if model == "hf":
                return run_transformers(its_folder, plan.config.model, check_input)
            return run_megalite(its_source, check_input, per_layer)

        written = source if target == "hf" else MegaliteSource(folder, None, Settings())
        flags = " ".join(self.settings.flags)
        check_same(
            outputs_of(kind, self.load, source),
            outputs_of(target, folder, written),
            check_input.tokens.shape[1],
            f", or the flags {flags}" if flags else "",
        )
