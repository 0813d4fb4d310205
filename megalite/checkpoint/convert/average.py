"""Average the weights of checkpoints of one model, one tensor at a time.

The mean of the last checkpoints of a run often has a lower loss than each of them (Izmailov et al. 2018,
arXiv 1803.05407; for pretraining Li et al. 2025, arXiv 2505.12082).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from megalite.checkpoint.compatibility import model_differences
from megalite.checkpoint.convert.formats import (
    ConversionPlan,
    MegaliteSource,
    find_checkpoint,
    size_text,
    whole_folder,
    write_megalite,
)
from megalite.checkpoint.convert.model_settings import Settings
from megalite.checkpoint.folder import iterations_in, list_checkpoints
from megalite.checkpoint.manifest import read_manifest
from megalite.config.model.transformer import ParamsDtype
from megalite.utils.errors import UserError
from megalite.utils.log import log


def last_checkpoints(folder: Path, count: int) -> list[Path]:
    """Return the last checkpoints of a run up to the one that `latest` names, oldest first.

    Raises:
        UserError: there are fewer.
    """
    try:
        newest, names = list_checkpoints(folder).names[:1], [*iterations_in(folder).values()]
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error.strerror}") from None
    past = names[: names.index(newest[0]) + 1] if newest and newest[0] in names else []
    if not past:
        raise UserError(f"{folder} holds no checkpoint of megalite")
    if len(past) < count:
        raise UserError(f"--last {count}: {folder} has only {len(past)} checkpoints: pass a smaller number")
    return [folder / name for name in past[-count:]]


def moving_average(count: int, decay: float) -> list[float]:
    """Return the weights of checkpoints, oldest first, in an exponential moving average.

    The average starts with the oldest, and each further one replaces a share of 1 - decay.
    """
    return [decay ** (count - 1), *((1.0 - decay) * decay ** (count - 1 - i) for i in range(1, count))]


def average(
    checkpoints: Sequence[Path], weights: Sequence[float], save: Path, dtype: ParamsDtype | None
) -> None:
    """Write a checkpoint with the weighted mean of checkpoints, for ``--finetune`` or a conversion.

    The mean is computed in fp32 at least, from main weights where a checkpoint has them. It gets the config
    and the progress of the last checkpoint.

    Args:
        checkpoints: folders of runs, of which the latest checkpoint is read, or of single checkpoints.
        weights: one per checkpoint; they are divided by their sum.
        save: a new folder.
        dtype: precision to save, such as ``fp32``; by default the last checkpoint's.

    Raises:
        UserError: a checkpoint cannot be read, or is of another model; nothing is written.
    """
    manifests = [read_manifest(find_checkpoint(folder, None)) for folder in checkpoints]
    dtypes: list[ParamsDtype] = [each.description["model"]["params_dtype"] for each in manifests]
    sources = [_most_precise(*each) for each in zip(checkpoints, dtypes, strict=True)]
    last = sources[-1]
    for folder, source in zip(checkpoints, sources, strict=True):
        if others := model_differences(source.config.model, last.config.model):
            values = ", ".join(f"{name} {one} and {other}" for name, one, other in others)
            raise UserError(f"{folder} and {checkpoints[-1]} hold different models: {values}")
    shares = [weight / math.fsum(weights) for weight in weights]
    for folder, source, share in zip(checkpoints, sources, shares, strict=True):
        log.info("%.4f of %s, iteration %d", share, folder, source.progress.iteration)
    mean = AveragedSource(sources, shares, dtype or dtypes[-1])
    plan = ConversionPlan(mean, save)
    with whole_folder(save, plan.num_bytes) as folder:
        write_megalite(folder, plan)
    size, precision = size_text(plan.num_bytes), mean.config.model.params_dtype
    log.info("wrote %s: %d tensors, %s in %s", save, len(plan.specs), size, precision)


class AveragedSource:
    """Weighted mean of several sources of one model, with the config of the last.

    Args:
        shares: weight of each source; their sum is 1.
        dtype: precision to save.
    """

    def __init__(
        self, sources: Sequence[MegaliteSource], shares: Sequence[float], dtype: ParamsDtype
    ) -> None:
        self.sources, self.shares, last = sources, shares, sources[-1]
        self.progress, self.hugging_face = last.progress, last.hugging_face
        model = dataclasses.replace(last.config.model, params_dtype=dtype)
        self.config = dataclasses.replace(last.config, model=model)

    def dtype_of(self, name: str) -> torch.dtype:
        return torch.promote_types(self.sources[0].dtype_of(name), torch.float32)

    def tensor(self, name: str) -> Tensor:
        mean = self.sources[0].tensor(name).to(self.dtype_of(name)).mul_(self.shares[0])
        for source, share in zip(self.sources[1:], self.shares[1:], strict=True):
            mean.add_(source.tensor(name).to(mean.dtype), alpha=share)
        return mean


def _most_precise(folder: Path, dtype: ParamsDtype) -> MegaliteSource:
    """Open a checkpoint to read its main weights where it has them."""
    flags = () if dtype in ("fp32", "fp64") else ("--params-dtype", "fp32")
    return MegaliteSource(folder, None, Settings(flags))
