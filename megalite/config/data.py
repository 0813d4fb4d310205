"""Where the tokens come from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from megalite.config.flags import flag_of

TokenizerType = Literal[
    "byte",
    "GPT2BPETokenizer",
    "HuggingFaceTokenizer",
    "PretrainedFromHF",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "NullTokenizer",
]

_NEEDED_FILES: dict[TokenizerType, tuple[tuple[str, ...], ...]] = {
    "byte": (),
    "GPT2BPETokenizer": (("vocab_file",), ("merge_file",)),
    "HuggingFaceTokenizer": (("tokenizer_model", "tokenizer_name_or_path"),),
    "PretrainedFromHF": (("tokenizer_name_or_path", "tokenizer_model"),),
    "SentencePieceTokenizer": (("tokenizer_model",),),
    "GPTSentencePieceTokenizer": (("tokenizer_model",),),
    "Llama2Tokenizer": (("tokenizer_model",),),
    "NullTokenizer": (),
}
"""For each tokenizer the fields it cannot do without, one of each tuple."""

WEIGHTED_SPLIT_FIELDS = tuple(
    f"{split}_weighted_split_paths{path}" for split in ("train", "valid", "test") for path in ("", "_path")
)
CORPUS_FIELDS = (
    "data_path",
    "data_args_path",
    "train_data_path",
    "valid_data_path",
    "test_data_path",
    "per_split_data_args_path",
    *WEIGHTED_SPLIT_FIELDS,
)
"""Every field that names corpora."""

TOKENIZER_FIELDS = (
    "tokenizer_type",
    "tokenizer_model",
    "vocab_file",
    "merge_file",
    "tokenizer_name_or_path",
)
"""Every field that names the tokenizer or a file of it."""


@dataclass(frozen=True)
class DataConfig:
    """The corpus, its split and the tokenizer it was made with."""

    data_path: tuple[str, ...] = ()
    """Prefixes of .bin/.idx pairs, or weight prefix weight prefix ... for a blend."""
    data_args_path: str | None = None
    """File whose words stand for those of --data-path."""
    train_data_path: tuple[str, ...] = ()
    """As --data-path, for training alone and whole; with it validation and test are given apart too."""
    valid_data_path: tuple[str, ...] = ()
    """As --train-data-path, for validation."""
    test_data_path: tuple[str, ...] = ()
    """As --train-data-path, for the test after training."""
    per_split_data_args_path: str | None = None
    """JSON file with the words of the three flags before: {"train": [...], "valid": [...], "test": [...]}."""
    train_weighted_split_paths: tuple[str, ...] = ()
    """A quoted "NAME: WEIGHT BEGIN:END PREFIX, ..." to train on; BEGIN:END is a part of 0:1."""
    train_weighted_split_paths_path: str | None = None
    """File with the line that would follow --train-weighted-split-paths, quotes and all."""
    valid_weighted_split_paths: tuple[str, ...] = ()
    """As --train-weighted-split-paths; each of several groups is evaluated and told under its name."""
    valid_weighted_split_paths_path: str | None = None
    """File with the line that would follow --valid-weighted-split-paths, quotes and all."""
    test_weighted_split_paths: tuple[str, ...] = ()
    """As --valid-weighted-split-paths, for the test after training."""
    test_weighted_split_paths_path: str | None = None
    """File with the line that would follow --test-weighted-split-paths, quotes and all."""
    blend_by: Literal["tokens", "documents"] = "tokens"
    """What datasets given without weights are weighed by: their tokens, in whole samples, or documents."""
    data_cache_path: str | None = None
    """Folder for the orders of samples, built once; by default PREFIX/cache beside each large corpus."""
    fim_rate: float = 0.0
    """Share of the documents in training samples that are turned into prefix, suffix and middle."""
    fim_spm_rate: float = 0.5
    """Share of these documents that have their suffix first (SPM)."""
    fim_prefix_token: str = "<fim_prefix>"
    """Token of the vocabulary that marks a prefix."""
    fim_middle_token: str = "<fim_middle>"
    """Token of the vocabulary that marks a middle."""
    fim_suffix_token: str = "<fim_suffix>"
    """Token of the vocabulary that marks a suffix."""
    reset_position_ids: bool = False
    """Count positions from 0 in each document of a sample, not through the whole sample."""
    reset_attention_mask: bool = False
    """Let a token attend to its own document alone, not to those before it in the sample."""
    eod_mask_loss: bool = False
    """Leave out the loss where the input is an end-of-document token; the mean is over the other tokens."""
    mock_data: bool = False
    """Train on random tokens instead of a corpus, to try a config or measure its speed."""
    split: str = "969,30,1"
    """Weights of the train, validation and test parts of each dataset."""
    tokenizer_type: TokenizerType | None = None
    """The tokenizer that the corpus was made with; by default the one that the given files are for."""
    tokenizer_model: str | None = None
    """File of the tokenizer: a tokenizer.json or a SentencePiece .model."""
    vocab_file: str | None = None
    """GPT-2's vocab.json."""
    merge_file: str | None = None
    """GPT-2's merges.txt."""
    tokenizer_name_or_path: str | None = None
    """Folder of a Hugging Face tokenizer, or its tokenizer.json."""

    @property
    def document_options(self) -> tuple[str, ...]:
        """The fields that are on of those that do something at the end of a document."""
        names = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
        return tuple(name for name in names if getattr(self, name))

    def ways_given(self) -> list[tuple[str, ...]]:
        """The ways in which corpora are given, one tuple a way with its fields; a run has one of them."""
        ways = (
            ("data_path",),
            ("data_args_path",),
            ("train_data_path", "valid_data_path", "test_data_path"),
            ("per_split_data_args_path",),
            WEIGHTED_SPLIT_FIELDS,
        )
        given = [tuple(name for name in way if getattr(self, name)) for way in ways]
        return [way for way in given if way]

    @property
    def resolved_tokenizer_type(self) -> TokenizerType | None:
        """The tokenizer as given, or the one that the given files are for; None where there is neither."""
        if self.tokenizer_type is not None:
            return self.tokenizer_type
        if self.vocab_file is not None or self.merge_file is not None:
            return "GPT2BPETokenizer"
        if self.tokenizer_name_or_path is not None:
            return "HuggingFaceTokenizer"
        if self.tokenizer_model is not None:
            is_json = self.tokenizer_model.endswith(".json")
            return "HuggingFaceTokenizer" if is_json else "SentencePieceTokenizer"
        return None

    def files_missing_for(self, kind: TokenizerType) -> list[str]:
        """Flags of the files that this tokenizer lacks, each with its alternatives."""
        return [
            " or ".join(flag_of(name) for name in names)
            for names in _NEEDED_FILES[kind]
            if all(getattr(self, name) is None for name in names)
        ]


def split_weights(text: str) -> list[float]:
    """The words of --split as numbers; none where they are not one to three weights with a positive sum."""
    try:
        weights = [float(word) for word in text.split(",")]
    except ValueError:
        return []
    usable = len(weights) <= 3 and all(0 <= weight < math.inf for weight in weights) and sum(weights) > 0
    return weights if usable else []
