"""Read a model from a Hugging Face folder: config.json beside safetensors or pytorch_model.bin files.

The safetensors files may be shards of torch.distributed.checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from json import JSONDecodeError
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.convert.foreign_files import SHARDS, ShardedTensors, open_weights
from megalite.checkpoint.convert.model_settings import Settings, precision_of
from megalite.checkpoint.convert.tokenizer_files import tokenizer_in
from megalite.checkpoint.progress import TrainingProgress
from megalite.config import Config, ModelConfig
from megalite.frontends.huggingface.families import (
    all_entries,
    config_of,
    copied_names,
    end_entries,
    family_of,
    mtp_entries,
    recorded_of,
    rounding_note,
)
from megalite.frontends.huggingface.family import MTP_COUNT, VOCABULARY
from megalite.utils.errors import UserError, few
from megalite.utils.files import parse_json, read_regular
from megalite.utils.log import log

CONFIG_FILE = "config.json"
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
"""File names of a model in one file; ``.index.json`` is appended for several. The first existing is read."""
ORDER_WEIGHT = "cls.seq_relationship.weight"
"""A tensor of BERT's binary head."""
SECOND_NAMES = (
    "lm_head.weight",
    "embed_out.weight",
    "cls.predictions.decoder.weight",
    "cls.predictions.decoder.bias",
)
"""Second names of a tied word embedding, and of BERT's bias of the logits."""

_MAX_JSON_BYTES = 1 << 28
_NOT_WEIGHTS = re.compile(
    r"(.*\.)?(attn\.(bias|masked_bias)|rotary_emb\.inv_freq|embeddings\.(position|token_type)_ids)"
)
"""Masks and tables that old versions saved beside the weights."""


class HFFolder:
    """Tensors of a Hugging Face folder under their own names. Files are opened on first use.

    Attributes:
        files: the file that each tensor is in.

    Raises:
        UserError: it is not such a folder, or a file in it is missing or cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = _read_json(folder / CONFIG_FILE)
        self._opened: dict[str, Mapping[str, Tensor]] = {}
        self.files = self._weight_map()

    def tensor(self, name: str) -> Tensor:
        """Return a tensor as a view of its file."""
        weights = self._open(self.files[name])
        if name not in weights:
            raise UserError(f"{self.folder / self.files[name]} lacks {name}, which the index names")
        return weights[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensor(name).shape)

    def _open(self, file: str) -> Mapping[str, Tensor]:
        if file not in self._opened:
            self._opened[file] = open_weights(self.folder / file)
        return self._opened[file]

    def _weight_map(self) -> dict[str, str]:
        for file in WEIGHT_FILES:
            index = self.folder / f"{file}.index.json"
            if index.exists():
                return self._indexed(index)
            if (self.folder / file).exists():
                return dict.fromkeys(self._open(file), file)
        if any(self.folder.glob(SHARDS)):
            self._opened[SHARDS] = ShardedTensors(self.folder)
            return dict.fromkeys(self._opened[SHARDS], SHARDS)
        raise UserError(f"{self.folder} holds none of {', '.join(WEIGHT_FILES)}, and no .index.json of one")

    def _indexed(self, index: Path) -> dict[str, str]:
        files = _read_json(index).get("weight_map")
        if not isinstance(files, dict) or not all(
            isinstance(file, str) and Path(file).name == file for file in files.values()
        ):
            raise UserError(f"{index} is damaged: its weight_map must name files of the folder")
        missing = sorted({file for file in files.values() if not (self.folder / file).is_file()})
        if missing:
            raise UserError(f"{self.folder} lacks {', '.join(missing)}, which {index.name} names")
        return files


class HFSource:
    """Hugging Face folder as a source of our full tensors.

    Args:
        settings: the user's changes.

    Raises:
        UserError: we do not have the architecture, or the folder's tensors are missing or unknown.
    """

    progress = TrainingProgress()

    def __init__(self, folder: Path, settings: Settings) -> None:
        self._files = HFFolder(folder)
        if "quantization_config" in self._files.config:
            raise UserError(f"{folder} holds quantized weights: convert the model before its quantization")
        model = _model_of(folder, self._files.config)
        if model.num_layers > len(self._files.files):  # check before a list of all layers is made
            raise UserError(
                f"{folder} has {len(self._files.files)} tensors, and config.json says {model.num_layers} "
                "layers: does config.json belong to another model?"
            )
        self.hugging_face = recorded_of(self._files.config, settings.change_tokenizer)
        if (note := rounding_note(self._files.config)) is not None:
            log.warning("%s: %s", folder / CONFIG_FILE, note)
        self._model_type = self._files.config.get("model_type")
        self._names = {family_of(model, self._model_type).full_name(name): name for name in self._files.files}
        if model.architecture == "bert":  # the published config.json names a model without the second head
            model = replace(model, bert_binary_head=ORDER_WEIGHT in self._names)
        model = self._with_existing_mtp(model)
        base = replace(
            model,
            params_dtype=precision_of(self._dtype_of_first(model)),
            max_position_embeddings=model.seq_length,  # it stays if the model is trained on shorter samples
        )
        self.config = settings.applied(Config(model=base, data=tokenizer_in(folder)))
        self._entries = {entry.ours: entry for entry in all_entries(self.config.model, self._model_type)}
        self._check_names(folder)
        if not settings.set_vocab_size:
            self._check_rows(folder)

    def dtype_of(self, name: str) -> torch.dtype:
        return self._files.tensor(self._names[self._entries[name].theirs[0]]).dtype

    def tensor(self, name: str) -> Tensor:
        """Return one of our tensors; vocabulary tensors have only the rows of tokens."""
        entry = self._entries[name]
        theirs = {their: self._files.tensor(self._names[their]) for their in entry.theirs}
        if entry.transform is not VOCABULARY:
            return entry.from_hf(theirs, self.config.model)
        (table,) = theirs.values()
        return table[: self.config.model.vocab_size]

    def _with_existing_mtp(self, model: ModelConfig) -> ModelConfig:
        """Return the model without multi-token prediction if the folder lacks its weights.

        transformers does not write these weights, and keeps their number in config.json.
        """
        if not model.mtp_num_layers or next(mtp_entries(model, 0, self._model_type)).theirs[0] in self._names:
            return model
        log.warning(
            "%s lacks the weights of multi-token prediction, which %s %d in its config.json names: the model "
            "is read without it",
            *(self._files.folder, MTP_COUNT, model.mtp_num_layers),
        )
        return replace(model, mtp_num_layers=0)

    def _check_names(self, folder: Path) -> None:
        wanted = {name for entry in self._entries.values() for name in entry.theirs}
        if missing := sorted(wanted - self._names.keys()):
            raise UserError(f"{folder} lacks {few(missing)}: does config.json belong to another model?")
        if not self.config.model.untie_embeddings_and_output_weights:
            wanted.update(SECOND_NAMES)
        wanted.update(copied_names(self.config.model))
        others = [name for name in self._names.keys() - wanted if not _NOT_WEIGHTS.fullmatch(name)]
        if others:
            model_type = family_of(self.config.model, self._model_type).model_type
            raise UserError(
                f"{folder} has tensors that a {model_type} of this config does not have: "
                f"{few(sorted(others))}"
            )

    def _check_rows(self, folder: Path) -> None:
        """Refuse tables with more rows than the vocabulary: they may be padding, or tokens added later."""
        size = self.config.model.vocab_size
        assert size is not None
        for entry in self._entries.values():
            name = self._names[entry.theirs[0]]
            if entry.transform is VOCABULARY and (rows := self._files.shape(name)[0]) > size:
                raise UserError(
                    f"{folder}: {name} has {rows} rows, and config.json says vocab_size {size}: pass "
                    f"--vocab-size {rows} to keep them, or --vocab-size {size} to drop those above"
                )

    def _dtype_of_first(self, model: ModelConfig) -> torch.dtype:
        """Return the dtype of the word embedding, which most tensors share."""
        (name,) = end_entries(model, self._model_type)[0].theirs
        if name not in self._names:
            raise UserError(f"{self._files.folder} lacks {name}: does config.json belong to another model?")
        return self._files.tensor(self._names[name]).dtype


def _model_of(folder: Path, config: dict[str, Any]) -> ModelConfig:
    try:
        return config_of(config)
    except UserError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise UserError(f"{folder / CONFIG_FILE} is damaged: {error!r}") from None


def _read_json(file: Path) -> dict[str, Any]:
    try:
        found = parse_json(read_regular(file, _MAX_JSON_BYTES, follow=True), unique_keys=True)
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from None
    except JSONDecodeError:
        raise UserError(f"{file} is damaged: it is not JSON") from None
    except ValueError as error:
        raise UserError(f"{file} is damaged: {error}") from None
    if not isinstance(found, dict):
        raise UserError(f"{file} is damaged: it is not a JSON object")
    return found
