"""A model of Megatron-LM or Megatron-DeepSpeed, of which tensor-parallel shards are known, as a source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.progress import Progress
from megalite.config import Config, ModelConfig
from megalite.convert.megatron_config import model_of, training_of, vocabulary_of
from megalite.convert.megatron_join import join
from megalite.convert.parameters import parameters_of
from megalite.convert.precision import precision_of
from megalite.convert.settings import Settings
from megalite.errors import UserError

_WORD, _OUTPUT = "embedding.word.weight", "output.weight"


@dataclass(frozen=True)
class Found:
    """What such a checkpoint holds.

    Attributes:
        where: the folder, for messages.
        shards: those of each tensor-parallel rank, by our name of the parameter.
        arguments: what the run was started with; None where the checkpoint does not say it, or `unread` why.
        version: of the checkpoint's form.
    """

    where: str
    shards: Mapping[str, Sequence[Tensor]]
    arguments: Mapping[str, Any] | None
    version: float
    iteration: int = 0
    unread: str = ""


class MegatronSource:
    """The parameters, put together one at a time.

    Raises:
        UserError: the model is none of ours, or tensors are missing or are too many.
    """

    what = "Megatron"
    hugging_face = None

    def __init__(self, found: Found, settings: Settings) -> None:
        self._found = found
        if _WORD not in found.shards:
            raise UserError(f"{found.where} lacks the word embeddings: are all of its files there?")
        self.config = settings.applied(_config_of(found, settings))
        self._specs = parameters_of(self.config.model)
        self._check_names()
        samples = (found.arguments or {}).get("consumed_train_samples", 0)
        is_count = type(samples) is int and 0 <= samples < 1 << 63
        self.progress = Progress(found.iteration, samples if is_count else 0)

    def dtype_of(self, name: str) -> torch.dtype:
        return self._found.shards[name][0].dtype

    def tensor(self, name: str) -> Tensor:
        """One of our tensors, without the vocabulary's padding."""
        shards = self._found.shards[name]
        return join(name, shards, self._specs[name], self.config.model, self._found.version)

    def _check_names(self) -> None:
        where, shards = self._found.where, self._found.shards
        if missing := sorted(self._specs.keys() - shards.keys()):
            raise UserError(f"{where} lacks {_some(missing)}: is the config another model's?")
        others = sorted(shards.keys() - self._specs.keys())
        if others == [_OUTPUT]:
            pairs = zip(shards[_OUTPUT], shards[_WORD], strict=True)
            if all(torch.equal(output, word) for output, word in pairs):
                return  # the copy of a tied table on the last stage
            raise UserError(
                f"{where} has an output layer that is not the word table: "
                "give --untie-embeddings-and-output-weights"
            )
        if others:
            raise UserError(f"{where} has parameters that the config's model has not: {_some(others)}")


def _config_of(found: Found, settings: Settings) -> Config:
    """The config that the arguments tell, or where there are none the one to be given by flags."""
    dtype = precision_of(found.shards[_WORD][0].dtype)
    rows = sum(shard.shape[0] for shard in found.shards[_WORD])
    if found.arguments is None or settings.describe_model:
        if not settings.describe_model:
            reason = found.unread or f"{found.where} does not say what model it is"
            raise UserError(f"{reason}; give the model's flags, as --num-layers or --preset")
        return Config(model=ModelConfig(vocab_size=rows, params_dtype=dtype))
    base = Config()
    fields = model_of(found.arguments, base.model)
    vocab_size = vocabulary_of(found.arguments) or rows
    return replace(
        base,
        model=replace(base.model, **fields, vocab_size=vocab_size, params_dtype=dtype),
        training=replace(base.training, **training_of(found.arguments)),
    )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
